"""Figure 8 of KungFu: what it costs to monitor the gradients' noise scale and variance, in fractions of a step.

One job of 4 replicas trains a ResNet-50, on 4 workers or as many as there are cores, while its monitors are switched on and off
from step to step. Monitors look at gradients, which are the same however large the images are. So their cost in seconds is
measured on small images, where steps are short: each monitored step, with the next one where that pays a part of it, is
compared with those around it. The median of these comparisons is divided by the time of a step with full batches.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from pliant_repro.contest import Summary, quantile
from pliant_repro.figures import launch
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, TableRows
from pliant_repro.figures.formatting import Result, num_cores, show, timed
from pliant_repro.figures.launch import Task

INTERVALS = {"full": (0, 0), "none": (0, 0), "noise_scale": (1, 0), "variance": (0, 1), "variance_every_8": (0, 8)}
"""Every how many steps the noise scale and the variance are estimated, by mode. `full` steps have images of full size."""
WARMUP = ("full", "none", "noise_scale", "variance", "variance", "none", "none", "none")
"""The first variance allocates its memory."""
PAIRED = ("none", "noise_scale", "none", "variance", "none") * 4 + ("none", "noise_scale", "none", "none")
"""A monitored step has others without a monitor on either side, so that a machine that becomes slower does so for all of
them. The step after a variance pays a part of it, because its collective may take until then."""
ROUND = (*PAIRED, *["variance_every_8"] * 8, "none", "full", "full", "none", "none", "noise_scale", "none", "none")
"""A multiple of 8 steps, so that the window of 8 begins with the step that is due."""
LABELS = {
    "noise_scale": "noise scale, every step",
    "variance": "variance, every step",
    "variance_every_8": "variance, every 8 steps",
}
REPLICAS = 4


def schedule(rounds: int) -> list[str]:
    """Return the mode of each step; the first ones are for warming up."""
    return [*WARMUP, *ROUND * rounds]


@dataclass(frozen=True, slots=True)
class ModeTimes:
    """Times of one kind of step, and what each of its comparisons says, in seconds per step."""

    step_s: list[float]
    cpu_s: list[float]
    """Processor time of all workers."""
    extra_s: list[float]
    """More than the steps around it."""
    extra_cpu_s: list[float]
    extra_inside_s: list[float]
    """More processor time inside the monitors and in the threads of collectives."""


def times_by_mode(workers: Sequence[Result], rounds: int) -> dict[str, ModeTimes]:
    def summed(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(worker[name] for worker in workers for name in names), strict=True)]

    step_s, cpu_s, inside_s = workers[0]["step_s"], summed("cpu_s"), summed("probe_s", "other_s")
    modes = schedule(rounds)
    found = {}
    for mode in INTERVALS:
        size = 8 if mode == "variance_every_8" else 1  # the cost of one step in eight is spread over all eight
        begins = [step for step, each in enumerate(modes) if each == mode][::size]
        groups = [range(begin, begin + size) for begin in begins if begin >= len(WARMUP)]
        compared = groups if mode in LABELS else []
        found[mode] = ModeTimes(
            *([fmean(values[step] for step in group) for group in groups] for values in (step_s, cpu_s)),
            *([_extra(values, group, modes) for group in compared] for values in (step_s, cpu_s, inside_s)),
        )
    return found


def _extra(values: Sequence[float], group: range, modes: Sequence[str]) -> float:
    """Return what a step of this group takes more than the plain steps around it."""
    span = range(group.start, group.stop + modes[group.start].startswith("variance"))
    last = min(span.stop + len(group), len(modes))
    around = [*range(span.start - len(group), span.start), *range(span.stop, last)]
    plain = [step for step in around if modes[step] == "none" and modes[step - 1] in ("none", "noise_scale")]
    usual = fmean(values[step] for step in plain)
    return (sum(values[step] for step in span) - len(span) * usual) / len(group)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, from the distance between the quartiles."""
    return 1.2533 * (quantile(values, 0.75) - quantile(values, 0.25)) / 1.349 / math.sqrt(len(values))


def num_workers() -> int:
    return min(REPLICAS, num_cores())


class MonitoringCost(Figure):
    """The cost of monitoring the gradients' noise scale and variance."""

    name = "kungfu-fig8"
    about = "what it costs to monitor the gradients' noise scale and variance"
    usual_s = 215
    rates = {"none": 30.5, "noise_scale": 29.1, "variance": 24.3, "variance_every_8": 29.6}
    """Images per second and GPU, of the artifact document."""
    goals = {"noise_scale": 0.01, "variance": 0.03}
    paper = {
        "overhead": {"noise_scale": 30.5 / 29.1 - 1, "variance": 30.5 / 24.3 - 1, "variance_every_8": 30.5 / 29.6 - 1},
        "throughput_change": {
            "noise_scale": 29.1 / 30.5 - 1, "variance": 24.3 / 30.5 - 1, "variance_every_8": 29.6 / 30.5 - 1,
        },
    }  # fmt: skip
    title = "Throughput with monitors, of that without"
    caveats = (
        "a monitor's cost is a few tens of milliseconds whatever the images: as a share it depends on what else a step does. "
        "On a machine that does something else meanwhile the differences drown",
    )

    def run(self, options: Options) -> Result:
        rounds = options.choose_steps(quick=1, usual=5, full=40)
        model, batch, side = ("ResNet18", 2, 32) if options.quick else ("ResNet50", 8, 224)
        task = Task(
            model=f"image:{model}", batch=batch, image_size=side, steps=len(schedule(rounds)), replicas=REPLICAS,
            monitor_rounds=rounds, threads=max(1, num_cores() // num_workers()),
        )  # fmt: skip
        options.say(f"{model}, {REPLICAS} replicas on {num_workers()} workers, images of {side} x {side}: {task.steps} steps")
        with tempfile.TemporaryDirectory(prefix="pliant-fig8-") as folder:
            launch.train(task, np=num_workers(), timeout_s=3600, folder=Path(folder))
            workers = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("worker-*.json"))]
        return self.result_of(workers, rounds, batch, options)

    def result_of(self, workers: Sequence[Result], rounds: int, batch: int, options: Options) -> Result:
        found = times_by_mode(workers, rounds)
        full = found["full"]
        step_s, cpu_s = median(full.step_s), median(full.cpu_s)
        overhead = {mode: median(found[mode].extra_s) / step_s for mode in LABELS}
        spread = {mode: standard_error(found[mode].extra_s) / step_s for mode in LABELS}
        by_cpu = {mode: median(found[mode].extra_cpu_s) / cpu_s for mode in LABELS}
        by_clocks = {mode: median(found[mode].extra_inside_s) / cpu_s for mode in LABELS}
        cells = [
            {
                "mode": mode,
                "ours": timed([each + step_s for each in found[mode].extra_s] if mode in LABELS else full.step_s),
                "extra_s": found[mode].extra_s,
                "images_per_s": batch / (step_s * (1 + overhead.get(mode, 0.0))),
                "overhead": overhead.get(mode),
                "standard_error": spread.get(mode),
                "overhead_by_cpu": by_cpu.get(mode),
                "overhead_by_clocks": by_clocks.get(mode),
                "peers": {"paper": {"median_s": 8 / rate, "iqr_s": None, "images_per_s": rate}},
            }
            for mode, rate in self.rates.items()
        ]
        complaints = [] if options.quick else self.judge(overhead, spread, by_clocks)
        said = {(worker["noise_ratio"], worker["variance"]) for worker in workers}
        if len(said) != 1 or None in next(iter(said)):
            complaints.append("the monitors did not say the same on all workers")
        small = Summary.of(found["none"].step_s)
        remarks = [
            f"{REPLICAS} replicas on {num_workers()} workers; a full step without monitors: {step_s:.2f} s, a small one "
            f"{small.median:.3f} s, half of them within {small.iqr / small.median:.1%} of each other",
            f"the cost in seconds is the median over {len(found['noise_scale'].extra_s)} comparisons of monitored steps with "
            f"those around them ({len(found['variance'].extra_s)} for the variance); +- is that median's standard error",
            "by clocks: the processor time inside the monitors and in the threads of collectives, of that of a whole step",
            *(["--quick trains a small net on tiny images: its steps are too short for the shares to mean anything"] * options.quick),
        ]
        return self.result(
            options, ours=timed(full.step_s), cells=cells, complaints=complaints, remarks=remarks, overhead=overhead,
            standard_error=spread, overhead_by_cpu=by_cpu, overhead_by_clocks=by_clocks, goals=self.goals,
            load=os.getloadavg()[0], judged=not options.quick,
        )  # fmt: skip

    def judge(
        self, overhead: Mapping[str, float], spread: Mapping[str, float], by_clocks: Mapping[str, float]
    ) -> list[str]:
        return [
            f"{LABELS[mode]} costs {overhead[mode]:.2%} +-{spread[mode]:.2%} of a step ({by_clocks[mode]:.2%} by the clocks), "
            f"to reach {goal:.0%}"
            for mode, goal in self.goals.items()
            if overhead[mode] > goal
        ]

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            mode, rate = cell["mode"], cell["peers"]["paper"]["images_per_s"]
            error = f" +-{cell['standard_error']:.2%}" if cell.get("standard_error") is not None else ""
            costs = show(cell["overhead"], "+.2%") + error, *(show(cell.get(f"overhead_by_{key}"), "+.2%") for key in ("cpu", "clocks"))
            lost = show(rate / self.rates["none"] - 1 if mode != "none" else None, "+.2%")
            step = f"{cell['ours']['median_s']:.3f} s", f"{cell['images_per_s']:.2f}"
            rows.append((LABELS.get(mode, "no monitor"), *step, *costs, f"{rate:.1f}", lost))
        columns = ("monitor", "step", "img/s", "overhead", "by CPU time", "by clocks", "paper img/s", "paper")
        return TableRows("what monitoring costs", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        cells = result["cells"]
        bars = {
            "ours": [cell["images_per_s"] / cells[0]["images_per_s"] for cell in cells],
            "paper": [self.rates[cell["mode"]] / self.rates["none"] for cell in cells],
        }
        labels = [LABELS.get(cell["mode"], "no monitor") for cell in cells]
        return [Panel(y="img/s, relative", bars=bars, labels=labels, limits=(0.7, 1.05))]

    def headline(self, result: Result) -> Headline:
        published, measured = self.paper["overhead"]["noise_scale"], result["overhead"]["noise_scale"]
        return "cost of monitoring the noise scale", f"{published:.1%}", f"{measured:.2%}"
