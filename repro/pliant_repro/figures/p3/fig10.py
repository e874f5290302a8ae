"""P3, figure 10: throughput over the number of machines, with the baseline and with priorities.

The paper's machines of this figure have slower GPUs than those of figure 7. So that the ratio of traffic to compute
is theirs, the rate here is higher by as much as our compute is faster; throughput is shown relative to one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.priority.paper import FIG10
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.p3 import contest
from pliant_repro.figures.p3.contest import cells_of, number, pick, shown
from pliant_repro.profiles import profile

NAME = "p3-fig10"
GBPS = 10.0
MODES = ("baseline", "priority")
USUAL = {"vgg": (2, 4, 8), "resnet50": (4,), "sockeye": (2, 4)}
"""More nodes than this need more than two cores: their traffic is that of all of them."""


def rate_gbps(model: str) -> float:
    """The bandwidth at which our compute stands to traffic as the paper's did at 10 Gbit/s."""
    one = profile(model)
    return GBPS * (one.batch / FIG10[model][1][0]) / one.compute_s


def run(options: Options) -> Json:
    models = options.choose_models(("vgg",), ("vgg", "resnet50"), tuple(FIG10))
    iters = options.choose_steps(quick=4, usual=8, full=30)
    results = []
    for model in models:
        counts = (2,) if options.quick else (2, 4, 8, 16) if options.full else USUAL[model]
        for nodes in counts:
            results.append(contest.sweep(options, model, [rate_gbps(model)], MODES, nodes=nodes, iters=iters))
    return result_of(results, options)


def result_of(results: Sequence[Json], options: Options) -> Json:
    """The figure out of the contests."""
    cells = [{**one, "scaling": scaling(one)} for each in results for one in cells_of(each)]
    return form(
        NAME,
        options,
        ours=cast(Json, results[0]["ours"]),
        paper={model: {str(nodes): list(pair) for nodes, pair in points.items()} for model, points in FIG10.items()},
        cells=cells,
        complaints=[text for each in results for text in contest.complaints_of(each)] + judge(cells),
        remarks=contest.remarks_of(results),
    )


def scaling(one: Json) -> float | None:
    """Throughput of all nodes over that of one, which has nothing to send."""
    step_s, compute_s = number(one, "iter_median_s"), number(one, "compute_s")
    return cast(int, one["nodes"]) * compute_s / step_s if step_s and compute_s else None


def paper_scaling(model: str, nodes: int, mode: str) -> float | None:
    points = FIG10[model]
    return points[nodes][MODES.index(mode)] / points[1][0] if nodes in points else None


def judge(cells: Sequence[Json]) -> list[str]:
    """The figure's claim: priorities scale better, where traffic takes about as long as computing.

    Where it takes much less there is nothing to gain over a baseline that overlaps both, as ours does and the paper's
    did not.
    """
    wrong = []
    for model, nodes in dict.fromkeys((str(one["model"]), cast(int, one["nodes"])) for one in cells):
        found = [pick(cells, model=model, nodes=nodes, mode=mode) for mode in MODES]
        before, ours = (number(one, "scaling") for one in found)
        if before is None or ours is None:
            wrong.append(f"{model} on {nodes} nodes: not both modes were measured")
            continue
        least = 1.10 if 0.85 <= (number(found[1], "r") or 0.0) <= 1.5 else 0.98
        if ours < least * before:
            wrong.append(
                f"{model} on {nodes} nodes: {ours / before - 1:+.1%} over the baseline, to be {least - 1:+.0%}"
            )
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    cells = cells_of(result)
    for model, nodes in dict.fromkeys((str(one["model"]), cast(int, one["nodes"])) for one in cells):
        found = [pick(cells, model=model, nodes=nodes, mode=mode) for mode in MODES]
        ours = [shown(number(one, "scaling"), ".2f") for one in found]
        paper = [shown(paper_scaling(model, nodes, mode), ".2f") for mode in MODES]
        rows.append((model, str(nodes), *ours, *paper, shown(number(found[1], "fraction_of_bound"), ".3f")))
    columns = ("model", "nodes", "baseline", "priority", "paper: base", "P3", "of P*")
    return TableRows("throughput of all nodes over that of one", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cells_of(result)
    models = list(dict.fromkeys(str(one["model"]) for one in cells))
    caption = "Ours: namespaces of one machine with two cores, compute paced. Paper: g3.4xlarge, 10 Gbit/s, MXNet."
    with plotting.picture(path, "Throughput over machines, relative to one", caption, len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            for mode in MODES:
                colour = contest.COLOURS[mode]
                ours = [one for one in cells if one["model"] == model and one["mode"] == mode and one["scaling"]]
                places = [1, *(cast(int, one["nodes"]) for one in ours)]
                axes.plot(places, [1.0, *(cast(float, one["scaling"]) for one in ours)], "o-", color=colour, label=mode)
                most = max(places)
                paper = {nodes: paper_scaling(model, nodes, mode) or 1.0 for nodes in FIG10[model] if nodes <= most}
                label = "paper, P3" if mode == "priority" else "paper, baseline"
                axes.plot(list(paper), list(paper.values()), "--", color=colour, alpha=0.5, label=label)
            axes.set(title=model, xlabel="machines", ylabel="throughput / that of one")
            axes.legend(fontsize=8)
