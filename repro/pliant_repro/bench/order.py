"""The launch order of collectives (KungFu's figure 10): agreed between ranks, checked with real processes, and trained with.

NCCL and gloo match collectives by the order in which each rank launches them, so ranks whose gradients are ready in different
orders would sum the wrong tensors, or wait for each other for ever. `OrderedAllReduce` launches them in one order on all ranks.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pliant_repro.contest import Answer, Contender, Placement, floats
from pliant_repro.worker import Command, Opened, join_group

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PATIENCE_S = 120.0
TIMEOUT_S = 60.0
SUBMITTERS = 4
"""Number of threads that submit at the same time."""


class OrderedAllReduce:
    """Sums named tensors by torch's default process group, launched in the same order on all ranks.

    The first iteration is launched in the order of the names; from the second on, in the order in which the tensors arrived on
    rank 0 in the first. Threads may submit in any order: a tensor is launched once all before it have been.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._order = sorted(names)
        self._device = device
        self._arrived: list[str] = []
        self._waiting: dict[str, tuple[Tensor, LaunchHandle]] = {}
        self._num_launched, self._is_agreed = 0, False
        self._lock = threading.Lock()
        self.launches: list[str] = []
        """The names of all launched tensors, in that order."""

    def all_reduce(self, name: str, tensor: Tensor) -> LaunchHandle:
        """Submit a tensor; return at once."""
        import torch.distributed as dist

        handle = LaunchHandle()
        with self._lock:
            self._waiting[name] = tensor, handle
            self._arrived.append(name)
            while self._order[self._num_launched] in self._waiting:
                ready = self._order[self._num_launched]
                waiting, ready_handle = self._waiting.pop(ready)
                self.launches.append(ready)
                ready_handle.set(dist.all_reduce(waiting, async_op=True))
                self._num_launched += 1
                if self._num_launched == len(self._order):
                    self._end_iteration()
        return handle

    def _end_iteration(self) -> None:
        import torch
        import torch.distributed as dist

        self._num_launched = 0
        if self._is_agreed:
            return
        # All ranks come here after the same collectives, so this broadcast is matched, too.
        numbers = torch.tensor([self._order.index(name) for name in self._arrived], device=self._device)
        dist.broadcast(numbers, src=0)
        self._order = [self._order[number] for number in numbers.tolist()]
        self._is_agreed = True


class LaunchHandle:
    """Waits for a tensor that may not have been launched yet."""

    def __init__(self) -> None:
        self._launched = threading.Event()
        self._work: Any = None

    def set(self, work: Any) -> None:
        self._work = work
        self._launched.set()

    def wait(self) -> None:
        if not self._launched.wait(TIMEOUT_S):
            raise TimeoutError(f"not launched within {TIMEOUT_S:g} s: a tensor before it was not submitted")
        self._work.wait()


# --- in the controller ---


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Result of launching named tensors in an agreed order, and in none."""

    ranks: int
    tensors: int
    iterations: int
    seconds: tuple[float, ...]
    """Seconds of each iteration, of the slowest rank."""
    same_on_all_ranks: bool
    """Whether every launch of every iteration was the same."""
    first_sorted: bool
    """Whether the first iteration was launched by name."""
    taken_over: bool
    """Whether the second one had rank 0's order of arrival in the first."""
    changed: int
    """Iterations after the second with another order, all ranks together."""
    wrong: int
    """Tensors with a wrong sum."""
    arrivals_differed: bool
    """Whether the ranks submitted in different orders; else there was nothing to agree on."""
    control_orders_differed: bool
    """Whether the ranks launched in different orders without the scheduler."""
    control_wrong: int
    """Tensors with a wrong sum without the scheduler."""

    @property
    def holds(self) -> bool:
        """Whether there was one order with right sums, and the control shows that this does not come by itself."""
        agreed = self.same_on_all_ranks and self.first_sorted and self.taken_over and not self.changed
        return agreed and not self.wrong and self.arrivals_differed and self.control_orders_differed


@contextlib.contextmanager
def ranks(count: int) -> Iterator[tuple[Contender, Path]]:
    """Start so many processes on this machine; give them, and the folder for what they share."""
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as text:
        folder = Path(text)
        placement = Placement(num_workers=count, folder=folder)
        with placement.contender("order", f"{__name__}:opened", {"size": count, "folder": text}) as job:
            job.start().ready(PATIENCE_S)
            yield job, folder


def check(job: Contender, *, tensors: int, iterations: int, control: int, backend: str = "gloo") -> OrderCheck:
    """Submit in random orders for many iterations, then for a few without the scheduler.

    Raises:
        LaunchError: a rank failed, or did not come back: a deadlock.
    """
    patience_s = PATIENCE_S + 2.0 * iterations
    asked = {"do": "scheduled", "backend": backend, "count": tensors, "iterations": iterations}
    with_order = job.ask(asked, patience_s)
    without = job.ask({**asked, "do": "unscheduled", "iterations": control}, patience_s)
    return compare(with_order, without, tensors)


def compare(with_order: Sequence[Answer], without: Sequence[Answer], tensors: int) -> OrderCheck:
    """Return what the ranks' answers say together."""
    first, second, arrived = (with_order[0][key] for key in ("first", "second", "arrived"))
    same = all(answer["first"] == first and answer["second"] == second for answer in with_order)
    changed = sum(cast(int, answer["changed"]) for answer in with_order)
    return OrderCheck(
        ranks=len(with_order),
        tensors=tensors,
        iterations=cast(int, with_order[0]["iterations"]),
        seconds=_slowest(with_order),
        same_on_all_ranks=same and not changed,
        first_sorted=first == sorted(cast("list[str]", first)),
        taken_over=second == arrived,
        changed=changed,
        wrong=sum(cast(int, answer["wrong"]) for answer in with_order),
        arrivals_differed=any(answer["arrived"] != arrived for answer in with_order),
        control_orders_differed=any(answer["orders"] != without[0]["orders"] for answer in without),
        control_wrong=sum(cast(int, answer["wrong"]) for answer in without),
    )


def _slowest(answers: Sequence[Answer]) -> tuple[float, ...]:
    return tuple(max(each) for each in zip(*(floats(answer["seconds"]) for answer in answers), strict=True))


@dataclass(frozen=True, slots=True)
class Trained:
    """The steps of one side."""

    side: str
    seconds: tuple[float, ...]
    """Seconds of each step, of the slowest rank."""
    same_on_all_ranks: bool


def train(
    job: Contender,
    folder: Path,
    side: str,
    *,
    model: str,
    batch: int,
    iterations: int,
    warmup: int,
    backend: str,
    turn: int = 0,
) -> Trained:
    """Train with one way of launching: `scheduled`, `unscheduled` or `ddp`.

    Raises:
        LaunchError: a rank failed, or did not come back.
    """
    asked = {
        "do": "train", "side": side, "backend": backend, "model": model, "batch": batch, "iterations": iterations,
        "warmup": warmup, "turn": turn,
    }  # fmt: skip
    answers = job.ask(asked, PATIENCE_S + 5.0 * (iterations + warmup))
    return Trained(side, _slowest(answers), len({answer["parameters"] for answer in answers}) == 1)


# --- in the worker processes ---


def preload() -> None:
    """Import what every rank needs, before ranks are forked."""
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # the first optimizer of a process loads much of torch


@contextlib.contextmanager
def opened(task: Mapping[str, object], rank: int) -> Iterator[Opened]:
    """Open one rank; the program of `pliant_repro.worker`."""
    import torch

    torch.set_num_threads(1)
    size, calls = cast(int, task["size"]), 0

    def carry_out(command: Command) -> dict[str, object]:
        nonlocal calls
        calls += 1
        backend = str(command["backend"])
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        act = {"scheduled": launch_ordered, "unscheduled": launch_unordered, "train": train_rank}[str(command["do"])]
        with join_group(f"file://{task['folder']}/store-{calls}", rank, size, TIMEOUT_S, backend):
            return act(rank, size, device, cast("Mapping[str, Any]", command))

    yield {}, carry_out


def _make_tensors(count: int, device: torch.device) -> dict[str, Tensor]:
    import torch

    return {f"tensor/{number:03}": torch.empty(256, device=device) for number in range(count)}


def _fill(tensors: Mapping[str, Tensor], iteration: int, rank: int) -> None:
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(1000 * number + iteration + rank)


def _count_wrong(tensors: Mapping[str, Tensor], iteration: int, size: int) -> int:
    """Return how many tensors do not have the sum of what all ranks have filled in."""
    expected = (size * (1000 * number + iteration) + size * (size - 1) // 2 for number in range(len(tensors)))
    return sum(bool((tensor != value).any()) for tensor, value in zip(tensors.values(), expected, strict=True))


def launch_ordered(rank: int, size: int, device: torch.device, command: Mapping[str, Any]) -> dict[str, object]:
    """Submit in a random order, another one on each rank and in each iteration; return what was launched, and when.

    Several threads submit, except in the first iteration, whose order on rank 0 is the one that must be taken over.
    """
    count = command["count"]
    chance = random.Random(rank)
    tensors = _make_tensors(count, device)
    names = list(tensors)
    group = OrderedAllReduce(tensors, device)
    arrived: list[str] = []
    wrong, seconds = 0, []

    def submit(name: str) -> LaunchHandle:
        return group.all_reduce(name, tensors[name])

    with ThreadPoolExecutor(SUBMITTERS) as pool:
        for iteration in range(command["iterations"]):
            chance.shuffle(names)
            _fill(tensors, iteration, rank)
            began_s = time.monotonic()
            handles = list(map(submit, names)) if iteration == 0 else list(pool.map(submit, names))
            arrived = arrived or names.copy()
            for handle in handles:
                handle.wait()
            seconds.append(time.monotonic() - began_s)
            wrong += _count_wrong(tensors, iteration, size)
    rounds = [group.launches[begin : begin + count] for begin in range(0, len(group.launches), count)]
    second = rounds[1] if len(rounds) > 1 else []
    changed = sum(each != second for each in rounds[2:])
    facts = {"arrived": arrived, "first": rounds[0], "second": second, "changed": changed}
    return {**facts, "wrong": wrong, "iterations": len(rounds), "seconds": seconds}


def launch_unordered(rank: int, size: int, device: torch.device, command: Mapping[str, Any]) -> dict[str, object]:
    """Launch on each rank in its own order, without a scheduler. All tensors are alike, so nothing can hang."""
    import torch.distributed as dist

    chance = random.Random(rank)
    tensors = _make_tensors(command["count"], device)
    names = list(tensors)
    orders, wrong = [], 0
    for iteration in range(command["iterations"]):
        chance.shuffle(names)
        _fill(tensors, iteration, rank)
        works = [dist.all_reduce(tensors[name], async_op=True) for name in names]
        orders.append(names.copy())
        for work in works:
            work.wait()
        wrong += _count_wrong(tensors, iteration, size)
    dist.barrier()
    return {"orders": orders, "wrong": wrong}


class GradientSums:
    """Passes each gradient to `reduce` as soon as backward has made it; `wait` returns when all are means over the ranks."""

    def __init__(self, model: nn.Module, reduce: Callable[[str, Tensor], Any], size: int) -> None:
        self._handles: list[Any] = []
        self._parameters = dict(model.named_parameters())
        self._size = size
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda each, name=name: self._handles.append(reduce(name, each.grad))
            )

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        for parameter in self._parameters.values():
            assert parameter.grad is not None, "its hook has run"
            parameter.grad.div_(self._size)


def train_rank(rank: int, size: int, device: torch.device, command: Mapping[str, Any]) -> dict[str, object]:
    """Train some steps on synthetic data, and return the seconds of those that count."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pliant_repro import zoo

    side, warmup = command["side"], command["warmup"]
    chosen = zoo.network(command["model"])
    pool = zoo.Samples(chosen.kind, chosen.size, zoo.POOL, device)
    inputs, targets = (torch.stack(each) for each in zip(*(pool[n] for n in range(command["batch"])), strict=True))
    model = zoo.build(command["model"], device)
    optimizer = zoo.make_optimizer(chosen.optimizer, model)
    wrapped: nn.Module = model
    wait: Callable[[], None] = lambda: None  # noqa: E731
    if side == "ddp":
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    elif side == "scheduled":
        group = OrderedAllReduce(dict(model.named_parameters()), device)
        wait = GradientSums(model, group.all_reduce, size).wait
    else:
        wait = GradientSums(model, lambda name, tensor: dist.all_reduce(tensor, async_op=True), size).wait
    seconds = []
    for _ in range(command["iterations"] + warmup):
        began_s = time.monotonic()
        optimizer.zero_grad()
        zoo.compute_loss(wrapped, inputs, targets).backward()  # type: ignore[no-untyped-call]
        wait()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began_s)
    dist.barrier()
    sums = [float(each.detach().double().sum()) for each in model.parameters()]
    return {"seconds": seconds[warmup:], "parameters": repr(sums)}
