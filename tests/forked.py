"""Python programs in forks of a process that has imported torch: as `subprocess.Popen` would start them, 3 s sooner.

`Program` starts one, such as `[pliant, "run", ...]`, and `call` calls a function that starts some. Whatever they start with
`subprocess` is forked from them in turn, if it is this Python: a runner's workers, its warm process, the runs of
`pliant check`. The tests of the launcher and the examples start real ones. The kernel's record of a process (/proc/PID/environ)
is that of the fork server: who looks for processes by their environment finds none of these.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import logging
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import gang
from gang import _context

from pliant.child import die_with

PLIANT = str(Path(sys.executable).with_name("pliant"))


class Program:
    """A program in a process of its own, with the methods of a Popen that tests use. Its output is text."""

    def __init__(
        self, argv: Sequence[object], *, cwd: Path, env: Mapping[str, str] | None = None, stderr: Path | None = None
    ) -> None:
        """`stderr` is a file to which it is appended; None: a pipe."""
        pipes = [_context.Pipe(duplex=False) for _ in range(2)]
        words, environ = [str(word) for word in argv], dict(os.environ if env is None else env)
        self._process = _context.Process(
            target=_start, args=(words, str(cwd), environ, stderr, *(write for _, write in pipes))
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


# --- in the forked process ---

_ROOT = Path(__file__).resolve().parents[1]
_exec_file = os.execvp


def _start(
    argv: list[str], cwd: str, environ: dict[str, str], log: Path | None, stdout: Connection, stderr: Connection
) -> None:
    die_with(os.getppid())
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    errors = stderr.fileno() if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor, standard in ((null, 0), (stdout.fileno(), 1), (errors, 2)):
        os.dup2(descriptor, standard)
    stdout.close()
    stderr.close()
    fork_programs()
    become(argv, environ)


def _call(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    fork_programs()
    return function(*arguments)


def fork_programs() -> None:
    """In a forked process: let it, and all that it starts, fork Python programs."""
    subprocess.Popen, os.execvp = ForkingPopen, _exec  # type: ignore[misc, assignment]


class ForkingPopen(subprocess.Popen[Any]):
    """Forks where the command is this Python, or a script of its folder."""

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        named = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        words = [os.fsdecode(word) for word in named["args"]] if not isinstance(named["args"], str) else [""]
        odd = [named[name] for name in ("executable", "preexec_fn", "shell", "gid", "gids", "uid")]
        if any(odd) or not named["close_fds"] or not _is_ours(words):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if named["start_new_session"]:
                os.setsid()
            if named["cwd"] is not None:
                os.chdir(named["cwd"])
            _take_descriptors((ends[0], ends[3], ends[5]), named["pass_fds"])
            env = os.environ if named["env"] is None else named["env"]
            become(words, {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _is_ours(argv: Sequence[str]) -> bool:
    """Whether the command is a program for this Python."""
    return argv[0] == PLIANT or (argv[0] == sys.executable and len(argv) > 1)


def _exec(file: str, argv: Sequence[str]) -> None:
    """As os.execvp."""
    if not _is_ours(argv):
        _exec_file(file, argv)
    _close_descriptors([number for number in _descriptors() if os.get_inheritable(number)])
    become(argv, dict(os.environ))


def _take_descriptors(wanted: Sequence[int], kept: Sequence[int]) -> None:
    """Make `wanted` the standard descriptors (-1: as they are), and close all others but `kept`."""
    moved = [os.dup(each) if each != -1 else -1 for each in wanted]
    for standard, descriptor in enumerate(moved):
        if descriptor != -1:
            os.dup2(descriptor, standard)
    _close_descriptors(kept)
    for each in kept:
        os.set_inheritable(each, True)


def _descriptors() -> list[int]:
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if number > 2 and os.path.exists(f"/proc/self/fd/{number}")]


def _close_descriptors(kept: Sequence[int]) -> None:
    for number in set(_descriptors()) - set(kept):
        with contextlib.suppress(OSError):
            os.close(number)


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run `python FILE ...`, `python -m MODULE ...`, `python -c CODE ...` or `pliant ...` in this process, and end it as the
    interpreter would."""
    import torch

    from pliant.launch import warm

    # What the parent has is not ours to end: its sockets, its temporary folders.
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    for function in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(function)
    os.environ.clear()
    os.environ.update(environ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    words = list(argv[argv[0] == sys.executable :])
    while words[0] in ("-u", "-B", "-I", "-S"):
        del words[0]
    sys.path[:] = _path(environ)
    code: object = 0
    try:
        try:
            if words[0] == "-c":
                sys.modules["__main__"], sys.argv = types.ModuleType("__main__"), ["-c", *words[2:]]
                sys.path.insert(0, "")
                exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
            else:
                warm.run_program(words)
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


def _path(environ: Mapping[str, str]) -> list[str]:
    """The search path of a new interpreter: without what tests and programs have put there."""
    given = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    installed = (sys.base_prefix, sys.prefix)
    ours = [place for place in sys.path if place.startswith(installed) or place in (str(_ROOT), str(_ROOT / "repro"))]
    return [*given, *(place for place in dict.fromkeys(ours) if place not in given)]
