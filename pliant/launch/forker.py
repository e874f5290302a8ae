"""The runner's end of the warm process (`warm`), from which it has workers forked."""

from __future__ import annotations

import array
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pliant.errors import LaunchError
from pliant.launch import processes, warm

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""A fork takes 10 ms; a warm process that says nothing for this long is stuck."""


def takes_warmth(command: Sequence[str], search_path: str | None = None) -> bool:
    """Whether `command` is a Python file or module for the Python that runs this, without options for it."""
    if len(command) < 2:
        return False
    found = shutil.which(command[0], path=search_path)
    # By folder, too: the Pythons of all virtual environments are links to one file.
    is_ours = (
        found is not None
        and os.path.samefile(found, sys.executable)
        and os.path.samefile(os.path.dirname(found), os.path.dirname(sys.executable))
    )
    if command[1] == "-m":
        return is_ours and len(command) > 2
    return is_ours and command[1].endswith(".py") and os.path.isfile(command[1])


class WarmLost(LaunchError):
    """The warm process is gone, or does not answer."""


class WarmProcess:
    """Starts the warm process, and workers from it. A context manager; used from one thread.

    `stdout` and `stderr` are the reading ends of its own output, from `__enter__` on.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        done: Callable[[], None],
        *,
        imports: Sequence[str] = warm.IMPORTS,
        shown: Sequence[str] = (),
    ) -> None:
        self._environ, self._done = dict(environ), done
        self._arguments = [str(os.getpid()), ",".join(imports), *shown]
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.stdout = self.stderr = -1
        self.is_up: bool | None = None
        """Whether it can fork; None as long as it imports. `done` is called, from a thread, when that is known."""

    @property
    def pid(self) -> int:
        assert self._popen is not None, "used outside its `with`"
        return self._popen.pid

    def __enter__(self) -> WarmProcess:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (self.stdout, out_write), (self.stderr, err_write) = os.pipe(), os.pipe()
        try:
            # A fork's command line is its parent's, so that `ps` and `pgrep -f` find the program only if it is here.
            self._popen = subprocess.Popen(
                [sys.executable, str(Path(warm.__file__).resolve()), *self._arguments],
                env=self._environ,
                stdin=theirs.fileno(),
                stdout=out_write,
                stderr=err_write,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(out_write)
            os.close(err_write)
        threading.Thread(target=self._await, args=(self._socket,), name="warm-up", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it at once; the workers that it still has end with it."""
        assert self._popen is not None, "used outside its `with`"
        self._popen.kill()
        self._popen.wait()
        if self._socket is not None:
            self._socket.close()

    def fork(
        self, command: Sequence[str], environ: Mapping[str, str], listener: socket.socket | None
    ) -> processes.Process:
        """A worker that runs `command` (which `takes_warmth`) in `environ`, and inherits `listener`.

        Raises:
            WarmLost: it is gone, or stuck.
            OSError: the machine has no room for a process, or no descriptors.
        """
        changes = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        with processes.output_pipes() as (stdout, stderr, *written):
            descriptors = [*written, *([] if listener is None else [listener.fileno()])]
            answer = self._ask({"argv": list(command[1:]), "environ": changes}, descriptors)
            if "pid" not in answer:
                raise OSError(f"fork: {answer.get('error')}")
            pid = int(str(answer["pid"]))
            return processes.Process(pid, os.pidfd_open(pid), stdout, stderr, lambda: self._reap(pid))

    def _reap(self, pid: int) -> int:
        try:
            return int(str(self._ask({"reap": pid})["code"]))
        except WarmLost as error:
            # The kernel has killed it with the warm process, and nobody knows better.
            log.warning("%s, and worker process %d with it", error, pid)
            return -signal.SIGKILL

    def _ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, object]:
        if not self.is_up or self._socket is None:
            raise WarmLost("the warm process has ended")
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self._socket.sendmsg([json.dumps(request).encode()], rights)
            answer = self._socket.recv(warm.MAX_REQUEST_BYTES)
        except (OSError, TimeoutError) as error:
            self.is_up = False
            raise WarmLost(f"the warm process does not answer ({error})") from None
        if not answer:
            self.is_up = False
            raise WarmLost("the warm process has ended")
        return dict(json.loads(answer))

    def _await(self, ours: socket.socket) -> None:
        try:
            is_up = bool(ours.recv(warm.MAX_REQUEST_BYTES))
            ours.settimeout(ANSWER_S)
        except OSError:
            is_up = False  # closed: the job was over before it was up
        self.is_up = is_up
        self._done()


class Starter:
    """Starts workers: from the warm process as long as there is one, else each as a Python of its own."""

    def __init__(self, command: Sequence[str], warm: WarmProcess | None) -> None:
        self._command, self._warm = command, warm

    @property
    def is_ready(self) -> bool:
        """Whether `start` would do so at once: not while the warm process imports."""
        return self._warm is None or self._warm.is_up is not None

    def start(self, environ: Mapping[str, str], listener: socket.socket | None) -> processes.Process:
        """Start one worker, which inherits `listener`. Call it from the main thread. Raises OSError."""
        if self._warm is not None:
            try:
                return self._warm.fork(self._command, environ, listener)
            except WarmLost as error:
                log.warning("%s: from now on, workers are started without it", error)
                self._warm = None
        return processes.start(self._command, environ, listener)
