"""The program's loops over epochs and steps: where it is in them, and how it leaves them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dis import opname
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from pliant.train.step import Step, Steps

if TYPE_CHECKING:
    from pliant.train.trainer import Trainer

_BREAKS = {"POP_TOP", "POP_ITER"}
"""The instructions with which `break` and `return` drop the iterator of a loop. They never raise."""
_YIELDS = {"YIELD_VALUE", "RESUME", "SEND"}
"""The instructions at which a generator stands while its consumer runs."""


class EpochLoop:
    """The loop over the steps of one epoch: how far the program has come in it."""

    def __init__(self, trainer: Trainer, epoch: int) -> None:
        self.epoch = epoch
        self.is_running = self.has_ended = self.is_broken = False
        """Whether the program is in this loop, whether it has come to the loop's end, and whether an error has ended it."""
        self._trainer = trainer

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the steps that are left of the epoch."""
        return Steps(self._run())

    def _run(self) -> Iterator[Step]:
        self.is_running = True
        try:
            yield from self._trainer.steps()
            self.has_ended = True
        except GeneratorExit:
            self.is_broken = is_left_by_error()
            raise
        except BaseException:
            self.is_broken = True
            raise
        finally:
            self.is_running = False


def is_left_by_error() -> bool:
    """Return whether an exception leaves the loop over a generator; `break`, `return` and `close()` leave it in good order.

    The generator calls this when it gets GeneratorExit, which does not tell the one from the other. An exception that
    leaves a frame has a traceback that stands at the frame's present instruction.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        instruction = opname[frame.f_code.co_code[frame.f_lasti]]
        if instruction in _BREAKS or not _raises(frame):
            return False
        if instruction not in _YIELDS:
            return True
        frame = frame.f_back  # a generator that passes things on, and is closed itself
    return True  # the interpreter has dropped the frame of the loop


def _raises(frame: FrameType) -> bool:
    return any(
        isinstance(each, TracebackType) and each.tb_frame is frame and each.tb_lasti == frame.f_lasti
        for each in gc.get_referrers(frame)
    )
