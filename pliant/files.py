"""Files that several processes share: whole-file replacement, files only their owner can read, and locks.

A reader of a file written here sees the old content or the new content, never a part of either. Locks are
`filelock`'s; the kernel releases them however their holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import PliantError

if TYPE_CHECKING:
    import filelock

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
