"""Processes that must not outlive their parent, and the end of what a killed runner leaves behind.

Also a script with two uses, which needs only the standard library, so that it starts in 20 ms:

- `child.py <parent's pid> <program> [args...]` ties its life to the parent's and becomes the program. It is the first thing
  that a worker runs. A `preexec_fn` would not do: the parent has threads, and Python code between fork and exec can deadlock
  on a lock that another thread held at the fork. Here it is a fresh, single-threaded process.
- `child.py guard <job mark>` is the guardian of a runner, with a pipe as stdin. PR_SET_PDEATHSIG ends a worker when its runner
  is killed, but not the worker's own children. The kernel closes the other end of the pipe however the runner ends, and the
  guardian then kills every process group of the job and every process that carries the job's mark in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37

JOB_MARK = "PLIANT_JOB"
"""The environment variable that every process of a job inherits."""
KILL_S = 5.0
MAX_REQUEST_BYTES = 1 << 20
"""The largest message between a runner and its warm process."""


def start_ticks(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks since boot; None if it does not exist or is a zombie.

    Process id and start time together identify a process: ids are used again.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    # The name of the program, in parentheses, may itself hold spaces and parentheses.
    words = text.rpartition(")")[2].split()
    return None if words[0] in ("Z", "X") else int(words[19])


STOPPED = ("T", "t")
"""States of a process that was stopped by a signal, or by a debugger."""


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, as in `ps`; empty if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in ("Z", "X") else state


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the call above, and then no signal will ever come.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


_adopting = threading.RLock()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of its descendants whose own parent ends within the block; else init would be."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    with _adopting:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap(pid: int) -> int:
    """Wait for the end of a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become(command: list[str]) -> None:
    """Exec `command`; only returns, by exiting, where that fails."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        hint = ": start it with its interpreter, as in `python3 FILE`" if error.errno == 8 else ""
        print(f"pliant: cannot run {command[0]}: {error.strerror}{hint}", file=sys.stderr, flush=True)
        os._exit(126)


# --- what a killed runner leaves behind ---


def marked_processes(mark: str) -> set[int]:
    """Return the processes that carry `mark`, other than this one and those that are dead already."""
    needle = f"{JOB_MARK}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.add(int(name))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


def kill_group(group: int, signum: int) -> None:
    """Send `signum` to a process group; nothing happens if it is gone."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return


def kill_marked(mark: str, deadline_s: float) -> set[int]:
    """Kill all processes that carry `mark`, again until none does; return those that are left at the deadline.

    Again, because a process may fork between the look and the kill.
    """
    while True:
        left = marked_processes(mark)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.005)


def guard_job(mark: str, pipe: int) -> None:
    """Follow the runner's notes (`+<group>`, `-<group>`) until the pipe closes, then end what is left."""
    groups: set[int] = set()
    with open(pipe, "rb", buffering=0) as notes:
        pending = b""
        while chunk := notes.read(4096):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group, signal.SIGKILL)
    kill_marked(mark, time.monotonic() + KILL_S)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        # A signal to the whole process group of the terminal must not end the guardian before the runner.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ignored, signal.SIG_IGN)
        guard_job(sys.argv[2], 0)
    else:
        die_with(int(sys.argv[1]))
        # Python ignores SIGPIPE and SIGXFSZ for itself; the program shall start with the usual defaults.
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        become(sys.argv[2:])
