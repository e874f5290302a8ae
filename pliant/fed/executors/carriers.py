"""What carries an executor: all that its launcher sees of it, and a process here, or an ssh of this machine to one elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pliant import child
from pliant.errors import LaunchError
from pliant.launch import guardian
from pliant.launch.processes import script

TAIL_BYTES = 4096


class Carrier(Protocol):
    """One executor that runs, by whatever means."""

    def wait(self) -> tuple[int, str]:
        """Its exit code, and what to say of it, once it has ended."""
        ...

    def end(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None: ...


class ProcessCarrier:
    """A child that is told `letter`, and whose output goes to the end of a file.

    The kernel ends it with the thread that makes this. Raises LaunchError or OSError where it cannot be started.
    """

    def __init__(self, command: Sequence[str], letter: bytes, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._began = output.tell()
            try:
                self._popen = subprocess.Popen(
                    [*script(child.__file__), str(os.getpid()), *command],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C is for us alone: we end them in order
                )
            except OSError as error:
                raise LaunchError(f"{command[0]}: {error.strerror}; is it installed here?") from None
        assert self._popen.stdin is not None, "made with a pipe"
        with contextlib.suppress(OSError):  # it has ended, which `wait` tells
            self._popen.stdin.write(letter)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait(self) -> tuple[int, str]:
        code = self._popen.wait()
        guardian.kill_group(self._popen.pid, signal.SIGKILL)
        self._hang_up()
        said = last_line(self._log, self._began)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return code, f"{how} ({said})" if said else how

    def end(self) -> None:
        self._hang_up()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._popen.poll() is None:
            guardian.kill_group(self._popen.pid, number)

    def _hang_up(self) -> None:
        assert self._popen.stdin is not None, "made with a pipe"
        with contextlib.suppress(OSError):
            self._popen.stdin.close()


def last_line(path: Path, begin: int = 0) -> str:
    """What was said last, since the file had `begin` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
