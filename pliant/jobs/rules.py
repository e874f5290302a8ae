"""The scheduler's rules: events go in, actions come out. Pure: no clock, no process, no file.

A policy, one of those that the simulator uses, says which devices each job is to have (`target`). What the job's runner is
asked to have (`asked`) follows: less at once, more only when the devices are free, which is when no process is on them.
So two jobs never share a device, however long one takes to leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import CapacityError, ConfigError, NameTaken, PolicyFailed
from pliant.jobs.status import state_after
from pliant.sched import planner
from pliant.sched.cluster import Changes, Cluster, ScheduledJob, SchedulingPolicy
from pliant.sched.decision import decide
from pliant.sched.planner import Counts
from pliant.sched.tenants import OTHERS, Tenant, TenantShares
from pliant.sched.throughput import Devices, Throughput, device_key

RESERVE_GRACE_S = 0.4
"""After a reservation, jobs may take this long to leave in good order. Then they are killed, which costs a step that is
done again, or the steps since the last checkpoint."""
GIVE_BACK_GRACE_S = 0.4
"""The same for workers on borrowed devices that their owner's job waits for; the step is done again, and nothing else."""
END_GRACE_S = 60.0
"""The same for a job that is put off for another, or stopped."""
MAX_LOSSES = 3
"""Runs lost in a row without a step between them before the job counts as failed."""
AVOID_S = 600.0
"""How long devices that made a job slower are not tried again: the neighbours may have changed by then."""


WAITING, STARTING, RUNNING, PUT_OFF = "waiting", "starting", "running", "put-off"
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
_SAVED = (
    "number", "submitted_s", "state", "target", "asked", "told", "run", "ending", "started_s", "ended_s", "exit_code", "why",
    "losses", "step", "record_from",
)  # fmt: skip


# --- actions ---


@dataclass(frozen=True, slots=True)
class StartRun:
    """Start the job's next run on these devices."""

    job: str
    devices: dict[str, int]


@dataclass(frozen=True, slots=True)
class ResizeRun:
    """Tell the job's runner to have these devices."""

    job: str
    devices: dict[str, int]


@dataclass(frozen=True, slots=True)
class DropWorkers:
    """Kill the workers of the job that are on devices it shall not have."""

    job: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the job's run, in good order or at once."""

    job: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """Add an event to the job's history. Like every action it is saved before anything is done."""

    job: str
    what: str
    why: str
    devices: dict[str, int] = field(default_factory=dict)


Action = StartRun | ResizeRun | DropWorkers | EndRun | NoteEvent


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    code: int | None
    """Exit code, or minus the signal; None: nobody has seen it, as when the machine was lost."""
    at_s: float
    """Unix time."""
    finished: bool = False
    """Whether the program is known to have come to its end, whatever it was told."""
    why: str = ""
    """The reason of a failure in the program's own words, where it is known."""


# --- a job ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a job asks of the scheduler; `jobs.schema` has the meaning of the fields."""

    name: str
    replicas: int
    min: int
    max: int
    devices: tuple[str, ...] = ()
    speed: Mapping[str, float] = field(default_factory=dict)
    mixed: bool = False
    priority: int = 0
    rigid: bool = False
    """Whether the job runs on `max` devices (all there are, if that is less) or not at all."""

    def misfits(self, devices: Counts) -> dict[str, str]:
        """Return by key of the job file what keeps the job from ever running on these devices; empty if nothing does."""
        mine = [devices[kind] for kind in self.devices or devices if kind in devices]
        there = devices_in_words(devices)
        if not mine:
            return {"devices": f"devices {', '.join(self.devices)}: the cluster has {there}; name one of these types"}
        most = sum(mine) if self.mixed else max(mine)
        if self.rigid or self.min <= most:
            return {}
        how = "" if self.mixed or len(mine) == 1 else ", and the job has one type at a time"
        return {"min": f"min {self.min}: the cluster has {there}{how}; use {most} or less"}


@dataclass(slots=True)
class ManagedJob:
    """A job of the scheduler: its demand, its devices, and its state. Device types without an entry count as 0."""

    demand: Demand
    number: int
    """Position in the order of submission."""
    submitted_s: float
    state: str = WAITING
    target: dict[str, int] = field(default_factory=dict)
    """Devices that the policy has given to the job."""
    asked: dict[str, int] = field(default_factory=dict)
    """Devices that the runner shall have: the target, as soon as they are free. Empty without a run."""
    told: dict[str, int] = field(default_factory=dict)
    """Devices that the runner knows of, and may start workers on."""
    occupied: dict[str, int] = field(default_factory=dict)
    """Devices that the job's processes are on."""
    run: int = 0
    """Number of the present or last run."""
    ending: str = ""
    """Why the run was told to end: PUT_OFF or STOPPED."""
    kill_at_s: float | None = None
    """When a run that was told to end is killed."""
    started_s: float | None = None
    """Start of the first run."""
    ended_s: float | None = None
    exit_code: int | None = None
    why: str = "waits for devices"
    """The last decision in words."""
    step: int | None = None
    losses: int = 0
    """Runs that were lost since the job last did a step."""
    record_from: int = 0
    """Byte of the record at which the facts of the present run begin."""
    throughput: Throughput = field(default_factory=lambda: Throughput(1))
    before: Devices = ()
    """Devices before the job grew to its present ones; empty once it is known which are faster."""
    avoided: dict[Devices, float] = field(default_factory=dict)
    """Devices on which the job was slower, and until when that is believed."""
    tenant: str = ""
    """Who submitted it; empty: the server's owner."""
    leave_by_s: float | None = None
    """When workers are killed that are on devices which the job shall leave and another tenant is owed."""

    def __post_init__(self) -> None:
        self.throughput.replicas = self.demand.replicas

    @property
    def name(self) -> str:
        return self.demand.name

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in (FINISHED, FAILED, STOPPED)

    @property
    def is_active(self) -> bool:
        """Whether the job has a run."""
        return bool(self.asked)

    def used(self, kind: str) -> int:
        """Return the devices that nobody else can have now: those the job may use, and those it has not left yet."""
        if self.ending:
            return self.occupied.get(kind, 0)
        return max(self.asked.get(kind, 0), self.told.get(kind, 0), self.occupied.get(kind, 0))

    @property
    def is_uninformed(self) -> bool:
        """Whether the runner could not be told yet what is asked."""
        return self.told != self.asked

    @property
    def is_leaving(self) -> bool:
        """Whether the job is still on devices that it shall not have."""
        return any(count > self.asked.get(kind, 0) for kind, count in self.occupied.items())

    @property
    def is_measured(self) -> bool:
        """Whether the job's speed on its devices is known; before that, it gets no more."""
        return self.state == RUNNING and self.asked == self.target and self.throughput.steps_per_s is not None

    def for_policy(self, rank: int, kinds: Counts, total: Counts, now_s: float) -> ScheduledJob:
        """Return the job as policies see it; `kinds` and `total` count the devices that are free now, and all there are.

        Policies order jobs by their time of submission only, so `rank` takes its place: priority comes before age.
        """
        demand = self.demand
        mine = [kind for kind in demand.devices or kinds if kind in kinds]
        held = {kind: count for kind, count in self.target.items() if count}
        room = next((kind for kind in mine if kinds[kind] >= max(1, demand.min)), mine[0])
        # A job that may not mix types stays on its own; one that waits takes the best type that has room.
        preferred = mine[0] if demand.mixed else next((kind for kind in mine if kind in held), room)
        most = demand.max if not held or self.is_measured else sum(held.values())
        least = demand.min
        if demand.rigid:
            least = most = self.rigid_size(preferred, total)
        return ScheduledJob(
            name=self.name,
            submitted_s=float(rank),
            number=rank,
            replicas=least if demand.rigid else demand.replicas,
            types=self.throughput.types(mine, demand.speed),
            preferred=preferred,
            mixed=demand.mixed,
            min_devices=least,
            max_devices=most,
            tenant=self.tenant,
            held=held,
            avoided=frozenset(devices for devices, until_s in self.avoided.items() if now_s < until_s),
        )

    def rigid_size(self, kind: str, total: Counts) -> int:
        """Return how many devices of one type a rigid job needs: what it has, or else its maximum."""
        return sum(self.target.values()) or max(1, min(self.demand.max, total.get(kind, 0)))

    def may_use(self, kinds: Counts) -> bool:
        """Return whether the cluster has any of the job's device types."""
        return any(kind in kinds for kind in self.demand.devices or kinds)

    def to_json(self) -> dict[str, Any]:
        """Return what a scheduler that starts again must know; it can see the rest."""
        saved = {name: getattr(self, name) for name in _SAVED}
        avoided = [[list(map(list, devices)), until_s] for devices, until_s in self.avoided.items()]
        said = {"tenant": self.tenant, "leave_by_s": self.leave_by_s}
        return {**saved, "throughput": self.throughput.to_json(), "avoided": avoided, **said}

    @classmethod
    def from_json(cls, demand: Demand, value: Mapping[str, Any]) -> ManagedJob:
        job = cls(
            demand=demand,
            **{name: value[name] for name in _SAVED},
            throughput=Throughput.from_json(demand.replicas, value["throughput"]),
            avoided={device_key(dict(map(tuple, devices))): until_s for devices, until_s in value["avoided"]},
            tenant=value.get("tenant", ""),
            leave_by_s=value.get("leave_by_s"),
        )
        job.throughput.place(job.asked)
        return job


# --- the cluster ---


class SchedulerState:
    """All jobs of a cluster and who has which devices. `now_s` is Unix time, because jobs outlive the scheduler."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        devices: Counts,
        jobs: Iterable[ManagedJob] = (),
        reserved: Counts | None = None,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        self.policy = policy
        self.shares = TenantShares(policy, tenants) if tenants else None
        """What the policy decides within; None if nobody shares the cluster by a file of tenants."""
        self.policy_error = ""
        """Why the policy has not decided when it was last asked; empty if it has."""
        self.devices = dict(devices)
        self.reserved = dict(reserved or {})
        """Devices that were reserved for others than jobs."""
        self.jobs = {job.name: job for job in jobs}
        self.reserve_by_s: float | None = None
        """When jobs that have not left reserved devices are killed; None: no job has to leave."""
        self._next_run = max((job.run for job in self.jobs.values()), default=0) + 1
        self._next_number = max((job.number for job in self.jobs.values()), default=0) + 1
        self._actions: list[Action] = []

    # --- devices ---

    def free(self, kind: str) -> int:
        """Return how many devices a job could be started on now; below 0 where some have still to be left."""
        return self._unused(kind) - self.reserved.get(kind, 0)

    def _unused(self, kind: str) -> int:
        return self.devices.get(kind, 0) - sum(job.used(kind) for job in self.jobs.values())

    def tenant_of(self, job: ManagedJob) -> str:
        """Return the tenant whose share the job is in; empty if there are none."""
        if self.shares is None:
            return ""
        return job.tenant if job.tenant in self.shares.tenants else OTHERS

    def used_by_tenant(self) -> dict[str, Counter[str]]:
        """Return by tenant the devices of each type that nobody but its jobs can have now."""
        used = {name: Counter[str]() for name in (self.shares.tenants if self.shares is not None else ())}
        for job in self.jobs.values() if used else ():
            used[self.tenant_of(job)].update({kind: job.used(kind) for kind in self.devices})
        return used

    @property
    def reserved_is_free(self) -> bool:
        """Whether no process is on reserved devices."""
        return all(self._unused(kind) >= min(count, self.devices.get(kind, 0)) for kind, count in self.reserved.items())

    @property
    def somebody_waits_for_devices(self) -> bool:
        """Whether a reservation, or another tenant, waits until jobs have left devices."""
        return self.reserve_by_s is not None or any(
            job.leave_by_s is not None and self._is_owed(job) for job in self.active
        )

    @property
    def active(self) -> list[ManagedJob]:
        return [job for job in self.jobs.values() if job.is_active]

    # --- requests ---

    def submit(self, demand: Demand, now_s: float, tenant: str = "") -> list[Action]:
        """Add a job, of a tenant or of the server's owner.

        Raises:
            NameTaken: there is, or was, a job of that name.
            ConfigError: the job could never run here.
        """
        if demand.name in self.jobs:
            was = self.jobs[demand.name].state
            raise NameTaken(f"name {demand.name!r} is taken by a job that is {was}: choose another one")
        if wrong := demand.misfits(self.devices):
            raise ConfigError("; ".join(wrong.values()))
        job = ManagedJob(demand=demand, number=self._next_number, submitted_s=now_s, tenant=tenant)
        self._next_number += 1
        self.jobs[demand.name] = job
        self._note(job, "submitted", job.why)
        return self._allocate(now_s)

    def stop(self, name: str, now_s: float, *, kill: bool = False) -> list[Action]:
        """End a job for good; a job that is over stays as it is."""
        job = self.jobs[name]
        if job.is_over:
            return []
        job.target = {}
        if not job.is_active:
            self._close(job, STOPPED, "stopped by its user", now_s)
        else:
            self._end(job, STOPPED, "stopping, as its user wants", now_s + END_GRACE_S, kill=kill)
        return self._allocate(now_s)

    def resume(self, name: str, now_s: float) -> list[Action]:
        """Let a job that is over, but not finished, go on from its checkpoint.

        Raises:
            NameTaken: it is not over.
            ConfigError: it has finished.
        """
        job = self.jobs[name]
        if not job.is_over:
            raise NameTaken(f"{name} is {job.state}: it need not be resumed")
        if job.state == FINISHED:
            raise ConfigError(f"{name} has finished: there is nothing to go on with; submit it again for a new run")
        job.losses, job.ended_s, job.exit_code = 0, None, None
        self._wait_again(job, "resumed by its user: goes on from its checkpoint")
        return self._allocate(now_s)

    def reserve(self, wanted: Counts, now_s: float) -> list[Action]:
        """Reserve these devices, no more and no less, from now on.

        Raises:
            ConfigError, CapacityError: there are none of that type, or not as many.
        """
        for kind, count in wanted.items():
            if kind not in self.devices:
                raise ConfigError(
                    f"reserve {kind}={count}: the cluster has {devices_in_words(self.devices)}; name one of these types"
                )
            if not 0 <= count <= self.devices[kind]:
                raise CapacityError(f"reserve {kind}={count}: use 0 to {self.devices[kind]}, which is all there are")
        self.reserved = {kind: count for kind, count in wanted.items() if count}
        self.reserve_by_s = None if self.reserved_is_free else now_s + RESERVE_GRACE_S
        return self._allocate(now_s, by_s=self.reserve_by_s)

    # --- observations ---

    def set_devices(self, devices: Counts, now_s: float) -> list[Action]:
        """Note that the cluster has these devices now."""
        if dict(devices) == self.devices:
            return []
        self.devices = dict(devices)
        return self._allocate(now_s)

    def set_occupied(self, name: str, devices: Counts) -> None:
        """Note that the job's processes are on these devices."""
        self.jobs[name].occupied = {kind: count for kind, count in devices.items() if count}

    def add_step(self, name: str, step: int, workers: int, step_s: float, now_s: float) -> list[Action]:
        """Note that the job has done a step."""
        job = self.jobs[name]
        job.step, job.losses = step, 0
        job.throughput.add_step(workers, step_s)
        if job.state == STARTING:
            job.state = RUNNING
            self._note(job, "running", f"runs on {devices_in_words(job.asked)}", job.asked)
        if job.before and job.is_measured:
            self._judge_growth(job, now_s)
            self._reconcile(now_s)
        return self._take_actions()

    def end_run(self, name: str, end: RunEnd, now_s: float, *, finished: bool) -> list[Action]:
        """Note that the job's run is over; `finished`: the program has come to its end."""
        job = self.jobs[name]
        was, code = job.ending, end.code
        job.asked, job.told, job.occupied, job.before = {}, {}, {}, ()
        job.ending, job.kill_at_s = "", None
        job.throughput.place({})
        match state_after(code, was, finished=finished):
            case "finished":
                self._close(job, FINISHED, "finished", end.at_s, code)
            case "stopped":
                self._close(job, STOPPED, "stopped by its user", end.at_s, code)
            case "failed":
                self._close(job, FAILED, end.why or f"failed with exit code {code}: see its log", end.at_s, code)
            case _ if was == PUT_OFF:
                self._wait_again(job, "put off: others were given its devices; goes on from its checkpoint")
            case _:
                self._lose(job, code, end.at_s)
        return self._allocate(now_s)

    def fail_start(self, name: str, why: str, now_s: float) -> list[Action]:
        """Note that the job could not be started."""
        job = self.jobs[name]
        job.asked, job.told, job.occupied = {}, {}, {}
        self._close(job, FAILED, f"could not be started: {why}", now_s)
        return self._allocate(now_s)

    def set_told(self, name: str) -> None:
        """Note that the job's runner has been told what is asked of it."""
        self.jobs[name].told = dict(self.jobs[name].asked)

    def check_time(self, now_s: float) -> list[Action]:
        """Do what has become possible since devices were left, and end runs that are late."""
        self._kill_late(now_s)
        self._drop_late(now_s)
        self._reconcile(now_s)
        return self._take_actions()

    def allocate(self, now_s: float) -> list[Action]:
        """Ask the policy again."""
        return self._allocate(now_s)

    # --- decisions ---

    def _allocate(self, now_s: float, by_s: float | None = None) -> list[Action]:
        for name, devices in self._ask_policy(now_s).items():
            self._retarget(self.jobs[name], devices)
        self._reconcile(now_s, by_s)
        return self._take_actions()

    def _ask_policy(self, now_s: float) -> Changes:
        if not any(self.devices.values()):
            return {}
        alive = [job for job in self.jobs.values() if not job.is_over and not job.ending and job.may_use(self.devices)]
        alive.sort(key=lambda job: (-job.demand.priority, job.number))
        room = self._room()
        asked = [job.for_policy(rank, room[self.tenant_of(job)], self.devices, now_s) for rank, job in enumerate(alive)]
        cluster = Cluster(dict(self.devices), reserved=dict(self.reserved))
        policy = self.shares or self.policy
        # Jobs that are ending have been given nothing, and hold what they still have: it is given when it is free.
        changes: Changes = {}
        try:
            changes = decide(policy, policy.jobs(asked), cluster, now_s)
            self.policy_error = ""
        except PolicyFailed as error:  # what was decided before stays
            self.policy_error = str(error)
        stranded: Changes = {job.name: {} for job in self.active if not job.ending and not job.may_use(self.devices)}
        return self._within_bounds(alive, {**stranded, **changes})

    def _room(self) -> dict[str, dict[str, int]]:
        """Return by tenant the devices that are free, or that others must leave because they are in the tenant's quota."""
        free = {kind: self.free(kind) for kind in self.devices}
        if self.shares is None:
            return {"": free}
        used, quotas = self.used_by_tenant(), {name: each.quota for name, each in self.shares.tenants.items()}
        return {
            name: {kind: max(count, quotas[name].get(kind, 0) - used[name][kind]) for kind, count in free.items()}
            for name in used
        }

    def _within_bounds(self, ranked: list[ManagedJob], changes: Changes) -> Changes:
        """Take devices that are reserved or gone from the last jobs: some policies never take anything back."""
        for kind in {*self.devices, *(kind for job in ranked for kind in job.target)}:
            room = self.devices.get(kind, 0) - self.reserved.get(kind, 0)
            excess = sum(changes.get(job.name, job.target).get(kind, 0) for job in ranked) - room
            for job in reversed(ranked):
                devices = changes.get(job.name, job.target)
                if excess <= 0 or not devices.get(kind):
                    continue
                left = devices[kind] - excess if self.policy.elastic and not job.demand.rigid else 0
                excess -= devices[kind] - max(0, left)
                changes[job.name] = {**devices, kind: max(0, left)}
        for job in ranked:
            new = changes.get(job.name, job.target)
            if job.demand.rigid and any(count < job.rigid_size(kind, self.devices) for kind, count in new.items()):
                changes[job.name] = {}
        return changes

    def _retarget(self, job: ManagedJob, devices: Mapping[str, int]) -> None:
        new = {kind: count for kind, count in devices.items() if count}
        old, job.target = job.target, new
        if new == old:
            return
        if not new:
            job.why = "is put off: its devices are needed elsewhere"
        elif not old:
            job.why = f"is given {devices_in_words(new)}"
        else:
            grows = sum(new.values()) > sum(old.values())
            job.before = device_key(old) if grows else ()
            speed = job.throughput.steps_per_s
            measured = f" ({speed:.3g} steps/s so far)" if speed else ""
            job.why = (
                f"{'grows' if grows else 'shrinks'} from {devices_in_words(old)} to {devices_in_words(new)}{measured}"
            )
        self._note(job, "decision", job.why, new)

    def _judge_growth(self, job: ManagedJob, now_s: float) -> None:
        """The job is measured on more devices now: go back if it was faster on fewer."""
        before, job.before = job.before, ()
        old, new = job.throughput.known.get(before), job.throughput.steps_per_s
        if old is None or new is None:
            return
        kept = planner.devices_to_keep(dict(before), old, job.asked, new)
        if device_key(kept) == before:
            job.avoided[device_key(job.asked)] = now_s + AVOID_S
            job.target = dict(before)
            self._note(
                job,
                "fallback",
                f"goes back to {devices_in_words(dict(before))}: {new:.3g} steps/s on {devices_in_words(job.asked)} "
                f"after {old:.3g}",
                job.target,
            )

    # --- from targets to requests ---

    def _reconcile(self, now_s: float, by_s: float | None = None) -> None:
        """Ask for less at once and for more as devices are free; start the jobs for which there is room."""
        ranked = sorted(self.jobs.values(), key=lambda job: (-job.demand.priority, job.number))
        for job in ranked:
            if job.is_active and not job.ending:
                if not job.target:
                    self._end(job, PUT_OFF, "ends after its step, with a checkpoint", by_s or now_s + END_GRACE_S)
                else:
                    kept = {kind: min(count, job.target.get(kind, 0)) for kind, count in job.asked.items()}
                    if kept != job.asked:
                        job.leave_by_s = now_s + GIVE_BACK_GRACE_S
                    self._ask(job, kept)
        for job in ranked:
            lacking = {kind: count - job.asked.get(kind, 0) for kind, count in job.target.items()}
            if job.is_over or job.ending or not any(lacking.values()):
                continue
            # What the job has not left yet under an earlier request is its own again.
            if any(more > self.free(kind) + job.used(kind) - job.asked.get(kind, 0) for kind, more in lacking.items()):
                continue
            if job.is_active:
                self._ask(job, job.target)
            else:
                self._start(job, now_s)

    def _ask(self, job: ManagedJob, devices: Mapping[str, int]) -> None:
        wanted = {kind: count for kind, count in devices.items() if count}
        # A job that shall have other types, and none of its present ones, keeps what it has until those are free.
        if wanted and wanted != job.asked:
            job.asked = wanted
            job.throughput.place(wanted)
            self._actions.append(ResizeRun(job.name, dict(wanted)))

    def _start(self, job: ManagedJob, now_s: float) -> None:
        job.asked, job.run, job.state = dict(job.target), self._next_run, STARTING
        job.told = dict(job.asked)
        self._next_run += 1
        job.started_s = job.started_s or now_s
        job.throughput.place(job.asked)
        self._note(job, "starting", f"starts on {devices_in_words(job.asked)}", job.asked)
        self._actions.append(StartRun(job.name, dict(job.asked)))

    def _end(self, job: ManagedJob, reason: str, words: str, by_s: float, *, kill: bool = False) -> None:
        self._mark_ending(job, reason, by_s)
        self._note(job, "ending", words)
        self._actions.append(EndRun(job.name, kill=kill))

    def _mark_ending(self, job: ManagedJob, reason: str, by_s: float) -> None:
        # Until it is seen otherwise, the job is on every device that it may have started a worker on.
        job.occupied = {kind: job.used(kind) for kind in {*job.asked, *job.told, *job.occupied}}
        job.ending, job.kill_at_s = reason, by_s

    def _kill_late(self, now_s: float) -> None:
        killed = {job.name for job in self.active if job.kill_at_s is not None and now_s >= job.kill_at_s}
        for job in self.active:
            if job.name in killed:
                job.kill_at_s = now_s + END_GRACE_S  # again, should it not die
                self._note(job, "killed", "did not end in time: killed")
                self._actions.append(EndRun(job.name, kill=True))
        if self.reserve_by_s is None:
            return
        if self.reserved_is_free:
            self.reserve_by_s = None
        elif now_s >= self.reserve_by_s:
            self.reserve_by_s = now_s + RESERVE_GRACE_S
            self._clear_reserved(now_s, killed)

    def _drop_late(self, now_s: float) -> None:
        """Kill workers that have not left in time what another tenant is owed and has a job for."""
        for job in self.active:
            if job.leave_by_s is None:
                continue
            if job.ending or not (job.is_leaving or job.is_uninformed):
                job.leave_by_s = None
            elif now_s >= job.leave_by_s and job.is_leaving and not job.is_uninformed and self._is_owed(job):
                job.leave_by_s = now_s + END_GRACE_S  # again, should they not die
                self._note(job, "dropped", "workers on another tenant's devices were killed: their step took too long")
                self._actions.append(DropWorkers(job.name))

    def _is_owed(self, leaving: ManagedJob) -> bool:
        """Return whether another tenant's job is given devices that this one has not left, and the tenant is owed them."""
        owed = self.shares.owed if self.shares is not None else {}
        kinds = [kind for kind in owed if leaving.occupied.get(kind, 0) > leaving.asked.get(kind, 0)]
        used = self.used_by_tenant()
        for job in self.jobs.values():
            tenant = self.tenant_of(job)
            if tenant != self.tenant_of(leaving) and any(
                job.target.get(kind, 0) > job.asked.get(kind, 0) and used[tenant][kind] < owed[kind][tenant]
                for kind in kinds
            ):
                return True
        return False

    def _clear_reserved(self, now_s: float, killed: set[str]) -> None:
        """Kill whatever is still on reserved devices."""
        for job in self.active:
            if job.name in killed or not any(
                self._unused(kind) < count and job.used(kind) for kind, count in self.reserved.items()
            ):
                continue
            if job.ending or job.is_uninformed:
                self._mark_ending(job, job.ending or PUT_OFF, now_s + END_GRACE_S)
                self._note(job, "killed", "did not leave reserved devices in time: killed")
                self._actions.append(EndRun(job.name, kill=True))
            elif job.is_leaving:
                self._note(job, "dropped", "workers did not leave reserved devices in time: killed")
                self._actions.append(DropWorkers(job.name))

    # --- ends ---

    def _lose(self, job: ManagedJob, code: int | None, at_s: float) -> None:
        how = "was lost" if code is None else f"was killed by signal {-code}" if code < 0 else "was terminated"
        job.losses += 1
        if job.losses >= MAX_LOSSES:
            self._close(
                job, FAILED, f"its runner {how}, {job.losses} times without a step between: see its log", at_s, code
            )
        else:
            self._wait_again(job, f"its runner {how}: goes on from its checkpoint")

    def _wait_again(self, job: ManagedJob, why: str) -> None:
        job.state, job.target = PUT_OFF, {}
        self._note(job, PUT_OFF, why)

    def _close(self, job: ManagedJob, state: str, why: str, at_s: float, code: int | None = None) -> None:
        job.state, job.target, job.ended_s, job.exit_code = state, {}, at_s, code
        self._note(job, state, why)

    def _note(self, job: ManagedJob, what: str, why: str, devices: Mapping[str, int] | None = None) -> None:
        job.why = why
        self._actions.append(NoteEvent(job.name, what, why, dict(devices or {})))

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def devices_in_words(devices: Mapping[str, int]) -> str:
    """Return `2 cpu`, `1 t4 and 2 v100`."""
    return " and ".join(f"{count} {kind}" for kind, count in sorted(devices.items()) if count) or "nothing"
