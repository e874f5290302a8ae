"""The name of a worker in `ps`, `top` and `nvidia-smi`: the program that it runs, and its rank.

Needs only the standard library. `nvidia-smi` and `ps -f` show the command line, which is memory of the process itself: it is
overwritten in place, where the kernel says that it lies. `top` and `ps` show the name of the main thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/PID/stat after the name, from 0: where the command line begins and ends."""


def program_name() -> str:
    """Return the program of this process as it was typed: `train.py`, or `package.train`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0] or "python"


def make_title(program: str, rank: int, room: int) -> bytes:
    """Return `train.py [pliant rank 0]` in at most `room` bytes; what is too long is cut at its beginning.

    Arguments are left out: `nvidia-smi` shows about 30 characters, the last ones.
    """
    title = os.fsencode(f"{program} [pliant rank {rank}]")
    return title if len(title) <= room else title[len(title) - room :]


def show_as(program: str, rank: int) -> None:
    """Show this process as the worker of this rank that runs `program`. Does nothing where the kernel does not let it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if 0 < begin < end:
            # The last byte stays 0: otherwise the kernel would look for the end in the environment.
            room = end - begin - 1
            ctypes.memmove(begin, make_title(program, rank, room).ljust(room, b"\0"), room)
        with open("/proc/self/comm", "wb") as name:
            name.write(os.fsencode(os.path.basename(program))[:15])
