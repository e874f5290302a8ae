"""The live scheduler: looks at what the jobs do, asks the rules (`state`), writes down what they say, and does it.

One thread looks and acts; requests come from others, and one lock keeps them apart. Decisions are written to the book
before they are carried out, so that a scheduler that was killed finds in it every run that it may have started.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pliant.errors import NameTaken, PliantError, ServerUnavailable, StaleView, UnknownJob
from pliant.sched.cluster import SchedulingPolicy
from pliant.sched.live.actions import Action, Drop, End, Note, Resize, Start
from pliant.sched.live.book import Book
from pliant.sched.live.ground import Counts, Ended, Ground, Run, Running
from pliant.sched.live.job import LiveJob
from pliant.sched.live.jobfile import JobSpec
from pliant.sched.live.state import END_GRACE_S, LiveState
from pliant.sched.live.tail import Tail

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between looks at the jobs."""
URGENT_S = 0.01
"""The same while somebody waits for a reserved device."""
RESERVE_S = 20.0
"""A reservation that has not come to pass by then is given up waiting for; it stands."""
_UNTOLD = (ServerUnavailable, StaleView)


class Scheduler:
    """Gives the devices of a ground to jobs. Works within `with scheduler.running():`."""

    def __init__(
        self,
        ground: Ground,
        policy: SchedulingPolicy,
        book: Book,
        directory: Path,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ground, self._book, self._directory = ground, book, directory
        self._interval_s, self._clock = interval_s, clock
        self._state = LiveState(policy, ground.devices(), book.jobs(), book.reserved())
        self._runs: dict[str, Running] = {}
        self._tails: dict[str, Tail] = {}
        self._finished: set[str] = set()
        """Jobs whose program has said that it is done."""
        self._untold: dict[str, bool] = {}
        """Jobs whose runners have still to be told what was asked; whether that they shall be killed."""
        self._unwritten: list[Action] = []
        """Decided, and not yet in the book."""
        self._news = threading.Condition(threading.RLock())
        self._stopping = False
        self._allocate_at_s = 0.0

    @contextmanager
    def running(self) -> Iterator[Scheduler]:
        """Look after the jobs until the block ends; jobs run on."""
        with self._news:
            self._adopt()
        thread = threading.Thread(target=self._work, name="pliant-live", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self._news:
                self._stopping = True
                self._news.notify_all()
            thread.join()
            self._ground.close()

    # --- for requests, from any thread ---

    def submit(self, spec: JobSpec) -> dict[str, Any]:
        """Take a job; its status."""
        with self._news:
            directory = self._directory / "jobs" / spec.name
            if spec.name not in self._state.jobs and directory.exists():
                # Of a book that is gone: its checkpoints would be taken for the new job's.
                raise NameTaken(
                    f"name {spec.name!r}: {directory} is of an earlier job; remove it, or choose another name"
                )
            self._do(self._state.submit(spec, self._clock()))
            return self._state.jobs[spec.name].status()

    def statuses(self) -> list[dict[str, Any]]:
        with self._news:
            return [job.status() for job in sorted(self._state.jobs.values(), key=lambda job: job.number)]

    def detail(self, name: str) -> dict[str, Any]:
        """A job's status and history, and what was submitted."""
        with self._news:
            job = self._job(name)
            return {**job.status(), "events": self._book.events(name), "spec": job.spec.to_json()}

    def log_of(self, name: str) -> tuple[Path, bool]:
        """Where a job's output is, and whether the job is over."""
        with self._news:
            job = self._job(name)
            return self._run(job).log, job.is_over

    def stop(self, name: str, *, kill: bool = False) -> dict[str, Any]:
        with self._news:
            self._do(self._state.stop(self._job(name).name, self._clock(), kill=kill))
            return self._state.jobs[name].status()

    def reserve(self, devices: Counts) -> dict[str, Any]:
        """Take devices for the serving tenant; returns when no process of a job is on them.

        Raises:
            ServerUnavailable: that has not come to pass in time.
        """
        begun_s = time.monotonic()
        with self._news:
            for name in list(self._runs):
                self._look_at(name)  # what is not known to be in use would else be held for free
            self._do(self._state.reserve(devices, self._clock()), reserved=True)
            self._news.notify_all()
            if not self._news.wait_for(lambda: self._state.reserved_is_free or self._stopping, RESERVE_S):
                raise ServerUnavailable(
                    f"jobs are still on the reserved devices after {RESERVE_S:g} s; the reservation stands"
                )
            return {"reserved": dict(self._state.reserved), "took_s": round(time.monotonic() - begun_s, 4)}

    def cluster(self) -> dict[str, Any]:
        with self._news:
            state = self._state
            return {
                "devices": dict(state.devices),
                "reserved": dict(state.reserved),
                "free": {kind: max(0, state.free(kind)) for kind in state.devices},
                "jobs": {job.name: dict(job.asked) for job in state.active},
            }

    def _job(self, name: str) -> LiveJob:
        if name not in self._state.jobs:
            raise UnknownJob(f"no job {name!r}")
        return self._state.jobs[name]

    def _run(self, job: LiveJob) -> Run:
        return Run(spec=job.spec, number=job.run, directory=self._directory / "jobs" / job.name)

    # --- beginning anew ---

    def _adopt(self) -> None:
        """Find what an earlier scheduler has started."""
        for job in self._state.active:
            running = self._ground.adopt(self._run(job))
            self._tails[job.name] = Tail(self._run(job).record, job.record_from)
            if running is None:
                self._see_end(job.name, Ended(None, self._clock()))
                continue
            log.info("job %s: adopted, run %d", job.name, job.run)
            self._runs[job.name] = running
            # It may have been killed between writing this down and doing it.
            self._untold[job.name] = False
            if job.ending:
                job.kill_at_s = self._clock() + END_GRACE_S

    # --- the thread ---

    def _work(self) -> None:
        while True:
            with self._news:
                if self._stopping:
                    return
                try:
                    self._look()
                except Exception:  # one job's trouble, or a full disk, must not leave the others without a scheduler
                    log.exception("the scheduler's turn failed; trying again")
                self._news.notify_all()
                self._news.wait(URGENT_S if self._state.reserve_by_s is not None else LOOK_S)

    def _look(self) -> None:
        self._do([])
        for name in list(self._runs):
            self._look_at(name)
        now_s = self._clock()
        if now_s >= self._allocate_at_s:
            self._allocate_at_s = now_s + self._interval_s
            self._do(self._state.equip(self._ground.devices(), now_s))
            self._do(self._state.allocate(now_s))
        self._do(self._state.look(now_s))
        for name, kill in list(self._untold.items()):
            self._tell(name, kill=kill)

    def _look_at(self, name: str) -> None:
        running = self._runs[name]
        ended = running.ended()
        self._read_record(name)
        if ended is not None:
            self._see_end(name, ended)
        else:
            self._state.occupy(name, running.occupied())

    def _read_record(self, name: str) -> None:
        for fact in self._tails[name].facts():
            match fact.get("kind"):
                case "step":
                    step, workers, step_s = fact["step"], int(fact.get("workers", 0)), float(fact.get("step_s", 0))
                    self._do(self._state.step(name, step, workers, step_s, self._clock()))
                case "end":
                    self._finished.add(name)

    def _see_end(self, name: str, ended: Ended) -> None:
        self._read_record(name)  # its last words may have come after the last look
        self._runs.pop(name, None)
        self._untold.pop(name, None)
        self._tails.pop(name)
        self._do(self._state.end(name, ended, self._clock(), finished=name in self._finished))

    # --- doing ---

    def _do(self, actions: Sequence[Action], *, reserved: bool = False) -> None:
        """Write the decisions down, then carry them out; where they cannot be written, later."""
        self._unwritten += actions
        if not self._unwritten and not reserved:
            return
        state, actions = self._state, self._unwritten
        for action in actions:
            if isinstance(action, Start):
                self._prepare(state.jobs[action.job])
        notes = [action for action in actions if isinstance(action, Note)]
        touched = {action.job: state.jobs[action.job] for action in actions}
        self._book.write(touched.values(), notes, state.reserved, self._clock())
        self._unwritten = []
        for note in notes:
            log.info("job %s: %s", note.job, note.why)
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case Resize():
                    self._tell(action.job)
                case End(name, kill):
                    self._tell(name, kill=kill)
                case Drop(name):
                    self._drop(name)

    def _prepare(self, job: LiveJob) -> None:
        """What must be known before its run begins."""
        run = self._run(job)
        job.record_from = os.path.getsize(run.record) if run.record.exists() else 0
        self._tails[job.name] = Tail(run.record, job.record_from)

    def _start(self, action: Start) -> None:
        name = action.job
        run = self._run(self._state.jobs[name])
        try:
            run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._runs[name] = self._ground.start(run, action.devices)
        except (PliantError, OSError) as error:
            self._tails.pop(name)
            self._do(self._state.refuse(name, str(error), self._clock()))

    def _tell(self, name: str, *, kill: bool = False) -> None:
        """Tell a job's runner what is asked of it now: the last word counts, whatever was missed."""
        running, job = self._runs.get(name), self._state.jobs[name]
        if running is None:
            return
        try:
            if job.ending:
                running.end(kill=kill)
            else:
                running.resize(job.asked)
        except _UNTOLD:
            self._untold[name] = kill
            return
        except PliantError as error:
            log.warning("job %s: %s", name, error)
        self._untold.pop(name, None)
        self._state.hear(name)

    def _drop(self, name: str) -> None:
        try:
            self._runs[name].drop()
        except PliantError as error:
            log.warning("job %s: %s", name, error)
