"""Small federated jobs for tests, and what they leave, as bits."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.rounds.loop import FederatedLoop
from pliant.fed.rounds.storage import RECORD, JobRecorder
from pliant.fed.trainer import InProcess
from pliant.fed.work import Trained, Unit, UnitResult, Weights
from pliant.train import state_tree

DAY_S = 86_400
_tasks: dict[str, Task] = {}


def config_of(**more: Any) -> FedConfig:
    """Sixty clients with digits, of whom six make a round of 8 invited."""
    values: dict[str, Any] = {
        "data": {
            "kind": "digits",
            "clients": 60,
            "partition": "dirichlet",
            "alpha": 0.5,
            "least": 2,
            "test_samples": 100,
        },
        "model": "logistic",
        "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
        "participants": 6,
        "overcommit": 1.34,
        "rounds": 6,
        "evaluate_every": 2,
        "checkpoint_every": 2,
        "batching": 1,
    }
    for name, value in more.items():
        values[name] = values[name] | value if isinstance(value, dict) and isinstance(values.get(name), dict) else value
    return FedConfig.model_validate(values)


def task_of(config: FedConfig) -> Task:
    """Built once for all jobs with the same data and model."""
    key = json.dumps(
        [
            config.data.model_dump(),
            config.model,
            config.seed,
            config.malicious,
            config.model_dump(include={"aggregator"}),
        ]
    )
    if key not in _tasks:
        _tasks[key] = build_task(config)
    found = _tasks[key]
    return Task(config, found.train, found.test, found.partition, found.malicious, found.shuffle, found.make_model)


class Bomb:
    """What would make a folder if a pickle of it were loaded."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.where),)


class Crash(Exception):
    """What a test does to a job."""


class Crashing:
    """Workers that fail once: the so-many-th time that they are asked for something, in the middle of it."""

    def __init__(self, inner: InProcess, crash_at: int) -> None:
        self._inner, self._left = inner, crash_at

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        self._left -= 1
        for unit in units:
            yield from self._inner.run(model, [unit])
            if not self._left:
                raise Crash
        if not self._left:
            raise Crash


def loop_of(config: FedConfig, folder: Path | None = None, *, crash_at: int = 0, **more: Any) -> FederatedLoop:
    made = task_of(config)
    workers = InProcess(made)
    return FederatedLoop(
        config, made, Crashing(workers, crash_at) if crash_at else workers, JobRecorder(folder), **more
    )


def digest(value: object) -> str:
    """SHA-256 of a tree of tensors, arrays and plain values."""
    skeleton, tensors = state_tree.flatten(value)
    found = hashlib.sha256(skeleton.encode())
    for each in tensors:
        found.update(each.contiguous().numpy().tobytes())
    return found.hexdigest()


def state_of(loop: FederatedLoop) -> dict[str, str]:
    """Of each part that later rounds depend on, its bits."""
    federation, way = loop._parts
    return {name: digest(part) for name, part in (federation.state_dict() | {"way": way.state_dict()}).items()}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The record, without the time of day, who worked, and how long that took."""
    facts = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    lasting = [fact for fact in facts if fact["kind"] not in ("work", "workers")]
    return [{name: value for name, value in fact.items() if name != "time_s"} for fact in lasting]


@dataclass
class Table:
    """Devices and windows as plain lists: what the oracle looks at, and what the job reads from files."""

    compute_ms: list[int]
    kbps: list[int]
    windows: list[list[tuple[int, int]]]
    period_s: int

    def write(self, folder: Path) -> dict[str, str]:
        with (folder / "devices.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["compute_ms_per_sample", "bandwidth_kbps"])
            rows.writerows(zip(self.compute_ms, self.kbps, strict=True))
        trace = {
            client + 1: {
                "active": [begin for begin, _ in theirs],
                "inactive": [end for _, end in theirs],
                "finish_time": self.period_s,
                "duration": sum(end - begin for begin, end in theirs),
                "model": "made up",
            }
            for client, theirs in enumerate(self.windows)
        }
        (folder / "trace.pickle").write_bytes(pickle.dumps(trace))
        return {"devices": str(folder / "devices.csv"), "availability": str(folder / "trace.pickle")}

    def duration_s(self, client: int, *, samples: int, model_bytes: int) -> float:
        """FedScale's formula: three passes of each sample, and the model there and back."""
        compute = 3 * samples * self.compute_ms[client] / 1000
        return compute + 2 * model_bytes * 8 / (self.kbps[client] * 1000)

    def stay(self, client: int, now_s: float) -> tuple[float, float] | None:
        """The window around a moment, found by walking through all of them; None: it is away."""
        joined: list[list[int]] = []
        for cycle in range(int(now_s // self.period_s) + 3):
            for begin, end in sorted(self.windows[client]):
                begin, end = begin + cycle * self.period_s, end + cycle * self.period_s
                if joined and joined[-1][1] == begin:
                    joined[-1][1] = end
                else:
                    joined.append([begin, end])
        return next(((begin, end) for begin, end in joined if begin <= now_s < end), None)


def made_up(num_clients: int, *, period_s: int, seed: int) -> Table:
    """Windows of some hours, some of which go on over the end of the period; rounds take from minutes to hours."""
    chance = random.Random(seed)
    windows = []
    for _ in range(num_clients):
        cuts = sorted(chance.sample(range(1, period_s), 2 * chance.randint(2, 8)))
        theirs = list(zip(cuts[::2], cuts[1::2], strict=True))
        if chance.random() < 0.3:
            theirs = [(0, min(cuts[0], 20_000) - 1 or 1), *theirs[1:-1], (cuts[-2], period_s)]
            theirs = [each for each in theirs if each[0] < each[1]]
        windows.append(theirs)
    compute = [chance.randint(15_000, 200_000) for _ in range(num_clients)]
    return Table(compute, [chance.randint(1_000, 100_000) for _ in range(num_clients)], windows, period_s)


class Watched:
    """Real workers; keeps the units, and lets a test change what clients bring."""

    def __init__(self, inner: InProcess, poisoned: frozenset[int] = frozenset()) -> None:
        self._inner, self._poisoned = inner, poisoned
        self.units: list[Unit] = []
        self.brought: list[Trained] = []

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        self.units += units
        for done in self._inner.run(model, units):
            if isinstance(done, tuple):
                done = tuple(self._poison(each) for each in done)
                self.brought += done
            yield done

    def _poison(self, trained: Trained) -> Trained:
        if trained.update.client not in self._poisoned:
            return trained
        change = trained.update.change.clone()
        change.parameters[0].view(-1)[0] = math.nan
        return replace(trained, update=replace(trained.update, change=change))


def watched(config: FedConfig, poisoned: frozenset[int] = frozenset()) -> tuple[FederatedLoop, Watched]:
    made = task_of(config)
    workers = Watched(InProcess(made), poisoned)
    return FederatedLoop(config, made, workers, JobRecorder()), workers
