"""Figures 4, 6 and 7 of KungFu: batch sizes that follow the noise, workers that are added, and the latency of a resize."""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pliant.adapt.size import next_size
from pliant_repro.figures import launch
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, num_cores, show, show_span, show_time, timed
from pliant_repro.figures.launch import RunLog, Task

HOURS_S = 6 * 3600.0


# --- figure 4 ---


@dataclass(slots=True)
class BatchCourse:
    """The course of one job of figure 4."""

    mode: str
    seed: int
    times_s: list[float] = field(default_factory=list)
    """Seconds of training at the end of each epoch, without evaluation."""
    accuracies: list[float] = field(default_factory=list)
    batches: dict[int, dict[int, int]] = field(default_factory=dict)
    """Batch size by step, for each rank."""
    epoch_of: dict[int, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Lines that the job has printed."""
    smoothed = 5
    """Epochs that an accuracy is the mean of, because that of one epoch varies."""

    @classmethod
    def of(cls, mode: str, seed: int, log: RunLog) -> BatchCourse:
        lines = [line.partition("] ")[2] for line in log.output.splitlines() if "::stdout]" in line]
        course = cls(mode, seed, [one["time_s"] for one in log.epochs], [one["accuracy"] for one in log.epochs], lines=lines)
        for turn in (turn for worker in log.workers for turn in worker):
            course.batches.setdefault(turn.rank, {})[turn.step] = turn.batch
            course.epoch_of[turn.step] = turn.epoch
        return course

    @property
    def smooth(self) -> list[float]:
        ends = range(1, len(self.accuracies) + 1)
        return [fmean(self.accuracies[max(0, end - self.smoothed) : end]) for end in ends]

    @property
    def final(self) -> float:
        return self.smooth[-1]

    def time_to(self, accuracy: float) -> float | None:
        pairs = zip(self.times_s, self.smooth, strict=True)
        return next((time_s for time_s, value in pairs if value >= accuracy), None)

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Pairs of (step, batch size): the first size, and every other one when it begins."""
        sizes = sorted(self.batches[0].items())
        return sizes[:1] + [now for before, now in pairwise(sizes) if before[1] != now[1]]

    @property
    def faults(self) -> list[str]:
        """Faults in the sequence of batch sizes; empty if there are none."""
        epochs = [self.epoch_of[step] for step, _ in self.changes[1:]]
        found = {
            "the batch has shrunk": any(now < before for (_, before), (_, now) in pairwise(self.changes)),
            "not all workers had the same batch sizes": any(sizes != self.batches[0] for sizes in self.batches.values()),
            "the batch has changed twice in an epoch": len(set(epochs)) != len(epochs),
        }
        return [f"{self.mode}, seed {self.seed}: {text}" for text, is_wrong in found.items() if is_wrong]

    def to_json(self) -> Result:
        return {
            "mode": self.mode, "seed": self.seed, "times_s": self.times_s, "accuracies": self.accuracies,
            "final_accuracy": self.final, "changes": self.changes, "trace_is_sound": not self.faults,
        }  # fmt: skip


class AdaptiveBatch(Figure):
    """A batch size that follows the gradient's noise, beside a small and a large fixed one.

    Three jobs per seed with the same model, data, learning rate and number of epochs: a small batch, one 32 times as large,
    and one that begins small and is grown by `GrowBatchSize`. The claims: the adaptive job ends as accurate as the small
    batch and gets there in less time; the large batch is not as accurate; and the batch only grows, on all workers alike,
    once per epoch at most.
    """

    name = "kungfu-fig4"
    about = "batch sizes that follow the gradient's noise: accuracy over time, beside fixed ones"
    usual_s = 215
    modes = {"small": "tab:orange", "large": "tab:red", "adaptive": "tab:blue"}
    growth, threshold = 32, 8
    """The large batch over the small one (1024 over 32 in the paper), and the noise scale over the batch that it allows."""
    within, less_time = 0.005, 0.20
    """Tolerated loss of accuracy of the adaptive job, and the share of time that it must save."""
    paper = {
        "small": "high accuracy, slow",
        "large": "fast, does not converge to high accuracy",
        "adaptive": "the accuracy of small, faster",
        "hardware": "ResNet-56 on CIFAR-10, 4 x 32 and 4 x 1024; about 6 h on 4 K80, 3 h on 4 TITAN X; no figures published",
    }
    title = "Accuracy over time, by batch size"
    caveats = (
        "the published runs took 3 to 6 h on 4 GPUs (ResNet-56 on CIFAR-10: --data DIR --full) and have no published numbers, "
        "only curves; the default is a small network on handwritten digits",
    )

    def run(self, options: Options) -> Result:
        courses = []
        with tempfile.TemporaryDirectory(prefix="pliant-fig4-") as folder:
            data = options.data or launch.save_digits(Path(folder) / "digits.npz")
            for seed in options.choose(quick=(1,), usual=(1, 2), full=(1, 2, 3)):
                for mode in self.modes:
                    options.say(f"{mode}, seed {seed}")
                    courses.append(self.train(mode, seed, self.task(data, options), 2))
                    options.say(f"  accuracy {courses[-1].final:.2%} after {courses[-1].times_s[-1]:.1f} s")
        return self.result_of(courses, options, judged=not options.quick)

    def task(self, data: str, options: Options) -> Task:
        named: dict[str, Any] = {"model": "small-net", "replicas": 4, "evaluate": True, "data": data}
        if not options.data:
            epochs = options.choose_steps(quick=4, usual=80, full=200)
            return Task(**named, batch=4, epochs=epochs, lr=0.02)
        # The artifact's rate for 32 samples of each of 4 workers.
        epochs = options.choose_steps(quick=1, usual=60, full=200)
        return Task(**named, batch=32, epochs=epochs, lr=0.025, device=options.where)

    def train(self, mode: str, seed: int, task: Task, workers: int) -> BatchCourse:
        small = task.batch
        policy = ["--policy", f"grow-batch-size:threshold={self.threshold},max_batch={small * self.growth}"]
        chosen = replace(task, seed=seed, batch=small * (self.growth if mode == "large" else 1))
        np = 1 if task.device == "cuda" else workers
        log = launch.train(chosen, np=np, run=policy if mode == "adaptive" else (), timeout_s=HOURS_S)
        return BatchCourse.of(mode, seed, log)

    def result_of(self, courses: Sequence[BatchCourse], options: Options, *, judged: bool) -> Result:
        """Return the figure out of its jobs; not `judged` means too short to say which is more accurate."""
        by_mode = {mode: [course for course in courses if course.mode == mode] for mode in self.modes}
        finals = {mode: fmean(course.final for course in mine) for mode, mine in by_mode.items()}
        target = finals["small"] - self.within
        ours: Result = {}
        for mode, mine in by_mode.items():
            times = [course.time_to(target) for course in mine]
            reached = [time_s for time_s in times if time_s is not None]
            ours[mode] = {
                "final_accuracy": finals[mode],
                "time_to_accuracy_s": fmean(reached) if len(reached) == len(times) else None,
                "time_s": fmean(course.times_s[-1] for course in mine),
                "final_batch": max(course.changes[-1][1] for course in mine),
            }
        complaints = [fault for course in courses for fault in course.faults]
        remarks = [
            f"accuracies are means of {BatchCourse.smoothed} epochs and of the seeds; the time is training, without evaluation, "
            f"until small's final accuracy less {self.within:.1%} is reached",
            "the large batch has the learning rate of the small one: 32 times that, as in the artifact, diverges here",
        ]
        if judged:
            complaints += self.judge(ours)
            if all(len(course.changes) == 1 for course in by_mode["adaptive"]):
                complaints.append("the adaptive batch has never grown")
        else:
            remarks.append("--quick is too short to compare accuracies: only the batch sizes were judged")
        cells = [course.to_json() for course in courses]
        lines = by_mode["adaptive"][0].lines
        return self.result(
            options, ours=ours, cells=cells, complaints=complaints, remarks=remarks, lines=lines, target_accuracy=target,
            judged=judged,
        )  # fmt: skip

    def judge(self, ours: Result) -> list[str]:
        wrong = []
        finals = {mode: ours[mode]["final_accuracy"] for mode in self.modes}
        small_s, adaptive_s = (ours[mode]["time_to_accuracy_s"] for mode in ("small", "adaptive"))
        if finals["adaptive"] < finals["small"] - self.within:
            wrong.append(f"adaptive ends with {finals['adaptive']:.2%}, small with {finals['small']:.2%}")
        if finals["large"] >= finals["small"] - self.within:
            wrong.append(f"large ends with {finals['large']:.2%}, which is as good as small's {finals['small']:.2%}")
        if small_s is None or adaptive_s is None:
            wrong.append("not every seed of small and adaptive reached the accuracy that is timed")
        elif adaptive_s > (1 - self.less_time) * small_s:
            wrong.append(f"adaptive takes {adaptive_s:.1f} s to that accuracy, small {small_s:.1f} s: not 20 % less")
        return wrong

    def table(self, result: Result) -> TableRows:
        rows = []
        small_s = result["ours"]["small"]["time_to_accuracy_s"]
        for mode in self.modes:
            one = result["ours"][mode]
            time_s = one["time_to_accuracy_s"]
            times = f"{time_s:.1f} s" if time_s else "never", show(1 - time_s / small_s if time_s and small_s else None, "+.0%")
            rows.append(
                (mode, f"{one['final_accuracy']:.2%}", f"{one['time_s']:.1f} s", *times, f"4 x {one['final_batch']}")
            )
        until = f"until {result['target_accuracy']:.2%}"
        columns = ("batch", "final accuracy", "training", until, "less time", "last batch")
        return TableRows("accuracy and time by batch size", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        accuracy: dict[str, Points] = {}
        batch: dict[str, Points] = {}
        for one in result["cells"]:
            label = ("" if one["seed"] == 1 else f"_{one['seed']}") + one["mode"]
            accuracy[label] = (one["times_s"], one["accuracies"], "-", self.modes[one["mode"]])
            steps, sizes = zip(*one["changes"], (one["changes"][-1][0] + 50, one["changes"][-1][1]), strict=True)
            batch[label] = (steps, sizes, "-", self.modes[one["mode"]])
        target = [result["target_accuracy"]]
        return [
            Panel(x="s of training", y="accuracy", lines=accuracy, levels=target, limits=None),
            Panel(x="step", y="batch of a replica", lines=batch, scale="log"),
        ]

    def headline(self, result: Result) -> Headline:
        ours = result["ours"]["adaptive"]
        reached = show(ours["time_to_accuracy_s"], ".1f", " s to small's accuracy")
        return "adaptive batches", str(self.paper["adaptive"]), f"{ours['final_accuracy']:.2%}, {reached}"


# --- figure 6 ---


@dataclass(frozen=True, slots=True)
class GrowthCourse:
    """The course of a job that grew by itself."""

    workers: int
    """Workers when the job had come to rest."""
    done: bool
    history: list[list[float]]
    """[workers, samples per second] of each window that was decided on."""
    rows: list[tuple[int, int, float]]
    """(step, workers, samples per second), from out_0.csv."""
    lines: list[str]


class Provisioning(Figure):
    """Workers are added as long as each is worth it: where that stops, beside a sweep over all sizes.

    First a job of each size, whose throughput is measured. Then elastic jobs that begin with one worker and grow by the
    policy `Provision`. The claim: every time they stop at the size that the sweep shows to be best (the smallest that is
    not worth enlarging), or beside it if that differs by less than the threshold. The model is a small BERT, and every
    worker computes with one thread, so more workers than cores are not worth it.
    """

    name = "kungfu-fig6"
    about = "workers are added as long as they are worth it: where that stops, beside all sizes"
    usual_s = 151
    alpha = 1 / 3
    """The artifact's: how much of its fair share a worker must add."""
    paper = {
        "hardware": "BERT-base on SQuAD 2.0, 4 GPUs, 8 samples per worker, windows of 800 steps",
        "examples_per_s_per_worker": 12.67,
        "workers_of_that": 3,
    }
    title = "Adaptive provisioning"
    caveats = (
        "where adding workers stops being worth it is a property of the machine: 4 GPUs of the paper, the cores here. What is "
        "judged is that it stops where a sweep over all sizes says it should. The full size is BERT-base on SQuAD 2.0 on 4 GPUs: "
        "--data DIR with train-v2.0.json and BERT, --full for 800 steps",
    )

    def run(self, options: Options) -> Result:
        task, runs, most = self.task(options)
        steps = options.choose_steps(*((5, 20, 800) if options.data else (10, 20, 100)))
        sweep_steps = (2 if options.quick or options.data else 3) * steps
        sweep, courses = {}, []
        with tempfile.TemporaryDirectory(prefix="pliant-fig6-") as folder:
            for workers in range(1, most + 1):
                log_folder = Path(folder) / f"sweep-{workers}"
                launch.train(replace(task, steps=sweep_steps), np=workers, run=self.hosts(most), folder=log_folder)
                rows = self.read_rows(log_folder)
                sweep[workers] = median(rate for _, _, rate in rows[len(rows) // 2 :])
                options.say(f"sweep: {workers} workers, {sweep[workers]:.1f} samples/s")
            for number in range(runs):
                courses.append(self.provision(task, steps, most, Path(folder) / f"run-{number}"))
                options.say(f"run {number + 1} of {runs}: stopped at {courses[-1].workers} workers")
        return self.result_of(sweep, courses, options)

    def task(self, options: Options) -> tuple[Task, int, int]:
        """Return the task, the number of runs, and the most workers."""
        named: dict[str, Any] = {"model": "bert-squad", "device": options.where, "epochs": 1000}
        if options.data:
            gpus = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
            most = 4 if options.where == "cpu" else max(2, len(gpus))
            return Task(**named, data=str(Path(options.data).resolve()), image_size=384), 1 if options.quick else 5, most
        if options.quick:  # without transformers, and without need for a quiet machine
            return Task(**named, paced_s=0.1, devices=2, batch=2, image_size=16), 1, 3
        return Task(**named, image_size=64), 5 if options.full else 3, num_cores() + 2

    @staticmethod
    def hosts(most: int) -> list[str]:
        return ["-w", "-H", f"127.0.0.1:{most}"]

    def provision(self, task: Task, steps: int, most: int, folder: Path) -> GrowthCourse:
        growing = replace(task, provision=(most, steps, self.alpha))
        log = launch.train(growing, np=1, run=self.hosts(most), folder=folder, timeout_s=HOURS_S)
        found = json.loads((folder / "provision.json").read_text())
        lines = re.findall(r"resize \d+ -> \d+ took [\d.]+m?s|policy \w+: .*", log.output)
        return GrowthCourse(found["workers"], found["done"], found["history"], self.read_rows(folder), lines)

    @staticmethod
    def read_rows(folder: Path) -> list[tuple[int, int, float]]:
        """Return the first worker's steps without those that had a change in them."""
        with (folder / "out_0.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["sub_step"]) > 0]
        return [(int(row["global_step"]), int(row["num_workers"]), float(row["throughput"])) for row in rows]

    def bar(self, smaller: int, larger: int) -> float:
        """Return how many times the throughput of the smaller size the larger one must have."""
        return 1 + self.alpha * (larger - smaller) / larger

    def by_rule(self, sweep: Mapping[int, float]) -> int:
        """Return where the rule stops if it is given the sweep's throughputs."""
        size, most = 1, max(sweep)
        while (larger := next_size(size, 0, most)) is not None and sweep[larger] >= self.bar(size, larger) * sweep[size]:
            size = larger
        return size

    def best_of(self, sweep: Mapping[int, float]) -> int:
        """Return the smallest size that is not worth enlarging: of a plateau, its beginning."""

        def is_enough(size: int) -> bool:
            return all(rate < self.bar(size, larger) * sweep[size] for larger, rate in sweep.items() if larger > size)

        return next(size for size in sorted(sweep) if is_enough(size))

    def accepted(self, sweep: Mapping[int, float]) -> list[int]:
        """Return the best size, and those beside it that differ by less than the threshold."""
        best = self.best_of(sweep)
        beside = [size for size in (best - 1, best + 1) if size in sweep]
        near = [size for size in beside if sweep[best] < self.bar(min(size, best), max(size, best)) * sweep[size]]
        return sorted([best, *near])

    def result_of(self, sweep: Mapping[int, float], courses: Sequence[GrowthCourse], options: Options) -> Result:
        allowed, best, rule = self.accepted(sweep), self.best_of(sweep), self.by_rule(sweep)
        complaints = []
        for number, course in enumerate(courses, 1):
            if course.workers not in allowed:
                complaints.append(f"run {number}: stopped at {course.workers} workers; the sweep allows {allowed}")
            if not course.done:
                complaints.append(f"run {number}: did not come to rest")
        if best in (1, max(sweep)):
            complaints.append(f"the sweep is best with {best} workers, an end of it: nothing can be said about stopping")
        ours = {
            "best": best, "accepted": allowed, "by_rule": rule, "stopped_at": [course.workers for course in courses],
            "samples_per_s": sweep[best],
        }  # fmt: skip
        cells = [{"workers": size, "samples_per_s": rate, "per_worker": rate / size} for size, rate in sweep.items()]
        what = "paced compute on 2 devices" if options.quick and not options.data else "workers share this machine's cores"
        runs = [
            {"workers": one.workers, "history": one.history, "rows": one.rows, "lines": one.lines} for one in courses
        ]
        remarks = [
            f"{what}; sizes that the sweep allows: {', '.join(map(str, allowed))}; the rule on the sweep's numbers: {rule}",
            "sweep and runs are measured one after the other: let nothing else compute on this machine meanwhile",
        ]
        lines = courses[0].lines if courses else []
        return self.result(options, ours=ours, cells=cells, complaints=complaints, remarks=remarks, runs=runs, lines=lines)

    def table(self, result: Result) -> TableRows:
        ours, rows = result["ours"], []
        for one in result["cells"]:
            size = one["workers"]
            near = "within the threshold" if size in ours["accepted"] else ""
            stopped = str(ours["stopped_at"].count(size) or "")
            rates = f"{one['samples_per_s']:.1f}", f"{one['per_worker']:.1f}"
            rows.append((str(size), *rates, "best" if size == ours["best"] else near, stopped))
        columns = ("workers", "samples/s", "per worker", "sweep", "runs that stopped here")
        return TableRows("throughput by size, and where provisioning stops", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        sizes, rates = zip(*((one["workers"], one["samples_per_s"]) for one in result["cells"]), strict=True)
        grown: dict[str, Points] = {}
        for number, one in enumerate(result["runs"]):
            steps = [row[0] for row in one["rows"]]
            grown[f"run {number + 1}"] = (steps, [row[2] for row in one["rows"]], ".", None)
        return [
            Panel(x="workers", y="samples/s", lines={"_sweep": (sizes, rates, "o-", "tab:blue")}),
            Panel(x="step", y="samples/s", lines=grown),
        ]

    def headline(self, result: Result) -> Headline:
        stopped = f"{show_span(result['ours']['stopped_at'], 'd')} (best of the sweep: {result['ours']['best']})"
        return "workers where it stops", f"{self.paper['workers_of_that']} of 4 GPUs", stopped


# --- figure 7 ---


class ResizeLatency(Figure):
    """The latency of a resize, from 1 worker to 2 and back, and from 1 host to all and back.

    Elastic jobs that print the artifact's lines: one on a single host, and one by the artifact's schedule
    10:$np,20:1,30:$np,...,100:0 with a runner for each of several loopback addresses. They print the pause between two
    steps, because training continues while a worker starts. KungFu's 20.39 s for 1 -> 2 include that start, so the time
    from the request to the first step with all workers stands beside it.
    """

    name = "kungfu-fig7"
    about = "how long a resize takes, 1 -> 2 and 2 -> 1"
    usual_s = 110
    paper = {"grow": {"median_s": 20.39}, "shrink": {"median_s": 0.04012}}
    line = re.compile(r"resize (\d+) -> (\d+) took ([\d.]+)(ms|s)")
    joined = re.compile(r"request to first step with (\d+) workers: ([\d.]+)s")
    title = "Resize latency"
    caveats = (
        "the published 20.39 s for 1 -> 2 contain the start of a process and of TensorFlow; here training continues meanwhile. "
        "The time until the new worker takes part stands beside the pause",
    )

    def run(self, options: Options) -> Result:
        cycles = options.choose_steps(quick=1, usual=5, full=20)
        half, pace_s = (20, 0.03) if options.quick else (40, 0.05)
        schedule = [(10 + half * number, 2 - number % 2) for number in range(2 * cycles)]
        end = schedule[-1][0] + 10
        model = options.choose_models(quick=("neumf",), usual=("resnet50",))[0]
        scale = options.scale or ("tiny" if options.quick else "small")
        task = Task(model=model, scale=scale, steps=end + 100, replicas=2, pace_s=pace_s)
        options.say(f"{model}: an elastic job, {cycles} x 1 -> 2 -> 1 workers")
        log = launch.train_elastic(task, 1, [*schedule, (end, 0)], at_once=False)
        hosts = 2 if options.quick else 4
        options.say(f"{hosts} hosts: an elastic job, 1 -> {hosts} -> 1 workers by the artifact's schedule")
        return self.result_of(log, schedule, options, [(hosts, self.on_hosts(hosts, options))])

    @staticmethod
    def artifact_schedule(hosts: int, last: int = 100) -> list[tuple[int, int]]:
        """Return 10:$np,20:1,30:$np,...,`last`:0."""
        return [*((step, hosts if step % 20 == 10 else 1) for step in range(10, last, 10)), (last, 0)]

    def on_hosts(self, hosts: int, options: Options) -> str:
        """Return the output of a job that a runner on each of so many loopback addresses runs by the artifact's schedule."""
        addresses = [f"127.0.0.{number + 1}" for number in range(hosts)]
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        model, batch, side = options.choose(quick=("ResNet56", 2, 0), usual=("ResNet50", 2, 64), full=("ResNet50", 32, 0))
        resizes = tuple(self.artifact_schedule(hosts, 30 if options.quick else 100))
        task = Task(model=f"image:{model}", batch=batch, image_size=side, device=options.where, resizes=resizes)
        environ = launch.environment() | {"PLIANT_SECRET": secrets.token_hex(32)}

        def run_one(address: str) -> str:
            flags = ["-q", "-w", "-np", "1", "-H", ",".join(f"{each}:1" for each in addresses), "-port", str(port)]
            command = [*launch.PLIANT, "run", *flags, "-self", address, *launch.program(task, Path())]
            return launch.finish(command, environ, f"the runner of {address}", 600)

        with ThreadPoolExecutor(hosts, "host") as pool:
            return "".join(pool.map(run_one, addresses))

    def result_of(
        self, log: RunLog, schedule: launch.Schedule, options: Options, hosts: Sequence[tuple[int, str]] = ()
    ) -> Result:
        """Return what the printed lines say; `hosts` has the output of jobs on so many hosts."""
        lines = [match[0] for match in self.line.finditer(log.output)]
        joins = self.join_times_s(log, [step for step, size in schedule if size == 2])
        cells = self.cells(2, "", lines, joins)
        wrong = self.judge(cells, len(schedule) // 2)
        for number, output in hosts:
            found = [match[0] for match in self.line.finditer(output)]
            joined = [float(match[2]) for match in self.joined.finditer(output) if int(match[1]) == number]
            more = self.cells(number, " hosts", found, joined)
            lines, cells, wrong = lines + found, cells + more, wrong + self.judge(more, 1)
        for line in lines:
            options.say(line)
        grow, shrink = cells[0]["ours"], cells[1]["ours"]
        times = {key: value for key, value in grow.items() if key != "until_joined"}
        remarks = [
            "ours: the pause between two steps; the new worker starts while training continues (until_joined)",
            "hosts are loopback addresses with a runner each, and share this machine's cores; on real ones: pliant run --ssh "
            "-hostfile hosts.txt -w -np 1 python3 benchmarks/scaling/benchmark_kungfu_scaling.py --elastic --resize-schedule ...",
        ]
        ours = {**times, "grow": times, "shrink": shrink, "until_joined": grow["until_joined"]}
        return self.result(options, ours=ours, cells=cells, complaints=wrong, remarks=remarks, lines=lines)

    def cells(self, most: int, unit: str, lines: Sequence[str], joins: Sequence[float]) -> list[Result]:
        """Return the cells of growing from one to `most` workers, and of shrinking back."""
        found: dict[tuple[int, int], list[float]] = {(1, most): [], (most, 1): []}
        for line in lines:
            old, new, number, unit_s = self.line.search(line).groups()  # type: ignore[union-attr]
            found.get((int(old), int(new)), []).append(float(number) * (1e-3 if unit_s == "ms" else 1.0))
        cells = []
        for (old, new), pauses in found.items():
            paper_s = self.paper["grow" if new > old else "shrink"]["median_s"]
            paper = {"median_s": paper_s, "iqr_s": None, "speedup": paper_s / median(pauses) if pauses else None}
            more = {"until_joined": timed(joins)} if new > old else {}
            cells.append({"resize": f"{old} -> {new}{unit}", "ours": {**timed(pauses), **more}, "peers": {"paper": paper}})
        return cells

    @staticmethod
    def join_times_s(log: RunLog, asked_at: Sequence[int]) -> list[float]:
        """Return the seconds from each request to the first step with both workers, as the worker that stayed saw it."""
        stayed = max(log.workers, key=len, default=[])
        ends = {turn.step: turn.at_s for turn in stayed}
        grown = [change for change in log.changes if (change.old_size, change.new_size) == (1, 2)]
        times = []
        for step in asked_at:
            change = next((change for change in grown if change.step >= step), None)
            # Asked for when `step - 1` steps were done; the old view's last step was the one before the change.
            if change is not None and {step - 2, change.step - 1} <= ends.keys():
                times.append(ends[change.step - 1] + change.pause_s - ends[step - 2])
        return times

    @staticmethod
    def judge(cells: Sequence[Result], expected: int) -> list[str]:
        wrong = []
        for cell in cells:
            found_s, limit_s = cell["ours"]["median_s"], cell["peers"]["paper"]["median_s"]
            if found_s is None or cell["ours"]["num_samples"] < expected:
                wrong.append(f"{cell['resize']}: fewer than {expected} resizes took place")
            elif found_s > limit_s:
                wrong.append(f"{cell['resize']} took {found_s * 1e3:.1f} ms, the paper's {limit_s * 1e3:.1f} ms")
        return wrong

    @staticmethod
    def _joined_s(cell: Result) -> float | None:
        found: float | None = cell["ours"].get("until_joined", {}).get("median_s")
        return found

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            ours, paper = cell["ours"], cell["peers"]["paper"]
            times = show_time(ours["median_s"]), str(ours.get("num_samples", 0)), show_time(self._joined_s(cell))
            rows.append((cell["resize"], *times, show_time(paper["median_s"]), show(paper["speedup"], ".3g", "x")))
        columns = ("resize", "pause", "resizes", "request to first step", "paper", "paper / pause")
        return TableRows("resize of an elastic job", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        cells = result["cells"]
        seconds = {
            "pause": [cell["ours"]["median_s"] for cell in cells],
            "until joined": [self._joined_s(cell) for cell in cells],
            "paper": [cell["peers"]["paper"]["median_s"] for cell in cells],
        }
        bars = {name: [each and each * 1e3 for each in values] for name, values in seconds.items()}
        return [Panel(y="ms", bars=bars, labels=[cell["resize"] for cell in cells], scale="log")]

    def headline(self, result: Result) -> Headline:
        cell = result["cells"][0]
        joined = f" (new worker takes part after {show_time(self._joined_s(cell))})"
        return cell["resize"], show_time(cell["peers"]["paper"]["median_s"]), show_time(cell["ours"]["median_s"]) + joined
