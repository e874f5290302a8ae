"""The form of a figure: the options it is run with, the base class it extends, and the one form of its result.

A figure is a class with what is particular to it: how it is run, which claim is judged, the paper's numbers, its table and
its picture. `catalog.FIGURES` lists all of them; `report` keeps their results and writes the page about them.
"""

from __future__ import annotations

import importlib.metadata
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pliant.cli import plotting
from pliant.errors import ConfigError
from pliant.machine import machine
from pliant_repro.figures.formatting import Result
from pliant_repro.profiles import PROFILES, WORKLOAD_SCALES, WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
Headline = tuple[str, str, str]
"""The number that a figure is known for: (what it is, published, measured)."""
USUAL_MODELS = tuple(name for name in WORKLOADS if name != "electra")
"""Models of figures that measure every model. ELECTRA's encoder is BERT's, so only --full adds it."""
PAPERS = {"easyscale": "EasyScale, SC'23", "kungfu": "KungFu, OSDI'20", "oort": "Oort, OSDI'21", "p3": "P3, MLSys'19"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Size and device of a run."""

    quick: bool = False
    """Run as little as shows that the figure works: about 20 s on 2 cores."""
    full: bool = False
    """Run as long as the paper's artifact does."""
    steps: int = 0
    """Steps of each stage or series. 0 means the figure's own number."""
    models: tuple[str, ...] = ()
    """Models to measure. Empty means the figure's own choice."""
    scale: str = ""
    """Size of the models: tiny, small or paper. Empty means by the device."""
    device: str = ""
    """cpu or cuda. Empty means cuda where there is a GPU."""
    data: str = ""
    """Folder of the published data set. Empty means a small data set that needs no download."""
    say: Callable[[str], None] = lambda text: None
    """Called with a line about what is running now."""

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ConfigError("--quick and --full: use one of them")
        if self.steps < 0:
            raise ConfigError(f"--steps {self.steps}: use 1 or more, or leave it out")
        for name in self.models:
            if name not in (*WORKLOADS, *PROFILES):
                raise ConfigError(f"--models {name}: unknown; use some of {', '.join((*WORKLOADS, *PROFILES))}")
        if self.scale not in ("", *WORKLOAD_SCALES):
            raise ConfigError(f"--scale {self.scale!r} is unknown: use one of {', '.join(WORKLOAD_SCALES)}")
        if self.device not in ("", "cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r} is unknown: use cpu or cuda")

    def choose(self, quick: T, usual: T, full: T) -> T:
        """Return the value that belongs to the size of this run."""
        return quick if self.quick else full if self.full else usual

    def choose_steps(self, quick: int, usual: int, full: int) -> int:
        return self.steps or self.choose(quick, usual, full)

    def choose_models(
        self, quick: Sequence[str], usual: Sequence[str], known: Sequence[str] = WORKLOADS
    ) -> tuple[str, ...]:
        for name in self.models:
            if name not in known:
                raise ConfigError(f"--models {name}: this figure has {', '.join(known)}")
        return self.models or tuple(quick if self.quick else usual)

    @property
    def where(self) -> str:
        return self.device or default_device()

    @property
    def size(self) -> str:
        return self.scale or ("tiny" if self.quick else "paper" if self.where != "cpu" else "small")

    def to_json(self) -> Result:
        """Return the options that change a result. They are the `args` of a result."""
        return {
            "quick": self.quick, "full": self.full, "steps": self.steps, "models": list(self.models),
            "scale": self.size, "device": self.where, "data": self.data,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableRows:
    """The table of a result, as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Points = tuple[Sequence[float], Sequence[float | None], str, str | None]
"""A line of a picture: x, y, matplotlib's style, colour (None means the next one)."""


@dataclass(kw_only=True, slots=True)
class Panel:
    """One panel of a picture: lines or bars, and how its axes look."""

    title: str = ""
    x: str = ""
    y: str = ""
    lines: Mapping[str, Points] = field(default_factory=dict)
    """Lines by label. A label that begins with an underscore is not shown in the legend."""
    bars: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    labels: Sequence[str] = ()
    """Names of the groups of bars. Bars whose label begins with `paper` are grey."""
    levels: Sequence[float] = ()
    """Heights of dotted lines across the panel."""
    marks: Sequence[float] = ()
    """Places of dotted lines from top to bottom."""
    scale: str = ""
    """linear by default; log: logarithmic height; log-x: logarithmic width; log2: both, in powers of two."""
    limits: tuple[float | None, float | None] | None = (0, None)
    """Least and greatest height; None means as matplotlib chooses."""

    def draw(self, axes: Axes) -> None:
        for label, (xs, ys, style, colour) in self.lines.items():
            if len(xs):
                values = [float("nan") if y is None else y for y in ys]
                axes.plot(list(xs), values, style, label=label, color=colour, markersize=4, linewidth=1)
        if self.bars:
            greys = {label: plotting.PAPER for label in self.bars if label.startswith("paper")}
            plotting.bars(axes, self.labels, self.bars, greys)
        for level in self.levels:
            axes.axhline(level, color=plotting.PAPER, linestyle=":")
        for mark in self.marks:
            axes.axvline(mark, color=plotting.PAPER, linestyle=":")
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        if self.scale == "log":
            plotting.log_heights(axes)
        elif self.scale == "log2":
            plotting.log_axes(axes)
        elif self.limits is not None:
            axes.set_ylim(*self.limits)
        if self.scale == "log-x":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if any(not label.startswith("_") for label in (*self.lines, *self.bars)):
            axes.legend(fontsize=8)


class Figure(ABC):
    """Base class of the figures. A subclass sets the class variables and writes `run`, `table`, `panels` and `headline`."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One line about what the figure shows."""
    usual_s: ClassVar[float]
    """Seconds of a run in default size on 2 cores."""
    paper: ClassVar[Mapping[str, Any]]
    """The published numbers."""
    needs_lab: ClassVar[bool] = False
    """Whether the figure needs network namespaces, and so root."""
    caveats: ClassVar[tuple[str, ...]]
    """Which published numbers cannot be reached here, and why. True of every run; also shown below the picture."""
    title: ClassVar[str]
    """Title of the picture."""

    @abstractmethod
    def run(self, options: Options) -> Result: ...

    @abstractmethod
    def table(self, result: Result) -> TableRows: ...

    @abstractmethod
    def panels(self, result: Result) -> Sequence[Panel]:
        """Return the panels of the picture."""

    @abstractmethod
    def headline(self, result: Result) -> Headline: ...

    def plot(self, result: Result, path: Path) -> None:
        """Draw the picture; its format is that of the file's name."""
        panels, args = self.panels(result), result["args"]
        caption = f"Device {args['device']}, scale {args['scale']}. {'. '.join(self.caveats)}."
        with plotting.picture(path, self.title, caption, len(panels)) as places:
            for axes, panel in zip(places, panels, strict=True):
                panel.draw(axes)

    @property
    def source(self) -> str:
        """Name of the paper."""
        return PAPERS[self.name.partition("-")[0]]

    def result(
        self,
        options: Options,
        *,
        ours: Mapping[str, Any],
        cells: Sequence[Mapping[str, Any]],
        complaints: Sequence[str],
        remarks: Sequence[str],
        **more: Any,
    ) -> Result:
        """Return a result in the one form. It is ok if there is no complaint: the figure's claim then holds here, too.

        A run that is too short to judge the claim passes `judged=False`.
        """
        return {
            "bench": self.name,
            "args": options.to_json(),
            "ours": {"median_s": None, "iqr_s": None, **ours},
            "peers": {"paper": {"median_s": None, "iqr_s": None, "speedup": None, **self.paper}},
            "bound": None,
            "cells": list(cells),
            **more,
            "machine": machine(),
            "ok": not complaints,
            "remarks": [*(f"the claim does not hold: {text}" for text in complaints), *remarks],
        }


def default_device() -> str:
    """Return cuda where there is a GPU and a torch for it. Does not import torch, which takes seconds."""
    try:
        for_cpu = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        for_cpu = True
    return "cuda" if Path("/dev/nvidiactl").exists() and not for_cpu else "cpu"


# --- results as files ---


def save(result: Result, path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def load(path: Path, name: str) -> Result:
    """Return a result that `save` has written.

    Raises:
        ConfigError: the file cannot be read, or is no result of figure `name`.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; run `pliant reproduce {name}` first") from None
    if not isinstance(result, dict) or result.get("bench") != name:
        raise ConfigError(f"{path} is no result of {name}: run `pliant reproduce {name}` again")
    return cast(Result, result)
