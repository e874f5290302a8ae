"""What the processes of a training job wrote down, put together; and whether two jobs did the same, bit for bit.

A job's journals are one file of JSON lines for each of its processes (`digits.Journal`). They are read while they
grow, and a process that was killed may have left half a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(slots=True)
class Change:
    """A change of view, as those saw it who stayed."""

    step: int
    """The first step of the new view."""
    old_size: int
    new_size: int
    pause_s: float
    """The longest that one of them saw."""
    lost: bool
    at_s: float
    """When the last of them went on; of the machine's monotonic clock."""


@dataclass(slots=True)
class Step:
    """One step of all replicas, as often as it was done."""

    losses: dict[int, set[float]] = field(default_factory=dict)
    """By replica; of a step that was torn and done again, all attempts."""
    digests: set[str] = field(default_factory=set)
    """Of parameters, buffers and optimizer after it, from all processes that wrote it down."""
    workers: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    """Processes by rank."""
    num_losses: int = 0
    num_digests: int = 0

    @property
    def loss(self) -> float:
        """The mean over the replicas."""
        return fmean(min(values) for values in self.losses.values())


class Ledger:
    """The journals in `folder`; `read` takes in what is new."""

    def __init__(self, folder: Path) -> None:
        self.steps: dict[int, Step] = {}
        self.changes: list[Change] = []
        self.accuracy: float | None = None
        """On the held-out images, once the job has ended."""
        self.last_step = -1
        """The last step that is written down with its digest."""
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def read(self) -> None:
        new = [line for path in sorted(self._folder.glob("*.jsonl")) for line in self._new_lines(path)]
        # Of several processes, and of a step that was done twice, the last word counts.
        for line in sorted(new, key=lambda each: float(each["at_s"])):
            take = {"turn": self._turn, "state": self._state, "change": self._change, "end": self._end}[line["kind"]]
            take(line)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read_bytes[path] = self._read_bytes.get(path, 0) + whole
        for line in data[:whole].splitlines():
            yield {**json.loads(line), "pid": int(path.stem)}

    def _turn(self, line: dict[str, Any]) -> None:
        step = self.steps.setdefault(line["step"], Step())
        if step.workers != line["workers"]:
            step.workers, step.pids = line["workers"], {}
        step.pids[line["rank"]] = line["pid"]
        step.losses.setdefault(line["replica"], set()).add(line["loss"])
        step.num_losses += 1

    def _state(self, line: dict[str, Any]) -> None:
        step = self.steps.setdefault(line["step"], Step())
        step.digests.add(line["digest"])
        step.num_digests += 1
        self.last_step = max(self.last_step, line["step"])

    def _change(self, line: dict[str, Any]) -> None:
        for known in self.changes:
            if (known.step, known.new_size) == (line["step"], line["new_size"]):
                known.pause_s = max(known.pause_s, line["pause_s"])
                known.at_s = max(known.at_s, line["at_s"])
                known.lost = known.lost or line["lost"]
                return
        names = ("step", "old_size", "new_size", "pause_s", "lost", "at_s")
        self.changes.append(Change(**{name: line[name] for name in names}))

    def _end(self, line: dict[str, Any]) -> None:
        self.accuracy = line["accuracy"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two jobs did the same."""

    num_steps: int
    num_digests: int
    """Written down by the workers of the second job, and compared."""
    num_losses: int
    first_difference: int | None
    """The first step that is not the same; None if all are."""
    what: str = ""
    """How it differs."""

    @property
    def identical(self) -> bool:
        return self.first_difference is None


def compare(oracle: Ledger, other: Ledger, *, num_steps: int, replicas: int) -> Verdict:
    """Compare every digest and every loss of all `num_steps` steps; what is missing differs, too."""
    first, what = None, ""
    for number in range(num_steps):
        what = _difference(oracle.steps.get(number, Step()), other.steps.get(number, Step()), replicas)
        if what:
            first = number
            break
    beyond = sorted(number for number in {*oracle.steps, *other.steps} if number >= num_steps)
    if first is None and beyond:
        first, what = beyond[0], f"there should be {num_steps} steps only"
    return Verdict(
        num_steps=num_steps,
        num_digests=sum(step.num_digests for step in other.steps.values()),
        num_losses=sum(step.num_losses for step in other.steps.values()),
        first_difference=first,
        what=what,
    )


def _difference(expected: Step, found: Step, replicas: int) -> str:
    """How a step differs; empty if it does not."""
    for whose, step in (("DDP", expected), ("pliant", found)):
        if not step.digests or len(step.losses) != replicas:
            return f"{whose} has {len(step.digests)} digests and losses of {len(step.losses)} of {replicas} replicas"
    for replica in range(replicas):
        if expected.losses[replica] != found.losses[replica]:
            return f"loss of replica {replica}: DDP {_listed(expected.losses[replica])}, pliant {_listed(found.losses[replica])}"
    if expected.digests != found.digests or len(expected.digests) != 1:
        return f"SHA-256 of the state: DDP {_listed(expected.digests)}, pliant {_listed(found.digests)}"
    return ""


def _listed(values: set[float] | set[str]) -> str:
    return " and ".join(sorted(map(str, values)))
