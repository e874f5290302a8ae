"""One worker process of a bench contender: `python -m pliant_repro.bench.worker TASK.json [RANK]`.

It connects to the controller's Unix socket, then waits, blocked, for commands; between them it
costs nothing, so the contenders of a contest do not disturb each other. All sides are measured
the same way: barrier of that side, clock, all tensors reduced, clock.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pliant_repro.bench.told import Line

if TYPE_CHECKING:
    import torch

    from pliant.comm.engine import Engine

COLLECTIVE_TIMEOUT_S = 60.0
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker must do, the same for all ranks of a contender."""

    side: str
    """Who reduces: a name of SIDES."""
    sizes: tuple[int, ...]
    """Elements of each tensor."""
    num_workers: int
    control: str
    """The controller's Unix socket; a path, so that it works from inside network namespaces."""
    store: str = ""
    """A file through which the ranks of torch's gloo find each other."""
    parallel: bool = False
    """Submit all tensors before waiting for any."""
    dtype: str = "float32"
    determinism: Literal["exact", "fast"] = "exact"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        values = json.loads(path.read_text())
        return cls(**{**values, "sizes": tuple(values["sizes"])})


class Side(Protocol):
    """One rank of an implementation, with its tensors."""

    rank: int

    def setup(self, options: Mapping[str, str]) -> None: ...
    def barrier(self) -> None: ...
    def reduce_all(self) -> None: ...
    def tensor(self, index: int) -> Tensor: ...
    def facts(self) -> dict[str, object]: ...


class Tensor(Protocol):
    """How values get in and out, whatever holds them."""

    def write(self, values: Values) -> None: ...
    def read(self) -> Values: ...


class TorchTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def write(self, values: Values) -> None:
        import torch

        self._tensor.copy_(torch.from_numpy(values))

    def read(self) -> Values:
        read: Values = self._tensor.float().numpy()
        return read


class NumpyTensor:
    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        self._array = array

    def write(self, values: Values) -> None:
        self._array[...] = values

    def read(self) -> Values:
        return self._array.astype(np.float32)


class Gloo:
    """torch.distributed on gloo, in its default configuration."""

    def __init__(self, task: Task, rank: int) -> None:
        import torch

        self.rank = rank
        self._parallel = task.parallel
        self.tensors = [torch.zeros(size, dtype=getattr(torch, task.dtype)) for size in task.sizes]

    def setup(self, options: Mapping[str, str]) -> None:
        pass

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def reduce_all(self) -> None:
        import torch.distributed as dist

        if self._parallel:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
            for work in works:
                work.wait()
        else:
            for tensor in self.tensors:
                dist.all_reduce(tensor)

    def tensor(self, index: int) -> Tensor:
        return TorchTensor(self.tensors[index])

    def facts(self) -> dict[str, object]:
        return {}


class Copy(Gloo):
    """Not an all-reduce, but what one must at least move: every input read once, every result written once."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, rank)
        self._pairs = [(tensor.numpy(), np.empty_like(tensor.numpy())) for tensor in self.tensors]
        for source, target in self._pairs:
            source[...] = 0
            target[...] = 0

    def reduce_all(self) -> None:
        for source, target in self._pairs:
            np.copyto(target, source)


class OpenMpi:
    """Open MPI through mpi4py, in place, on NumPy arrays."""

    def __init__(self, task: Task) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self._in_place, self._waitall = MPI.IN_PLACE, MPI.Request.Waitall
        self.rank = self._comm.Get_rank()
        self._parallel = task.parallel
        self._arrays = [np.zeros(size, dtype=task.dtype) for size in task.sizes]

    def setup(self, options: Mapping[str, str]) -> None:
        pass

    def barrier(self) -> None:
        self._comm.Barrier()

    def reduce_all(self) -> None:
        if self._parallel:
            self._waitall([self._comm.Iallreduce(self._in_place, array) for array in self._arrays])
        else:
            for array in self._arrays:
                self._comm.Allreduce(self._in_place, array)

    def tensor(self, index: int) -> Tensor:
        return NumpyTensor(self._arrays[index])

    def facts(self) -> dict[str, object]:
        return {}


class Pliant:
    """This package's engine, on tensors that live in its shared memory."""

    def __init__(self, task: Task, engine: Engine) -> None:
        import torch

        self._engine = engine
        self.rank = engine.rank
        self._parallel = task.parallel
        self._determinism = task.determinism
        self._tensors = [engine.empty((size,), getattr(torch, task.dtype)) for size in task.sizes]
        self._names = [f"gradient.{index}" for index in range(len(task.sizes))]
        self._strategy = ""

    def setup(self, options: Mapping[str, str]) -> None:
        strategy = options.get("strategy", "")
        if strategy and strategy != self._strategy:
            self._engine.set_strategy(strategy)
            self._strategy = strategy

    def barrier(self) -> None:
        self._engine.barrier("bench")

    def reduce_all(self) -> None:
        handles = []
        for name, tensor in zip(self._names, self._tensors, strict=True):
            handle = self._engine.all_reduce(name, tensor, op="sum", determinism=self._determinism)
            if self._parallel:
                handles.append(handle)
            else:
                handle.wait(timeout_s=COLLECTIVE_TIMEOUT_S)
        for handle in handles:
            handle.wait(timeout_s=COLLECTIVE_TIMEOUT_S)

    def tensor(self, index: int) -> Tensor:
        return TorchTensor(self._tensors[index])

    def facts(self) -> dict[str, object]:
        sent = self._engine.counters().egress_bytes
        return {"egress_bytes": sum(sent.values())}


@contextlib.contextmanager
def _open_gloo(task: Task, rank: int) -> Iterator[Side]:
    import torch

    from pliant_repro.bench import gloo

    torch.set_num_threads(1)
    with gloo.joined(f"file://{task.store}", rank, task.num_workers, COLLECTIVE_TIMEOUT_S):
        yield Copy(task, rank) if task.side == "copy" else Gloo(task, rank)


@contextlib.contextmanager
def _open_openmpi(task: Task, rank: int) -> Iterator[Side]:
    yield OpenMpi(task)


@contextlib.contextmanager
def _open_pliant(task: Task, rank: int) -> Iterator[Side]:
    import torch

    from pliant.elastic.member import Session

    torch.set_num_threads(1)
    with Session.join() as session:
        yield Pliant(task, session.engine)


SIDES = {"gloo": _open_gloo, "copy": _open_gloo, "openmpi": _open_openmpi, "pliant": _open_pliant}


def pattern(index: int, size: int, scale: int) -> Values:
    """Small whole numbers, so that sums are exact in every type, different at neighbouring places and tensors."""
    values: Values = ((np.arange(size) + index) % 3 + 1).astype(np.float32) * np.float32(scale)
    return values


def contribution(rank: int) -> int:
    return 1 + rank % 2


def count_wrong(side: Side, task: Task) -> int:
    """Reduce a known pattern once; how many elements differ from its sum on this rank."""
    for index, size in enumerate(task.sizes):
        side.tensor(index).write(pattern(index, size, contribution(side.rank)))
    side.barrier()
    side.reduce_all()
    total = sum(contribution(rank) for rank in range(task.num_workers))
    wrong = 0
    for index, size in enumerate(task.sizes):
        wrong += int(np.count_nonzero(side.tensor(index).read() != pattern(index, size, total)))
    clear(side, task)
    return wrong


def clear(side: Side, task: Task) -> None:
    """Zeros stay zeros however often they are summed: no overflow, and the pages are really there."""
    for index, size in enumerate(task.sizes):
        side.tensor(index).write(np.zeros(size, np.float32))


def measure(side: Side, iterations: int) -> dict[str, object]:
    """Wall and CPU seconds of each iteration, this process with all its threads."""
    wall_s, cpu_s = [], []
    for _ in range(iterations):
        side.barrier()
        cpu_begun_s, begun_s = time.process_time(), time.perf_counter()
        side.reduce_all()
        wall_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - cpu_begun_s)
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def obey(side: Side, task: Task, command: Mapping[str, object]) -> dict[str, object]:
    """Carry out one command of the controller, and answer."""
    options = command.get("options")
    iterations = command.get("iterations")
    assert isinstance(options, dict), f"options in {command}"
    assert isinstance(iterations, int), f"iterations in {command}"
    side.setup(options)
    if command.get("do") == "check":
        return {"wrong": count_wrong(side, task)}
    before = side.facts()
    return {**measure(side, iterations), "before": before, "after": side.facts()}


def main() -> None:
    task = Task.read(Path(sys.argv[1]))
    rank = int(sys.argv[2]) if len(sys.argv) > 2 else -1  # Open MPI's workers ask Open MPI
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(task.control)
    line = Line(connection.makefile("rb"), connection.makefile("wb"))
    try:
        with SIDES[task.side](task, rank) as side:
            clear(side, task)
            side.barrier()
            line.answer(rank=side.rank)
            for command in line:
                line.answer(**obey(side, task, command))
    except Exception as error:
        line.answer(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
