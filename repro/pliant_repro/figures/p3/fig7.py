"""P3, figure 7: throughput over bandwidth with the layer-wise baseline, with slicing, and with priorities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.priority.paper import FIG7, FIG7_MODES
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.p3 import contest
from pliant_repro.figures.p3.contest import cells_of, gbps_of, number, pick, shown

NAME = "p3-fig7"
LEAST_FRACTION = 0.91
"""Of P*: the paper's own worst point."""
USUAL = {"resnet50": (2, 4, 8), "vgg": (8, 12, 20)}
"""Before, at and after the most that priorities can gain; --full has all of the figure."""


def run(options: Options) -> Json:
    models = options.choose_models(("resnet50",), tuple(FIG7) if options.full else tuple(USUAL), tuple(FIG7))
    iters = options.choose_steps(quick=4, usual=8, full=30)
    modes = (*FIG7_MODES, "ddp") if options.full else FIG7_MODES
    results = []
    for model in models:
        every = tuple(FIG7[model])
        gbps = (4.0, 8.0) if options.quick else every if options.full else USUAL.get(model, every[::2])
        repeat = 3 if options.full else 1
        results.append(contest.sweep(options, model, gbps, modes, iters=iters, repeat=repeat))
    return result_of(results, options)


def result_of(results: Sequence[Json], options: Options) -> Json:
    """The figure out of the models' contests."""
    cells = [
        {**one, "gbps": gbps_of(one), "paper_samples_per_s": _paper(one)} for each in results for one in cells_of(each)
    ]
    return form(
        NAME,
        options,
        ours=cast(Json, results[0]["ours"]),
        paper={model: {str(gbps): list(values) for gbps, values in curves.items()} for model, curves in FIG7.items()},
        cells=cells,
        complaints=[text for each in results for text in contest.complaints_of(each)] + judge(cells),
        remarks=contest.remarks_of(results),
    )


def _paper(one: Json) -> float | None:
    point = FIG7[str(one["model"])].get(round(gbps_of(one), 3))
    return point[FIG7_MODES.index(str(one["mode"]))] if point and one["mode"] in FIG7_MODES else None


def judge(cells: Sequence[Json]) -> list[str]:
    """The figure's claims: priority is first at every bandwidth, near its bound, and pays most in the middle."""
    wrong = []
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        gains: dict[float, float] = {}
        for gbps in dict.fromkeys(cast(float, one["gbps"]) for one in cells if one["model"] == model):
            steps = {
                mode: number(pick(cells, model=model, gbps=gbps, mode=mode), "iter_median_s") for mode in FIG7_MODES
            }
            ours, others = steps["priority"], [steps[mode] for mode in ("baseline", "slicing")]
            if ours is None or None in others:
                wrong.append(f"{model} at {gbps:g} Gbit/s: not all modes were measured")
                continue
            best_s = min(cast("list[float]", others))
            gains[gbps] = best_s / ours - 1
            if ours > 1.02 * best_s:
                wrong.append(f"{model} at {gbps:g} Gbit/s: priority is {ours / best_s - 1:.1%} slower than without")
            fraction = number(pick(cells, model=model, gbps=gbps, mode="priority"), "fraction_of_bound") or 0.0
            if fraction < LEAST_FRACTION:
                wrong.append(f"{model} at {gbps:g} Gbit/s: {fraction:.2f} of P*, the paper's worst is {LEAST_FRACTION}")
        if len(gains) > 2:
            peak = max(gains, key=lambda gbps: gains[gbps])
            if peak in (min(gains), max(gains)):
                wrong.append(f"{model}: the gain is largest at {peak:g} Gbit/s, an end of the curve")
    return wrong


def table(result: Json) -> TableRows:
    cells = cells_of(result)
    rows = []
    for model, gbps in dict.fromkeys((str(one["model"]), cast(float, one["gbps"])) for one in cells):
        found = {mode: pick(cells, model=model, gbps=gbps, mode=mode) for mode in (*FIG7_MODES, "ddp")}
        ours = found["priority"]
        measured = " / ".join(shown(number(found[mode], "samples_per_s"), ".1f") for mode in FIG7_MODES)
        paper = " / ".join(shown(number(found[mode], "paper_samples_per_s"), ".1f") for mode in FIG7_MODES)
        ddp, fraction = number(found["ddp"], "samples_per_s"), number(ours, "fraction_of_bound")
        r = shown(number(ours, "r"), ".2f")
        rows.append((model, f"{gbps:g}", r, measured, paper, shown(ddp, ".1f"), shown(fraction, ".3f")))
    columns = ("model", "Gbit/s", "r", "base/slicing/priority", "paper", "ddp", "of P*")
    return TableRows("samples per second of a worker, 4 nodes", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cells_of(result)
    models = list(dict.fromkeys(str(one["model"]) for one in cells))
    with plotting.picture(path, "Throughput over bandwidth", contest.CAPTION, len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            for mode in (*FIG7_MODES, "ddp"):
                ours = [one for one in cells if one["model"] == model and one["mode"] == mode and one["iter_median_s"]]
                colour = contest.COLOURS[mode]
                if ours:
                    speeds = [cast(float, one["samples_per_s"]) for one in ours]
                    axes.plot([cast(float, one["gbps"]) for one in ours], speeds, "o-", color=colour, label=mode)
            for number_, mode in enumerate(FIG7_MODES):
                paper = [values[number_] for values in FIG7[model].values()]
                label = f"paper, {mode}"
                axes.plot(list(FIG7[model]), paper, "--", color=contest.COLOURS[mode], alpha=0.5, label=label)
            bound = [one for one in cells if one["model"] == model and one["mode"] == "priority" and one["p_star_s"]]
            places = [cast(float, one["gbps"]) for one in bound]
            axes.plot(places, [32 / cast(float, one["p_star_s"]) for one in bound], ":", color="black", label="P*")
            axes.set(title=model, xlabel="Gbit/s", ylabel="samples/s", ylim=(0, None))
            axes.legend(fontsize=7)
