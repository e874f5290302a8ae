"""Python programs in forks of a process that has imported torch: as `subprocess.Popen` would start them, 3 s sooner.

`Program` starts one, such as `[pliant, "run", ...]`, and `call` calls a function that starts some. Whatever they start with
`subprocess` is forked, too, if it is this Python or one of its scripts: a runner's workers, its warm process, the runs of
`pliant check`. Within `forking`, the same holds for what the tests' own process starts. The tests of the launcher and the
examples start real ones.

No program is forked from another one that runs: the fork would go on with the locks of its threads and with its open database,
and would close descriptors of its own that have the numbers of the other one's. Each program has a zygote instead, a fork of
itself from before it began, which forks what it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import gang
from gang import _context
from pliant_repro.lab.namespaces import enter

from pliant.child import adopting_orphans, die_with

PLIANT = str(Path(sys.executable).with_name("pliant"))


class Program:
    """A program in a process of its own, with the methods of a Popen that tests use. Its output is text."""

    def __init__(
        self,
        argv: Sequence[object],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stderr: Path | None = None,
        namespace: str = "",
    ) -> None:
        """`stderr` is a file to which it is appended; None: a pipe. `namespace` is one of a lab's hosts."""
        pipes = [_context.Pipe(duplex=False) for _ in range(2)]
        words, environ = [str(word) for word in argv], dict(os.environ if env is None else env)
        self._process = _context.Process(
            target=_start, args=(words, str(cwd), environ, stderr, namespace, *(write for _, write in pipes))
        )
        self._process.start()
        self.pid = int(self._process.pid or 0)
        for _, write in pipes:
            write.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(read.fileno()), encoding="utf-8") for read, _ in pipes)
        for read, _ in pipes:
            read.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self.pid} still runs after {timeout:g} s")
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that is left of its output, once it has ended."""
        deadline_s = time.monotonic() + timeout
        with ThreadPoolExecutor(2) as readers:
            reading = [readers.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            _, unread = wait(reading, timeout)
            if unread:
                self.kill()  # so that the readers come to an end
                raise TimeoutError(f"{self.pid} holds its output open after {timeout:g} s")
        self.wait(max(0.1, deadline_s - time.monotonic()))
        stdout, stderr = (each.result() for each in reading)
        return stdout, stderr

    def send_signal(self, signum: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it, if it has not ended, as a runner ends: with all that it has started."""
        self.terminate()
        self._process.join(15)
        self.kill()
        self._process.join(5)
        self._process.close()
        self.stdout.close()
        self.stderr.close()


def run(
    argv: Sequence[object], *, cwd: Path, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with the output as text."""
    with contextlib.closing(Program(argv, cwd=cwd, env=env)) as program:
        stdout, stderr = program.communicate(timeout)
        return subprocess.CompletedProcess([str(word) for word in argv], program.wait(5), stdout, stderr)


def call(function: Callable[..., Any], *arguments: Any, timeout: float = 100) -> Any:
    """What a function of a module returns, called in a process that forks the programs that it starts."""
    return gang.run(_call, 1, function, *arguments, timeout_s=timeout)[0]


@contextlib.contextmanager
def forking(*imports: str) -> Iterator[None]:
    """Fork what this process, the tests' own, starts with `subprocess`, from a process that has imported these modules."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = _context.Process(target=_serve_requests, args=(theirs, os.getpid(), imports))
    process.start()
    theirs.close()
    global _zygote
    _zygote, real = Zygote(ours), subprocess.Popen
    subprocess.Popen = ForkingPopen  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        subprocess.Popen, _zygote = real, None  # type: ignore[misc]
        ours.close()
        process.join(5)
        process.close()


# --- the zygote of a process ---


class Zygote:
    """Forks programs as children of the process that made it. `requests` is the other end of `_serve_requests`."""

    def __init__(self, requests: socket.socket) -> None:
        self.owner, self.requests = os.getpid(), requests
        self._lock = threading.Lock()

    @classmethod
    def of_this_process(cls) -> Zygote:
        """Fork this process, which has one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        if os.fork() == 0:
            try:
                ours.close()
                die_with(owner)
                _serve_requests(theirs, owner)
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours)

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        descriptors: Mapping[int, int],
        *,
        new_session: bool,
    ) -> int:
        """Return the id of the new process; `descriptors` are those of this process by the numbers that they get there."""
        request = (list(argv), dict(environ), folder, list(descriptors), new_session)
        with self._lock, adopting_orphans():
            socket.send_fds(self.requests, [pickle.dumps(request)], list(descriptors.values()))
            answer = self.requests.recv(64)
        if (pid := int(answer or 0)) <= 0:
            raise OSError(-pid, os.strerror(-pid), folder)
        return pid


_zygote: Zygote | None = None


def _serve_requests(requests: socket.socket, owner: int, imports: Sequence[str] = ()) -> NoReturn:
    """Fork a program for each request until `owner` has ended."""
    for name in imports:
        importlib.import_module(name)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    _close_descriptors([requests.fileno()])
    # A signal to the owner's group is not for the zygote, which ends with the owner.
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in asked}
    while True:
        message, received, _, _ = socket.recv_fds(requests, 1 << 20, 250)
        if not message:
            os._exit(0)
        if (middle := os.fork()) == 0:
            break
        for descriptor in received:
            os.close(descriptor)
        os.waitpid(middle, 0)
    try:
        middle = os.getpid()
        if os.fork():
            os._exit(0)  # the program is an orphan, and the owner adopts it
        argv, environ, folder, numbers, new_session = pickle.loads(message)
        for number, handler in before.items():
            signal.signal(number, handler)
        if new_session:
            os.setsid()
        try:
            os.chdir(folder)
        except OSError as error:
            requests.send(str(-error.errno).encode())
            os._exit(1)
        while os.getppid() == middle:
            time.sleep(0.0005)  # pacing a poll
        if os.getppid() != owner:
            os._exit(1)
        requests.send(str(os.getpid()).encode())
        requests.close()
        # First out of each other's way.
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512) for descriptor in received]
        for descriptor, number in zip(moved, numbers, strict=True):
            os.dup2(descriptor, number)
        _close_descriptors(numbers)
        become(argv, environ)
    finally:
        os._exit(1)


# --- in the forked process ---

_ROOT = Path(__file__).resolve().parents[1]
_BIN = Path(sys.executable).parent
_exec_file, _exec_path = os.execvp, os.execv
_INHERITED = set(os.environ.items())
_OPTIONS = ("-u", "-B", "-I", "-S", "-P")


def _start(
    argv: list[str],
    cwd: str,
    environ: dict[str, str],
    log: Path | None,
    namespace: str,
    stdout: Connection,
    stderr: Connection,
) -> None:
    die_with(os.getppid())
    if namespace:
        enter(namespace)
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    errors = stderr.fileno() if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor, standard in ((null, 0), (stdout.fileno(), 1), (errors, 2)):
        os.dup2(descriptor, standard)
    stdout.close()
    stderr.close()
    words = _words(argv, environ)
    assert words is not None, f"{argv} is no program of this Python"
    become(words, environ)


def _call(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    fork_programs()
    return function(*arguments)


def fork_programs() -> None:
    """In a process that was just forked: let all Python programs that it starts be forked."""
    global _zygote
    if _zygote is not None and _zygote.owner != os.getpid():
        _zygote.requests.detach()  # the number may be another descriptor's by now
        _zygote = None
    if _zygote is None:
        _zygote = Zygote.of_this_process()
    subprocess.Popen = ForkingPopen  # type: ignore[misc, assignment]
    os.execvp = os.execv = _exec  # type: ignore[assignment]


class ForkingPopen(subprocess.Popen[Any]):
    """Lets the zygote fork what is a program for this Python."""

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        named = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        env = os.environ if named["env"] is None else named["env"]
        environ = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
        words = (
            None if isinstance(named["args"], str | bytes) else _words(list(map(os.fsdecode, named["args"])), environ)
        )
        odd = [named[name] for name in ("executable", "preexec_fn", "shell", "gid", "gids", "uid")]
        # The zygote is not the one of a process that the program itself has forked.
        if any(odd) or not named["close_fds"] or words is None or _zygote is None or _zygote.owner != os.getpid():
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        standard = {number: end if end != -1 else number for number, end in enumerate((ends[0], ends[3], ends[5]))}
        self.pid = _zygote.start(
            words,
            environ,
            os.path.abspath(named["cwd"] or os.getcwd()),
            {**standard, **{number: number for number in named["pass_fds"]}},
            new_session=named["start_new_session"],
        )
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _words(argv: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return what follows `python` in the command line; None if the command is no program for this Python."""
    if argv[0] == sys.executable:
        words = list(argv[1:])
        while words and words[0] in _OPTIONS:
            del words[0]
        return words or None
    found = shutil.which(argv[0], path=environ.get("PATH"))
    if found is None or Path(found).parent != _BIN:
        return None
    with open(found, "rb") as file:
        interpreter = os.fsdecode(file.readline()[2:].strip())
    return [found, *argv[1:]] if Path(interpreter).parent == _BIN else None


def _exec(file: str, argv: Sequence[str]) -> None:
    """As os.execvp."""
    words = _words(argv, os.environ)
    if words is None:
        os.execv = _exec_path  # type: ignore[assignment]  # the other one calls it
        _exec_file(file, argv)
        return
    kept = [number for number in _descriptors() if os.get_inheritable(number)]
    if _zygote is not None and _zygote.owner == os.getpid():
        kept.append(_zygote.requests.fileno())
    _close_descriptors(kept)
    become(words, dict(os.environ))


def _descriptors() -> list[int]:
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if number > 2 and os.path.exists(f"/proc/self/fd/{number}")]


def _close_descriptors(kept: Sequence[int]) -> None:
    for number in set(_descriptors()) - set(kept):
        with contextlib.suppress(OSError):
            os.close(number)


def become(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run `FILE ...`, `-m MODULE ...` or `-c CODE ...` in this process, and end it as the interpreter would."""
    import torch

    from pliant.launch import warm

    fork_programs()

    # What the parent has is not ours to end: its sockets, its temporary folders.
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    for function in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(function)
    for helper in (multiprocessing.resource_tracker._resource_tracker, multiprocessing.forkserver._forkserver):
        helper.__init__()  # type: ignore[misc]  # that process is another's
    os.environ.clear()
    os.environ.update(environ)
    _show(words, environ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.path[:] = _path(environ)
    code: object = 0
    try:
        try:
            if words[0] == "-c":
                sys.modules["__main__"], sys.argv = types.ModuleType("__main__"), ["-c", *words[2:]]
                sys.path.insert(0, "")
                exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
            else:
                warm.run_program(list(words))
        except SystemExit:
            raise
        except BaseException as error:
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:  # the hook's, too
        code = leaving.code
    finally:
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _show(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let /proc show this command line and environment: it reads them from where the fork server was given its own."""
    fields = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    # There may be too little room for all variables: those come first that the fork server does not have.
    variables = [f"{name}={value}" for name, value in sorted(environ.items(), key=_INHERITED.__contains__)]
    command = [sys.executable, *words]
    for begin, end, lines in ((*fields[:2], command), (*fields[2:], variables)):
        room = end - begin - 1  # the last byte stays 0
        text = b"".join(os.fsencode(line) + b"\0" for line in lines)
        ctypes.memmove(begin, text[:room].ljust(room, b"\0"), room)


def _path(environ: Mapping[str, str]) -> list[str]:
    """The search path of a new interpreter: without what tests and programs have put there."""
    given = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    installed = (sys.base_prefix, sys.prefix)
    ours = [place for place in sys.path if place.startswith(installed) or place in (str(_ROOT), str(_ROOT / "repro"))]
    return [*given, *(place for place in dict.fromkeys(ours) if place not in given)]
