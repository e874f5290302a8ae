"""Processes of a runner: workers, started directly or forked from the warm process, and the file that lists them.

Each worker leads a session of its own, so that a signal reaches its children too and a Ctrl-C in the terminal reaches only
the runner. Its life is tied to the runner's three times over: by the kernel (child.py), by the guardian, and by killing all that
carries the job's mark when the job ends. A worker that was forked from the warm process is a child of the runner, like others.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
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
from pliant.progress_board import BOARD_VARIABLE

log = logging.getLogger(__name__)

WARM_IMPORTS = ("numpy", "torch", "torch._dynamo", "httpcore", "pliant.elastic.client", "pliant.train.joining")
"""Modules that each worker would spend seconds to import. Those that are not installed are left out.

The first optimizer that a program makes imports torch._dynamo, which takes as long as torch itself.
"""
PIPE_BYTES = 1 << 20
"""What a worker can print while its runner does not read, as when it is stopped."""
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
    command: Sequence[str], environ: Mapping[str, str], listener: socket.socket | None, board: int | None = None
) -> WorkerProcess:
    """Start one worker, which inherits `listener`, and the descriptor of the progress board.

    Must be called from the main thread: the kernel's tie is to the thread that forks. Raises OSError.
    """
    with output_pipes() as (stdout, stderr, out_write, err_write):
        popen = subprocess.Popen(
            [*script(child.__file__), str(os.getpid()), *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=tuple(_inherited(listener, board).values()),
            start_new_session=True,
        )
        return WorkerProcess(popen.pid, _pidfd(popen), stdout, stderr, popen.wait)


def _inherited(listener: socket.socket | None, board: int | None) -> dict[str, int]:
    """Return the descriptors that a worker inherits, by the variables that name them."""
    given = {"PLIANT_LISTEN_FD": None if listener is None else listener.fileno(), BOARD_VARIABLE: board}
    return {name: descriptor for name, descriptor in given.items() if descriptor is not None}


@contextlib.contextmanager
def output_pipes() -> Iterator[tuple[int, int, int, int]]:
    """Yield pipes for a worker's output: the reading ends of stdout and stderr, then the writing ends.

    The writing ends are closed with the block; if the block raises, so are the reading ends.
    """
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    for descriptor in (out_write, err_write):
        with contextlib.suppress(OSError):  # a user may have only so much of it
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
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


def count_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes the kernel has killed so far because memory had run out: those of this process's control
    group, as in a container; of the whole machine where groups are not counted. 0 if the kernel does not say."""
    files = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(cgroups / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):  # version 1; in a container, the path is that of the host
                files += [
                    cgroups / "memory" / path.lstrip("/") / "memory.oom_control",
                    cgroups / "memory/memory.oom_control",
                ]
    for file in (*files, cgroups / "memory.events", proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


class OutOfMemory:
    """Tells workers that the kernel has killed for want of memory from those that were killed from outside: a kill that the
    kernel counts explains one end by SIGKILL."""

    def __init__(self, count: Callable[[], int] = count_oom_kills) -> None:
        self._count = count
        self._explained = count()

    def note_start(self) -> int:
        """Return what to give to `explains` at the end of a worker that starts now."""
        return self._count()

    def explains(self, code: int, at_start: int) -> bool:
        """Return whether lack of memory explains the exit code of a worker, before whose start the kernel had counted so many
        kills. The worker's own children count, too: nobody tells which process it was."""
        known = max(self._explained, at_start)
        if code not in (-signal.SIGKILL, 128 + signal.SIGKILL) or self._count() <= known:
            return False
        self._explained = known + 1
        return True


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

WARM_UP_S = 120.0
"""How long its imports may take, before workers are started without it."""
ANSWER_S = 2.0
"""A fork takes 20 ms. A warm process that does not answer for this long is stuck: it is killed, and another one is started."""


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
    """A process that has imported torch, and forks workers. A context manager, for one thread.

    Its forks are children of this process, which reaps them, and end with it. They outlive the warm process.
    `stdout` and `stderr` are the reading ends of its own output, from `__enter__` on.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        imports: Sequence[str] = WARM_IMPORTS,
        shown: Sequence[str] = (),
    ) -> None:
        self._environ, self._on_change = dict(environ), on_change
        self._arguments = [str(os.getpid()), ",".join(imports), *shown]
        self._popen: subprocess.Popen[bytes]
        self._socket: socket.socket
        self._was_slow = False
        self.stdout = self.stderr = -1
        self.is_up: bool | None = None
        """Whether it can fork; None while it imports. `on_change` is called, from a thread, whenever this changes."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def was_killed(self) -> bool:
        """Whether another one may do better: a signal has ended it, rather than an error or the slowness of its imports."""
        return (self._popen.poll() or 0) < 0 and not self._was_slow

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
            pidfd = _pidfd(self._popen)
        finally:
            theirs.close()
            os.close(out_write)
            os.close(err_write)
        threading.Thread(target=self._follow, args=(pidfd,), name="warm-up", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it at once. The workers that were forked from it go on."""
        self._popen.kill()
        self._popen.wait()
        self._socket.close()

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        listener: socket.socket | None,
        board: int | None = None,
    ) -> WorkerProcess:
        """Fork a worker that runs `command` (see `can_start_warm`) in `environ`, and inherits `listener` and `board`.

        Raises:
            WarmLost: it is gone, or was stuck, and was killed.
            OSError: the machine has no room for a process, or no descriptors.
        """
        with output_pipes() as (stdout, stderr, out_write, err_write):
            pid = self.fork_into(command, environ, (out_write, err_write), _inherited(listener, board))
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                child.kill_group(pid, signal.SIGKILL)  # nobody would see its end
                child.reap(pid)
                raise
            return WorkerProcess(pid, pidfd, stdout, stderr, lambda: child.reap(pid))

    def fork_into(
        self, command: Sequence[str], environ: Mapping[str, str], output: tuple[int, int], inherited: Mapping[str, int]
    ) -> int:
        """Fork a process as `fork` does, and return its id. It is a child of this process: `child.reap` waits for its end.

        Args:
            output: the descriptors of its stdout and stderr.
            inherited: the descriptors that it inherits, by the variables that name them in its environment.
        """
        changes = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        request = {"argv": list(command[1:]), "environ": changes, "inherited": list(inherited)}
        rights = array.array("i", [*output, *inherited.values()])
        if not self.is_up:
            raise WarmLost("the process that workers are forked from has ended")
        try:
            with child.adopting_orphans():
                self._socket.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                answer = self._socket.recv(child.MAX_REQUEST_BYTES)
        except OSError as error:
            self._give_up()
            raise WarmLost(f"the process that workers are forked from does not answer ({error})") from None
        if not answer:
            self._give_up()
            raise WarmLost("the process that workers are forked from has ended")
        told = json.loads(answer)
        if "pid" not in told:
            raise OSError(f"fork: {told.get('error')}")
        return int(told["pid"])

    def _give_up(self) -> None:
        """Kill it, and close the socket, so that a fork that comes too late ends."""
        self.is_up = False
        child.kill_group(self.pid, signal.SIGKILL)
        self._socket.close()

    def _follow(self, pidfd: int) -> None:
        """Note when it has done its imports, and when it has ended."""
        try:
            self._socket.settimeout(WARM_UP_S)
            self.is_up = bool(self._socket.recv(child.MAX_REQUEST_BYTES))
            self._socket.settimeout(ANSWER_S)
        except TimeoutError:
            self._was_slow = True
            self._give_up()
        except OSError:
            self.is_up = False  # closed: the job was over before it was up
        if self.is_up:
            self._on_change()
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll()
        os.close(pidfd)
        self.is_up = False
        self._on_change()


class WorkerStarter:
    """Starts workers: from the warm process while it is up, else each as a new Python process."""

    def __init__(self, command: Sequence[str], warm: WarmProcess | None = None) -> None:
        self._command, self.warm = command, warm

    @property
    def is_warming(self) -> bool:
        """Whether the warm process is still at its imports: a worker that waits for it starts as soon as one that does not,
        and needs less of the machine."""
        return self.warm is not None and self.warm.is_up is None

    def start(
        self, environ: Mapping[str, str], listener: socket.socket | None, board: int | None = None
    ) -> WorkerProcess:
        """Start one worker, which inherits `listener` and `board`. Call it from the main thread. Raises OSError."""
        if self.warm is not None and self.warm.is_up:
            try:
                return self.warm.fork(self._command, environ, listener, board)
            except WarmLost as error:
                log.warning("%s: this worker imports torch by itself, and starts more slowly", error)
        return start_worker(self._command, environ, listener, board)


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


def write_runner_state(
    path: Path, config_server: str, version: int, workers: Mapping[str, tuple[int, int]], *, warn: bool = True
) -> bool:
    """Write the state file: the config server, the version acted on, and the process id and slot of each living worker.

    Returns whether it could be written; if not, a warning is logged unless it is not wanted.
    """
    living = {
        name: asdict(LivingWorker(pid, ticks, slot))
        for name, (pid, slot) in workers.items()
        if (ticks := start_ticks(pid)) is not None
    }
    state = {"config_server": config_server, "version": version, "workers": living}
    try:
        write_atomic(path, json.dumps(state))
    except OSError as error:
        if warn:
            log.warning(
                "cannot write --state-file %s (%s): other commands may not find the workers", path, error.strerror
            )
        return False
    return True


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
