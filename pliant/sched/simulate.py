"""What a cluster would do with a list of jobs under a policy: from event to event, nothing in between. Pure and deterministic.

Events are submissions, ends, reservations, and the rounds of policies that decide at intervals; a round is held only when
something has happened since the last one, or when the policy wants it. Every change of a job's devices is charged: it
holds them and makes no progress for the seconds of a start, of a restart, or, where jobs resize live, of the pause.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.errors import ConfigError, PliantError
from pliant.sched.job import Job, Jobs
from pliant.sched.machines import Cluster, Places
from pliant.sched.schedulers.base import Policy

_SUBMIT, _RESERVE, _END = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Charges:
    """Seconds without progress."""

    start_s: float = 30.0
    """When a job gets devices and had none."""
    change_s: float = 30.0
    """When it gets others: a checkpoint and a restart; with a live resize, the pause."""

    def __post_init__(self) -> None:
        if not (0 <= self.start_s < math.inf and 0 <= self.change_s < math.inf):
            raise ConfigError(f"--restart {self.start_s:g}, --pause {self.change_s:g}: use seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Ended:
    """One job, when it was done."""

    name: str
    submitted_s: float
    started_s: float
    ended_s: float
    replicas: int
    changes: int
    paused_s: float
    device_s: float

    @property
    def jct_s(self) -> float:
        return self.ended_s - self.submitted_s


@dataclass(slots=True)
class Outcome:
    """Everything that happened."""

    policy: str
    jobs: list[Ended] = field(default_factory=list)
    allocated: list[tuple[float, int]] = field(default_factory=list)
    """(time, devices in use from then on)."""
    rounds: int = 0
    history: dict[str, list[tuple[float, dict[str, int]]]] = field(default_factory=dict)
    """Each job's devices over time; only where it was asked for."""


class Simulation:
    """One run, which uses up `jobs` and `cluster`. `progress` is told the fraction of jobs that have ended.

    `reservations` say what is reserved from a time on, in place of what was before.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        cluster: Cluster,
        policy: Policy,
        *,
        interval_s: float = 60.0,
        charges: Charges | None = None,
        reservations: Sequence[tuple[float, Mapping[str, int]]] = (),
        keep_history: bool = False,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        if not 0 < interval_s < math.inf:
            raise ConfigError(f"--interval {interval_s}: use seconds above 0")
        if twice := [name for name, count in Counter(job.name for job in jobs).items() if count > 1]:
            raise ConfigError(f"{twice[0]!r} is the name of two jobs: give each its own")
        for number, job in enumerate(jobs):
            job.number, job.since_s = number, job.submitted_s
            if all(not cluster.counts.get(kind.name) for kind in job.usable(False)):
                raise ConfigError(
                    f"job {job.name} prefers {job.preferred!r}, of which the cluster has none: it has {cluster.counts}"
                )
        self._cluster, self._policy, self._interval_s = cluster, policy, interval_s
        self._charges = charges or Charges()
        self._num_jobs, self._progress = len(jobs), progress
        self._jobs: Jobs = policy.jobs()
        self._places = Places(cluster.nodes)
        self._started: dict[str, float] = {}
        self._ends: dict[str, tuple[float, float]] = {}
        """When each running job's end is noticed, and what is written down for it."""
        self._events: list[tuple[float, int, int, Job | Mapping[str, int]]] = [
            (job.submitted_s, _SUBMIT, number, job) for number, job in enumerate(jobs)
        ]
        self._events += [(time, _RESERVE, number, wanted) for number, (time, wanted) in enumerate(reservations)]
        heapq.heapify(self._events)
        self._round_s = math.inf
        self._keep_history = keep_history
        self._outcome = Outcome(policy.name)

    def run(self) -> Outcome:
        """Until every job has ended.

        Raises:
            PliantError: the policy gave more than there is, or some jobs can never run.
        """
        told = 0
        while len(self._outcome.jobs) < self._num_jobs:
            now = min(self._events[0][0] if self._events else math.inf, self._round_s)
            if now == math.inf:
                raise PliantError(
                    f"{self._policy.name}: {self._jobs.num_waiting} jobs wait and nothing will happen any more: "
                    "they ask for devices that never become free; give the cluster more of them"
                )
            happened = self._pop_events(now)
            if not self._policy.rounds:
                if happened:
                    self._decide(now)
            elif self._round_s <= now:
                self._round_s = math.inf
                changed = self._decide(now)
                self._plan_round(now, self._policy.wakes_s(self._jobs, now) if not changed else now)
            elif happened:
                self._plan_round(now, now, may_be_now=True)
                if self._round_s <= now:
                    continue  # this very moment is a round
            if self._outcome.jobs and len(self._outcome.jobs) // 256 > told:
                told = len(self._outcome.jobs) // 256
                self._progress(len(self._outcome.jobs) / self._num_jobs)
        return self._outcome

    def _pop_events(self, now: float) -> bool:
        happened = False
        while self._events and self._events[0][0] <= now:
            _, kind, _, what = heapq.heappop(self._events)
            if isinstance(what, Job):
                if kind == _SUBMIT:
                    self._jobs.add(what)
                    happened = True
                elif self._ends.get(what.name, (None,))[0] == now:
                    self._end(what, now)
                    happened = True
            else:
                self._cluster.reserved = dict(what)
                happened = True
        return happened

    def _plan_round(self, now: float, wanted_s: float, *, may_be_now: bool = False) -> None:
        """The first round at or after `wanted_s`, after the present moment unless that may be one."""
        if wanted_s == math.inf or not (len(self._jobs) or self._events):
            return
        number = math.ceil(round(wanted_s / self._interval_s, 9))
        number = max(number, 1 if may_be_now else math.floor(round(now / self._interval_s, 9)) + 1)
        self._round_s = min(self._round_s, number * self._interval_s)

    def _end(self, job: Job, now: float) -> None:
        job.sync(now)
        self._places.give_back(job.placement)
        self._jobs.remove(job)
        _, ended_s = self._ends.pop(job.name)
        self._note(job, now, {})
        self._count(now)
        self._outcome.jobs.append(
            Ended(
                job.name, job.submitted_s, self._started[job.name], ended_s, job.replicas, job.changes, job.paused_s, job.device_s,
            )
        )  # fmt: skip

    def _decide(self, now: float) -> bool:
        """Ask the policy, and do what it says; whether anything changes."""
        self._outcome.rounds += 1
        before = dict(self._jobs.used)
        changes = self._policy.allocate(self._jobs, self._cluster, now)
        changed = []
        for name, held in changes.items():
            job = self._jobs.running.get(name)
            if job is not None:
                self._places.give_back(job.placement)
                self._jobs.remove(job)
            else:
                job = self._jobs.find_waiting(name)
                self._jobs.remove(job)
            changed.append((job, held))
        for job, held in changed:
            if any(held.values()):
                pause_s = self._charges.change_s if job.held else self._charges.start_s
                job.give(now, held, self._places.take(held), pause_s)
                self._started.setdefault(job.name, now)
                noticed_s, written_s = job.ends_s()
                self._ends[job.name] = (noticed_s, written_s)
                heapq.heappush(self._events, (noticed_s, _END, job.number, job))
            else:
                job.give(now, {}, (), 0.0)
                self._ends.pop(job.name, None)
            self._jobs.add(job)
            self._note(job, now, job.held)
        if changed:
            self._check(before)
            self._count(now)
        return bool(changed)

    def _check(self, before: Mapping[str, int]) -> None:
        for kind, count in self._jobs.used.items():
            # Policies that never preempt keep devices that were reserved meanwhile, but may not add to them.
            if count > max(self._cluster.available(kind), before.get(kind, 0)):
                raise PliantError(
                    f"{self._policy.name} gave {count} devices of type {kind}, of which there are "
                    f"{self._cluster.available(kind)}: that is a mistake of the policy"
                )

    def _count(self, now: float) -> None:
        total = self._jobs.used.total()
        series = self._outcome.allocated
        if series and series[-1][0] == now:
            series[-1] = (now, total)
        else:
            series.append((now, total))

    def _note(self, job: Job, now: float, held: Mapping[str, int]) -> None:
        if self._keep_history:
            self._outcome.history.setdefault(job.name, []).append((now, dict(held)))
