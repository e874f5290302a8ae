"""The step that the program is in, and how far it has come in it. Whoever takes part in a step looks here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pliant.errors import TrainError

if TYPE_CHECKING:
    import torch

    from pliant.train.events import Progress
    from pliant.train.step import Step, Turn
    from pliant.train.step_start import StepStart


class CurrentStep:
    """The step in progress, and the turn in it."""

    def __init__(self, progress: Progress, parameters: Sequence[torch.Tensor] = ()) -> None:
        """`parameters` are watched for changes; none are given where nobody asks for them."""
        self._progress, self._parameters = progress, parameters
        self.counts_writes = len(parameters) > 0
        self.step: Step | None = None
        """None between steps."""
        self.turn: Turn | None = None
        """The turn in progress."""
        self.passes = 0
        """The passes of this step that count."""
        self.kept: dict[int, dict[str, Any]] = {}
        """What each replica has kept for the next pass of this step."""
        self.start: StepStart | None = None
        """The state with which the step began, if it may be taken back."""
        self.is_left = False
        """Whether the program has left the step, by `break` or by an error."""
        self.left_early = False
        """Whether the program has left a loop over the step before its last turn."""
        self.writes_first = False
        """Whether the program changes parameters before the first pass of its steps."""
        self._versions = 0

    def begin(self) -> None:
        """The body of the step begins."""
        self.left_early = False
        if self._parameters:
            self._versions = sum([parameter._version for parameter in self._parameters])

    def end(self) -> None:
        """The step is over, or does not count."""
        self.passes, self.kept = 0, {}

    def has_written(self) -> bool:
        """Return whether the program has changed parameters since the step began."""
        if not self._parameters:
            return False
        return sum([parameter._version for parameter in self._parameters]) != self._versions

    def kept_by(self, replica: int) -> dict[str, Any]:
        """Return what a replica has kept in this step."""
        return self.kept.get(replica, {})

    def running_turn(self, what: str) -> Turn:
        """Return the turn in progress. Raises TrainError if `what` is used outside of turns."""
        if self.turn is None:
            raise TrainError(f"{what} can only be used inside of `for ... in step:`, where a replica has its turn")
        return self.turn

    def check_outer(self, what: str) -> None:
        """Raise TrainError if `what` is called where it does not belong: in a turn, or after a loop that was left."""
        if self.turn is not None:
            raise TrainError(
                f"{what} in the turn of replica {self.turn.replica}: it belongs after the loop over the step, where it "
                "runs once for all replicas"
            )
        if self.left_early:
            raise TrainError(
                f"{what} in step {self._progress.step}, whose loop was left before all replicas had their turn, by break, "
                "return or an error: let every replica have its turn, and call step.skip() where it contributes nothing"
            )
