"""The one worker program of all contests: a rank that is told what to do over a control connection, and answers.

    python -m pliant_repro.worker SOCKET PROGRAM NAMESPACE...   fork a rank per namespace ("" for this one) from one process
    python -m pliant_repro.worker SOCKET                        be the one rank that mpirun, or `pliant run`, has started
    python -m pliant_repro.worker --rank RANK                   be a rank that talks over standard input and output (ssh)

Commands and answers are JSON objects, one per line. The first command, `setup`, names a program, "module:function". The
function is a context manager called with the contender's task and the rank; it gives the rank's first answer and a function
that carries out further commands. A process that forks ranks first calls the module's `preload`, which imports torch: with 32
ranks, loading torch in each would take longer than the contest. CUDA is first touched after the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from pliant.child import die_with
from pliant_repro.lab.namespaces import enter

COLLECTIVE_TIMEOUT_S = 120.0
INHERITED = "PLIANT_CONTEST_FD_"
"""In the environment of a forked worker, before the number that a descriptor has in the controller: its number here."""
Command = Mapping[str, object]
Opened = tuple[Mapping[str, object], Callable[[Command], Mapping[str, object]]]
"""Result of opening a program: the rank's first answer, and the function that carries out commands."""
Program = Callable[[Mapping[str, object], int], AbstractContextManager[Opened]]
_KEPT: list[object] = []
"""Process groups, until the process ends. DDP's reducer, where it is the last to hold one, joins gloo's threads while it holds
Python's lock, and one of them may wait for that lock: a deadlock, once in some ten to a hundred runs."""


class ControlLine:
    """A rank's end of the control connection. If the controller is gone, the process ends at once, whatever it is doing."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self._source, self._target = source, target
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # A controller killed before it accepted us shows as a reset, not as an end of file.
        with contextlib.suppress(ConnectionError):
            for line in self._source:
                command = json.loads(line)
                if command["do"] == "stop":
                    self._commands.put(None)
                    return
                self._commands.put(command)
        os._exit(3)

    def __iter__(self) -> Iterator[Command]:
        """Yield the commands until the controller says to stop."""
        while (command := self._commands.get()) is not None:
            yield command

    def answer(self, **values: object) -> None:
        self._target.write(json.dumps(values).encode() + b"\n")
        self._target.flush()


def serve(rank: int, source: IO[bytes], target: IO[bytes]) -> int:
    """Be rank `rank` of the program that the first command names, until told to stop; return the exit status."""
    line = ControlLine(source, target)
    try:
        line.answer(rank=rank)
        commands = iter(line)
        for setup in commands:
            _prepare(setup, rank)
            module, function = _find_program(str(setup["program"]))
            program: Program = getattr(module, function)
            with program(cast("Mapping[str, object]", setup["task"]), rank) as (first, carry_out):
                line.answer(ready=True, **first)
                for command in commands:
                    line.answer(**carry_out(command))
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            line.answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _find_program(name: str) -> tuple[ModuleType, str]:
    module, _, function = name.partition(":")
    return importlib.import_module(module), function


def _prepare(setup: Command, rank: int) -> None:
    """Make this process what the setup says: its identity, its network interface, its core, where its trace goes."""
    environs = cast("Sequence[Mapping[str, str]]", setup.get("environs", ()))
    for other, environ in enumerate(environs):
        if other != rank and "PLIANT_LISTEN_FD" in environ:  # inherited from the process that started all ranks
            with contextlib.suppress(OSError):
                os.close(_own_descriptor(environ["PLIANT_LISTEN_FD"]))
    own = dict(environs[rank]) if environs else {}
    if "PLIANT_LISTEN_FD" in own:
        own["PLIANT_LISTEN_FD"] = str(_own_descriptor(own["PLIANT_LISTEN_FD"]))
    os.environ.update(own)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(setup, rank)
    if setup.get("trace"):
        os.environ["PLIANT_TRACE"] = str(setup["trace"])
    if setup.get("pinned"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _own_descriptor(given: str) -> int:
    """Return the number that a descriptor of the controller has in this process; a forked worker has other numbers."""
    return int(os.environ.get(f"{INHERITED}{given}", given))


def pin_threads(cores: Sequence[int]) -> None:
    """Let all threads of this process, and those that they start, run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def interface_of(setup: Command, rank: int) -> str:
    """Return the network interface that the setup gives this rank; an empty name means that of the default route."""
    given = cast("Sequence[str]", setup.get("ifaces", ()))
    return (given[rank] if given else "") or default_interface(Path("/proc/net/route").read_text())


def default_interface(routes: str) -> str:
    """Return the interface of the default route in the text of /proc/net/route; lo if there is none."""
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return "lo"


@contextlib.contextmanager
def join_group(
    rendezvous: str, rank: int, num_ranks: int, timeout_s: float = COLLECTIVE_TIMEOUT_S, backend: str = "gloo"
) -> Iterator[None]:
    """Be a rank of torch's default process group; `rendezvous` is file://PATH or tcp://HOST:PORT."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=limit)
    _KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- starting ranks ---


def connect(rank: int, control: str) -> int:
    """Be a rank that talks over the Unix socket `control`; return the exit status."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(control)
    return serve(rank, line.makefile("rb"), cast("IO[bytes]", line.makefile("wb", buffering=0)))


def fork_ranks(control: str, program: str, namespaces: Sequence[str]) -> int:
    """Fork a rank into each namespace, wait until all have ended, and return the worst exit status.

    A single rank in this namespace is this process itself.
    """
    if list(namespaces) == [""]:
        return connect(0, control)
    _find_program(program)[0].preload()
    children, parent = [], os.getpid()
    for rank, namespace in enumerate(namespaces):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                die_with(parent)
                if namespace:
                    enter(namespace)
                status = connect(rank, control)
            finally:
                sys.stderr.flush()
                os._exit(status)  # some libraries take seconds to tidy up, and the contest would have to wait
        children.append(child)
    return max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs)


def _launched_rank() -> int:
    """Return the rank that mpirun, or `pliant run` of any version, has given this process."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return int(os.environ["OMPI_COMM_WORLD_RANK"])
    from pliant.identity import worker_spec

    spec = worker_spec()
    return spec.view.rank_of(spec.worker)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    first, *rest = sys.argv[1:]
    if first == "--rank":
        line = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what the program prints must not be taken for an answer
        status = serve(int(rest[0]), sys.stdin.buffer, line)
    elif rest:
        status = fork_ranks(first, rest[0], rest[1:])
    else:
        status = connect(_launched_rank(), first)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
