"""KungFu, figure 8: what it costs to monitor the gradients' noise scale and variance, in fractions of a step.

One job of 4 replicas on 4 workers trains a ResNet-50 while its monitors are switched on and off in turn. A step's
cost is counted where it arises: a window's first step, which still pays for the window before, is left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pliant.bench.report import Json
from pliant.bench.stats import Summary, quantile
from pliant.errors import LaunchError
from pliant.experiments import plotting, trials
from pliant.experiments.figures import Options, TableRows, form, num_cores, timed

NAME = "kungfu-fig8"
PAPER = {"none": 30.5, "noise_scale": 29.1, "variance": 24.3, "variance_every_8": 29.6}
"""Images per second and GPU, of the artifact document."""
GOALS = {"noise_scale": 0.01, "variance": 0.03}
WORKERS = 4
LABELS = {
    "none": "no monitor",
    "noise_scale": "noise scale, every step",
    "variance": "variance, every step",
    "variance_every_8": "variance, every 8 steps",
}


def run(options: Options) -> Json:
    from pliant.experiments.monitoring import Task

    rounds = options.choose_steps(quick=1, usual=4, full=20)
    task = Task("ResNet18", 2, 32, rounds) if options.quick else Task("ResNet50", 8, 160, rounds)
    steps = 8 + 24 * rounds
    options.say(
        f"{task.model}, {WORKERS} workers, {task.batch} images of {task.size} x {task.size} each: {steps} steps"
    )
    return result_of(workers_of(task), task.rounds, task.batch, options)


def workers_of(task: object) -> list[Json]:
    """What each worker has written down, in the order of ranks."""
    from pliant.experiments.monitoring import Task

    assert isinstance(task, Task)
    with tempfile.TemporaryDirectory(prefix="pliant-fig8-") as folder:
        path = Path(folder) / "task.json"
        task.write(path)
        command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q", "-np", str(WORKERS)]
        command += [sys.executable, "-m", "pliant.experiments.monitoring", str(path)]
        threads = max(1, num_cores() // WORKERS)
        environ = trials.environment(trials.Task(model=task.model, steps=0, threads=threads), pinned=False)
        output, code = trials.finish(command, environ, timeout_s=3600)
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"the job ended with exit code {code}; its last words:\n{last}")
        return [json.loads(each.read_text()) for each in sorted(path.parent.glob("worker-*.json"))]


Series = tuple[list[float], list[float], list[float]]
"""Of one mode's steps: the seconds, the processor time of all workers, and that of the monitors and of collectives."""


def by_mode(workers: Sequence[Json], rounds: int) -> dict[str, Series]:
    from pliant.experiments.monitoring import MODES, windows

    def summed(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(_list(worker, name) for worker in workers for name in names), strict=True)]

    series = (_list(workers[0], "step_s"), summed("cpu_s"), summed("probe_s", "other_s"))
    found: dict[str, Series] = {mode: ([], [], []) for mode in MODES}
    for mode, steps in windows(rounds):
        for sink, values in zip(found[mode], series, strict=True):
            if mode == "variance_every_8":
                # What one step in eight costs is spread over all of them: their mean counts.
                sink.append(sum(values[step] for step in steps) / len(steps))
            else:
                sink += [values[step] for step in steps[1:]]
    return found


def _list(worker: Json, name: str) -> list[float]:
    return cast("list[float]", worker[name])


def result_of(workers: Sequence[Json], rounds: int, batch: int, options: Options) -> Json:
    found = by_mode(workers, rounds)
    overhead = {mode: _extra(found, mode) for mode in found if mode != "none"}
    by_clocks = {mode: _extra_by_clocks(found, mode) for mode in found if mode != "none"}
    cells: list[Json] = [
        {
            "mode": mode,
            "ours": {**timed(step_s), "cpu_s": quantile(cpu_s, 0.5)},
            "step_s": step_s,
            "images_per_s": batch / quantile(step_s, 0.5),
            "overhead": overhead.get(mode),
            "overhead_by_clocks": by_clocks.get(mode),
            "peers": {"paper": {"median_s": 8 / PAPER[mode], "iqr_s": None, "images_per_s": PAPER[mode]}},
        }
        for mode, (step_s, cpu_s, _) in found.items()
    ]
    known = [worker["noise_ratio"] is not None and worker["variance"] is not None for worker in workers]
    same = len({(worker["noise_ratio"], worker["variance"]) for worker in workers}) == 1
    complaints = judge(overhead, by_clocks) if not options.quick else []
    if not all(known) or not same:
        complaints.append("the monitors did not say the same on all workers")
    return form(
        NAME,
        options,
        ours=timed(found["none"][0]),
        paper={"overhead": {mode: PAPER["none"] / rate - 1 for mode, rate in PAPER.items() if mode != "none"},
               "throughput_change": {mode: rate / PAPER["none"] - 1 for mode, rate in PAPER.items() if mode != "none"}},
        cells=cells,
        complaints=complaints,
        remarks=remarks(found, options),
        overhead=overhead,
        overhead_by_clocks=by_clocks,
        goals=GOALS,
        load=os.getloadavg()[0],
    )  # fmt: skip


def _extra(found: Mapping[str, Series], mode: str) -> float:
    """By how much a step takes longer than without monitors. A window of 8 steps stands beside the mean of others."""
    base = found["none"][0]
    usual = sum(base) / len(base) if mode == "variance_every_8" else quantile(base, 0.5)
    return quantile(found[mode][0], 0.5) / usual - 1


def _extra_by_clocks(found: Mapping[str, Series], mode: str) -> float:
    """The same from the processor time inside the monitors, and what collectives take more, of all that a step takes."""
    _, cpu_s, inside_s = found["none"]
    return (quantile(found[mode][2], 0.5) - quantile(inside_s, 0.5)) / quantile(cpu_s, 0.5)


def remarks(found: Mapping[str, Series], options: Options) -> list[str]:
    base = Summary.of(found["none"][0])
    said = [
        f"a step without monitors: {base.median:.2f} s, half of them within {base.iqr / base.median:.1%} of each other",
        "by clocks: the processor time inside the monitors and in the threads of collectives, of that of a whole step, all "
        "workers together; what else runs on the machine disturbs it less",
        "full size: images of 224 x 224, on a machine with 4 GPUs: `pliant run -np 4 python3 "
        "benchmarks/monitoring/benchmark.py --kf-optimizer=noise-scale --model=ResNet50 --batch-size=8 --interval=1`",
    ]
    if options.quick:
        said.append(
            "--quick trains a small net on tiny images: its steps are too short for the shares to mean anything"
        )
    return said


def judge(overhead: Mapping[str, float], by_clocks: Mapping[str, float]) -> list[str]:
    return [
        f"{LABELS[mode]} costs {overhead[mode]:.2%} of a step ({by_clocks[mode]:.2%} by the clocks), to reach {goal:.0%}"
        for mode, goal in GOALS.items()
        if overhead[mode] > goal
    ]


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        numbers, paper = cast(Json, one["ours"]), cast("dict[str, Json]", one["peers"])["paper"]
        mode = str(one["mode"])
        lost = cast(float, paper["images_per_s"]) / PAPER["none"] - 1
        rows.append(
            (
                LABELS[mode],
                f"{numbers['median_s']:.3f} s",
                f"{one['images_per_s']:.2f}",
                _percent(one["overhead"]),
                _percent(one["overhead_by_clocks"]),
                f"{paper['images_per_s']:.1f}",
                _percent(lost if mode != "none" else None),
            )
        )
    columns = ("monitor", "step", "img/s", "overhead", "by clocks", "paper img/s", "paper")
    return TableRows("what monitoring costs", columns, tuple(rows))


def _percent(share: object) -> str:
    return f"{share:+.2%}" if isinstance(share, float) else "-"


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    base = cast(float, cells[0]["images_per_s"])
    series: dict[str, list[float | None]] = {
        "ours": [cast(float, one["images_per_s"]) / base for one in cells],
        "paper": [PAPER[str(one["mode"])] / PAPER["none"] for one in cells],
    }
    caption = (
        "Ours: 4 workers on one host's processors, random images, all modes in turn within one job. "
        "Paper's artifact: 4 K80 GPUs, TensorFlow, one run for each mode; ResNet50 and 8 images per worker in both."
    )
    with plotting.picture(path, "Throughput with monitors, of that without", caption) as [axes]:
        plotting.bars(axes, [LABELS[str(one["mode"])] for one in cells], series, {"paper": plotting.PAPER})
        axes.set(ylim=(0.7, 1.05), ylabel="img/s, relative")
