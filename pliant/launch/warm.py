"""The warm process: it has imported torch once, and forks a worker from itself for each request.

Started by the runner as a script with a socket as its stdin (`processes.WarmProcess` is the other end). It
imports and forks, and starts no thread and no CUDA context, which a fork would not survive. A worker is forked twice, so that
the kernel makes it a child of the runner: it ends with the runner, not with the warm process. A forked worker finds
itself as if it had been started by `python FILE` or `python -m MODULE`: own session, own output, `__main__`, `sys.argv`,
and the interpreter's own way out (exit codes, tracebacks, atexit); only who leaves a job that goes on takes a shorter one.

Nothing here needs more than the standard library, so that a program without torch, or with a broken one, is no trouble of ours.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import socket
import sys
import threading
import time
import types

from pliant.child import MAX_REQUEST_BYTES, die_with
from pliant.process_priority import leave, step_aside, step_back, take_up
from pliant.process_title import show_as
from pliant.progress_board import BOARD_VARIABLE, STACK_SIGNAL

MAX_DESCRIPTORS = 128
"""Descriptors of a request at most: a worker's stdout and stderr, and those that it inherits."""


def warm_up(imports: list[str]) -> None:
    """Import what takes long, and freeze it: a garbage collection in a worker would touch, and so copy, all that memory."""
    gc.disable()  # the collections that imports start take a fifth of their time, and find next to nothing
    for name in filter(None, imports):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if any(_target(name).startswith("/dev/nvidia") for name in os.listdir("/proc/self/fd")):
        sys.exit("an import has opened the GPU, which no fork could use any more")
    gc.collect()
    gc.freeze()
    gc.enable()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""  # the one that listed the others


def serve(requests: socket.socket, runner: int) -> list[str] | None:
    """Fork workers on request. Return argv in a forked worker, and None in the warm process when the runner is gone."""
    nice = step_aside()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not message:
            return None
        request = json.loads(message)
        try:
            is_worker = _fork_orphan()
        except OSError as error:
            is_worker = False
            requests.send(json.dumps({"error": error.strerror}).encode())
        if is_worker:
            # The worker itself answers, and only once signals to its group would reach it.
            os.setsid()
            die_with(runner)
            try:
                requests.send(json.dumps({"pid": os.getpid()}).encode())
            except OSError:
                os._exit(1)  # the runner has not waited so long
            requests.close()
            take_up(nice)
            _settle(request["environ"], descriptors, request["inherited"])
            argv = [str(word) for word in request["argv"]]
            show_as(argv[1] if argv[0] == "-m" else argv[0], _rank())
            return argv
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan() -> bool:
    """Fork a process whose parent ends at once. Return True in that process when it has got another parent, and False here.

    Raises:
        OSError: the machine has no room for a process.
    """
    middle = os.fork()
    if middle:
        failure = os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])
        if failure:
            raise OSError(failure, os.strerror(failure))
        return False
    parent = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    while os.getppid() == parent:
        time.sleep(0.0001)  # nothing tells a process that its parent has changed
    return True


def _rank() -> int:
    """Return this worker's rank in the view that it was started for; 0 if its environment names none."""
    try:
        workers: list[str] = json.loads(os.environ["PLIANT_VIEW"])["workers"]
        return workers.index(os.environ["PLIANT_WORKER"])
    except (LookupError, ValueError, TypeError):
        return 0


def _settle(environ: dict[str, str], descriptors: list[int], inherited: list[str]) -> None:
    """Turn the fork into a worker: set its output, its environment and its random seeds."""
    stdout, stderr, *more = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.update(environ)
    step_back()
    for name, descriptor in zip(inherited, more, strict=True):
        os.set_inheritable(descriptor, True)
        os.environ[name] = str(descriptor)
        if name == BOARD_VARIABLE:
            # `pliant.join` would do it, but the program may hang before it comes there.
            faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
    if "numpy.random" in sys.modules:
        # Unlike `random`, it would go on with the numbers of the warm process, the same in all workers.
        sys.modules["numpy.random"].seed()


def run_program(argv: list[str]) -> None:
    """Run `FILE args...` or `-m MODULE args...` as the main program."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    path = argv[0]
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__file__ = os.path.abspath(path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    main.__dict__["__cached__"] = None
    try:
        with io.open_code(main.__file__) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file {main.__file__!r}: [Errno {error.errno}] {error.strerror}")
    exec(compile(source, main.__file__, "exec", dont_inherit=True), main.__dict__)


def end_at_once() -> None:
    """Exit with code 0, without taking the interpreter apart.

    Threads and exit functions end as usual, and open files are flushed. The rest would take longest in a fork, because it
    touches, and so copies, all memory. Whoever goes on shall not feel it.
    """
    leave()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Not `io.IOBase`: it asks Python code about every type, and there are half a million objects.
    opened = [thing for thing in gc.get_objects() if issubclass(type(thing), _io._IOBase)]
    for thing in (*opened, sys.stdout, sys.stderr):  # these were there before the fork, and are not listed
        with contextlib.suppress(Exception):
            thing.flush()
    os._exit(0)


def hide_own_frames(error: BaseException) -> None:
    """Let the traceback of `error` begin in the user's program, whoever prints it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    shown = trace
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: types.TracebackType | None) -> None:
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show


def main() -> None:
    """Run the warm process and, in its forks, the program."""
    die_with(int(sys.argv[1]))
    del sys.path[0]  # our own folder, where no program shall look
    with socket.socket(fileno=os.dup(0)) as requests:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        warm_up(sys.argv[2].split(","))
        requests.send(b"{}")
        argv = serve(requests, int(sys.argv[1]))
    if argv is None:
        os._exit(0)  # whatever the imports would do at exit is the workers' business
    try:
        run_program(argv)
    except SystemExit as leaving:
        if getattr(leaving, "ends_at_once", False):
            end_at_once()
        raise
    except BaseException as error:
        hide_own_frames(error)
        raise


if __name__ == "__main__":
    main()
