"""Pictures of simulated clusters: completion times beside each other, and devices in use over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pliant.cli import plotting
from pliant.machine import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Sequence[Sequence[float]]
COLOURS = {
    "yarn-cs": "tab:red", "yarn-cs-gang": "tab:orange", "easyscale-homo": "tab:blue", "easyscale-heter": "tab:green",
    "srtf": "tab:brown", "tiresias": "tab:purple", "optimus": "tab:pink", "pollux": "tab:cyan",
}  # fmt: skip


def policies(result: Json, path: Path) -> None:
    """All policies of a result of `pliant sim`."""
    found = cast("Mapping[str, Json]", result["policies"])
    args = cast("Mapping[str, object]", result["args"])
    caption = f"{Path(str(args['trace'])).name} on {args['cluster']}; rounds every {args['interval']:g} s, {args['restart']:g} s for each change of devices."
    with plotting.picture(path, "Policies on one trace", caption, panels=2) as [left, right]:
        seconds(left, {name: cast("float", numbers["jct_mean_s"]) for name, numbers in found.items()}, "mean JCT, s")
        for name, numbers in found.items():
            in_use(right, name, cast("Series", numbers["allocated"]))
        # One job at a time takes ten times as long as anybody else; its tail would hide the others.
        ends_h = sorted(cast("float", numbers["makespan_s"]) / 3600 for numbers in found.values())
        right.set(xlabel="hours", ylabel="GPUs in use", xlim=(0, 1.1 * ends_h[-2] if len(ends_h) > 1 else None))
        right.legend(fontsize=8)


def seconds(axes: Axes, values: Mapping[str, float], label: str) -> None:
    """One bar for each policy, on a logarithmic scale."""
    names = list(values)
    axes.bar(range(len(names)), [values[name] for name in names], color=[COLOURS.get(name, "0.6") for name in names])
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set(yscale="log", ylabel=label)


def in_use(axes: Axes, name: str, series: Series, *, unit_s: float = 3600.0, dashed: bool = False) -> None:
    """Devices over time."""
    axes.step(
        [point[0] / unit_s for point in series], [point[1] for point in series], where="post", label=name, linewidth=1,
        color=plotting.PAPER if dashed else COLOURS.get(name), linestyle="--" if dashed else "-",
    )  # fmt: skip
