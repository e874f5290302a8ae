"""The training loop of one worker: it does what the machine of `phases` decides.

All N replicas do a step, or none does. In each pass of a step the replicas hosted here take their turns: a replica's
context is restored, its batch goes through the body of the inner loop, its gradients are collected, its context is
captured. Then the gradients are summed over the whole job. The contexts and the buffers of replica 0 travel with them, so
every worker has the whole state of the job afterwards. If a worker is lost before that, the turns are taken again in a new
view, and the outer body does not notice.

Between passes the program's own code runs once on every worker: with the buffers of replica 0, and the random state of the
first replica hosted here. What it draws moves the generators of all replicas.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pliant.cluster import View
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Member
from pliant.errors import CommError, MustBeReplaced, TrainError
from pliant.train import trace
from pliant.train.backward_watch import BackwardWatch
from pliant.train.context import RNG_BYTES, DataPosition, ReplicaContext, RngState, capture_rng
from pliant.train.deferred import DeferredUpdates, is_survivable
from pliant.train.events import Listeners, StepCommitted, ViewChanges
from pliant.train.exchange import StepMessage
from pliant.train.feeder import Feeder
from pliant.train.guard import Guard
from pliant.train.job_state import JobState
from pliant.train.meeting import MeetingWatch
from pliant.train.outer_code import OuterCode
from pliant.train.pass_exchange import MAX_PASSES, PassExchange, PassResult, StallWatch
from pliant.train.phases import (
    Action,
    AllConfirmed,
    ChangeAgreed,
    Confirm,
    EnterView,
    Event,
    Exchange,
    Fail,
    FetchState,
    PassBegun,
    PeerLost,
    Phase,
    PhaseMachine,
    ProgramEnded,
    Report,
    RunProgram,
    StateFetched,
    StateMade,
    StepAsked,
    StepTakenBack,
    SumsArrived,
    TakeTurn,
    TurnTaken,
    ViewEntered,
    ranks_behind,
)
from pliant.train.rendezvous import EnteredView, Left, ViewRendezvous, reclaim_state
from pliant.train.replicas import Blocks, Placement, ReplicaSwitch, place_replicas
from pliant.train.step import Outcome, Step, Turn
from pliant.train.step_batches import Batch, StepBatches
from pliant.train.step_start import StepStart
from pliant.train.sync import StepTimer, SyncController

log = logging.getLogger(__name__)
T = TypeVar("T")
COMPLAINT_WAIT_S = 10.0
"""How long a worker that has found an error waits until all others have found it, too."""


class Trainer:
    """Runs the steps of this worker, in the program's own thread."""

    def __init__(
        self,
        member: Member,
        state: JobState,
        rendezvous: ViewRendezvous,
        feeder: Feeder,
        deferred: DeferredUpdates,
        sync: SyncController,
        guard: Guard,
        meetings: MeetingWatch,
        listeners: Listeners,
        device: torch.device,
        blocks: Blocks | None = None,
        *,
        follows_view: bool = False,
        stall_watch: StallWatch = lambda _: contextlib.nullcontext(),
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`loss_scale` returns the product of all gradient scalers' factors."""
        self.state, self.progress, self.replicas = state, state.progress, state.replicas
        self.reducers, self.adaptation, self.averaging = state.reducers, state.adaptation, state.averaging
        self._watches = [BackwardWatch(reducer) for reducer in self.reducers]
        self._parameters = [parameter for reducer in self.reducers for parameter in reducer.parameters]
        self.deferred, self.sync, self.feeder = deferred, sync, feeder
        self.phases = PhaseMachine(elastic=member.elastic, keeps_start=sync.may_defer)
        self._own_switch = ReplicaSwitch(state.buffers, device, state.sync_buffers)
        self.replica_switch = self._own_switch
        self.changes = ViewChanges(listeners.view)
        self.turn: Turn | None = None
        """The turn in progress."""
        self.engine: Engine | None = None
        self.hosted: range = range(0)
        self.announces = False
        """Whether this worker tells about the last change of view."""
        self._member, self._rendezvous, self._guard, self._listeners = member, rendezvous, guard, listeners
        self._device, self._blocks, self._follows_view = device, blocks, follows_view
        self._loss_scale = loss_scale
        self._batches = StepBatches(feeder, self.replicas, self.progress, device)
        self._outer = OuterCode(state, self._batches, device)
        self._pass = PassExchange(state, guard, stall_watch, device)
        self._result: PassResult | None = None
        """What the pass leaves whose sums are here, until it counts."""
        self._timer = StepTimer()
        self._is_alone = False
        """Whether this worker has no others beside it, and hosts the only replica, so that nothing has to be switched,
        exchanged or kept."""
        self._taken: DataPosition | None = None
        """The data position after the last turn of the only replica. None if it is dealt its samples: the feeder tells the
        same later."""
        self._meetings = meetings
        self._step: Step | None = None
        """The step in progress; None between steps."""
        self._passes_in_step = 0
        self._is_left = False
        """Whether the program has left the step in progress, by `break` or by an error."""
        self.is_broken = False
        """Whether this worker can do nothing more with the others: it was dismissed, or an error has ended its part."""
        self._kept: dict[int, dict[str, Any]] = {}
        """What each replica has kept for the next pass of this step."""
        self._is_new_view = False
        """Whether nothing was exchanged in this view yet. New workers have not drawn what the others have."""
        self._step_start: StepStart | None = None
        self._undo: StepStart | None = None
        """What to go back to: the start of the step in progress, and of the step whose sums were last deferred."""
        self._fetched: Handle | None = None
        self._writes_first = False
        """Whether the program changes parameters before the first pass of its steps."""
        self._versions = 0
        self._reported_view = self._last_pass_in = -1
        """The views in which this worker has last reported a step, and in which it has done its last pass."""
        self._left_early = False
        """Whether the program has left a loop over the step in progress before its last turn."""
        self._loop_of: int | None = None
        """The epoch in which the program has begun a loop over the steps."""
        self._answers_read = 0
        self._joins_late = False
        """Whether the others have run the program's code before this step already. What this worker does there is
        dropped."""
        self._step_ended_s = self._lost_s = 0.0

    # --- views ---

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0: it writes checkpoints, and requests scheduled resizes for the whole job."""
        return self.engine is None or self.engine.rank == 0

    @property
    def size(self) -> int:
        return self.engine.view.size if self.engine is not None else 1

    def _current_engine(self) -> Engine:
        assert self.engine is not None, "join() comes first"
        return self.engine

    def _prepare_view(self, view: View) -> None:
        """Have the memory that the gradients need in a view that is about to be entered, while the program trains in an
        older one."""
        if self.engine is not None and view.size > 1:
            count = view.size if self._follows_view else self.replicas.count
            hosted = place_replicas(count, view.size, view.rank_of(self._member.me), self._blocks).hosted
            missing = [each for reducer in self.reducers for each in reducer.missing_memory(len(hosted))]
            self._member.transport.reserve(missing, pins=self._device.type == "cuda")

    def warm_memory(self) -> None:
        """Have the memory that the gradients of one replica will need, before the others count on this new worker. Its
        buckets are not known yet."""
        num_bytes = sum(parameter.nbytes for each in self.reducers if each.wanted for parameter in each.parameters)
        if num_bytes:
            self._member.transport.reserve(num_bytes=num_bytes + num_bytes // 8, pins=self._device.type == "cuda")

    def join(self) -> None:
        """Enter the job, as a new worker."""
        self._member.on_prepare = self._prepare_view
        self._rendezvous.report_ready()
        self._perform(EnterView())

    def _enter_view(self, planned: int | None) -> Action:
        old_size, had_view = self._member.size, self.engine is not None
        if planned is None and had_view:
            for reducer in self.reducers:
                reducer.halt()
        if had_view:
            self._outer.note_draws()
        runs_program = self._outer.is_running or not had_view  # else it takes turns, or evaluates shards
        since_s = (self._step_ended_s or time.monotonic()) if planned is not None else self._lost_s
        entered = self._rendezvous.enter(planned, self._report_and_lend())
        if entered.made_state:
            self._handle(StateMade(self.progress.passes))
        placement = self._place(entered.engine)
        try:
            action, has_newcomers = self._share_state(entered, placement)
        except CommError as error:
            return self._lost(error)
        finally:
            self.state.lent = {}
        self._fetched = self._rendezvous.report_fetched(entered)
        if not had_view:
            self._joins_late = self.progress.in_epoch
        self._use_view(entered, placement)
        if had_view:
            self.changes.begin(since_s, old_size, not entered.was_planned)
        if self.turn is None and isinstance(action, RunProgram):
            if runs_program:
                self._outer.begin()
            if has_newcomers or (entered.was_planned and self._writes_first):
                # The program may change what new workers read.
                return self._await_newcomers() or action
        return action

    def _report_and_lend(self) -> Report:
        """Return this worker's report for the next view. What it lends is the state with which the step in progress began,
        if others can begin with it: the program may have changed tracked objects and options before the first pass."""
        report, start = self.phases.report, self._step_start
        if self._step is None or start is None or start.progress.passes != self.phases.passes:
            return report
        self.state.lent = start.to_lend()
        has_written = self._count_writes() != self._versions  # parameters are not kept
        return replace(report, in_step=report.in_step or has_written)

    def _share_state(self, entered: EnteredView, placement: Placement) -> tuple[Action, bool]:
        """Take part in giving everybody the newest state. Return what to do next, and whether a worker lacked it."""
        reports = tuple(report.of_phases for report in entered.reports)
        arrived, behind = ViewEntered(reports, len(placement.hosted)), ranks_behind(reports)
        if entered.engine.rank in behind:
            action = self._handle(arrived)
            if isinstance(action, FetchState):
                self._rendezvous.share_state(entered)
                action = self._handle(StateFetched(self.progress.passes))
        else:
            if behind:
                self._rendezvous.share_state(entered)
            action = self._handle(arrived)
        return action, bool(behind)

    def _place(self, engine: Engine) -> Placement:
        size = engine.view.size
        return place_replicas(size if self._follows_view else self.replicas.count, size, engine.rank, self._blocks)

    def _use_view(self, entered: EnteredView, placement: Placement) -> None:
        """Use this engine from now on, and host the replicas that its view places here."""
        changed, engine = self.engine is not None and self.engine is not entered.engine, entered.engine
        self.engine, self.announces = engine, entered.announces
        self._deal_to_view()
        self.hosted = placement.hosted
        self._batches.enter_view(placement.hosted)
        self._pass.enter_view(engine, placement)
        for reducer in self.reducers:
            if changed and not self.state.keeps_layout:
                reducer.use_layout(None)
            reducer.enter_view(engine, placement.blocks)
        if self.averaging is not None:
            self.averaging.enter_view(engine, placement.blocks)
        self.sync.enter_view()
        self._timer = StepTimer.of(engine)
        self.trace_engine()
        self.adaptation.enter_view(engine)
        self._guard.enter_view()
        self._is_alone = (
            engine.size == 1
            and self.replicas.count == 1
            and self.state.sync_buffers
            and self.averaging is None
            and not self.sync.may_defer
            and not self.adaptation.is_active
        )
        self._is_new_view = True
        if not entered.was_planned:
            self._member.settled()

    def _deal_to_view(self) -> None:
        """Deal the rest of the epoch to one replica per worker, if that is their number."""
        if self._follows_view and self.size != self.replicas.count:
            self.replicas.deal_to(self.size, self.progress.epoch, self.progress.step, self._device)
        for reducer in self.reducers:
            reducer.num_replicas = self.replicas.count

    def trace_engine(self) -> None:
        """Add the engine's slices to the trace, if one is written."""
        if trace.enabled() and self.engine is not None:
            self.engine.watch(_trace_slice)

    def _lost(self, error: CommError) -> Action:
        """Decide what follows the loss of a worker. Raises other errors, which no new view would cure."""
        if not self._member.elastic or not is_survivable(error):
            raise error
        log.debug("%s while %s", error, self.phases.phase.value)
        self._lost_s = time.monotonic()
        self.changes.steps_begun = self.progress.step + 1
        return self._handle(PeerLost(str(error)))

    def _handle(self, event: Event) -> Action:
        """Report an event to the machine. Where that makes a pass count, keep what it leaves."""
        before = self.phases.passes
        action = self.phases.handle(event)
        if 0 <= before == self.phases.passes - 1 and not isinstance(event, StateFetched):
            self._count_pass()
            # A pass that counts when a view is entered was done in the view before.
            self._last_pass_in = self._member.entered if not isinstance(event, ViewEntered) else -1
        return action

    def _await_newcomers(self) -> Action | None:
        """Wait until new workers have the state. Return what to do if a worker is lost meanwhile."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            try:
                fetched.wait()
            except CommError as error:
                return self._lost(error)
        return None

    def _perform(self, action: Action, exchange: Callable[[], Action] | None = None, place: str = "") -> Action:
        """Do what the machine says until the program goes on, or a turn begins. `exchange` is what the workers do
        together in this pass, and `place` says where that is in the program."""
        try:
            return self._perform_until_the_program(action, exchange, place)
        except BaseException:
            self.is_broken = True
            raise

    def _perform_until_the_program(self, action: Action, exchange: Callable[[], Action] | None, place: str) -> Action:
        while True:
            match action:
                case RunProgram() | TakeTurn():
                    return action
                case EnterView() | Exchange() if not self.wait_for_sums():
                    return RunProgram()  # the step before is taken back
                case EnterView(planned):
                    action = self._enter_view(planned)
                case Exchange():
                    assert exchange is not None, "only a pass has an exchange"
                    self._meetings.begin(self._current_engine(), self.phases.passes, place)
                    try:
                        action = exchange()
                    except CommError as error:
                        action = self._lost(error)
                    finally:
                        self._meetings.end()
                case Confirm():
                    try:
                        self._current_engine().barrier("confirm")
                        action = self._handle(AllConfirmed())
                    except CommError as error:
                        action = self._lost(error)
                case Fail(why, is_shared):
                    raise (TrainError if is_shared else MustBeReplaced)(why)
                case FetchState():
                    raise AssertionError("a state is fetched where a view is entered")

    # --- steps ---

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are left of this epoch."""
        self._close_step()
        epoch = self.progress.epoch
        if self._loop_of == epoch and not self.is_taken_back:
            raise TrainError(
                f"a second loop over the steps of epoch {epoch}: an epoch has one, whose batches are loaded once. For another "
                "round over the data, let job.epochs run longer"
            )
        self._loop_of = epoch
        self._batches.forget()
        while self._begin_step(epoch):
            step = self._step = Step(self, self.progress.step, epoch, self.progress.epoch_step)
            try:
                yield step
            except GeneratorExit:
                if self._step is step:
                    self._is_left = True
                raise
            if self._step is not step:
                raise TrainError(
                    f"step {step.number} is over: this loop over the steps was left, or another was begun in its body"
                )
            self._end_step()

    def _begin_step(self, epoch: int) -> bool:
        """Enter the right view and begin a step; return False if the epoch is over."""
        if self._is_left:
            self.settle()
        if self.replicas.is_live and self._may_go_on_alone(epoch):
            return self._begin_step_alone()
        while True:
            self._ask_for_step()
            if self.is_taken_back or self.phases.is_lost:
                continue
            if self.progress.epoch != epoch:
                return False  # the others had finished it before they gave us their state
            if self._load_step():
                return True
            if not self.wait_for_sums() or self._await_newcomers() is not None:
                continue
            if self.sync.may_defer:
                # Whoever has left an epoch has all of its sums, and so have the others.
                self.together(lambda _: None, lambda: None, "the end of an epoch")
            return False

    def _ask_for_step(self) -> None:
        """Settle what the program did before this step, and enter another view if there is one."""
        if self.phases.wants_view:
            self.wait_for_sums()  # in another view they would never come
        if self.is_taken_back:
            self._undo_step()
        elif self._joins_late:
            self._joins_late = False
            self._outer.drop()
            self._rendezvous.reload_state()
            self._deal_to_view()
            self._outer.begin()  # it goes on at once if this epoch has no more steps
        else:
            self._outer.note_draws()
        self.state.forget_loaded()
        self.progress.in_epoch = True
        self._perform(self._handle(StepAsked()))

    def _load_step(self) -> bool:
        """Load what the step begins with; return False if there are no more data."""
        if not self._batches.begin_step():
            self._batches.end_step()
            return False
        self._outer.begin_step()
        if self.sync.may_defer and self._member.elastic:
            self._step_start = StepStart.of(self.state)
        self.adaptation.begin_epoch()
        self._outer.begin()
        batch = self._batches.load(self.hosted[0])
        self._left_early = False
        if batch:
            self._versions = self._count_writes()
            return True
        if self.wait_for_sums():
            self._pass_over()  # so that all workers know, whichever replicas they host
            self._end_batches()
        return False

    def _count_writes(self) -> int:
        return sum([parameter._version for parameter in self._parameters])

    def _close_step(self) -> None:
        """End a step that an iterator keeps open, and that the program has left."""
        self._is_left = self._step is not None
        self.settle()

    def settle(self) -> None:
        """End a step that the program has left: it counts if it had a pass, else its batches are passed over.

        This is done with the next thing that the program does with the job. After an error in the outer body there is no
        such thing: the rest of the body has not run, so no listener may hear of the step, and no checkpoint may have it.
        """
        if self._is_left:
            self._is_left = False
            self._end_step(is_left=True)

    def _end_step(self, *, is_left: bool = False) -> None:
        """Commit the step: the program has come back from its body, or has left it by `break`."""
        self.check_outer("the end of a step")
        step, self._step = self._step, None
        self._step_ended_s = time.monotonic()
        if step is None or self.phases.phase is Phase.TAKEN_BACK:
            return
        if not self._passes_in_step:
            self._pass_over()
        if self.is_taken_back or (self.adaptation.has_decided and not self.wait_for_sums()):
            return  # decisions wait until the step surely counts
        self._end_batches()
        for reducer in self.reducers:
            reducer.end_step()
        self.progress.step += 1
        self.progress.epoch_step += 1
        if self._reported_view != self._last_pass_in == self._member.entered:
            # Reported for every membership: new members can enter after that.
            self._reported_view = self._member.entered
            self._member.settled(after_step=True)
            reclaim_state(self._member)  # all members have done a step, so all have the state
        self.adaptation.record_timing(self._timer.compute_s)
        if self.adaptation.is_active or self._listeners.want_values:
            self.adaptation.values |= step.means
        try:
            self.adaptation.end_step()
        except CommError as error:
            self._lost(error)  # the machine remembers it
        self._outer.note_draws()  # a checkpoint of this step has them
        if self._is_alone and not self.replicas.is_live:
            self._taken = None if self.replicas.loading.is_dealt else self.feeder.stream(0)
            self._outer.begin_live(self._stream_alone)
        self._tell_listeners(is_left)

    def _end_batches(self) -> None:
        self._batches.end_step()
        self._passes_in_step, self._kept = 0, {}

    def _tell_listeners(self, is_left: bool) -> None:
        if self._listeners.commit:
            progress = self.progress
            event = StepCommitted(
                progress.step,
                progress.epoch,
                progress.epoch_step,
                self.size,
                self._current_engine().rank,
                time.monotonic() - self._timer.began_s,
                self._timer.compute_s,
                self.adaptation.last_values,
                is_left,
            )
            for listener in self._listeners.commit:
                listener(event)

    # --- passes ---

    def turns(self, step: Step) -> Iterator[Any]:
        """Yield the batches of the replicas hosted here, one turn each; then sum their gradients."""
        if self.replicas.is_live and step is self._step and self.turn is None and not self._left_early:
            return self._turn_alone(step)
        return self._turns_of_block(step)

    def _turns_of_block(self, step: Step) -> Iterator[Any]:
        if step is not self._step:
            raise TrainError(f"step {step.number} is over: iterate over it in its own body of the loop")
        if self.turn is not None:
            raise TrainError(
                f"step {step.number}: `for ... in step:` inside of another `for ... in step:`. Write the loops one after the "
                "other"
            )
        self.check_outer(f"a loop over step {step.number}")
        if self.is_taken_back:
            return
        self._begin_pass()
        place = f"the loop over step {step.number}"
        action = self._perform(self._handle(PassBegun()), self._exchange_turns, place)
        self._left_early = True
        try:
            while isinstance(action, TakeTurn):
                batch = self._begin_turn(action.slot)
                if batch:
                    yield batch[0]
                else:
                    self.running_turn("the end of data").outcome = Outcome.NO_DATA
                action = self._perform(self._end_turn(), self._exchange_turns, place)
            self._left_early = False
        finally:
            self.turn = None
            for reducer in self.reducers:
                reducer.end_turns()
        if not self.is_taken_back:
            self._outer.begin()

    def running_turn(self, what: str) -> Turn:
        if self.turn is None:
            raise TrainError(f"{what} can only be used inside of `for ... in step:`, where a replica has its turn")
        return self.turn

    def skip_turn(self, what: str, outcome: Outcome) -> None:
        """Let the replica whose turn it is have no backward."""
        turn = self.running_turn(what)
        if any(each.handed_in for each in (self._watches if self.replicas.is_live else self.reducers)):
            raise TrainError(f"{what} after the backward of replica {turn.replica}: its gradients are on their way")
        turn.outcome = outcome
        self.deferred.unused_parameters()  # zeros must not be written where sums of the last step are on their way

    def _begin_pass(self) -> None:
        """Begin a pass, before its first turn. (Turns that are taken again begin with `_begin_turn`.)"""
        if self._passes_in_step:
            self.sync.stop_deferring()
        else:
            self._writes_first = self._writes_first or self._count_writes() != self._versions
        self._outer.end()
        cleared = self.deferred.cleared
        if cleared is None or self.phases.is_lost:
            self.wait_for_sums()
            cleared = {}
        for reducer in self.reducers:
            reducer.begin_pass(cleared=cleared, begins_step=not self._passes_in_step)

    def _begin_turn(self, slot: int) -> Batch:
        """Give the replica in this slot its context, and return its batch; nothing if its data have ended."""
        if slot == 0:
            self._begin_turns()
        replica = self.hosted[slot]
        self.turn = Turn(replica, slot, slot == len(self.hosted) - 1)
        for reducer in self.reducers:
            reducer.begin_turn(slot)
        batch = self._restore(replica)
        if self.changes.is_ending:
            self.changes.end(self.progress.step, self.size)
        self._timer.begin_turn(self.deferred.waits.seconds)
        self.reducers[0].record_samples(batch[1] if batch else 0, self._loss_scale)
        return batch

    def _restore(self, replica: int) -> Batch:
        """Load the batch of a replica, and go on with its context."""
        batch = self._batches.load(replica)
        context = self.replicas.contexts[replica].with_random(self._outer.random_of(replica))
        self.replica_switch.restore(context, self.state.first_buffers)
        return batch

    def _begin_turns(self) -> None:
        """Begin the turns of a pass, for the first time or again in another view."""
        engine = self._current_engine()
        self._pass.clear()
        if self.averaging is not None:
            try:
                self.averaging.begin(self.progress.step)
            except CommError as error:
                self._lost(error)  # the machine remembers it
        self.sync.begin_step(engine)
        self.reducers[0].begin_step(self.progress.step)
        if trace.enabled() and self._timer.began_s:
            trace.event("step", f"step {self.progress.step - 1}", self._timer.began_s)
        if not self._passes_in_step:
            self._timer.begin_step(engine)

    def _end_turn(self) -> Action:
        """Keep what the turn leaves: its context, and the buffers of replica 0."""
        turn = self.turn
        assert turn is not None, "a turn was taken"
        self._timer.end_turn(self.deferred.waits.seconds)
        self.turn = None
        if self.deferred.lost is not None:
            return self._take_back()
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
        self._pass.add(turn, self.feeder.stream(turn.replica), self.replica_switch)
        return self._handle(TurnTaken())

    def _pass_over(self) -> None:
        """Take the batches of a step that the program has left without a pass: with DDP they are loaded, too."""

        def exchange() -> Action:
            self._pass.clear()
            for slot, replica in enumerate(self.hosted):
                outcome = Outcome.PASSED_OVER if self._restore(replica) else Outcome.NO_DATA
                turn = Turn(replica, slot, slot == len(self.hosted) - 1, outcome)
                self._pass.add(turn, self.feeder.stream(replica), self.replica_switch)
            return self._exchange_turns()

        if not self.wait_for_sums():
            return
        self._outer.end()
        self._perform(self._handle(PassBegun(has_turns=False)), exchange, f"step {self.progress.step}")
        if not self.is_taken_back:
            self._outer.begin()

    # --- steps of a worker that is alone with the only replica ---

    def _stream_alone(self) -> DataPosition:
        return self._taken if self._taken is not None else self.feeder.stream(0)

    def _may_go_on_alone(self, epoch: int) -> bool:
        """Return whether the next step of this epoch begins where the last one has ended: in the same view, with the
        generators and buffers of the process as they are."""
        return (
            self.phases.may_go_on
            and self.progress.epoch == epoch
            and self.replica_switch is self._own_switch
            and not trace.enabled()
            and self._batches.may_go_on
        )

    def _begin_step_alone(self) -> bool:
        """Do what `_ask_for_step` and `_load_step` do."""
        self.phases.begin_step_alone()
        batch = self._batches.begin_live_step()
        self._left_early = False
        if batch:
            self._versions = self._count_writes()
            return True
        self._pass_over()
        self._end_batches()
        return False

    def _turn_alone(self, step: Step) -> Iterator[Any]:
        """Yield the batch of the only replica. Its gradients need no sum, and its context is the process itself."""
        watches, begins_step = self._watches, not self._passes_in_step
        if begins_step and not self._writes_first:
            self._writes_first = self._count_writes() != self._versions
        batch = self._batches.load(0)
        assert batch, "the step has begun with a batch"
        self.phases.begin_pass_alone()
        turn = self.turn = Turn(0, 0, True)
        for watch in watches:
            watch.begin_turn(begins_step=begins_step)
        self._timer.begin_turn_alone(begins_step)
        self._left_early = True
        try:
            yield batch[0]
            if turn.outcome is Outcome.NOTHING and not turn.kept and any(each.handed_in for each in watches):
                self._end_pass_alone(step, turn)
            else:
                for watch in watches:
                    watch.hand_over()
                self._pass.clear()
                self._perform(self._end_turn(), self._exchange_turns, f"the loop over step {step.number}")
                self._outer.begin()
            self._left_early = False
        finally:
            self.turn = None
            for watch in watches:
                watch.end_turn()

    def _end_pass_alone(self, step: Step, turn: Turn) -> None:
        """Do what `_exchange_turns` and `_count_pass` do."""
        self._timer.end_turn(0.0)
        if turn.figures:
            step.add_figures([turn.row])
        member, phases = self._member, self.phases
        if member.prepared > member.entered:
            self._handle(ChangeAgreed(member.prepared))
        phases.end_pass_alone()
        self.progress.passes, self._last_pass_in = phases.passes, member.entered
        for reducer in self.reducers:
            reducer.end_pass()
        if not self.replicas.loading.is_dealt:
            self._taken = self.feeder.stream(0)
        self._passes_in_step += 1

    # --- what travels with a pass ---

    def _exchange_turns(self) -> Action:
        """Sum the gradients, and send everybody what the next pass depends on."""
        engine, is_first_pass, began_s = self._current_engine(), not self._passes_in_step, time.monotonic()
        checksum = 0
        if is_first_pass and self._guard.is_due(self.progress.step, engine.size):
            self.deferred.flush()
            if self.deferred.lost is not None:
                return self._take_back()
            checksum = self._guard.checksum()
        message = StepMessage(
            self.progress.step * MAX_PASSES + self._passes_in_step,
            self._member.prepared,
            self.sync.proposed,
            self._timer.last,
            self.adaptation.pack_row(),
            self._pass.rows,
            0 if self._is_new_view else self._outer.checksum,
            checksum,
            has_group=any(reducer.group is not None and reducer.group.is_ready for reducer in self.reducers),
        )
        result = self._result = self._pass.run(message, shares_kept=self._member.elastic)
        self._is_new_view = False
        if result.complaint:
            return self._complain(result.complaint)
        if result.agreed_view > self._member.entered:
            self._handle(ChangeAgreed(result.agreed_view))
        ended_s = time.monotonic()
        self.deferred.waits.add(began_s, ended_s)
        if trace.enabled():
            trace.event("wait", "all workers", began_s, ended_s)
        if result.awaited is not None:
            gradients = [reducer.bases for reducer in self.reducers]
            self._undo = replace(self._step_start, gradients=gradients) if self._step_start is not None else None
            self.sync.defer_updates(result.awaited)
        return self._handle(SumsArrived(for_sure=engine.size == 1 or result.awaited is not None))

    def _complain(self, complaint: str) -> Action:
        """End the job with an error that every worker has found."""
        engine = self._current_engine()
        if engine.size > 1:
            with contextlib.suppress(CommError):  # whoever ends before the others know would be taken for lost
                engine.barrier("complaint", timeout_s=COMPLAINT_WAIT_S)
        return self._handle(SumsArrived(complaint))

    def kept_by(self, replica: int) -> dict[str, Any]:
        """Return what a replica has kept in this step."""
        return self._kept.get(replica, {})

    def _count_pass(self) -> None:
        """Keep what the pass leaves: it counts."""
        result, self._result = self._result, None
        self.progress.passes, self._outer.checksum = self.phases.passes, 0
        for reducer in self.reducers:
            reducer.end_pass()
        if result is None:
            return  # it had no turns
        contexts = list(self.replicas.contexts)
        for replica, context in result.contexts.items():
            contexts[replica] = context
        self.replicas.contexts = contexts
        self._batches.move_past(range(len(contexts)))
        if result.buffers is not None:
            self.state.use_first_buffers(result.buffers, are_in_models=self.hosted == range(1))
        for number, order in result.orders.items():
            self.reducers[number].rebuild(order)
        for reducer in self.reducers:
            if reducer.group is not None:
                reducer.group.use_if(all(each.has_group for each in result.messages))
        self.sync.apply_decision(result.messages[0].sync_config, [each.measured for each in result.messages], self.rank)
        if result.adaptation is not None:
            self.adaptation.learn(result.adaptation)
        for replica, values in result.kept.items():
            self._kept[replica] = {**self.kept_by(replica), **values}
        if self._step is not None:
            self._step.add_figures(result.rows)
        self._passes_in_step += 1
        self._pass.clear()

    # --- deferred updates ---

    def wait_for_sums(self) -> bool:
        """Wait for the sums of the last step that are still on their way; return False if it is taken back instead."""
        self.deferred.flush()
        if self.deferred.lost is not None and self.phases.phase is not Phase.TAKEN_BACK:
            self._take_back()
        return self.phases.phase is not Phase.TAKEN_BACK

    def _take_back(self) -> Action:
        """Take back the last step: its sums will never come."""
        error = self.deferred.lost
        assert error is not None, "a sum is lost"
        log.debug("step %d is taken back: %s", self.progress.step - 1, error)
        self._lost_s = time.monotonic()
        self.changes.steps_begun = self.progress.step + 1
        for reducer in self.reducers:
            reducer.fill_missing()
        return self._handle(StepTakenBack(str(error)))

    def _undo_step(self) -> None:
        """Go back to the state before the step that was taken back."""
        undo, self._undo = self._undo, None
        assert undo is not None, "it was remembered"
        self.deferred.undo_step()
        undo.restore(self.state)
        self._pass.clear()
        self._result, self._loop_of, self._left_early = None, None, False
        self._outer.drop()
        self._batches.forget()
        self._end_batches()

    # --- what all workers do together, outside of steps ---

    def together(self, ask: Callable[[Engine], T], alone: Callable[[], T], place: str) -> T:
        """Return what `ask` returns; `place` says in an error where the program is. All workers call this at the same
        place of their program; if one is lost, the others ask again in a new view, so that all get an answer.

        A new worker that runs the program's code before its first step gets the answers that the others got there. Where
        there are none, in a step that is taken back, or with a single worker, return what `alone` does.
        """
        if self.turn is not None:
            raise TrainError(
                f"{place} in the turn of replica {self.turn.replica}: all workers must call it together, after the loop over "
                "the step. To average a number over the replicas, use step.log in the turn"
            )
        self.check_outer(place)
        self.settle()
        if self.has_answer:
            self._answers_read += 1
            answer: T = copy.deepcopy(self.state.answers[self._answers_read - 1])
            return answer
        if self._joins_late or not self.wait_for_sums():
            return alone()  # the others do not take part: here the program runs without effect
        answers: list[T] = []

        def exchange() -> Action:
            self._result = None
            answers.append(ask(self._current_engine()) if self.size > 1 else alone())
            return self._handle(SumsArrived(for_sure=self.size == 1))

        self._perform(self._handle(PassBegun(has_turns=False)), exchange, place)
        if self.is_taken_back:
            return alone()
        if self._step is None and self.progress.epoch_step == 0:
            self.state.answers.append(copy.deepcopy(answers[-1]))
        return answers[-1]

    @property
    def has_answer(self) -> bool:
        """Whether the next thing that all workers do together has been done by the others already."""
        return self._joins_late and self._answers_read < len(self.state.answers)

    def share_of(self, shards: Sequence[int]) -> list[int]:
        """Return which of these shards this worker takes: those of the replicas hosted here, or all of them where the
        others do not take part."""
        if self.has_answer:
            return []
        return [shard for shard in shards if shard in self.hosted or self._joins_late or self.is_taken_back]

    @property
    def in_step(self) -> bool:
        return self._step is not None

    @property
    def is_taken_back(self) -> bool:
        """Whether the step in progress does not count: the program runs to its end without effect."""
        return self.phases.phase is Phase.TAKEN_BACK

    @property
    def rank(self) -> int:
        return self.engine.rank if self.engine is not None else 0

    def begin_shards(self, what: str) -> None:
        """Begin an evaluation, in which every replica has its shard."""
        self.check_outer(what)
        self.settle()
        self.wait_for_sums()
        self._outer.end()

    def begin_shard(self, replica: int) -> None:
        context = self.replicas.contexts[replica].with_random(self._outer.random_of(replica))
        self.replica_switch.restore(context, self.state.first_buffers)

    def end_shard(self, replica: int) -> bytes:
        """Return what a shard leaves: the random state of its replica, and the buffers that later turns begin with, if the
        shard has changed them."""
        changed, present = b"", self.replica_switch.capture_buffers()
        if replica == 0 or not self.state.sync_buffers:
            packed = bytes(self.state.buffers.pack(present).numpy())
            before = self.replicas.contexts[replica].buffers or bytes(
                self.state.buffers.pack(self.state.first_buffers).numpy()
            )
            changed = packed if packed != before else b""
        return capture_rng(self._device).to_bytes() + changed

    def end_shards(self, left: dict[int, bytes]) -> None:
        """End an evaluation: each of these replicas goes on with what its shard has left."""
        contexts = list(self.replicas.contexts)
        for replica, data in left.items():
            before, random, changed = contexts[replica], RngState.from_bytes(data[:RNG_BYTES]), data[RNG_BYTES:]
            own = b"" if self.state.sync_buffers else changed or before.buffers
            contexts[replica] = ReplicaContext(random, before.stream, own)
            if changed and replica == 0:
                flat = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
                self.state.use_first_buffers(self.state.buffers.unpack(flat))
        self.replicas.contexts = contexts
        self._batches.move_past(left.keys())
        self._outer.begin()

    def end_epoch(self, epoch: int) -> None:
        """The program has come to the end of an epoch."""
        self._close_step()
        if self.progress.epoch == epoch and self.wait_for_sums():
            if not self._joins_late:
                self._outer.note_draws()  # a checkpoint of the epoch's end has them
            self.progress.epoch += 1
            self.progress.epoch_step = 0
            self.progress.in_epoch = False
            self._loop_of, self.state.answers, self._answers_read = None, [], 0

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        for reducer in self.reducers:
            reducer.close()
        for watch in self._watches:
            watch.close()

    def finish(self) -> None:
        """Leave once every worker has the last step: until then one of them may need this worker's state."""
        self._close_step()
        if not self.wait_for_sums():  # after a break the program cannot do it again
            raise MustBeReplaced(f"step {self.progress.step - 1}, the last one, was lost with another worker")

        def exchange() -> Action:
            engine, self._result = self._current_engine(), None
            if self.size > 1:
                if complaint := self._guard.compare_at_end(engine, self.progress.step):
                    return self._complain(complaint)
                engine.barrier("finish")
            return self._handle(SumsArrived(for_sure=self.size == 1))

        if self.size > 1 and not self._joins_late:
            try:
                self._perform(self._handle(PassBegun(has_turns=False)), exchange, "the end of the last epoch")
            except Left:
                if not self._member.over:
                    raise
                return  # another worker has passed the barrier, so all of them have the last step
        self._handle(ProgramEnded())

    def check_outer(self, what: str) -> None:
        """Raise TrainError if `what` is called where it does not belong: in a turn, or after a loop that was left."""
        if self.turn is not None:
            raise TrainError(
                f"{what} in the turn of replica {self.turn.replica}: it belongs after the loop over the step, where it "
                "runs once for all replicas"
            )
        if self._left_early:
            raise TrainError(
                f"{what} in step {self.progress.step}, whose loop was left before all replicas had their turn, by break, "
                "return or an error: let every replica have its turn, and call step.skip() where it contributes nothing"
            )


def _trace_slice(what: str, name: str, index: int, peer: int, begin_s: float, end_s: float) -> None:
    """Add a slice to the trace."""
    trace.event(what, f"{name}[{index}]" + ("" if what == "back" else f" to {peer}"), begin_s, end_s)
