"""The scheduler: watches the runs of jobs, asks the rules what to do, saves their decisions, and carries them out.

One thread watches and acts; requests come from other threads, and one lock keeps them apart. Decisions are saved in the store
before they are carried out, so a scheduler that is started again after a kill finds every run that may have been started.
How runs are started is up to a `Backend` (`jobs.backends`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pliant.errors import ConfigError, NameTaken, NotAllowed, PliantError, ServerUnavailable, StaleView, UnknownJob
from pliant.fed.jobfile import FederatedJob, make_job_folder
from pliant.jobs.rules import (
    END_GRACE_S,
    RUNNING,
    Action,
    Demand,
    DropWorkers,
    EndRun,
    ManagedJob,
    NoteEvent,
    ResizeRun,
    RunEnd,
    SchedulerState,
    StartRun,
)
from pliant.jobs.schema import JobSpec, TrainJob, stored_job
from pliant.jobs.shares import tenant_statuses, why_waits
from pliant.jobs.status import (
    JobDetail,
    JobStatus,
    TenantStatus,
    check_forgettable,
    record_path,
    stored_detail,
    stored_status,
    stored_statuses,
)
from pliant.jobs.store import JobStore, StoredJob, check_not_running
from pliant.json_text import parse_json
from pliant.record import MAX_LINE_BYTES
from pliant.sched.cluster import SchedulingPolicy
from pliant.sched.planner import Counts
from pliant.sched.tenants import OTHERS, Tenant

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Time between looks at the runs; the end of a run is an event, and is seen at once."""
URGENT_S = 0.01
"""The same while a reservation or another tenant waits for devices."""
POLICY_FAILED = "the policy could not decide: the server's owner sees why"
"""What tenants are told of it: the reason may name jobs of others."""
RESERVE_S = 20.0
"""How long a request for a reservation waits until the devices are free; the reservation stands afterwards, too."""
TAIL_BYTES = MAX_LINE_BYTES
"""How much of a record is read at one look, and how far back a scheduler that starts again looks."""
TURN_PERIOD_S = 1.0
"""Time between decisions while a device is due to go to another tenant."""


# --- the seam to what starts processes ---


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """One run of a job, from the start of its processes to their end. A job that was put off has several."""

    spec: JobSpec
    number: int
    """Unique in the cluster."""
    directory: Path
    """The job's private directory, absolute."""
    folder: Path
    """The folder with record, log and checkpoints, which all runs of the job share."""

    @property
    def place(self) -> Path:
        """Directory of this run alone; the backend makes it."""
        return self.directory / f"run-{self.number}"

    @property
    def record(self) -> Path:
        return Path(record_path(self.spec.model_dump(mode="json"), str(self.folder)))

    @property
    def checkpoints(self) -> Path:
        """Directory of a train job's checkpoints."""
        given = self.spec.checkpoint_dir if isinstance(self.spec, TrainJob) else ""
        return Path(given) if given else self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        return self.folder / ("aggregator/log" if isinstance(self.spec, FederatedJob) else "log")


class RunHandle(Protocol):
    """A run that was started. Used by one thread; no call may take longer than a request to a neighbour (0.1 s).

    Raises (from `resize` and `end`):
        ServerUnavailable: the runner cannot be told yet, or is gone; the scheduler tries again.
        PliantError: the runner refuses, with the reason.
    """

    def resize(self, devices: Counts) -> None:
        """Ask for these devices, at least one; returns at once, `occupied` tells when the run has them."""

    def occupied(self) -> dict[str, int]:
        """Return the devices that the run's processes are on.

        A process that is dying still counts, and so does one that the runner may be about to start because it does not know
        yet that it shall not.
        """

    def drop(self) -> None:
        """Kill the workers on devices that the run shall not have any more; the others will recover."""

    def end(self, *, kill: bool = False) -> None:
        """End the run after its step with a checkpoint, or at once."""

    def ended(self) -> RunEnd | None:
        """Return how the run ended; None as long as any of its processes lives."""

    def end_signal(self) -> int | None:
        """Return a descriptor that can be read once the run is about to have ended; None where only `ended` tells."""


class Backend(Protocol):
    """Devices, and what starts runs on them."""

    def devices(self) -> dict[str, int]:
        """Return the devices that there are now; they may change."""

    def start(self, run: JobRun, devices: Counts) -> RunHandle:
        """Start a run on these devices, from the job's newest checkpoint if it has one.

        Raises:
            PliantError: it cannot be started, with the reason; the job has then failed.
        """

    def adopt(self, run: JobRun) -> RunHandle | None:
        """Return a run that an earlier scheduler has started, whether it still lives or has ended.

        None if nothing was started, or nothing is left of it.
        """

    def close(self) -> None:
        """Release what the backend and its handles hold; runs go on."""


class RecordTail:
    """Reads the facts that a run adds to its record; incomplete lines are left for later."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        size = self._size()
        self._at = begin
        self._skips_line = size - begin > TAIL_BYTES
        """Whether the next line has lost its beginning."""
        if self._skips_line:
            self._at = size - TAIL_BYTES

    def read(self) -> list[Mapping[str, Any]]:
        """Return the facts that have come since the last call."""
        size = self._size()
        if size <= self._at:
            self._at = size  # a federated job that goes on from its checkpoint cuts its record
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read(TAIL_BYTES)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == TAIL_BYTES:  # a line that is longer than all that is read at once says nothing
            self._at += TAIL_BYTES
            self._skips_line = True
            return []
        self._at += whole
        lines = data[:whole].splitlines()
        if self._skips_line and lines:
            lines, self._skips_line = lines[1:], False
        found: list[Mapping[str, Any]] = []
        for line in lines:
            try:
                fact = parse_json(line)
            except ValueError:
                continue  # cut short by a crash
            if isinstance(fact, dict) and isinstance(fact.get("step"), int):
                found.append(fact)
        return found

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def demand_of(job: JobSpec) -> Demand:
    """Return what a job asks of the rules. A federated job asks for one device for each worker on this machine."""
    if isinstance(job, FederatedJob):
        workers = max(1, job.placement.num_local_workers)
        return Demand(name=job.name, replicas=workers, min=workers, max=workers, priority=job.priority, rigid=True)
    return Demand(
        name=job.name, replicas=job.replicas, min=job.min, max=job.max, devices=job.devices, speed=job.speed,
        mixed=job.mixed, priority=job.priority,
    )  # fmt: skip


# --- the scheduler ---


class Scheduler:
    """Gives the devices of a backend to jobs. Works within `with scheduler.running():`.

    In requests, `by` is the tenant who asks, who sees and changes its own jobs only; empty for the server's owner, who may
    do all.
    """

    def __init__(
        self,
        backend: Backend,
        policy: SchedulingPolicy,
        store: JobStore,
        *,
        interval_s: float = 5.0,
        tenants: Sequence[Tenant] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend, self._store = backend, store
        self._interval_s, self._clock = interval_s, clock
        self._specs: dict[str, JobSpec] = {}
        self._folders: dict[str, str] = {}
        jobs = [job for row in store.jobs(scheduled=True) if (job := self._load(row)) is not None]
        self._state = SchedulerState(policy, backend.devices(), jobs, store.setting("reserved"), tenants)
        self._runs: dict[str, RunHandle] = {}
        self._tails: dict[str, RecordTail] = {}
        self._finished: set[str] = set()
        """Jobs whose program has recorded its end."""
        self._untold: dict[str, bool] = {}
        """Jobs whose runners have still to be told what was asked, and whether they are to be killed."""
        self._unsaved: list[Action] = []
        """Actions that were decided, and could not be saved yet."""
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._wake: int | None = None
        """An eventfd that ends the thread's wait; open while it runs."""
        self._allocate_at_s = 0.0
        self._told_error = ""
        """The last error of the policy that was logged."""
        self._busy_at_s = clock()
        """When a job was last waiting or running."""
        self._idle: tuple[float, Callable[[], object]] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Scheduler]:
        """Schedule until the block ends; jobs run on afterwards."""
        with self._changed:
            self._adopt()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        thread = threading.Thread(target=self._work, name="pliant-scheduler", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
                self._wake_thread()
            thread.join()
            os.close(self._wake)
            self._wake = None
            self._backend.close()

    def when_idle(self, after_s: float, act: Callable[[], object]) -> None:
        """Call `act` once no job has been waiting or running for `after_s`."""
        with self._changed:
            self._idle = after_s, act

    # --- requests, from any thread ---

    def submit(self, spec: JobSpec, by: str = "") -> JobStatus:
        """Add a job and return its status."""
        with self._changed:
            self._check_name(spec, by)
            if isinstance(spec, TrainJob) and spec.hosts:
                raise ConfigError(
                    f"hosts {spec.hosts}: the scheduler places jobs by itself; use `pliant run -f` instead"
                )
            folder = make_job_folder(spec) if isinstance(spec, FederatedJob) else self._directory(spec.name)
            self._specs[spec.name], self._folders[spec.name] = spec, str(folder)
            self._do(self._state.submit(demand_of(spec), self._clock(), by or self._owner))
            return self._status(self._state.jobs[spec.name])

    def statuses(self, by: str = "") -> list[JobStatus]:
        """Return the status of all jobs, also of those in the foreground."""
        with self._changed:
            others, tenants = self._unscheduled(), tenant_statuses(self._state)
            ranked = sorted(self._state.jobs.values(), key=lambda job: job.number)
            mine = [self._status(job, tenants) for job in ranked if by in ("", job.tenant)]
            return mine + [job for job in others if by in ("", job.tenant)]

    def status(self, name: str, by: str = "") -> JobStatus:
        with self._changed:
            return self._find(name, by)

    def detail(self, name: str, by: str = "") -> JobDetail:
        """Return the status, the history and the specification of a job."""
        with self._changed:
            return stored_detail(self._find(name, by), self._store)

    def stop(self, name: str, by: str = "", *, kill: bool = False) -> JobStatus:
        """Tell a job to end for good."""
        with self._changed:
            self._find(name, by)
            if name not in self._state.jobs:
                raise ConfigError(f"{name} runs in the foreground: end it there, or with `pliant stop` on its machine")
            self._do(self._state.stop(name, self._clock(), kill=kill))
            return self._status(self._state.jobs[name])

    def resume(self, name: str, by: str = "") -> JobStatus:
        """Let a job that is over, but not finished, go on from its checkpoint."""
        with self._changed:
            self._find(name, by)
            if name not in self._state.jobs:
                self._take_over(name)
            self._do(self._state.resume(name, self._clock()))
            return self._status(self._state.jobs[name])

    def forget(self, name: str, by: str = "") -> JobStatus:
        """Delete a job that is over from the store; its files stay."""
        with self._changed:
            status = self._find(name, by)
            check_forgettable(status)
            self._forget(name)
            return status

    def reserve(self, devices: Counts, by: str = "") -> dict[str, Any]:
        """Reserve devices; returns when no process of a job is on them.

        Raises:
            NotAllowed: a tenant asks.
            ServerUnavailable: that has not happened in time.
        """
        if by:
            raise NotAllowed(f"tenant {by} may not reserve devices: ask the server's owner")
        begun_s = time.monotonic()
        with self._changed:
            for name in list(self._runs):
                self._look_at(name)  # devices that are not known to be in use would count as free
            self._do(self._state.reserve(devices, self._clock()), reserved=True)
            self._wake_thread()  # it shall look more often now
            if not self._changed.wait_for(lambda: self._state.reserved_is_free or self._stopping, RESERVE_S):
                raise ServerUnavailable(
                    f"jobs are still on the reserved devices after {RESERVE_S:g} s; the reservation stands"
                )
            return {"reserved": dict(self._state.reserved), "took_s": round(time.monotonic() - begun_s, 4)}

    def cluster(self, by: str = "") -> dict[str, Any]:
        """Return the devices and who has them, as `ClusterStatus` has it."""
        with self._changed:
            state = self._state
            return {
                "devices": dict(state.devices),
                "reserved": dict(state.reserved),
                "free": {kind: max(0, state.free(kind)) for kind in state.devices},
                "jobs": {job.name: dict(job.asked) for job in state.active if by in ("", job.tenant)},
                "policy": state.policy.name,
                "policy_error": state.policy_error if not (by and state.policy_error) else POLICY_FAILED,
                "tenants": [each.model_dump(mode="json") for each in tenant_statuses(state).values()],
            }

    # --- jobs ---

    @property
    def _owner(self) -> str:
        """The tenant of jobs that the server's owner submits."""
        return "" if self._state.shares is None else OTHERS

    def _find(self, name: str, by: str) -> JobStatus:
        others = self._unscheduled()
        job = self._state.jobs.get(name)
        found = next((status for status in others if status.name == name), None) if job is None else self._status(job)
        if found is None:
            raise UnknownJob(f"no job {name!r}")
        if by not in ("", found.tenant):
            raise NotAllowed(f"job {name!r} is not of tenant {by}: only its own tenant and the server's owner may ask")
        return found

    def _unscheduled(self) -> list[JobStatus]:
        """Return jobs in the foreground; what `pliant fed run --resume` has taken over is no longer ours."""
        rows = self._store.jobs(scheduled=False)
        for row in rows:
            if (job := self._state.jobs.get(row["name"])) is not None and job.is_over:
                del self._state.jobs[row["name"]]
        found = stored_statuses(rows, self._store.runs(), self._store.directory)
        return [job for job in found if job.name not in self._state.jobs]

    def _status(self, job: ManagedJob, tenants: Mapping[str, TenantStatus] | None = None) -> JobStatus:
        row = {**self._row(job), "name": job.name, "scheduled": True}
        status = stored_status(row)
        if why := why_waits(self._state, job, tenant_statuses(self._state) if tenants is None else tenants):
            status = status.model_copy(update={"why": why})
        if job.state != RUNNING:
            return status
        workers, speed = sum(job.occupied.values()), job.throughput.steps_per_s
        return status.model_copy(update={"workers": workers, "steps_per_s": speed})

    def _check_name(self, spec: JobSpec, by: str) -> None:
        """Raise NameTaken if the name cannot be used; an ended federated job of the same name is forgotten."""
        name = spec.name
        directory = self._directory(name)
        status = next((status for status in self.statuses() if status.name == name), None)
        if status is None:
            if isinstance(spec, TrainJob) and directory.exists():
                # Left by a store that is gone: its checkpoints would be taken for the new job's.
                raise NameTaken(f"name {name!r}: {directory} is of an earlier job; remove it, or choose another name")
            return
        is_mine = by in ("", status.tenant)
        if isinstance(spec, FederatedJob) and is_mine and (status.is_over or status.state == "interrupted"):
            self._forget(name)
            return
        raise NameTaken(f"the name {name} is taken by a job that is {status.state}: choose another with --name")

    def _forget(self, name: str) -> None:
        self._state.jobs.pop(name, None)
        self._finished.discard(name)
        self._store.forget(name)

    def _load(self, row: StoredJob) -> ManagedJob | None:
        """Return a job from the store; None if it is damaged or of another version, which must not hide the others."""
        try:
            spec = stored_job(row["spec"])
            job = ManagedJob.from_json(demand_of(spec), row)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("job %s cannot be read from the store: %s; `pliant forget` removes it", row["name"], error)
            return None
        self._specs[spec.name], self._folders[spec.name] = spec, row["folder"]
        return job

    def _take_over(self, name: str) -> None:
        """Make a federated job that ran in the foreground a scheduled one."""
        check_not_running(self._store, name)
        row = self._store.job(name)
        if row is None:
            raise UnknownJob(f"no job {name!r}")
        spec = stored_job(row["spec"])
        self._specs[name], self._folders[name] = spec, row["folder"]
        state = "stopped" if row["state"] == "running" else row["state"]
        self._state.jobs[name] = ManagedJob(
            demand=demand_of(spec), number=row["number"], submitted_s=row["submitted_s"], state=state,
            tenant=row.get("tenant", ""),
        )  # fmt: skip

    def _directory(self, name: str) -> Path:
        return self._store.directory / "jobs" / name

    def _run(self, job: ManagedJob) -> JobRun:
        return JobRun(
            spec=self._specs[job.name],
            number=job.run,
            directory=self._directory(job.name),
            folder=Path(self._folders[job.name]),
        )

    # --- starting again ---

    def _adopt(self) -> None:
        """Find the runs that an earlier scheduler has started."""
        for job in self._state.active:
            run = self._run(job)
            handle = self._backend.adopt(run)
            self._tails[job.name] = RecordTail(run.record, job.record_from)
            if handle is None:
                self._end_run(job.name, RunEnd(None, self._clock()))
                continue
            log.info("job %s: adopted, run %d", job.name, job.run)
            self._runs[job.name] = handle
            # The earlier scheduler may have been killed between saving this and doing it.
            self._untold[job.name] = False
            if job.ending:
                job.kill_at_s = self._clock() + END_GRACE_S

    # --- the thread ---

    def _work(self) -> None:
        trouble = ""
        while True:
            with self._changed:
                if self._stopping:
                    return
                before, trouble = trouble, ""
                try:
                    self._look()
                except (
                    Exception
                ) as error:  # trouble with one job, or a full disk, must not leave the others without a scheduler
                    trouble = f"{type(error).__name__}: {error}"
                    if trouble != before:  # ten times a second it would fill another disk
                        is_disk = isinstance(error, sqlite3.Error)
                        log.error("the scheduler's turn failed: %s; trying again", error, exc_info=not is_disk)
                if before and not trouble:
                    log.warning("the scheduler works again")
                self._changed.notify_all()
                signals = [handle.end_signal() for handle in self._runs.values()]
                wait_s = URGENT_S if self._state.somebody_waits_for_devices else LOOK_S
            self._wait(signals, wait_s)

    def _wait(self, signals: Sequence[int | None], wait_s: float) -> None:
        """Wait until a run ends, somebody wakes the thread, or `wait_s` is over."""
        assert self._wake is not None, "open while the thread runs"
        ready = select.poll()
        for descriptor in (self._wake, *signals):
            if descriptor is not None:
                ready.register(descriptor, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in ready.poll(1000 * wait_s)):
            os.eventfd_read(self._wake)

    def _wake_thread(self) -> None:
        """Let the thread look at the runs now."""
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def _look(self) -> None:
        self._do([])
        for name in list(self._runs):
            self._look_at(name)
        now_s = self._clock()
        if now_s >= self._allocate_at_s:
            self._allocate_at_s = now_s + self._interval_s
            self._do(self._state.set_devices(self._backend.devices(), now_s))
            self._do(self._state.allocate(now_s))
            if self._state.shares is not None:
                turn_s = max(TURN_PERIOD_S, self._state.shares.turn_ends_s())
                self._allocate_at_s = now_s + min(self._interval_s, turn_s)
        self._do(self._state.check_time(now_s))
        if (failed := self._state.policy_error) != self._told_error:
            self._told_error = failed
            log.log(logging.ERROR if failed else logging.INFO, "%s", failed or "the policy decides again")
        for name, kill in list(self._untold.items()):
            self._tell(name, kill=kill)
        if any(not job.is_over for job in self._state.jobs.values()):
            self._busy_at_s = now_s
        elif self._idle is not None and now_s - self._busy_at_s > self._idle[0]:
            self._idle[1]()

    def _look_at(self, name: str) -> None:
        handle = self._runs[name]
        end = handle.ended()
        self._read_record(name)
        if end is not None:
            self._end_run(name, end)
        else:
            self._state.set_occupied(name, handle.occupied())

    def _read_record(self, name: str) -> None:
        is_federated = isinstance(self._specs[name], FederatedJob)
        for fact in self._tails[name].read():
            match fact.get("kind"):
                case "step":
                    step, workers, step_s = fact["step"], int(fact.get("workers", 0)), float(fact.get("step_s", 0))
                    job, was_measured = self._state.jobs[name], self._state.jobs[name].is_measured
                    self._do(self._state.add_step(name, step, workers, step_s, self._clock()))
                    if job.is_measured and not was_measured:
                        self._allocate_at_s = 0.0  # it may grow now: idle devices need not wait for the regular decision
                case "round":
                    self._do(self._state.add_step(name, fact["step"], 0, 0.0, self._clock()))
                case "end" if not is_federated:  # a federated job records its end also when it is put off
                    self._finished.add(name)

    def _end_run(self, name: str, end: RunEnd) -> None:
        self._read_record(name)  # the last facts may have come after the last look
        self._runs.pop(name, None)
        self._untold.pop(name, None)
        self._tails.pop(name)
        finished = end.finished or name in self._finished
        self._do(self._state.end_run(name, end, self._clock(), finished=finished))

    # --- actions ---

    def _do(self, actions: Sequence[Action], *, reserved: bool = False) -> None:
        """Save actions, then carry them out; if they cannot be saved, later."""
        self._unsaved += actions
        if not self._unsaved and not reserved:
            return
        state = self._state
        # A job may have been forgotten since its actions could not be saved.
        actions = self._unsaved = [action for action in self._unsaved if action.job in state.jobs]
        for action in actions:
            if isinstance(action, StartRun):
                self._prepare(state.jobs[action.job])
        notes = [action for action in actions if isinstance(action, NoteEvent)]
        touched = {action.job: state.jobs[action.job] for action in actions}
        self._store.save(
            [(job.name, job.number, self._row(job)) for job in touched.values()],
            [(note.job, note.what, note.why, note.devices) for note in notes],
            at_s=self._clock(),
            reserved=state.reserved,
        )
        self._unsaved = []
        for note in notes:
            log.info("job %s: %s", note.job, note.why)
        for action in actions:
            match action:
                case StartRun():
                    self._start(action)
                case ResizeRun():
                    self._tell(action.job)
                case EndRun(name, kill):
                    self._tell(name, kill=kill)
                case DropWorkers(name):
                    self._drop(name)

    def _row(self, job: ManagedJob) -> StoredJob:
        spec = self._specs[job.name].model_dump(mode="json")
        return {"spec": spec, "folder": self._folders[job.name], **job.to_json()}

    def _prepare(self, job: ManagedJob) -> None:
        """Note where in the record the new run begins."""
        run = self._run(job)
        job.record_from = os.path.getsize(run.record) if run.record.exists() else 0
        self._tails[job.name] = RecordTail(run.record, job.record_from)

    def _start(self, action: StartRun) -> None:
        name = action.job
        run = self._run(self._state.jobs[name])
        try:
            run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._runs[name] = self._backend.start(run, action.devices)
            self._wake_thread()  # it shall wait for the end of this run, too
        except (PliantError, OSError) as error:
            self._tails.pop(name)
            self._do(self._state.fail_start(name, str(error), self._clock()))

    def _tell(self, name: str, *, kill: bool = False) -> None:
        """Tell a job's runner what is asked of it now; only the newest request counts."""
        handle, job = self._runs.get(name), self._state.jobs[name]
        if handle is None:
            return
        try:
            if job.ending:
                handle.end(kill=kill)
            else:
                handle.resize(job.asked)
        except (ServerUnavailable, StaleView):
            self._untold[name] = kill
            return
        except PliantError as error:
            log.warning("job %s: %s", name, error)
        self._untold.pop(name, None)
        self._state.set_told(name)

    def _drop(self, name: str) -> None:
        handle = self._runs.get(name)
        if handle is None:
            return  # it has ended before this could be saved
        try:
            handle.drop()
        except PliantError as error:
            log.warning("job %s: %s", name, error)
