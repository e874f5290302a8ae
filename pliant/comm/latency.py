"""How long a word takes to each worker and back, and the tree that follows from it."""

from __future__ import annotations

import threading
import time

import torch

from pliant.comm import graph
from pliant.comm.engine import INTERNAL, Engine
from pliant.errors import CollectiveTimeout


def latencies(engine: Engine, timeout_s: float = 10.0) -> list[float]:
    """Round-trip seconds to every rank; 0 to itself, infinite to the lost. One rank may call this alone.

    Raises:
        CollectiveTimeout: somebody did not answer in time; says who.
    """
    found = [0.0] * engine.size
    done = threading.Semaphore(0)

    def answered(rank: int, seconds: float) -> None:
        found[rank] = seconds
        done.release()

    engine.ping(answered)
    deadline_s = time.monotonic() + timeout_s
    for _ in range(engine.size - 1):
        if not done.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise CollectiveTimeout("latencies", timeout_s, engine.unanswered())
    return found


def minimum_spanning_tree(engine: Engine, timeout_s: float = 30.0) -> graph.Forest:
    """The lightest tree over the measured latencies, as a forest array; the same on every rank, which all call."""
    row = torch.tensor(latencies(engine, timeout_s), dtype=torch.float64)
    rows = engine.all_gather(f"{INTERNAL}latencies", row).wait(timeout_s)
    assert rows is not None, "an all_gather has a result on every rank"
    return graph.forest_of_edges(graph.minimum_spanning_tree(rows.tolist()), engine.size)
