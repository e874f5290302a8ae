"""The record of a run: an append-only file of facts, one JSON object per line.

The kinds of facts are `start` (the program and its settings), `step` (measurements), `view` (the workers have changed),
`workers` (their names and topology, at a view's first step), `links` (rates between hosts, if a policy measured them),
`decision` (what a policy has changed, and why) and `end`. The decisions on batch sizes and learning rates are enough to
repeat the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pliant.errors import ConfigError, reason


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
    """Appends facts to a file. Several processes may append to the same file: each line is one write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"record {self.path}: {error.strerror}; give a file that can be written") from None
        self._mend()

    def _mend(self) -> None:
        """End a line that a crash has cut short, so that it does not swallow the next one."""
        size = os.fstat(self._file).st_size
        if size:
            with self.path.open("rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(self._file, b"\n")

    def write(self, kind: str, step: int, **data: Any) -> None:
        """Append a fact. Values that JSON cannot express become text."""
        line = {"kind": kind, "step": step, "time_s": round(time.time(), 3), **data}
        os.write(self._file, json.dumps(line, default=str).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: str | Path) -> list[Fact]:
    """Return all facts of a record, without lines that a crash has cut short.

    Raises:
        ConfigError: there is no such file, or it is no record.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"record {path}: {reason(error)}; give a record.jsonl that a run has written") from None
    parsed = [parse(line) for line in filter(str.strip, lines)]
    facts = [fact for fact in parsed if fact is not None]
    if parsed and not facts:
        raise ConfigError(f"record {path}: not one of its {len(parsed)} lines is a fact; give a record.jsonl of a run")
    return facts


def parse(line: str | bytes) -> Fact | None:
    """Return the fact on a line of a record; None if the line is damaged."""
    try:
        value = json.loads(line)
        return Fact(value.pop("kind"), int(value.pop("step")), float(value.pop("time_s")), value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
