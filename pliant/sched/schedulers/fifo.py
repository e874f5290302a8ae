"""First come, first served, all devices of a job at once: as the EasyScale artifact has it, and as the name says. Pure."""

from __future__ import annotations

from pliant.sched.job import Jobs
from pliant.sched.machines import Cluster
from pliant.sched.schedulers.base import Changes, Policy, gang


class OneJob(Policy):
    """The baseline of EasyScale's figures: the next job starts when the cluster is empty."""

    name = "yarn-cs"
    about = "FIFO, one job at a time in the whole cluster (the EasyScale artifact's YARN-CS)"

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        if jobs.running:
            return {}
        for job in jobs.waiting():
            wanted = gang(job, cluster)
            if wanted <= cluster.available(job.preferred):
                return {job.name: {job.preferred: wanted}}
            break
        return {}


class GangFifo(Policy):
    """What YARN's capacity scheduler does with one queue for each device type: nobody overtakes, nobody is preempted."""

    name = "yarn-cs-gang"
    about = "FIFO of gangs, as many at once as the capacity of each device type allows"
    rounds = False

    def allocate(self, jobs: Jobs, cluster: Cluster, now: float) -> Changes:
        free = cluster.free(jobs)
        changes: Changes = {}
        for job in jobs.waiting(lambda each: 0 < gang(each, cluster) <= free[each.preferred]):
            wanted = gang(job, cluster)
            free[job.preferred] -= wanted
            changes[job.name] = {job.preferred: wanted}
        return changes
