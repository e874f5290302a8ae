"""Pollux' measurements (step times by placement and batch, progress and gradient noise by epoch) and jobs made of them.

The rules of interpolation are those of the published simulator (petuum/adaptdl, osdi21-artifact), rewritten from what it
does. A placement is represented by its smallest rotation. A measured placement is interpolated in the batch of a device;
any other placement linearly in (nodes, devices, batch), over the Delaunay triangles of all means. Times of epochs are
rounded to seconds.
"""

from __future__ import annotations

import copy
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
from pliant.sched.cluster import ScheduledJob
from pliant.sched.planner import DeviceType

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs that the published simulator trains; other applications train until their shortest table ends."""
MAX_LOCAL = {"yolov3": 8}
"""Samples that fit on one device, if fewer than the tables have."""
ALONE = ("ncf",)
"""Applications that always have one device, as their published jobs do under every policy."""
_MAX_NODES = 16
"""Largest measured number of nodes; more nodes count as this many."""
PACKED = 4
"""Devices per node that are assumed if a policy asks for a step time before the job is placed."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Measurements of one epoch of training with one batch size."""

    progress: float
    iteration: float
    grad_sqr: float
    grad_var: float


class Application:
    """Measured tables of one application."""

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
        """Measurements by batch size, in ascending order."""
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
        """Progress at the end of each epoch; it does not depend on the batch size."""
        self._step_times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}

    def step_times(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """Return the seconds of a step, and how many of them the sum of gradients takes."""
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
        import numpy as np
        from scipy.interpolate import LinearNDInterpolator  # type: ignore[import-untyped]

        groups: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        for placement, times in self._times.items():
            for local, step, sync in times:
                groups[len(placement), sum(placement), local].append((step, sync))
        # In the order of the published program: between equal distances the order of the points decides on the triangles.
        means = [(*key, *np.mean(groups[key], axis=0)) for key in sorted(groups)]
        table = np.array(means + self._scalability, np.float64)
        interpolator: Callable[[list[int]], Any] = LinearNDInterpolator(table[:, :3], table[:, 3:])
        return interpolator

    def around(self, batch: int) -> tuple[int, int]:
        """Return the measured batch sizes next to this one, on both sides."""
        lower = max((each for each in self.epochs if each <= batch), default=None)
        upper = min((each for each in self.epochs if each >= batch), default=None)
        if lower is None or upper is None:
            raise ConfigError(
                f"{self.name}: batch size {batch}: use {self.init_batch} to {self.max_batch}, as measured"
            )
        return lower, upper

    def iterations(self, batch: int, epoch: int) -> float:
        """Return the number of steps until the end of an epoch."""
        lower, upper = self.around(batch)
        return _interpolate_batch(
            batch, lower, upper, self.epochs[lower][epoch].iteration, self.epochs[upper][epoch].iteration
        )

    def noise(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return (sqr, var) of the gradient during an epoch."""
        lower, upper = self.around(batch)
        one, other = self.epochs[lower][epoch], self.epochs[upper][epoch]
        return (
            _interpolate_batch(batch, lower, upper, one.grad_sqr, other.grad_sqr),
            _interpolate_batch(batch, lower, upper, one.grad_var, other.grad_var),
        )

    def split(self, batch: int, devices: int, *, always_accumulate: bool = False) -> tuple[int, int]:
        """Return (samples of one turn of a device, turns) for a global batch.

        One device alone takes two turns if its batch is larger than the initial one, because the noise of the gradient
        is measured between turns. Predictions for one device (`always_accumulate`) assume this for any batch.
        """
        local = math.ceil(batch / devices - 1e-8)
        turns = math.ceil(local / self.max_local - 1e-8)
        if devices == 1 and (always_accumulate or batch > self.init_batch):
            turns = max(2, turns)
        atomic = math.ceil(local / turns - 1e-8)
        return min(atomic, self.max_batch // (devices * turns)), turns

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - applications live as long as the program
    def step_s(self, batch: int, devices: int) -> float:
        """Return the predicted seconds of a step on nodes of four devices."""
        atomic, turns = self.split(batch, devices, always_accumulate=True)
        step, sync = self.step_times(_packed(devices), atomic)
        return step + (step - sync) * (turns - 1)

    @lru_cache(maxsize=1 << 16)  # noqa: B019
    def rate(self, placement: tuple[int, ...], batch: int, epoch: int) -> float:
        """Return the progress per second, in steps of the initial batch weighted by their gain."""
        atomic, turns = self.split(batch, sum(placement))
        step, sync = self.step_times(placement, atomic)
        total = sum(placement) * atomic * turns
        sqr, var = self.noise(total, epoch)
        return gain(total / self.init_batch, var, sqr) / (step + (step - sync) * (turns - 1))

    def check_job(self, replicas: int, batch: int) -> None:
        """Raise ConfigError if a job of this size is outside of what was measured."""
        self.around(batch)
        self.make_job("job", 0.0, replicas, batch, "gpu")

    def make_job(self, name: str, submitted_s: float, replicas: int, batch: int, kind: str) -> ScheduledJob:
        """Make a job of a Pollux workload, which keeps the batch size that it was submitted with."""
        atomic, _ = self.split(batch, replicas)
        step, sync = self.step_times((1,), max(atomic, self.min_local))
        return ScheduledJob(
            name=name,
            submitted_s=submitted_s,
            replicas=replicas,
            types=(DeviceType(kind, 1 / (step - sync)),),
            work=ProfiledWork(self, batch),
            max_devices=1 if self.name in ALONE else max(1, batch // self.min_local),
        )


class ProfiledWork:
    """Work of a profiled job: epochs of an application on the devices that it has."""

    def __init__(self, application: Application, batch: int, *, adapts: bool = False) -> None:
        self.application, self.batch, self.adapts = application, batch, adapts
        self.epoch, self.progress = 0, 0.0
        self.slowness = 1.0
        """How many times as long its steps take as was measured; policies know the measurement only."""
        self._placement: tuple[int, ...] = ()

    def placed(self, job: ScheduledJob) -> None:
        self._placement = tuple(count for _, count in job.placement) or _packed(job.num_devices())
        self._adapt()

    def _adapt(self) -> None:
        if self.adapts and self._placement:
            self.batch = best_batch(self.application, sum(self._placement), self.epoch)

    def advance(self, seconds: float) -> None:
        self._walk(seconds)

    def left_s(self) -> tuple[float, float]:
        """Return the seconds until the end, exact and rounded as recorded.

        As in the published simulator, a job whose end is rounded down to the second of a round still has its devices in
        that round.
        """
        if not self._placement:
            return math.inf, math.inf
        return copy.copy(self)._walk(math.inf)

    def _walk(self, seconds: float) -> tuple[float, float]:
        """Advance by at most `seconds`; return how many passed before the end, exactly and in whole seconds."""
        app, gone, exact = self.application, 0.0, 0.0
        while self.epoch < app.num_epochs:
            rate = app.rate(self._placement, self.batch, self.epoch) / self.slowness
            goal = app.progress_at[self.epoch]
            left = seconds - gone
            if self.progress + rate * left < goal:
                self.progress += rate * left
                return seconds, seconds
            # Whole seconds, as published, but not more than are left, so that calls with fractions add up.
            exact = gone + (goal - self.progress) / rate
            gone += min(float(round((goal - self.progress) / rate)), left)
            self.epoch, self.progress = self.epoch + 1, goal
            self._adapt()
        return exact, gone

    def step_s(self, job: ScheduledJob, devices: int) -> float:
        return self.application.step_s(self.batch, devices)

    def turn_s(self) -> float:
        if not self._placement:
            return 0.0
        atomic, turns = self.application.split(self.batch, sum(self._placement))
        step, sync = self.application.step_times(self._placement, atomic)
        return (step + (step - sync) * (turns - 1)) * self.slowness

    def steps_left(self) -> float:
        """Return the steps as Optimus counts them: from the end of the present epoch to the last; 1 in the last epoch."""
        app = self.application
        last = app.num_epochs - 1
        if self.epoch >= last:
            return 1.0
        return app.iterations(self.batch, last) - app.iterations(self.batch, self.epoch)

    @property
    def done(self) -> float:
        """Fraction of the work that is done."""
        return self.progress / self.application.progress_at[-1]


@lru_cache(maxsize=1 << 16)
def best_batch(application: Application, devices: int, epoch: int) -> int:
    """Return the measured batch size with the most goodput on `devices` devices; of equals the smaller one."""
    worth = {batch: _goodput(application, batch, devices, epoch) for batch in application.epochs}
    return max(worth, key=lambda batch: (worth[batch], -batch))


def goodput(application: Application, devices: int, epoch: int) -> float:
    """Return the goodput of `devices` devices with the best batch size for them."""
    return _goodput(application, best_batch(application, devices, epoch), devices, epoch)


@lru_cache(maxsize=1 << 16)
def _goodput(application: Application, batch: int, devices: int, epoch: int) -> float:
    if batch < devices * application.min_local:
        return 0.0
    atomic, _ = application.split(batch, devices)
    if atomic < application.min_local:
        return 0.0
    return application.rate(_packed(devices), batch, min(epoch, application.num_epochs - 1))


def make_adaptive(job: ScheduledJob) -> None:
    """Let a profiled job adapt its batch size, as Pollux does."""
    work = job.work
    if isinstance(work, ProfiledWork):
        app = work.application
        work.adapts = app.name not in ALONE
        job.max_devices = 1 if app.name in ALONE else min(64, app.max_batch // app.min_local)
        if work.adapts:
            job.goodput = lambda devices: goodput(app, devices, min(_epoch(job), app.num_epochs - 1))


def _epoch(job: ScheduledJob) -> int:
    # A failure may have given the job an earlier state of its work.
    assert isinstance(job.work, ProfiledWork)
    return job.work.epoch


@lru_cache(maxsize=4)  # tables do not change, and applications keep what they have interpolated
def load(folder: Path) -> dict[str, Application]:
    """Load all applications of a folder of traces."""
    if not folder.is_dir():
        raise ConfigError(f"--profiles {folder}: no such folder; give Pollux' folder of traces")
    found = {path.name: Application(path) for path in sorted(folder.iterdir()) if (path / "placements.csv").is_file()}
    if not found:
        raise ConfigError(f"--profiles {folder}: no APPLICATION/placements.csv in it; give Pollux' folder of traces")
    return found


def _packed(devices: int) -> tuple[int, ...]:
    return (PACKED,) * (devices // PACKED) + ((devices % PACKED,) if devices % PACKED else ())


def _interpolate_batch(batch: int, lower: int, upper: int, low: float, high: float) -> float:
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
