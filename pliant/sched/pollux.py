"""Pollux' measurements: step times by placement and batch, progress and gradient noise by epoch, and jobs made of them.

The rules of interpolation are those of the published simulator (petuum/adaptdl, osdi21-artifact), written anew from
what it does: a placement is its smallest rotation; a measured one is interpolated in the batch of a device; any other one
linearly in (nodes, devices, batch), over the Delaunay triangles of all means. Times of epochs are rounded to seconds.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pliant.adapt.monitors import gain
from pliant.errors import ConfigError
from pliant.sched.job import Job
from pliant.sched.planner import DeviceType

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Until when the published simulator trains each application; others: until their shortest table ends."""
MAX_LOCAL = {"yolov3": 8}
"""Samples that fit on one device, where that is less than was measured."""
ALONE = ("ncf",)
"""Applications that always have one device: their published jobs do, under every policy."""
_MAX_NODES = 16
"""The measured ones; more count as this many."""
PACKED = 4
"""Devices of a node, where a policy asks how long a step would last before it is placed."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One row of a training with one batch size."""

    progress: float
    iteration: float
    grad_sqr: float
    grad_var: float


class Application:
    """One application's tables."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._times: dict[tuple[int, ...], list[tuple[int, float, float]]] = defaultdict(list)
        for row in _rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
            placement = tuple(int(digit) for digit in row["placement"])
            self._times[placement].append((int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])))
        for times in self._times.values():
            times.sort()
        self._scalability = [
            tuple(float(row[name]) for name in ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"))
            for row in _rows(
                folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
            )
        ]
        self.epochs: dict[int, list[Epoch]] = {}
        """By batch size, which goes up."""
        for path in sorted(folder.glob("validation-*.csv"), key=lambda each: int(each.stem.split("-")[1])):
            self.epochs[int(path.stem.split("-")[1])] = [
                Epoch(*(float(row[name]) for name in ("progress", "iteration", "grad_sqr", "grad_var")))
                for row in _rows(path, ("progress", "iteration", "grad_sqr", "grad_var"))
            ]
        if not self.epochs or not self._times:
            raise ConfigError(f"{folder}: no validation-*.csv or no placements in it; give Pollux' folder of traces")
        self.init_batch, self.max_batch = min(self.epochs), max(self.epochs)
        locals_ = [local for times in self._times.values() for local, _, _ in times]
        self.min_local = min(locals_)
        self.max_local = MAX_LOCAL.get(self.name, max(locals_))
        self.num_epochs = EPOCHS.get(self.name, min(map(len, self.epochs.values())))
        self.progress_at = [
            min(rows[epoch].progress for rows in self.epochs.values()) for epoch in range(self.num_epochs)
        ]
        """At the end of each epoch; the same work, whatever the batch."""
        self._step_times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}

    def step_times(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """Seconds of a step, and of them those for the sum of gradients."""
        rotated = min(placement[turn:] + placement[:turn] for turn in range(len(placement)))
        key = (rotated, local)
        if key not in self._step_times:
            times = self._times.get(rotated)
            found = _interpolated(times, local) if times else self._between(rotated, local)
            if found is None or math.isnan(found[0] + found[1]):
                raise ConfigError(
                    f"{self.name}: no step time for {local} samples on each of {sum(rotated)} devices of {len(rotated)} nodes: "
                    "it is outside of what was measured; use fewer devices or a batch size between the measured ones"
                )
            self._step_times[key] = found
        return self._step_times[key]

    def _between(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        point = [min(len(placement), _MAX_NODES), sum(placement), local]
        [[step, sync]] = self._triangles(point)
        return float(step), float(sync)

    @cached_property
    def _triangles(self) -> Callable[[list[int]], Any]:
        try:
            import numpy as np
            from scipy.interpolate import LinearNDInterpolator  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError("placements that were not measured need SciPy: pip install 'pliant[sim]'") from None
        groups: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        for placement, times in self._times.items():
            for local, step, sync in times:
                groups[len(placement), sum(placement), local].append((step, sync))
        # In the order of the published program, because equal distances leave the triangles to the order of the points.
        means = [(*key, *np.mean(groups[key], axis=0)) for key in sorted(groups)]
        table = np.array(means + self._scalability, np.float64)
        interpolator: Callable[[list[int]], Any] = LinearNDInterpolator(table[:, :3], table[:, 3:])
        return interpolator

    def around(self, batch: int) -> tuple[int, int]:
        """The measured batch sizes next to this one, on both sides."""
        lower = max((each for each in self.epochs if each <= batch), default=None)
        upper = min((each for each in self.epochs if each >= batch), default=None)
        if lower is None or upper is None:
            raise ConfigError(
                f"{self.name}: batch size {batch}: use {self.init_batch} to {self.max_batch}, as measured"
            )
        return lower, upper

    def iterations(self, batch: int, epoch: int) -> float:
        """Steps until the end of an epoch."""
        lower, upper = self.around(batch)
        return _mean(batch, lower, upper, self.epochs[lower][epoch].iteration, self.epochs[upper][epoch].iteration)

    def noise(self, batch: int, epoch: int) -> tuple[float, float]:
        """(sqr, var) of the gradient during an epoch."""
        lower, upper = self.around(batch)
        one, other = self.epochs[lower][epoch], self.epochs[upper][epoch]
        return (
            _mean(batch, lower, upper, one.grad_sqr, other.grad_sqr),
            _mean(batch, lower, upper, one.grad_var, other.grad_var),
        )

    def split(self, batch: int, devices: int, *, always_accumulate: bool = False) -> tuple[int, int]:
        """(samples of one turn of a device, turns) for a global batch.

        One device alone takes two turns where its batch is larger than the initial one: the noise of the gradient
        is only seen between turns. Who predicts for one device (`always_accumulate`) does so for any batch.
        """
        local = math.ceil(batch / devices - 1e-8)
        turns = math.ceil(local / self.max_local - 1e-8)
        if devices == 1 and (always_accumulate or batch > self.init_batch):
            turns = max(2, turns)
        atomic = math.ceil(local / turns - 1e-8)
        return min(atomic, self.max_batch // (devices * turns)), turns

    def step_s(self, batch: int, devices: int) -> float:
        """A step as predicted: packed on nodes of four."""
        return self._predicted(batch, devices)

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - applications live as long as the program
    def _predicted(self, batch: int, devices: int) -> float:
        atomic, turns = self.split(batch, devices, always_accumulate=True)
        packed = (PACKED,) * (devices // PACKED) + ((devices % PACKED,) if devices % PACKED else ())
        step, sync = self.step_times(packed, atomic)
        return step + (step - sync) * (turns - 1)

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def rate(self, placement: tuple[int, ...], batch: int, epoch: int) -> float:
        """Progress per second: steps of the initial batch, counted as what they are worth."""
        atomic, turns = self.split(batch, sum(placement))
        step, sync = self.step_times(placement, atomic)
        total = sum(placement) * atomic * turns
        sqr, var = self.noise(total, epoch)
        return gain(total / self.init_batch, var, sqr) / (step + (step - sync) * (turns - 1))


class ProfiledWork:
    """Epochs of an application, on the devices that it has."""

    def __init__(self, application: Application, batch: int, *, adapts: bool = False) -> None:
        self.application, self.batch, self.adapts = application, batch, adapts
        self.epoch, self.progress = 0, 0.0
        self._placement: tuple[int, ...] = ()

    def placed(self, job: Job) -> None:
        self._placement = tuple(count for _, count in job.placement) or _packed(job.num_devices())
        self._adapt()

    def _adapt(self) -> None:
        if self.adapts and self._placement:
            self.batch = best_batch(self.application, sum(self._placement), self.epoch)

    def advance(self, seconds: float) -> None:
        self._walk(seconds)

    def left_s(self) -> tuple[float, float]:
        """The last second is rounded in what is written down. A job that is said to have ended at the very second of a
        round, but by rounding down, still has its devices in that round: so it is in the published simulator.
        """
        if not self._placement:
            return math.inf, math.inf
        ahead = ProfiledWork(self.application, self.batch, adapts=self.adapts)
        ahead.epoch, ahead.progress, ahead._placement = self.epoch, self.progress, self._placement
        return ahead._walk(math.inf)

    def _walk(self, seconds: float) -> tuple[float, float]:
        """Go on for at most `seconds`; how many of them passed before the end, exactly and in whole seconds."""
        app, gone, exact = self.application, 0.0, 0.0
        while self.epoch < app.num_epochs:
            rate = app.rate(self._placement, self.batch, self.epoch)
            goal = app.progress_at[self.epoch]
            left = seconds - gone
            if self.progress + rate * left < goal:
                self.progress += rate * left
                return seconds, seconds
            # Whole seconds, as published; not more than there are, so that calls with fractions add up, too.
            exact = gone + (goal - self.progress) / rate
            gone += min(float(round((goal - self.progress) / rate)), left)
            self.epoch, self.progress = self.epoch + 1, goal
            self._adapt()
        return exact, gone

    def step_s(self, job: Job, devices: int) -> float:
        return self.application.step_s(self.batch, devices)

    def steps_left(self) -> float:
        """As Optimus is told: from the end of the present epoch to the last one; 1 in the last one."""
        app = self.application
        last = app.num_epochs - 1
        if self.epoch >= last:
            return 1.0
        return app.iterations(self.batch, last) - app.iterations(self.batch, self.epoch)

    @property
    def done(self) -> float:
        """The fraction that is done."""
        return self.progress / self.application.progress_at[-1]


@lru_cache(maxsize=1 << 16)
def best_batch(application: Application, devices: int, epoch: int) -> int:
    """The measured batch size of most goodput on so many devices; of equals the smaller one."""
    worth = {batch: _goodput(application, batch, devices, epoch) for batch in application.epochs}
    return max(worth, key=lambda batch: (worth[batch], -batch))


def goodput(application: Application, devices: int, epoch: int) -> float:
    """What so many devices are worth, with the best batch size for them."""
    return _goodput(application, best_batch(application, devices, epoch), devices, epoch)


@lru_cache(maxsize=1 << 16)
def _goodput(application: Application, batch: int, devices: int, epoch: int) -> float:
    if batch < devices * application.min_local:
        return 0.0
    atomic, _ = application.split(batch, devices)
    if atomic < application.min_local:
        return 0.0
    return application.rate(_packed(devices), batch, min(epoch, application.num_epochs - 1))


def profiled_job(application: Application, name: str, submitted_s: float, replicas: int, batch: int, kind: str) -> Job:
    """A job of a Pollux workload; under every policy with the batch size that it was submitted with."""
    atomic, _ = application.split(batch, replicas)
    step, sync = application.step_times((1,), max(atomic, application.min_local))
    most = 1 if application.name in ALONE else max(1, batch // application.min_local)
    work = ProfiledWork(application, batch)
    return Job(
        name=name,
        submitted_s=submitted_s,
        replicas=replicas,
        types=(DeviceType(kind, 1 / (step - sync)),),
        work=work,
        max_devices=most,
        tenant=application.name,
    )


def adaptive(job: Job) -> None:
    """Let a profiled job choose its batch size, as Pollux does."""
    work = job.work
    if isinstance(work, ProfiledWork):
        app = work.application
        work.adapts = app.name not in ALONE
        job.max_devices = 1 if app.name in ALONE else min(64, app.max_batch // app.min_local)
        if work.adapts:
            job.goodput = lambda devices: goodput(app, devices, min(work.epoch, app.num_epochs - 1))


@lru_cache(maxsize=4)  # tables do not change, and what was interpolated once is known
def load(folder: Path) -> dict[str, Application]:
    """All applications of a folder of traces."""
    if not folder.is_dir():
        raise ConfigError(f"--profiles {folder}: no such folder; give Pollux' folder of traces")
    found = {path.name: Application(path) for path in sorted(folder.iterdir()) if (path / "placements.csv").is_file()}
    if not found:
        raise ConfigError(f"--profiles {folder}: no APPLICATION/placements.csv in it; give Pollux' folder of traces")
    return found


def _packed(devices: int) -> tuple[int, ...]:
    return (PACKED,) * (devices // PACKED) + ((devices % PACKED,) if devices % PACKED else ())


def _mean(batch: int, lower: int, upper: int, low: float, high: float) -> float:
    return low if lower == upper else ((batch - lower) * high + (upper - batch) * low) / (upper - lower)


def _interpolated(times: list[tuple[int, float, float]], local: int) -> tuple[float, float] | None:
    if not times[0][0] <= local <= times[-1][0]:
        return None
    for (low, *before), (high, *after) in itertools.pairwise(times):
        if low <= local <= high:
            part = (local - low) / (high - low)
            return before[0] + (after[0] - before[0]) * part, before[1] + (after[1] - before[1]) * part
    return times[0][1], times[0][2]


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give Pollux' folder of traces") from None
    if rows and not set(columns) <= set(rows[0]):
        raise ConfigError(f"{path}: it lacks a column of {', '.join(columns)}; give Pollux' folder of traces")
    return rows
