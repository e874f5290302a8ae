"""Files of a running job: whole-file replacement, private files, locks, and lines that a full disk may cost, not the job.

A reader of a file that is replaced sees the old content or the new content, never a part of either. Locks are
`filelock`'s; the kernel releases them however their holder ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import PliantError

if TYPE_CHECKING:
    import filelock

log = logging.getLogger(__name__)

PRIVATE_MODE = 0o600
"""Readable and writable by the owner alone: for files that hold a token or a secret."""


def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace the content of `path`. With `private`, only the owner can read the file.

    Raises:
        OSError: nothing has changed, and no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    data = content.encode() if isinstance(content, str) else content
    try:
        mode = PRIVATE_MODE if private else 0o666
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_private(path: Path, content: str | bytes) -> bool:
    """Create `path`, readable by its owner alone, if it does not exist; return whether this call created it.

    Of two processes that call this at once, one creates the file and the other sees it whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_atomic(temporary, content, private=True)
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def hold_lock(path: Path, refusal: PliantError, *, wait_s: float = 0.0) -> Iterator[filelock.BaseFileLock]:
    """Hold the exclusive lock on the file `path` for the time of the block; the file is created if it is missing.

    Raises:
        PliantError: `refusal`, if another process still holds the lock after `wait_s`.
        OSError: the file cannot be opened.
    """
    import filelock  # here: it takes longer to import than a worker has to spare

    lock = filelock.FileLock(path, timeout=wait_s, mode=PRIVATE_MODE, thread_local=False, poll_interval=0.01)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise refusal from None
    try:
        yield lock
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock on `path`; False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        # Shared, unlike `filelock`'s: two processes that look at the same time must not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- what a full or failing disk costs ---


DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT}
)
"""What a file system that is full, failing, away or read-only answers. It may be in order again later."""
WARNING_PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing in a file, because the disk was full or failing."""

    lost: int
    """The number of lines, or of other parts that the file consists of."""
    first_s: float
    """When the first of them was lost, in Unix time."""
    last_s: float
    why: str
    """The error of the operating system, such as `No space left on device`."""

    def to_line(self) -> bytes:
        """Return the line of a log that stands for the missing ones."""
        return f"[{self.lost} line{'s' if self.lost != 1 else ''} lost: {self.why.lower()}]".encode()


class LossCount:
    """Counts what could not be written to one file, and warns of it at most once a minute."""

    def __init__(self, name: str, unit: str = "lines") -> None:
        """`name` and `unit` are for the warnings: the file, and what is lost."""
        self.gap: Gap | None = None
        """What is lost since the file could be written last."""
        self._name, self._unit = name, unit
        self._warned_s = -float("inf")
        self._is_known = False
        """Whether a warning has told of this gap."""

    def add(self, lost: int, error: OSError) -> None:
        """Count what the error has cost; with 0 it only warns."""
        now_s, why = time.time(), error.strerror or str(error)
        before = self.gap or Gap(0, now_s, now_s, why)
        self.gap = Gap(before.lost + lost, before.first_s, now_s, why)
        if time.monotonic() - self._warned_s >= WARNING_PERIOD_S:
            self._warned_s, self._is_known = time.monotonic(), True
            log.warning(
                "cannot write %s (%s): %d %s are lost so far. The job goes on, and so will this file when there is room",
                self._name, why, self.gap.lost, self._unit,
            )  # fmt: skip

    def end(self) -> None:
        """Begin to count anew: the file can be written again."""
        (gap, self.gap), (is_known, self._is_known) = (self.gap, None), (self._is_known, False)
        if gap is not None and is_known:
            log.warning("%s can be written again: %d %s are missing (%s)", self._name, gap.lost, self._unit, gap.why)


class LineFile:
    """Appends lines to a file or an open descriptor. A full or failing disk costs lines, never an exception.

    Each call tries again, and what is written first comes after a line that says what is missing. A line that was written
    in part is ended before it, so that it does not swallow the next one. What fails for another reason than the disk,
    such as a pipe that nobody reads, is given up with a warning.
    """

    def __init__(self, target: Path | int, name: str = "", describe: Callable[[Gap], bytes] = Gap.to_line) -> None:
        """`name` is for warnings; `describe` returns the line, without its end, that stands for missing ones. The file at a
        path is opened with the first line, and again after each failure."""
        self._path = target if isinstance(target, Path) else None
        self._descriptor = target if isinstance(target, int) else -1
        self._describe, self._name = describe, name or str(target)
        self._losses = LossCount(self._name)
        self._inside_line = False
        self._given_up = False

    def open(self) -> None:
        """Open the file now, with its folder.

        Raises:
            OSError: it cannot be opened.
        """
        if self._descriptor >= 0 or self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._inside_line = _ends_inside_line(self._path, self._descriptor)

    @property
    def gap(self) -> Gap | None:
        """What is missing at the end of the file now."""
        return self._losses.gap

    def append(self, data: bytes) -> None:
        """Append whole lines, or a piece of a line that later calls complete."""
        if self._given_up:
            return
        rest = memoryview(data)
        try:
            self.open()
            if self._losses.gap is not None:
                mark = memoryview(self._describe(self._losses.gap) + b"\n")
                self._end_line()
                while mark:
                    mark = mark[self._write(mark) :]
                self._losses.end()
            while rest:
                rest = rest[self._write(rest) :]
        except OSError as error:
            self._lose(bytes(rest), error)

    def end_line(self) -> None:
        """End a line that was written in part, also by a process that wrote to the file before this one."""
        if self._inside_line:
            self.append(b"\n")

    def close(self) -> None:
        """Close the file, after a line that says what is missing at its end, if there is room for it."""
        if self._losses.gap is not None:
            self.append(b"")
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0 and self._path is not None:
            os.close(self._descriptor)
            self._descriptor = -1

    def _end_line(self) -> None:
        while self._inside_line:
            self._write(memoryview(b"\n"))

    def _write(self, data: memoryview) -> int:
        """Write all or a part of the data, and return how much."""
        try:
            written = os.write(self._descriptor, data)
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(self._descriptor, selectors.EVENT_WRITE)
                selector.select()
            return 0
        self._inside_line = data[written - 1] != ord("\n")
        return written

    def _lose(self, data: bytes, error: OSError) -> None:
        if error.errno in DISK_ERRORS:
            self._losses.add(data.count(b"\n") or len(data) > 0, error)
            self._close()  # the file may have been removed to make room: it is created again
        else:
            self._given_up = True
            log.warning("cannot write %s (%s): the job goes on without it", self._name, error.strerror)


class LineFileHandler(logging.Handler):
    """Writes messages to a file. A full or failing disk costs messages, and no tracebacks on stderr."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened."""
        super().__init__()
        self._file = LineFile(Path(path))
        self._file.open()

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(self.format(record).encode(errors="backslashreplace") + b"\n")

    def close(self) -> None:
        self._file.close()
        super().close()


def _ends_inside_line(path: Path, descriptor: int) -> bool:
    """Return whether a file has a last line without an end."""
    size = os.fstat(descriptor).st_size
    if not size:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"
