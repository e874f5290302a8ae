"""All ranks in one process: for tests, and for reading how a collective runs.

The stations are the real ones, each with its thread; only the sockets are pairs made here instead
of connections between processes. Ranks on one host share memory as they would elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from pliant.cluster import View, Worker
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.station import Station


def view_of(hosts: Sequence[str], number: int = 0) -> View:
    """A view with one worker for each entry of `hosts` (names or addresses)."""
    workers = tuple(Worker(host, 10000 + rank) for rank, host in enumerate(hosts))
    runners = tuple(Worker(host, 38080) for host in dict.fromkeys(hosts))
    return View(number, workers, runners)


@contextlib.contextmanager
def stations(workers: Sequence[Worker], config: EngineConfig | None = None) -> Iterator[list[Station]]:
    """One station for each worker, connected to one another, in no view yet."""
    made = [Station(worker, MeshConfig(secret=b"loopback"), config or EngineConfig()) for worker in workers]
    with contextlib.ExitStack() as stack:
        for station in made:
            station.start()
            stack.callback(station.close)
        for index, station in enumerate(made):
            for other in range(index):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                station.take(workers[other], ours)
                made[other].take(workers[index], theirs)
        yield made


@contextlib.contextmanager
def engines(hosts: Sequence[str], config: EngineConfig | None = None) -> Iterator[list[Engine]]:
    """One engine for each rank, connected to one another."""
    view = view_of(hosts)
    with stations(view.workers, config) as made:
        yield [station.enter(view) for station in made]
