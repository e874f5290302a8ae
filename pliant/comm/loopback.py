"""All ranks in one process: for tests, and for reading how a collective runs.

The engines are the real ones, each with its thread; only the sockets are pairs made here instead
of connections between processes. Ranks on one host share memory as they would elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from pliant.cluster import View, Worker
from pliant.comm.engine import Engine, EngineConfig


def view_of(hosts: Sequence[str], number: int = 0) -> View:
    """A view with one worker for each entry of `hosts` (names or addresses)."""
    workers = tuple(Worker(host, 10000 + rank) for rank, host in enumerate(hosts))
    runners = tuple(Worker(host, 38080) for host in dict.fromkeys(hosts))
    return View(number, workers, runners)


@contextlib.contextmanager
def engines(hosts: Sequence[str], config: EngineConfig | None = None) -> Iterator[list[Engine]]:
    """One engine for each rank, connected to one another."""
    view = view_of(hosts)
    made = [Engine(view, rank, config or EngineConfig()) for rank in range(view.size)]
    sockets: list[dict[int, socket.socket]] = [{} for _ in made]
    for rank in range(view.size):
        for other in range(rank):
            sockets[rank][other], sockets[other][rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as stack:
        for engine, mine in zip(made, sockets, strict=True):
            engine.start(mine)
            stack.callback(engine.close)
        yield made
