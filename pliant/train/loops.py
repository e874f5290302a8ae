"""The program's loop over the steps of an epoch: how far it has come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pliant.train.step import Step, Steps

if TYPE_CHECKING:
    from pliant.train.shadow import Shadow
    from pliant.train.trainer import Trainer


class EpochLoop:
    """The loop over the steps of one epoch."""

    def __init__(self, trainer: Trainer | Shadow, epoch: int) -> None:
        self.epoch = epoch
        self.is_running = self.has_ended = False
        """Whether the program is in this loop, and whether it has come to the loop's end."""
        self._trainer = trainer

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the steps that are left of the epoch."""
        return Steps(self._run())

    def _run(self) -> Iterator[Step]:
        self.is_running = True
        try:
            yield from self._trainer.steps()
            self.has_ended = True
        finally:
            self.is_running = False
