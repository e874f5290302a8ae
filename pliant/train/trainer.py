"""The training loop of one worker: the steps that the program iterates over, and their turns.

All N replicas do a step, or none does. In each pass of a step the replicas hosted here take their turns: a replica's
context is restored, its batch goes through the body of the inner loop, its gradients are collected, its context is
captured. Then the gradients are summed over the whole job (`passes`). The contexts and the buffers of replica 0 travel with
them, so every worker has the whole state of the job afterwards. If a worker is lost before that, the turns are taken again
in a new view (`driver`), and the outer body does not notice.

Between passes the program's own code runs once on every worker: with the buffers of replica 0, and the random state of the
first replica hosted here. What it draws moves the generators of all replicas (`outer_code`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pliant.errors import CommError, MustBeReplaced, TrainError
from pliant.train import trace
from pliant.train.events import StepCommitted
from pliant.train.phases import Action, PassBegun, Phase, ProgramEnded, StepAsked, SumsArrived, TakeTurn, TurnTaken
from pliant.train.rendezvous import Left
from pliant.train.step import Outcome, Step, Turn
from pliant.train.step_start import StepStart

if TYPE_CHECKING:
    from pliant.elastic.member import Member
    from pliant.progress_board import ProgressBoard
    from pliant.train.current_step import CurrentStep
    from pliant.train.deferred import DeferredUpdates
    from pliant.train.driver import PhaseDriver
    from pliant.train.events import Listeners
    from pliant.train.feeder import Feeder
    from pliant.train.job_state import JobState
    from pliant.train.lone_steps import LoneSteps
    from pliant.train.outer_code import OuterCode
    from pliant.train.pass_exchange import PassExchange
    from pliant.train.passes import Passes
    from pliant.train.step_batches import Batch, StepBatches
    from pliant.train.sync import SyncController
    from pliant.train.views import WorkerViews


class Trainer:
    """Runs the steps of this worker, in the program's own thread."""

    def __init__(
        self,
        member: Member,
        state: JobState,
        driver: PhaseDriver,
        views: WorkerViews,
        passes: Passes,
        exchange: PassExchange,
        lone: LoneSteps,
        current: CurrentStep,
        batches: StepBatches,
        outer: OuterCode,
        feeder: Feeder,
        deferred: DeferredUpdates,
        sync: SyncController,
        listeners: Listeners,
        board: ProgressBoard,
        loss_scale: Callable[[], float],
    ) -> None:
        """`loss_scale` returns the product of all gradient scalers' factors."""
        self.state, self.progress, self.replicas = state, state.progress, state.replicas
        self.reducers, self.adaptation, self.averaging = state.reducers, state.adaptation, state.averaging
        self.driver, self.views, self.current, self.outer = driver, views, current, outer
        self.deferred, self.sync, self.feeder = deferred, sync, feeder
        self._member, self._listeners, self._board = member, listeners, board
        self._passes, self._exchange, self._lone, self._batches = passes, exchange, lone, batches
        self._loss_scale = loss_scale
        self._loop_of: int | None = None
        """The epoch in which the program has begun a loop over the steps."""

    @property
    def is_taken_back(self) -> bool:
        """Whether the step in progress does not count: the program runs to its end without effect."""
        return self.driver.is_taken_back

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        for reducer in self.reducers:
            reducer.close()

    # --- steps ---

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are left of this epoch."""
        self._close_step()
        current, epoch = self.current, self.progress.epoch
        if self._loop_of == epoch and not self.driver.is_taken_back:
            raise TrainError(
                f"a second loop over the steps of epoch {epoch}: an epoch has one, whose batches are loaded once. For another "
                "round over the data, let job.epochs run longer"
            )
        self._loop_of = epoch
        self._batches.forget()
        while self._begin_step(epoch):
            step = current.step = Step(self, self.progress.step, epoch, self.progress.epoch_step)
            try:
                yield step
            except GeneratorExit:
                if current.step is step:
                    current.is_left = True
                raise
            if current.step is not step:
                raise TrainError(
                    f"step {step.number} is over: this loop over the steps was left, or another was begun in its body"
                )
            self._end_step()

    def _begin_step(self, epoch: int) -> bool:
        """Enter the right view and begin a step; return False if the epoch is over."""
        driver = self.driver
        if self.current.is_left:
            self.settle()
        if self.replicas.is_live and self._lone.begin_step(epoch):
            if self._lone.load_batch():
                return True
            self._end_data()
            self._board.run_program(time.monotonic())
            return False
        while True:
            self._ask_for_step()
            if driver.is_taken_back or driver.machine.is_lost:
                continue
            if self.progress.epoch != epoch:
                return False  # the others had finished it before they gave us their state
            if self._load_step():
                return True
            if not driver.wait_for_sums() or driver.await_newcomers() is not None:
                continue
            if self.sync.may_defer:
                # Whoever has left an epoch has all of its sums, and so have the others.
                driver.meet(lambda: SumsArrived(for_sure=self.views.size == 1), "the end of an epoch")
            return False

    def _ask_for_step(self) -> None:
        """Settle what the program did before this step, and enter another view if there is one."""
        driver = self.driver
        if driver.machine.wants_view:
            driver.wait_for_sums()  # in another view they would never come
        if driver.is_taken_back:
            self._passes.undo_step()
            self._loop_of, self.current.left_early = None, False
        elif driver.joins_late:
            driver.end_late_joining()
        else:
            self.outer.note_draws()
        self.state.forget_loaded()
        self.progress.in_epoch = True
        driver.perform(driver.handle(StepAsked()))

    def _load_step(self) -> bool:
        """Load what the step begins with; return False if there are no more data."""
        if self.progress.epoch_step:  # else loaders are started, and nobody can say how long that takes
            self._board.begin_turn(self.progress.step, time.monotonic(), begins_step=True)
        if not self._batches.begin_step():
            self._batches.end_step()
            return False
        self.outer.begin_step()
        if self.sync.may_defer and self._member.elastic:
            self.current.start = StepStart.of(self.state)
        self.adaptation.begin_epoch()
        self.outer.begin()
        batch = self._batches.load(self.views.hosted[0])
        self.current.begin()
        if batch:
            return True
        self._end_data()
        self._board.run_program(time.monotonic())
        return False

    def _end_data(self) -> None:
        """End a step for which there were no data, so that all workers know, whichever replicas they host."""
        if self.driver.wait_for_sums():
            self._pass_over()
            self._batches.end_step()
            self.current.end()

    def _close_step(self) -> None:
        """End a step that an iterator keeps open, and that the program has left."""
        self.current.is_left = self.current.step is not None
        self.settle()

    def settle(self) -> None:
        """End a step that the program has left: it counts if it had a pass, else its batches are passed over.

        This is done with the next thing that the program does with the job. After an error in the outer body there is no
        such thing: the rest of the body has not run, so no listener may hear of the step, and no checkpoint may have it.
        """
        if self.current.is_left:
            self.current.is_left = False
            self._end_step(is_left=True)

    def _end_step(self, *, is_left: bool = False) -> None:
        """Commit the step: the program has come back from its body, or has left it by `break`."""
        current, driver, views = self.current, self.driver, self.views
        if current.turn is not None or current.left_early:
            current.check_outer("the end of a step")
        step, current.step = current.step, None
        views.changes.step_ended_s = time.monotonic()
        if step is None or driver.machine.phase is Phase.TAKEN_BACK:
            return
        if not current.passes:
            self._pass_over()
            if driver.is_taken_back:
                return
        adaptation, listeners, progress = self.adaptation, self._listeners, self.progress
        if adaptation.is_active and adaptation.has_decided and not driver.wait_for_sums():
            return  # decisions wait until the step surely counts
        self._batches.end_step()
        current.end()
        for reducer in self.reducers:
            reducer.end_step()
        progress.step += 1
        progress.epoch_step += 1
        if views.reported != views.last_pass_in == self._member.entered:
            views.report_step()
        if adaptation.is_active or listeners.want_values:
            adaptation.record_timing(views.timer.compute_s, self.deferred.waits.seconds)
            adaptation.values |= step.means
        if adaptation.is_active or adaptation.values or adaptation.last_values:
            try:
                adaptation.end_step()
            except CommError as error:
                driver.lost(error)  # the machine remembers it
        if not self.replicas.is_live:
            self.outer.note_draws()  # a checkpoint of this step has them
            if views.is_alone and self._lone.is_possible:
                self._lone.begin()
        if listeners.commit or not listeners.last_called < progress.step < listeners.next_call:
            self._tell_listeners(is_left)

    def _tell_listeners(self, is_left: bool) -> None:
        progress, views = self.progress, self.views
        event = StepCommitted(
            progress.step,
            progress.epoch,
            progress.epoch_step,
            views.size,
            views.current_engine().rank,
            time.monotonic() - views.timer.began_s,
            views.timer.compute_s,
            self.adaptation.last_values,
            is_left,
        )
        self._listeners.tell(event)

    def end_epoch(self, epoch: int) -> None:
        """The program has come to the end of an epoch."""
        self._close_step()
        if self.progress.epoch == epoch and self.driver.wait_for_sums():
            if not self.driver.joins_late:
                self.outer.note_draws()  # a checkpoint of the epoch's end has them
            self.progress.epoch += 1
            self.progress.epoch_step = 0
            self.progress.in_epoch = False
            self._loop_of, self.state.answers = None, []

    def finish(self) -> None:
        """Leave once every worker has the last step: until then one of them may need this worker's state."""
        driver = self.driver
        self._close_step()
        if not driver.wait_for_sums():  # after a break the program cannot do it again
            raise MustBeReplaced(f"step {self.progress.step - 1}, the last one, was lost with another worker")
        if self.views.size > 1 and not driver.joins_late:
            try:
                driver.meet(self._passes.finish, "the end of the last epoch")
            except Left:
                if not self._member.over:
                    raise
                return  # another worker has passed the barrier, so all of them have the last step
        driver.handle(ProgramEnded())

    # --- passes ---

    def turns(self, step: Step) -> Iterator[Any]:
        """Yield the batches of the replicas hosted here, one turn each; then sum their gradients."""
        current = self.current
        if self.replicas.is_live and step is current.step and current.turn is None and not current.left_early:
            return self._lone.turn(step, self._end_lone_turn)
        return self._turns_of_block(step)

    def _turns_of_block(self, step: Step) -> Iterator[Any]:
        current, driver = self.current, self.driver
        if step is not current.step:
            raise TrainError(f"step {step.number} is over: iterate over it in its own body of the loop")
        if current.turn is not None:
            raise TrainError(
                f"step {step.number}: `for ... in step:` inside of another `for ... in step:`. Write the loops one after the "
                "other"
            )
        current.check_outer(f"a loop over step {step.number}")
        if driver.is_taken_back:
            return
        self._begin_pass()
        place = f"the loop over step {step.number}"
        action = driver.perform(driver.handle(PassBegun()), self._passes.run, place)
        current.left_early = True
        try:
            while isinstance(action, TakeTurn):
                batch = self._begin_turn(action.slot)
                if batch:
                    yield batch[0]
                else:
                    current.running_turn("the end of data").outcome = Outcome.NO_DATA
                action = driver.perform(self._end_turn(), self._passes.run, place)
            current.left_early = False
        finally:
            current.turn = None
            for reducer in self.reducers:
                reducer.end_turns()
        if not driver.is_taken_back:
            self.outer.begin()

    def _end_lone_turn(self, step: Step) -> None:
        """End the turn of the only replica, and its pass, as those of a block."""
        self._exchange.clear()
        self.driver.perform(self._end_turn(), self._passes.run, f"the loop over step {step.number}")
        self.outer.begin()

    def skip_turn(self, what: str, outcome: Outcome) -> None:
        """Let the replica whose turn it is have no backward."""
        turn = self.current.running_turn(what)
        if any(each.handed_in for each in (self._lone.watches if self.replicas.is_live else self.reducers)):
            raise TrainError(f"{what} after the backward of replica {turn.replica}: its gradients are on their way")
        turn.outcome = outcome
        self.deferred.unused_parameters()  # zeros must not be written where sums of the last step are on their way

    def _begin_pass(self) -> None:
        """Begin a pass, before its first turn. (Turns that are taken again begin with `_begin_turn`.)"""
        current = self.current
        if current.passes:
            self.sync.stop_deferring()
        else:
            current.writes_first = current.writes_first or current.has_written()
        self.outer.end()
        cleared = self.deferred.cleared
        if cleared is None or self.driver.machine.is_lost:
            self.driver.wait_for_sums()
            cleared = {}
        for reducer in self.reducers:
            reducer.begin_pass(cleared=cleared, begins_step=not current.passes)

    def _begin_turn(self, slot: int) -> Batch:
        """Give the replica in this slot its context, and return its batch; nothing if its data have ended."""
        if slot == 0:
            self._begin_turns()
        views = self.views
        hosted = views.hosted
        replica = hosted[slot]
        self.current.turn = Turn(replica, slot, slot == len(hosted) - 1)
        for reducer in self.reducers:
            reducer.begin_turn(slot)
        batch = self._batches.load(replica)
        self.outer.switch_to(replica)
        if views.changes.is_ending:
            views.changes.end(self.progress.step, views.size)
        now_s = time.monotonic()
        views.timer.begin_turn(self.deferred.waits.seconds, now_s)
        self._board.begin_turn(self.progress.step, now_s)
        self.reducers[0].record_samples(batch[1] if batch else 0, self._loss_scale)
        return batch

    def _begin_turns(self) -> None:
        """Begin the turns of a pass, for the first time or again in another view."""
        engine, timer = self.views.current_engine(), self.views.timer
        self._exchange.clear()
        if self.averaging is not None:
            try:
                self.averaging.begin(self.progress.step)
            except CommError as error:
                self.driver.lost(error)  # the machine remembers it
        self.sync.begin_step(engine)
        self.reducers[0].begin_step(self.progress.step)
        if trace.enabled() and timer.began_s:
            trace.event("step", f"step {self.progress.step - 1}", timer.began_s)
        if not self.current.passes:
            timer.begin_step(engine)

    def _end_turn(self) -> Action:
        """Keep what the turn leaves: its context, and the buffers of replica 0."""
        turn = self.current.turn
        assert turn is not None, "a turn was taken"
        self.views.timer.end_turn(self.deferred.waits.seconds)
        self.current.turn = None
        if self.deferred.lost is not None:
            return self.driver.take_back()
        turn.models = sum(1 << number for number, reducer in enumerate(self.reducers) if reducer.handed_in)
        if not self.sync.may_defer:
            turn.had_gradients = sum(
                1 << number for number, each in enumerate(self.reducers) if each.wanted and each.bases
            )
        if turn.models:
            if turn.outcome is not Outcome.NOTHING:
                what = "step.skip()" if turn.outcome is Outcome.SKIPPED else "step.no_backward()"
                raise TrainError(
                    f"backward() after {what} in the turn of replica {turn.replica} of step {self.progress.step}: leave out one "
                    "of them"
                )
            turn.outcome = Outcome.SUMMED
        elif turn.outcome is Outcome.SKIPPED and not turn.is_last:
            for reducer in self.reducers:
                reducer.contribute_zeros()
        self._exchange.add(turn, self.feeder.stream(turn.replica), self.outer.switch)
        return self.driver.handle(TurnTaken())

    def _pass_over(self) -> None:
        """Take the batches of a step that the program has left without a pass: with DDP they are loaded, too."""

        def exchange() -> SumsArrived:
            self._exchange.clear()
            hosted = self.views.hosted
            for slot, replica in enumerate(hosted):
                outcome = Outcome.PASSED_OVER if self._batches.load(replica) else Outcome.NO_DATA
                self.outer.switch_to(replica)
                turn = Turn(replica, slot, slot == len(hosted) - 1, outcome)
                self._exchange.add(turn, self.feeder.stream(replica), self.outer.switch)
            return self._passes.run()

        if not self.driver.wait_for_sums():
            return
        self.outer.end()
        self.driver.meet(exchange, f"step {self.progress.step}")
        if not self.driver.is_taken_back:
            self.outer.begin()
