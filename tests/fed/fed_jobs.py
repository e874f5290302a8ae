"""Small federated jobs for tests, and what they leave, as bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pliant.fed import task
from pliant.fed.config import FedConfig
from pliant.fed.journal import RECORD, Journal
from pliant.fed.local import InProcess
from pliant.fed.loop import Loop
from pliant.fed.task import Task
from pliant.fed.updates import Weights
from pliant.fed.work import Done, Unit
from pliant.train import tree

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
        _tasks[key] = task.build(config)
    found = _tasks[key]
    return Task(config, found.train, found.test, found.partition, found.malicious, found.shuffle)


class Crash(Exception):
    """What a test does to a job."""


class Crashing:
    """Workers that fail once: the so-many-th time that they are asked for something, in the middle of it."""

    def __init__(self, inner: InProcess, crash_at: int) -> None:
        self._inner, self._left = inner, crash_at

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[Done]:
        self._left -= 1
        for unit in units:
            yield from self._inner.run(model, [unit])
            if not self._left:
                raise Crash
        if not self._left:
            raise Crash


def loop_of(config: FedConfig, folder: Path | None = None, *, crash_at: int = 0, **more: Any) -> Loop:
    made = task_of(config)
    workers = InProcess(made)
    return Loop(config, made, Crashing(workers, crash_at) if crash_at else workers, Journal(folder), **more)


def digest(value: object) -> str:
    """SHA-256 of a tree of tensors, arrays and plain values."""
    skeleton, tensors = tree.flatten(value)
    found = hashlib.sha256(skeleton.encode())
    for each in tensors:
        found.update(each.contiguous().numpy().tobytes())
    return found.hexdigest()


def state_of(loop: Loop) -> dict[str, str]:
    """Of each part that later rounds depend on, its bits."""
    federation, way = loop._parts
    return {name: digest(part) for name, part in (federation.state_dict() | {"way": way.state_dict()}).items()}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The record, without the time of day."""
    facts = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    return [{name: value for name, value in fact.items() if name != "time_s"} for fact in facts]
