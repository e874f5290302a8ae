"""A job as schedulers see it, and the jobs of a cluster: those with devices, and those that wait, in order. Pure.

The simulator and the live scheduler fill the same objects: the one with a trace's work, the other with measured speeds.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pliant.errors import ConfigError
from pliant.sched.planner import Counts, DeviceType, Plan, Proposal, Types, best_plan

Placement = tuple[tuple[int, int], ...]
"""(node, devices on it), in the order in which they were given; empty where the cluster has no nodes to tell apart."""


class Work(Protocol):
    """What is left of a job, and how fast it goes."""

    def placed(self, job: Job) -> None:
        """The job has other devices from now on."""

    def advance(self, seconds: float) -> None:
        """The devices have computed for this long."""

    def left_s(self) -> tuple[float, float]:
        """Seconds until the end on the present devices: until it is noticed, and as it is written down, which may be
        rounded. Infinite without devices.
        """

    def step_s(self, job: Job, devices: int) -> float:
        """Seconds of a global step on so many devices of the preferred type."""

    def steps_left(self) -> float:
        """Global steps until the end, as the job counts them."""


@dataclass(slots=True)
class SteadyWork:
    """A number of global steps that last as long as the planner says."""

    steps: float
    rate: float = 0.0
    """Global steps per second on the present devices."""

    def placed(self, job: Job) -> None:
        plan = job.plan
        self.rate = 1 / plan.overload if plan else 0.0

    def advance(self, seconds: float) -> None:
        self.steps = max(0.0, self.steps - self.rate * seconds)

    def left_s(self) -> tuple[float, float]:
        seconds = self.steps / self.rate if self.rate else float("inf")
        return seconds, seconds

    def step_s(self, job: Job, devices: int) -> float:
        plan = best_plan(job.replicas, (job.preferred_type,), (devices,))
        return plan.overload if plan else float("inf")

    def steps_left(self) -> float:
        return self.steps


@dataclass(slots=True, eq=False)
class Job:
    """One job: what it is, what it has, and how far it is."""

    name: str
    submitted_s: float
    replicas: int
    types: Types
    """The device types it may use, with its speed on each."""
    work: Work = field(default_factory=lambda: SteadyWork(float("inf")))
    preferred: str = ""
    """The type of jobs that use one type only; empty: the first one."""
    mixed: bool = True
    """Whether its result stays the same on several types at once."""
    min_devices: int = 0
    """Guaranteed, of the preferred type: whoever borrowed them gives them back."""
    tenant: str = ""
    number: int = 0
    """Place in the order of submission, which decides between equals."""
    goodput: Callable[[int], float] | None = None
    """What a number of devices is worth, where more is known than step times; in any unit."""
    max_devices: int = 0
    """No policy gives more; 0: as many as there are replicas."""
    avoided: frozenset[tuple[tuple[str, int], ...]] = frozenset()
    """Devices on which it was slower than before (sorted items)."""

    held: dict[str, int] = field(default_factory=dict)
    placement: Placement = ()
    since_s: float = 0.0
    """Progress is that of this time."""
    resumes_s: float = 0.0
    """It computes again from then on, after a start or a change of its devices."""
    held_s: float = 0.0
    """How long it has had devices."""
    device_s: float = 0.0
    """The same, times the devices."""
    paused_s: float = 0.0
    """Charged to it for starts and changes."""
    changes: int = 0
    """How often it was given other devices, the first ones included."""
    queue: tuple[float, ...] = ()
    """Where a policy with queues of its own has put it."""
    plan: Plan | None = None
    memory: dict[tuple[int, ...], Proposal | None] = field(default_factory=dict)
    """What a policy has found out about it on its present devices; forgotten when they change."""
    _usable: dict[bool, Types] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"job {self.name}: replicas={self.replicas}: use 1 or more")
        if not self.types:
            raise ConfigError(f"job {self.name}: no device type it can use has a speed; give one")
        self.preferred = self.preferred or self.types[0].name
        if all(kind.name != self.preferred for kind in self.types):
            raise ConfigError(f"job {self.name}: its preferred type {self.preferred!r} has no speed; give one")
        if not 0 <= self.min_devices <= self.replicas:
            raise ConfigError(
                f"job {self.name}: min_devices={self.min_devices}: use 0 to {self.replicas}, its replicas"
            )
        self.max_devices = self.max_devices or self.replicas

    @property
    def preferred_type(self) -> DeviceType:
        return next(kind for kind in self.types if kind.name == self.preferred)

    def usable(self, heterogeneous: bool) -> Types:
        """The types that a policy may give it."""
        found = self._usable.get(heterogeneous)
        if found is None:
            found = self.types if heterogeneous and self.mixed else (self.preferred_type,)
            self._usable[heterogeneous] = found
        return found

    def num_devices(self) -> int:
        return sum(self.held.values())

    def sync(self, now: float) -> None:
        """Bring the progress to `now`."""
        if now <= self.since_s:
            return
        if self.held:
            computing = now - max(self.since_s, self.resumes_s)
            if computing > 0:
                self.work.advance(computing)
            self.held_s += now - self.since_s
            self.device_s += (now - self.since_s) * sum(self.held.values())
        self.since_s = now

    def held_for(self, now: float) -> float:
        """How long it has had devices until now."""
        return self.held_s + (now - self.since_s if self.held else 0.0)

    def give(self, now: float, held: Counts, placement: Placement, pause_s: float) -> None:
        """From now on these devices, and `pause_s` without progress."""
        self.sync(now)
        self.since_s = now
        # What is left of an earlier pause is not spent any more: it has begun anew, or has become waiting.
        self.paused_s -= max(0.0, self.resumes_s - now) if self.held else 0.0
        self.held = {kind: count for kind, count in held.items() if count}
        self.placement = placement
        self.memory = {}
        if self.held:
            self.plan = best_plan(self.replicas, self.types, tuple(self.held.get(kind.name, 0) for kind in self.types))
            self.resumes_s = now + pause_s
            self.paused_s += pause_s
            self.changes += 1
        else:
            self.plan = None
        self.work.placed(self)

    def ends_s(self) -> tuple[float, float]:
        """When it will have ended if nothing changes: when that is noticed, and as it is written down."""
        noticed_s, written_s = self.work.left_s()
        start_s = max(self.since_s, self.resumes_s)
        return start_s + noticed_s, start_s + written_s


Shape = Callable[[Job], Hashable]
Order = Callable[[Job], tuple[float, ...]]


def by_submission(job: Job) -> tuple[float, ...]:
    return (job.submitted_s,)


class Jobs:
    """The jobs of a cluster. Waiting ones stand in one line for each shape, so that whoever cannot be served is not asked
    again and again: all jobs of a shape want the same, and if the first of them does not fit, none of them does.
    """

    def __init__(
        self, jobs: Iterable[Job] = (), *, shape: Shape = lambda job: None, order: Order = by_submission
    ) -> None:
        self._shape, self._order = shape, order
        self._lines: dict[Hashable, list[tuple[tuple[float, ...], int, Job]]] = {}
        self._places: dict[str, tuple[Hashable, tuple[float, ...], Job]] = {}
        self.running: dict[str, Job] = {}
        self.growing: dict[str, Job] = {}
        """Running jobs of which it is not known that no device could help them."""
        self.used: Counter[str] = Counter()
        """Devices of each type in use."""
        self.any_guaranteed = False
        """Whether there ever was a job with guaranteed devices."""
        for number, job in enumerate(jobs):
            job.number = job.number or number
            self.add(job)

    def __len__(self) -> int:
        return len(self.running) + len(self._places)

    @property
    def num_waiting(self) -> int:
        return len(self._places)

    def find_waiting(self, name: str) -> Job:
        return self._places[name][2]

    def add(self, job: Job) -> None:
        self.any_guaranteed |= job.min_devices > 0
        if job.held:
            self.running[job.name] = self.growing[job.name] = job
            self.used.update(job.held)
        else:
            self._queue(job)

    def remove(self, job: Job) -> None:
        if job.name in self.running:
            del self.running[job.name]
            self.growing.pop(job.name, None)
            self.used.subtract(job.held)
        else:
            self._unqueue(job)

    def waiting(self, fits: Callable[[Job], bool] = lambda job: True) -> Iterator[Job]:
        """Those that wait, in order, as long as `fits` says so of their shape; the lines must not change meanwhile."""
        ranked = [(line[0][0], line[0][1], place, shape) for place, (shape, line) in enumerate(self._lines.items())]
        heapq.heapify(ranked)
        at = dict.fromkeys(self._lines, 0)
        while ranked:
            _, _, place, shape = ranked[0]
            line, index = self._lines[shape], at[shape]
            job = line[index][2]
            if not fits(job):
                heapq.heappop(ranked)
                continue
            if index + 1 < len(line):
                at[shape] = index + 1
                heapq.heapreplace(ranked, (line[index + 1][0], line[index + 1][1], place, shape))
            else:
                heapq.heappop(ranked)
            yield job

    def _queue(self, job: Job) -> None:
        shape, key = self._shape(job), self._order(job)
        bisect.insort(self._lines.setdefault(shape, []), (key, job.number, job), key=_rank)
        self._places[job.name] = (shape, key, job)

    def _unqueue(self, job: Job) -> None:
        shape, key, _ = self._places.pop(job.name)
        line = self._lines[shape]
        del line[bisect.bisect_left(line, (key, job.number), key=_rank)]
        if not line:
            del self._lines[shape]


def _rank(entry: tuple[tuple[float, ...], int, Job]) -> tuple[tuple[float, ...], int]:
    return entry[:2]
