"""EasyScale, figure 13: what it costs to copy a replica's gradients, and to sum them in the last one's turn.

8 replicas in one worker beside 8 workers of stock DDP. In the paper every DDP worker has a GPU of its own. Here all of
them share what there is, so a step of DDP counts for the part of it that a worker would take with a device to
itself: step time x devices / 8, where a CPU's devices are its cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.stats import quantile
from pliant_repro.figures import trials
from pliant_repro.figures.figures import MODELS, USUAL, Options, TableRows, form, num_cores, timed
from pliant_repro.figures.trials import Task, Trial

NAME = "easyscale-fig13"
REPLICAS = 8
LIMIT_COPY, LIMIT_SYNC = 1.0, 1.10
"""The paper's claims: who only copies is faster than a DDP worker, who also sums is hardly slower (at most 1.054)."""
PAPER = {
    "shufflenetv2": (0.744, 0.800),
    "resnet50": (0.581, 0.588),
    "vgg19": (0.682, 0.894),
    "neumf": (0.484, 0.866),
    "yolov3": (0.782, 0.924),
    "bert": (0.785, 1.019),
    "electra": (0.779, 1.054),
    "swin": (0.906, 0.966),
}
"""Relative to DDP: ESTs 0 to 6, EST 7."""


def run(options: Options) -> Json:
    models = options.choose_models(quick=("resnet50",), usual=MODELS if options.full else USUAL)
    steps = options.choose_steps(quick=5, usual=10, full=100)
    devices = num_cores() if options.where == "cpu" else 1
    cells = []
    for model in models:
        task = Task(
            model=model, scale=options.size, steps=steps, replicas=REPLICAS, device=options.where, flags=("--turns",)
        )
        options.say(f"{model}: {REPLICAS} DDP processes")
        ddp = trials.ddp(task)
        options.say(f"{model}: {REPLICAS} replicas in one process")
        cells.append(cell(model, trials.alone(task), ddp, devices))
    return form(
        NAME,
        options,
        ours=cast("Mapping[str, object]", cells[0]["ours"]),
        paper={name: {"copy": copy, "sync": sync} for name, (copy, sync) in PAPER.items()},
        cells=cells,
        complaints=judge(cells),
        remarks=[
            f"8 DDP workers share {devices} device(s): their step time counts {min(devices, REPLICAS)}/{REPLICAS}",
            "yolov3 is not in the zoo",
        ],
    )


def cell(model: str, mine: Trial, ddp: Trial, devices: int) -> Json:
    turns = [turn for turn in mine.workers[0] if turn.step >= 2 and turn.took_s is not None]
    copies = [cast(float, turn.took_s) for turn in turns if turn.replica < REPLICAS - 1]
    syncs = [cast(float, turn.took_s) for turn in turns if turn.replica == REPLICAS - 1]
    steps = ddp.step_times_s()
    own_s = quantile(steps, 0.5) * min(devices, REPLICAS) / REPLICAS if steps else None
    by_replica = [
        quantile(times, 0.5) if (times := [cast(float, t.took_s) for t in turns if t.replica == replica]) else None
        for replica in range(REPLICAS)
    ]
    return {
        "model": model,
        "ours": {
            **timed(copies),
            "copy": quantile(copies, 0.5) / own_s if copies and own_s else None,
            "sync": quantile(syncs, 0.5) / own_s if syncs and own_s else None,
            "turn_s_by_replica": by_replica,
        },
        "peers": {"ddp": {**timed(steps), "own_device_s": own_s, "speedup": None}},
    }


def _value(one: Json, key: str) -> float:
    value = cast(Json, one["ours"])[key]
    return value if isinstance(value, float) else float("nan")


def judge(cells: list[Json]) -> list[str]:
    wrong = []
    for one in cells:
        copy, sync = _value(one, "copy"), _value(one, "sync")
        if not copy < LIMIT_COPY:
            wrong.append(f"{one['model']}: a replica that only copies takes {copy:.2f}x of a DDP worker's step")
        if not sync < LIMIT_SYNC:
            wrong.append(f"{one['model']}: the replica that sums takes {sync:.2f}x of a DDP worker's step")
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        model = str(one["model"])
        paper = [f"{value:.3f}" for value in PAPER[model]] if model in PAPER else ["-", "-"]
        rows.append((model, f"{_value(one, 'copy'):.3f}", f"{_value(one, 'sync'):.3f}", *paper))
    columns = ("model", "replicas 0-6", "replica 7", "paper EST 0-6", "paper EST 7")
    return TableRows("a turn, relative to a step of a DDP worker with a device of its own", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    models = [str(one["model"]) for one in cells]
    args = cast(Json, result["args"])
    caption = (
        f"Ours: {args['device']}, sizes '{args['scale']}'; DDP's workers share the machine, so their step time is scaled to "
        "a device each. Paper: 8 DDP workers on 8 V100, 8 ESTs on one."
    )
    series: dict[str, list[float | None]] = {
        "replicas 0-6: copy": [_value(one, "copy") for one in cells],
        "paper, EST 0-6": [PAPER[model][0] if model in PAPER else None for model in models],
        "replica 7: copy + sum": [_value(one, "sync") for one in cells],
        "paper, EST 7": [PAPER[model][1] if model in PAPER else None for model in models],
    }
    with plotting.picture(path, "Time of a replica's turn, relative to a DDP worker's step", caption) as [axes]:
        plotting.bars(axes, models, series, {"paper, EST 0-6": "0.75", "paper, EST 7": "0.5"})
        axes.axhline(1, color="black", linewidth=0.5)
