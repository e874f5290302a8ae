"""Gangs that may be preempted: the shortest remaining time first, and Tiresias' queues of attained service. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable

from pliant.sched.job import Job, Jobs
from pliant.sched.machines import Cluster
from pliant.sched.schedulers.base import Changes, Policy, gang


class _Preemptive(Policy):
    """Goes through all jobs in an order and gives each the devices of a gang, as long as there are some."""

    def shape(self, job: Job) -> Hashable:
        return (job.preferred, job.replicas)

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        left = {kind: cluster.available(kind) for kind in cluster.counts}
        changes: Changes = {}

        def fits(job: Job) -> bool:
            return 0 < gang(job, cluster) <= left.get(job.preferred, 0)

        # Two orders become one: the running jobs, which are few, and the waiting ones, of which few are looked at.
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

    def _rank(self, job: Job) -> tuple[tuple[float, ...], int]:
        return self.order(job), job.number


class ShortestRemaining(_Preemptive):
    """Knows how long each job will still take, as nobody does; a bound on what guessing can reach."""

    name = "srtf"
    about = "gangs, the shortest remaining time first, with preemption"

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        for job in jobs.running.values():
            job.sync(now)
        return super().allocate(jobs, cluster, now)

    def order(self, job: Job) -> tuple[float, ...]:
        return (job.work.steps_left() * job.work.step_s(job, job.replicas),)


class Tiresias(_Preemptive):
    """Two queues: those that have had less than 16 GPU-hours, then the others; within each, who came into it first.

    Gu et al., NSDI'19, in the form in which Pollux compares itself with it: service is the time with devices, pauses
    included, times the replicas; a job that does not fit lets smaller ones pass, and is preempted if it was running.
    """

    name = "tiresias"
    about = "gangs in two queues by attained service, with preemption"
    threshold_s = 16 * 3600.0

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        for job in sorted(jobs.running.values(), key=lambda each: each.number):
            if not job.queue and job.held_for(now) * job.replicas >= self.threshold_s:
                job.queue = (1.0, now)
        return super().allocate(jobs, cluster, now)

    def order(self, job: Job) -> tuple[float, ...]:
        return job.queue or (0.0, job.submitted_s)

    def wakes_s(self, jobs: Jobs, now: float) -> float:
        """When the next job sinks into the second queue."""
        waits = (self.threshold_s / job.replicas - job.held_for(now) for job in jobs.running.values() if not job.queue)
        return now + max(0.0, min(waits, default=math.inf))
