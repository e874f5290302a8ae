"""EasyScale, figure 12: what determinism costs.

One process and one replica: PyTorch as it is, pliant under D1, and pliant under D2, in rounds of all three. As in the
paper, it is the settings that are timed: on CUDA deterministic kernels (D1) and fixed algorithms (D2), on a CPU
the pinned vector instructions (D2), with one thread in all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.figures import trials
from pliant_repro.figures.figures import MODELS, USUAL, Options, TableRows, form, timed
from pliant_repro.figures.trials import Task

NAME = "easyscale-fig12"
LIMIT_D1 = 0.10
"""The paper's mean cost of D1 over all models, rounded up: +7.2 % on V100, +9.6 % on T4."""
PAPER = {
    "shufflenetv2": (0.2163, 0.2167, 0.4697),
    "resnet50": (0.2503, 0.2688, 0.5860),
    "vgg19": (0.2586, 0.3924, 1.1327),
    "yolov3": (0.4731, 0.4590, 0.5491),
    "neumf": (0.0103, 0.0105, 0.0107),
    "bert": (0.4413, 0.4406, 0.4390),
    "electra": (0.4420, 0.4418, 0.4433),
    "swin": (0.4132, 0.4114, 0.4289),
}
"""Seconds of a mini-batch on V100: baseline, D1, D1+D2."""


def run(options: Options) -> Json:
    models = options.choose_models(quick=("resnet50",), usual=MODELS if options.full else USUAL)
    steps = options.choose_steps(quick=8, usual=14, full=200)
    rounds = 1 if options.quick else 2
    cells = []
    for model in models:
        task = Task(model=model, scale=options.size, steps=steps, device=options.where)
        times: dict[str, list[float]] = {"baseline": [], "D1": [], "D1+D2": []}
        for number in range(rounds):
            options.say(f"{model}: baseline, D1 and D1+D2, round {number + 1} of {rounds}")
            times["baseline"] += trials.plain(task).step_times_s()
            times["D1"] += trials.alone(task, level="D1").step_times_s()
            times["D1+D2"] += trials.alone(task, level="D2").step_times_s()
        cells.append(cell(model, times))
    return form(
        NAME,
        options,
        ours={**cast("Mapping[str, object]", cells[0]["ours"]), "mean_cost_d1": _mean_cost(cells)},
        paper={name: {"baseline_s": b, "d1_s": d1, "d2_s": d2} for name, (b, d1, d2) in PAPER.items()},
        cells=cells,
        complaints=judge(cells),
        remarks=[
            "the paper's bars are DDP with deterministic settings; ours for D1 and D1+D2 are pliant itself",
            "yolov3 is not in the zoo",
        ],
    )


def cell(model: str, times: Mapping[str, list[float]]) -> Json:
    numbers = {name: timed(samples) for name, samples in times.items()}
    base, d1, d2 = (numbers[name]["median_s"] for name in ("baseline", "D1", "D1+D2"))
    return {
        "model": model,
        "ours": {**numbers["D1"], "cost": d1 / base - 1 if d1 and base else None},
        "d2": {**numbers["D1+D2"], "cost": d2 / base - 1 if d2 and base else None},
        "peers": {"baseline": {**numbers["baseline"], "speedup": base / d1 if d1 and base else None}},
    }


def _cost(one: Json, key: str) -> float | None:
    value = cast(Json, one[key])["cost"]
    return value if isinstance(value, float) else None


def _mean_cost(cells: list[Json]) -> float | None:
    costs = [cost for one in cells if (cost := _cost(one, "ours")) is not None]
    return sum(costs) / len(costs) if costs else None


def judge(cells: list[Json]) -> list[str]:
    mean = _mean_cost(cells)
    if mean is None:
        return ["nothing was measured"]
    return [f"D1 costs {mean:.1%} in the mean over the models"] if mean > LIMIT_D1 else []


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        model = str(one["model"])
        base = cast("dict[str, Json]", one["peers"])["baseline"]["median_s"]
        paper = [f"{time / PAPER[model][0]:.2f}x" for time in PAPER[model][1:]] if model in PAPER else ["-", "-"]
        ratios = [f"{1 + cost:.2f}x" if (cost := _cost(one, key)) is not None else "-" for key in ("ours", "d2")]
        rows.append((model, f"{base * 1e3:.3g}" if isinstance(base, float) else "-", *ratios, *paper))
    columns = ("model", "baseline, ms", "D1", "D1+D2", "paper D1", "paper D1+D2")
    return TableRows("a mini-batch under each level, relative to the baseline", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    models = [str(one["model"]) for one in cells]
    args = cast(Json, result["args"])
    caption = (
        f"Ours: {args['device']}, sizes '{args['scale']}', one thread; D2 pins vector instructions on a CPU, algorithms on "
        "a GPU. Paper: V100, published sizes; DDP with deterministic settings, not EasyScale itself."
    )
    series: dict[str, list[float | None]] = {}
    for name, key, place in (("D1", "ours", 1), ("D1+D2", "d2", 2)):
        series[name] = [1 + cost if (cost := _cost(one, key)) is not None else None for one in cells]
        series[f"paper {name}"] = [PAPER[m][place] / PAPER[m][0] if m in PAPER else None for m in models]
    with plotting.picture(path, "Time of a mini-batch, relative to the baseline", caption) as [axes]:
        colours = {"D1": "tab:green", "D1+D2": "tab:blue", "paper D1": "0.75", "paper D1+D2": "0.5"}
        plotting.bars(axes, models, series, colours)
        axes.axhline(1, color="black", linewidth=0.5)
