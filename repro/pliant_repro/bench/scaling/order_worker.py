"""One rank of the check of launch orders, and of training with device groups: is told what to do, and answers.

One process loads torch and forks all ranks, which talk over a Unix socket, one JSON object per line. CUDA is first touched
after the fork.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.group import DeviceGroup
from pliant.comm.device.torch_group import Rendezvous, TorchGroup
from pliant.elastic.member import Session
from pliant_repro.bench import gloo
from pliant_repro.bench.forked import fork_ranks
from pliant_repro.bench.told import Line, obeyed, take_place
from pliant_repro.zoo import POOL, Samples, build, compute_loss, make_optimizer, network

TIMEOUT_S = 60.0
SUBMITTERS = 4
"""Threads that submit at the same time."""

Backend = Literal["nccl", "gloo"]


@contextlib.contextmanager
def noted_launches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of the tensors that torch's groups of this process launch meanwhile, in that order."""
    launches: list[str] = []
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    real = TorchGroup.all_reduce

    def note(group: TorchGroup, tensor: Tensor) -> Any:
        launches.append(names.get(tensor.data_ptr(), "?"))
        return real(group, tensor)

    TorchGroup.all_reduce = note  # type: ignore[assignment, method-assign]
    try:
        yield launches
    finally:
        TorchGroup.all_reduce = real  # type: ignore[method-assign]


def tensors_of(count: int, length: int, device: torch.device) -> dict[str, Tensor]:
    return {f"tensor/{number:03}": torch.empty(length, device=device) for number in range(count)}


def fill(tensors: Mapping[str, Tensor], iteration: int, rank: int) -> None:
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(1000 * number + iteration + rank)


def num_wrong(tensors: Mapping[str, Tensor], iteration: int, size: int) -> int:
    """How many do not have the sum of what all ranks have filled in."""
    expected = (size * (1000 * number + iteration) + size * (size - 1) // 2 for number in range(len(tensors)))
    return sum(bool((tensor != value).any()) for tensor, value in zip(tensors.values(), expected, strict=True))


def scheduled(session: Session, backend: Backend, count: int, iterations: int) -> dict[str, object]:
    """Submit in a random order, another one on each rank and in each iteration; what was launched, and when.

    Several threads submit, except in the first iteration, whose order on rank 0 is the one that must be taken over.
    """
    rank, size = session.engine.rank, session.engine.size
    chance = random.Random(rank)
    tensors = tensors_of(count, 256, device_of(backend, rank))
    names = list(tensors)
    arrived: list[str] = []
    wrong, seconds = 0, []
    config = DeviceGroupConfig(backend=backend, timeout_s=TIMEOUT_S, name="order")
    with (
        noted_launches(tensors) as launches,
        DeviceGroup(session.engine, tensors, config).open() as group,
        ThreadPoolExecutor(SUBMITTERS) as pool,
    ):

        def submit(name: str) -> Any:
            return group.all_reduce(name, tensors[name])

        for iteration in range(iterations):
            chance.shuffle(names)
            fill(tensors, iteration, rank)
            began_s = time.monotonic()
            handles = list(map(submit, names)) if iteration == 0 else list(pool.map(submit, names))
            arrived = arrived or names.copy()
            for handle in handles:
                handle.wait()
            seconds.append(time.monotonic() - began_s)
            wrong += num_wrong(tensors, iteration, size)
    rounds = [launches[begin : begin + count] for begin in range(0, len(launches), count)]
    second = rounds[1] if len(rounds) > 1 else []
    changed = sum(each != second for each in rounds[2:])
    return {
        "arrived": arrived, "first": rounds[0], "second": second, "changed": changed, "wrong": wrong,
        "iterations": len(rounds), "seconds": seconds,
    }  # fmt: skip


def unscheduled(session: Session, backend: Backend, count: int, iterations: int) -> dict[str, object]:
    """The same without a scheduler: each rank launches in its own order. All tensors are alike, so nothing can hang."""
    rank, size = session.engine.rank, session.engine.size
    chance = random.Random(rank)
    tensors = tensors_of(count, 256, device_of(backend, rank))
    names = list(tensors)
    orders, wrong = [], 0
    meeting = Rendezvous(session.engine, "unscheduled", TIMEOUT_S)
    meeting.open()
    group = meeting.group(backend, tuple(range(size)), "sum")
    for iteration in range(iterations):
        chance.shuffle(names)
        fill(tensors, iteration, rank)
        works = [group.all_reduce(tensors[name]) for name in names]
        orders.append(names.copy())
        for work in works:
            work.wait()
        wrong += num_wrong(tensors, iteration, size)
    session.engine.barrier()
    group.close()
    group.drop()
    meeting.close()
    return {"orders": orders, "wrong": wrong}


def device_of(backend: Backend, rank: int) -> torch.device:
    return torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")


# --- training, where there are GPUs ---


class Gradients:
    """Hands each gradient to `reduce` as soon as backward has made it; `wait` ends when all are means over the ranks."""

    def __init__(self, model: nn.Module, reduce: Callable[[str, Tensor], Any], size: int) -> None:
        self._handles: list[Any] = []
        self._parameters = dict(model.named_parameters())
        self._reduce, self._size = reduce, size
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda each, name=name: self._handles.append(self._reduce(name, each.grad))
            )

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        for parameter in self._parameters.values():
            assert parameter.grad is not None, "its hook has run"
            parameter.grad.div_(self._size)


@contextlib.contextmanager
def synchronised(
    session: Session, side: str, backend: Backend, model: nn.Module, meeting: str
) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """The model to call, and what waits for its gradients."""
    engine = session.engine
    if side == "ddp":
        with gloo.joined(f"file://{meeting}", engine.rank, engine.size, TIMEOUT_S, backend):
            yield DistributedDataParallel(model, broadcast_buffers=False), lambda: None
    elif side == "scheduled":
        config = DeviceGroupConfig(backend=backend, timeout_s=TIMEOUT_S, name="training")
        with DeviceGroup(engine, dict(model.named_parameters()), config).open() as group:
            yield model, Gradients(model, group.all_reduce, engine.size).wait
    else:
        place = Rendezvous(engine, "training", TIMEOUT_S)
        place.open()
        plain = place.group(backend, tuple(range(engine.size)), "sum")
        yield model, Gradients(model, lambda name, tensor: plain.all_reduce(tensor), engine.size).wait
        engine.barrier()
        plain.close()
        plain.drop()
        place.close()


def train(session: Session, side: str, backend: Backend, command: Mapping[str, object]) -> dict[str, object]:
    """Some steps on synthetic data; the seconds of each, after a few that do not count."""
    name, batch = str(command["model"]), cast(int, command["batch"])
    device = device_of(backend, session.engine.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = network(name)
    pool = Samples(chosen.kind, chosen.size, POOL, device)
    picked = [pool[number % POOL] for number in range(batch)]
    inputs, targets = (torch.stack(each) for each in zip(*picked, strict=True))
    model = build(name, device)
    optimizer = make_optimizer(chosen.optimizer, model)
    seconds = []
    with synchronised(session, side, backend, model, str(command["meeting"])) as (wrapped, wait):
        for _ in range(cast(int, command["iterations"]) + cast(int, command["warmup"])):
            began_s = time.monotonic()
            optimizer.zero_grad()
            compute_loss(wrapped, inputs, targets).backward()  # type: ignore[no-untyped-call]
            wait()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began_s)
    sums = [float(each.detach().double().sum()) for each in model.parameters()]
    return {"seconds": seconds[cast(int, command["warmup"]) :], "parameters": repr(sums)}


def obey(session: Session, command: Mapping[str, object]) -> dict[str, object]:
    """Carry out one command, and answer."""
    backend = cast(Backend, command["backend"])
    match command["do"]:
        case "scheduled":
            return scheduled(session, backend, cast(int, command["count"]), cast(int, command["iterations"]))
        case "unscheduled":
            return unscheduled(session, backend, cast(int, command["count"]), cast(int, command["iterations"]))
        case "train":
            return train(session, str(command["side"]), backend, command)
        case other:
            raise AssertionError(f"unknown command {other!r}")


def serve(rank: int, source: IO[bytes], target: IO[bytes]) -> int:
    """Be one rank until told to stop; the exit status."""
    return obeyed(source, target, partial(_be, rank))


def _be(rank: int, line: Line) -> None:
    torch.set_num_threads(1)
    line.answer(rank=rank)
    setup = line.next()
    if setup is None:
        return
    take_place(rank, cast("list[dict[str, str]]", setup["environs"]))
    with Session.join() as session:
        line.answer(ready=True)
        for command in line:
            line.answer(**obey(session, command))


def main() -> None:
    """`SOCKET NUM`: that many ranks, as children of this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    make_optimizer("sgd", nn.Linear(1, 1))  # loads much of torch, here and not in each rank
    os._exit(fork_ranks(sys.argv[1], [""] * int(sys.argv[2]), serve))


if __name__ == "__main__":
    main()
