"""The network namespaces of labs: listing them, entering one with a thread, and removing a whole lab.

All state of a lab is in the names of its namespaces (`pliant-<lab>-br`, `pliant-<lab>-h0`, ...); there is no state file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pliant.errors import LabError

REMOVE_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 20.0
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"pliant-([A-Za-z0-9_]{1,24})-(br|h\d+)")
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def labs() -> dict[str, int]:
    """Return every lab on this machine, whoever made it, and its number of hosts."""
    found: dict[str, int] = {}
    for namespace in _namespaces():
        matched = _NAME.fullmatch(namespace)
        if matched is not None:
            found[matched[1]] = found.get(matched[1], 0) + (matched[2] != "br")
    return dict(sorted(found.items()))


def remove(name: str) -> None:
    """Kill whatever runs in the lab `name` and delete its namespaces; nothing happens if there is none.

    Raises:
        LabError: a process in it does not die.
    """
    ours = [namespace for namespace in _namespaces() if _lab_of(namespace) == name]
    inodes = {(_NAMESPACES / namespace).stat().st_ino for namespace in ours}
    _kill_inside(inodes)
    for namespace in ours:
        with contextlib.suppress(LabError):  # somebody else removed it at the same time
            command("ip", "netns", "del", namespace)
    # A process may have entered while the first pass ran; with the names gone, no other can follow.
    _kill_inside(inodes)


def enter(namespace: str) -> None:
    """Move the calling thread, and those that it will start, into one of a lab's `namespaces`, for good.

    Raises:
        LabError: there is no such namespace.
    """
    try:
        with open(_NAMESPACES / namespace, "rb") as handle:
            _libc_call("setns", handle.fileno(), _CLONE_NEWNET)
    except OSError as error:
        raise LabError(f"namespace {namespace}: {error}; is the lab up? see `pliant lab list`") from error


def in_namespace(namespace: str, work: Callable[[], T]) -> T:
    def enter_and_work() -> T:
        enter(namespace)
        return work()

    return _on_own_thread(enter_and_work)


def in_scratch_namespace(work: Callable[[], T]) -> T:
    def enter_and_work() -> T:
        _libc_call("unshare", _CLONE_NEWNET)
        return work()

    return _on_own_thread(enter_and_work)


def _on_own_thread(work: Callable[[], T]) -> T:
    # A namespace is a property of a thread, so the work gets a thread of its own, which ends here.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(work).result()


def _libc_call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def command(*argv: str, text: str = "", pass_fds: Sequence[int] = ()) -> str:
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, pass_fds=pass_fds
        )
    except FileNotFoundError:
        raise LabError(f"`{argv[0]}` not found: apt-get install iproute2") from None
    except subprocess.TimeoutExpired:
        raise LabError(
            f"`{' '.join(argv)}` hangs: not done after {COMMAND_TIMEOUT_S:g} s; is the machine very busy? try again"
        ) from None
    if done.returncode != 0:
        detail = f" {text.strip()!r}" if text else ""
        raise LabError(f"`{' '.join(argv)}`{detail} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _namespaces() -> list[str]:
    try:
        return sorted(os.listdir(_NAMESPACES))
    except FileNotFoundError:  # no namespace was ever made on this machine
        return []


def _lab_of(namespace: str) -> str | None:
    matched = _NAME.fullmatch(namespace)
    return matched[1] if matched else None


def _processes_inside(inodes: set[int]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie, which is in no namespace
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes:
                    yield int(entry)


def _kill_inside(inodes: set[int]) -> None:
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    while pids := list(_processes_inside(inodes)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {pids} do not die {REMOVE_TIMEOUT_S:g} s after SIGKILL; see /proc/<pid>/stack")
        time.sleep(0.002)
