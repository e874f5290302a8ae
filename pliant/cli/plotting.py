"""Drawing of figures: a picture is panels side by side with a caption below. Matplotlib is loaded when one is drawn."""

from __future__ import annotations

import contextlib
import importlib.util
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = "0.6"
"""The colour of other people's numbers: grey."""


def check() -> None:
    """Raises ConfigError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib: pip install 'pliant[experiments]', or ask for none (without --plot, or with --no-plot)"
        )


@contextlib.contextmanager
def picture(path: Path, title: str, caption: str, panels: int = 1) -> Iterator[list[Axes]]:
    """Panels to draw into; written to `path` at the end."""
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 4.6 * panels), 4.8), dpi=120, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    yield list(axes)
    figure.supxlabel(textwrap.fill(caption, 45 + 50 * panels), fontsize=8, color="0.35")
    figure.savefig(path)


def bars(
    axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Mapping[str, str]
) -> None:
    """A group of bars for each label; what was not measured has none."""
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        heights = [float("nan") if value is None else value for value in values]
        axes.bar(places, heights, width, label=name, color=colours.get(name))
    axes.set_xticks(range(len(labels)), labels, rotation=25 if len(labels) > 3 else 0)
    axes.margins(y=0.05 + 0.07 * len(series))  # so that the names above do not cover what they name
    axes.legend(fontsize=8)


def log_axes(axes: Axes) -> None:
    """Powers of two on both, written as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")


def log_heights(axes: Axes) -> None:
    """A logarithmic height, written as plain numbers, also between the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
