"""Pollux' cluster, simulated as plainly as possible: every interval, every job, lists all the way.

An oracle for the event-driven simulator, which skips what does not matter; slow, and without any of its shortcuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.sched.pollux import ALONE, PACKED, Application
from pliant.sched.traces import TraceEntry

INTERVAL, RESTART, NODES, THRESHOLD = 60, 30, 16, 16 * 3600


@dataclass
class PlainJob:
    entry: TraceEntry
    app: Application
    nodes: list[int] = field(default_factory=list)
    """The node of each device."""
    pause: int = 0
    epoch: int = 0
    progress: float = 0.0
    ended: float | None = None
    service: int = 0
    demoted: bool = False

    def counts(self) -> tuple[int, ...]:
        return tuple(self.nodes.count(node) for node in dict.fromkeys(self.nodes))

    def live(self, start: int) -> None:
        """One interval."""
        if not self.nodes or self.ended is not None:
            return
        waited = min(self.pause, INTERVAL)
        self.pause -= waited
        now, left = start + waited, INTERVAL - waited
        while left > 0 and self.ended is None:
            rate = self.app.rate(self.counts(), self.entry.batch, self.epoch)
            goal = self.app.progress_at[self.epoch]
            if self.progress + rate * left < goal:
                self.progress += rate * left
                return
            seconds = round((goal - self.progress) / rate)
            self.epoch, self.progress = self.epoch + 1, goal
            now, left = now + seconds, left - seconds
            if self.epoch == self.app.num_epochs:
                self.ended = now

    def move(self, nodes: list[int]) -> None:
        if nodes != self.nodes:
            self.nodes, self.pause = nodes, RESTART


def mean_jct(entries: list[TraceEntry], applications: dict[str, Application], policy: str) -> float:
    jobs = [PlainJob(entry, applications[entry.application]) for entry in entries]
    queues: tuple[list[PlainJob], list[PlainJob]] = ([], [])
    start = 0
    while any(job.ended is None for job in jobs):
        for job in jobs:
            job.live(start)
        start += INTERVAL
        active = [job for job in jobs if job.entry.submitted_s <= start and job.ended is None]
        for job in jobs:
            if job.ended is not None:
                job.nodes = []
        (tiresias if policy == "tiresias" else optimus)(active, queues)
    return sum((job.ended or 0) - job.entry.submitted_s for job in jobs) / len(jobs)


def place(jobs: list[PlainJob], active: list[PlainJob], sizes: dict[int, int]) -> None:
    free = [PACKED - sum(job.nodes.count(node) for job in active) for node in range(NODES)]
    for job in jobs:
        nodes: list[int] = []
        while len(nodes) < sizes[id(job)]:
            node = free.index(max(free))
            number = min(free[node], sizes[id(job)] - len(nodes))
            nodes += [node] * number
            free[node] -= number
        job.move(nodes)


def tiresias(active: list[PlainJob], queues: tuple[list[PlainJob], list[PlainJob]]) -> None:
    for queue in queues:
        queue[:] = [job for job in queue if job in active]
    queues[0].extend(job for job in active if job not in queues[0] and job not in queues[1])
    for job in active:
        job.service += INTERVAL * job.entry.devices if job.nodes else 0
        if job in queues[0] and job.service >= THRESHOLD:
            queues[0].remove(job)
            queues[1].append(job)
    left, chosen = NODES * PACKED, []
    for job in queues[0] + queues[1]:
        if job.entry.devices <= left:
            left -= job.entry.devices
            chosen.append(job)
        else:
            job.move([])
    place([job for job in chosen if not job.nodes], active, {id(job): job.entry.devices for job in active})


def optimus(active: list[PlainJob], queues: object) -> None:
    left, sizes = NODES * PACKED, {id(job): 0 for job in active}
    for job in active:
        sizes[id(job)] = min(1, left)
        left -= sizes[id(job)]

    def saved(job: PlainJob) -> float:
        app, batch, size = job.app, job.entry.batch, sizes[id(job)]
        most = 1 if app.name in ALONE else batch // app.min_local
        if size == 0 or size + 1 > most:
            return 0.0
        last = app.num_epochs - 1
        steps = 1.0 if job.epoch >= last else app.iterations(batch, last) - app.iterations(batch, job.epoch)
        return (app.step_s(batch, size) - app.step_s(batch, size + 1)) * steps

    while left > 0 and active:
        best = max(active, key=saved)
        if saved(best) <= 0:
            break
        sizes[id(best)] += 1
        left -= 1
    moving = [job for job in active if len(job.nodes) != sizes[id(job)]]
    before = {id(job): job.nodes for job in moving}
    for job in moving:
        job.nodes = []
    place(sorted((job for job in moving if sizes[id(job)]), key=lambda job: sizes[id(job)]), active, sizes)
    assert all(job.nodes != before[id(job)] or not job.nodes for job in moving)
