"""EasyScale's cluster scheduler: devices go where they speed a job up most, and come back when their owner wants them. Pure.

In each round: (0) devices that are reserved now, or guaranteed to a job that waits, are taken back from jobs that borrowed
them; (1) jobs without devices get their smallest proposal, in the order of submission; (2) the increments that running
jobs propose are granted by speed-up per device, one for each job, as long as they fit; of equals the one with more devices.
Else nobody loses a device, except one that a faster one has left without work.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

from pliant.sched.job import Job, Jobs
from pliant.sched.machines import Cluster
from pliant.sched.planner import Proposal, Types, proposals
from pliant.sched.schedulers.base import Changes, Policy


class _EasyScale(Policy):
    elastic = True
    heterogeneous: bool

    def shape(self, job: Job) -> Hashable:
        return (
            job.min_devices,
            job.preferred if job.min_devices else "",
            *sorted(kind.name for kind in self._types(job)),
        )

    def order(self, job: Job) -> tuple[float, ...]:
        # A guarantee is a right, not a wish: its holders do not stand behind those that borrow.
        return (0.0 if job.min_devices else 1.0, job.submitted_s)

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        free = cluster.free(jobs)
        changes: Changes = {}
        for kind, count in free.items():
            if count < 0:
                self._take_back(jobs.running.values(), kind, -count, free, changes, guaranteed=False)
        if jobs.num_waiting and (jobs.any_guaranteed or any(count > 0 for count in free.values())):
            self._start(jobs, cluster, free, changes)
        if jobs.growing and any(count > 0 for count in free.values()):
            self._grow(jobs, free, changes)
        return changes

    def _types(self, job: Job) -> Types:
        return job.usable(self.heterogeneous)

    def _start(self, jobs: Jobs, cluster: Cluster, free: dict[str, int], changes: Changes) -> None:
        def fits(job: Job) -> bool:
            if job.min_devices:
                return self._reachable(jobs, cluster, job, free, changes)
            return any(free.get(kind.name, 0) > 0 for kind in self._types(job))

        for job in jobs.waiting(fits):
            if job.min_devices:
                wanted = min(job.min_devices, cluster.available(job.preferred))
                lacking = wanted - free[job.preferred]
                if lacking > 0:
                    self._take_back(jobs.running.values(), job.preferred, lacking, free, changes, guaranteed=True)
                changes[job.name] = {job.preferred: wanted}
                free[job.preferred] -= wanted
            else:
                there = (kind for kind in self._types(job) if free.get(kind.name, 0) > 0)
                slowest = min(there, key=lambda kind: kind.speed)
                changes[job.name] = {slowest.name: 1}
                free[slowest.name] -= 1

    def _reachable(self, jobs: Jobs, cluster: Cluster, job: Job, free: dict[str, int], changes: Changes) -> bool:
        """Whether the guaranteed devices are free or with jobs that only borrowed them."""
        wanted = min(job.min_devices, cluster.available(job.preferred))
        have = free.get(job.preferred, 0)
        if wanted > have:
            have += sum(_borrowed(each, job.preferred, changes) for each in jobs.running.values())
        return 0 < wanted <= have

    def _take_back(
        self, running: Iterable[Job], kind: str, count: int, free: dict[str, int], changes: Changes, *, guaranteed: bool
    ) -> None:
        """From those that came last; what is guaranteed to them only for a reservation, and only if nothing else is left."""
        latest = sorted((job for job in running if job.held.get(kind)), key=lambda job: (-job.submitted_s, -job.number))
        for only_borrowed in (True,) if guaranteed else (True, False):
            for job in latest:
                held = changes.get(job.name, job.held)
                taken = min(count, _borrowed(job, kind, changes) if only_borrowed else held.get(kind, 0))
                if taken > 0:
                    changes[job.name] = {**held, kind: held.get(kind, 0) - taken}
                    free[kind] += taken
                    count -= taken
                if not count:
                    return

    def _grow(self, jobs: Jobs, free: dict[str, int], changes: Changes) -> None:
        ranked: list[tuple[float, int, float, int, Proposal, Job]] = []

        def propose(job: Job) -> None:
            best = self._best(job, free)
            if best is not None:
                # Ties: more devices first, then who came first.
                heapq.heappush(ranked, (-best.per_device, -best.more, job.submitted_s, job.number, best, job))

        full = []
        for job in jobs.growing.values():
            if job.name not in changes:
                if not job.memory and self._is_full(job):
                    full.append(job.name)
                else:
                    propose(job)
        for name in full:
            del jobs.growing[name]  # until its devices change
        while ranked:
            *_, proposal, job = heapq.heappop(ranked)
            if free[proposal.kind] < proposal.more:
                propose(job)  # again, within what is left
                continue
            new = proposal.plan.devices
            changes[job.name] = new
            for kind in {*new, *job.held}:
                free[kind] += job.held.get(kind, 0) - new.get(kind, 0)

    def _held(self, job: Job) -> tuple[int, ...]:
        return tuple(job.held.get(kind.name, 0) for kind in self._types(job))

    def _is_full(self, job: Job) -> bool:
        """No device of any type would help."""
        types = self._types(job)
        return not proposals(job.replicas, types, self._held(job), (job.max_devices,) * len(types))

    def _best(self, job: Job, free: dict[str, int]) -> Proposal | None:
        # Never more than a doubling: clipped here, so that equal questions are asked with equal words.
        most = sum(job.held.values())
        limits = tuple([min(max(0, free.get(kind.name, 0)), most) for kind in self._types(job)])
        if limits not in job.memory:
            job.memory[limits] = self._found(job, limits) if any(limits) else None
        return job.memory[limits]

    def _found(self, job: Job, limits: tuple[int, ...]) -> Proposal | None:
        for proposal in proposals(job.replicas, self._types(job), self._held(job), limits):
            devices = proposal.plan.devices
            if (
                tuple(sorted(devices.items())) not in job.avoided
                and sum(devices.values()) <= job.max_devices
                and self._keeps_guarantee(job, proposal)
            ):
                return proposal
        return None

    def _keeps_guarantee(self, job: Job, proposal: Proposal) -> bool:
        return not job.min_devices or proposal.plan.devices.get(job.preferred, 0) >= min(
            job.min_devices, job.held.get(job.preferred, 0)
        )


def _borrowed(job: Job, kind: str, changes: Changes) -> int:
    """Devices of a type that are not guaranteed to the job."""
    held = changes.get(job.name, job.held).get(kind, 0)
    return max(0, held - (job.min_devices if kind == job.preferred else 0))


class Homogeneous(_EasyScale):
    name = "easyscale-homo"
    about = "elastic jobs, each on its preferred device type"
    heterogeneous = False


class Heterogeneous(_EasyScale):
    name = "easyscale-heter"
    about = "elastic jobs, on several device types at once where their result allows it"
    heterogeneous = True
