"""Sizes of elastic jobs by what one more device is worth: Optimus' time saved, and Pollux' goodput with fairness. Pure.

Both see one type of device; in a mixed cluster each type is shared among the jobs that prefer it.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod

from pliant.sched.job import Job, Jobs
from pliant.sched.machines import Cluster
from pliant.sched.schedulers.base import Changes, Policy


class _Sized(Policy):
    """Every job gets a number of devices of its preferred type."""

    elastic = True

    def __init__(self) -> None:
        self._open = False

    def order(self, job: Job) -> tuple[float, ...]:
        return (float(job.number),)

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        self._open = False
        running: dict[str, list[Job]] = {kind: [] for kind in cluster.counts}
        for job in jobs.running.values():
            job.sync(now)
            running[job.preferred].append(job)
        changes: Changes = {}
        sizes: dict[str, int] = {}
        chosen: list[Job] = []
        for kind, there in running.items():
            devices = cluster.available(kind)
            is_one_each = 0 < len(there) == devices == sum(job.num_devices() for job in there)
            if is_one_each and not self._overtakes(jobs, there, kind):
                continue  # there is nothing to decide, however many wait
            served = self._served(jobs, there, kind, devices)
            sizes |= self._sizes(served, devices, now)
            self._open |= len(served) < devices and self._may_change(served, sizes, devices)
            chosen += served
            names = {job.name for job in served}
            changes |= {job.name: {} for job in there if job.name not in names}
        # Small jobs are placed first: they fit anywhere, and large ones span nodes in any case.
        for job in sorted(chosen, key=lambda each: (sizes[each.name], each.number)):
            if job.num_devices() != sizes[job.name]:
                changes[job.name] = {job.preferred: sizes[job.name]} if sizes[job.name] else {}
        return changes

    def wakes_s(self, jobs: Jobs, now: float) -> float:
        """At once, while somebody has a device that another one may come to need more as they go on."""
        return now if self._open else math.inf

    def _overtakes(self, jobs: Jobs, running: list[Job], kind: str) -> bool:
        """Whether somebody who waits comes before somebody who runs."""
        first = next(jobs.waiting(lambda each: each.preferred == kind), None)
        return first is not None and self._precedence(first) < max(map(self._precedence, running))

    def _may_change(self, served: list[Job], sizes: dict[str, int], devices: int) -> bool:
        """Whether the sizes depend on how far the jobs are. Not where devices are left: then nobody wanted more."""
        return sum(sizes[job.name] for job in served) == devices or any(job.goodput for job in served)

    def _served(self, jobs: Jobs, running: list[Job], kind: str, devices: int) -> list[Job]:
        """Those that get a device at all: first come, first served."""
        waiting: list[Job] = []
        for job in jobs.waiting(lambda each: each.preferred == kind and len(waiting) < devices):
            waiting.append(job)
        return sorted(running + waiting, key=self._precedence)[:devices]

    def _precedence(self, job: Job) -> tuple[float, ...]:
        return self.order(job)

    @abstractmethod
    def _sizes(self, served: list[Job], devices: int, now: float) -> dict[str, int]:
        """How many devices each of these gets."""


class Optimus(_Sized):
    """Peng et al., EuroSys'18, in the form in which Pollux compares itself with it: the true step times and the true
    number of steps are known. One device each, then one more to whom it saves the most time, until it saves nobody any.
    """

    name = "optimus"
    about = "one device each, then by time saved; step times and work known"

    def _sizes(self, served: list[Job], devices: int, now: float) -> dict[str, int]:
        sizes = {job.name: 1 for job in served}
        devices -= len(served)
        ranked = [(-self._saved_s(job, 1), place) for place, job in enumerate(served)] if devices else []
        heapq.heapify(ranked)
        while devices > 0 and ranked and ranked[0][0] < 0:
            job = served[ranked[0][1]]
            sizes[job.name] += 1
            devices -= 1
            heapq.heapreplace(ranked, (-self._saved_s(job, sizes[job.name]), ranked[0][1]))
        return sizes

    def _saved_s(self, job: Job, size: int) -> float:
        if size + 1 > job.max_devices:
            return 0.0
        return (job.work.step_s(job, size) - job.work.step_s(job, size + 1)) * job.work.steps_left()


class Pollux(_Sized):
    """Qiao et al., OSDI'21: the sizes with the least mean of 1/speed-up (fairness p = -1), speed-up being goodput over that
    of a fair share. Where a job says nothing of its goodput, it is its throughput.

    The paper searches with a genetic algorithm and random numbers. Here the search is greedy and always the same: devices
    go where they lower the mean most, jumps over sizes that would not help included. All sizes anew, and only the free
    devices, are both tried; restarts are priced as in the paper, and the better one is taken.
    """

    name = "pollux"
    about = "goodput with fairness; a deterministic search in place of the paper's genetic one"
    adapts_batch = True
    restart_s = 30.0

    def _precedence(self, job: Job) -> tuple[float, ...]:
        # Who runs keeps a device; of those that wait, who has had the least.
        return (0.0 if job.held else 1.0, job.device_s if not job.held else 0.0, float(job.number))

    def _sizes(self, served: list[Job], devices: int, now: float) -> dict[str, int]:
        if not served:
            return {}
        fair = math.ceil(devices / len(served))
        worth = {job.name: _Worth(job, min(fair, job.max_devices)) for job in served}
        fresh = self._grown(served, {job.name: 1 for job in served}, devices, worth)
        kept = {job.name: max(1, job.num_devices()) for job in served}
        if sum(kept.values()) > devices:
            return fresh
        kept = self._grown(served, kept, devices, worth)
        return min((kept, fresh), key=lambda sizes: self._cost(served, sizes, worth, now))

    def _grown(
        self, served: list[Job], sizes: dict[str, int], devices: int, worth: dict[str, _Worth]
    ) -> dict[str, int]:
        sizes = dict(sizes)
        left = devices - sum(sizes.values())
        limits = {job.name: min(job.max_devices, 2 * max(1, job.num_devices())) for job in served}
        ranked: list[tuple[float, int, int]] = []
        for place, job in enumerate(served):
            self._push(ranked, place, worth[job.name], sizes[job.name], min(limits[job.name], sizes[job.name] + left))
        while left > 0 and ranked:
            _, place, to = heapq.heappop(ranked)
            name = served[place].name
            if to - sizes[name] <= left:
                left -= to - sizes[name]
                sizes[name] = to
            self._push(ranked, place, worth[name], sizes[name], min(limits[name], sizes[name] + left))
        return sizes

    def _push(self, ranked: list[tuple[float, int, int]], place: int, worth: _Worth, size: int, limit: int) -> None:
        """The jump that lowers 1/speed-up most for each device, if any does."""
        here = worth.slowness(size)
        best = (
            min(((worth.slowness(to) - here) / (to - size), to) for to in range(size + 1, limit + 1))
            if limit > size
            else (0.0, 0)
        )
        if best[0] < -1e-12:
            heapq.heappush(ranked, (best[0], place, best[1]))

    def _cost(self, served: list[Job], sizes: dict[str, int], worth: dict[str, _Worth], now: float) -> float:
        total = 0.0
        for job in served:
            slowness = worth[job.name].slowness(sizes[job.name])
            if job.held and sizes[job.name] != job.num_devices():
                age_s = now - job.submitted_s
                factor = max(age_s - max(0, job.changes - 1) * self.restart_s, 0.0) / (age_s + self.restart_s)
                slowness /= max(factor, 1e-6)
            total += slowness
        return total


class _Worth:
    """1/speed-up of a job for each number of devices."""

    def __init__(self, job: Job, fair: int) -> None:
        self._job, self._known = job, dict[int, float]()
        self._fair = self._value(max(1, fair))

    def slowness(self, size: int) -> float:
        return self._fair / self._value(size)

    def _value(self, size: int) -> float:
        if size not in self._known:
            value = self._job.goodput(size) if self._job.goodput else 1 / self._job.work.step_s(self._job, size)
            self._known[size] = max(value, 1e-12)
        return self._known[size]
