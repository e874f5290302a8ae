"""One rank of one side of the scaling experiment: is told what to do, and answers, one JSON object per line.

One process loads torch and forks all ranks, each into the namespace of its host: with 32 hosts, loading torch in every rank
would take longer than the experiment. Only Open MPI starts its ranks itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, cast

from pliant_repro.bench.forked import fork_ranks, speak
from pliant_repro.bench.told import Line, obeyed, take_place
from pliant_repro.lab.hosts import INTERFACE

if TYPE_CHECKING:
    from pliant_repro.bench.scaling.sides import Side

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
    take_place(rank, task.environs)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def serve(rank: int, source: IO[bytes], target: IO[bytes]) -> int:
    """Be rank `rank` of whatever side the first command names, until told to stop; the exit status."""
    return obeyed(source, target, partial(_be, rank))


def _be(rank: int, line: Line) -> None:
    from pliant_repro.bench.scaling import sides

    line.answer(rank=rank)
    setup = line.next()
    if setup is None:
        return
    task = Task.from_json(cast("Mapping[str, object]", setup["task"]))
    prepare(task, rank)
    with sides.opened(task, rank) as side:
        line.answer(ready=True)
        for command in line:
            line.answer(**obey(side, command))


def fork_all(control: str, namespaces: list[str]) -> int:
    """All ranks of a lab."""
    from pliant_repro.bench.scaling import sides

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
