"""A process that must not outlive its parent: ties its life to the parent's and, started as a script, becomes the program.

As a script it is the first thing that a worker runs, with only the standard library: `child.py <parent's pid> <program>
[args...]`. A trampoline and not `preexec_fn`: the parent has threads, and Python code between fork and exec can
deadlock on a lock that another thread held at the fork. Here it is a fresh, single-threaded process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the call above, and then no signal will ever come.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def become(command: list[str]) -> None:
    """Exec `command`; only returns, by exiting, where that fails."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        hint = ": start it with its interpreter, as in `python3 FILE`" if error.errno == 8 else ""
        print(f"pliant: cannot run {command[0]}: {error.strerror}{hint}", file=sys.stderr, flush=True)
        os._exit(126)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    # Python ignores SIGPIPE and SIGXFSZ for itself; the program shall start with the usual defaults.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    become(sys.argv[2:])
