"""Notices the backward of a turn where gradients stay where backward puts them: one worker, one replica.

The hook of a single parameter counts; nothing else happens in backward. A backward that does not reach that parameter is
noticed by the gradients that it leaves.
"""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from pliant.train.gradients import GradientReducer


class BackwardWatch:
    """Stands in for a reducer in the turns of the only replica."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._hook: RemovableHandle | None = None
        self._is_on = self._has_accumulated = False
        self._count = 0
        """The backwards of this turn that reached the parameter with the hook, without those in `job.no_sync`."""

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin_turn(self, *, begins_step: bool) -> None:
        """Begin the pass and its only turn. Where there are gradients of earlier passes, the reducer itself tells new ones
        from them."""
        self._reducer.begin_pass(begins_step=begins_step)
        if not self._reducer.is_clean:
            self._reducer.begin_turn(0)
            return
        if self._hook is None:
            self._reducer.close()  # its own hooks, until its next turn
            self._hook = self._reducer.parameters[0].register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        self._is_on, self._has_accumulated, self._count = True, False, 0

    def _note(self, _: torch.Tensor) -> None:
        if not self._is_on:
            return
        if self._reducer.no_sync:
            self._has_accumulated = True
            return
        self._count += 1
        if self._count > 1:
            self._reducer.refuse_second_backward(0)

    @property
    def handed_in(self) -> bool:
        """Whether the turn has had the backward whose gradients count."""
        if not self._is_on:
            return self._reducer.handed_in
        if self._count or self._has_accumulated:
            return self._count > 0
        return any(parameter.grad is not None for parameter in self._reducer.parameters)

    def hand_over(self) -> None:
        """Leave the rest of this turn to the reducer: it is not an ordinary one."""
        if self._is_on:
            self._is_on = False
            self._reducer.begin_turn(0)
            if self._has_accumulated and not self._count:
                self._reducer.no_sync = True
                self._reducer.no_sync = False  # so that it takes the present gradients for those of before

    def end_turn(self) -> None:
        self._is_on = False
        self._reducer.end_turns()
