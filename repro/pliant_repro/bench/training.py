"""One worker process of a training contest: `python -m pliant_repro.bench.training TASK.json RANK`.

The sides train the same network on the same data with the same loop: plain PyTorch in one process, stock
`DistributedDataParallel` on gloo, and pliant. A window is a number of whole steps, from one batch in hand to the next,
so loading, commit and whatever else a side does between steps are in it. Between windows a worker waits,
blocked, with a batch in hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pliant_repro.bench import gloo
from pliant_repro.bench.told import Line
from pliant_repro.bench.worker import COLLECTIVE_TIMEOUT_S
from pliant_repro.zoo import ReadyBatches, as_is, build, compute_loss, make_optimizer, network

EPOCH_STEPS = 1000
MAX_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTask:
    """What the workers of one side do."""

    side: str
    """A name of SIDES."""
    num_workers: int
    replicas: int
    control: str
    """The controller's Unix socket."""
    store: str = ""
    """A file through which the ranks of gloo find each other."""
    model: str = "resnet18"
    optimizer: str = "sgd"
    batch: int = 16
    size: int = 32
    device: str = "cpu"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> TrainingTask:
        return cls(**json.loads(path.read_text()))

    def dataset(self) -> ReadyBatches:
        length = EPOCH_STEPS * self.batch * self.replicas
        return ReadyBatches(network(self.model).kind, self.size, length, self.device)


Batch = tuple[torch.Tensor, torch.Tensor]


class Side:
    """One rank of a way to train: model, optimizer, and turns, of which `turns_per_step` make a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[], Iterator[Batch]],
        *,
        accumulate: int = 1,
        turns_per_step: int = 1,
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.turns_per_step = turns_per_step
        """Batches that this rank sees in a step."""
        self._accumulate = accumulate
        self._num_turns = 0

    def turn(self, batch: Batch) -> None:
        """The body of a plain training loop."""
        self._num_turns += 1
        loss = compute_loss(self.model, *batch)
        (loss / self._accumulate if self._accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if self._num_turns % self._accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _loader(task: TrainingTask, rank: int, num_ranks: int) -> Callable[[], Iterator[Batch]]:
    dataset: Any = task.dataset()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, num_ranks, rank, shuffle=False)
    loader: DataLoader[Batch] = DataLoader(dataset, batch_size=task.batch, sampler=sampler, collate_fn=as_is)

    def batches() -> Iterator[Batch]:
        while True:
            yield from loader

    return batches


@contextlib.contextmanager
def _open_plain(task: TrainingTask, rank: int) -> Iterator[Side]:
    """One process; where there are several replicas, their batches one after the other and one step."""
    model = build(task.model, task.device)
    optimizer = make_optimizer(task.optimizer, model)
    turns = task.replicas
    yield Side(model, optimizer, _loader(task, 0, 1), accumulate=turns, turns_per_step=turns)


@contextlib.contextmanager
def _open_ddp(task: TrainingTask, rank: int) -> Iterator[Side]:
    """Stock DDP in its default settings; `ddp_gloo_views`: with gradients in the buckets, which saves a copy."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with gloo.joined(f"file://{task.store}", rank, task.num_workers, COLLECTIVE_TIMEOUT_S):
        inner = build(task.model, task.device)
        model = DistributedDataParallel(inner, gradient_as_bucket_view=task.side == "ddp_gloo_views")
        yield Side(model, make_optimizer(task.optimizer, inner), _loader(task, rank, task.num_workers))


@contextlib.contextmanager
def _open_pliant(task: TrainingTask, rank: int) -> Iterator[Side]:
    import pliant

    with pliant.join(replicas=task.replicas) as job:
        inner = build(task.model, task.device)
        dataset = task.dataset()
        model, optimizer, loader = job.wrap(
            inner,
            make_optimizer(task.optimizer, inner),
            dataset,
            batch_size=task.batch,
            shuffle=False,
            collate_fn=as_is,
        )

        def batches() -> Iterator[Batch]:
            for _epoch in job.epochs(MAX_EPOCHS):
                yield from loader

        hosted = task.replicas // task.num_workers
        yield Side(model, optimizer, batches, turns_per_step=hosted)


SIDES = {"pytorch": _open_plain, "ddp_gloo": _open_ddp, "ddp_gloo_views": _open_ddp, "pliant": _open_pliant}


def train(side: Side, line: Line) -> None:
    """Train window by window as told; one step before each window is not in it: it brings the ranks together."""
    steps_left, begun_s, cpu_begun_s, asked = 0, 0.0, 0.0, 0
    for number, batch in enumerate(side.batches()):
        if number % side.turns_per_step == 0:
            if steps_left == asked > 0:
                _synchronize(batch)
                begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
            elif steps_left == 0:
                if asked:
                    _synchronize(batch)
                    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_begun_s
                    line.answer(wall_s=[wall_s / asked], cpu_s=[cpu_s / asked], **_memory(batch))
                command = line.next()
                if command is None:
                    return
                asked = _steps(command)
                steps_left = asked + 1
            steps_left -= 1
        side.turn(batch)
    raise AssertionError("the epochs were meant to have no end")


def _steps(command: Mapping[str, object]) -> int:
    steps = command.get("iterations")
    assert isinstance(steps, int), f"steps in {command}"
    assert steps > 0, f"steps in {command}"
    return steps


def _synchronize(batch: Batch) -> None:
    if batch[0].device.type == "cuda":
        torch.cuda.synchronize()


def _memory(batch: Batch) -> dict[str, object]:
    if batch[0].device.type != "cuda":
        return {}
    return {
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.memory_reserved(),
    }


def main() -> None:
    task, rank = TrainingTask.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(task.control)
    line = Line(connection.makefile("rb"), connection.makefile("wb"))
    try:
        with SIDES[task.side](task, rank) as side:
            line.answer(rank=rank)
            train(side, line)
    except Exception as error:
        line.answer(error=f"{type(error).__name__}: {error}")
        raise
    os._exit(0)  # some libraries take seconds to tidy up, which the contest would have to wait for


if __name__ == "__main__":
    main()
