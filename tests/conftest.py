"""Shared by all tests: nothing may be left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Bytecode is kept, whatever the environment says: without it each worker of pytest-xdist needs ten seconds to rewrite the
# assertions of all tests, and each process that a test starts compiles pliant.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: imports leave next to no garbage, and a collection takes 0.2 s


@pytest.fixture(scope="session", autouse=True)
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the jobs of tests out of the user's state directory; tests that set XDG_STATE_HOME have one of their own."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ.pop("PLIANT_HOME", None)
    yield
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what has been imported by now: it would take 0.2 s each time, mostly on torch."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real processes first: they take long and mostly wait, so the others fill the gaps (`pytest -n 2`)."""
    slow = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in slow)  # stable: each file stays in one piece


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where pytest-xdist runs tests in several processes, name a folder for what only one of them has to compute."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["PYTEST_SHARED_FOLDER"] = str(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(autouse=True)
def _path_as_before() -> Iterator[None]:
    """A class of one's own brings the folder of its file along: later tests must not find their modules there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that runs in this process logs to streams that end with its test: later tests must not log there."""
    ours = logging.getLogger("pliant")
    handlers, level, propagate = ours.handlers[:], ours.level, ours.propagate
    yield
    for handler in ours.handlers[:]:
        if handler not in handlers:
            ours.removeHandler(handler)
            handler.close()
    ours.setLevel(level)
    ours.propagate = propagate


NAMES_ITS_MAKER = re.compile(r"(?:sem\.loky-|torch_)(\d+)[-_]")
"""Files of torch, and semaphores of processes that have imported joblib: the number is that of the process."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _shared_memory(before: set[Path] | None = None) -> set[Path]:
    """The files in /dev/shm; with `before`, those that have come since, and that no process but ours made or holds."""
    found = set(Path("/dev/shm").iterdir()) - (before or set())
    if before is None or not found:
        return found
    inodes: dict[str, Path] = {}
    for path in found:
        # A process of another test that was killed holds nothing any more, but its files may stay for a while.
        if (maker := NAMES_ITS_MAKER.match(path.name)) and not _is_ours(int(maker[1])):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile
            inodes[str(path.stat().st_ino)] = path
    # By inode: glibc makes a semaphore under another name than the one that it is linked to, and maps show the former.
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and not _is_ours(int(process.name)):
            with contextlib.suppress(OSError):  # gone meanwhile
                for line in (process / "maps").read_text().splitlines():
                    words = line.split(maxsplit=5)
                    if len(words) == 6 and words[5].startswith("/dev/shm/"):
                        inodes.pop(words[4], None)
    return {path for path in inodes.values() if path.exists()}


def _is_ours(pid: int) -> bool:
    """Whether that process descends from this one; others may run tests, too."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == os.getpid()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves a thread of ours, a descriptor or a file in /dev/shm behind."""
    shm_before = _shared_memory()
    fds_before = _descriptors()
    yield
    deadline_s = time.monotonic() + 5
    gc.collect()  # a mapping holds its descriptor until the last tensor on it is gone
    while time.monotonic() < deadline_s:
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("pliant")]
        files = _shared_memory(shm_before)
        if not threads and not files and _descriptors() <= fds_before:
            break
        time.sleep(0.01)  # pacing a poll with a deadline, not synchronising by it
    assert not threads, f"threads left: {threads}"
    assert _descriptors() <= fds_before, f"{_descriptors() - fds_before} descriptors left open"
    assert not files, f"left in /dev/shm: {files}"
