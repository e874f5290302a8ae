"""Files that others append to, read as they grow: records, and what programs print."""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path

from pliant.record import Fact

MOST_BYTES = 2 << 20
"""At one look: a large record is taken in over several, so that a page shows its beginning meanwhile."""
MOST_LINES = 2000
"""Of a log, the newest."""
_CONTROLS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours, titles and movements of a terminal; none of it may reach the reader's."""


class Growing:
    """A file's lines as they come; those that are not whole yet are left for later."""

    def __init__(self, path: Path, *, newest_bytes: int | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self._at = 0
        self._inode = -1

    def lines(self) -> tuple[list[bytes], bool]:
        """What has come since the last look; and whether the file is another one now, or was begun anew."""
        try:
            status = self.path.stat()
        except OSError:
            return [], False
        is_new = self._inode not in (-1, status.st_ino) or status.st_size < self._at
        if is_new or self._inode == -1:
            self._inode, self._at = status.st_ino, 0
            if self._newest_bytes is not None:
                self._at = max(0, status.st_size - self._newest_bytes)
        if status.st_size <= self._at:
            return [], is_new
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read(MOST_BYTES)
        except OSError:
            return [], is_new
        whole = data.rfind(b"\n") + 1
        self._at += whole
        return data[:whole].splitlines(), is_new

    @property
    def is_read(self) -> bool:
        """Whether a look would bring nothing new."""
        try:
            return self.path.stat().st_size <= self._at
        except OSError:
            return True


class RecordFile:
    """The facts of a record as they come."""

    def __init__(self, path: Path) -> None:
        self._file = Growing(path)

    @property
    def path(self) -> Path:
        return self._file.path

    def facts(self) -> tuple[list[Fact], bool]:
        """What has come since the last look, and whether it is the beginning of another record."""
        lines, is_new = self._file.lines()
        return [fact for line in lines if (fact := fact_in(line)) is not None], is_new

    @property
    def is_read(self) -> bool:
        return self._file.is_read


class LogFile:
    """The newest lines of what a program prints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Growing(path, newest_bytes=256 << 10)
        self.text: deque[str] = deque(maxlen=MOST_LINES)
        self.num_lines = 0

    def look(self) -> None:
        lines, is_new = self._file.lines()
        if is_new:
            self.text.clear()
        self.num_lines += len(lines)
        self.text.extend(line.decode(errors="replace") for line in lines)


def fact_in(line: bytes) -> Fact | None:
    """The fact on a line; None if there is none, as where a crash has cut it short."""
    try:
        value = json.loads(line)
        return Fact(value.pop("kind"), int(value.pop("step")), float(value.pop("time_s")), value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def plain(text: str) -> str:
    """What others have written, without what a terminal would obey; lines and tabs stay."""
    return _CONTROLS.sub("", text)
