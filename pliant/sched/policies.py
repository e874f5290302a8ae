"""Scheduling policies by name: first come first served, preemptive queues, Optimus, Pollux, EasyScale, and the user's own.

All but finding the user's own is pure.
"""

from __future__ import annotations

import heapq
import inspect
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Hashable

from pliant.errors import ConfigError
from pliant.own_class import describe, load_class
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy, gang
from pliant.sched.easyscale import Heterogeneous, Homogeneous

# --- first come, first served ---


class OneJob(SchedulingPolicy):
    """Baseline of EasyScale's figures: the next job starts when the cluster is empty."""

    name = "yarn-cs"
    about = "FIFO, one job at a time in the whole cluster (the EasyScale artifact's YARN-CS)"

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        if jobs.running:
            return {}
        for job in jobs.waiting():
            wanted = gang(job, cluster)
            if wanted <= cluster.available(job.preferred):
                return {job.name: {job.preferred: wanted}}
            break
        return {}


class GangFifo(SchedulingPolicy):
    """YARN's capacity scheduler with one queue for each device type: no job overtakes, none is preempted."""

    name = "yarn-cs-gang"
    about = "FIFO of gangs, as many at once as the capacity of each device type allows"
    rounds = False

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        free = cluster.free(jobs)
        changes: Changes = {}
        for job in jobs.waiting(lambda each: 0 < gang(each, cluster) <= free[each.preferred]):
            wanted = gang(job, cluster)
            free[job.preferred] -= wanted
            changes[job.name] = {job.preferred: wanted}
        return changes


# --- preemptive gangs ---


class _Preemptive(SchedulingPolicy):
    """Goes through all jobs in an order and gives each the devices of a gang while there are enough."""

    def shape(self, job: ScheduledJob) -> Hashable:
        return (job.preferred, job.replicas)

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        left = {kind: cluster.available(kind) for kind in cluster.counts}
        changes: Changes = {}

        def fits(job: ScheduledJob) -> bool:
            return 0 < gang(job, cluster) <= left.get(job.preferred, 0)

        # Merge two orders: the running jobs, which are few, and the waiting jobs, of which only the first are examined.
        running = sorted(jobs.running.values(), key=self._rank, reverse=True)
        waiting = jobs.waiting(fits)
        first = next(waiting, None)
        while running or first is not None:
            if first is None or (running and self._rank(running[-1]) < self._rank(first)):
                job = running.pop()
                if fits(job):
                    left[job.preferred] -= gang(job, cluster)
                else:
                    changes[job.name] = {}
            else:
                if fits(first):
                    left[first.preferred] -= gang(first, cluster)
                    changes[first.name] = {first.preferred: gang(first, cluster)}
                first = next(waiting, None)
        return changes

    def _rank(self, job: ScheduledJob) -> tuple[tuple[float, ...], int]:
        return self.order(job), job.number


class ShortestRemaining(_Preemptive):
    """Shortest remaining time first, with the true remaining times: a bound for policies that must guess them."""

    name = "srtf"
    about = "gangs, the shortest remaining time first, with preemption"

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        for job in jobs.running.values():
            job.sync(now)
        return super().allocate(jobs, cluster, now)

    def order(self, job: ScheduledJob) -> tuple[float, ...]:
        return (job.work.steps_left() * job.work.step_s(job, job.replicas),)


class Tiresias(_Preemptive):
    """Two queues: jobs that have had less than 16 GPU-hours, then the others; first come, first served in each.

    Gu et al., NSDI'19, in the form in which Pollux compares itself with it: service is the time with devices, pauses
    included, times the replicas. A job that does not fit lets smaller jobs pass, and is preempted if it was running.
    """

    name = "tiresias"
    about = "gangs in two queues by attained service, with preemption"
    threshold_s = 16 * 3600.0

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        for job in sorted(jobs.running.values(), key=lambda each: each.number):
            if not job.queue and job.held_for(now) * job.replicas >= self.threshold_s:
                job.queue = (1.0, now)
        return super().allocate(jobs, cluster, now)

    def order(self, job: ScheduledJob) -> tuple[float, ...]:
        return job.queue or (0.0, job.submitted_s)

    def wakes_s(self, jobs: ClusterJobs, now: float) -> float:
        """Return when the next job moves to the second queue."""
        waits = (self.threshold_s / job.replicas - job.held_for(now) for job in jobs.running.values() if not job.queue)
        return now + max(0.0, min(waits, default=math.inf))


# --- elastic sizes of jobs ---


class _Sized(SchedulingPolicy):
    """Gives every job a number of devices of its preferred type.

    Sees one type of device; in a mixed cluster each type is shared among the jobs that prefer it.
    """

    elastic = True

    def __init__(self) -> None:
        self._open = False

    def order(self, job: ScheduledJob) -> tuple[float, ...]:
        return (float(job.number),)

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        self._open = False
        running: dict[str, list[ScheduledJob]] = {kind: [] for kind in cluster.counts}
        for job in jobs.running.values():
            job.sync(now)
            running[job.preferred].append(job)
        changes: Changes = {}
        sizes: dict[str, int] = {}
        chosen: list[ScheduledJob] = []
        for kind, there in running.items():
            devices = cluster.available(kind)
            is_one_each = 0 < len(there) == devices == sum(job.num_devices() for job in there)
            if is_one_each and not self._overtakes(jobs, there, kind):
                continue  # there is nothing to decide, however many jobs wait
            served = self._served(jobs, there, kind, devices)
            sizes |= self._sizes(served, devices, now)
            self._open |= len(served) < devices and self._may_change(served, sizes, devices)
            chosen += served
            names = {job.name for job in served}
            changes |= {job.name: {} for job in there if job.name not in names}
        # Small jobs are placed first: they fit anywhere, and large jobs span nodes in any case.
        for job in sorted(chosen, key=lambda each: (sizes[each.name], each.number)):
            if job.num_devices() != sizes[job.name]:
                changes[job.name] = {job.preferred: sizes[job.name]} if sizes[job.name] else {}
        return changes

    def wakes_s(self, jobs: ClusterJobs, now: float) -> float:
        """Return `now` while progress may make a device more useful to another job."""
        return now if self._open else math.inf

    def _overtakes(self, jobs: ClusterJobs, running: list[ScheduledJob], kind: str) -> bool:
        """Return whether a waiting job comes before a running one."""
        first = next(jobs.waiting(lambda each: each.preferred == kind), None)
        return first is not None and self._precedence(first) < max(map(self._precedence, running))

    def _may_change(self, served: list[ScheduledJob], sizes: dict[str, int], devices: int) -> bool:
        """Return whether sizes may change with the progress of jobs. If devices are left, no job wants more."""
        return sum(sizes[job.name] for job in served) == devices or any(job.goodput for job in served)

    def _served(self, jobs: ClusterJobs, running: list[ScheduledJob], kind: str, devices: int) -> list[ScheduledJob]:
        """Return the jobs that get a device at all: first come, first served."""
        waiting: list[ScheduledJob] = []
        for job in jobs.waiting(lambda each: each.preferred == kind and len(waiting) < devices):
            waiting.append(job)
        return sorted(running + waiting, key=self._precedence)[:devices]

    def _precedence(self, job: ScheduledJob) -> tuple[float, ...]:
        return self.order(job)

    @abstractmethod
    def _sizes(self, served: list[ScheduledJob], devices: int, now: float) -> dict[str, int]:
        """Return how many devices each of these jobs gets."""


class Optimus(_Sized):
    """Peng et al., EuroSys'18, in the form in which Pollux compares itself with it.

    The true step times and the true number of steps are known. Every job gets one device; then each further device goes
    to the job that saves the most time with it, until no job saves any.
    """

    name = "optimus"
    about = "one device each, then by time saved; step times and work known"

    def _sizes(self, served: list[ScheduledJob], devices: int, now: float) -> dict[str, int]:
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

    def _saved_s(self, job: ScheduledJob, size: int) -> float:
        if size + 1 > job.max_devices:
            return 0.0
        return (job.work.step_s(job, size) - job.work.step_s(job, size + 1)) * job.work.steps_left()


class Pollux(_Sized):
    """Qiao et al., OSDI'21: the sizes with the least mean of 1/speed-up (fairness p = -1).

    Speed-up is goodput over the goodput of a fair share. If a job does not know its goodput, its throughput counts.

    The paper searches with a genetic algorithm and random numbers. Here the search is greedy and deterministic: devices
    go where they lower the mean most; a job may jump over sizes that would not help. The search runs twice, for all
    devices and for the free ones only; restarts are priced as in the paper, and the better result is taken.
    """

    name = "pollux"
    about = "goodput with fairness; a deterministic search in place of the paper's genetic one"
    adapts_batch = True
    restart_s = 30.0

    def _precedence(self, job: ScheduledJob) -> tuple[float, ...]:
        # Running jobs keep a device; of the waiting jobs, the one that has had the least comes first.
        return (0.0 if job.held else 1.0, job.device_s if not job.held else 0.0, float(job.number))

    def _sizes(self, served: list[ScheduledJob], devices: int, now: float) -> dict[str, int]:
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
        self, served: list[ScheduledJob], sizes: dict[str, int], devices: int, worth: dict[str, _Worth]
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
        """Push the jump that lowers 1/speed-up most per device, if any does."""
        here = worth.slowness(size)
        best = (
            min(((worth.slowness(to) - here) / (to - size), to) for to in range(size + 1, limit + 1))
            if limit > size
            else (0.0, 0)
        )
        if best[0] < -1e-12:
            heapq.heappush(ranked, (best[0], place, best[1]))

    def _cost(self, served: list[ScheduledJob], sizes: dict[str, int], worth: dict[str, _Worth], now: float) -> float:
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

    def __init__(self, job: ScheduledJob, fair: int) -> None:
        self._job, self._known = job, dict[int, float]()
        self._fair = self._value(max(1, fair))

    def slowness(self, size: int) -> float:
        return self._fair / self._value(size)

    def _value(self, size: int) -> float:
        if size not in self._known:
            value = self._job.goodput(size) if self._job.goodput else 1 / self._job.work.step_s(self._job, size)
            self._known[size] = max(value, 1e-12)
        return self._known[size]


# --- policies by name ---

POLICIES: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy
    for policy in (OneJob, GangFifo, Homogeneous, Heterogeneous, ShortestRemaining, Tiresias, Optimus, Pollux)
}


def policy_class(name: str) -> type[SchedulingPolicy]:
    """Return the built-in policy of this name, or the class at `module:Class` or `FILE.py:Class`.

    Raises:
        ConfigError: there is none, or it is no scheduling policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    flag, (where, _, kind) = f"--policy {name:.200}", name.rpartition(":")
    if not where or not kind.isidentifier():
        raise ConfigError(
            f"--policy {name!r:.200} is unknown: use {', '.join(POLICIES)}, module:Class or FILE.py:Class"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    remedy = "derive it from pliant.sched.cluster.SchedulingPolicy"
    found = load_class(name, SchedulingPolicy, flag=flag, remedy=remedy)  # type: ignore[type-abstract]
    if inspect.isabstract(found):
        raise ConfigError(f"{flag}: it does not say who gets what: write {_ALLOCATE}")
    try:
        inspect.signature(found.allocate).bind(None, None, None, None)
    except TypeError:
        raise ConfigError(
            f"{flag}: its allocate takes {inspect.signature(found.allocate)}: write {_ALLOCATE}"
        ) from None
    return found


_ALLOCATE = "`def allocate(self, jobs, cluster, now)`"


def make_policy(name: str) -> SchedulingPolicy:
    """Make a new policy of this name, as `policy_class` finds it."""
    made = policy_class(name)
    try:
        return made()
    except Exception as error:  # the user's own code
        raise ConfigError(f"--policy {name}: it cannot be made without arguments: {describe(error)}") from error


def parse_policies(text: str) -> list[str]:
    """Parse `all` or `a,b` into names that `make_policy` knows."""
    chosen = list(POLICIES) if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    if not chosen:
        raise ConfigError(f"--policy {text!r}: name one of {', '.join(POLICIES)}, module:Class, or all")
    for name in chosen:
        make_policy(name)
    return list(dict.fromkeys(chosen))
