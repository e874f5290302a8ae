"""The name of a worker in `ps`, `top` and `nvidia-smi`: the program that it runs, and its rank.

Needs only the standard library. `nvidia-smi` and `ps -f` show the command line, which is memory of the process itself: it is
overwritten in place, where the kernel says that it lies. `top` and `ps` show the name of the main thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/PID/stat after the name, from 0: where the command line begins and ends."""


def program_words() -> list[str]:
    """Return the program of this process and its arguments: `["train.py", "--lr", "0.1"]`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0] or "python"
    return [name, *sys.argv[1:]]


def make_title(words: Sequence[str], rank: int, room: int) -> str:
    """Return `train.py --lr 0.1 [pliant rank 0]` in at most `room` bytes; the arguments are cut first."""
    suffix = f" [pliant rank {rank}]"
    program, arguments = words[0], "".join(f" {word}" for word in words[1:])
    left = room - len(os.fsencode(program + suffix))
    if len(os.fsencode(arguments)) > left:
        arguments = os.fsdecode(os.fsencode(arguments)[: max(0, left - 3)]) + "..." if left > 3 else ""
    return os.fsdecode(os.fsencode(program + arguments + suffix)[:room])


def show_as(words: Sequence[str], rank: int) -> None:
    """Show this process as the program `words` of this rank. Does nothing where the kernel does not let it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if 0 < begin < end:
            # The last byte stays 0: otherwise the kernel would look for the end in the environment.
            room = end - begin - 1
            ctypes.memmove(begin, os.fsencode(make_title(words, rank, room)).ljust(room, b"\0"), room)
        with open("/proc/self/comm", "wb") as name:
            name.write(os.fsencode(os.path.basename(words[0]))[:15])
