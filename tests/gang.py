"""Many real worker processes, started cheaply: forked from a server that has already imported torch.

`run(function, size)` runs `function(rank, *args)` in `size` processes and returns what each
returned. `Gang` is the same with the processes in hand, for tests that kill some of them.
Every wait has a deadline, and nothing outlives the `with`.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pliant.cluster import View, Worker, WorkerSpec

SECRET = b"a secret for tests"

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "numpy", "torch", "torch.distributed", "pliant.comm.engine"])


class Failed(Exception):
    """A worker raised; its traceback is the message."""


class Gang:
    """Worker processes, each with a pipe on which its outcome comes back."""

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
        pid = self.processes[rank].pid
        assert pid is not None, "started in the constructor"
        return pid

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), sig)

    def hear(self, rank: int, timeout_s: float = 60) -> Any:
        """The next thing that worker says (see `say`); raises Failed with its traceback if it raised."""
        if not self._pipes[rank].poll(timeout_s):
            raise TimeoutError(f"worker {rank} said nothing for {timeout_s:g} s")
        kind, value = self._pipes[rank].recv()
        if kind == "error":
            raise Failed(f"worker {rank}:\n{value}")
        return value

    def tell(self, rank: int, value: Any) -> None:
        self._pipes[rank].send(value)

    def results(self, timeout_s: float = 60) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        return [self.hear(rank, max(0.1, deadline_s - time.monotonic())) for rank in range(len(self.processes))]

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
    """In a worker: tell the test something while the work goes on."""
    _outside.send(("value", value))


def listen(timeout_s: float = 60) -> Any:
    """In a worker: what the test tells."""
    assert _outside.poll(timeout_s), "the test said nothing"
    return _outside.recv()


def _work(pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    global _outside
    _outside = pipe
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


def run(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """What `function(rank, *args)` returns in each of `size` processes."""
    with gang(function, [args] * size) as started:
        return started.results(timeout_s)


def specs(
    hosts: Sequence[str], *, number: int = 0, strategy: str = "AUTO", timeout_s: float = 10.0
) -> list[WorkerSpec]:
    """A worker on a free port for each entry of `hosts` (loopback addresses)."""
    sockets = []
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind((host, 0))
        sockets.append(sock)
    workers = tuple(Worker(host, sock.getsockname()[1]) for host, sock in zip(hosts, sockets, strict=True))
    for sock in sockets:
        sock.close()
    view = View(number, workers, tuple(Worker(host, 1) for host in dict.fromkeys(hosts)))
    return [
        WorkerSpec(worker=worker, view=view, secret=SECRET, strategy=strategy, heartbeat_timeout_s=timeout_s)
        for worker in workers
    ]
