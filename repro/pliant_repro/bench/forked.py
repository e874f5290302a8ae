"""The ranks of a bench as children of one process that has loaded torch for them, which saves minutes where there are many."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import IO, cast

from pliant.child import die_with
from pliant_repro.lab.namespaces import enter

Serve = Callable[[int, IO[bytes], IO[bytes]], int]
"""Be a rank that is told what to do on the first line, and answers on the second; the exit status."""


def speak(rank: int, control: str, serve: Serve) -> int:
    """Be one rank that talks over the Unix socket `control`; the exit status."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(control)
    return serve(rank, line.makefile("rb"), cast("IO[bytes]", line.makefile("wb", buffering=0)))


def fork_ranks(control: str, namespaces: Sequence[str], serve: Serve) -> int:
    """A rank in each of these namespaces (empty: this one); waits until all have ended, and gives the worst exit status."""
    children, parent = [], os.getpid()
    for rank, namespace in enumerate(namespaces):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                die_with(parent)
                if namespace:
                    enter(namespace)
                status = speak(rank, control, serve)
            finally:
                sys.stderr.flush()
                os._exit(status)  # some libraries take seconds to tidy up, which the others would have to wait for
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(statuses, key=abs)
