"""The facts that a run adds to its record, read as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
"""At one look; and how far back a scheduler that begins anew looks."""


class Tail:
    """Reads a record from some byte on; lines that are not whole yet are left for later."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        size = _size(path)
        self._at = begin
        self._torn = size - begin > MAX_BYTES
        """Whether the next line has no beginning."""
        if self._torn:
            self._at = size - MAX_BYTES

    def facts(self) -> list[Mapping[str, Any]]:
        """What has come since the last look."""
        if _size(self._path) <= self._at:
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read(MAX_BYTES)
        whole = data.rfind(b"\n") + 1
        self._at += whole
        lines = data[:whole].splitlines()
        if self._torn and lines:
            lines, self._torn = lines[1:], False
        found: list[Mapping[str, Any]] = []
        for line in lines:
            try:
                fact = json.loads(line)
            except ValueError:
                continue  # cut short by a crash: it was never a fact
            if isinstance(fact, dict) and isinstance(fact.get("step"), int):
                found.append(fact)
        return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
