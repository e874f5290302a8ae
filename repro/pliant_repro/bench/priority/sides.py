"""The sides of `pliant bench priority`: ours in each way of synchronising, stock DDP, and one without any."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pliant.train import trace
from pliant_repro.bench import gloo
from pliant_repro.bench.priority import models
from pliant_repro.bench.priority.models import Subject
from pliant_repro.bench.priority.worker import Task
from pliant_repro.zoo import as_is

TIMEOUT_S = 120.0
MAX_EPOCHS = 1_000_000


class Side(Protocol):
    """One rank of a way to train."""

    @property
    def num_steps(self) -> int:
        """Of the chosen model, so far."""

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""

    def choose(self, options: Mapping[str, object]) -> None: ...

    def step(self) -> None: ...

    def flush(self) -> None: ...

    def facts(self) -> dict[str, object]: ...

    def take_losses(self) -> list[float]:
        """Of this rank's batches in the steps since the last call."""

    def digest(self) -> str: ...

    def measured_layers(self) -> list[list[float]]: ...


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)


def load() -> None:
    """Import what a side will need: torch loads much of itself only when the first optimizer is made. No thread starts."""
    import pliant

    make_optimizer(nn.Linear(1, 1))
    assert pliant.join is not None, "loads what is behind it"


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all parameters, in their order. `state_dict` first: whatever is under way arrives before it answers."""
    values = model.state_dict()
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(values[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        assert values[name].shape == parameter.shape, name
    return found.hexdigest()


class Loop:
    """The body of a plain training loop, and what all sides have in common."""

    def __init__(
        self,
        subject: Subject,
        model: nn.Module,
        optimizer: Any,
        batches: Iterator[Any],
        *,
        stats: Callable[[], dict[str, object]] = dict,
        stalls: bool = False,
        tells: bool = False,
    ) -> None:
        self.subject, self._model, self._optimizer, self._batches = subject, model, optimizer, batches
        self._stats = stats
        self._stalls = stalls
        """Whether the program has waited for the network when its step is over."""
        self._tells = tells
        """Whether steps are to be traced here, because nobody else does."""
        self.num_steps = 0
        self.num_bytes = subject.num_bytes
        self._losses: list[torch.Tensor] = []

    def choose(self, options: Mapping[str, object]) -> None:
        pass

    def step(self) -> None:
        begin_s = time.monotonic()
        batch = next(self._batches)
        self._optimizer.zero_grad()
        loss = self.subject.loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach())  # read later, as reading one may wait for a device
        if self._stalls and self.subject.paced is not None:
            self.subject.paced.device.stalled()  # before the update, which is part of what is paced
        self._optimizer.step()
        self.num_steps += 1
        if self._tells:
            trace.event("step", f"step {self.num_steps}", begin_s)

    def flush(self) -> None:
        self.subject.model.state_dict()

    def facts(self) -> dict[str, object]:
        return self._stats()

    def take_losses(self) -> list[float]:
        found, self._losses = self._losses, []
        return [float(loss) for loss in found]

    def digest(self) -> str:
        return digest_of(self.subject.model)

    def measured_layers(self) -> list[list[float]]:
        return models.layer_times(self.subject, self.step, rounds=7)


class Ddp:
    """Stock DDP. Every bucket size asked for has a model of its own, made when it is first chosen.

    With its default buckets it is as plain as a script has it, and its bits are those that all our modes must have. Where
    a size is given it is tuned in full: a static graph, which sums in another order in the first step.
    """

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._loops: dict[str, Loop] = {}
        self._random: dict[str, torch.Tensor] = {}
        self._key = ""
        self.choose({})

    def choose(self, options: Mapping[str, object]) -> None:
        cap, purpose = options.get("bucket_cap_mb"), options.get("purpose", "")
        key = f"{purpose} {cap}"
        self._random[self._key] = torch.get_rng_state()  # each model draws as if it were alone
        if key in self._loops:
            torch.set_rng_state(self._random[key])
        else:
            subject = models.make(self._task)
            sized: dict[str, Any] = {} if cap is None else {"bucket_cap_mb": cap}
            model = DistributedDataParallel(
                subject.model,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                static_graph=cap is not None,
                **sized,
            )
            batches = models.endless(subject, self._rank, self._task.num_workers)
            self._loops[key] = Loop(subject, model, make_optimizer(subject.model), batches, stalls=True, tells=True)
        self._key, self._loop = key, self._loops[key]

    @property
    def num_steps(self) -> int:
        return self._loop.num_steps

    @property
    def num_bytes(self) -> int:
        return self._loop.num_bytes

    def step(self) -> None:
        self._loop.step()

    def flush(self) -> None:
        self._loop.flush()

    def facts(self) -> dict[str, object]:
        return {}

    def take_losses(self) -> list[float]:
        return self._loop.take_losses()

    def digest(self) -> str:
        return self._loop.digest()

    def measured_layers(self) -> list[list[float]]:
        return self._loop.measured_layers()


@contextlib.contextmanager
def opened(task: Task, rank: int) -> Iterator[Side]:
    """The task's side, with its connections, for one rank."""
    torch.set_num_threads(1)
    ways = {"plain": _open_plain, "ddp": _open_ddp}
    trace.begin(rank)
    with ways.get(task.side, _open_pliant)(task, rank) as side:
        yield side
    trace.write(rank)


@contextlib.contextmanager
def _open_plain(task: Task, rank: int) -> Iterator[Side]:
    subject = models.make(task)
    batches = models.endless(subject, rank, task.num_workers)
    yield Loop(subject, subject.model, make_optimizer(subject.model), batches)


@contextlib.contextmanager
def _open_ddp(task: Task, rank: int) -> Iterator[Side]:
    with gloo.joined(task.meeting, rank, task.num_workers, TIMEOUT_S):
        yield Ddp(task, rank)


@contextlib.contextmanager
def _open_pliant(task: Task, rank: int) -> Iterator[Side]:
    import pliant

    with pliant.join(
        replicas=task.num_workers,
        sync=task.side,
        slice_bytes=task.slice_bytes,
        in_flight_bytes=task.in_flight_bytes,
    ) as job:
        subject = models.make(task, lambda: job.sync_stats().waited_until_s)
        model, optimizer, loader = job.wrap(
            subject.model,
            make_optimizer(subject.model),
            subject.dataset,
            batch_size=subject.batch,
            shuffle=False,
            collate_fn=as_is,
            sync_buffers=False,  # as DDP's broadcast_buffers=False
        )

        def batches() -> Iterator[Any]:
            for _epoch in job.epochs(MAX_EPOCHS):
                yield from loader

        yield Loop(subject, model, optimizer, batches(), stats=lambda: dataclasses.asdict(job.sync_stats()))
