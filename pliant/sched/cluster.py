"""Jobs and devices of a cluster, and the interface of scheduling policies. Pure.

The simulator and the live scheduler fill the same objects: the simulator with the work of a trace, the live scheduler
with measured speeds.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant.errors import ConfigError, reason, refuse_file
from pliant.sched.planner import Counts, DevicePlan, DeviceType, Proposal, Types, best_plan
from pliant.sched.rows import check_header, decode, read_header, read_rows

# --- jobs ---

Placement = tuple[tuple[int, int], ...]
"""(node, devices on it), in the order in which they were given; empty if the cluster does not list its nodes."""


class Work(Protocol):
    """Remaining work of a job, and how fast it is done."""

    slowness: float
    """How many times as long it takes as was estimated; policies know the estimate only."""

    def placed(self, job: ScheduledJob) -> None:
        """Take note that the job has other devices from now on."""

    def advance(self, seconds: float) -> None:
        """Take note that the devices have computed for this long."""

    def left_s(self) -> tuple[float, float]:
        """Return the seconds until the end on the present devices: until it is noticed, and as recorded.

        The recorded value may be rounded. Both are infinite without devices.
        """

    def step_s(self, job: ScheduledJob, devices: int) -> float:
        """Return the seconds of a global step on `devices` devices of the preferred type."""

    def steps_left(self) -> float:
        """Return the global steps until the end, as the job counts them."""

    def turn_s(self) -> float:
        """Return the seconds of a global step on the present devices; 0 without devices."""


@dataclass(slots=True)
class SteadyWork:
    """A number of global steps whose duration the planner predicts."""

    steps: float
    rate: float = 0.0
    """Global steps per second on the present devices."""
    slowness: float = 1.0
    """How many times as long it takes as was estimated; policies know the estimate only."""

    def placed(self, job: ScheduledJob) -> None:
        plan = job.plan
        self.rate = 1 / plan.overload if plan else 0.0

    def advance(self, seconds: float) -> None:
        self.steps = max(0.0, self.steps - self.rate * seconds)

    def left_s(self) -> tuple[float, float]:
        seconds = self.steps / self.rate if self.rate else float("inf")
        return seconds, seconds

    def step_s(self, job: ScheduledJob, devices: int) -> float:
        plan = best_plan(job.replicas, (job.preferred_type,), (devices,))
        return plan.overload if plan else float("inf")

    def steps_left(self) -> float:
        return self.steps / self.slowness

    def turn_s(self) -> float:
        return 1 / self.rate if self.rate else 0.0


@dataclass(slots=True)
class Backups:
    """What a job can go back to when devices fail: the last step on its present devices, and its newest checkpoint.

    There is a checkpoint every `every_s` seconds of computing, and one whenever its devices change, unless by a live
    resize, which needs none.
    """

    every_s: float
    resizes_live: bool
    placed: Work
    """The work when the job was given its present devices."""
    saved: Work
    """The work at the newest checkpoint."""
    placed_s: float = 0.0
    """Seconds of computing since then."""
    saved_s: float = 0.0
    saved_device_s: float = 0.0

    def advance(self, work: Work, seconds: float, devices: int) -> None:
        """Let the work advance, with a checkpoint whenever one is due."""
        due = math.floor((self.saved_s + seconds) / self.every_s + 1e-12)
        if due:
            head_s = max(0.0, due * self.every_s - self.saved_s)
            work.advance(head_s)
            self.placed_s += head_s
            self.save(work)
            seconds = max(0.0, seconds - head_s)
        work.advance(seconds)
        self.placed_s += seconds
        self.saved_s += seconds
        self.saved_device_s += seconds * devices

    def save(self, work: Work) -> None:
        self.saved, self.saved_s, self.saved_device_s = copy.copy(work), 0.0, 0.0

    def place(self, work: Work) -> None:
        """Take note that the job has other devices from now on."""
        self.placed, self.placed_s = copy.copy(work), 0.0


@dataclass(slots=True, eq=False)
class ScheduledJob:
    """One job: its description, its devices and its progress."""

    name: str
    submitted_s: float
    replicas: int
    types: Types
    """Device types it may use, with its speed on each."""
    work: Work = field(default_factory=lambda: SteadyWork(float("inf")))
    preferred: str = ""
    """Device type it uses if it uses one type only; empty means the first of `types`."""
    mixed: bool = True
    """Whether its result stays the same on several device types at once."""
    min_devices: int = 0
    """Guaranteed devices of the preferred type; jobs that have borrowed them give them back."""
    number: int = 0
    """Position in the order of submission, which decides between equals."""
    tenant: str = ""
    """Who submitted it; empty: nobody in particular."""
    goodput: Callable[[int], float] | None = None
    """Goodput of a number of devices in any unit, if more is known than step times."""
    max_devices: int = 0
    """Most devices that a policy gives; 0 means one for each replica."""
    avoided: frozenset[tuple[tuple[str, int], ...]] = frozenset()
    """Sets of devices (sorted items) on which it was slower than before."""

    held: dict[str, int] = field(default_factory=dict)
    placement: Placement = ()
    since_s: float = 0.0
    """Time to which the progress has been brought up."""
    resumes_s: float = 0.0
    """Time at which it computes again after a start or a change of its devices."""
    held_s: float = 0.0
    """Total time with devices."""
    device_s: float = 0.0
    """Total time with devices, times the number of devices."""
    paused_s: float = 0.0
    """Seconds charged for starts and changes."""
    changes: int = 0
    """Number of times it was given other devices, the first time included."""
    failures: int = 0
    """Number of times it has lost devices because they failed."""
    lost_device_s: float = 0.0
    """Seconds of computing that failures have undone, times the number of devices."""
    backups: Backups | None = None
    """None if no failures are simulated."""
    queue: tuple[float, ...] = ()
    """Position in the queues of a policy that has queues of its own."""
    plan: DevicePlan | None = None
    memory: dict[tuple[int, ...], Proposal | None] = field(default_factory=dict)
    """Cached proposals of a policy for the present devices; cleared when they change."""
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
        """Return the device types that a policy may give it."""
        found = self._usable.get(heterogeneous)
        if found is None:
            found = self.types if heterogeneous and self.mixed else (self.preferred_type,)
            self._usable[heterogeneous] = found
        return found

    def num_devices(self) -> int:
        return sum(self.held.values())

    def sync(self, now: float) -> None:
        """Bring the progress up to `now`."""
        if now <= self.since_s:
            return
        if self.held:
            computing = now - max(self.since_s, self.resumes_s)
            if computing > 0 and self.backups is not None:
                self.backups.advance(self.work, computing, self.num_devices())
            elif computing > 0:
                self.work.advance(computing)
            self.held_s += now - self.since_s
            self.device_s += (now - self.since_s) * sum(self.held.values())
        self.since_s = now

    def held_for(self, now: float) -> float:
        """Return the total time with devices until `now`."""
        return self.held_s + (now - self.since_s if self.held else 0.0)

    def give(self, now: float, held: Counts, placement: Placement, pause_s: float) -> None:
        """Replace its devices, with `pause_s` seconds without progress."""
        self.sync(now)
        self.since_s = now
        if self.backups is not None and not (self.backups.resizes_live and self.held and any(held.values())):
            self.backups.save(self.work)
        # The rest of an earlier pause is not spent: a new pause begins, or the job waits.
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
        if self.backups is not None:
            self.backups.place(self.work)

    def lose_step(self, now: float) -> None:
        """Undo the step that is under way, because some of the devices have failed."""
        self.sync(now)
        backups = self.backups
        assert backups is not None, "failures are simulated"
        step_s = self.work.turn_s()
        # A checkpoint may be younger than the beginning of the step, as the simulator counts them: it stays.
        lost_s = min(backups.placed_s % step_s if step_s else 0.0, backups.saved_s)
        self.work = copy.copy(backups.placed)
        self.work.advance(backups.placed_s - lost_s)
        backups.saved_s -= lost_s
        backups.saved_device_s -= lost_s * self.num_devices()
        self.lost_device_s += lost_s * self.num_devices()

    def lose_since_checkpoint(self, now: float) -> None:
        """Go back to the newest checkpoint."""
        self.sync(now)
        assert self.backups is not None, "failures are simulated"
        self.work = copy.copy(self.backups.saved)
        self.lost_device_s += self.backups.saved_device_s
        self.backups.save(self.work)

    def ends_s(self) -> tuple[float, float]:
        """Return when it ends if nothing changes: when the end is noticed, and as recorded."""
        noticed_s, written_s = self.work.left_s()
        start_s = max(self.since_s, self.resumes_s)
        return start_s + noticed_s, start_s + written_s


Shape = Callable[[ScheduledJob], Hashable]
Order = Callable[[ScheduledJob], tuple[float, ...]]


def by_submission(job: ScheduledJob) -> tuple[float, ...]:
    return (job.submitted_s,)


class ClusterJobs:
    """The running and waiting jobs of a cluster.

    Waiting jobs stand in one queue for each shape. All jobs of a shape want the same devices, so if the first of them
    does not fit, the others need not be tried.
    """

    def __init__(
        self, jobs: Iterable[ScheduledJob] = (), *, shape: Shape = lambda job: None, order: Order = by_submission
    ) -> None:
        self._shape, self._order = shape, order
        self._queues: dict[Hashable, list[tuple[tuple[float, ...], int, ScheduledJob]]] = {}
        self._positions: dict[str, tuple[Hashable, tuple[float, ...], ScheduledJob]] = {}
        self.running: dict[str, ScheduledJob] = {}
        self.growing: dict[str, ScheduledJob] = {}
        """Running jobs that might become faster with more devices."""
        self.used: Counter[str] = Counter()
        """Number of devices in use, by type."""
        self.any_guaranteed = False
        """Whether any job so far had guaranteed devices."""
        for number, job in enumerate(jobs):
            job.number = job.number or number
            self.add(job)

    def __len__(self) -> int:
        return len(self.running) + len(self._positions)

    @property
    def num_waiting(self) -> int:
        return len(self._positions)

    def find_waiting(self, name: str) -> ScheduledJob:
        return self._positions[name][2]

    def find(self, name: str) -> ScheduledJob | None:
        """Return the job of that name that runs or waits, if there is one."""
        return self.running.get(name) or (self.find_waiting(name) if name in self._positions else None)

    def add(self, job: ScheduledJob) -> None:
        self.any_guaranteed |= job.min_devices > 0
        if job.held:
            self.running[job.name] = self.growing[job.name] = job
            self.used.update(job.held)
        else:
            self._queue(job)

    def remove(self, job: ScheduledJob) -> None:
        if job.name in self.running:
            del self.running[job.name]
            self.growing.pop(job.name, None)
            self.used.subtract(job.held)
        else:
            self._unqueue(job)

    def waiting(self, fits: Callable[[ScheduledJob], bool] = lambda job: True) -> Iterator[ScheduledJob]:
        """Yield waiting jobs in order; skip a shape once `fits` refuses a job of it. Do not add or remove jobs meanwhile."""
        ranked = [(line[0][0], line[0][1], place, shape) for place, (shape, line) in enumerate(self._queues.items())]
        heapq.heapify(ranked)
        at = dict.fromkeys(self._queues, 0)
        while ranked:
            _, _, place, shape = ranked[0]
            line, index = self._queues[shape], at[shape]
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

    def _queue(self, job: ScheduledJob) -> None:
        shape, key = self._shape(job), self._order(job)
        bisect.insort(self._queues.setdefault(shape, []), (key, job.number, job), key=_rank)
        self._positions[job.name] = (shape, key, job)

    def _unqueue(self, job: ScheduledJob) -> None:
        shape, key, _ = self._positions.pop(job.name)
        line = self._queues[shape]
        del line[bisect.bisect_left(line, (key, job.number), key=_rank)]
        if not line:
            del self._queues[shape]


def _rank(entry: tuple[tuple[float, ...], int, ScheduledJob]) -> tuple[tuple[float, ...], int]:
    return entry[:2]


# --- devices ---


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster with devices of one type."""

    kind: str
    devices: int


MAX_DEVICES, DIGITS = 10**6, 12
"""Most devices of one type, and most digits of their number."""


@dataclass(slots=True)
class Cluster:
    """The devices of a cluster."""

    counts: dict[str, int]
    """Number of devices by type."""
    nodes: tuple[ClusterNode, ...] = ()
    """The nodes that have the devices; empty if the placement does not matter."""
    reserved: dict[str, int] = field(default_factory=dict)
    """Devices that their owner uses now; jobs give them back."""
    down: dict[str, int] = field(default_factory=dict)
    """Devices that have failed, and are not repaired yet."""

    def __post_init__(self) -> None:
        if not self.counts or any(count < 0 for count in self.counts.values()) or not any(self.counts.values()):
            raise ConfigError(f"cluster {self.counts}: give at least one device, as in v100=32,p100=16")

    def available(self, kind: str) -> int:
        """Return the number of devices of a type that jobs may have now."""
        return max(0, self.counts.get(kind, 0) - self.down.get(kind, 0) - self.reserved.get(kind, 0))

    def free(self, jobs: ClusterJobs) -> dict[str, int]:
        """Return the free devices by type; negative if jobs must give some back."""
        return {kind: self.available(kind) - jobs.used[kind] for kind in self.counts}

    @classmethod
    def of_nodes(cls, nodes: Iterable[ClusterNode]) -> Cluster:
        listed = tuple(nodes)
        counts: Counter[str] = Counter()
        for node in listed:
            counts[node.kind] += node.devices
        return cls(dict(counts), listed)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse `v100=32,t4=16` (devices), `gpu=16x4` (nodes of 4), or a file of nodes as Alibaba publishes them.

        Raises:
            ConfigError: the text has another form.
        """
        if Path(text).suffix == ".csv":
            return _read_openb(Path(text))
        counts: dict[str, int] = {}
        nodes: list[ClusterNode] = []
        for part in text.split(","):
            kind, _, amount = part.strip().partition("=")
            number, by, each = amount.partition("x")
            if not kind or not number.isdecimal() or (by and not each.isdecimal()) or kind in counts:
                raise ConfigError(f"--cluster {part!r:.60}: use TYPE=DEVICES or TYPE=NODESxDEVICES, each type once")
            if len(number) + len(each) > DIGITS or int(number) * int(each or 1) > MAX_DEVICES:
                raise ConfigError(f"--cluster {part!r:.60}: use {MAX_DEVICES:,} devices of a type, or less")
            counts[kind] = int(number) * int(each or 1)
            nodes += [ClusterNode(kind, int(each))] * int(number) if by else []
        if nodes and sum(node.devices for node in nodes) != sum(counts.values()):
            raise ConfigError(f"--cluster {text!r}: give nodes for all types or for none, as in v100=8x4,t4=4x4")
        return cls(counts, tuple(nodes))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices that their owner uses for a while, so that jobs cannot use them."""

    kind: str
    devices: int
    begin_s: float
    end_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> tuple[Reservation, ...]:
        """Parse `v100=4@3600-7200`, `v100=4,t4=2@3600-7200`, or `v100=4@3600-` for a reservation without end.

        Raises:
            ConfigError: the text has another form.
        """
        listed, _, span = text.partition("@")
        begin, dash, end = span.partition("-")
        try:
            begin_s, end_s = float(begin), float(end) if end else math.inf
            amounts = [
                (kind.strip(), int(count)) for kind, _, count in (part.partition("=") for part in listed.split(","))
            ]
        except ValueError:
            amounts = []
        if not amounts or not dash or any(not kind or count < 1 for kind, count in amounts):
            raise ConfigError(f"--reserve {text!r}: use TYPE=N@BEGIN-END with seconds, as in v100=4@3600-7200")
        if not 0 <= begin_s < end_s:
            raise ConfigError(f"--reserve {text!r}: it must begin at 0 s or later, and end after that")
        return tuple(cls(kind, count, begin_s, end_s) for kind, count in amounts)


def reserved_over_time(reservations: Sequence[Reservation]) -> list[tuple[float, dict[str, int]]]:
    """Return (time, devices reserved from then on) for every change. Reservations of one type add up."""
    times = sorted({time for each in reservations for time in (each.begin_s, each.end_s) if time < math.inf})
    found = []
    for time in times:
        now: Counter[str] = Counter()
        for each in reservations:
            if each.begin_s <= time < each.end_s:
                now[each.kind] += each.devices
        found.append((time, dict(now)))
    return found


def _read_openb(path: Path) -> Cluster:
    try:
        text = decode(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"--cluster {path}: {reason(error)}; give a CSV with the columns sn, gpu and model") from None
    nodes, mistakes = (
        [],
        [f"{path}:1: {each}" for each in check_header(read_header(text), ("gpu", "model"), "a CSV of nodes")],
    )
    for row in () if mistakes else read_rows(text):
        if not row.mistakes:
            nodes.append(ClusterNode(row.text("model").lower(), row.whole("gpu", most=MAX_DEVICES)))
        mistakes += [f"{path}:{row.line}: {mistake}" for mistake in row.mistakes]
    if mistakes:
        raise refuse_file(mistakes)
    if not any(node.devices for node in nodes):
        raise ConfigError(f"{path}:1: no node in it has a GPU; give a CSV with the columns sn, gpu and model")
    return Cluster.of_nodes(node for node in nodes if node.devices)


class DevicePlacer:
    """Assigns devices on nodes: the node with the most free devices first, jobs in the order of asking."""

    def __init__(self, nodes: Iterable[ClusterNode]) -> None:
        self._nodes = tuple(nodes)
        self._free = [node.devices for node in self._nodes]

    def give_back(self, placement: Placement) -> None:
        for node, count in placement:
            self._free[node] += count

    def withdraw(self, placement: Placement) -> None:
        """Take these devices, which are free."""
        for node, count in placement:
            self._free[node] -= count

    def take(self, wanted: Mapping[str, int]) -> Placement:
        """Take devices of each type; the caller has checked that there are enough."""
        taken: list[tuple[int, int]] = []
        for kind, needed in wanted.items() if self._nodes else ():
            while needed:
                node = max(
                    (index for index, each in enumerate(self._nodes) if each.kind == kind), key=self._free.__getitem__
                )
                count = min(needed, self._free[node])
                assert count > 0, f"{kind}: {needed} devices more than the nodes have"
                self._free[node] -= count
                taken.append((node, count))
                needed -= count
        return tuple(taken)


# --- scheduling policies ---

Changes = dict[str, dict[str, int]]
"""New devices of jobs, by job name and device type; empty to take all devices away."""


class SchedulingPolicy(ABC):
    """A way to share a cluster among jobs.

    A policy looks at the jobs and the cluster and returns the jobs whose devices change. Jobs that are not in the answer
    keep their devices. New devices are placed on nodes in the order of the answer.
    """

    name: str
    """Shown in results; default: the name of the class."""
    about: str
    """What it does, in a line; default: the first line of the class's docstring."""
    rounds = True
    """Whether it decides at fixed intervals; if not, it decides as soon as something happens."""
    elastic = False
    """Whether jobs can change their devices without a restart, by a live resize."""
    adapts_batch = False
    """Whether jobs may change their batch size when they get more devices."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        cls.name = own.get("name", cls.__name__)
        cls.about = own.get("about", (cls.__doc__ or cls.__name__).strip().partition("\n")[0])

    @abstractmethod
    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        """Return the jobs whose devices change, with all devices they have from now on; never more than there are.

        `jobs.running` has the jobs with devices by name, `jobs.waiting()` yields those without. `cluster.available(kind)`
        counts the devices of a type that jobs may have, `cluster.free(jobs)` those that none of them has. Return soon: live,
        nothing else is decided meanwhile. Change no job.
        """

    def wakes_s(self, jobs: ClusterJobs, now: float) -> float:
        """Return when to decide again even if nothing happens; infinite to wait until something does."""
        return math.inf

    def shape(self, job: ScheduledJob) -> Hashable:
        """Return a key that is equal for waiting jobs that want the same devices."""
        return job.preferred

    def order(self, job: ScheduledJob) -> tuple[float, ...]:
        """Return the sort key of a waiting job."""
        return (job.submitted_s,)

    def jobs(self, jobs: Sequence[ScheduledJob] = ()) -> ClusterJobs:
        """Arrange the jobs in the order of this policy."""
        return ClusterJobs(jobs, shape=self.shape, order=self.order)


def gang(job: ScheduledJob, cluster: Cluster) -> int:
    """Return how many devices of the preferred type a job of fixed size runs on: one for each replica.

    If the cluster has fewer of that type, replicas share devices, because the job could not run otherwise.
    """
    return min(job.replicas, job.max_devices, cluster.counts.get(job.preferred, 0))
