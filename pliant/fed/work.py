"""Model tensors, client updates, and units of work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pliant.errors import TrainError


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model, or the changes of them."""

    parameters: list[Tensor]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """A copy of what `module` holds now."""
        return cls(
            [each.detach().clone() for each in module.parameters()],
            [each.detach().clone() for each in module.buffers()],
        )

    def into(self, module: nn.Module) -> None:
        """Give `module` these values."""
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
        """What travels when these are sent."""
        return sum(each.numel() * each.element_size() for each in self.all)

    def change_to(self, new: Weights) -> Weights:
        """What leads from here to `new`: floats in their own type, integers and flags as int64."""
        check_alike(self, new, "the client's model")
        return Weights(
            [_difference(a, b) for a, b in zip(new.parameters, self.parameters, strict=True)],
            [_difference(a, b) for a, b in zip(new.buffers, self.buffers, strict=True)],
        )

    def clone(self) -> Weights:
        return Weights([each.clone() for each in self.parameters], [each.clone() for each in self.buffers])


def _difference(new: Tensor, old: Tensor) -> Tensor:
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
    """How much it counts in a weighted mean."""
    loss: float = math.nan
    """The mean loss of the model that it was given, on its own samples; for q-FedAvg."""
    version: int = 0
    """Of the model that it was given; for asynchronous rounds."""


def move_tensor(tensor: Tensor, change: Tensor) -> Tensor:
    """`tensor` after a change in float64, in its own type: integers by the rounded change, flags by majority."""
    if tensor.is_floating_point():
        return (tensor.to(torch.float64) + change).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return (tensor.to(torch.float64) + change) > 0.5
    # The change is rounded, not the sum: an integer too large for a float64 stays exact.
    return tensor + torch.round(change).to(tensor.dtype)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """In float64, by NumPy's pairwise sum for tensors in memory: torch's depends on the number of threads."""
    parts = []
    for each in tensors:
        if each.device.type == "cpu":
            parts.append(float(np.square(each.detach().to(torch.float64).numpy()).sum()))
        else:
            parts.append(float(each.detach().to(torch.float64).square().sum()))
    return math.fsum(parts)


@dataclass(frozen=True, slots=True)
class Training:
    """Some participants of a round, in ascending order; trained at once where there are several and the model allows."""

    round_number: int
    clients: tuple[int, ...]
    steps: tuple[int, ...]
    """Of each client."""
    lr: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A part of the test set: samples from `begin` to before `end`."""

    begin: int
    end: int


Unit = Training | Evaluation


@dataclass(frozen=True, slots=True)
class Trained:
    """What a client brought."""

    update: Update
    utility: float
    """`selection.statistical_utility` of its first pass."""


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over test samples."""

    samples: int
    correct: int
    correct_in_5: int
    """The right class is among the five most likely."""
    loss: float
    """The sum, so that parts can be added."""

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
    """Whoever does units: this process, or executors elsewhere."""

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """The result of each unit, in their order. `model` is what all of them start from."""
        ...


@runtime_checkable
class DeviceAware(Protocol):
    """Workers that know on what they compute: on something else, bits would be others."""

    @property
    def kind(self) -> str:
        """Of the device, with its torch; empty where nobody has come yet."""
        ...

    def expect_kind(self, kind: str) -> None:
        """Work on this kind only.

        Raises:
            CheckpointError: that cannot be.
        """
        ...


def training_units(
    clients: Sequence[int], steps: Sequence[int], *, round_number: int, lr: float, batching: int
) -> list[Training]:
    """The participants in units of `batching` (1: each by itself), in ascending order.

    Units are of about one size, so that of 22 clients in batches of 20 none trains two.
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
    """The test set in parts of `size`."""
    return [Evaluation(begin, min(begin + size, num_samples)) for begin in range(0, num_samples, size)]
