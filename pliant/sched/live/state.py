"""The rules of the live scheduler: what has happened goes in, what is to be done comes out. Pure: no clock, no process.

A policy, one of those that the simulator asks, says what each job is to have (`target`). What its runner is told
(`asked`) follows: less at once, more only when the devices are really free, which is when no process is on them.
So two jobs never share a device, however long one takes to leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pliant.errors import CapacityError, ConfigError, NameTaken
from pliant.sched import planner
from pliant.sched.cluster import Changes, Cluster, SchedulingPolicy
from pliant.sched.live.actions import Action, Drop, End, Note, Resize, Start
from pliant.sched.live.ground import Counts, Ended
from pliant.sched.live.job import FAILED, FINISHED, PUT_OFF, RUNNING, STARTING, STOPPED, LiveJob
from pliant.sched.live.jobfile import JobSpec
from pliant.sched.live.throughput import key

RESERVE_GRACE_S = 0.4
"""After a reservation, jobs may take this long to leave in good order; who has not is killed, and loses no more than a step
that is done again, or what has come since the last checkpoint."""
END_GRACE_S = 60.0
"""The same for a job that is put off for another, or stopped."""
MAX_LOSSES = 3
"""Runs lost in a row, without a step between, before the job counts as failed."""
AVOID_S = 600.0
"""How long devices that made a job slower are not tried again: the neighbours may have changed by then."""
TERMINATED = 143
"""The exit code of a runner that was sent SIGTERM, as when its machine is shut down."""


class LiveState:
    """All jobs of a cluster. `now_s` is Unix time, since it outlives the scheduler."""

    def __init__(self, policy: SchedulingPolicy, devices: Counts, jobs: Iterable[LiveJob] = (), reserved: Counts | None = None):
        self.policy = policy
        self.devices = dict(devices)
        self.reserved = dict(reserved or {})
        """What the serving tenant has asked for."""
        self.jobs = {job.name: job for job in jobs}
        self.reserve_by_s: float | None = None
        """When those who have not left reserved devices are killed; None: nobody has to leave."""
        self._next_run = max((job.run for job in self.jobs.values()), default=0) + 1
        self._next_number = max((job.number for job in self.jobs.values()), default=0) + 1
        self._actions: list[Action] = []

    # --- what there is ---

    def free(self, kind: str) -> int:
        """Devices that somebody could be started on now; below 0 where some have still to be left."""
        return self._unused(kind) - self.reserved.get(kind, 0)

    def _unused(self, kind: str) -> int:
        return self.devices.get(kind, 0) - sum(job.used(kind) for job in self.jobs.values())

    @property
    def reserved_is_free(self) -> bool:
        """Whether no process is on what is reserved."""
        return all(self._unused(kind) >= min(count, self.devices.get(kind, 0)) for kind, count in self.reserved.items())

    @property
    def active(self) -> list[LiveJob]:
        return [job for job in self.jobs.values() if job.is_active]

    def next_deadline_s(self) -> float | None:
        """When `look` is due, though nothing has been seen."""
        waits = [job.kill_at_s for job in self.active if job.kill_at_s is not None]
        return min([*waits, *([self.reserve_by_s] if self.reserve_by_s is not None else [])], default=None)

    # --- what is asked ---

    def submit(self, spec: JobSpec, now_s: float) -> list[Action]:
        """Take a job.

        Raises:
            NameTaken: choose another.
            ConfigError: it could never run here.
        """
        if spec.name in self.jobs:
            was = self.jobs[spec.name].state
            raise NameTaken(f"name {spec.name!r} is taken by a job that is {was}: choose another one")
        job = LiveJob(spec=spec, number=self._next_number, submitted_s=now_s)
        if not job.may_use(self.devices):
            raise ConfigError(
                f"devices {', '.join(spec.devices)}: the cluster has {_told(self.devices)}; name one of these types"
            )
        self._next_number += 1
        self.jobs[spec.name] = job
        self._note(job, "submitted", job.why)
        return self._decided(now_s)

    def stop(self, name: str, now_s: float, *, kill: bool = False) -> list[Action]:
        """End a job for good; one that is over stays as it is."""
        job = self.jobs[name]
        if job.is_over:
            return []
        job.target = {}
        if not job.is_active:
            self._close(job, STOPPED, "stopped by its user", now_s)
        else:
            self._end(job, STOPPED, "stopping, as its user wants", now_s + END_GRACE_S, kill=kill)
        return self._decided(now_s)

    def reserve(self, wanted: Counts, now_s: float) -> list[Action]:
        """These devices, no more and no less, are the tenant's from now on.

        Raises:
            ConfigError, CapacityError: there are none of that type, or not as many.
        """
        for kind, count in wanted.items():
            if kind not in self.devices:
                raise ConfigError(f"reserve {kind}={count}: the cluster has {_told(self.devices)}")
            if not 0 <= count <= self.devices[kind]:
                raise CapacityError(f"reserve {kind}={count}: use 0 to {self.devices[kind]}, which is all there are")
        self.reserved = {kind: count for kind, count in wanted.items() if count}
        self.reserve_by_s = None if self.reserved_is_free else now_s + RESERVE_GRACE_S
        return self._decided(now_s, by_s=self.reserve_by_s)

    # --- what is seen ---

    def equip(self, devices: Counts, now_s: float) -> list[Action]:
        """The ground has these devices now."""
        if dict(devices) == self.devices:
            return []
        self.devices = dict(devices)
        return self._decided(now_s)

    def occupy(self, name: str, devices: Counts) -> None:
        """The job's processes are on these devices."""
        self.jobs[name].occupied = {kind: count for kind, count in devices.items() if count}

    def step(self, name: str, step: int, workers: int, step_s: float, now_s: float) -> list[Action]:
        """The job has done a step."""
        job = self.jobs[name]
        job.step, job.losses = step, 0
        job.throughput.step(workers, step_s)
        if job.state == STARTING:
            job.state = RUNNING
            self._note(job, "running", f"runs on {_told(job.asked)}", job.asked)
        if job.before and job.is_measured:
            self._judge_growth(job, now_s)
            self._reconcile(now_s)
        return self._taken()

    def end(self, name: str, ended: Ended, now_s: float, *, finished: bool) -> list[Action]:
        """The job's run is over; `finished`: its program had come to its end."""
        job = self.jobs[name]
        was, code = job.ending, ended.code
        job.asked, job.told, job.occupied, job.before = {}, {}, {}, ()
        job.ending, job.kill_at_s = "", None
        job.throughput.place({})
        is_lost = code is None or code < 0 or code == TERMINATED
        if finished or (code == 0 and not was):
            self._close(job, FINISHED, "finished", ended.at_s, code)
        elif was == STOPPED:
            self._close(job, STOPPED, "stopped by its user", ended.at_s, code)
        elif was == PUT_OFF and (code == 0 or is_lost):
            self._wait_again(job, "put off: others were given its devices; goes on from its checkpoint")
        elif is_lost:
            self._lose(job, code, ended.at_s)
        else:
            self._close(job, FAILED, f"failed with exit code {code}: see its log", ended.at_s, code)
        return self._decided(now_s)

    def refuse(self, name: str, why: str, now_s: float) -> list[Action]:
        """The job could not be started."""
        job = self.jobs[name]
        job.asked, job.told, job.occupied = {}, {}, {}
        self._close(job, FAILED, f"could not be started: {why}", now_s)
        return self._decided(now_s)

    def hear(self, name: str) -> None:
        """The job's runner has been told what is asked of it."""
        self.jobs[name].told = dict(self.jobs[name].asked)

    def look(self, now_s: float) -> list[Action]:
        """Time has passed, or devices were left: do what has become possible, and end who is late."""
        self._end_the_late(now_s)
        self._reconcile(now_s)
        return self._taken()

    def allocate(self, now_s: float) -> list[Action]:
        """Ask the policy again."""
        return self._decided(now_s)

    # --- deciding ---

    def _decided(self, now_s: float, by_s: float | None = None) -> list[Action]:
        for name, devices in self._changes(now_s).items():
            self._retarget(self.jobs[name], devices)
        self._reconcile(now_s, by_s)
        return self._taken()

    def _changes(self, now_s: float) -> Changes:
        if not any(self.devices.values()):
            return {}
        alive = [job for job in self.jobs.values() if not job.is_over and not job.ending and job.may_use(self.devices)]
        alive.sort(key=lambda job: (-job.spec.priority, job.number))
        room = {kind: self.free(kind) for kind in self.devices}
        asked = [job.for_policy(rank, room, now_s) for rank, job in enumerate(alive)]
        cluster = Cluster(dict(self.devices), reserved=dict(self.reserved))
        # Those that are ending have been given nothing, and hold what they still have: it is given when it is free.
        changes = self.policy.allocate(self.policy.jobs(asked), cluster, now_s)
        stranded: Changes = {job.name: {} for job in self.active if not job.ending and not job.may_use(self.devices)}
        return self._within_bounds(alive, {**stranded, **changes})

    def _within_bounds(self, ranked: list[LiveJob], changes: Changes) -> Changes:
        """A policy that never takes anything back would leave jobs on reserved or vanished devices: the last ones go."""
        for kind in {*self.devices, *(kind for job in ranked for kind in job.target)}:
            room = self.devices.get(kind, 0) - self.reserved.get(kind, 0)
            excess = sum(changes.get(job.name, job.target).get(kind, 0) for job in ranked) - room
            for job in reversed(ranked):
                devices = changes.get(job.name, job.target)
                if excess <= 0 or not devices.get(kind):
                    continue
                left = devices[kind] - excess if self.policy.elastic else 0
                excess -= devices[kind] - max(0, left)
                changes[job.name] = {**devices, kind: max(0, left)}
        return changes

    def _retarget(self, job: LiveJob, devices: Mapping[str, int]) -> None:
        new = {kind: count for kind, count in devices.items() if count}
        old, job.target = job.target, new
        if new == old:
            return
        if not new:
            job.why = "is put off: its devices are needed elsewhere"
        elif not old:
            job.why = f"is given {_told(new)}"
        else:
            grows = sum(new.values()) > sum(old.values())
            job.before = key(old) if grows else ()
            speed = job.throughput.steps_per_s
            measured = f" ({speed:.3g} steps/s so far)" if speed else ""
            job.why = f"{'grows' if grows else 'shrinks'} from {_told(old)} to {_told(new)}{measured}"
        self._note(job, "decision", job.why, new)

    def _judge_growth(self, job: LiveJob, now_s: float) -> None:
        """It is measured on more devices now: if it was faster on fewer, back to them."""
        before, job.before = job.before, ()
        old, new = job.throughput.known.get(before), job.throughput.steps_per_s
        if old is None or new is None:
            return
        kept = planner.devices_to_keep(dict(before), old, job.asked, new)
        if key(kept) == before:
            job.avoided[key(job.asked)] = now_s + AVOID_S
            job.target = dict(before)
            self._note(
                job,
                "fallback",
                f"goes back to {_told(before)}: {new:.3g} steps/s on {_told(job.asked)} after {old:.3g}",
                job.target,
            )

    # --- from what is wanted to what is asked ---

    def _reconcile(self, now_s: float, by_s: float | None = None) -> None:
        """Ask for less at once, for more as devices are free; start those for whom there is room."""
        ranked = sorted(self.jobs.values(), key=lambda job: (-job.spec.priority, job.number))
        for job in ranked:
            if job.is_active and not job.ending:
                if not job.target:
                    self._end(job, PUT_OFF, "ends after its step, with a checkpoint", by_s or now_s + END_GRACE_S)
                else:
                    self._ask(job, {kind: min(count, job.target.get(kind, 0)) for kind, count in job.asked.items()})
        for job in ranked:
            lacking = {kind: count - job.asked.get(kind, 0) for kind, count in job.target.items()}
            if job.is_over or job.ending or not any(lacking.values()):
                continue
            # What it has not left yet under an earlier wish is its own again.
            if any(more > self.free(kind) + job.used(kind) - job.asked.get(kind, 0) for kind, more in lacking.items()):
                continue
            if job.is_active:
                self._ask(job, job.target)
            else:
                self._start(job, now_s)

    def _ask(self, job: LiveJob, devices: Mapping[str, int]) -> None:
        wanted = {kind: count for kind, count in devices.items() if count}
        # A job that shall have other types, and none of its present ones, keeps what it has until those are free.
        if wanted and wanted != job.asked:
            job.asked = wanted
            job.throughput.place(wanted)
            self._actions.append(Resize(job.name, dict(wanted)))

    def _start(self, job: LiveJob, now_s: float) -> None:
        job.asked, job.run, job.state = dict(job.target), self._next_run, STARTING
        job.told = dict(job.asked)
        self._next_run += 1
        job.started_s = job.started_s or now_s
        job.throughput.place(job.asked)
        self._note(job, "starting", f"starts on {_told(job.asked)}", job.asked)
        self._actions.append(Start(job.name, dict(job.asked)))

    def _end(self, job: LiveJob, why: str, told: str, by_s: float, *, kill: bool = False) -> None:
        self._leave(job, why, by_s)
        self._note(job, "ending", told)
        self._actions.append(End(job.name, kill=kill))

    def _leave(self, job: LiveJob, why: str, by_s: float) -> None:
        # Until it is seen otherwise, it is on whatever it may have started a worker on.
        job.occupied = {kind: job.used(kind) for kind in {*job.asked, *job.told, *job.occupied}}
        job.ending, job.kill_at_s = why, by_s

    def _end_the_late(self, now_s: float) -> None:
        killed = {job.name for job in self.active if job.kill_at_s is not None and now_s >= job.kill_at_s}
        for job in self.active:
            if job.name in killed:
                job.kill_at_s = now_s + END_GRACE_S  # again, should it not die
                self._note(job, "killed", "did not end in time: killed")
                self._actions.append(End(job.name, kill=True))
        if self.reserve_by_s is None:
            return
        if self.reserved_is_free:
            self.reserve_by_s = None
        elif now_s >= self.reserve_by_s:
            self.reserve_by_s = now_s + RESERVE_GRACE_S
            self._clear_reserved(now_s, killed)

    def _clear_reserved(self, now_s: float, killed: set[str]) -> None:
        """Nobody is asked any more."""
        for job in self.active:
            if job.name in killed or not any(
                self._unused(kind) < count and job.used(kind) for kind, count in self.reserved.items()
            ):
                continue
            if job.ending or job.is_unheard:
                self._leave(job, job.ending or PUT_OFF, now_s + END_GRACE_S)
                self._note(job, "killed", "did not leave reserved devices in time: killed")
                self._actions.append(End(job.name, kill=True))
            elif job.is_leaving:
                self._note(job, "dropped", "workers did not leave reserved devices in time: killed")
                self._actions.append(Drop(job.name))

    # --- ends ---

    def _lose(self, job: LiveJob, code: int | None, at_s: float) -> None:
        how = "was lost" if code is None else f"was killed by signal {-code}" if code < 0 else "was terminated"
        job.losses += 1
        if job.losses >= MAX_LOSSES:
            self._close(
                job, FAILED, f"its runner {how}, {job.losses} times without a step between: see its log", at_s, code
            )
        else:
            self._wait_again(job, f"its runner {how}: goes on from its checkpoint")

    def _wait_again(self, job: LiveJob, why: str) -> None:
        job.state, job.target = PUT_OFF, {}
        self._note(job, PUT_OFF, why)

    def _close(self, job: LiveJob, state: str, why: str, at_s: float, code: int | None = None) -> None:
        job.state, job.target, job.ended_s, job.exit_code = state, {}, at_s, code
        self._note(job, state, why)

    def _note(self, job: LiveJob, what: str, why: str, devices: Mapping[str, int] | None = None) -> None:
        job.why = why
        self._actions.append(Note(job.name, what, why, dict(devices or {})))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _told(devices: Mapping[str, int] | Iterable[tuple[str, int]]) -> str:
    """`2 cpu`, `1 t4 and 2 v100`."""
    return " and ".join(f"{count} {kind}" for kind, count in sorted(dict(devices).items()) if count) or "nothing"
