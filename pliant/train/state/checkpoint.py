"""Checkpoints in a directory: written in the background while training goes on, found again after a crash.

A checkpoint holds all of a job at the end of one step and can be loaded by any number of workers. It appears under
its name only when it is whole and on the disk, and whoever reads it checks its sum: a torn one is named, and the
one before it is used. `checkpoint_file` knows what is in a file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pliant.errors import CheckpointError, TrainError
from pliant.train.state.checkpoint_file import Checkpoint, Image, opened, read, read_header, verify

__all__ = ["Checkpoint", "Writer", "load", "newest", "write"]

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_STEP_NAME = re.compile(r"step-(\d{9,})\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer:
    """Writes checkpoints in the background, one at a time, and keeps the last few.

    `save` returns when the state is copied; a failure to write is told by `say`, and training goes on.
    """

    def __init__(self, directory: str | Path, keep: int = 2, say: Callable[[str], None] = log.warning) -> None:
        if keep < 1:
            raise TrainError(f"keep={keep}: at least 1 checkpoint must be kept")
        self._directory = Path(directory)
        self._keep = keep
        self._say = say
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._copies: list[torch.Tensor] = []  # the last snapshot: the next one has mostly the same shapes
        self.latest: Path | None = None
        """The last one that is whole and on the disk."""

    def save(self, checkpoint: Checkpoint, name: str | None = None) -> None:
        """Copy the state, and write it in the background; waits for the write before it.

        Without a name the file is called after the step, and removed when `keep` newer ones are there.
        """
        path = self._directory / _file_name(checkpoint.step, name)
        with self._lock:
            self._join()
            image = Image(checkpoint, into=self._copies)
            self._copies = image.tensors
            # No daemon: the interpreter waits for it, so that a program that ends in good order loses no checkpoint.
            self._thread = threading.Thread(target=self._write, args=(path, image), name="pliant-checkpoint")
            self._thread.start()

    def flush(self) -> None:
        """Wait until nothing is being written."""
        with self._lock:
            self._join()

    def close(self) -> None:
        """Wait for the last write, and give the memory back."""
        with self._lock:
            self._join()
            self._copies = []

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, path: Path, image: Image) -> None:
        try:
            image.write(path)
        except OSError as error:
            self._say(f"{_failure(path, image.nbytes, error)}. Training goes on; the next save tries again")
            return
        self.latest = path
        with contextlib.suppress(OSError):  # not worth a message: the next save tries again
            self._prune(path)

    def _prune(self, written: Path) -> None:
        """Remove what is too old. Files of later steps are another run's, and neither counted nor removed."""
        step = _step_of(written)
        if step is None:
            return
        steps = {path: found for path in written.parent.iterdir() if (found := _step_of(path)) is not None}
        ours = sorted((path for path, found in steps.items() if found <= step), key=lambda path: steps[path])
        for path in ours[: -self._keep]:
            path.unlink(missing_ok=True)


def write(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint to this file, now. Raises CheckpointError if it cannot be written."""
    image = Image(checkpoint, into=None)
    try:
        image.write(Path(path))
    except OSError as error:
        raise CheckpointError(_failure(Path(path), image.nbytes, error)) from None


def load(path: str | Path, say: Callable[[str], None] = log.warning) -> Checkpoint:
    """The checkpoint in this file, or the newest good one of this directory; its tensors are on the CPU."""
    path = Path(path)
    if not path.is_dir():
        return read(path)
    for candidate in _newest_first(path, say):
        try:
            return read(candidate)
        except CheckpointError as error:
            say(f"{error}; the one before it is used")
    raise CheckpointError(f"{path} holds no whole checkpoint: name another file or directory, or start afresh")


def newest(directory: str | Path, say: Callable[[str], None] = log.warning) -> Path | None:
    """The newest checkpoint of the directory whose sum holds; None if there is none, or no such directory."""
    if not Path(directory).is_dir():
        return None
    for candidate in _newest_first(Path(directory), say):
        try:
            verify(candidate)
        except CheckpointError as error:
            say(f"{error}; the one before it is used")
        else:
            return candidate
    return None


def _newest_first(directory: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """By step, then by age. Files of others are passed over in silence, ours with a damaged header with a warning."""
    found: list[tuple[int, float, Path]] = []
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            with opened(path) as file:
                found.append((read_header(file, path).step, path.stat().st_mtime, path))
        except (CheckpointError, OSError) as error:
            if _step_of(path) is not None:
                say(f"{error}; the one before it is used")
    for _, _, path in sorted(found, reverse=True):
        yield path


def _step_of(path: Path) -> int | None:
    """The step in the name of a file that was named after it."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _file_name(step: int, name: str | None) -> str:
    if name is None:
        return f"step-{step:09d}{SUFFIX}"
    if not _NAME.fullmatch(name):
        raise TrainError(f"a checkpoint cannot be named {name!r}: use letters, digits, and _ . + -")
    return name if name.endswith(SUFFIX) else name + SUFFIX


def _failure(path: Path, nbytes: int, error: OSError) -> str:
    if error.errno in _FULL:
        try:
            free = f", {shutil.disk_usage(path.parent).free:,} free"
        except OSError:
            free = ""
        room, remedy = f" ({nbytes:,} bytes needed{free})", "free some space, keep fewer, or name another directory"
    else:
        room, remedy = f" ({nbytes:,} bytes)", "make it a directory this user may write to, or name another one"
    return f"checkpoint {path} not written{room}: {error.strerror or error}: {remedy}"
