"""Notices the backward of a turn where gradients stay where backward puts them: one worker, one replica.

No parameter has a hook, and nothing happens in backward. The gradients are looked at when the program calls backward once more
in the same turn, and when the turn ends.
"""

from __future__ import annotations

import torch

from pliant.train.gradients import GradientReducer, has_any_gradient


class BackwardWatch:
    """Stands in for a reducer in the turns of the only replica."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self.is_on = self._has_call = self._accumulates = self._is_expecting = self._handed_in = False
        """Whether the present turn is this watch's own; whether it has called backward; whether one of the calls was in
        `job.no_sync`; whether gradients that come, or change, are those of a backward that counts; whether there was one."""
        self._marks: list[tuple[torch.Tensor, int] | None] | None = None
        """The gradients before the last backward; None if there were none."""

    def begin_turn(self, begins_step: bool) -> None:
        """Begin the pass and its only turn. Where there are gradients of earlier passes, the reducer itself tells new ones
        from them."""
        if not self._reducer.begin_clean_pass(begins_step):
            self._reducer.begin_pass(begins_step=begins_step)
            self._reducer.begin_turn(0)
            return
        self.is_on, self._is_expecting, self._marks = True, True, None
        self._has_call = self._accumulates = self._handed_in = False

    def expect_backward(self) -> None:
        """The program calls backward: notice the one before."""
        if not self.is_on:
            self._reducer.expect_backward()
            return
        if self._has_call and self._is_expecting:
            self._notice()
        self._has_call = True
        if self._handed_in or self._accumulates:
            self._marks = self._reducer.versions()
        is_counted = not self._reducer.accumulates
        self._accumulates = self._accumulates or not is_counted
        self._is_expecting = is_counted or self._handed_in

    def _notice(self) -> None:
        if self._marks is None:
            parameters = self._reducer.parameters
            self._handed_in = parameters[-1].grad is not None or has_any_gradient(parameters)
        elif changed := self._reducer.changed_since(self._marks):
            if self._handed_in:
                self._reducer.refuse_second_backward(changed[0])
            self._handed_in = True
        self._is_expecting = not self._handed_in

    @property
    def handed_in(self) -> bool:
        """Whether the turn has had the backward whose gradients count."""
        if not self.is_on:
            return self._reducer.handed_in
        if self._is_expecting:
            self._notice()
        return self._handed_in

    def hand_over(self) -> None:
        """Leave the rest of this turn to the reducer: it is not an ordinary one."""
        if self.is_on:
            has_come = self.handed_in
            self.is_on = False
            self._reducer.begin_turn_of_clean_pass()
            if self._accumulates and not has_come:
                self._reducer.no_sync = True
                self._reducer.no_sync = False  # so that it takes the present gradients for those of before

    def end_pass(self) -> None:
        """End the pass of a turn that is not this watch's own: it counts."""
        self._reducer.end_pass()

    def end_turn(self) -> None:
        """End the turn."""
        if self.is_on:
            self.is_on = False
        else:
            self._reducer.end_turns()
