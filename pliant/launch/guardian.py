"""Ends what a job leaves behind: the runner's helper process, and the sweep that both use.

PR_SET_PDEATHSIG (child.py) ends a worker when its runner is killed, but not the worker's own
children. So the runner keeps a small process beside it that holds the reading end of a pipe: the kernel closes the
other end however the runner ends, and the guardian then kills every process group of the job and
every process that carries the job's mark in its environment (a child may have left the group).

Only the standard library, so that it starts in 20 ms: `guardian.py <job mark>`, the pipe as stdin.
"""

from __future__ import annotations

import os
import signal
import sys
import time

MARK = "PLIANT_JOB"
"""The environment variable that every process of a job inherits."""
SWEEP_S = 5.0


def marked(mark: str) -> set[int]:
    """The processes that carry `mark`, other than this one and those that are dead already."""
    needle = f"{MARK}={mark}".encode()
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


def sweep(mark: str, deadline_s: float) -> set[int]:
    """Kill all that carries `mark`, again until nothing does; what is left at the deadline is returned.

    Again, because a process may fork between the look and the kill.
    """
    while True:
        left = marked(mark)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.005)


def guard(mark: str, pipe: int) -> None:
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
    sweep(mark, time.monotonic() + SWEEP_S)


if __name__ == "__main__":
    # A signal to the whole process group of the terminal must not take the guardian before the runner.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    guard(sys.argv[1], 0)
