"""One decision of a scheduling policy, and a check that it can be carried out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import index

from pliant.errors import PolicyFailed
from pliant.own_class import describe
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy

SHOWN = 3
"""Mistakes of one answer that are told."""


def decide(policy: SchedulingPolicy, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
    """Ask the policy; return its answer without types of which a job has none.

    Raises:
        PolicyFailed: it raised, or its answer cannot be carried out.
    """
    try:
        changes = policy.allocate(jobs, cluster, now)
    except PolicyFailed:
        raise
    except (Exception, SystemExit) as error:  # it may be the user's own code
        raise PolicyFailed(f"policy {policy.name} failed: {describe(error)}") from error
    if wrong := list(_mistakes(changes, jobs, cluster)):
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise PolicyFailed(f"policy {policy.name}: {'; '.join(wrong[:SHOWN])}{more}")
    return {name: {kind: index(count) for kind, count in devices.items() if count} for name, devices in changes.items()}


def _mistakes(changes: object, jobs: ClusterJobs, cluster: Cluster) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    if not isinstance(changes, Mapping):
        yield f"it returned {changes!r:.60}: return a dict of jobs' names and their devices, as in {{'job': {{'cpu': 2}}}}"
        return
    used = Counter(jobs.used)
    is_sound = True
    for name, devices in changes.items():
        job = jobs.find(name) if isinstance(name, str) else None
        if job is None:
            wrong = [f"{name!r:.80} is no job that runs or waits"]
        else:
            wrong = list(_mistakes_of_job(job, devices, cluster))
        yield from wrong
        is_sound &= not wrong
        if job is not None and not wrong:
            used.subtract(job.held)
            used.update(devices)
    for kind, count in used.items() if is_sound else ():
        # Policies that never preempt keep devices that were reserved meanwhile, but may not take more.
        if count > max(cluster.available(kind), jobs.used[kind]):
            yield f"it gave {count} devices of type {kind}, of which there are {cluster.available(kind)}: give no more"


def _mistakes_of_job(job: ScheduledJob, devices: object, cluster: Cluster) -> Iterator[str]:
    if not isinstance(devices, Mapping):
        yield f"job {job.name} was given {devices!r:.60}: give a dict of types and numbers, as in {{'cpu': 2}}"
        return
    total = 0
    for kind, count in devices.items():
        try:
            number = -1 if isinstance(count, bool) else index(count)
        except TypeError:
            number = -1
        if number < 0:
            yield f"job {job.name} was given {kind}={count!r:.60}: use a whole number of devices, 0 or more"
        elif number and kind not in cluster.counts:
            yield f"job {job.name} was given {kind}={number}: the cluster has {', '.join(cluster.counts)}"
        elif number and all(kind != each.name for each in job.types):
            yield f"job {job.name} was given {kind}={number}: it can use {', '.join(each.name for each in job.types)}"
        total += max(0, number)
    if sum(map(bool, devices.values())) > 1 and not job.mixed:
        yield f"job {job.name} was given several types of devices: its result stays the same on one at a time only"
    if total > (most := max(job.max_devices, job.num_devices())):
        yield f"job {job.name} was given {total} devices: it can use {most}, its max_devices"
