"""Jobs of real workers: on a fixed set of them, and on workers that come and go.

`Stage` plays the part of the runner: it starts whomever the config server wants, and reports who has died. What its
workers do is in `subject`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from gang import SECRET, Gang, free_port, gang
from subject import Fault, History, Task, history, train

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import REFUSED_EXIT
from pliant.identity import WorkerSpec

HOST = "127.0.0.1"
ALL = 1 << 60
"""A gate that is open for good."""
_closer = ThreadPoolExecutor(1, "ending")
_ending: list[Future[None]] = []
"""The servers of the last jobs, on their way out."""


def spec_of(worker: Worker, view: View, **settings: Any) -> WorkerSpec:
    return WorkerSpec(worker=worker, view=view, secret=SECRET, **settings)


def view_of(workers: Sequence[Worker]) -> View:
    hosts = dict.fromkeys(worker.host for worker in workers)
    return View(0, tuple(workers), tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in hosts))


def new_workers(count: int, hosts: Sequence[str] = (HOST,)) -> list[Worker]:
    workers: list[Worker] = []
    for number in range(count):
        host = hosts[number % len(hosts)]
        workers.append(Worker(host, free_port(host, [worker.port for worker in workers])))
    return workers


def run_fixed(
    tasks: Sequence[Task], size: int, *, timeout_s: float = 60, hosts: Sequence[str] = (HOST,), **settings: Any
) -> list[History]:
    """Each task in turn, on `size` workers that stay; `size` 0: alone, without anything that a runner sets."""
    plans: list[list[Task]] = [[] for _ in range(max(1, size))]
    for task in tasks:
        view = view_of(new_workers(size, hosts)) if size else None
        for rank, plan in enumerate(plans):
            environ = spec_of(view.workers[rank], view, **settings).to_environ() if view else {}
            plan.append(replace(task, journal=f"{task.journal}.{rank}", environ=environ))
    with gang(_train_all, [(plan,) for plan in plans]) as started:
        started.results(timeout_s)
    return [history([Path(f"{task.journal}.{rank}") for rank in range(len(plans))]) for task in tasks]


def _train_all(rank: int, tasks: Sequence[Task]) -> None:
    for task in tasks:
        train(rank, task)


@dataclass(slots=True)
class Actor:
    """A worker process of a stage. Its exit code is what the program's would be."""

    worker: Worker
    gang: Gang
    journal: Path
    pid: int
    exit_code: int | None = None
    looped_s: float = 0.0
    """When its loop was over."""
    ended_s: float = 0.0
    """When its process was seen to have ended."""
    repeated: Sequence[int] = ()
    """Of each change of view it has seen: how many steps it did again."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None


class Stage:
    """A config server and the processes of one elastic job. The test drives it through `client`."""

    def __init__(self, task: Task, folder: Path, client: ConfigClient, url: str, **settings: Any) -> None:
        self.client = client
        self.actors: list[Actor] = []
        self.replaces = False
        """Whether a worker that dies is replaced by a new one, as a runner with a free slot would."""
        self.faults: dict[Worker, Fault] = {}
        self.changes: dict[Worker, dict[str, Any]] = {}
        """What is different about the tasks of some workers."""
        self._task, self._folder = task, folder
        self._settings = {"elastic": True, "config_server": url, **settings}
        self._gate = folder / "gate"
        self.open_gate(ALL)
        self._read: dict[Path, int] = {}
        self.step = 0
        """Steps that some worker has committed."""
        self.view = -1
        """The newest view in which some worker has committed a step."""
        self.last_step: dict[Worker, int] = {}
        """The last step that each worker has committed."""
        self.prepared: dict[Worker, int] = {}
        """The newest roll that each worker at the gate says it is prepared for."""
        self.blocked: dict[Worker, int] = {}
        """The step in which each worker last waited for a sum of the step before, some of which it had already used."""
        self.waiting: dict[Worker, int] = {}
        """The same where it had used none of them."""

    def open_gate(self, steps: int) -> None:
        """Let the job do so many steps, counted from its beginning."""
        self.allowed = steps
        new = self._gate.with_suffix(".new")
        new.write_text(str(steps))
        new.replace(self._gate)

    def advance(self, step: int, timeout_s: float = 60) -> None:
        """Do `step` steps, and stand there."""
        self.open_gate(step)
        self.until(lambda: self.step >= step or not self.running, timeout_s)
        assert self.step == step, f"{self.step} instead of {step} steps, exits {[a.exit_code for a in self.actors]}"

    def change(self, workers: Sequence[Worker], timeout_s: float = 60) -> None:
        """Want these workers; come back when their first step together is done, which is one of the next few."""
        now = self.client.membership()
        before = set(now.members)
        self.open_gate(self.step)
        self.want(workers)
        if now.members != tuple(workers):
            self.until(lambda: self.client.membership().number > now.number, timeout_s)
        # Those who leave go a step before the new ones come, or stay until these have the state.
        for _ in range(10):
            roll = self.client.membership()
            standing = [worker for worker in roll.members if worker in before] if self.step else []
            self.until(lambda r=roll, s=standing: self._are_prepared(s, r.number), timeout_s)  # type: ignore[misc]
            self.advance(self.step + 1, timeout_s)
            if self.view == roll.number and roll.members != tuple(workers):
                self.until(lambda r=roll: self.client.membership().number > r.number, timeout_s)  # type: ignore[misc]
            roll = self.client.membership()
            if roll.members == tuple(workers) and self.view == roll.number:
                return
        raise AssertionError(f"step {self.step} was done in view {self.view}, but there is {self.client.membership()}")

    def _are_prepared(self, workers: Sequence[Worker], number: int) -> bool:
        return all(self.prepared.get(worker, 0) >= number for worker in workers)

    def want(self, workers: Sequence[Worker]) -> None:
        """Ask for exactly these workers, in this order."""
        self.client.put(view_of(workers))
        self.tend(0)

    def tend(self, timeout_s: float = 0.05) -> None:
        """Do the runner's work: reap, report, start; waits for at most so long for somebody to end."""
        running = {actor.gang.processes[0].sentinel: actor for actor in self.actors if actor.is_running}
        for sentinel in wait_for_any(list(running), timeout_s) if running else ():
            self._reap(running[sentinel])
        view = self.client.get()
        busy = {actor.worker for actor in self.actors if actor.is_running}
        for worker in view.workers if view is not None else ():
            if view is not None and worker not in busy and worker not in {actor.worker for actor in self.actors}:
                self._start(worker, view)
        self._follow()

    def until(self, reached: Callable[[], bool], timeout_s: float = 60) -> None:
        """Tend until that holds."""
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < deadline_s, (
                f"waited for {timeout_s:g} s at step {self.step}: {self.client.membership()}"
            )
            self.tend()

    def until_step(self, step: int, timeout_s: float = 60) -> None:
        self.until(lambda: self.step >= step or not self.running, timeout_s)
        assert self.step >= step, f"all workers ended at step {self.step}: {[a.exit_code for a in self.actors]}"

    def until_over(self, timeout_s: float = 60) -> None:
        """Until all processes have ended."""
        self.until(lambda: not self.running, timeout_s)

    @property
    def running(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.is_running]

    def actor(self, worker: Worker) -> Actor:
        return next(actor for actor in self.actors if actor.worker == worker)

    @property
    def holders(self) -> list[Worker]:
        """Members that have the job's state, as far as the test can know."""
        members = self.client.membership().members
        running = [actor.worker for actor in self.running]
        return [each for each in running if each in members and self.last_step.get(each, -9) >= self.step - 2]

    def kill(self, worker: Worker, sig: int = signal.SIGKILL) -> None:
        os.kill(self.actor(worker).pid, sig)

    @property
    def history(self) -> History:
        return history([actor.journal for actor in self.actors])

    def close(self) -> None:
        for actor in self.actors:
            actor.gang.close()

    def _start(self, worker: Worker, view: View) -> None:
        journal = self._folder / f"{len(self.actors)}-{worker.port}.jsonl"
        shadow = bool(self.client.membership().members)  # as a runner decides it
        environ = spec_of(worker, view, shadow=shadow, **self._settings).to_environ()
        task = replace(self._task, journal=str(journal), environ=environ, gate=str(self._gate))
        task = replace(task, fault=self.faults.get(worker), **self.changes.get(worker, {}))
        started = Gang(train, [(task,)])
        self.actors.append(Actor(worker, started, journal, started.pid(0)))

    def _reap(self, actor: Actor) -> None:
        process = actor.gang.processes[0]
        actor.ended_s = time.monotonic()
        process.join(10)
        actor.exit_code = process.exitcode
        if actor.exit_code == 0:
            actor.exit_code = actor.gang.hear(0, 1)  # raises what the worker raised
        if actor.exit_code == 0:
            return
        self.client.lost(actor.worker, f"exit code {actor.exit_code}")
        if self.replaces and actor.exit_code != REFUSED_EXIT and not self.client.membership().over:
            self.client.add_worker(new_workers(1)[0])
            # As a runner does: the last worker stays listed until another is wanted in its place.
            self.client.lost(actor.worker, f"exit code {actor.exit_code}")

    def _follow(self) -> None:
        """Read what the journals have more than before, for the step that the job is in."""
        for actor in self.actors:
            begin = self._read.get(actor.journal, 0)
            if not actor.journal.exists() or actor.journal.stat().st_size == begin:
                continue
            with actor.journal.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[actor.journal] = begin + len(whole)
            for line in whole.splitlines():
                kind, facts = json.loads(line)
                if kind == "commit":
                    self.step = max(self.step, facts["step"] + 1)
                    self.view = max(self.view, facts["view"])
                    self.last_step[actor.worker] = facts["step"]
                elif kind == "prepared":
                    self.prepared[actor.worker] = facts["roll"]
                elif kind == "blocked":
                    self.blocked[actor.worker] = facts["step"]
                elif kind == "waiting":
                    self.waiting[actor.worker] = facts["step"]
                elif kind == "looped":
                    actor.looped_s, actor.repeated = facts["at_s"], facts["repeated"]


@contextlib.contextmanager
def staged(task: Task, folder: Path, **settings: Any) -> Iterator[Stage]:
    """An elastic job that nobody works on yet."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ConfigServer(ServerConfig(port=0, open=True)).running())
        with ConfigClient(server.url) as client:
            stage = Stage(task, folder, client, server.url, **settings)
            try:
                yield stage
            finally:
                stage.close()
        # A server takes 0.2 s to end, all of it waiting: meanwhile the next test begins.
        _ending.append(_closer.submit(stack.pop_all().close))
        if len(_ending) > 1:
            _ending.pop(0).result(10)  # raises what has ended the one before
