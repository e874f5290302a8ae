"""Workers and coordinators of small federated jobs as real processes, for the tests beside this file.

A process that has imported everything forks them, so each is there after some milliseconds. Nothing outlives the `with`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gang
import torch
from patience import until

from pliant.channel import connect_channel
from pliant.cluster import View, Worker
from pliant.fed.config import FedConfig
from pliant.fed.coordinator import Coordinator
from pliant.fed.data.build import build_task
from pliant.fed.messages import PURPOSE, Connection
from pliant.fed.rounds.loop import FederatedLoop
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.trainer import InProcess
from pliant.fed.work import Training, Unit, UnitResult, Weights, Workers
from pliant.identity import WorkerSpec

SECRET = b"a secret for tests, long enough"
DEADLINE_S = 60.0


def small(folder: Path | None = None, **given: object) -> FedConfig:
    """A job of four short rounds."""
    base = {
        "data": {"kind": "small_task:samples", "path": str(folder or ""), "clients": 20},
        "model": "small_task:model",
        "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
        "participants": 6,
        "rounds": 4,
        "seed": 5,
        "evaluate_every": 2,
        "batching": 1,
    }
    return FedConfig.model_validate({**base, **given})


@dataclass(frozen=True)
class JobOutcome:
    """What must not depend on who did the work."""

    sha256: str
    invited: tuple[tuple[int, ...], ...]
    accuracy: tuple[float, ...]


def sha256(model: Weights) -> str:
    digest = hashlib.sha256()
    for tensor in model.all:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def outcome(config: FedConfig, workers: Workers | None = None, folder: Path | None = None) -> JobOutcome:
    """Of the whole job; in this process where nobody else works."""
    task = build_task(config)
    loop = FederatedLoop(config, task, workers or InProcess(task), JobRecorder(folder))
    history = loop.run()
    return JobOutcome(
        sha256(loop.federation.model),
        tuple(each.invited for each in history.rounds),
        tuple(each.accuracy for each in history.points),
    )


# Processes


class Nursery:
    """Forks workers and coordinators; see `_nursery`."""

    def __init__(self, started: gang.Gang) -> None:
        self._gang = started
        self._codes: dict[int, int] = {}
        self.children: list[Child] = []

    def start(self, log: Path, what: str, *arguments: Any) -> Child:
        """Run `what` (a function of this module that returns an exit code) in a process of its own."""
        pid = self._ask(("start", str(log), what, arguments))
        self.children.append(Child(self, pid, log))
        return self.children[-1]

    def worker(
        self, folder: Path, address: str, *flags: str, secret: bytes = SECRET, environ: dict[str, str] | None = None
    ) -> Child:
        """Start a worker with a log of its own; it is told who it is as `pliant run` does."""
        number = len(self.children)
        me = Worker("127.0.0.1", 20000 + number % 20000)
        told = WorkerSpec(worker=me, view=View(1, (me,), (Worker("127.0.0.1", 19999),)), secret=secret).to_environ() | (
            environ or {}
        )
        return self.start(folder / f"worker-{number}", "_worker", ["--server", address, *flags], told)

    def started(self, folder: Path, coordinator: Coordinator, count: int) -> list[Child]:
        """Start `count` workers, and wait until they are ready."""
        made = [self.worker(folder, coordinator.address) for _ in range(count)]
        coordinator.wait_for(count, DEADLINE_S)
        return made

    def code(self, pid: int) -> int | None:
        if pid not in self._codes:
            for ended, code in self._ask(("reap",)):
                self._codes[ended] = code
        return self._codes.get(pid)

    def _ask(self, order: tuple[Any, ...]) -> Any:
        self._gang.tell(0, order)
        return self._gang.hear(0)


@dataclass
class Child:
    nursery: Nursery
    pid: int
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.code() is None:
            os.kill(self.pid, number)

    def code(self) -> int | None:
        """Its exit code, minus the signal; None as long as it lives."""
        return self.nursery.code(self.pid)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        until(lambda: self.code() is not None, f"the end of {self.pid}:\n{self.said()}", deadline_s)
        code = self.code()
        assert code is not None
        return code

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    with gang.gang(_nursery, [()]) as started:
        assert started.hear(0) == "ready"
        made = Nursery(started)
        try:
            yield made
        finally:
            for child in made.children:
                child.kill(signal.SIGCONT)
                child.kill()
            for child in made.children:
                child.wait(10)


def _nursery(rank: int) -> None:
    """Import what workers need, once; then fork on request."""
    import small_task  # noqa: F401

    import pliant.fed.worker  # noqa: F401

    gc.freeze()  # what is here already is not looked at again by each of the forked
    gang.say("ready")
    while True:
        order = gang.listen(3600)
        if order[0] == "reap":
            gang.say(list(_ended()))
            continue
        pid = os.fork()
        if not pid:
            _become(*order[1:])
        gang.say(pid)


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _become(log: str, what: str, arguments: tuple[Any, ...]) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    code = 99
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = int(globals()[what](*arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _worker(argv: list[str], environ: dict[str, str]) -> int:
    from pliant.fed.worker import main

    return main(argv, environ)


def _coordinator(config: FedConfig, folder: str, port: int, held_round: int) -> int:
    """Run a whole job with a checkpoint; shut the gate at `held_round`. The outcome is the last line of its output."""
    with Coordinator(config, port=port, secret=SECRET) as coordinator:
        print(f"listening {coordinator.port}", flush=True)
        found = outcome(config, Shutting(coordinator, Path(folder) / "gate", held_round), Path(folder) / "job")
    print(repr(found), flush=True)
    return 0


@dataclass
class Shutting:
    """`Workers` that shut the gate before the units of one round."""

    workers: Workers
    gate: Path
    held_round: int

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        if isinstance(units[0], Training) and units[0].round_number == self.held_round:
            self.gate.touch()
        yield from self.workers.run(model, units)


@dataclass
class Disturbed(Shutting):
    """The same; meanwhile `disturb` is called, in a thread, and then the gate is opened."""

    disturb: Callable[[], None] = field(default=lambda: None)
    errors: list[BaseException] = field(default_factory=list)

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        if not (isinstance(units[0], Training) and units[0].round_number == self.held_round):
            yield from self.workers.run(model, units)
            return
        self.gate.touch()
        thread = threading.Thread(target=self._disturb, name="disturb")
        thread.start()
        try:
            yield from self.workers.run(model, units)
        finally:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _disturb(self) -> None:
        try:
            self.disturb()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.gate.unlink()


def held(folder: Path, coordinator: Coordinator) -> Callable[[], int]:
    """Return a function that finds the process of a worker that works on a unit; 0 if there is none."""

    def look() -> int:
        waiting = {int(path.name.removeprefix("held-")) for path in folder.glob("held-*")}
        return next((each.pid for each in coordinator.workers() if each.holding and each.pid in waiting), 0)

    return look


@contextlib.contextmanager
def impostor(coordinator: Coordinator, **ready: object) -> Iterator[Connection]:
    """A connection of somebody who knows the secret, after the welcome; with `ready`, it has said that."""
    host, _, port = coordinator.address.rpartition(":")
    channel = connect_channel((host, int(port)), SECRET, purpose=PURPOSE, name="impostor")
    connection = Connection(channel, DEADLINE_S)
    connection.allow(1 << 30)
    try:
        welcome = connection.receive()
        assert welcome is not None
        assert "config" in welcome.body
        if ready:
            connection.send("ready", {"pid": 1, **ready})
        yield connection
    finally:
        connection.close()


def _launcher(count: int, port: int, directory: str) -> int:
    """Start workers of a coordinator in another process, until killed."""
    from pliant.fed.workers import WorkerProcesses, parse_workers

    with WorkerProcesses(parse_workers(count), port=port, secret=SECRET, directory=directory):
        threading.Event().wait()
    return 0
