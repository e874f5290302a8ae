"""A backend on paper: runs are objects that do what they are told at once, or when the test says so."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import LaunchError, ServerUnavailable
from pliant.jobs.rules import RunEnd
from pliant.jobs.scheduler import JobRun
from pliant.sched.planner import Counts


def train_job(name: str, **more: Any) -> dict[str, Any]:
    """A train job as the API takes it."""
    return {"name": name, "program": "/train.py", "directory": "/", "replicas": 4, **more}


@dataclass
class PaperRun:
    """One run. It outlives the scheduler, as a process would."""

    run: JobRun
    wanted: dict[str, int]
    is_slow: bool = False
    """Leaves devices only when it is killed."""
    is_up: bool = True
    told: list[str] = field(default_factory=list)
    on: dict[str, int] = field(default_factory=dict)
    end_: RunEnd | None = None

    def __post_init__(self) -> None:
        self.on = dict(self.wanted)

    def resize(self, devices: Counts) -> None:
        self._check()
        self.told.append(f"resize {dict(devices)}")
        self.wanted = dict(devices)
        if not self.is_slow:
            self.on = dict(devices)

    def occupied(self) -> dict[str, int]:
        return dict(self.on)

    def drop(self) -> None:
        self.told.append("drop")
        self.on = dict(self.wanted)

    def end(self, *, kill: bool = False) -> None:
        if not kill:
            self._check()
        self.told.append("kill" if kill else "end")
        if kill or not self.is_slow:
            self.finish(-9 if kill else 0)

    def ended(self) -> RunEnd | None:
        return self.end_

    def end_signal(self) -> None:
        """Nothing: only looking tells."""

    def finish(self, code: int | None) -> None:
        self.on, self.end_ = {}, RunEnd(code, time.time())

    def step(self, first: int, count: int = 1, step_s: float = 0.1) -> None:
        """Write steps into the record."""
        workers = sum(self.on.values())
        facts = [{"kind": "step", "step": first + n, "workers": workers, "step_s": step_s} for n in range(count)]
        self.write(*facts)

    def write(self, *facts: dict[str, object]) -> None:
        with self.run.record.open("a") as file:
            file.writelines(json.dumps({"time_s": 0.0, **fact}) + "\n" for fact in facts)

    def _check(self) -> None:
        if not self.is_up:
            raise ServerUnavailable("it is not up")


class PaperBackend:
    """Devices that only count."""

    def __init__(self, **devices: int) -> None:
        self.counts = devices
        self.runs: dict[str, PaperRun] = {}
        """By job: the last one."""
        self.refuses = ""
        self.loses_starts = False
        """As if the scheduler were killed before it could start what it had written down."""

    def devices(self) -> dict[str, int]:
        return dict(self.counts)

    def start(self, run: JobRun, devices: Counts) -> PaperRun:
        if self.refuses:
            raise LaunchError(self.refuses)
        self.runs[run.spec.name] = PaperRun(run, dict(devices))
        return self.runs[run.spec.name]

    def adopt(self, run: JobRun) -> PaperRun | None:
        found = self.runs.get(run.spec.name)
        return found if found is not None and found.run.number == run.number else None

    def close(self) -> None:
        """Nothing is open."""
