"""Simulation of a cluster with a list of jobs under a policy, from event to event. Pure and deterministic.

Events are submissions, ends, reservations, and the rounds of policies that decide at intervals. A round is held only
when something has happened since the last one, or when the policy asks for it. Every change of a job's devices is
charged: the job holds them and makes no progress for the seconds of a start, of a restart or, if jobs resize live, of
the pause.

If devices and nodes fail, these are events, too. A job that resizes live goes on with the devices that are left, and does
the step again in which some failed; so it does if its policy is elastic, but it restarts for that from its newest
checkpoint. Any other job, and one with no device left, waits until its policy gives it devices, and restarts from there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.errors import ConfigError, PliantError, PolicyFailed
from pliant.sched.cluster import (
    Backups,
    Cluster,
    ClusterJobs,
    DevicePlacer,
    Placement,
    ScheduledJob,
    SchedulingPolicy,
    gang,
)
from pliant.sched.decision import decide
from pliant.sched.failures import DevicesDown, Outage, Outages

_SUBMIT, _RESERVE, _END = 0, 1, 2
MIN_INTERVAL_S = 1e-3
"""Rounds are at least so far apart, so that the clock can count them all."""
IDLE_ROUNDS = 1000
"""After so many rounds in a row in which nothing runs, changes or can happen, a simulation has come to a standstill."""
MAX_FAILURES, FAILURES_OF_EACH = 10_000, 100
"""After so many failures since a job has ended, and so many of each device and node, no job ever will."""
NAMED_JOBS = 5
"""Jobs that wait and are named when a simulation ends with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Charges:
    """Seconds without progress that starts and changes cost."""

    start_s: float = 30.0
    """Cost of getting devices for a job that had none."""
    change_s: float = 30.0
    """Cost of getting other devices: a checkpoint and a restart, or the pause of a live resize."""
    resizes_live: bool = False
    """Whether `change_s` is that of a live resize; then a failed device costs a step, unless it was the last one."""

    def __post_init__(self) -> None:
        if not (0 <= self.start_s < math.inf and 0 <= self.change_s < math.inf):
            raise ConfigError(f"--restart {self.start_s:g}, --pause {self.change_s:g}: use seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class EndedJob:
    """Figures of a job that has ended."""

    name: str
    submitted_s: float
    started_s: float
    ended_s: float
    replicas: int
    changes: int
    paused_s: float
    device_s: float
    tenant: str = ""
    failures: int = 0
    lost_device_s: float = 0.0

    @property
    def jct_s(self) -> float:
        return self.ended_s - self.submitted_s


@dataclass(slots=True)
class SimulationOutcome:
    """Result of a simulation."""

    policy: str
    jobs: list[EndedJob] = field(default_factory=list)
    allocated: list[tuple[float, int]] = field(default_factory=list)
    """Series of (time, devices in use from then on)."""
    rounds: int = 0
    failures: int = 0
    """Devices and nodes that have failed before the last job has ended, in use or not."""
    history: dict[str, list[tuple[float, dict[str, int]]]] = field(default_factory=dict)
    """Each job's devices over time; empty unless `keep_history` was given."""
    undone: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """The steps of each job that failures have undone, with the time; empty unless `keep_history` was given."""


class Simulation:
    """One simulation, which modifies `jobs` and `cluster`.

    `progress` is called with the fraction of jobs that have ended. `reservations` are pairs of a time and the devices
    that are reserved from then on.
    """

    def __init__(
        self,
        jobs: Sequence[ScheduledJob],
        cluster: Cluster,
        policy: SchedulingPolicy,
        *,
        interval_s: float = 60.0,
        charges: Charges | None = None,
        reservations: Sequence[tuple[float, Mapping[str, int]]] = (),
        outages: Outages | None = None,
        keep_history: bool = False,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        if not MIN_INTERVAL_S <= interval_s < math.inf:
            raise ConfigError(f"--interval {interval_s:g}: use seconds above 0, {MIN_INTERVAL_S:g} or more")
        if twice := [name for name, count in Counter(job.name for job in jobs).items() if count > 1]:
            raise ConfigError(f"{twice[0]!r} is the name of two jobs: give each its own")
        for number, job in enumerate(jobs):
            if not 0 <= job.submitted_s < math.inf:
                raise ConfigError(f"job {job.name} is submitted at {job.submitted_s} s: use seconds from 0")
            job.number, job.since_s = number, job.submitted_s
            if all(not cluster.counts.get(kind.name) for kind in job.usable(False)):
                raise ConfigError(
                    f"job {job.name} prefers {job.preferred!r}, of which the cluster has none: it has {cluster.counts}"
                )
        self._cluster, self._policy, self._interval_s = cluster, policy, interval_s
        self._charges = charges or Charges()
        self._num_jobs, self._progress = len(jobs), progress
        self._jobs: ClusterJobs = policy.jobs()
        self._placer = DevicePlacer(cluster.nodes)
        self._started: dict[str, float] = {}
        self._ends: dict[str, tuple[float, float]] = {}
        """When the end of each running job is noticed, and the time recorded for it."""
        self._events: list[tuple[float, int, int, ScheduledJob | Mapping[str, int]]] = [
            (job.submitted_s, _SUBMIT, number, job) for number, job in enumerate(jobs)
        ]
        self._events += [(time, _RESERVE, number, wanted) for number, (time, wanted) in enumerate(reservations)]
        heapq.heapify(self._events)
        self._outages = outages
        self._down = DevicesDown(cluster)
        if outages is not None:
            for job in jobs:
                job.backups = Backups(outages.checkpoint_s, self._charges.resizes_live, job.work, job.work)
        self._round_s = math.inf
        self._keep_history = keep_history
        self._outcome = SimulationOutcome(policy.name)

    def run(self) -> SimulationOutcome:
        """Simulate until every job has ended.

        Raises:
            PolicyFailed: the policy raised, or gave more devices than there are.
            PliantError: some jobs can never run.
        """
        reported, at_s, turns, idle = 0, -math.inf, 0, 0
        ended, failures = 0, 0
        while len(self._outcome.jobs) < self._num_jobs:
            now = min(self._events[0][0] if self._events else math.inf, self._round_s)
            if not now < math.inf and not any(self._cluster.down.values()):
                raise self._standstill(at_s, "nothing will happen any more")
            if self._outages is not None and self._outages.next_s < now:
                now = self._outages.next_s
            turns = turns + 1 if now == at_s else 0
            # At one moment each job may end and be given devices once, and a round may be held after each of these.
            if turns > 4 * self._num_jobs + 8:
                raise self._standstill(at_s, "time no longer moves")
            at_s = now
            happened = self._pop_events(now)
            if self._outages is not None and len(self._outcome.jobs) < self._num_jobs:
                happened |= self._pop_outages(self._outages, now)
                if ended < len(self._outcome.jobs):
                    ended, failures = len(self._outcome.jobs), self._outcome.failures
                most = max(MAX_FAILURES, FAILURES_OF_EACH * self._outages.num_parts)
                if self._outcome.failures - failures > most:
                    raise self._standstill(
                        at_s, f"no job has ended in {most:,} failures; raise --mtbf, or lower --checkpoint-every"
                    )
            if not self._policy.rounds:
                if happened:
                    self._decide(now)
            elif self._round_s <= now:
                self._round_s = math.inf
                changed = self._decide(now)
                may_change = changed or happened or self._events or any(self._cluster.down.values())
                idle = 0 if may_change else idle + 1
                if idle > IDLE_ROUNDS:
                    raise self._standstill(
                        at_s, f"nothing has changed in {IDLE_ROUNDS} rounds, and nothing else can happen"
                    )
                self._plan_round(now, self._policy.wakes_s(self._jobs, now) if not changed else now)
            elif happened:
                self._plan_round(now, now, may_be_now=True)
                if self._round_s <= now:
                    continue  # a round is due at this moment
            if self._outcome.jobs and len(self._outcome.jobs) // 256 > reported:
                reported = len(self._outcome.jobs) // 256
                self._progress(len(self._outcome.jobs) / self._num_jobs)
        return self._outcome

    def _standstill(self, at_s: float, why: str) -> PliantError:
        """Return the error for a simulation in which nothing goes on any more: which jobs wait, and for what."""
        free = self._cluster.free(self._jobs)
        stuck = [f"{job.name} ({self._reason_to_wait(job, free)})" for job in self._jobs.waiting()]
        stuck += [
            f"{job.name} (has {_in_words(job.held)}, and its work has no end)" for job in self._jobs.running.values()
        ]
        named = "; ".join(stuck[:NAMED_JOBS]) + (
            f"; and {len(stuck) - NAMED_JOBS} more" if len(stuck) > NAMED_JOBS else ""
        )
        return PliantError(
            f"{self._policy.name}: the simulation stands still at {max(at_s, 0):g} s, {why}. {len(stuck)} jobs have not ended: "
            f"{named}. Give the cluster more of these devices, or reserve fewer"
        )

    def _reason_to_wait(self, job: ScheduledJob, free: Mapping[str, int]) -> str:
        kind = job.preferred
        wanted, there = gang(job, self._cluster), self._cluster.counts.get(kind, 0)
        reserved = min(there, self._cluster.reserved.get(kind, 0))
        said = f"waits for {wanted} {kind}: there are {there}, of which {reserved} are reserved"
        if down := self._cluster.down.get(kind, 0):
            said += f", {down} have failed"
        return f"{said} and {max(0, free.get(kind, 0))} are free"

    def _pop_events(self, now: float) -> bool:
        happened = False
        while self._events and self._events[0][0] <= now:
            _, kind, _, what = heapq.heappop(self._events)
            if isinstance(what, ScheduledJob):
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

    def _pop_outages(self, outages: Outages, now: float) -> bool:
        happened = False
        while outages.next_s <= now:
            self._apply_outage(outages.pop(), now)
            happened = True
        return happened

    def _apply_outage(self, outage: Outage, now: float) -> None:
        up = self._down.up(outage.kind, outage.node)
        change = self._down.apply(outage)
        if outage.begins and change:
            self._outcome.failures += 1
            first = 0 if outage.whole_node else int(outage.draw * up)
            for job, lost in self._holders(outage, first, -change):
                self._hit(job, outage.kind, outage.node, lost, now)
        if outage.node is not None:
            self._placer.withdraw(((outage.node, -change),))

    def _holders(self, outage: Outage, first: int, count: int) -> list[tuple[ScheduledJob, int]]:
        """Return the jobs that have devices `first` to `first + count` of a node or type, and how many of these.

        The devices are equal, so they are counted in the order of the jobs that have them; the last ones are free.
        """
        found, begin = [], 0
        for job in sorted(self._jobs.running.values(), key=lambda each: each.number):
            held = job.held.get(outage.kind, 0) if outage.node is None else dict(job.placement).get(outage.node, 0)
            lost = min(begin + held, first + count) - max(begin, first)
            if lost > 0:
                found.append((job, lost))
            begin += held
        return found

    def _hit(self, job: ScheduledJob, kind: str, node: int | None, lost: int, now: float) -> None:
        """Take failed devices from a job."""
        job.sync(now)
        job.failures += 1
        steps_left = job.work.steps_left()
        held, placement = {**job.held, kind: job.held[kind] - lost}, job.placement
        if node is not None:
            placement = tuple((each, count - lost * (each == node)) for each, count in placement)
            placement = tuple((each, count) for each, count in placement if count)
        if not self._policy.elastic or not any(held.values()):
            held, placement = {}, ()
        if held and self._charges.resizes_live:
            job.lose_step(now)
        else:
            job.lose_since_checkpoint(now)
        if self._keep_history:
            self._outcome.undone.setdefault(job.name, []).append((now, job.work.steps_left() - steps_left))
        self._placer.give_back(job.placement)
        self._placer.withdraw(placement)
        self._jobs.remove(job)
        self._give(job, held, placement, self._charges.change_s, now)
        self._record_usage(now)

    def _plan_round(self, now: float, wanted_s: float, *, may_be_now: bool = False) -> None:
        """Set the next round: the first at or after `wanted_s`, and after `now` unless `may_be_now`."""
        if wanted_s == math.inf or not (len(self._jobs) or self._events):
            return
        number = math.ceil(round(wanted_s / self._interval_s, 9))
        number = max(number, 1 if may_be_now else math.floor(round(now / self._interval_s, 9)) + 1)
        self._round_s = min(self._round_s, number * self._interval_s)

    def _end(self, job: ScheduledJob, now: float) -> None:
        job.sync(now)
        self._placer.give_back(job.placement)
        self._jobs.remove(job)
        _, ended_s = self._ends.pop(job.name)
        self._record_history(job, now, {})
        self._record_usage(now)
        self._outcome.jobs.append(
            EndedJob(
                job.name, job.submitted_s, self._started[job.name], ended_s, job.replicas, job.changes, job.paused_s, job.device_s,
                job.tenant, job.failures, job.lost_device_s,
            )
        )  # fmt: skip

    def _decide(self, now: float) -> bool:
        """Ask the policy and apply its answer; return whether anything changed."""
        self._outcome.rounds += 1
        try:
            changes = decide(self._policy, self._jobs, self._cluster, now)
        except PolicyFailed as error:
            raise PolicyFailed(f"at {now:g} s: {error}") from error
        changed = []
        for name, held in changes.items():
            job = self._jobs.running.get(name)
            if job is not None:
                self._placer.give_back(job.placement)
                self._jobs.remove(job)
            else:
                job = self._jobs.find_waiting(name)
                self._jobs.remove(job)
            changed.append((job, held))
        for job, held in changed:
            pause_s = self._charges.change_s if job.held else self._charges.start_s
            self._give(job, held, self._placer.take(held), pause_s, now)
        if changed:
            self._record_usage(now)
        return bool(changed)

    def _give(
        self, job: ScheduledJob, held: Mapping[str, int], placement: Placement, pause_s: float, now: float
    ) -> None:
        """Give a job these devices, or none, and add it to the jobs again."""
        if any(held.values()):
            job.give(now, held, placement, pause_s)
            self._started.setdefault(job.name, now)
            self._ends[job.name] = job.ends_s()
            heapq.heappush(self._events, (self._ends[job.name][0], _END, job.number, job))
        else:
            job.give(now, {}, (), 0.0)
            self._ends.pop(job.name, None)
        self._jobs.add(job)
        self._record_history(job, now, job.held)

    def _record_usage(self, now: float) -> None:
        total = self._jobs.used.total()
        series = self._outcome.allocated
        if series and series[-1][0] == now:
            series[-1] = (now, total)
        else:
            series.append((now, total))

    def _record_history(self, job: ScheduledJob, now: float, held: Mapping[str, int]) -> None:
        if self._keep_history:
            self._outcome.history.setdefault(job.name, []).append((now, dict(held)))


def _in_words(held: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {kind}" for kind, count in sorted(held.items()))


# --- figures of a simulation ---

MAX_POINTS = 500
"""Most points in the series of devices in use."""


def summary(outcome: SimulationOutcome) -> dict[str, float | int]:
    """Return the figures of one policy. Times are those of the trace: the makespan is the end of the last job."""
    times = sorted(job.jct_s for job in outcome.jobs)
    makespan_s = max(job.ended_s for job in outcome.jobs)
    first_s = min(job.submitted_s for job in outcome.jobs)
    device_s = math.fsum(job.device_s for job in outcome.jobs)
    return {
        "jobs": len(times),
        "jct_mean_s": math.fsum(times) / len(times),
        "jct_median_s": quantile(times, 0.5),
        "jct_p99_s": quantile(times, 0.99),
        "makespan_s": makespan_s,
        "gpu_hours": device_s / 3600,
        "mean_allocated": device_s / (makespan_s - first_s) if makespan_s > first_s else 0.0,
        "max_allocated": max((count for _, count in outcome.allocated), default=0),
        "changes": sum(job.changes for job in outcome.jobs),
        "paused_hours": math.fsum(job.paused_s for job in outcome.jobs) / 3600,
        "waited_mean_s": math.fsum(job.started_s - job.submitted_s for job in outcome.jobs) / len(times),
        "rounds": outcome.rounds,
        "failures": outcome.failures,
        "interruptions": sum(job.failures for job in outcome.jobs),
        "lost_gpu_hours": math.fsum(job.lost_device_s for job in outcome.jobs) / 3600,
    }


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of sorted values, with linear interpolation between neighbours."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_use(outcome: SimulationOutcome, step_s: float | None = None) -> list[tuple[float, float]]:
    """Return (start, mean devices in use) of equal steps of `step_s`; by default few enough steps to draw."""
    end_s = max(job.ended_s for job in outcome.jobs)
    step_s = step_s or max(end_s / MAX_POINTS, 1.0)
    borders = [number * step_s for number in range(1, math.ceil(end_s / step_s))] + [end_s]
    series, before, found = [*outcome.allocated, (math.inf, 0)], 0.0, []
    place, count = 0, 0
    for border in borders:
        area, at = 0.0, before
        while series[place][0] <= border:
            area += count * (series[place][0] - at)
            at, count = series[place]
            place += 1
        area += count * (border - at)
        found.append((before, area / (border - before) if border > before else float(count)))
        before = border
    return found


def job_rows(outcome: SimulationOutcome) -> list[dict[str, float | int | str]]:
    """Return a row for each job, in the order of their ends."""
    return [
        {
            "name": job.name,
            "replicas": job.replicas,
            "submitted_s": job.submitted_s,
            "started_s": job.started_s,
            "ended_s": job.ended_s,
            "jct_s": job.jct_s,
            "device_s": job.device_s,
            "changes": job.changes,
            "paused_s": job.paused_s,
            "failures": job.failures,
            "lost_device_s": job.lost_device_s,
        }
        for job in outcome.jobs
    ]
