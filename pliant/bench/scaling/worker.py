"""One rank of one side of the scaling experiment: is told what to do, and answers, one JSON object per line.

One process loads torch and forks all ranks, each into the namespace of its host: with 32 hosts, loading torch in every rank
would take longer than the experiment. Only Open MPI starts its ranks itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, cast

from pliant.bench.forked import fork_ranks, speak
from pliant.bench.priority.worker import answers_to, commands_of
from pliant.lab.hosts import INTERFACE

if TYPE_CHECKING:
    from pliant.bench.scaling.sides import Side

LEAD = 1
"""Steps before the timed ones of a window, which bring the pipeline into its steady state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the ranks of one side are."""

    kind: str
    """`pliant`, `ddp`, `openmpi`, or `plain`, which sums nothing."""
    model: str
    num_workers: int
    speed: float = 1.0
    """How much faster than a K80 the net pretends to be."""
    sync: str = "fifo"
    """Of pliant: what `pliant.join(sync=)` takes."""
    cap_mb: float | None = None
    """The size of a bucket, in MiB."""
    meeting: str = ""
    """Where the ranks of DDP meet: tcp://host:port."""
    environs: tuple[Mapping[str, str], ...] = ()
    """What is special in each rank's environment."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Task:
        environs = tuple(cast("list[Mapping[str, str]]", values["environs"]))
        return cls(**{**values, "environs": environs})  # type: ignore[arg-type]


def window(side: Side, iterations: int, lead: int) -> dict[str, object]:
    """Train; the moments at which the timed steps began and the last one ended, and the CPU seconds of a step."""
    cpu_s = time.process_time()
    marks_s = []
    for number in range(lead + iterations):
        if number >= lead:
            marks_s.append(time.monotonic())
        side.step()
    marks_s.append(time.monotonic())
    side.flush()
    return {"marks_s": marks_s, "cpu_s": (time.process_time() - cpu_s) / (lead + iterations)}


def obey(side: Side, command: Mapping[str, object]) -> dict[str, object]:
    """Carry out one command, and answer."""
    match command["do"]:
        case "run":
            side.choose(cast("float | None", command.get("cap_mb")))
            return window(side, cast(int, command["iterations"]), cast(int, command.get("lead", LEAD)))
        case "hash":
            return {"hash": side.digest(), "steps": side.num_steps}
        case other:
            raise AssertionError(f"unknown command {other!r}")


def prepare(task: Task, rank: int) -> None:
    """Make this process what the task says."""
    for other, environ in enumerate(task.environs):
        if other != rank and "PLIANT_LISTEN_FD" in environ:  # inherited: one process has started all ranks
            with contextlib.suppress(OSError):
                os.close(int(environ["PLIANT_LISTEN_FD"]))
    os.environ.update(task.environs[rank] if task.environs else {})
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def serve(rank: int, source: IO[bytes], target: IO[bytes]) -> int:
    """Be rank `rank` of whatever side the first command names, until told to stop; the exit status."""
    commands = commands_of(source)
    answer = answers_to(target)
    try:
        from pliant.bench.scaling import sides

        answer(rank=rank)
        command = commands.get()
        if command["do"] == "stop":
            return 0
        task = Task.from_json(cast("Mapping[str, object]", command["task"]))
        prepare(task, rank)
        with sides.opened(task, rank) as side:
            answer(ready=True)
            while (command := commands.get())["do"] != "stop":
                answer(**obey(side, command))
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def fork_all(control: str, namespaces: list[str]) -> int:
    """All ranks of a lab."""
    from pliant.bench.scaling import sides

    sides.load()
    return fork_ranks(control, namespaces, serve)


def main() -> None:
    """`SOCKET NAMESPACE...`: all ranks of a lab. `SOCKET`: the one that Open MPI says."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if len(sys.argv) > 2:
        status = fork_all(sys.argv[1], sys.argv[2:])
    else:
        status = speak(int(os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[1], serve)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
