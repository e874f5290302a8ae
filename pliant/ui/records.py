"""Records on this machine as places where jobs are found: one file, or all those in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pliant.ui.jobs import add_logs, logs_beside
from pliant.ui.seen import Seen

RECORD = "record.jsonl"
MOST_RECORDS = 500
MOST_DEPTH = 6
LOG_EVERY = 10
"""New records in a folder, and log files beside one, are looked for at every so many looks."""


class Records:
    """A record, or all those in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looks = 0

    def look(self, seen: Seen) -> None:
        if self._path.is_file():
            self._show(self._path, self._path.stem if self._path.name != RECORD else self._path.parent.name, seen)
        elif self._looks % LOG_EVERY == 0:
            found = list(records_in(self._path))
            for path in found:
                self._show(
                    path,
                    str(path.parent.relative_to(self._path)) if path.parent != self._path else path.parent.name,
                    seen,
                )
            if not found:
                seen.problems[str(self._path)] = f"no {RECORD} in {self._path} yet"
            else:
                seen.problems.pop(str(self._path), None)
        self._looks += 1

    def _show(self, path: Path, name: str, seen: Seen) -> None:
        job = seen.record(path, name)
        if self._looks % LOG_EVERY == 0:
            add_logs(job, logs_beside(path))


def records_in(folder: Path) -> Iterator[Path]:
    """The records below, not too deep, and not too many."""
    depth, count = len(folder.parts), 0
    for place, folders, files in os.walk(folder):
        if len(Path(place).parts) - depth >= MOST_DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "checkpoints")
        if RECORD in files:
            yield Path(place) / RECORD
            count += 1
        if count >= MOST_RECORDS:
            return
