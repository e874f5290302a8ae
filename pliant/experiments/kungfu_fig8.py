"""KungFu, figure 8: what it costs to monitor the gradients' noise scale and variance, in fractions of a step.

One job of 4 replicas trains a ResNet-50, on 4 workers or as many as there are cores, while its monitors are switched on and
off from step to step: workers that share a core would mostly measure the kernel's choice of whom to run. Each
monitored step, with the next one where that pays a part of it, is compared with those around it, which have no monitor, and
the median of these comparisons counts: the speed of a shared machine wanders by more than there is to be seen.
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

from pliant.bench.report import Json
from pliant.bench.stats import Summary, quantile
from pliant.errors import LaunchError
from pliant.experiments import plotting, trials
from pliant.experiments.figures import Options, TableRows, form, num_cores, timed

NAME = "kungfu-fig8"
PAPER = {"none": 30.5, "noise_scale": 29.1, "variance": 24.3, "variance_every_8": 29.6}
"""Images per second and GPU, of the artifact document."""
GOALS = {"noise_scale": 0.01, "variance": 0.03}
REPLICAS = 4
LABELS = {
    "none": "no monitor",
    "noise_scale": "noise scale, every step",
    "variance": "variance, every step",
    "variance_every_8": "variance, every 8 steps",
}


def run(options: Options) -> Json:
    from pliant.experiments.monitoring import Task, schedule

    rounds = options.choose_steps(quick=1, usual=3, full=20)
    task = Task("ResNet18", 2, 32, rounds) if options.quick else Task("ResNet50", 8, 160, rounds)
    steps = len(schedule(rounds))
    options.say(
        f"{task.model}, {task.replicas} replicas on {num_workers()} workers, {task.batch} images of {task.size} x {task.size} "
        f"each: {steps} steps"
    )
    return result_of(workers_of(task), task.rounds, task.batch, options)


def num_workers() -> int:
    return min(REPLICAS, num_cores())


def workers_of(task: object) -> list[Json]:
    """What each worker has written down, in the order of ranks."""
    from pliant.experiments.monitoring import Task

    assert isinstance(task, Task)
    with tempfile.TemporaryDirectory(prefix="pliant-fig8-") as folder:
        path = Path(folder) / "task.json"
        task.write(path)
        command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q", "-np"]
        command += [str(num_workers()), sys.executable, "-m", "pliant.experiments.monitoring", str(path)]
        threads = max(1, num_cores() // num_workers())
        environ = trials.environment(trials.Task(model=task.model, steps=0, threads=threads), pinned=False)
        output, code = trials.finish(command, environ, timeout_s=3600)
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"the job ended with exit code {code}; its last words:\n{last}")
        return [json.loads(each.read_text()) for each in sorted(path.parent.glob("worker-*.json"))]


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of monitoring: its steps, and what each of its pairs says."""

    step_s: list[float]
    cpu_s: list[float]
    """Processor time of all workers."""
    inside_s: list[float]
    """Of that, what was spent inside the monitors and in the threads of collectives."""
    extra: list[float]
    """By which share of a step without a monitor each took longer."""
    extra_cpu: list[float]
    """The same of processor time."""
    extra_inside: list[float]
    """And of the part of it inside the monitors and in collectives."""


def by_mode(workers: Sequence[Json], rounds: int) -> dict[str, Mode]:
    from pliant.experiments.monitoring import MODES, WARMUP, schedule

    def summed(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(_list(worker, name) for worker in workers for name in names), strict=True)]

    step_s, cpu_s, inside_s = _list(workers[0], "step_s"), summed("cpu_s"), summed("probe_s", "other_s")
    modes = schedule(rounds)
    found = {}
    for mode in MODES:
        groups = [group for group in _groups(modes, mode) if group.start >= len(WARMUP)]
        found[mode] = Mode(
            [_mean(step_s, group) for group in groups],
            [_mean(cpu_s, group) for group in groups],
            [_mean(inside_s, group) for group in groups],
            [_beside(step_s, group, modes) for group in groups if mode != "none"],
            [_beside(cpu_s, group, modes) for group in groups if mode != "none"],
            [_beside(inside_s, group, modes, whole=cpu_s) for group in groups if mode != "none"],
        )
    return found


def _groups(modes: Sequence[str], mode: str) -> list[range]:
    """The steps that are one measurement each: what one step in eight costs is spread over all eight."""
    size = 8 if mode == "variance_every_8" else 1
    steps = [step for step, each in enumerate(modes) if each == mode]
    return [range(begin, begin + size) for begin in steps[::size]]


def _mean(values: Sequence[float], steps: Sequence[int]) -> float:
    return sum(values[step] for step in steps) / len(steps)


def _beside(values: Sequence[float], group: range, modes: Sequence[str], whole: Sequence[float] | None = None) -> float:
    """What a step of this group costs more than those around it, as a share of them; or of those in `whole`."""
    late = modes[group.start].startswith("variance") and group.stop < len(modes)
    span = range(group.start, group.stop + late)
    around = [*range(span.start - len(group), span.start), *range(span.stop, span.stop + len(group))]
    plain = [
        step
        for step in around
        if step < len(modes) and modes[step] == "none" and not modes[step - 1].startswith("variance")
    ]
    extra = sum(values[step] for step in span) - len(span) * _mean(values, plain)
    return extra / len(group) / _mean(whole or values, plain)


def _list(worker: Json, name: str) -> list[float]:
    return cast("list[float]", worker[name])


def result_of(workers: Sequence[Json], rounds: int, batch: int, options: Options) -> Json:
    found = by_mode(workers, rounds)
    monitored = {mode: each for mode, each in found.items() if mode != "none"}
    overhead = {mode: quantile(each.extra, 0.5) for mode, each in monitored.items()}
    by_cpu = {mode: quantile(each.extra_cpu, 0.5) for mode, each in monitored.items()}
    by_clocks = {mode: quantile(each.extra_inside, 0.5) for mode, each in monitored.items()}
    spread = {mode: _error(each.extra) for mode, each in monitored.items()}
    cells: list[Json] = [
        {
            "mode": mode,
            "ours": {**timed(each.step_s), "cpu_s": quantile(each.cpu_s, 0.5)},
            "step_s": each.step_s,
            "images_per_s": batch / quantile(each.step_s, 0.5),
            "overhead": overhead.get(mode),
            "standard_error": spread.get(mode),
            "overhead_by_cpu": by_cpu.get(mode),
            "overhead_by_clocks": by_clocks.get(mode),
            "peers": {"paper": {"median_s": 8 / PAPER[mode], "iqr_s": None, "images_per_s": PAPER[mode]}},
        }
        for mode, each in found.items()
    ]
    known = [worker["noise_ratio"] is not None and worker["variance"] is not None for worker in workers]
    same = len({(worker["noise_ratio"], worker["variance"]) for worker in workers}) == 1
    complaints = judge(overhead, spread, by_clocks) if not options.quick else []
    if not all(known) or not same:
        complaints.append("the monitors did not say the same on all workers")
    return form(
        NAME,
        options,
        ours=timed(found["none"].step_s),
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
    )  # fmt: skip


def _error(shares: Sequence[float]) -> float:
    """Of the median of these, from how far half of them lie apart."""
    apart = quantile(shares, 0.75) - quantile(shares, 0.25)
    return 1.2533 * apart / 1.349 / math.sqrt(len(shares))


def remarks(found: Mapping[str, Mode], options: Options) -> list[str]:
    base = Summary.of(found["none"].step_s)
    said = [
        f"{REPLICAS} replicas on {num_workers()} workers",
        f"a step without monitors: {base.median:.2f} s, half of them within {base.iqr / base.median:.1%} of each other",
        "the overhead is the median over comparisons of monitored steps with those around them; +- is that median's standard error",
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
                LABELS[mode],
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
        plotting.bars(axes, [LABELS[str(one["mode"])] for one in cells], series, {"paper": plotting.PAPER})
        axes.set(ylim=(0.7, 1.05), ylabel="img/s, relative")
