"""Many real worker processes, started cheaply: forked from a server that has already imported torch.

`run(function, size)` runs `function(rank, *args)` in `size` processes and returns what each
returned. `gang` is the same with the processes in hand, for tests that kill some of them.
`specs` names workers on free ports of loopback addresses, and `joined` connects one of them.
Every wait has a deadline, and nothing outlives the `with`: a worker dies with the fork server,
which ends with the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant.cluster import View, Worker
from pliant.identity import WorkerSpec

if TYPE_CHECKING:
    from pliant.comm.engine import Engine

SECRET = b"a secret for tests"
FULL = os.environ.get("PLIANT_FULL") == "1"
"""Whether tests that take minutes run, too."""

_PR_SET_PDEATHSIG = 1
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    # The first optimizer of a process imports torch._dynamo, which takes longer than any test's training.
    [
        "pytest", "numpy", "torch", "torch.distributed", "torch._dynamo", "sklearn.datasets",
        "pliant.elastic.server", "pliant.train.joining",
    ]
)  # fmt: skip


class Failed(Exception):
    """A worker raised an exception; the message is its traceback."""


class Gang:
    """Worker processes, each with a pipe for messages and its outcome."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank, args in enumerate(arguments):
            ours, theirs = _context.Pipe(duplex=True)
            process = _context.Process(target=_work, args=(theirs, function, rank, args), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def pid(self, rank: int) -> int:
        return int(self.processes[rank].pid)

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> float:
        """Send a signal; return the monotonic time just before."""
        at_s = time.monotonic()
        os.kill(self.pid(rank), sig)
        return at_s

    def hear(self, rank: int, timeout_s: float = 60) -> Any:
        """Return the next value that a worker sends with `say`, or its result; raises Failed if the worker raised."""
        if not self._pipes[rank].poll(timeout_s):
            raise TimeoutError(f"worker {rank} said nothing for {timeout_s:g} s")
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            raise Failed(f"worker {rank} ended without a word, exit code {self.processes[rank].exitcode}") from None
        if kind == "error":
            raise Failed(f"worker {rank}:\n{value}")
        return value

    def tell(self, rank: int, value: Any) -> None:
        self._pipes[rank].send(value)

    def results(self, timeout_s: float = 60, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the next value of each of `ranks` (default: all)."""
        deadline_s = time.monotonic() + timeout_s
        asked = range(len(self.processes)) if ranks is None else ranks
        return [self.hear(rank, max(0.1, deadline_s - time.monotonic())) for rank in asked]

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)
            process.close()
        for pipe in self._pipes:
            pipe.close()


_outside: Connection


def say(value: Any) -> None:
    """In a worker: send a value to the test."""
    _outside.send(("value", value))


def told() -> bool:
    """In a worker: return whether `listen` would return at once."""
    return _outside.poll(0)


def listen(timeout_s: float = 60) -> Any:
    """In a worker: return the next value that the test sends with `tell`."""
    assert _outside.poll(timeout_s), "the test said nothing"
    return _outside.recv()


def _work(pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    global _outside
    _outside = pipe
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("value", function(rank, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


@contextlib.contextmanager
def gang(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Gang]:
    started = Gang(function, arguments)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def job(function: Callable[..., Any], members: Sequence[WorkerSpec], *args: Any) -> Iterator[Gang]:
    """Run `function(rank, spec, *args)` as each of `members`; afterwards check that nothing is left of the job."""
    with gang(function, [(spec, *args) for spec in members]) as started:
        pids = [started.pid(rank) for rank in range(len(members))]
        yield started
    assert left_behind(members, pids) == []


def run(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Return what `function(rank, *args)` returns in each of `size` processes."""
    with gang(function, [args] * size) as started:
        return started.results(timeout_s)


def warm_up() -> None:
    """Start the fork server before a test counts descriptors."""
    run(_nothing, 1)


def _nothing(rank: int) -> None:
    pass


def addresses(hosts: str) -> list[str]:
    """Return `AAB` as loopback addresses: 127.0.0.1, 127.0.0.1, 127.0.0.2."""
    return [f"127.0.0.{ord(letter) - ord('A') + 1}" for letter in hosts]


def specs(
    hosts: Sequence[str],
    *,
    number: int = 0,
    strategy: str = "AUTO",
    timeout_s: float = 10.0,
    secret: bytes = SECRET,
    config_server: str = "",
) -> list[WorkerSpec]:
    """Return the spec of a worker on a free port for each entry of `hosts` (loopback addresses)."""
    workers: list[Worker] = []
    for host in hosts:
        workers.append(Worker(host, free_port(host, [worker.port for worker in workers])))
    view = View(number, tuple(workers), tuple(Worker(host, 1) for host in dict.fromkeys(hosts)))
    return [
        WorkerSpec(
            worker=worker,
            view=view,
            secret=secret,
            strategy=strategy,
            heartbeat_timeout_s=timeout_s,
            config_server=config_server,
        )
        for worker in workers
    ]


def free_port(host: str, taken: Sequence[int] = ()) -> int:
    """Return a port that nobody listens on, below the kernel's range of ephemeral ports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Between here and its use nobody holds it: tests that run side by side (pytest-xdist's gw0, gw1) have ports of their own.
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    for port in random.SystemRandom().sample(range(12_000 + 5_000 * lane, 17_000 + 5_000 * lane), 100):
        with socket.socket(family, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            if port not in taken:
                return port
    raise AssertionError(f"no free port on {host} in a hundred tries")


@contextlib.contextmanager
def torchrun(size: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environments of `size` ranks under torchrun, with a store that is held here so that its port stays taken."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    yield [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


@contextlib.contextmanager
def joined(spec: WorkerSpec, *, order: Any = "ddp", are_watched: bool = False, **mesh: Any) -> Iterator[Engine]:
    """In a worker: yield the connected engine of `spec`; `mesh` are further fields of MeshConfig. `are_watched` is as under a
    runner, which the test plays."""
    from pliant.comm.engine import EngineConfig
    from pliant.comm.mesh import MeshConfig
    from pliant.comm.topology import Strategy
    from pliant.comm.transport import connected

    config = EngineConfig(
        strategy=Strategy(spec.strategy),
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
        are_watched=are_watched,
        order=order,
        collective_timeout_s=60,
    )
    settings = MeshConfig(**{"secret": spec.secret, "join_timeout_s": 30.0, "listen_fd": spec.listen_fd, **mesh})
    with connected(spec.view, spec.worker, settings, config) as engine:
        yield engine


def left_behind(members: Sequence[WorkerSpec], pids: Sequence[int]) -> list[str]:
    """Return what is left of a job that has ended: processes, Unix sockets, TCP listeners."""
    found = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    unix = Path("/proc/net/unix").read_text()
    listening = _listening()
    for member in members:
        found += [f"unix socket of {member.worker}"] * (f"@pliant-{member.worker.label}-" in unix)
        found += [f"port of {member.worker}"] * (member.worker.port in listening)
    return found


def _listening() -> set[int]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
