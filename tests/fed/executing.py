"""Executors and servers of small jobs as real processes, for the tests beside this file.

A process that has imported all of it forks them: each is there after some milliseconds. Nothing outlives the `with`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import signal
import socket
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

from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.executors import greeting, wire
from pliant.fed.executors.pool import Pool
from pliant.fed.rounds.loop import FederatedLoop
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.trainer import InProcess
from pliant.fed.work import Training, Unit, UnitResult, Weights, Workers

TOKEN = "a token for tests, long enough"
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
class BatchOutcome:
    """What must not depend on who did the work."""

    sha256: str
    invited: tuple[tuple[int, ...], ...]
    accuracy: tuple[float, ...]


def sha256(model: Weights) -> str:
    digest = hashlib.sha256()
    for tensor in model.all:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def outcome(config: FedConfig, workers: Workers | None = None, folder: Path | None = None) -> BatchOutcome:
    """Of the whole job; in this process where nobody else works."""
    task = build_task(config)
    loop = FederatedLoop(config, task, workers or InProcess(task), JobRecorder(folder))
    history = loop.run()
    return BatchOutcome(
        sha256(loop.federation.model),
        tuple(each.invited for each in history.rounds),
        tuple(each.accuracy for each in history.points),
    )


# Processes


class Nursery:
    """Forks executors and servers; see `_nursery`."""

    def __init__(self, started: gang.Gang) -> None:
        self._gang = started
        self._codes: dict[int, int] = {}
        self.children: list[Child] = []

    def start(self, log: Path, what: str, *arguments: Any) -> Child:
        """Run `what` (a function of this module that returns an exit code) in a process of its own."""
        pid = self._ask(("start", str(log), what, arguments))
        self.children.append(Child(self, pid, log))
        return self.children[-1]

    def executor(self, folder: Path, address: str, *flags: str, token: str = TOKEN) -> Child:
        """One with a log of its own."""
        number = len(self.children)
        secret = folder / f"token-{number}"
        secret.write_text(token)
        argv = ["--server", address, "--token-file", str(secret), "--name", f"e{number}", *flags]
        return self.start(folder / f"executor-{number}", "_executor", argv)

    def started(self, folder: Path, pool: Pool, count: int) -> list[Child]:
        """So many that are ready."""
        made = [self.executor(folder, pool.address) for _ in range(count)]
        pool.wait_for(count, DEADLINE_S)
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
    """Imports what executors need, once; then forks on request."""
    import small_task  # noqa: F401

    import pliant.fed.executors.executor  # noqa: F401

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


def _executor(argv: list[str]) -> int:
    from pliant.fed.executors.executor import main

    return main(argv)


def _server(config: FedConfig, folder: str, port: int, held_round: int) -> int:
    """A whole job with a checkpoint; at `held_round` it shuts the gate. What came of it is its last line."""
    with Pool(config, port=port, token=TOKEN) as pool:
        print(f"listening {pool.port}", flush=True)
        found = outcome(config, Shutting(pool, Path(folder) / "gate", held_round), Path(folder) / "job")
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


def held(folder: Path, pool: Pool) -> Callable[[], int]:
    """The process of an executor that has a unit in its hands, as it and the server say; 0: there is none."""

    def look() -> int:
        waiting = {int(path.name.removeprefix("held-")) for path in folder.glob("held-*")}
        return next((each.pid for each in pool.executors() if each.holding and each.pid in waiting), 0)

    return look


# Somebody who speaks as an executor does


def proved(address: str) -> socket.socket:
    """A connection of somebody who knows the token, after the welcome."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 10)
    mine = greeting.nonce()
    say(sock, wire.Kind.HELLO, {"protocol": greeting.PROTOCOL, "nonce": mine, "name": "fake", "pid": 1})
    challenge = frame(sock)
    say(sock, wire.Kind.PROOF, {"proof": greeting.proof(TOKEN, "executor", f"{mine} {challenge['nonce']}")})
    assert "config" in frame(sock)
    return sock


def frame(sock: socket.socket) -> dict[str, object]:
    _, _, num_body, _ = wire.HEAD.unpack(sock.recv(wire.HEAD.size, socket.MSG_WAITALL))
    found: dict[str, object] = json.loads(sock.recv(num_body, socket.MSG_WAITALL))
    return found


def say(sock: socket.socket, kind: wire.Kind, body: dict[str, Any]) -> None:
    sock.sendall(b"".join(wire.encoded(kind, body)))


def _launcher(count: int) -> int:
    """Executors of a server that is not there, until killed."""
    from pliant.fed.executors.launch import Executors
    from pliant.fed.executors.places import parse_workers

    with Executors(parse_workers(count), port=1, token=TOKEN):
        threading.Event().wait()
    return 0
