"""The record of a run: an append-only file of facts, one JSON object per line.

The kinds of facts are `start` (the program and its settings), `step` (measurements), `view` (the workers have changed),
`workers` (their names and topology, at a view's first step), `links` (rates between hosts, if a policy measured them),
`decision` (what a policy has changed, and why), `stall` (a worker that keeps the others waiting, with its stack), `gap`
(how many facts are missing here, because the disk was full or failing) and `end`. A federated job writes `round`, `test`,
`workers` (its worker processes) and `work` (how long a round really took, and who was waited for). The decisions on batch sizes and learning rates are enough to repeat the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pliant.errors import ConfigError, reason
from pliant.files import DISK_ERRORS, Gap, LineFile
from pliant.json_text import NestedTooDeeplyError, parse_json

MAX_LINE_BYTES = 2 << 20
"""A longer line is no fact: that of 10,000 workers has 400 KB."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a record."""

    kind: str
    step: int
    """Steps committed when it was written."""
    time_s: float
    """Unix time."""
    data: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Appends facts to a file. Several processes may append to the same file: each line is one write.

    A full or failing disk costs facts and a warning, never an exception. When there is room again, a fact `gap` comes
    first: `lost` facts are missing, from `from_s` to `to_s`, because of `why`.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, and end a line that a crash has cut short, so that it does not swallow the next one.

        Raises:
            ConfigError: it cannot be opened, for another reason than the state of the disk.
        """
        self.path = Path(path)
        self._step = 0
        self._file = LineFile(self.path, f"record {path}", self._describe_gap)
        try:
            self._file.open()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise ConfigError(f"record {self.path}: {error.strerror}; give a file that can be written") from None
        self._file.end_line()

    def write(self, kind: str, step: int, **data: Any) -> None:
        """Append a fact. Values that JSON cannot express become text."""
        self._step = step
        self._file.append(_to_line(kind, step, data) + b"\n")

    @property
    def gap(self) -> Gap | None:
        """The facts that are missing at the end of the file now."""
        return self._file.gap

    def _describe_gap(self, gap: Gap) -> bytes:
        seen = {"lost": gap.lost, "from_s": round(gap.first_s, 3), "to_s": round(gap.last_s, 3), "why": gap.why}
        return _to_line("gap", self._step, seen)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _to_line(kind: str, step: int, data: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "step": step, "time_s": round(time.time(), 3), **data}, default=str).encode()


def read(path: str | Path) -> list[Fact]:
    """Return all facts of a record, without lines that a crash has cut short.

    Raises:
        ConfigError: there is no such file, or it is no record.
    """
    remedy = "give a record.jsonl that a run has written"
    facts: list[Fact] = []
    number = num_lines = 0
    try:
        with Path(path).open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"record {path}: line {number} has more than {MAX_LINE_BYTES} bytes; {remedy}")
                if text := line.decode().strip():
                    num_lines += 1
                    facts += [fact] if (fact := _fact(text)) is not None else []
    except NestedTooDeeplyError as error:
        raise ConfigError(f"record {path}: line {number}: {error}; {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"record {path}: {reason(error)}; {remedy}") from None
    if num_lines and not facts:
        raise ConfigError(f"record {path}: not one of its {num_lines} lines is a fact; give a record.jsonl of a run")
    return facts


def parse(line: str | bytes) -> Fact | None:
    """Return the fact on a line of a record; None if the line is damaged."""
    try:
        return _fact(line)
    except NestedTooDeeplyError:
        return None


def _fact(line: str | bytes) -> Fact | None:
    try:
        value = parse_json(line)
        return Fact(value.pop("kind"), int(value.pop("step")), float(value.pop("time_s")), value)
    except NestedTooDeeplyError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
