"""The steps of a worker that is alone with the only replica of its job: a plain training loop, with few calls around it.

There is nothing to switch, to exchange or to keep: the generators and buffers of the process are those of the replica, and
its gradients stay where backward puts them. A step that is not an ordinary one (no backward, gradients of earlier steps) is
left to the general way, which comes to the same state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pliant.train import trace
from pliant.train.backward_watch import BackwardWatch
from pliant.train.phases import ChangeAgreed, PassBegun, PhaseMachine
from pliant.train.replicas import ReplicaSwitch
from pliant.train.step import Outcome, Step, Turn

if TYPE_CHECKING:
    from pliant.elastic.member import Member
    from pliant.progress_board import ProgressBoard
    from pliant.train.context import DataPosition
    from pliant.train.current_step import CurrentStep
    from pliant.train.feeder import Feeder
    from pliant.train.job_state import JobState
    from pliant.train.outer_code import OuterCode
    from pliant.train.step_batches import StepBatches
    from pliant.train.views import WorkerViews


class LoneSteps:
    """Begins the steps of such a worker, and takes their turns."""

    def __init__(
        self,
        machine: PhaseMachine,
        member: Member,
        state: JobState,
        views: WorkerViews,
        current: CurrentStep,
        batches: StepBatches,
        outer: OuterCode,
        feeder: Feeder,
        board: ProgressBoard,
        *,
        may_defer: bool,
    ) -> None:
        self._machine, self._member, self._views, self._current = machine, member, views, current
        self._batches, self._outer, self._feeder, self._board = batches, outer, feeder, board
        self._progress, self._replicas = state.progress, state.replicas
        self.watches = [BackwardWatch(reducer) for reducer in state.reducers]
        self.is_possible = (
            state.sync_buffers and state.averaging is None and not may_defer and not state.adaptation.is_active
        )
        """Whether this job leaves nothing to do between turns, if a worker is alone with one replica."""
        self._taken: DataPosition | None = None
        """The data position after the last turn. None if the replica is dealt its samples: the feeder tells the same
        later."""

    def begin(self) -> None:
        """Let the process itself be the context of the replica from now on. A step has ended, in the general way."""
        if trace.enabled():  # the general way tells more
            return
        self._taken = None if self._replicas.loading.is_dealt else self._feeder.stream(0)
        self._outer.begin_live(self._position)

    def _position(self) -> DataPosition:
        return self._taken if self._taken is not None else self._feeder.stream(0)

    def begin_step(self, epoch: int) -> bool:
        """Begin the next step of this epoch where the last one has ended: in the same view, with the generators and buffers
        of the process as they are. Return False if that cannot be."""
        return (
            self._progress.epoch == epoch
            and self._outer.switch.__class__ is ReplicaSwitch  # else somebody measures what it does
            and self._batches.may_go_on
            and self._machine.begin_step_alone()
        )

    def load_batch(self) -> bool:
        """Load the batch of the step; return False if there are no more data."""
        if self._progress.epoch_step:
            self._board.begin_turn(self._progress.step, time.monotonic(), begins_step=True)
        batch = self._batches.begin_live_step()
        self._current.begin()
        return bool(batch)

    def turn(self, step: Step, end_turn: Callable[[Step], None]) -> Iterator[Any]:
        """Yield the batch of the replica. `end_turn` ends a turn in the general way, if it is not an ordinary one."""
        current, watches = self._current, self.watches
        begins_step = not current.passes
        if current.counts_writes and begins_step and not current.writes_first:
            current.writes_first = current.has_written()
        batch = self._batches.load(0)
        assert batch, "the step has begun with a batch"
        turn = current.turn = Turn(0, 0, True)
        for watch in watches:
            watch.begin_turn(begins_step)
        began_s = time.monotonic()
        current.left_early = True
        try:
            yield batch[0]
            has_come = False
            for watch in watches:  # each of them looks
                has_come = watch.handed_in or has_come
            if has_come and turn.outcome is Outcome.NOTHING and not turn.kept:
                self._end_pass(step, turn, began_s)
            else:
                self._hand_over(began_s)
                end_turn(step)
            current.left_early = False
        finally:
            current.turn = None
            for watch in watches:
                if watch.is_on:
                    watch.is_on = False
                else:
                    watch.end_turn()

    def _hand_over(self, began_s: float) -> None:
        """Leave the rest of the turn, which is not an ordinary one, to those who do so in the general way."""
        for watch in self.watches:
            watch.hand_over()
        timer = self._views.timer
        if not self._current.passes:
            timer.began_s, timer.compute_s = began_s, 0.0
        timer.begin_turn(0.0, began_s)
        self._machine.handle(PassBegun())

    def _end_pass(self, step: Step, turn: Turn, began_s: float) -> None:
        """Do what `Passes.run` and `Passes.count` do."""
        current, timer, now_s = self._current, self._views.timer, time.monotonic()
        self._board.run_program(now_s)
        took_s = now_s - began_s
        if current.passes:
            timer.compute_s += took_s
        else:
            timer.began_s, timer.compute_s = began_s, took_s
        if turn.figures:
            step.add_figures([turn.row])
        member = self._member
        if member.elastic:
            if member.prepared > member.entered:
                self._machine.handle(ChangeAgreed(member.prepared))
            self._views.last_pass_in = member.entered
        self._progress.passes = self._machine.count_pass_alone()
        for watch in self.watches:
            if not watch.is_on:
                watch.end_pass()
        if self._taken is not None:
            self._taken = self._feeder.stream(0)
        current.passes += 1
