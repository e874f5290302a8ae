"""The sides of the scaling experiment, one rank each: ours, stock DDP on gloo, Open MPI, and one that sums nothing.

All train the same paced net (`bench.paced`) with the same loop. DDP and Open MPI say when they have waited for the
network, ours knows it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pliant.train.buckets import BucketItem, rebuilt_layout
from pliant_repro.bench import gloo
from pliant_repro.bench.priority import sides as priority_sides
from pliant_repro.bench.priority.models import EPOCH_STEPS, POOL, Pool, Subject, endless
from pliant_repro.bench.priority.sides import MAX_EPOCHS, Loop, digest_of, make_optimizer
from pliant_repro.bench.scaling.published import lab_profile
from pliant_repro.bench.scaling.worker import Task
from pliant_repro.paced import PacedNet
from pliant_repro.zoo import as_is

TIMEOUT_S = 120.0
MIB = 1 << 20


class Side(Protocol):
    """One rank of a way to train."""

    num_steps: int

    def choose(self, cap_mb: float | None) -> None: ...

    def step(self) -> None: ...

    def flush(self) -> None: ...

    def digest(self) -> str: ...


def load() -> None:
    """Import what a side will need, before the ranks are forked. No thread starts."""
    priority_sides.load()


def make(task: Task, waited_until: Callable[[], float] | None = None) -> Subject:
    """The task's net and its batches, the same in every process."""
    torch.manual_seed(1)
    net = PacedNet(lab_profile(task.model, task.speed), waited_until=waited_until)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(net.num_inputs, generator=generator) for _ in range(POOL)]
    pool = Pool(batches, EPOCH_STEPS * task.num_workers)
    return Subject(net, lambda model, batch: model(batch), pool, paced=net)


class Steps:
    """A loop as a side."""

    def __init__(self, subject: Subject, loop: Loop) -> None:
        self._subject, self._loop = subject, loop
        self.num_steps = 0

    def choose(self, cap_mb: float | None) -> None:
        pass

    def step(self) -> None:
        self._loop.step()
        self.num_steps += 1

    def flush(self) -> None:
        self._subject.model.state_dict()

    def digest(self) -> str:
        return digest_of(self._subject.model)


class Ddp(Steps):
    """Stock DDP. Every bucket size asked for has a model of its own, made when it is first chosen."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._made: dict[float | None, tuple[Subject, Loop]] = {}
        self.choose(task.cap_mb)
        super().__init__(self._subject, self._loop)

    def choose(self, cap_mb: float | None) -> None:
        if cap_mb not in self._made:
            subject = make(self._task)
            sized: dict[str, Any] = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
            model = DistributedDataParallel(
                subject.model, broadcast_buffers=False, gradient_as_bucket_view=True, **sized
            )
            batches = endless(subject, self._rank, self._task.num_workers)
            self._made[cap_mb] = subject, Loop(subject, model, make_optimizer(subject.model), batches, stalls=True)
        self._subject, self._loop = self._made[cap_mb]


class MpiSums:
    """Gradients summed by Open MPI in buckets, in the order in which backward fills them, by a thread of its own.

    As Horovod does it, without its coordinator: paced nets have one order on all ranks.
    """

    def __init__(self, model: nn.Module, cap_bytes: int) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        parameters = list(model.parameters())
        items = [BucketItem("float32", each.numel() * 4) for each in parameters]
        layout = rebuilt_layout(items, range(len(items))[::-1], cap_bytes=cap_bytes)
        self._buckets = [[parameters[index] for index in bucket] for bucket in layout.buckets]
        self._flat = [torch.empty(sum(each.numel() for each in bucket)) for bucket in self._buckets]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._summed: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, number=number: self._filled(number)
                )
        self._thread = threading.Thread(target=self._sum, daemon=True)
        self._thread.start()

    def _filled(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            torch.cat([each.grad for each in self._buckets[number] if each.grad is not None], out=self._flat[number])
            self._ready.put(number)

    def _sum(self) -> None:
        while (number := self._ready.get()) is not None:
            self._comm.Allreduce(self._in_place, _numpy(self._flat[number]))
            self._summed.put(number)

    def wait(self) -> None:
        """Until all sums of this step are in the gradients, as means."""
        for _ in self._buckets:
            number = self._summed.get()
            begin = 0
            flat = self._flat[number].div_(self._comm.Get_size())
            for parameter in self._buckets[number]:
                assert parameter.grad is not None, "its hook has run"
                parameter.grad.copy_(flat[begin : begin + parameter.numel()])
                begin += parameter.numel()
            self._missing[number] = len(self._buckets[number])

    def close(self) -> None:
        self._ready.put(None)
        self._thread.join()


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = tensor.numpy()
    return found


class _Waiting:
    """An optimizer whose step begins when the sums are there."""

    def __init__(self, optimizer: torch.optim.Optimizer, sums: MpiSums, net: PacedNet) -> None:
        self._optimizer, self._sums, self._net = optimizer, sums, net

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._sums.wait()
        self._net.device.stalled()
        self._optimizer.step()


@contextlib.contextmanager
def opened(task: Task, rank: int) -> Iterator[Side]:
    """The task's side, with its connections, for one rank."""
    torch.set_num_threads(1)
    ways = {"pliant": _open_pliant, "ddp": _open_ddp, "openmpi": _open_mpi, "plain": _open_plain}
    with ways[task.kind](task, rank) as side:
        yield side


@contextlib.contextmanager
def _open_plain(task: Task, rank: int) -> Iterator[Side]:
    subject = make(task)
    batches = endless(subject, rank, task.num_workers)
    yield Steps(subject, Loop(subject, subject.model, make_optimizer(subject.model), batches))


@contextlib.contextmanager
def _open_ddp(task: Task, rank: int) -> Iterator[Side]:
    with gloo.joined(task.meeting, rank, task.num_workers, TIMEOUT_S):
        yield Ddp(task, rank)


@contextlib.contextmanager
def _open_mpi(task: Task, rank: int) -> Iterator[Side]:
    assert task.cap_mb is not None, "the size of its buckets is always given"
    subject = make(task)
    sums = MpiSums(subject.model, int(task.cap_mb * MIB))
    assert subject.paced is not None, "all nets are paced here"
    optimizer = _Waiting(make_optimizer(subject.model), sums, subject.paced)
    batches = endless(subject, rank, task.num_workers)
    try:
        yield Steps(subject, Loop(subject, subject.model, optimizer, batches))
    finally:
        sums.close()


@contextlib.contextmanager
def _open_pliant(task: Task, rank: int) -> Iterator[Side]:
    import pliant

    with pliant.join(replicas=task.num_workers, sync=task.sync) as job:
        subject = make(task, lambda: job.sync_stats().waited_until_s)
        model, optimizer, loader = job.wrap(
            subject.model,
            make_optimizer(subject.model),
            subject.dataset,
            batch_size=subject.batch,
            shuffle=False,
            collate_fn=as_is,
            bucket_cap_mb=task.cap_mb,
            sync_buffers=False,  # as DDP's broadcast_buffers=False
        )

        def batches() -> Iterator[Any]:
            for _epoch in job.epochs(MAX_EPOCHS):
                yield from loader

        yield Steps(subject, Loop(subject, model, optimizer, batches()))
