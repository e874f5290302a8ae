"""Figures 4, 6 and 7 of KungFu: batch sizes that follow the noise, workers that are added, and the latency of a resize."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from pliant_repro.figures import launch
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, num_cores, show, show_span, show_time, timed
from pliant_repro.figures.launch import RunLog, Task

HOURS_S = 6 * 3600.0


# --- figure 4 ---


class AdaptiveBatch(Figure):
    """A batch size that follows the gradient's noise, beside a small and a large fixed one.

    Three jobs per seed with the same model, data, learning rate and number of epochs: a small batch, one 32 times as large,
    and one that begins small and is grown by `GrowBatchSize`. The claims: the adaptive job ends as accurate as the small
    batch and gets there in less time; the large batch is not as accurate; and the batch only grows, on all workers alike,
    once per epoch at most.
    """

    name = "kungfu-fig4"
    about = "batch sizes that follow the gradient's noise: accuracy over time, beside fixed ones"
    usual_s = 170
    modes = {"small": "tab:orange", "large": "tab:red", "adaptive": "tab:blue"}
    growth, threshold = 32, 8
    """The large batch over the small one (1024 over 32 in the paper), and the noise scale over the batch that it allows."""
    within, less_time = 0.005, 0.20
    """Tolerated loss of accuracy of the adaptive job, and the share of time that it must save."""
    smoothed = 5
    """Epochs that an accuracy is the mean of, because that of one epoch varies."""
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
        cells = []
        with TemporaryDirectory(prefix="pliant-fig4-") as folder:
            task = self.task(options, options.data or launch.save_digits(Path(folder) / "digits.npz"))
            for seed in options.choose(quick=(1,), usual=(1, 2), full=(1, 2, 3)):
                for mode in self.modes:
                    options.say(f"{mode}, seed {seed}")
                    cells.append(self.cell(mode, seed, self.train(mode, seed, task)))
                    options.say(f"  accuracy {cells[-1]['final_accuracy']:.2%} after {cells[-1]['times_s'][-1]:.1f} s")
        return self.result_of(cells, options, judged=not options.quick)

    def task(self, options: Options, data: str) -> Task:
        named: dict[str, Any] = {"model": "small-net", "replicas": 4, "evaluate": True, "data": data}
        if not options.data:
            return Task(**named, batch=4, epochs=options.choose_steps(quick=4, usual=80, full=200), lr=0.02)
        # The artifact's rate for 32 samples of each of 4 workers.
        epochs = options.choose_steps(quick=1, usual=60, full=200)
        return Task(**named, batch=32, epochs=epochs, lr=0.025, device=options.where)

    def train(self, mode: str, seed: int, task: Task) -> RunLog:
        policy = ["--policy", f"grow-batch-size:threshold={self.threshold},max_batch={task.batch * self.growth}"]
        chosen = replace(task, seed=seed, batch=task.batch * (self.growth if mode == "large" else 1))
        np = 1 if task.device == "cuda" else 2
        return launch.train(chosen, np=np, run=policy if mode == "adaptive" else (), timeout_s=HOURS_S)

    def cell(self, mode: str, seed: int, log: RunLog) -> Result:
        """Return the course of one job: accuracies over seconds of training, and pairs of (step, batch size)."""
        batches: dict[int, dict[int, int]] = {}
        epochs = {}
        for turn in (turn for worker in log.workers for turn in worker):
            batches.setdefault(turn.rank, {})[turn.step] = turn.batch
            epochs[turn.step] = turn.epoch
        sizes = sorted(batches[0].items())
        changes = sizes[:1] + [now for before, now in pairwise(sizes) if before[1] != now[1]]
        changed = [epochs[step] for step, _ in changes[1:]]
        faults = {
            "the batch has shrunk": any(now < before for (_, before), (_, now) in pairwise(changes)),
            "not all workers had the same batch sizes": any(each != batches[0] for each in batches.values()),
            "the batch has changed twice in an epoch": len(set(changed)) != len(changed),
        }
        accuracies = [one["accuracy"] for one in log.epochs]
        return {
            "mode": mode, "seed": seed, "times_s": [one["time_s"] for one in log.epochs], "accuracies": accuracies,
            "final_accuracy": self.smooth(accuracies)[-1], "changes": changes,
            "faults": [f"{mode}, seed {seed}: {text}" for text, is_wrong in faults.items() if is_wrong],
        }  # fmt: skip

    def smooth(self, accuracies: Sequence[float]) -> list[float]:
        ends = range(1, len(accuracies) + 1)
        return [fmean(accuracies[max(0, end - self.smoothed) : end]) for end in ends]

    def time_to(self, cell: Result, accuracy: float) -> float | None:
        pairs = zip(cell["times_s"], self.smooth(cell["accuracies"]), strict=True)
        return next((time_s for time_s, value in pairs if value >= accuracy), None)

    def result_of(self, cells: Sequence[Result], options: Options, *, judged: bool) -> Result:
        """Return the figure out of its jobs; not `judged` means too short to say which is more accurate."""
        by_mode = {mode: [cell for cell in cells if cell["mode"] == mode] for mode in self.modes}
        finals = {mode: fmean(cell["final_accuracy"] for cell in mine) for mode, mine in by_mode.items()}
        target = finals["small"] - self.within
        ours: Result = {}
        for mode, mine in by_mode.items():
            times = [self.time_to(cell, target) for cell in mine]
            reached = [time_s for time_s in times if time_s is not None]
            ours[mode] = {
                "final_accuracy": finals[mode],
                "time_to_accuracy_s": fmean(reached) if len(reached) == len(times) else None,
                "time_s": fmean(cell["times_s"][-1] for cell in mine),
                "final_batch": max(cell["changes"][-1][1] for cell in mine),
            }
        complaints = [fault for cell in cells for fault in cell["faults"]]
        remarks = [
            f"accuracies are means of {self.smoothed} epochs and of the seeds; the time is training, without evaluation, "
            f"until small's final accuracy less {self.within:.1%} is reached",
            "the large batch has the learning rate of the small one: 32 times that, as in the artifact, diverges here",
        ]
        if judged:
            complaints += self.judge(ours)
            if all(len(cell["changes"]) == 1 for cell in by_mode["adaptive"]):
                complaints.append("the adaptive batch has never grown")
        else:
            remarks.append("--quick is too short to compare accuracies: only the batch sizes were judged")
        return self.result(
            options,
            ours=ours,
            cells=cells,
            complaints=complaints,
            remarks=remarks,
            target_accuracy=target,
            judged=judged,
        )

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
            times = (
                f"{time_s:.1f} s" if time_s else "never",
                show(1 - time_s / small_s if time_s and small_s else None, "+.0%"),
            )
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
        task, num_runs, most = self.task(options)
        steps = options.choose_steps(*((5, 20, 800) if options.data else (10, 20, 100)))
        sweep_steps = (2 if options.quick or options.data else 3) * steps
        sweep, runs = {}, []
        for workers in range(1, most + 1):
            rows = self.train(replace(task, steps=sweep_steps), workers, most)
            sweep[workers] = median(rate for _, _, rate in rows[len(rows) // 2 :])
            options.say(f"sweep: {workers} workers, {sweep[workers]:.1f} samples/s")
        for number in range(num_runs):
            runs.append(self.train(replace(task, provision=(most, steps, self.alpha)), 1, most))
            options.say(f"run {number + 1} of {num_runs}: stopped at {runs[-1][-1][1]} workers")
        return self.result_of(sweep, runs, options)

    def task(self, options: Options) -> tuple[Task, int, int]:
        """Return the task, the number of runs, and the most workers."""
        named: dict[str, Any] = {"model": "bert-squad", "device": options.where}
        if options.data:
            gpus = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
            most = 4 if options.where == "cpu" else max(2, len(gpus))
            return (
                Task(**named, data=str(Path(options.data).resolve()), image_size=384),
                1 if options.quick else 5,
                most,
            )
        if options.quick:  # without transformers, and without need for a quiet machine
            return Task(**named, paced_s=0.1, devices=2, batch=2, image_size=16), 1, 3
        return Task(**named, image_size=64), 5 if options.full else 3, num_cores() + 2

    @staticmethod
    def train(task: Task, np: int, most: int) -> list[tuple[int, int, float]]:
        """Return (step, workers, samples per second) of each step of the first worker that had no change in it."""
        log = launch.train(task, np=np, run=["-w", "-H", f"127.0.0.1:{most}"], timeout_s=HOURS_S)
        return [
            (now.step, now.size, now.size * now.batch / (now.at_s - before.at_s))
            for before, now in pairwise(log.workers[0])
            if now.size == before.size
        ]

    def bar(self, smaller: int, larger: int) -> float:
        """Return how many times the throughput of the smaller size the larger one must have."""
        return 1 + self.alpha * (larger - smaller) / larger

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

    def result_of(
        self, sweep: Mapping[int, float], runs: Sequence[Sequence[tuple[int, int, float]]], options: Options
    ) -> Result:
        """Return the figure out of the throughput of each size, and the steps of the jobs that grew."""
        allowed, best = self.accepted(sweep), self.best_of(sweep)
        stopped = [rows[-1][1] for rows in runs]
        complaints = [
            f"run {number}: stopped at {workers} workers; the sweep allows {allowed}"
            for number, workers in enumerate(stopped, 1)
            if workers not in allowed
        ]
        if best in (1, max(sweep)):
            complaints.append(
                f"the sweep is best with {best} workers, an end of it: nothing can be said about stopping"
            )
        ours = {"best": best, "accepted": allowed, "stopped_at": stopped, "samples_per_s": sweep[best]}
        cells = [{"workers": size, "samples_per_s": rate, "per_worker": rate / size} for size, rate in sweep.items()]
        what = (
            "paced compute on 2 devices" if options.quick and not options.data else "workers share this machine's cores"
        )
        remarks = [
            f"{what}; sizes that the sweep allows: {', '.join(map(str, allowed))}",
            "sweep and runs are measured one after the other: let nothing else compute on this machine meanwhile",
        ]
        kept = [{"rows": rows} for rows in runs]
        return self.result(options, ours=ours, cells=cells, complaints=complaints, remarks=remarks, runs=kept)

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
        schedule.append((schedule[-1][0] + 10, 0))
        # Training continues while a worker starts; that it takes part is awaited only when the next change is due.
        held = tuple((later - 3, size) for (_, size), (later, _) in pairwise(schedule))
        model = options.choose_models(quick=("neumf",), usual=("resnet50",))[0]
        scale = options.scale or ("tiny" if options.quick else "small")
        task = Task(
            model=model,
            scale=scale,
            steps=schedule[-1][0] + 100,
            replicas=2,
            pace_s=pace_s,
            resizes=tuple(schedule),
            hold=held,
        )
        options.say(f"{model}: an elastic job, {cycles} x 1 -> 2 -> 1 workers")
        here = launch.train(task, np=1, run=["-w", "-H", "127.0.0.1:2"]).output
        hosts = 2 if options.quick else 4
        options.say(f"{hosts} hosts: an elastic job, 1 -> {hosts} -> 1 workers by the artifact's schedule")
        cells = [*self.cells(2, "", here), *self.cells(hosts, " hosts", self.on_hosts(hosts, options))]
        return self.result_of(cells, cycles, options)

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
        model, batch, side = options.choose(
            quick=("ResNet56", 2, 0), usual=("ResNet50", 2, 64), full=("ResNet50", 32, 0)
        )
        resizes = tuple(self.artifact_schedule(hosts, 30 if options.quick else 100))
        task = Task(model=f"image:{model}", batch=batch, image_size=side, device=options.where, resizes=resizes)
        environ = launch.environment() | {"PLIANT_SECRET": secrets.token_hex(32)}

        def run_one(address: str) -> str:
            flags = ["-q", "-w", "-np", "1", "-H", ",".join(f"{each}:1" for each in addresses), "-port", str(port)]
            command = [*launch.PLIANT, "run", *flags, "-self", address, *launch.program(task, Path())]
            return launch.finish(command, environ, f"the runner of {address}", 600)

        with ThreadPoolExecutor(hosts, "host") as pool:
            return "".join(pool.map(run_one, addresses))

    def cells(self, most: int, unit: str, output: str) -> list[Result]:
        """Return, from a job's output, the cells of growing from one to `most` workers and of shrinking back."""
        found: dict[tuple[int, int], list[float]] = {(1, most): [], (most, 1): []}
        for old, new, number, unit_s in self.line.findall(output):
            found.get((int(old), int(new)), []).append(float(number) * (1e-3 if unit_s == "ms" else 1.0))
        joins = [float(seconds) for workers, seconds in self.joined.findall(output) if int(workers) == most]
        cells = []
        for (old, new), pauses in found.items():
            paper_s = self.paper["grow" if new > old else "shrink"]["median_s"]
            paper = {"median_s": paper_s, "iqr_s": None, "speedup": paper_s / median(pauses) if pauses else None}
            more = {"until_joined": timed(joins)} if new > old else {}
            cells.append(
                {"resize": f"{old} -> {new}{unit}", "ours": {**timed(pauses), **more}, "peers": {"paper": paper}}
            )
        return cells

    def result_of(self, cells: Sequence[Result], cycles: int, options: Options) -> Result:
        """Return the figure out of the cells of the job on one host, and those of the job on several."""
        grow, shrink = cells[0]["ours"], cells[1]["ours"]
        times = {key: value for key, value in grow.items() if key != "until_joined"}
        remarks = [
            "ours: the pause between two steps; the new worker starts while training continues (until_joined)",
            "hosts are loopback addresses with a runner each, and share this machine's cores; on real ones: pliant run --ssh "
            "-hostfile hosts.txt -w -np 1 python3 benchmarks/scaling/benchmark_kungfu_scaling.py --elastic --resize-schedule ...",
        ]
        ours = {**times, "grow": times, "shrink": shrink, "until_joined": grow["until_joined"]}
        complaints = self.judge(cells[:2], cycles) + self.judge(cells[2:], 1)
        return self.result(options, ours=ours, cells=cells, complaints=complaints, remarks=remarks)

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
        return (
            cell["resize"],
            show_time(cell["peers"]["paper"]["median_s"]),
            show_time(cell["ours"]["median_s"]) + joined,
        )
