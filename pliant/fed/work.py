"""Units of work of a federated round, their results, and the model tensors that they are about.

Buffers are part of a model. Buffers of floats are averaged like parameters, but never changed by a server optimizer.
Buffers of integers (`num_batches_tracked`) change by the rounded mean of their changes, so equal values stay equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pliant.errors import TrainError
from pliant.fed.history import WorkFigures


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model, or changes of them."""

    parameters: list[Tensor]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """Copy the present values of `module`."""
        return cls([each.detach() for each in module.parameters()], list(module.buffers())).clone()

    def into(self, module: nn.Module) -> None:
        """Copy these values into `module`."""
        theirs = Weights(list(module.parameters()), list(module.buffers()))
        check_alike(theirs, self, "the module")
        with torch.no_grad():
            for to, value in zip(theirs.all, self.all, strict=True):
                to.copy_(value)

    @property
    def all(self) -> list[Tensor]:
        return self.parameters + self.buffers

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are sent for these tensors."""
        return sum(each.numel() * each.element_size() for each in self.all)

    def change_to(self, new: Weights) -> Weights:
        """Return the change from here to `new`: floats in their own type, integers and flags as int64."""
        check_alike(self, new, "the client's model")
        return Weights(
            [difference(a, b) for a, b in zip(new.parameters, self.parameters, strict=True)],
            [difference(a, b) for a, b in zip(new.buffers, self.buffers, strict=True)],
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Return `change` of each tensor."""
        return Weights([change(each) for each in self.parameters], [change(each) for each in self.buffers])

    def clone(self) -> Weights:
        return self.map(torch.clone)


def difference(new: Tensor, old: Tensor) -> Tensor:
    return new - old if new.is_floating_point() else new.to(torch.int64) - old.to(torch.int64)


def check_alike(model: Weights, other: Weights, whose: str) -> None:
    shapes, theirs = [each.shape for each in model.all], [each.shape for each in other.all]
    if len(model.parameters) != len(other.parameters) or shapes != theirs:
        where = next((i for i, (a, b) in enumerate(zip(shapes, theirs, strict=False)) if a != b), None)
        what = (
            f"tensor {where} is {list(theirs[where])} instead of {list(shapes[where])}"
            if where is not None
            else f"{len(other.parameters)} parameters and {len(other.buffers)} buffers "
            f"instead of {len(model.parameters)} and {len(model.buffers)}"
        )
        raise TrainError(f"{whose} is not the server's model: {what}; all must train the same architecture")


@dataclass(frozen=True, slots=True)
class Update:
    """What one client sends after its part of a round."""

    client: int
    change: Weights
    samples: float = 1.0
    """Weight of the update in a weighted mean."""
    loss: float = math.nan
    """Mean loss of the model that the client was given, on its own samples; used by q-FedAvg."""
    version: int = 0
    """Version of the model that the client was given; used by asynchronous rounds."""


def move_tensor(tensor: Tensor, change: Tensor) -> Tensor:
    """Apply a change in float64 to a tensor of any type: integers move by the rounded change, flags by majority."""
    if tensor.is_floating_point():
        return (tensor.to(torch.float64) + change).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return (tensor.to(torch.float64) + change) > 0.5
    # The change is rounded, not the sum: an integer too large for a float64 stays exact.
    return tensor + torch.round(change).to(tensor.dtype)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Return the sum in float64. On the CPU, NumPy computes it: torch's result depends on the number of threads."""
    parts = []
    for each in tensors:
        if each.device.type == "cpu":
            parts.append(float(np.square(each.detach().to(torch.float64).numpy()).sum()))
        else:
            parts.append(float(each.detach().to(torch.float64).square().sum()))
    return math.fsum(parts)


@dataclass(frozen=True, slots=True)
class Training:
    """Training of some participants, in ascending order; as one computation if there are several and the model allows it."""

    round_number: int
    clients: tuple[int, ...]
    steps: tuple[int, ...]
    """Number of local steps of each client."""
    lr: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluation of the test samples from `begin` to before `end`."""

    begin: int
    end: int


Unit = Training | Evaluation


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of training one client."""

    update: Update
    utility: float
    """`selection.statistical_utility` of the client's first pass over its samples."""


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over test samples."""

    samples: int
    correct: int
    correct_in_5: int
    """Samples whose class is among the five most likely ones."""
    loss: float
    """Sum of the losses, so that parts can be added."""

    def __add__(self, other: Score) -> Score:
        return Score(
            self.samples + other.samples,
            self.correct + other.correct,
            self.correct_in_5 + other.correct_in_5,
            self.loss + other.loss,
        )

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else 0.0


UnitResult = tuple[Trained, ...] | Score


class Workers(Protocol):
    """Whoever does units: this process, or worker processes."""

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """Yield the result of each unit, in their order. All units start from `model`."""
        ...


@runtime_checkable
class DeviceAware(Protocol):
    """Workers that know the kind of device they compute on. Another kind would give other bits."""

    @property
    def kind(self) -> str:
        """Device and torch version; empty if no worker has connected yet."""
        ...

    def expect_kind(self, kind: str) -> None:
        """Compute on this kind of device only. Raises CheckpointError if that is impossible."""
        ...


@runtime_checkable
class Measured(Protocol):
    """Workers that measure what they do."""

    def take_figures(self) -> WorkFigures:
        """Return what was measured since the last call."""
        ...


def training_units(
    clients: Sequence[int], steps: Sequence[int], *, round_number: int, lr: float, batching: int
) -> list[Training]:
    """Divide the participants, in ascending order, into units of at most `batching` clients.

    Units have about equal sizes: 22 clients in batches of 20 make two units of 11.
    """
    ordered = sorted(zip(clients, steps, strict=True))
    size = max(1, batching)
    count = -(-len(ordered) // size)
    cuts = [len(ordered) * i // count for i in range(count + 1)] if count else [0]
    return [
        Training(round_number, tuple(c for c, _ in ordered[a:b]), tuple(s for _, s in ordered[a:b]), lr)
        for a, b in itertools.pairwise(cuts)
    ]


def evaluation_units(num_samples: int, *, size: int = 1000) -> list[Evaluation]:
    """Divide the test set into parts of `size` samples."""
    return [Evaluation(begin, min(begin + size, num_samples)) for begin in range(0, num_samples, size)]
