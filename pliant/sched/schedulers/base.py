"""What all policies have in common: who gets which devices is asked and answered in one form. Pure.

A policy looks at the jobs and the cluster and answers with the jobs whose devices change: name -> devices of each type,
none to take all away. Whoever is not in the answer keeps what it has. The order of the answer is the order in which new
devices are placed on nodes. The simulator and the live scheduler ask the same objects.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from pliant.sched.job import Job, Jobs
from pliant.sched.machines import Cluster

Changes = dict[str, dict[str, int]]


class Policy(ABC):
    """One way to share a cluster."""

    name: str
    about: str
    rounds = True
    """Whether it decides at fixed intervals; else as soon as something happens."""
    elastic = False
    """Whether jobs go on with other devices, as a live resize lets them; else a change is a restart."""
    adapts_batch = False
    """Whether jobs may change their batch size as they get more devices."""

    @abstractmethod
    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        """The jobs whose devices change, with all the devices they have from now on; never more than there are."""

    def wakes_s(self, jobs: Jobs, now: float) -> float:
        """When it wants to decide again although nothing has happened; infinite: not before something does."""
        return math.inf

    def shape(self, job: Job) -> Hashable:
        """Waiting jobs of one shape want the same devices."""
        return job.preferred

    def order(self, job: Job) -> tuple[float, ...]:
        """The order of waiting jobs."""
        return (job.submitted_s,)

    def jobs(self, jobs: Sequence[Job] = ()) -> Jobs:
        """The jobs, as this policy wants to look at them."""
        return Jobs(jobs, shape=self.shape, order=self.order)


def gang(job: Job, cluster: Cluster) -> int:
    """Devices of the preferred type that a job of fixed size runs on: one for each replica.

    Where the cluster has fewer of that type, replicas share: such a job could otherwise never run.
    """
    return min(job.replicas, job.max_devices, cluster.counts.get(job.preferred, 0))
