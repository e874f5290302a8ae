"""The figures that `pliant reproduce` knows. Each is a module of its own: run -> result.json -> table and plot.

To add one, write its module with `run`, `table` and `plot` in its paper's folder, list it in FIGURES, say what is known of it
in `facts`, and which of its numbers stand beside the paper's in `headlines`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from pliant.errors import ConfigError
from pliant.machine import Json, machine
from pliant_repro.bench.stats import Summary
from pliant_repro.profiles import PROFILES

Say = Callable[[str], None]
MODELS = ("shufflenetv2", "resnet50", "vgg19", "neumf", "bert", "electra", "swin")
SCALES = ("tiny", "small", "paper")
"""What `zoo` has, known without torch."""
USUAL = tuple(name for name in MODELS if name != "electra")
"""For what is measured of every model: ELECTRA's encoder is BERT's, and is left to --full."""
PACED = tuple(PROFILES)
"""What the figures of P3 have, whose models only wait where others compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How much of a figure to run, and on what."""

    quick: bool = False
    """As little as shows that it works: some 20 s on 2 cores."""
    full: bool = False
    """As long as the artifact runs it."""
    steps: int = 0
    """Steps of each stage or series; 0: as the figure has it."""
    models: tuple[str, ...] = ()
    """Of the zoo, or of P3's; empty: as the figure has it."""
    scale: str = ""
    """tiny, small or paper; empty: by the device."""
    device: str = ""
    """cpu or cuda; empty: what there is."""
    data: str = ""
    """Where the data set of the published experiment lies; empty: a small one that needs no download."""
    parts: str = ""
    """A folder where long experiments leave what is done of them, and find it when they are run again; empty: nowhere."""
    say: Say = lambda text: None
    """Told what happens now."""

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ConfigError("--quick and --full: use one of them")
        if self.steps < 0:
            raise ConfigError(f"--steps {self.steps}: use 1 or more, or leave it out")
        for name in self.models:
            if name not in PACED:
                check_model(name)
        if self.scale:
            check_scale(self.scale)
        if self.device not in ("", "cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r} is unknown: use cpu or cuda")

    def choose_steps(self, quick: int, usual: int, full: int) -> int:
        return self.steps or (quick if self.quick else full if self.full else usual)

    def choose_models(
        self, quick: Sequence[str], usual: Sequence[str], known: Sequence[str] = MODELS
    ) -> tuple[str, ...]:
        for name in self.models:
            if name not in known:
                raise ConfigError(f"--models {name}: this figure has {', '.join(known)}")
        return self.models or tuple(quick if self.quick else usual)

    def to_json(self) -> Json:
        """What makes a result another one: the `args` of the one form."""
        return {
            "quick": self.quick, "full": self.full, "steps": self.steps, "models": list(self.models),
            "scale": self.size, "device": self.where, "data": self.data,
        }  # fmt: skip

    @property
    def where(self) -> str:
        return self.device or default_device()

    @property
    def size(self) -> str:
        return self.scale or ("tiny" if self.quick else "paper" if self.where != "cpu" else "small")


def check_model(name: str) -> str:
    """`name`, if there is such a model."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not in the zoo: use one of {', '.join(MODELS)}")
    return name


def check_scale(name: str) -> str:
    """`name`, if there is such a scale."""
    if name not in SCALES:
        raise ConfigError(f"scale {name!r} is unknown: use one of {', '.join(SCALES)}")
    return name


def default_device() -> str:
    """cuda where there is a GPU and a torch for it. Without importing torch, which takes seconds."""
    try:
        for_cpu = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        for_cpu = True
    return "cuda" if Path("/dev/nvidiactl").exists() and not for_cpu else "cpu"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class TableRows:
    """What is printed of a result."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class FigureModule(Protocol):
    """What the module of a figure has."""

    def run(self, options: Options) -> Json: ...

    def table(self, result: Json) -> TableRows: ...

    def plot(self, result: Json, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """One experiment of the artifact documents."""

    name: str
    about: str
    source: str = ""
    """Its module in this package; empty: as its name says, `kungfu.fig4` for kungfu-fig4."""

    @property
    def module(self) -> FigureModule:
        """Loaded when it is first used."""
        source = self.source or self.name.replace("-", ".", 1).replace("-", "_")
        return cast(FigureModule, importlib.import_module(f"pliant_repro.figures.{source}"))


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("easyscale-fig9", "the same loss and the same bits as DDP, through changes of workers and machines"),
        Figure("easyscale-fig10", "memory and throughput of 1 to 16 replicas on one device, beside packed workers"),
        Figure("easyscale-fig11", "what switching between replicas costs"),
        Figure("easyscale-fig12", "what determinism costs"),
        Figure("easyscale-fig13", "what copying and summing gradients costs, beside DDP"),
        Figure("easyscale-fig14", "completion time and makespan of a list of jobs on 64 GPUs, simulated, by policy"),
        Figure("easyscale-fig15", "GPUs in use over time, with and without mixing their types, simulated"),
        Figure("kungfu-fig4", "batch sizes that follow the gradient's noise: accuracy over time, beside fixed ones"),
        Figure("kungfu-fig5", "other traffic at the root of a star, and the topology that avoids it; needs root"),
        Figure("kungfu-fig6", "workers are added as long as they are worth it: where that stops, beside all sizes"),
        Figure("kungfu-fig7", "how long a resize takes, 1 -> 2 and 2 -> 1"),
        Figure("kungfu-fig8", "what it costs to monitor the gradients' noise scale and variance"),
        Figure("kungfu-fig9", "throughput per worker on 1 to 32 hosts, beside DDP and Open MPI; needs root"),
        Figure("kungfu-fig10", "NCCL in one launch order that all ranks agree on"),
        Figure(
            "oort-time-to-accuracy",
            "participants by what they teach and how fast they are, beside random ones, simulated",
        ),
        Figure("oort-ablation", "Oort without its penalty, its pacer, its exploration, simulated"),
        Figure("oort-1300", "rounds of 1,300 participants, over-committed", "oort.rounds_of_1300"),
        Figure("oort-testing", "clients that test a model: by deviation, and by samples of each class"),
        Figure("p3-fig7", "throughput over bandwidth: baseline, slicing, priority; needs root"),
        Figure("p3-fig9", "how busy the network is, baseline beside priority; needs root"),
        Figure("p3-fig10", "throughput over machines, baseline beside priority; needs root"),
        Figure("p3-fig12", "throughput over the size of a slice; needs root"),
    )
}


def find(names: Sequence[str]) -> list[Figure]:
    """The figures with these names; `all` is every one of them."""
    unknown = [name for name in names if name not in FIGURES and name != "all"]
    if unknown:
        raise ConfigError(f"reproduce {' '.join(unknown)}: unknown; there are {', '.join(FIGURES)}, and all")
    return list(FIGURES.values()) if "all" in names else [FIGURES[name] for name in dict.fromkeys(names)]


def form(
    name: str,
    options: Options,
    *,
    ours: Mapping[str, object],
    paper: Mapping[str, object],
    cells: Sequence[Mapping[str, object]],
    complaints: Sequence[str],
    remarks: Sequence[str],
    **more: object,
) -> Json:
    """The one form of a result. It is ok when there is no complaint: when the figure's claim holds here, too."""
    peers = {"paper": {"median_s": None, "iqr_s": None, "speedup": None, **paper}}
    return {
        "bench": name,
        "args": options.to_json(),
        "ours": {"median_s": None, "iqr_s": None, **ours},
        "peers": peers,
        "bound": None,
        "cells": list(cells),
        **more,
        "machine": machine(),
        "ok": not complaints,
        "remarks": [*(f"the claim does not hold: {text}" for text in complaints), *remarks],
    }


def timed(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and spread in the names of the one form; nulls where nothing was measured."""
    return dict(Summary.of(seconds).to_json()) if seconds else {"median_s": None, "iqr_s": None}


def save(result: Json, path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def load(path: Path, name: str) -> Json:
    """A result that `save` has written."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; run `pliant reproduce {name}` first") from None
    if not isinstance(result, dict) or result.get("bench") != name:
        raise ConfigError(f"{path} is no result of {name}: run `pliant reproduce {name}` again")
    return cast(Json, result)
