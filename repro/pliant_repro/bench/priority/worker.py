"""One rank of one side of `pliant bench priority`: is told what to do, and answers, one JSON object per line.

On another machine the line is its standard input and output, which ssh carries. In a lab one process loads torch, then
forks all ranks, which saves minutes where a contest has many; their lines are Unix sockets. `run` trains a window: a few
steps that bring the pipeline into its steady state, then the timed ones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from pliant_repro.bench.forked import fork_ranks
from pliant_repro.bench.told import Line, obeyed, take_place

if TYPE_CHECKING:
    from pliant_repro.bench.priority.sides import Side

LEAD = 3
"""Steps before the timed ones of a window: weights of the step before the window have all arrived, so the first
forward waits for nothing, which no later one does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the workers of one side are."""

    side: str
    """`plain`, `ddp`, or what `pliant.join(sync=)` takes."""
    num_workers: int
    model: str = "resnet50"
    compute: str = "paced"
    batch: int = 0
    size: int = 0
    slice_bytes: int | None = None
    in_flight_bytes: int | None = None
    meeting: str = ""
    """Where the ranks of DDP meet: tcp://host:port."""
    ifaces: tuple[str, ...] = ()
    """Each rank's interface; empty names: that of the default route."""
    environs: tuple[Mapping[str, str], ...] = ()
    """What is special in each rank's environment."""
    pinned: bool = False
    """Whether each rank has a core of its own."""
    trace: str = ""
    """Where traces go, without `.RANK.json`; empty: nowhere."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Task:
        known = dict(values)
        known["ifaces"] = tuple(cast("list[str]", known["ifaces"]))
        known["environs"] = tuple(cast("list[Mapping[str, str]]", known["environs"]))
        return cls(**known)  # type: ignore[arg-type]


def default_iface(routes: str) -> str:
    """The interface of the default route in the text of /proc/net/route; lo where there is none."""
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return "lo"


def sent_bytes(counters: str, iface: str) -> int:
    """What `iface` has sent so far, by the text of /proc/net/dev; 0 where there is no such interface."""
    for line in counters.splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == iface:
            return int(rest.split()[8])
    return 0


def running_s(schedstat: str) -> float:
    """Seconds that a thread has run or was ready to, by the text of its schedstat: computing, and what others took of it."""
    ran_ns, ready_ns, _ = schedstat.split()
    return (int(ran_ns) + int(ready_ns)) / 1e9


def _running_s() -> float:
    return running_s(Path("/proc/thread-self/schedstat").read_text())


def window(side: Side, iterations: int, lead: int) -> dict[str, object]:
    """Train; the moments at which the timed steps began and the last one ended, and what it cost."""
    cpu_begun_s, begun_s = time.process_time(), _running_s()
    before = side.facts()
    marks_s = []
    for number in range(lead + iterations):
        if number >= lead:
            marks_s.append(time.monotonic())
        side.step()
    marks_s.append(time.monotonic())
    compute_s = (_running_s() - begun_s) / (lead + iterations)
    side.flush()
    cpu_s = (time.process_time() - cpu_begun_s) / (lead + iterations)
    costs = {"marks_s": marks_s, "cpu_s": cpu_s, "compute_s": compute_s}
    return {**costs, "losses": side.take_losses(), "before": before, "after": side.facts()}


def obey(side: Side, iface: str, command: Mapping[str, object]) -> dict[str, object]:
    """Carry out one command, and answer."""
    match command["do"]:
        case "run":
            side.choose(cast("Mapping[str, object]", command.get("options", {})))
            return window(side, cast(int, command["iterations"]), cast(int, command.get("lead", LEAD)))
        case "count":
            return {"tx_bytes": sent_bytes(Path("/proc/thread-self/net/dev").read_text(), iface)}
        case "hash":
            side.choose(cast("Mapping[str, object]", command.get("options", {})))
            return {"hash": side.digest(), "steps": side.num_steps}
        case "layers":
            return {"layers": side.measured_layers()}
        case other:
            raise AssertionError(f"unknown command {other!r}")


def prepare(task: Task, rank: int) -> str:
    """Make this process what the task says; its interface."""
    take_place(rank, task.environs)
    iface = (task.ifaces[rank] if task.ifaces else "") or default_iface(Path("/proc/net/route").read_text())
    os.environ["GLOO_SOCKET_IFNAME"] = iface
    if task.trace:
        os.environ["PLIANT_TRACE"] = task.trace
    if task.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return iface


def serve(rank: int, source: IO[bytes], target: IO[bytes]) -> int:
    """Be rank `rank` of whatever side the first command names, until told to stop; the exit status."""
    return obeyed(source, target, partial(_be, rank))


def _be(rank: int, line: Line) -> None:
    from pliant_repro.bench.priority import sides  # loads torch, while the other jobs do so, too

    line.answer(rank=rank)
    setup = line.next()
    if setup is None:
        return
    task = Task.from_json(cast("Mapping[str, object]", setup["task"]))
    iface = prepare(task, rank)
    with sides.opened(task, rank) as side:
        line.answer(ready=True, num_bytes=side.num_bytes)
        for command in line:
            line.answer(**obey(side, iface, command))


def fork_all(control: str, namespaces: list[str]) -> int:
    """All ranks of a lab."""
    from pliant_repro.bench.priority import sides

    sides.load()
    return fork_ranks(control, namespaces, serve)


def main() -> None:
    """`RANK`: this process is that rank, and talks over its standard input and output. `SOCKET NAMESPACE...`: all are."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if len(sys.argv) > 2:
        status = fork_all(sys.argv[1], sys.argv[2:])
    else:
        line = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what the program prints is no answer
        status = serve(int(sys.argv[1]), sys.stdin.buffer, line)
    sys.stderr.flush()
    os._exit(status)  # some libraries take seconds to tidy up, which the contest would have to wait for


if __name__ == "__main__":
    main()
