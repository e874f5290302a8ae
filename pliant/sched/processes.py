"""Calls of one function in several processes, which end at once: on Ctrl-C, on an error, and when their parent is killed.

`concurrent.futures` would wait for the calls that have begun, and hang if a process is killed while it sends its result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from pliant.child import die_with
from pliant.errors import PliantError

T = TypeVar("T")
R = TypeVar("R")


def call_in_processes(
    function: Callable[[T], R], arguments: Sequence[T], processes: int
) -> Generator[tuple[T, R], None, None]:
    """Call `function` with each argument, in as many processes; yields each argument with its result, the first to end first.

    Close the generator to end the processes, as `contextlib.closing` does. What a call raises is raised here.

    Raises:
        PliantError: a process has died, such as for want of memory.
    """
    packed, waiting = pickle.dumps(function), deque(arguments)
    workers: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, T] = {}
    try:
        resource_tracker.ensure_running()  # else it starts with the first process, and unblocks SIGINT before that one
        while len(workers) < min(processes, len(arguments)):
            _start(workers)
        for connection, worker in workers.items():
            busy[connection] = waiting.popleft()
            with _telling_of_death(worker):
                connection.send_bytes(packed)
                connection.send(busy[connection])
        while busy:
            for connection in [each for each in wait(list(busy)) if isinstance(each, Connection)]:
                with _telling_of_death(workers[connection]):
                    result, error = connection.recv()
                if error is not None:
                    raise error
                argument = busy.pop(connection)
                if waiting:
                    busy[connection] = waiting.popleft()
                    with _telling_of_death(workers[connection]):
                        connection.send(busy[connection])
                yield argument, result
    finally:
        for worker in workers.values():
            worker.kill()
        for connection, worker in workers.items():
            worker.join()
            connection.close()


def _start(workers: dict[Connection, SpawnProcess]) -> None:
    """Start a process that ends with this one, and add it under the connection to it."""
    # Spawn: the caller may have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A blocked signal stays blocked in the new process: Ctrl-C is for its parent, from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        worker = context.Process(target=_answer_calls, args=(os.getpid(), theirs), daemon=True)
        worker.start()
        workers[ours] = worker
    finally:
        theirs.close()  # so that the end of the process is the end of the connection
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _telling_of_death(worker: SpawnProcess) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        worker.join()
        code = worker.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise PliantError(
            f"a process of the simulation has died ({how}): is there memory for all of them? --processes 1 needs the least"
        ) from None


def _answer_calls(parent: int, connection: Any) -> None:
    """Receive the function, then arguments; send a pair for each: the result, and the error if there is one."""
    die_with(parent)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is about to end
        packed = connection.recv_bytes()
        while True:
            argument = connection.recv()
            answer: tuple[object, Exception | None]
            try:
                answer = pickle.loads(packed)(argument), None
            except Exception as error:
                error.add_note(f"in another process:\n{traceback.format_exc()}")
                answer = None, error
            connection.send(answer)
