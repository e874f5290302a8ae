"""What a round has to compute, cut into units that any executor can do.

A unit is a function of the model it is given, the job's config and itself, and the units of a round follow from the list of
its participants alone. So it makes no difference who does which unit, how often it is begun, and how many do them; and the
results are taken in the units' order, whenever they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pliant.fed.updates import Update, Weights


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


Done = tuple[Trained, ...] | Score


class Workers(Protocol):
    """Whoever does units: this process, or executors elsewhere."""

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[Done]:
        """The result of each unit, in their order. `model` is what all of them start from."""
        ...


@runtime_checkable
class Alike(Protocol):
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
