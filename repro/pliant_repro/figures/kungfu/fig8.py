"""KungFu, figure 8: what it costs to monitor the gradients' noise scale and variance, in fractions of a step.

One job of 4 replicas trains a ResNet-50, on 4 workers or as many as there are cores, while its monitors are switched on and
off from step to step: workers that share a core would mostly measure the kernel's choice of whom to run. Monitors look at
gradients, which are the same however large the images are, so their cost in seconds is measured on small images, where
steps are short: each monitored step, with the next one where that pays a part of it, is compared with those around it.
The median of these comparisons is held against steps with full batches, which come in between.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.bench.stats import Summary, quantile
from pliant_repro.figures import trials
from pliant_repro.figures.figures import Options, TableRows, form, num_cores, timed

NAME = "kungfu-fig8"
PAPER = {"none": 30.5, "noise_scale": 29.1, "variance": 24.3, "variance_every_8": 29.6}
"""Images per second and GPU, of the artifact document."""
GOALS = {"noise_scale": 0.01, "variance": 0.03}
REPLICAS = 4
LABELS = {
    "noise_scale": "noise scale, every step",
    "variance": "variance, every step",
    "variance_every_8": "variance, every 8 steps",
}


def run(options: Options) -> Json:
    from pliant_repro.figures.kungfu.monitoring import Task, schedule

    rounds = options.choose_steps(quick=1, usual=5, full=40)
    task = Task("ResNet18", 2, 32, rounds, small_size=32) if options.quick else Task("ResNet50", 8, 224, rounds)
    steps = len(schedule(rounds))
    options.say(
        f"{task.model}, {task.replicas} replicas on {num_workers()} workers, {task.batch} images of {task.size} x {task.size} "
        f"each: {steps} steps, most of them of {task.small_batch} images of {task.small_size} x {task.small_size}"
    )
    return result_of(workers_of(task), task.rounds, task.batch, options)


def num_workers() -> int:
    return min(REPLICAS, num_cores())


def workers_of(task: object) -> list[Json]:
    """What each worker has written down, in the order of ranks."""
    from pliant_repro.figures.kungfu.monitoring import Task

    assert isinstance(task, Task)
    with tempfile.TemporaryDirectory(prefix="pliant-fig8-") as folder:
        path = Path(folder) / "task.json"
        task.write(path)
        command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q", "-np"]
        command += [str(num_workers()), sys.executable, "-m", "pliant_repro.figures.kungfu.monitoring", str(path)]
        threads = max(1, num_cores() // num_workers())
        environ = trials.environment(trials.Task(model=task.model, steps=0, threads=threads), pinned=False)
        output, code = trials.finish(command, environ, timeout_s=3600)
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"the job ended with exit code {code}; its last words:\n{last}")
        return [json.loads(each.read_text()) for each in sorted(path.parent.glob("worker-*.json"))]


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of step: what each took, and what each of its comparisons says, in seconds per step."""

    step_s: list[float]
    cpu_s: list[float]
    """Processor time of all workers."""
    extra_s: list[float]
    """More than the steps around it."""
    extra_cpu_s: list[float]
    extra_inside_s: list[float]
    """More processor time inside the monitors and in the threads of collectives."""


def by_mode(workers: Sequence[Json], rounds: int) -> dict[str, Mode]:
    from pliant_repro.figures.kungfu.monitoring import MODES, WARMUP, schedule

    def summed(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(_list(worker, name) for worker in workers for name in names), strict=True)]

    step_s, cpu_s, inside_s = _list(workers[0], "step_s"), summed("cpu_s"), summed("probe_s", "other_s")
    modes = schedule(rounds)
    found = {}
    for mode in MODES:
        groups = [group for group in _groups(modes, mode) if group.start >= len(WARMUP)]
        compared = groups if mode in LABELS else []
        found[mode] = Mode(
            [_mean(step_s, group) for group in groups],
            [_mean(cpu_s, group) for group in groups],
            *([_extra(values, group, modes) for group in compared] for values in (step_s, cpu_s, inside_s)),
        )
    return found


def _groups(modes: Sequence[str], mode: str) -> list[range]:
    """The steps that are one measurement each: what one step in eight costs is spread over all eight."""
    size = 8 if mode == "variance_every_8" else 1
    steps = [step for step, each in enumerate(modes) if each == mode]
    return [range(begin, begin + size) for begin in steps[::size]]


def _mean(values: Sequence[float], steps: Sequence[int]) -> float:
    return sum(values[step] for step in steps) / len(steps)


def _extra(values: Sequence[float], group: range, modes: Sequence[str]) -> float:
    """What a step of this group takes more than those around it."""
    late = modes[group.start].startswith("variance")
    span = range(group.start, group.stop + late)
    last = min(span.stop + len(group), len(modes))
    around = [*range(span.start - len(group), span.start), *range(span.stop, last)]
    plain = [step for step in around if modes[step] == "none" and modes[step - 1] in ("none", "noise_scale")]
    return (sum(values[step] for step in span) - len(span) * _mean(values, plain)) / len(group)


def _list(worker: Json, name: str) -> list[float]:
    return cast("list[float]", worker[name])


def result_of(workers: Sequence[Json], rounds: int, batch: int, options: Options) -> Json:
    found = by_mode(workers, rounds)
    whole = found["full"]
    step_s, cpu_s = quantile(whole.step_s, 0.5), quantile(whole.cpu_s, 0.5)
    overhead = {mode: quantile(found[mode].extra_s, 0.5) / step_s for mode in LABELS}
    spread = {mode: _error(found[mode].extra_s) / step_s for mode in LABELS}
    by_cpu = {mode: quantile(found[mode].extra_cpu_s, 0.5) / cpu_s for mode in LABELS}
    by_clocks = {mode: quantile(found[mode].extra_inside_s, 0.5) / cpu_s for mode in LABELS}
    cells: list[Json] = [
        {
            "mode": mode,
            "ours": {**timed([each + step_s for each in found[mode].extra_s] if mode in LABELS else whole.step_s)},
            "extra_s": found[mode].extra_s,
            "images_per_s": batch / (step_s * (1 + overhead.get(mode, 0.0))),
            "overhead": overhead.get(mode),
            "standard_error": spread.get(mode),
            "overhead_by_cpu": by_cpu.get(mode),
            "overhead_by_clocks": by_clocks.get(mode),
            "peers": {"paper": {"median_s": 8 / PAPER[mode], "iqr_s": None, "images_per_s": PAPER[mode]}},
        }
        for mode in PAPER
    ]
    known = [worker["noise_ratio"] is not None and worker["variance"] is not None for worker in workers]
    same = len({(worker["noise_ratio"], worker["variance"]) for worker in workers}) == 1
    complaints = judge(overhead, spread, by_clocks) if not options.quick else []
    if not all(known) or not same:
        complaints.append("the monitors did not say the same on all workers")
    return form(
        NAME,
        options,
        ours=timed(whole.step_s),
        paper={"overhead": {mode: PAPER["none"] / rate - 1 for mode, rate in PAPER.items() if mode != "none"},
               "throughput_change": {mode: rate / PAPER["none"] - 1 for mode, rate in PAPER.items() if mode != "none"}},
        cells=cells,
        complaints=complaints,
        remarks=remarks(found, options),
        overhead=overhead,
        standard_error=spread,
        overhead_by_cpu=by_cpu,
        overhead_by_clocks=by_clocks,
        goals=GOALS,
        load=os.getloadavg()[0],
        judged=not options.quick,
    )  # fmt: skip


def _error(values: Sequence[float]) -> float:
    """The standard error of the median of these, from how far half of them lie apart."""
    apart = quantile(values, 0.75) - quantile(values, 0.25)
    return 1.2533 * apart / 1.349 / math.sqrt(len(values))


def remarks(found: Mapping[str, Mode], options: Options) -> list[str]:
    whole, small = Summary.of(found["full"].step_s), Summary.of(found["none"].step_s)
    said = [
        f"{REPLICAS} replicas on {num_workers()} workers; a full step without monitors: {whole.median:.2f} s, a small one "
        f"{small.median:.3f} s, half of them within {small.iqr / small.median:.1%} of each other",
        f"the cost in seconds is the median over {len(found['noise_scale'].extra_s)} comparisons of monitored steps with "
        f"those around them ({len(found['variance'].extra_s)} for the variance); +- is that median's standard error",
        "by clocks: the processor time inside the monitors and in the threads of collectives, of that of a whole step, all "
        "workers together; what else runs on the machine disturbs it less",
        "full size: the same on a machine with 4 GPUs: `pliant run -np 4 python3 "
        "benchmarks/monitoring/benchmark.py --kf-optimizer=noise-scale --model=ResNet50 --batch-size=8 --interval=1`",
    ]
    if options.quick:
        said.append(
            "--quick trains a small net on tiny images: its steps are too short for the shares to mean anything"
        )
    return said


def judge(overhead: Mapping[str, float], spread: Mapping[str, float], by_clocks: Mapping[str, float]) -> list[str]:
    return [
        f"{LABELS[mode]} costs {overhead[mode]:.2%} +-{spread[mode]:.2%} of a step ({by_clocks[mode]:.2%} by the clocks), to "
        f"reach {goal:.0%}"
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
                LABELS.get(mode, "no monitor"),
                f"{numbers['median_s']:.3f} s",
                f"{one['images_per_s']:.2f}",
                _percent(one["overhead"], one["standard_error"]),
                _percent(one["overhead_by_cpu"]),
                _percent(one["overhead_by_clocks"]),
                f"{paper['images_per_s']:.1f}",
                _percent(lost if mode != "none" else None),
            )
        )
    columns = ("monitor", "step", "img/s", "overhead", "by CPU time", "by clocks", "paper img/s", "paper")
    return TableRows("what monitoring costs", columns, tuple(rows))


def _percent(share: object, error: object = None) -> str:
    if not isinstance(share, float):
        return "-"
    return f"{share:+.2%}" + (f" +-{error:.2%}" if isinstance(error, float) else "")


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    base = cast(float, cells[0]["images_per_s"])
    series: dict[str, list[float | None]] = {
        "ours": [cast(float, one["images_per_s"]) / base for one in cells],
        "paper": [PAPER[str(one["mode"])] / PAPER["none"] for one in cells],
    }
    caption = (
        "Ours: 4 replicas on one host's processors, random images, all modes in turn within one job. "
        "Paper's artifact: 4 K80 GPUs, TensorFlow, one run for each mode; ResNet50 and 8 images per worker in both."
    )
    with plotting.picture(path, "Throughput with monitors, of that without", caption) as [axes]:
        plotting.bars(
            axes, [LABELS.get(str(one["mode"]), "no monitor") for one in cells], series, {"paper": plotting.PAPER}
        )
        axes.set(ylim=(0.7, 1.05), ylabel="img/s, relative")
