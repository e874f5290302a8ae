"""EasyScale, figure 9: training through three stages of workers has the loss of DDP, and more, its bits.

As in the artifact, 4 replicas go through 4 workers x 1, 2 workers x 2, and 1 worker x 2 + 2 workers x 1, and the loss of
the last replica minus that of the last DDP rank is drawn. The artifact restarts between stages and compares
printed losses; here the job is resized live, and SHA-256 of parameters, optimizer state and buffers are
compared after every step. Machines of another kind are stood for by kernels for other vector instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.figures import trials
from pliant_repro.figures.figures import Options, TableRows, form, timed
from pliant_repro.figures.trials import Task, Trial

NAME = "easyscale-fig9"
REPLICAS = 4
STAGES = (4, 2, 3)
"""Workers in each stage; the last one hosts 2, 1 and 1 replicas."""
MODELS = ("resnet50", "shufflenetv2")
PAPER = {
    "stages": ["4 V100 x 1", "2 V100 x 2", "1 V100 x 2 + 2 P100 x 1"],
    "steps_per_stage": 100,
    "zero_stages": {"D0": [0], "D1": [0, 1], "D1+D2": [0, 1, 2]},
    "max_abs_delta_loss": {"D0": 0.16, "D1": 0.0, "D1+D2": 0.0},
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the figure, and what is claimed of it."""

    name: str
    level: str
    unlike: bool
    """Whether the newcomer of the last stage is a machine of another kind."""
    same_stages: tuple[int, ...]
    """In these stages every bit is DDP's."""
    diverges: bool = False
    refuses: bool = False
    """The job goes on without the newcomer."""


SERIES = (
    Series("D0", "D0", False, (0,), diverges=True),
    Series("D1", "D1", False, (0, 1, 2)),
    Series("D1, unlike", "D1", True, (0, 1, 2), refuses=True),
    Series("D1+D2, unlike", "D2", True, (0, 1, 2)),
)
COLOURS = {"D0": "tab:red", "D1": "tab:green", "D1, unlike": "tab:olive", "D1+D2, unlike": "tab:blue"}


def run(options: Options) -> Json:
    chosen = [each for each in SERIES if not (options.quick and each.refuses)]
    return measure(options, chosen)


def measure(options: Options, chosen: Sequence[Series]) -> Json:
    """The figure with these series only."""
    steps = options.choose_steps(quick=3, usual=10, full=100)
    models = options.choose_models(quick=("shufflenetv2",), usual=MODELS)
    cells = [_cell(model, steps, options, chosen) for model in models]
    complaints = [f"{cell['model']}: {text}" for cell in cells for text in judge(cell, steps)]
    times = [cast("Mapping[str, object]", cell["ours"]) for cell in cells]
    return form(
        NAME,
        options,
        ours={**times[0], "bits_compared": steps * len(STAGES) * len(chosen) * len(models)},
        paper=PAPER,
        cells=cells,
        complaints=complaints,
        remarks=[
            "two runs share the machine: what counts are bits, not times",
            "live resizes instead of restarts; SHA-256 of parameters, optimizer and buffers instead of printed losses",
            "an unlike machine is a process with ATEN_CPU_CAPABILITY=default and ONEDNN_MAX_CPU_ISA=SSE41, unless D2 "
            "pins them; under D1 it is refused and the job goes on with 2 workers, where the paper's diverges",
        ],
        steps_per_stage=steps,
        stages=list(STAGES),
    )


def _cell(model: str, steps: int, options: Options, chosen: Sequence[Series]) -> Json:
    task = Task(
        model=model,
        scale=options.scale or ("tiny" if options.quick else "small"),
        steps=steps * len(STAGES),
        replicas=REPLICAS,
        flags=("--digest",),
    )
    schedule = [(number * steps, size) for number, size in enumerate(STAGES) if number]

    def golden(pinned: bool) -> Trial:
        options.say(f"{model}: stock DDP{', pinned as under D2' * pinned}, {REPLICAS} processes")
        return trials.ddp(task, pinned=pinned)

    def elastic(each: Series) -> Trial:
        options.say(f"{model}: pliant {each.name}, workers {' -> '.join(map(str, STAGES))}")
        flags = (*task.flags, *["--unlike"] * each.unlike)
        return trials.elastic(replace(task, flags=flags), STAGES[0], schedule, level=each.level)

    levels = sorted({each.level == "D2" for each in chosen})
    found = trials.together(
        [*(partial(golden, pinned) for pinned in levels), *(partial(elastic, each) for each in chosen)]
    )
    goldens, ours = dict(zip(levels, found, strict=False)), found[len(levels) :]
    series = {
        each.name: compare(trial, goldens[each.level == "D2"], task.steps)
        for each, trial in zip(chosen, ours, strict=True)
    }
    times = [seconds for trial in ours for seconds in trial.step_times_s()]
    peers = {"ddp": {**timed(goldens[levels[0]].step_times_s()), "speedup": None}}
    return {"model": model, "series": series, "ours": timed(times), "peers": peers}


def compare(found: Trial, golden: Trial, num_steps: int) -> Json:
    """What is drawn and judged of one series; a step that is missing is not the same."""
    theirs, mine = golden.losses(REPLICAS - 1), found.losses(REPLICAS - 1)
    same = [
        step in found.commits and step in golden.commits and found.commits[step].digest == golden.commits[step].digest
        for step in range(num_steps)
    ]
    return {
        "delta_loss": [mine[step] - theirs[step] if {step} <= mine.keys() & theirs.keys() else None
                       for step in range(num_steps)],
        "same_bits": same,
        "workers": [found.commits[step].size if step in found.commits else 0 for step in range(num_steps)],
        "refused": "refused: " in found.output,
        "last_sha256": found.commits[max(found.commits)].digest if found.commits else None,
    }  # fmt: skip


def judge(cell: Mapping[str, object], steps: int) -> list[str]:
    """Where the data do not say what the figure claims."""
    wrong = []
    for each in SERIES:
        series = cast("dict[str, Json]", cell["series"]).get(each.name)
        if series is None:
            continue
        same = cast("list[bool]", series["same_bits"])
        deltas = cast("list[float | None]", series["delta_loss"])
        for stage in each.same_stages:
            part = slice(stage * steps, (stage + 1) * steps)
            if not all(same[part]) or any(delta != 0 for delta in deltas[part]):
                wrong.append(
                    f"{each.name} differs from DDP in stage {stage}, at step {stage * steps + _first(same[part])}"
                )
        if each.diverges and all(same):
            wrong.append(f"{each.name} never differs from DDP: the comparison would notice nothing")
        if each.refuses and not series["refused"]:
            wrong.append(f"{each.name}: the unlike machine was not refused")
        if not each.refuses and set(cast("list[int]", series["workers"])) != set(STAGES):
            wrong.append(f"{each.name} went through {sorted(set(cast('list[int]', series['workers'])))} workers")
    return wrong


def _first(same: Sequence[bool]) -> int:
    return same.index(False) if False in same else 0


def table(result: Json) -> TableRows:
    steps = cast(int, result["steps_per_stage"])
    rows = []
    for cell in cast("list[Json]", result["cells"]):
        for name, series in cast("dict[str, Json]", cell["series"]).items():
            same = cast("list[bool]", series["same_bits"])
            deltas = [abs(delta) for delta in cast("list[float | None]", series["delta_loss"]) if delta is not None]
            stages = [f"{sum(same[begin : begin + steps])}/{steps}" for begin in range(0, len(same), steps)]
            refused = "yes" if series["refused"] else ""
            rows.append((str(cell["model"]), name, *stages, f"{max(deltas, default=0):.2g}", refused))
    columns = ("model", "level", "4 x 1", "2 x 2", "2+1+1", "max |delta|", "refused")
    return TableRows(f"steps with DDP's bits, {REPLICAS} replicas, {steps} steps per stage", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    steps = cast(int, result["steps_per_stage"])
    caption = (
        f"Ours: {steps} steps per stage on CPU, small models, live resizes. Paper: 100 steps per stage on V100 and P100, "
        "restarts; D0 is zero in stage 0 only, D1 in stages 0 and 1, D1+D2 in all; ResNet50's D0 strays by up to 0.16."
    )
    with plotting.picture(
        path, "Loss of the last replica minus loss of the last DDP rank", caption, len(cells)
    ) as panels:
        for axes, cell in zip(panels, cells, strict=True):
            for number, (name, series) in enumerate(cast("dict[str, Json]", cell["series"]).items()):
                deltas = cast("list[float | None]", series["delta_loss"])
                values = [float("nan") if delta is None else delta for delta in deltas]
                axes.plot(values, label=name, color=COLOURS.get(name), linewidth=5 - number)
            for boundary in range(1, len(STAGES)):
                axes.axvline(boundary * steps - 0.5, color=plotting.PAPER, linestyle=":")
            axes.set(title=str(cell["model"]), xlabel="mini-batch", ylabel="difference of loss")
            axes.legend(fontsize=8)
