"""Worker processes: started, signalled, reaped, and never left behind.

Each worker leads a session of its own, so that a signal reaches its children too and a Ctrl-C in the
terminal reaches only the runner. Its life is tied to the runner's three times over: by the kernel (child.py; through
the warm process where it was forked from that), by the guardian, and by the sweep when the job ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pliant import child
from pliant.launch import guardian

SWEEP_S = 5.0


def script(path: str) -> list[str]:
    """A Python of our own that reads neither the user's variables nor site-packages: it starts in 20 ms."""
    return [sys.executable, "-I", "-S", str(Path(path).resolve())]


@dataclass
class Process:
    """A started worker, however it was started. `pidfd` becomes readable when it ends."""

    pid: int
    pidfd: int
    stdout: int
    """The reading end of its output; whoever started the worker closes it, and `stderr`."""
    stderr: int
    wait: Callable[[], int]
    """Reaps it, once it has ended: its exit code, or minus the signal."""
    code: int | None = None

    def signal(self, signum: int) -> None:
        """Send `signum` to the worker and its children; nothing happens once it is reaped."""
        if self.code is None:
            guardian.kill_group(self.pid, signum)

    def reap(self) -> int:
        """The exit code (negative: the signal) of a worker that has ended, whose children end here too.

        They are killed before the worker is reaped: as long as it is a zombie, its number, which
        is the group's, cannot go to somebody else.
        """
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll()
        guardian.kill_group(self.pid, signal.SIGKILL)
        self.code = self.wait()
        os.close(self.pidfd)
        return self.code


def start(command: Sequence[str], environ: Mapping[str, str], listener: socket.socket | None) -> Process:
    """Start one worker, which inherits `listener`.

    Must be called from the main thread: the kernel's tie is to the thread that forks. Raises OSError.
    """
    with output_pipes() as (stdout, stderr, out_write, err_write):
        popen = subprocess.Popen(
            [*script(child.__file__), str(os.getpid()), *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=() if listener is None else (listener.fileno(),),
            start_new_session=True,
        )
        return Process(popen.pid, _pidfd(popen), stdout, stderr, popen.wait)


@contextlib.contextmanager
def output_pipes() -> Iterator[tuple[int, int, int, int]]:
    """For a new worker's output: the reading ends of stdout and stderr, and the writing ends, which are closed with the
    block; where that fails, so are the others."""
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    try:
        yield out_read, err_read, out_write, err_write
    except BaseException:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        os.close(out_write)
        os.close(err_write)


def _pidfd(popen: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()  # nobody would see its end
        popen.wait()
        raise


def fill_standard_descriptors() -> None:
    """Open /dev/null as stdin, stdout or stderr where the runner was started without.

    Otherwise the next socket would get such a number, and be sent what is meant for the user.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


class Guardian:
    """The helper process that cleans up after a runner that was killed. A context manager."""

    def __init__(self, mark: str, environ: Mapping[str, str]) -> None:
        self._mark = mark
        # Without the mark of a job that this runner itself is part of: the sweep of that one must
        # not take the guardian before it has done its work.
        self._environ = {name: value for name, value in environ.items() if name != guardian.MARK}
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guardian:
        self._popen = subprocess.Popen(
            [*script(guardian.__file__), self._mark],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        return self

    def watch(self, group: int) -> None:
        self._note(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._note(f"-{group}\n")

    def __exit__(self, *_: object) -> None:
        """End what is left of the job, then the guardian itself."""
        guardian.sweep(self._mark, time.monotonic() + SWEEP_S)
        process, notes = self._entered()
        with contextlib.suppress(OSError):
            notes.close()
        try:
            process.wait(SWEEP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError):  # without a guardian there is still the kernel's tie
            self._entered()[1].write(line.encode())

    def _entered(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        assert self._popen is not None, "used outside its `with`"
        assert self._popen.stdin is not None, "started with a pipe"
        return self._popen, self._popen.stdin
