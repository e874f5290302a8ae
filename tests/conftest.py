"""Shared by all tests: nothing may be left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what has been imported by now: it would take 0.2 s each time, mostly on torch."""
    gc.collect()
    gc.freeze()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves a thread of ours, a descriptor or a file in /dev/shm behind."""
    shm_before = set(Path("/dev/shm").iterdir())
    fds_before = _descriptors()
    yield
    deadline_s = time.monotonic() + 5
    gc.collect()  # a mapping holds its descriptor until the last tensor on it is gone
    while time.monotonic() < deadline_s:
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("pliant")]
        if not threads and _descriptors() <= fds_before:
            break
        time.sleep(0.01)  # pacing a poll with a deadline, not synchronising by it
    assert not threads, f"threads left: {threads}"
    assert _descriptors() <= fds_before, f"{_descriptors() - fds_before} descriptors left open"
    assert set(Path("/dev/shm").iterdir()) <= shm_before
