"""How a worker ended: its cause, its exit code, and both in words."""

from __future__ import annotations

import signal
from enum import Enum

from pliant.errors import GIVEN_UP, GIVEN_UP_EXIT, LOST_PEER_EXIT, PROGRAM_EXIT

_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Cause(Enum):
    """Why a worker ended before its work was done."""

    PROGRAM = "program"
    """It failed by itself: an exception, an exit code, a signal that a program brings on itself, or no memory."""
    OUTSIDE = "outside"
    """It was killed from outside, as by a scheduler that takes a machine back, or had lost another worker."""


def cause_of(code: int, *, out_of_memory: bool = False) -> Cause:
    """Return why a worker ended with `code` (negative: killed by that signal). A shell between it and the runner turns a signal
    into an exit code."""
    is_kill = -code in _KILLS or code - 128 in _KILLS
    is_loss = code in (LOST_PEER_EXIT, GIVEN_UP_EXIT)
    return Cause.OUTSIDE if (is_kill and not out_of_memory) or is_loss else Cause.PROGRAM


def exit_code(code: int) -> int:
    """Return a shell's exit code for a process that ended with `code` (negative: killed by that signal)."""
    return 128 - code if code < 0 else code


def describe_exit(code: int, *, out_of_memory: bool = False) -> str:
    """Return `exit code 3`, or `killed by SIGSEGV`."""
    if code == PROGRAM_EXIT:
        return f"a mistake in the program (exit code {code})"
    if code == LOST_PEER_EXIT:
        return f"it has lost another worker (exit code {code})"
    if code == GIVEN_UP_EXIT:
        return f"{GIVEN_UP} (exit code {code})"
    if code == 128 + signal.SIGTERM:
        return f"ended by SIGTERM (exit code {code})"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}{': the machine, or its container, was out of memory' if out_of_memory else ''}"
