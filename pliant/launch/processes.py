"""Processes of a runner: workers, started directly or forked from the warm process, and the file that lists them.

Each worker leads a session of its own, so that a signal reaches its children too and a Ctrl-C in the terminal reaches only
the runner. Its life is tied to the runner's three times over: by the kernel (child.py; through the warm process where it was
forked from that), by the guardian, and by killing all that carries the job's mark when the job ends.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pliant import child
from pliant.child import start_ticks
from pliant.errors import LaunchError
from pliant.files import write_atomic

log = logging.getLogger(__name__)

WARM_IMPORTS = ("numpy", "torch", "torch._dynamo", "pliant.elastic.client", "pliant.train.joining")
"""Modules that each worker would spend seconds to import. Those that are not installed are left out.

The first optimizer that a program makes imports torch._dynamo, which takes as long as torch itself.
"""
REMOTE_MODULE = "pliant.cli.over_ssh"
_WARM_SCRIPT = Path(__file__).resolve().with_name("warm.py")


def script(path: str) -> list[str]:
    """Return the command that runs a script of ours with a Python that reads neither PYTHON* variables nor site-packages."""
    return [sys.executable, "-I", "-S", str(Path(path).resolve())]


@dataclass
class WorkerProcess:
    """A worker that was started, directly or from the warm process. `pidfd` becomes readable when it ends."""

    pid: int
    pidfd: int
    stdout: int
    """The reading end of its output. The caller closes this and `stderr`."""
    stderr: int
    wait: Callable[[], int]
    """Reaps the worker once it has ended, and returns its exit code, or minus the signal that killed it."""
    code: int | None = None

    def signal(self, signum: int) -> None:
        """Send `signum` to the worker and its children; nothing happens once it is reaped."""
        if self.code is None:
            child.kill_group(self.pid, signum)

    def reap(self) -> int:
        """Wait for the end of the worker, kill its children, and return its exit code (negative: the signal).

        They are killed before the worker is reaped: as long as it is a zombie, its number, which
        is the group's, cannot go to somebody else.
        """
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll()
        child.kill_group(self.pid, signal.SIGKILL)
        self.code = self.wait()
        os.close(self.pidfd)
        return self.code


def start_worker(
    command: Sequence[str], environ: Mapping[str, str], listener: socket.socket | None, joined: int | None = None
) -> WorkerProcess:
    """Start one worker, which inherits `listener`, and the eventfd `joined`.

    Must be called from the main thread: the kernel's tie is to the thread that forks. Raises OSError.
    """
    with output_pipes() as (stdout, stderr, out_write, err_write):
        popen = subprocess.Popen(
            [*script(child.__file__), str(os.getpid()), *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=tuple(_inherited(listener, joined).values()),
            start_new_session=True,
        )
        return WorkerProcess(popen.pid, _pidfd(popen), stdout, stderr, popen.wait)


def _inherited(listener: socket.socket | None, joined: int | None) -> dict[str, int]:
    """Return the descriptors that a worker inherits, by the variables that name them."""
    given = {"PLIANT_LISTEN_FD": None if listener is None else listener.fileno(), "PLIANT_JOIN_FD": joined}
    return {name: descriptor for name, descriptor in given.items() if descriptor is not None}


@contextlib.contextmanager
def output_pipes() -> Iterator[tuple[int, int, int, int]]:
    """Yield pipes for a worker's output: the reading ends of stdout and stderr, then the writing ends.

    The writing ends are closed with the block; if the block raises, so are the reading ends.
    """
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
    """Open /dev/null as stdin, stdout or stderr if the runner was started without them.

    Otherwise the next socket would get such a number, and be sent what is meant for the user.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


class Guardian:
    """The helper process that ends the job of a runner that was killed (see child.py). A context manager."""

    def __init__(self, mark: str, environ: Mapping[str, str]) -> None:
        self._mark = mark
        # Without the mark of a job that this runner itself is part of: the sweep of that one must
        # not take the guardian before it has done its work.
        self._environ = {name: value for name, value in environ.items() if name != child.JOB_MARK}
        self._popen: subprocess.Popen[bytes]
        self._notes: IO[bytes]

    def __enter__(self) -> Guardian:
        self._popen = subprocess.Popen(
            [*script(child.__file__), "guard", self._mark],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        assert self._popen.stdin is not None, "started with a pipe"
        self._notes = self._popen.stdin
        return self

    def watch(self, group: int) -> None:
        self._note(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._note(f"-{group}\n")

    def __exit__(self, *_: object) -> None:
        """End what is left of the job, then the guardian itself."""
        child.kill_marked(self._mark, time.monotonic() + child.KILL_S)
        with contextlib.suppress(OSError):
            self._notes.close()
        try:
            self._popen.wait(child.KILL_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError):  # without a guardian there is still the kernel's tie
            self._notes.write(line.encode())


# --- the warm process ---

ANSWER_S = 30.0
"""A fork takes 10 ms. A warm process that does not answer for this long is stuck."""
WARM_ENDED = "the process that workers are forked from has ended"


def can_start_warm(command: Sequence[str], search_path: str | None = None) -> bool:
    """Return whether `command` runs a file or module with the Python of this process, without interpreter options."""
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
    """The warm process, and the workers that are forked from it. A context manager, for one thread.

    `stdout` and `stderr` are the reading ends of its own output, from `__enter__` on.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        done: Callable[[], None],
        *,
        imports: Sequence[str] = WARM_IMPORTS,
        shown: Sequence[str] = (),
    ) -> None:
        self._environ, self._done = dict(environ), done
        self._arguments = [str(os.getpid()), ",".join(imports), *shown]
        self._popen: subprocess.Popen[bytes]
        self._socket: socket.socket
        self.stdout = self.stderr = -1
        self.is_up: bool | None = None
        """Whether it can fork; None while it imports. `done` is called, from a thread, when that is known."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def __enter__(self) -> WarmProcess:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (self.stdout, out_write), (self.stderr, err_write) = os.pipe(), os.pipe()
        try:
            # A fork's command line is its parent's, so that `ps` and `pgrep -f` find the program only if it is here.
            self._popen = subprocess.Popen(
                [sys.executable, str(_WARM_SCRIPT), *self._arguments],
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
        threading.Thread(target=self._await, name="warm-up", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it at once; the workers that it still has end with it."""
        self._popen.kill()
        self._popen.wait()
        self._socket.close()

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        listener: socket.socket | None,
        joined: int | None = None,
    ) -> WorkerProcess:
        """Fork a worker that runs `command` (see `can_start_warm`) in `environ`, and inherits `listener` and `joined`.

        Raises:
            WarmLost: it is gone, or stuck.
            OSError: the machine has no room for a process, or no descriptors.
        """
        changes = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        with output_pipes() as (stdout, stderr, *written):
            inherited = _inherited(listener, joined)
            request = {"argv": list(command[1:]), "environ": changes, "inherited": list(inherited)}
            answer = self._ask(request, [*written, *inherited.values()])
            if "pid" not in answer:
                raise OSError(f"fork: {answer.get('error')}")
            pid = int(str(answer["pid"]))
            return WorkerProcess(pid, os.pidfd_open(pid), stdout, stderr, lambda: self._reap(pid))

    def _reap(self, pid: int) -> int:
        try:
            return int(str(self._ask({"reap": pid})["code"]))
        except WarmLost as error:
            # The kernel has killed it with the warm process, and nobody knows better.
            log.warning("%s, and worker process %d with it", error, pid)
            return -signal.SIGKILL

    def _ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, object]:
        if not self.is_up:
            raise WarmLost(WARM_ENDED)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self._socket.sendmsg([json.dumps(request).encode()], rights)
            answer = self._socket.recv(child.MAX_REQUEST_BYTES)
        except (OSError, TimeoutError) as error:
            self.is_up = False
            raise WarmLost(f"the process that workers are forked from does not answer ({error})") from None
        if not answer:
            self.is_up = False
            raise WarmLost(WARM_ENDED)
        return dict(json.loads(answer))

    def _await(self) -> None:
        try:
            is_up = bool(self._socket.recv(child.MAX_REQUEST_BYTES))
            self._socket.settimeout(ANSWER_S)
        except OSError:
            is_up = False  # closed: the job was over before it was up
        self.is_up = is_up
        self._done()


class WorkerStarter:
    """Starts workers: from the warm process while there is one, else each as a new Python process."""

    def __init__(self, command: Sequence[str], warm: WarmProcess | None) -> None:
        self._command, self._warm = command, warm

    @property
    def is_ready(self) -> bool:
        """Whether `start` would not have to wait: the warm process has done its imports."""
        return self._warm is None or self._warm.is_up is not None

    def start(
        self, environ: Mapping[str, str], listener: socket.socket | None, joined: int | None = None
    ) -> WorkerProcess:
        """Start one worker, which inherits `listener` and `joined`. Call it from the main thread. Raises OSError."""
        if self._warm is not None:
            try:
                return self._warm.fork(self._command, environ, listener, joined)
            except WarmLost as error:
                log.warning("%s: from now on each worker imports torch, and starts more slowly", error)
                self._warm = None
        return start_worker(self._command, environ, listener, joined)


# --- what a scheduler on the same machine reads (--state-file) ---


@dataclass(frozen=True, slots=True)
class LivingWorker:
    """A worker that lived when the state file was written."""

    pid: int
    """The id of the process, and of its process group."""
    start_ticks: int
    """When the process began: another process with the same id began at another time."""
    slot: int

    @property
    def lives(self) -> bool:
        """Whether the worker still lives. A zombie does not: it holds no device."""
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class RunnerState:
    """The content of a state file."""

    config_server: str
    version: int
    """Version of the newest view that the runner has acted on: it starts no worker for an older one."""
    workers: Mapping[str, LivingWorker]
    """The living workers, by address."""


def write_runner_state(path: Path, config_server: str, version: int, workers: Mapping[str, tuple[int, int]]) -> None:
    """Write the state file: the config server, the version acted on, and the process id and slot of each living worker."""
    living = {
        name: asdict(LivingWorker(pid, ticks, slot))
        for name, (pid, slot) in workers.items()
        if (ticks := start_ticks(pid)) is not None
    }
    state = {"config_server": config_server, "version": version, "workers": living}
    try:
        write_atomic(path, json.dumps(state))
    except OSError as error:
        log.warning("cannot write --state-file %s (%s): other commands may not find the workers", path, error.strerror)


def read_runner_state(path: Path) -> RunnerState | None:
    """Read a state file; return None if the runner has not written it yet."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    workers = {name: LivingWorker(**facts) for name, facts in value["workers"].items()}
    return RunnerState(value["config_server"], value["version"], workers)


# --- what a runner on another host is told, over ssh or by a Ray actor ---


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """What a remote runner is told to do, as one line of JSON."""

    directory: str
    arguments: Sequence[str]
    """The arguments of `pliant run`."""
    environ: dict[str, str]

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RunnerOrder:
        return cls(**json.loads(line))
