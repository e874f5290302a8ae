"""Full disks for tests: a file system of a few kB that is filled and freed, and a limit on the size of files."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited_files(max_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this size: a write is short first, and then fails. Needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SmallDisk:
    """A file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no room at all."""
        file = os.open(self._filler, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(file, bytes(4096))
        os.close(file)

    def free(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str = "64k") -> Iterator[SmallDisk]:
    """Mount a small disk at `path`, or skip the test."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("a small file system needs root; the file size limit is tested instead")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)
