"""Helpers of tests that move workers from view to view: transports, views of some workers, and checked sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pliant.cluster import View, Worker
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.transport import Transport
from pliant.identity import WorkerSpec

QUICK = EngineConfig(collective_timeout_s=20, slice_bytes=64 << 10)


def subview(number: int, workers: Sequence[Worker]) -> View:
    return View(number, tuple(workers), tuple(Worker(host, 1) for host in dict.fromkeys(w.host for w in workers)))


@contextlib.contextmanager
def opened(spec: WorkerSpec) -> Iterator[Transport]:
    """Open the transport of a worker."""
    config = EngineConfig(
        heartbeat_timeout_s=spec.heartbeat_timeout_s, collective_timeout_s=20, slice_bytes=64 << 10, linger_s=1
    )
    with Transport(spec.worker, MeshConfig(secret=spec.secret), config).open() as transport:
        yield transport


def on_all(made: Sequence[Any], act: Callable[[Any], Any]) -> list[Any]:
    """Call `act` for each, in a thread of its own."""
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(act, made))


def everybody_sums(transports: Sequence[Transport], view: View) -> list[Engine]:
    """Enter the view on all its members, and check their sums."""
    engines = [transport.enter(view) for transport in transports]
    on_all(list(zip(engines, view.workers, strict=True)), lambda pair: check_sums(*pair))
    return engines


def values(worker: Worker, number: int, length: int) -> torch.Tensor:
    """Return what a worker contributes in a view. Sums of these are rounded, so the order shows in the bits."""
    seed = worker.port * 1000 + number
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def check_sums(engine: Engine, me: Worker, length: int = 50_000) -> None:
    """Run several collectives; compare their values with sums made here, and their bits with those of other ranks."""
    number, everybody = engine.view.number, engine.view.workers
    mine = values(me, number, length)
    exact, fast = mine.clone(), engine.empty(length)
    fast.copy_(mine)
    sums = [engine.all_reduce("exact", exact), engine.all_reduce("fast", fast, order="fast")]
    gathered = engine.all_gather("all", mine).wait()
    brought = torch.stack([values(worker, number, length) for worker in everybody])
    assert gathered is not None
    assert torch.equal(gathered, brought), f"wrong values in view {number}"
    for handle in sums:
        handle.wait()
    for total in (exact, fast):
        assert torch.allclose(total.double(), brought.double().sum(0), atol=1e-4), f"wrong sum in view {number}"
    assert engine.consensus("bits", exact.numpy().tobytes() + fast.numpy().tobytes()), f"bits differ in view {number}"
