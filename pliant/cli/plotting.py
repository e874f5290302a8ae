"""Pictures of results: panels side by side with a caption below. Matplotlib is loaded when one is drawn."""

from __future__ import annotations

import contextlib
import importlib.util
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pliant.errors import ConfigError
from pliant.machine import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pliant.fed.report import Comparison

PAPER = "0.6"
"""Colour of other people's numbers: grey."""


def check() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib: pip install 'pliant[examples]', or ask for none (without --plot, or with --no-plot)"
        )


@contextlib.contextmanager
def picture(path: Path, title: str, caption: str, panels: int = 1) -> Iterator[list[Axes]]:
    """Yield panels to draw into; the picture is written to `path` at the end."""
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
    """Draw a group of bars for each label; a value of None has no bar."""
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        heights = [float("nan") if value is None else value for value in values]
        axes.bar(places, heights, width, label=name, color=colours.get(name))
    axes.set_xticks(range(len(labels)), labels, rotation=25 if len(labels) > 3 else 0)
    axes.margins(y=0.05 + 0.07 * len(series))  # leave room for the legend
    axes.legend(fontsize=8)


def log_axes(axes: Axes) -> None:
    """Use powers of two on both axes, written as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")


def log_heights(axes: Axes) -> None:
    """Use a logarithmic y axis with plain numbers, also between the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


# --- federated jobs ---


def accuracy_curves(found: Comparison, path: Path) -> None:
    """Draw the picture of `pliant report`: accuracy over hours of the virtual clock, and over rounds."""
    from pliant.fed.report import value_of

    if found.target is None:
        raise ConfigError(f"--plot {path}: there is no curve, because no model was tested yet; leave --plot out")
    scale = 1 if found.metric == "loss" else 100
    label = found.metric if found.metric == "loss" else f"{found.metric.replace('_', '-')}, %"
    caption = f"Dashed: the target, {found.target * scale:.2f}{found.reached_by}. Hours are those of the virtual clock."
    with picture(path, "Time to accuracy", caption, panels=2) as axes:
        for number, run in enumerate(found.runs):
            tests = [(point, value_of(point, found.metric)) for point in run.curve.points]
            told = [(point, value * scale) for point, value in tests if value is not None]
            for panel, xs in (
                (axes[0], [point.clock_s / 3600 for point, _ in told]),
                (axes[1], [point.round for point, _ in told]),
            ):
                panel.plot(xs, [value for _, value in told], label=run.curve.name, color=f"C{number}", linewidth=1.2)
        for panel, name in zip(axes, ("hours", "rounds"), strict=True):
            panel.axhline(found.target * scale, color=PAPER, linestyle="--", linewidth=1)
            panel.set(xlabel=name, ylabel=label, xlim=(0, None))
        axes[0].legend(fontsize=8)


# --- simulated clusters ---

Series = Sequence[Sequence[float]]
POLICY_COLOURS = {
    "yarn-cs": "tab:red", "yarn-cs-gang": "tab:orange", "easyscale-homo": "tab:blue", "easyscale-heter": "tab:green",
    "srtf": "tab:brown", "tiresias": "tab:purple", "optimus": "tab:pink", "pollux": "tab:cyan",
}  # fmt: skip


def policies(result: Json, path: Path) -> None:
    """Draw all policies of a result of `pliant sim`: completion times, and devices in use over time."""
    found = cast("Mapping[str, Json]", result["policies"])
    args = cast("Mapping[str, object]", result["args"])
    caption = f"{Path(str(args['trace'])).name} on {args['cluster']}; rounds every {args['interval']:g} s, {args['restart']:g} s for each change of devices."
    with picture(path, "Policies on one trace", caption, panels=2) as [left, right]:
        policy_bars(
            left, {name: cast("float", numbers["jct_mean_s"]) for name, numbers in found.items()}, "mean JCT, s"
        )
        for name, numbers in found.items():
            devices_in_use(right, name, cast("Series", numbers["allocated"]))
        # The policy with one job at a time takes ten times as long; its tail would hide the others.
        ends_h = sorted(cast("float", numbers["makespan_s"]) / 3600 for numbers in found.values())
        right.set(xlabel="hours", ylabel="GPUs in use", xlim=(0, 1.1 * ends_h[-2] if len(ends_h) > 1 else None))
        right.legend(fontsize=8)


def policy_bars(axes: Axes, values: Mapping[str, float], label: str) -> None:
    """Draw one bar for each policy on a logarithmic scale."""
    names = list(values)
    axes.bar(
        range(len(names)), [values[name] for name in names], color=[POLICY_COLOURS.get(name, "0.6") for name in names]
    )
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set(yscale="log", ylabel=label)


def devices_in_use(axes: Axes, name: str, series: Series, *, unit_s: float = 3600.0, dashed: bool = False) -> None:
    """Draw the devices in use over time."""
    axes.step(
        [point[0] / unit_s for point in series], [point[1] for point in series], where="post", label=name, linewidth=1,
        color=PAPER if dashed else POLICY_COLOURS.get(name), linestyle="--" if dashed else "-",
    )  # fmt: skip
