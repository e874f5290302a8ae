"""EasyScale's cluster scheduler: devices go where they speed a job up most, and return when their owner needs them. Pure.

Each round has three phases.
(0) Devices that are reserved now, or guaranteed to a waiting job, are taken back from jobs that borrowed them.
(1) Jobs without devices get their smallest proposal, in the order of submission. If no device is free, a job that has
several gives one: the one that loses the least speed by it. So nobody waits while others could share.
(2) Running jobs propose increments. They are granted by speed-up per device, one for each job, as long as they fit; of
equal proposals the one with more devices wins.
Otherwise no job loses a device, except one that a faster device has left without work.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence

from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy
from pliant.sched.planner import Counts, Proposal, Types, best_plan, proposals


class _EasyScale(SchedulingPolicy):
    elastic = True
    heterogeneous: bool

    def shape(self, job: ScheduledJob) -> Hashable:
        return (
            job.min_devices,
            job.preferred if job.min_devices else "",
            *sorted(kind.name for kind in self._types(job)),
        )

    def order(self, job: ScheduledJob) -> tuple[float, ...]:
        # Jobs with a guarantee come before jobs that only borrow.
        return (0.0 if job.min_devices else 1.0, job.submitted_s)

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        free = cluster.free(jobs)
        changes: Changes = {}
        for kind, count in free.items():
            if count < 0:
                self._take_back(jobs.running.values(), kind, -count, free, changes, guaranteed=False)
        can_share = jobs.used.total() > len(jobs.running)
        if jobs.num_waiting and (jobs.any_guaranteed or can_share or any(count > 0 for count in free.values())):
            self._start(jobs, cluster, free, changes)
        if jobs.growing and any(count > 0 for count in free.values()):
            self._grow(jobs, free, changes)
        return changes

    def _types(self, job: ScheduledJob) -> Types:
        return job.usable(self.heterogeneous)

    def _start(self, jobs: ClusterJobs, cluster: Cluster, free: dict[str, int], changes: Changes) -> None:
        def fits(job: ScheduledJob) -> bool:
            """Return whether the job can start; if only by sharing, its device is free afterwards."""
            if job.min_devices:
                return self._reachable(jobs, cluster, job, free, changes)
            kinds = [kind.name for kind in self._types(job)]
            return any(free.get(kind, 0) > 0 for kind in kinds) or self._share(jobs, kinds, free, changes)

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

    def _share(self, jobs: ClusterJobs, kinds: Sequence[str], free: dict[str, int], changes: Changes) -> bool:
        """Let a job that has several devices give one of these types; of several jobs the one that loses least by it.

        Devices that have no replica without the given one are given, too. Returns whether any job could give one.
        """
        best: tuple[float, float, int, ScheduledJob, dict[str, int]] | None = None
        for job in jobs.running.values():
            held = changes.get(job.name, job.held)
            if sum(held.values()) < 2:
                continue
            types = self._types(job)
            now = best_plan(job.replicas, types, tuple(held.get(each.name, 0) for each in types))
            for kind in kinds:
                if now is None or not _borrowed(job, kind, changes):
                    continue
                left = tuple(held.get(each.name, 0) - (each.name == kind) for each in types)
                plan = best_plan(job.replicas, types, left)
                kept = {**plan.devices} if plan is not None else {}
                if plan is None or not self._is_guaranteed(job, kept, held):
                    continue
                loss = (plan.overload / now.overload - 1) / (sum(held.values()) - sum(kept.values()))
                offer = (loss, -job.submitted_s, -job.number, job, kept)
                if best is None or offer[:3] < best[:3]:
                    best = offer
        if best is None:
            return False
        *_, giver, kept = best
        held = changes.get(giver.name, giver.held)
        for kind in held:
            free[kind] += held[kind] - kept.get(kind, 0)
        changes[giver.name] = kept
        return True

    def _reachable(
        self, jobs: ClusterJobs, cluster: Cluster, job: ScheduledJob, free: dict[str, int], changes: Changes
    ) -> bool:
        """Return whether the guaranteed devices are free or with jobs that only borrowed them."""
        wanted = min(job.min_devices, cluster.available(job.preferred))
        have = free.get(job.preferred, 0)
        if wanted > have:
            have += sum(_borrowed(each, job.preferred, changes) for each in jobs.running.values())
        return 0 < wanted <= have

    def _take_back(
        self,
        running: Iterable[ScheduledJob],
        kind: str,
        count: int,
        free: dict[str, int],
        changes: Changes,
        *,
        guaranteed: bool,
    ) -> None:
        """Take devices from the jobs that came last.

        Guaranteed devices are taken only for a reservation, and only if there are no others.
        """
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

    def _grow(self, jobs: ClusterJobs, free: dict[str, int], changes: Changes) -> None:
        ranked: list[tuple[float, int, float, int, Proposal, ScheduledJob]] = []

        def propose(job: ScheduledJob) -> None:
            best = self._best(job, free)
            if best is not None:
                # Ties: more devices first, then the job that came first.
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
                propose(job)  # try again with the devices that are left
                continue
            new = proposal.plan.devices
            changes[job.name] = new
            for kind in {*new, *job.held}:
                free[kind] += job.held.get(kind, 0) - new.get(kind, 0)

    def _held(self, job: ScheduledJob) -> tuple[int, ...]:
        return tuple(job.held.get(kind.name, 0) for kind in self._types(job))

    def _is_full(self, job: ScheduledJob) -> bool:
        """Return whether no device of any type would help."""
        types = self._types(job)
        return not proposals(job.replicas, types, self._held(job), (job.max_devices,) * len(types))

    def _best(self, job: ScheduledJob, free: dict[str, int]) -> Proposal | None:
        # A proposal at most doubles the devices. Clipping here makes equal questions equal cache keys.
        most = sum(job.held.values())
        limits = tuple([min(max(0, free.get(kind.name, 0)), most) for kind in self._types(job)])
        if limits not in job.memory:
            job.memory[limits] = self._found(job, limits) if any(limits) else None
        return job.memory[limits]

    def _found(self, job: ScheduledJob, limits: tuple[int, ...]) -> Proposal | None:
        for proposal in proposals(job.replicas, self._types(job), self._held(job), limits):
            devices = proposal.plan.devices
            if (
                tuple(sorted(devices.items())) not in job.avoided
                and sum(devices.values()) <= job.max_devices
                and self._is_guaranteed(job, devices, job.held)
            ):
                return proposal
        return None

    def _is_guaranteed(self, job: ScheduledJob, devices: Counts, held: Counts) -> bool:
        """Return whether the job has its guaranteed devices among these, as far as it has them now."""
        return not job.min_devices or devices.get(job.preferred, 0) >= min(job.min_devices, held.get(job.preferred, 0))


def _borrowed(job: ScheduledJob, kind: str, changes: Changes) -> int:
    """Return how many devices of a type the job has without a guarantee."""
    held = changes.get(job.name, job.held).get(kind, 0)
    return max(0, held - (job.min_devices if kind == job.preferred else 0))


class Homogeneous(_EasyScale):
    """EasyScale with each job on its preferred device type."""

    name = "easyscale-homo"
    about = "elastic jobs, each on its preferred device type"
    heterogeneous = False


class Heterogeneous(_EasyScale):
    """EasyScale with jobs on several device types at once."""

    name = "easyscale-heter"
    about = "elastic jobs, on several device types at once where their result allows it"
    heterogeneous = True
