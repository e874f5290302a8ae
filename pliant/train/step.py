"""A step of the training loop as the program sees it: an iteration over its turns, and the figures that they logged."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from pliant.errors import TrainError

if TYPE_CHECKING:
    from pliant.train.trainer import Trainer

MAX_FIGURES = 8
"""The figures that a turn may log: they travel in a fixed room."""


class Outcome(IntEnum):
    """What a replica did in its turn."""

    NOTHING = 0
    SUMMED = 1
    SKIPPED = 2


_TURN = struct.Struct(f"<BBI{MAX_FIGURES}d")
"""The outcome; the number of figures, a checksum of their names, and their values."""


@dataclass(slots=True)
class Turn:
    """One replica's turn in a step."""

    replica: int
    slot: int
    is_last: bool
    outcome: Outcome = Outcome.NOTHING
    figures: dict[str, float | torch.Tensor] = field(default_factory=dict)

    def log(self, figures: Mapping[str, Any]) -> None:
        self.figures.update(figures)
        if len(self.figures) > MAX_FIGURES:
            raise TrainError(
                f"step.log: {len(self.figures)} figures ({', '.join(self.figures)}); up to {MAX_FIGURES} travel with a step"
            )

    def pack(self) -> bytes:
        """Return what all workers learn of this turn."""
        names = sorted(self.figures)
        values = [float(self.figures[name]) for name in names]
        padding = [0.0] * (MAX_FIGURES - len(values))
        return _TURN.pack(self.outcome, len(values), zlib.crc32("\0".join(names).encode()), *values, *padding)


TURN_BYTES = _TURN.size


def summarise(rows: Sequence[bytes], names: Sequence[str], step: int) -> tuple[dict[str, float], str]:
    """Return the mean of each figure over all replicas, and what is wrong with their turns; empty if nothing is.

    `rows` are what the turns of all replicas have packed, in their order, and `names` are this worker's figures. The
    answer is the same on every worker.
    """
    turns = [_TURN.unpack(row) for row in rows]
    for replica, (outcome, *_) in enumerate(turns):
        if outcome == Outcome.NOTHING:
            return {}, (
                f"replica {replica} ended its turn of step {step} without a summed backward(): call it on a loss of "
                "this turn, or say step.skip() where a replica contributes nothing"
            )
    logged = {(count, checksum) for _, count, checksum, *_ in turns}
    if len(logged) > 1:
        other = next(replica for replica, turn in enumerate(turns) if turn[1:3] != turns[0][1:3])
        return {}, (
            f"replicas 0 and {other} logged different figures in step {step}: step.log takes the same names in every turn"
        )
    means = {}
    for place, name in enumerate(sorted(names)):
        total = 0.0
        for turn in turns:  # in the order of replicas, whichever workers host them
            total += turn[3 + place]
        means[name] = total / len(turns)
    return means, ""


class Step:
    """One step of the job.

    Iterate over it for the turns of the replicas that this worker hosts: each turn gets its replica's batch, random state
    and buffers. After the loop `.grad` holds the average over all replicas, as DDP leaves it. A second iteration is a
    second synchronised backward of the same step, with the same batches.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.means: dict[str, float] = {}

    @property
    def number(self) -> int:
        """The number of steps that were committed before this one."""
        return self._trainer.progress.step

    @property
    def replica(self) -> int:
        """The replica whose turn it is."""
        return self._trainer.running_turn.replica

    def __iter__(self) -> Iterator[Any]:
        return self._trainer.turns(self)

    def log(self, **figures: Any) -> None:
        """Log figures of this replica's turn, such as its loss. `step["loss"]` is their mean over all replicas."""
        self._trainer.running_turn.log(figures)

    def skip(self) -> None:
        """Let this replica contribute nothing: zeros in place of its gradients."""
        self._trainer.skip_turn()

    def __getitem__(self, name: str) -> float:
        """Return the mean of a logged figure over all replicas; the same on every worker."""
        try:
            return self.means[name]
        except KeyError:
            known = ", ".join(self.means) or "nothing yet: it is known after the loop over the step"
            raise TrainError(f"step[{name!r}]: the turns of this step have logged {known}") from None
