"""A job with one of the optimizers that average models, driven step by step: each worker says what it did and waits.

The model is a vector w, a worker's loss is half its squared distance to the mean of the worker's batch: the gradient is
known, so what the optimizer did can be computed again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gang import Gang, listen, say
from stage import new_workers, spec_of, view_of
from torch import Tensor, nn

import pliant
from pliant.cluster import Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig

RATE, MOMENTUM, ALPHA = 0.1, 0.9, 0.2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sma": lambda inner: pliant.SynchronousAveraging(inner, ALPHA),
    "pair": lambda inner: pliant.PairAveraging(inner, seed=3),
    "adaptive": lambda inner: pliant.AdaptiveSGD(inner, change_step=4, alpha=ALPHA),
}


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker did in a step that counts."""

    step: int
    rank: int
    size: int
    target: np.ndarray[Any, Any]
    """The mean of its batch."""
    before: np.ndarray[Any, Any]
    momentum: np.ndarray[Any, Any] | None
    """Before the step; None where there is none yet."""
    after: np.ndarray[Any, Any]
    momentum_after: np.ndarray[Any, Any]
    peer: int | None


class Points(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index % 7, -(index % 5), index % 11], dtype=torch.float64)


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, points: Tensor) -> Tensor:
        return 0.5 * (self.w - points.mean(0)).square().sum()


def train(_: int, kind: str, environ: dict[str, str], save_at: int = 0, path: str = "", load: str = "") -> str:
    """In a worker: train until told to stop, or to leave."""
    for name in [name for name in os.environ if name.startswith("PLIANT_")]:
        del os.environ[name]
    os.environ.update(environ)
    try:
        with pliant.join() as job:
            _train(job, kind, save_at, path, load)
    except SystemExit as leaving:
        return f"left with {leaving.code}"
    return "finished"


def _train(job: Any, kind: str, save_at: int, path: str, load: str) -> None:
    model = Distance()
    optimizer = OPTIMIZERS[kind](torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM))
    _, optimizer = job.wrap(model, optimizer)
    loader = job.loader(Points(), batch_size=3, shuffle=True)
    if load:
        job.load(load)
    for _ in job.epochs(1):
        for step in loader:
            optimizer.zero_grad()
            for points in step:
                before, momentum, target = _values(model.w), _momentum(optimizer, model.w), points.mean(0).numpy()
                model(points).backward()
            if save_at and step.number + 1 == save_at:
                job.save(path)
            optimizer.step()
            after = _momentum(optimizer, model.w)
            assert after is not None
            peer = getattr(optimizer, "peer", None)
            say(Record(step.number, job.rank, job.size, target, before, momentum, _values(model.w), after, peer))
            if listen() == "stop":
                return


def _values(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().numpy().copy()


def _momentum(optimizer: torch.optim.Optimizer, parameter: Tensor) -> np.ndarray[Any, Any] | None:
    found = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return None if found is None else _values(found)


# --- in the test ---

Steps = dict[int, dict[int, Record]]
"""By step and rank."""


class Driver:
    """Starts workers, lets them do one step at a time, and collects what they say."""

    def __init__(self, kind: str, client: ConfigClient | None = None, url: str = "") -> None:
        self.kind, self.client = kind, client
        self.steps: Steps = {}
        self._settings: dict[str, Any] = {"elastic": True, "config_server": url} if url else {}
        self._gangs: dict[Worker, Gang] = {}
        self._silent: set[Worker] = set()
        """Those who have not said anything yet: they are not in the view."""

    def start(self, workers: list[Worker], options: tuple[Any, ...] = ()) -> None:
        """Have these workers, in this order, and start those who are new."""
        if self.client is not None:
            self.client.put(view_of(workers))
        for worker in workers:
            if worker not in self._gangs:
                environ = spec_of(worker, view_of(workers), **self._settings).to_environ()
                arguments = (self.kind, environ, *options)
                self._gangs[worker] = Gang(train, [arguments])
                self._silent.add(worker)

    def until_rolled(self, count: int) -> None:
        """Until so many have come to the door."""
        assert self.client is not None
        deadline_s = time.monotonic() + 30
        while len(self.client.membership().members) != count:
            assert time.monotonic() < deadline_s, f"{self.client.membership()}"
            time.sleep(0.005)  # pacing a poll with a deadline

    def round(self, victim: Worker | None = None) -> list[Record]:
        """One step of everybody in the view. The victim is killed after it: the others are left in the next one."""
        waiting = [worker for worker in self._gangs if worker not in self._silent] or list(self._gangs)
        heard = [self._hear(worker) for worker in waiting]
        for worker in list(self._silent):
            if len(heard) < heard[0].size:
                heard.append(self._hear(worker))
        if victim is not None:
            self._kill(victim)
        for worker in self._gangs:
            if worker not in self._silent:
                self._gangs[worker].tell(0, "go on")
        return heard

    def until_size(self, size: int, steps: int) -> None:
        """Until so many workers have done so many steps together."""
        done = 0
        for _ in range(400):
            done += self.round()[0].size == size
            if done == steps:
                return
        raise AssertionError(f"never {size} workers")

    def _kill(self, worker: Worker) -> None:
        assert self.client is not None
        gang = self._gangs.pop(worker)
        gang.kill(0)
        gang.processes[0].join(10)
        gang.close()
        self.client.lost(worker, "killed by the test")

    def stop(self) -> list[str]:
        """Have everybody leave its loop after one more step; how each has ended."""
        for gang in self._gangs.values():
            assert isinstance(gang.hear(0, 30), Record)
            gang.tell(0, "stop")
        return [gang.hear(0, 30) for gang in self._gangs.values()]

    def close(self) -> None:
        for gang in self._gangs.values():
            gang.close()

    def _hear(self, worker: Worker) -> Record:
        record = self._gangs[worker].hear(0, 30)
        assert isinstance(record, Record), record
        self._silent.discard(worker)
        self.steps.setdefault(record.step, {})[record.rank] = record
        return record


@contextlib.contextmanager
def elastic(kind: str) -> Iterator[Driver]:
    with ConfigServer(ServerConfig(port=0, open=True)).running() as server, ConfigClient(server.url) as client:
        driver = Driver(kind, client, server.url)
        with contextlib.closing(driver):
            yield driver


@contextlib.contextmanager
def fixed(kind: str, size: int, options: tuple[Any, ...] = ()) -> Iterator[Driver]:
    driver = Driver(kind)
    with contextlib.closing(driver):
        driver.start(new_workers(size), options)
        yield driver
