"""P3, figure 12: throughput over the size of a slice; and what our tuner chooses.

Sizes are multiplied by what the model was divided by, so that a size means the same number of slices as in the paper. What
a message costs does not shrink with the model, so the left end of the curve is steeper here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.priority.paper import FIG12
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.p3 import contest
from pliant_repro.figures.p3.contest import cells_of, number, shown
from pliant_repro.profiles import SCALES

NAME = "p3-fig12"
GBPS = {"resnet50": 4.0, "vgg": 15.0, "sockeye": 10.0}
SIZES = {
    "resnet50": (10_000, 20_000, 50_000, 100_000, 500_000, 1_000_000),
    "vgg": (50_000, 100_000, 500_000, 1_000_000, 4_000_000),
    "sockeye": (10_000, 50_000, 100_000, 500_000, 1_000_000),
}
"""Of the full model."""
TUNED = 0.05
"""How far the tuner may be from the best size."""


def run(options: Options) -> Json:
    usual = tuple(FIG12) if options.full else ("resnet50",)
    models = options.choose_models(("resnet50",), usual, tuple(FIG12))
    iters = options.choose_steps(quick=4, usual=10, full=30)
    results = []
    for model in models:
        sizes = SIZES[model][1::3] if options.quick else SIZES[model]
        slices = [None, *(max(1, round(size / SCALES[model])) for size in sizes)]
        repeat = 1 if options.quick else 3 if options.full else 2
        results.append(
            contest.sweep(options, model, [GBPS[model]], ["priority"], slices=slices, iters=iters, repeat=repeat)
        )
    return result_of(results, options)


def result_of(results: Sequence[Json], options: Options) -> Json:
    """The figure out of the models' contests."""
    cells = [{**one, "paper_slice": paper_slice(one)} for each in results for one in cells_of(each)]
    return form(
        NAME,
        options,
        ours=cast(Json, results[0]["ours"]),
        paper={model: {str(size): value for size, value in curve.items()} for model, curve in FIG12.items()},
        cells=cells,
        complaints=[text for each in results for text in contest.complaints_of(each)] + judge(cells),
        remarks=contest.remarks_of(results),
    )


def paper_slice(one: Json) -> int | None:
    """The size in the paper's parameters; None: tuned."""
    return None if one["slice"] == "auto" else round(cast(int, one["slice"]) * SCALES[str(one["model"])])


def judge(cells: Sequence[Json]) -> list[str]:
    """The figure's claim: a size in the middle is best. Ours: nobody has to know it."""
    wrong = []
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        speeds = {
            cast("int | None", one["paper_slice"]): number(one, "samples_per_s")
            for one in cells
            if one["model"] == model
        }
        tuned = speeds.pop(None, None)
        fixed = {size: speed for size, speed in speeds.items() if size is not None and speed is not None}
        if tuned is None or not fixed:
            wrong.append(f"{model}: not all sizes were measured")
            continue
        best = max(fixed, key=lambda size: fixed[size])
        if len(fixed) > 3 and best == max(fixed):
            wrong.append(f"{model}: the largest slices are best")
        if tuned < (1 - TUNED) * fixed[best]:
            wrong.append(f"{model}: tuned {tuned:.1f} samples/s, {fixed[best]:.1f} with slices of {best:,}")
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    for one in cells_of(result):
        size = cast("int | None", one["paper_slice"])
        tuned = f"tuned, now {number(one, 'slice_bytes') or 0:,.0f} B"
        paper = FIG12[str(one["model"])].get(size) if size is not None else None
        rows.append(
            (
                str(one["model"]), tuned if size is None else f"{size:,}", "" if size is None else f"{one['slice']:,}",
                shown(number(one, "samples_per_s"), ".1f"), shown(paper, ".1f"),
                shown(number(one, "fraction_of_bound"), ".3f"),
            )
        )  # fmt: skip
    columns = ("model", "parameters per slice", "scaled", "samples/s", "paper", "of P*")
    return TableRows("throughput over the size of a slice, priority", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cells_of(result)
    models = list(dict.fromkeys(str(one["model"]) for one in cells))
    with plotting.picture(path, "Throughput over the size of a slice", contest.CAPTION, len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            mine = [one for one in cells if one["model"] == model and one["iter_median_s"]]
            fixed = sorted(
                (cast(int, one["paper_slice"]), cast(float, one["samples_per_s"])) for one in mine if one["paper_slice"]
            )
            axes.plot(
                [size for size, _ in fixed], [speed for _, speed in fixed], "o-", color="tab:blue", label="priority"
            )
            for one in mine:
                if one["paper_slice"] is None:
                    axes.axhline(cast(float, one["samples_per_s"]), color="tab:green", linestyle="--", label="tuned")
            axes.plot(list(FIG12[model]), list(FIG12[model].values()), "--", color=plotting.PAPER, label="paper")
            axes.set(
                title=f"{model} at {GBPS[model]:g} Gbit/s",
                xlabel="parameters per slice",
                ylabel="samples/s",
                xscale="log",
                ylim=(0, None),
            )
            axes.legend(fontsize=8)
