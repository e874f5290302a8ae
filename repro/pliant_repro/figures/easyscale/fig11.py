"""EasyScale, figure 11: what it costs to switch between replicas.

8 replicas in one worker. In every second step their contexts (random state, buffers) are not switched, so that both
kinds of steps have the same noise; the result of such a run is worth nothing, but its time is. The difference
is what the paper shows. The time inside of the switch is measured as well: it is judged, for it knows no noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.stats import quantile
from pliant_repro.figures import trials
from pliant_repro.figures.figures import MODELS, USUAL, Options, TableRows, form, timed
from pliant_repro.figures.trials import Task, Trial

NAME = "easyscale-fig11"
REPLICAS = 8
LIMIT = 0.02
"""The paper's claim: less than 2 % in every model."""
PAPER = {
    "shufflenetv2": (0.33500, 0.33874),
    "resnet50": (0.50782, 0.50640),
    "vgg19": (0.77548, 0.77596),
    "neumf": (0.015092, 0.015078),
    "yolov3": (0.48262, 0.48015),
    "bert": (0.65107, 0.65097),
    "electra": (0.64566, 0.65840),
    "swin": (0.60291, 0.60399),
}
"""Seconds of a micro-step without and with the switch; 8 ESTs on one V100."""


def run(options: Options) -> Json:
    if options.quick and not options.scale and options.where == "cpu":
        options = replace(options, scale="small")  # in a tiny model anything is a large part of a step
    models = options.choose_models(quick=("shufflenetv2", "bert"), usual=MODELS if options.full else USUAL)
    steps = options.choose_steps(quick=8, usual=16, full=200)
    cells = []
    for model in models:
        options.say(f"{model}: {REPLICAS} replicas in one process, switch on and off in turn")
        task = Task(
            model=model, scale=options.size, steps=steps, replicas=REPLICAS, device=options.where,
            flags=("--alternate", "--turns"),
        )  # fmt: skip
        cells.append(cell(model, trials.alone(task)))
    return form(
        NAME,
        options,
        ours={**cast("Mapping[str, object]", cells[0]["ours"]), "max_switch_share": max(map(_share, cells))},
        paper={name: {"off_s": off, "on_s": on, "switch_share": on / off - 1} for name, (off, on) in PAPER.items()},
        cells=cells,
        complaints=judge(cells),
        remarks=["steps with and without the switch alternate in one run", "yolov3 is not in the zoo"],
    )


def cell(model: str, trial: Trial) -> Json:
    """Times of a micro-step: a step's time over the number of replicas. The first steps warm up."""
    ends: dict[tuple[int, bool], float] = {}
    for turn in trial.workers[0]:
        ends[turn.step, turn.switched] = turn.end_s
    steps = sorted((step, switched, end_s) for (step, switched), end_s in ends.items())
    times: dict[bool, list[float]] = {True: [], False: []}
    for (_, _, before_s), (step, switched, after_s) in itertools.pairwise(steps):
        if step >= 3:
            times[switched].append((after_s - before_s) / REPLICAS)
    on, off = timed(times[True]), timed(times[False])
    difference = quantile(times[True], 0.5) / quantile(times[False], 0.5) - 1 if times[True] and times[False] else None
    spent: dict[int, float] = {}
    for turn in trial.workers[0]:
        if turn.switched and turn.step >= 3:
            spent[turn.step] = spent.get(turn.step, 0.0) + turn.switch_s / REPLICAS
    share = quantile(list(spent.values()), 0.5) / quantile(times[True], 0.5) if spent and times[True] else None
    return {
        "model": model,
        "ours": {**on, "switch_share": share, "difference": difference},
        "peers": {"switch off": off},
    }


def _share(one: Json) -> float:
    share = cast(Json, one["ours"])["switch_share"]
    return share if isinstance(share, float) else float("inf")


def _difference(one: Json) -> float:
    difference = cast(Json, one["ours"])["difference"]
    return difference if isinstance(difference, float) else float("nan")


def judge(cells: list[Json]) -> list[str]:
    return [
        f"{one['model']}: the switch takes {_share(one):.1%} of a micro-step" for one in cells if _share(one) > LIMIT
    ]


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        model = str(one["model"])
        on, off = cast(Json, one["ours"]), cast("dict[str, Json]", one["peers"])["switch off"]
        paper = f"{PAPER[model][1] / PAPER[model][0] - 1:+.2%}" if model in PAPER else "-"
        rows.append(
            (model, _ms(off["median_s"]), _ms(on["median_s"]), f"{_difference(one):+.2%}", f"{_share(one):.2%}", paper)
        )
    columns = ("model", "off, ms", "on, ms", "on / off", "in the switch", "paper")
    return TableRows(
        f"a micro-step with the switch off and on, {REPLICAS} replicas in one worker", columns, tuple(rows)
    )


def _ms(seconds: object) -> str:
    return f"{seconds * 1e3:.3g}" if isinstance(seconds, float) else "-"


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    models = [str(one["model"]) for one in cells]
    paper = [PAPER[model][1] / PAPER[model][0] if model in PAPER else None for model in models]
    args = cast(Json, result["args"])
    caption = (
        f"Ours: {args['device']}, sizes '{args['scale']}', steps with and without the switch alternate in one run. "
        "Paper: 8 ESTs on one V100, published sizes, at most +1.97 %."
    )
    with plotting.picture(path, "Time of a micro-step with the switch, relative to without", caption) as [axes]:
        series: dict[str, list[float | None]] = {
            "ours, on / off": [1 + _difference(one) for one in cells],
            "ours, time in the switch": [1 + _share(one) for one in cells],
            "paper": paper,
        }
        plotting.bars(axes, models, series, {"paper": plotting.PAPER})
        axes.axhline(1 + LIMIT, color="tab:red", linestyle=":", linewidth=1)
        axes.set_ylim(0.8, 1.2)
