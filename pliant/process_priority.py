"""Shares of busy cores: smaller for a worker that warms up beside others, or has left them, and for who forks workers.

Needs only the standard library. Linux has two such numbers: that of each thread, and, where sessions are scheduled as groups
(autogroup), that of the session, and then only this counts between sessions. A worker has a session of its own. Everybody may
lower the first, but only some may raise it again: root, usually, and who has a limit for it. It stays as it is for others.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress

NICE_VARIABLE = "PLIANT_NICE"
"""In the environment of a worker that is to step back: the `nice` value to which it comes back, or `own` if it could not."""
WARM_UP_NICE = 4
"""How much nicer a worker is that warms up: beside one that trains on the same core, it gets less than a third of it."""
LEAVING_NICE = 10
"""How much nicer a worker is that has left a job which goes on."""
_CAP_SYS_NICE = 23


def can_come_back(nice: int) -> bool:
    """Whether a process like this one may return to the value `nice` after it was nicer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return soft == resource.RLIM_INFINITY or 20 - soft <= nice or _has_right()


def _has_right() -> bool:
    try:
        with open("/proc/self/status") as file:
            words = next(line for line in file if line.startswith("CapEff:")).split()
    except (OSError, StopIteration):
        return False
    return bool(int(words[1], 16) >> _CAP_SYS_NICE & 1)


def warm_up_environ() -> dict[str, str]:
    """Return the variable by which a new worker steps back until it is warm."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return {NICE_VARIABLE: str(nice) if can_come_back(nice) else "own"}


def step_back() -> None:
    """Take a smaller share if the environment says so. Threads that are started later get the same."""
    if NICE_VARIABLE in os.environ:
        _set_session(WARM_UP_NICE)
        if os.environ[NICE_VARIABLE] != "own":
            os.nice(WARM_UP_NICE)


def come_back() -> None:
    """Take this worker's full share again, with all its threads, if it has stepped back."""
    nice = os.environ.pop(NICE_VARIABLE, None)
    if nice is None:
        return
    _set_session(0)
    if nice != "own":
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, int(thread), int(nice))


def leave() -> None:
    """Take a small share until this process ends."""
    _set_session(LEAVING_NICE)
    os.nice(LEAVING_NICE)


def step_aside() -> int:
    """Take a small share for this process, which only forks others, and return the value that those take up again.

    A fork copies the tables of all memory, which workers that train on the same cores would feel.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _set_session(LEAVING_NICE)
    if can_come_back(nice):
        os.nice(LEAVING_NICE)
    return nice


def take_up(nice: int) -> None:
    """In a fork of a process that has stepped aside, and in a session of its own: take the full share."""
    if os.getpriority(os.PRIO_PROCESS, 0) != nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def _set_session(nice: int) -> None:
    """Set the value of this process's session, which is its own. Does nothing where there is none."""
    if os.getsid(0) == os.getpid():
        with suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
