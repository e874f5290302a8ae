"""Figure 8 of KungFu: what it costs to monitor the gradients' noise scale and variance, in fractions of a step.

One job of 4 replicas trains a ResNet-50, on 4 workers or as many as there are cores, while its monitors are switched on and off
from step to step. Monitors look at gradients, which are the same however large the images are. So their cost in seconds is
measured on small images, where steps are short: each monitored step, with the next one where that pays a part of it, is
compared with those around it. The median of these comparisons is divided by the time of a step with full batches.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
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


def windows(mode: str, modes: Sequence[str]) -> list[range]:
    """Return the steps of a mode after the first ones; the cost of one step in eight is spread over all eight."""
    size = 8 if mode == "variance_every_8" else 1
    begins = [step for step, each in enumerate(modes) if each == mode][::size]
    return [range(begin, begin + size) for begin in begins if begin >= len(WARMUP)]


def extra_times_s(step_s: Sequence[float], mode: str, modes: Sequence[str]) -> list[float]:
    """Return, for each monitored step of a mode, what it takes more than the plain steps around it."""
    found = []
    for window in windows(mode, modes):
        span = range(window.start, window.stop + mode.startswith("variance"))
        last = min(span.stop + len(window), len(modes))
        around = [*range(span.start - len(window), span.start), *range(span.stop, last)]
        plain = [step for step in around if modes[step] == "none" and modes[step - 1] in ("none", "noise_scale")]
        usual_s = fmean(step_s[step] for step in plain)
        found.append((sum(step_s[step] for step in span) - len(span) * usual_s) / len(window))
    return found


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
        options.say(
            f"{model}, {REPLICAS} replicas on {num_workers()} workers, images of {side} x {side}: {task.steps} steps"
        )
        with tempfile.TemporaryDirectory(prefix="pliant-fig8-") as folder:
            launch.train(task, np=num_workers(), timeout_s=3600, folder=Path(folder))
            workers = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("worker-*.json"))]
        return self.result_of(workers, rounds, batch, options)

    def result_of(self, workers: Sequence[Result], rounds: int, batch: int, options: Options) -> Result:
        modes, times_s = schedule(rounds), workers[0]["step_s"]
        full_s, small_s = ([times_s[step] for [step] in windows(mode, modes)] for mode in ("full", "none"))
        extra_s = {mode: extra_times_s(times_s, mode, modes) for mode in LABELS}
        step_s, small = median(full_s), Summary.of(small_s)
        overhead = {mode: median(extra) / step_s for mode, extra in extra_s.items()}
        spread = {mode: standard_error(extra) / step_s for mode, extra in extra_s.items()}
        cells = [
            {
                "mode": mode,
                "ours": timed([each + step_s for each in extra_s[mode]] if mode in LABELS else full_s),
                "images_per_s": batch / (step_s * (1 + overhead.get(mode, 0.0))),
                "overhead": overhead.get(mode),
                "standard_error": spread.get(mode),
                "peers": {"paper": {"median_s": 8 / rate, "iqr_s": None, "images_per_s": rate}},
            }
            for mode, rate in self.rates.items()
        ]
        complaints = [] if options.quick else self.judge(overhead, spread)
        said = {(worker["noise_ratio"], worker["variance"]) for worker in workers}
        if len(said) != 1 or None in next(iter(said)):
            complaints.append("the monitors did not say the same on all workers")
        remarks = [
            f"{REPLICAS} replicas on {num_workers()} workers; a full step without monitors: {step_s:.2f} s, a small one "
            f"{small.median:.3f} s, half of them within {small.iqr / small.median:.1%} of each other",
            f"the cost in seconds is the median over {len(extra_s['noise_scale'])} comparisons of monitored steps with "
            f"those around them ({len(extra_s['variance'])} for the variance); +- is that median's standard error",
            *(
                ["--quick trains a small net on tiny images: its steps are too short for the shares to mean anything"]
                * options.quick
            ),
        ]
        return self.result(
            options, ours=timed(full_s), cells=cells, complaints=complaints, remarks=remarks, overhead=overhead,
            judged=not options.quick,
        )  # fmt: skip

    def judge(self, overhead: Mapping[str, float], spread: Mapping[str, float]) -> list[str]:
        return [
            f"{LABELS[mode]} costs {overhead[mode]:.2%} +-{spread[mode]:.2%} of a step, to reach {goal:.0%}"
            for mode, goal in self.goals.items()
            if overhead[mode] > goal
        ]

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            mode, rate = cell["mode"], cell["peers"]["paper"]["images_per_s"]
            error = f" +-{cell['standard_error']:.2%}" if cell.get("standard_error") is not None else ""
            lost = show(rate / self.rates["none"] - 1 if mode != "none" else None, "+.2%")
            step = f"{cell['ours']['median_s']:.3f} s", f"{cell['images_per_s']:.2f}"
            rows.append(
                (LABELS.get(mode, "no monitor"), *step, show(cell["overhead"], "+.2%") + error, f"{rate:.1f}", lost)
            )
        columns = ("monitor", "step", "img/s", "overhead", "paper img/s", "paper")
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
