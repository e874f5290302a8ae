"""Write your own scheduling policy: every job has the same number of devices, first in a simulation, then live.

    pliant sim --trace synthetic:200:0.1 --policy examples/equal_shares.py:EqualShares,easyscale-homo
    pliant serve --devices cpu=4 --policy examples/equal_shares.py:EqualShares

A policy sees the jobs that run and wait, and the devices. It returns the jobs whose devices change, with all that they have
from then on. It changes nothing itself.
"""

from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy


class EqualShares(SchedulingPolicy):
    """Equal numbers of devices for all jobs; what is left over goes to the first ones."""

    elastic = True  # its jobs are resized while they train

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        changes: Changes = {}
        for kind in cluster.counts:
            everybody = [*jobs.running.values(), *jobs.waiting()]
            mine = sorted((job for job in everybody if job.preferred == kind), key=lambda job: job.number)
            for job, size in zip(mine, self.sizes(mine, cluster.available(kind)), strict=True):
                if size != job.num_devices():
                    changes[job.name] = {kind: size} if size else {}
        return changes

    def sizes(self, jobs: list[ScheduledJob], devices: int) -> list[int]:
        """Return a number for each job: first what it needs at least, then one device after another in turn."""
        sizes = []
        for job in jobs:
            least = max(1, job.min_devices)
            sizes.append(least if least <= devices else 0)
            devices -= sizes[-1]
        while devices:
            smallest = min(
                (place for place, job in enumerate(jobs) if 0 < sizes[place] < job.max_devices),
                key=sizes.__getitem__,
                default=None,
            )
            if smallest is None:
                break  # everybody has as much as it can use
            sizes[smallest] += 1
            devices -= 1
        return sizes
