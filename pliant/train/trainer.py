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
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map_only

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Member
from pliant.errors import CommError, MustBeReplaced, TrainError
from pliant.train import trace
from pliant.train.context import ReplicaContext, RngState, capture_rng, restore_rng
from pliant.train.deferred import DeferredUpdates, is_survivable
from pliant.train.events import Listeners, Progress, StepCommitted, ViewChanges
from pliant.train.exchange import StepExchange, StepMessage
from pliant.train.feeder import Feeder
from pliant.train.guard import Guard
from pliant.train.job_state import JobState
from pliant.train.meeting import MeetingWatch
from pliant.train.outer_draws import Draws
from pliant.train.pending import ParameterGroups, options_of
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
from pliant.train.rendezvous import EnteredView, Left, ViewRendezvous, reclaim_state, spread_state
from pliant.train.replicas import Blocks, Placement, ReplicaSwitch, Tensors, place_replicas
from pliant.train.step import OWN_COUNTER, Outcome, Step, Turn, TurnRow, complaint_about, means_of
from pliant.train.sync import StepTimer, SyncController

log = logging.getLogger(__name__)
T = TypeVar("T")
COMPLAINT_WAIT_S = 10.0
"""How long a worker that has found an error waits until all others have found it, too."""
_MAX_PASSES = 1 << 16
"""The most passes that a step may have."""
StallWatch = Callable[[str], contextlib.AbstractContextManager[None]]
Batch = tuple[Any, int] | tuple[()]
"""A batch and its number of samples; nothing if the data of its replica have ended."""


@dataclass(frozen=True, slots=True)
class StepUndo:
    """The state of the job before a step that may have to be taken back, without what `DeferredUpdates` keeps."""

    progress: Progress
    contexts: list[ReplicaContext]
    first_buffers: Tensors
    adaptation: dict[str, Any]
    tracked: dict[str, Any]
    options: list[ParameterGroups]
    """The options of each optimizer's groups: the program may change them before its first pass."""
    gradients: list[Sequence[torch.Tensor | None] | None] = field(default_factory=list)
    """With which the turns of each reducer began."""


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
        self.deferred, self.sync, self.feeder = deferred, sync, feeder
        self.phases = PhaseMachine(elastic=member.elastic, keeps_start=sync.may_defer)
        self.replica_switch = ReplicaSwitch(state.buffers, device, state.sync_buffers)
        self.changes = ViewChanges(listeners.view)
        self.turn: Turn | None = None
        """The turn in progress."""
        self.engine: Engine | None = None
        self.hosted: range = range(0)
        self.announces = False
        """Whether this worker tells about the last change of view."""
        self._member, self._rendezvous, self._guard, self._listeners = member, rendezvous, guard, listeners
        self._device, self._blocks, self._follows_view = device, blocks, follows_view
        self._stall_watch, self._loss_scale = stall_watch, loss_scale
        self._exchange = StepExchange(state.buffers, self.replicas.num_loader_workers)
        self._timer = StepTimer()
        self._meetings = meetings
        self._turns: list[Turn] = []
        """The turns of the present pass that were taken here."""
        self._orders: dict[int, list[int]] = {}
        """For each reducer that still has its first layout, the order of replica 0's gradients in this pass."""
        self._own_orders: dict[int, list[int]] = {}
        """The same, where replica 0 is hosted here."""
        self._means: dict[str, float] = {}
        self._step: Step | None = None
        """The step in progress; None between steps."""
        self._passes_in_step = 0
        self._owes_pass = False
        """Whether the program has left a step by `break` before its first pass."""
        self._first_batch: Batch | None = None
        """The batch of the first replica hosted here, loaded when the step began."""
        self._batches: dict[int, Batch] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        """What each replica has kept for the next pass of this step."""
        self._new_kept: dict[int, dict[str, Any]] = {}
        self._step_contexts: list[ReplicaContext] = []
        """The contexts with which the step began."""
        self._outer: RngState | None = None
        """The random state with which the program's own code began to run; None in turns."""
        self._draws: Draws | None = None
        """What the program drew in this step before its first pass."""
        self._draws_checksum = 0
        self._is_new_view = False
        """Whether nothing was exchanged in this view yet. New workers have not drawn what the others have."""
        self._step_start: StepUndo | None = None
        self._undo: StepUndo | None = None
        """What to go back to: the start of the step in progress, and of the step whose sums were last deferred."""
        self._fetched: Handle | None = None
        self._writes_first = False
        """Whether the program changes parameters before the first pass of its steps."""
        self._versions = 0
        self._dealt = -1
        self._reported_view = self._last_pass_in = -1
        """The views in which this worker has last reported a step, and in which it has done its last pass."""
        self._left_early = False
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

    def join(self) -> None:
        """Enter the job, as a new worker."""
        self._rendezvous.report_ready()
        self._perform(EnterView())

    def _enter_view(self, planned: int | None) -> Action:
        old_size, had_view = self._member.size, self.engine is not None
        if planned is None and had_view:
            for reducer in self.reducers:
                reducer.halt()
        draws = None
        if self._is_before_pass:  # these draws follow the loading of batches, and are noted when the pass begins
            draws = Draws.between(self._outer, capture_rng(self._device)) if self._outer is not None else None
        elif had_view:
            self._note_draws()
        since_s = (self._step_ended_s or time.monotonic()) if planned is not None else self._lost_s
        self.state.lent = self._start_to_lend()
        try:
            entered = self._rendezvous.enter(planned, self.phases.report)
        finally:
            self.state.lent = {}
        if entered.made_state:
            self._handle(StateMade(self.progress.passes))
        reports = tuple(report.of_phases for report in entered.reports)
        behind = ranks_behind(reports)
        placement = self._place(entered.engine)
        arrived = ViewEntered(reports, len(placement.hosted))
        try:
            if entered.engine.rank in behind:
                action = self._handle(arrived)
                if isinstance(action, FetchState):
                    self._rendezvous.share_state(entered)
                    action = self._handle(StateFetched(self.progress.passes))
            else:
                if behind:
                    self._rendezvous.share_state(entered)
                action = self._handle(arrived)
        except CommError as error:
            return self._lost(error)
        self._fetched = self._rendezvous.report_fetched(entered)
        if not had_view:
            self._joins_late = not entered.started_job or self.progress.epoch_step > 0
        self._use_view(entered, placement)
        if had_view:
            self.changes.begin(since_s, old_size, not entered.was_planned)
        if self.turn is None and isinstance(action, RunProgram):
            self._run_outer_code(loads=self._is_before_pass)
            if draws is not None and self._outer is not None:
                restore_rng(draws.apply(self._outer), self._device)
            if behind or (entered.was_planned and self._writes_first):
                # The program may change what new workers read.
                return self._await_newcomers() or action
        return action

    @property
    def _is_before_pass(self) -> bool:
        """Whether the program's own code runs at the beginning of a step, before its first pass."""
        return self._step is not None and not self._passes_in_step

    def _place(self, engine: Engine) -> Placement:
        size = engine.view.size
        return place_replicas(size if self._follows_view else self.replicas.count, size, engine.rank, self._blocks)

    def _use_view(self, entered: EnteredView, placement: Placement) -> None:
        """Use this engine from now on, and host the replicas that its view places here."""
        changed, engine = self.engine is not None and self.engine is not entered.engine, entered.engine
        self.engine, self.announces = engine, entered.announces
        self._deal_to_view()
        self.hosted = placement.hosted
        self._exchange.enter_view(engine, placement)
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
        self._first_batch, self._batches, self._dealt = None, {}, -1
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
        epoch = self.progress.epoch
        self._dealt = -1
        while self._begin_step(epoch):
            self._step = Step(self, self.progress.step, epoch, self.progress.epoch_step)
            try:
                yield self._step
            except GeneratorExit:
                self._leave_step()
                raise
            self._end_step()

    def _begin_step(self, epoch: int) -> bool:
        """Enter the right view and begin a step; return False if the epoch is over."""
        self.settle()
        while True:
            if self.phases.wants_view:
                self.wait_for_sums()  # in another view they would never come
            if self.phases.phase is Phase.TAKEN_BACK:
                self._undo_step()
            elif self._joins_late:
                self._joins_late, self._outer = False, None
                self.state.reload()
                self._deal_to_view()
            else:
                self._note_draws()
            self.state.forget_loaded()
            self._perform(self._handle(StepAsked()))
            if self.is_taken_back or self.phases.is_lost:
                continue
            if self.progress.epoch != epoch:
                return False  # the others had finished it before they gave us their state
            if self._dealt != self.replicas.times_dealt:
                self._host()
            if self.feeder.has_more(self.hosted):
                self._batches, self._draws = {}, None
                self._step_contexts = list(self.replicas.contexts)
                self._remember_start()
                self.adaptation.begin_epoch()
                self._run_outer_code(loads=True)
                if self._first_batch:
                    self._versions = self._count_writes()
                    return True
                if not self.wait_for_sums():
                    continue
                self._pass_over(ended=True)  # so that all workers know, whichever replicas they host
                self._batches, self._first_batch, self._passes_in_step = {}, None, 0
            if not self.wait_for_sums() or self._await_newcomers() is not None:
                continue
            if self.sync.may_defer:
                # Whoever has left an epoch has all of its sums, and so have the others.
                self.together(lambda _: None, lambda: None, "the end of an epoch")
            return False

    def _host(self) -> None:
        """Load for the replicas hosted here, from where the step begins."""
        contexts = self._step_contexts if self._passes_in_step else self.replicas.contexts
        streams = {
            replica: self.replicas.position_in(contexts[replica], self.progress.epoch) for replica in self.hosted
        }
        self.feeder.host(streams, self.replicas.count, self.replicas.loading)
        self._dealt = self.replicas.times_dealt
        if self._passes_in_step:
            for replica in self.hosted:
                restore_rng(contexts[replica].random, self._device)
                self._batches[replica] = self._load(replica)

    def _load(self, replica: int) -> Batch:
        """Return the next batch of a replica, whose random state is in force."""
        try:
            return self.feeder.next(replica), self.feeder.last_size(replica)
        except StopIteration:
            return ()

    def _count_writes(self) -> int:
        return sum(parameter._version for reducer in self.reducers for parameter in reducer.parameters)

    def _leave_step(self) -> None:
        """The program leaves its loop early. A step with a pass counts; else its batches are passed over later."""
        if self._passes_in_step:
            self._end_step()
        else:
            self._owes_pass = self._step is not None

    def settle(self) -> None:
        """Do what is left to do of a step that the program has left."""
        if self._owes_pass:
            self._owes_pass = False
            self._end_step()

    def _end_step(self) -> None:
        """Commit the step: the program has come back from its body."""
        step, self._step = self._step, None
        self._step_ended_s = time.monotonic()
        if step is None or self.phases.phase is Phase.TAKEN_BACK:
            return
        if not self._passes_in_step:
            self._pass_over()
        if self.is_taken_back or (self.adaptation.has_decided and not self.wait_for_sums()):
            return  # decisions wait until the step surely counts
        self._batches, self._first_batch, self._passes_in_step, self._kept = {}, None, 0, {}
        self.progress.step += 1
        self.progress.epoch_step += 1
        if self._reported_view != self._last_pass_in == self._member.entered:
            # Reported for every membership: new members can enter after that.
            self._reported_view = self._member.entered
            self._member.settled(after_step=True)
            reclaim_state(self._member)  # all members have done a step, so all have the state
        self.adaptation.record_timing(self._timer.compute_s)
        self.adaptation.values |= step.means
        try:
            self.adaptation.end_step()
        except CommError as error:
            self._perform_later(self._lost(error))
        self._note_draws()  # a checkpoint of this step has them
        self._tell_listeners()

    def _perform_later(self, action: Action) -> None:
        assert isinstance(action, RunProgram), "the program runs, and the machine remembers the loss"

    def _tell_listeners(self) -> None:
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
            )
            for listener in self._listeners.commit:
                listener(event)

    # --- passes ---

    def turns(self, step: Step) -> Iterator[Any]:
        """Yield the batches of the replicas hosted here, one turn each; then sum their gradients."""
        if step is not self._step:
            raise TrainError(f"step {step.number} is over: iterate over it in its own body of the loop")
        if self.turn is not None:
            raise TrainError(f"step {step.number}: a loop over the step inside of a loop over the step")
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
            step.means |= self._means
            self._run_outer_code()

    def running_turn(self, what: str) -> Turn:
        if self.turn is None:
            raise TrainError(f"{what} can only be used inside of `for ... in step:`, where a replica has its turn")
        return self.turn

    def skip_turn(self, what: str, outcome: Outcome) -> None:
        """Let the replica whose turn it is have no backward."""
        turn = self.running_turn(what)
        if any(reducer.handed_in for reducer in self.reducers):
            raise TrainError(f"{what} after the backward of replica {turn.replica}: its gradients are on their way")
        turn.outcome = outcome
        self.deferred.unused_parameters()  # zeros must not be written where sums of the last step are on their way

    def _begin_pass(self) -> None:
        """Begin a pass, before its first turn. (Turns that are taken again begin with `_begin_turn`.)"""
        self._left_early = False
        if self._passes_in_step:
            self._note_draws()
            self.sync.stop_deferring()
        else:
            self._draws = self._draws_so_far()
            self._writes_first = self._writes_first or self._count_writes() != self._versions
        self._outer = None
        self.state.keep_first_buffers()
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
        context = self.replicas.contexts[replica]
        for reducer in self.reducers:
            reducer.begin_turn(slot)
        if self._passes_in_step:
            self.replica_switch.restore(context, self.state.first_buffers)
        elif slot == 0 and self._first_batch is not None:
            self._batches[replica], self._first_batch = self._first_batch, None  # its random state is in force
            if not self.state.sync_buffers:
                self.replica_switch.restore_buffers(context, self.state.first_buffers)
        else:
            self.replica_switch.restore(context, self.state.first_buffers)
            self._batches[replica] = self._load(replica)
            if self._draws is not None:
                restore_rng(self._draws.apply(capture_rng(self._device)), self._device)
        batch = self._batches[replica]
        if self.changes.is_ending:
            self.changes.end(self.progress.step, self.size)
        self._timer.begin_turn(self.deferred.waits.seconds)
        self.reducers[0].record_samples(batch[1] if batch else 0, self._loss_scale)
        return batch

    def _begin_turns(self) -> None:
        """Begin the turns of a pass, for the first time or again in another view."""
        engine = self._current_engine()
        self._turns, self._own_orders = [], {}
        self._exchange.clear()
        if self._dealt != self.replicas.times_dealt:
            self._host()
        if self.averaging is not None:
            try:
                self.averaging.begin(self.progress.step)
            except CommError as error:
                self._perform_later(self._lost(error))
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
            turn.outcome = Outcome.SUMMED
        elif turn.outcome is Outcome.SKIPPED and not turn.is_last:
            for reducer in self.reducers:
                reducer.contribute_zeros()
        self._keep_context(turn)
        return self._handle(TurnTaken())

    def _keep_context(self, turn: Turn) -> None:
        buffers, switch = self.state.buffers, self.replica_switch
        own = b"" if self.state.sync_buffers else bytes(buffers.pack(switch.capture_buffers()).numpy())
        stream = self.feeder.stream(turn.replica)
        self._exchange.new_contexts[turn.replica] = ReplicaContext(switch.capture_random(), stream, own)
        if turn.replica == 0:
            self._exchange.new_buffers = switch.capture_buffers()
            self._own_orders = {
                number: list(reducer.ready_order)
                for number, reducer in enumerate(self.reducers)
                if reducer.waits_for_order
            }
        self._turns.append(turn)

    def _pass_over(self, *, ended: bool = False) -> None:
        """Take the batches of a step that the program has left without a pass: with DDP they are loaded, too. If the data
        have `ended` here, tell all workers."""

        def exchange() -> Action:
            self._turns = []
            self._exchange.clear()
            if self._dealt != self.replicas.times_dealt:
                self._host()
            for slot, replica in enumerate(self.hosted):
                if slot == 0 and self._first_batch is not None:
                    batch, self._first_batch = self._first_batch, None
                else:
                    self.replica_switch.restore(self.replicas.contexts[replica], self.state.first_buffers)
                    batch = self._load(replica)
                    if self._draws is not None:
                        restore_rng(self._draws.apply(capture_rng(self._device)), self._device)
                outcome = Outcome.PASSED_OVER if batch else Outcome.NO_DATA
                self._keep_context(Turn(replica, slot, slot == len(self.hosted) - 1, outcome))
            return self._exchange_turns()

        if not self.wait_for_sums():
            return
        if not ended:
            self._draws = self._draws_so_far()
        self._outer = None
        self.state.keep_first_buffers()
        self._perform(self._handle(PassBegun(has_turns=False)), exchange, f"step {self.progress.step}")
        if not self.is_taken_back:
            self._run_outer_code()

    # --- what travels with a pass ---

    def _exchange_turns(self) -> Action:
        """Sum the gradients, and send everybody what the next pass depends on."""
        engine, contexts, is_first = self._current_engine(), self.replicas.contexts, not self._passes_in_step
        began_s, alone = time.monotonic(), engine.view.size == 1
        checksum = 0
        if is_first and self._guard.is_due(self.progress.step, engine.view.size):
            self.deferred.flush()
            if self.deferred.lost is not None:
                return self._take_back()
            checksum = self._guard.checksum()
        message = StepMessage(
            self.progress.step * _MAX_PASSES + self._passes_in_step,
            self._member.prepared,
            self.sync.proposed,
            self._timer.last,
            self.adaptation.pack_row() if is_first else b"",
            [turn.pack() for turn in self._turns],
            0 if self._is_new_view else self._draws_checksum,
            checksum,
        )
        if alone:
            messages = [message]
        else:
            self._exchange.send(message, contexts)
            with self._stall_watch(f"the turns of step {self.progress.step}"):
                messages = self._exchange.receive(contexts, self.adaptation.row_size if is_first else 0)
        self._is_new_view = False
        rows = [TurnRow.from_bytes(row) for each in messages for row in each.turns]
        complaint = (
            self._complaint_about_places(messages)
            or complaint_about(rows, self.progress.step)
            or self._complaint_about_workers(messages)
        )
        if complaint:
            if not alone:
                with contextlib.suppress(CommError):  # whoever ends before the others know would be taken for lost
                    engine.barrier("complaint", timeout_s=COMPLAINT_WAIT_S)
            return self._handle(SumsArrived(complaint))
        awaited = self._wait_for_sums_of(rows, is_alone=alone)
        self._share_kept(rows, engine)
        if is_first:
            self.sync.apply_decision(messages[0].sync_config, [each.measured for each in messages], engine.rank)
            self.adaptation.read_rows([each.figures for each in messages])
        self._means = means_of(rows)
        agreed = min(each.prepared for each in messages)
        if agreed == max(each.prepared for each in messages) and agreed > self._member.entered:
            self._handle(ChangeAgreed(agreed))
        ended_s = time.monotonic()
        self.deferred.waits.add(began_s, ended_s)
        if trace.enabled():
            trace.event("wait", "all workers", began_s, ended_s)
        if awaited is not None:
            gradients = [reducer.bases for reducer in self.reducers]
            self._undo = replace(self._step_start, gradients=gradients) if self._step_start is not None else None
            self.sync.defer_updates(awaited)
        return self._handle(SumsArrived(for_sure=alone or awaited is not None))

    def _wait_for_sums_of(self, rows: Sequence[TurnRow], *, is_alone: bool) -> Any:
        """Wait for the sums of all models that got gradients; or return those that are waited for where they are used."""
        models = 0
        for row in rows:
            models |= row.models
        if all(row.outcome is Outcome.LOGGED for row in rows):
            return None
        if not models and len(self.reducers) == 1 and any(row.outcome is Outcome.SKIPPED for row in rows):
            models = 1  # all replicas contribute zeros
        reducers = [reducer for number, reducer in enumerate(self.reducers) if models >> number & 1]
        if self._turns[-1].outcome is Outcome.SKIPPED:
            for reducer in reducers:
                reducer.contribute_zeros()
        with self._stall_watch(f"the sums of step {self.progress.step}"):
            if reducers and not is_alone and reducers[0].are_deferred:
                return reducers[0].pending_sums()
            for reducer in reducers:
                reducer.wait()
            if self.averaging is not None:
                self.averaging.wait()
            self._orders = {}
            for number, reducer in enumerate(self.reducers):
                if reducer in reducers and reducer.waits_for_order:
                    order = self._own_orders.get(number, [])
                    if not is_alone:
                        order = self._exchange.share_order(f"order:{number}", order, len(reducer.parameters))
                    if len(set(order)) == len(reducer.parameters):  # else replica 0 has skipped its turn
                        self._orders[number] = order
        return None

    def _share_kept(self, rows: Sequence[TurnRow], engine: Engine) -> None:
        """Give every worker what the replicas have kept: after a loss it may host any of them."""
        if not any(row.keeps for row in rows):
            self._new_kept = {}
            return
        own = {turn.replica: turn.kept for turn in self._turns}
        self._new_kept = own
        if engine.size > 1 and self._member.elastic:
            self._new_kept = {}
            for rank in range(engine.size):
                found = spread_state(engine, own if engine.rank == rank else None, rank)
                self._new_kept |= cast(dict[int, dict[str, Any]], found)
            self._new_kept |= own

    def kept_by(self, replica: int) -> dict[str, Any]:
        """Return what a replica has kept in this step, on this worker's device."""
        kept: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda each: each.to(self._device), self._kept.get(replica, {})
        )
        return kept

    def _complaint_about_places(self, messages: Sequence[StepMessage]) -> str:
        """Return which workers are at different places of the program; empty if all are in the same pass."""
        engine = self._current_engine()
        if len({each.number for each in messages}) == 1:
            return ""
        one = next(rank for rank, each in enumerate(messages) if each.number != messages[0].number)
        places = [divmod(messages[rank].number, _MAX_PASSES) for rank in (0, one)]
        here, there = (
            f"{engine.view.workers[rank]} is in pass {number + 1} of step {at}"
            for rank, (at, number) in zip((0, one), places, strict=True)
        )
        return f"{here}, but {there}: all workers must iterate over a step equally often. {OWN_COUNTER}"

    def _complaint_about_workers(self, messages: Sequence[StepMessage]) -> str:
        """Return in what the workers differ that must be the same everywhere; empty if they do not."""
        engine, step = self._current_engine(), self.progress.step
        if self._guard.is_on and len({each.draws for each in messages}) > 1:
            one = next(rank for rank, each in enumerate(messages) if each.draws != messages[0].draws)
            return (
                f"before the pass of step {step} the workers {engine.view.workers[0]} and {engine.view.workers[one]} drew "
                "different amounts of random numbers outside of turns: let all workers run the same code, or draw from a "
                "generator of your own (torch.Generator, random.Random)"
            )
        return self._guard.compare(engine, [each.checksum for each in messages], step)

    def _count_pass(self) -> None:
        """Keep what the pass leaves: it counts."""
        new = self._exchange
        contexts = list(self.replicas.contexts)
        for replica, context in new.new_contexts.items():
            contexts[replica] = context
        self.replicas.contexts = contexts
        if new.new_buffers is not None:
            self.state.use_first_buffers(new.new_buffers, are_in_models=self.hosted == range(1))
        for number, order in self._orders.items():
            self.reducers[number].rebuild(order)
        self._orders = {}
        for reducer in self.reducers:
            reducer.end_pass()
        if self._turns:
            self._passes_in_step += 1
        self._turns, self._draws_checksum = [], 0
        for replica, values in self._new_kept.items():
            self._kept[replica] = {**self.kept_by(replica), **values}
        self._new_kept = {}
        self.progress.passes = self.phases.passes
        new.clear()

    def _run_outer_code(self, *, loads: bool = False) -> None:
        """Load the buffers of replica 0 and the random state of the first replica hosted here: the program's own code
        runs with them. When a step begins, that replica's batch is loaded first, as with DDP."""
        if not self.hosted or not self.replicas.contexts:
            return
        first = self.hosted[0]
        random = self.replicas.contexts[first].random
        restore_rng(random, self._device)
        self.state.show_first_buffers()
        if loads:
            if self._dealt != self.replicas.times_dealt:
                self._host()
            self._first_batch = self._load(first)
            random = capture_rng(self._device)
        self._outer = random

    def _note_draws(self) -> None:
        """Move the generators of all replicas as far as the program's own code has moved those in force."""
        draws = self._draws_so_far()
        if draws is not None:
            self.replicas.contexts = [each.with_random(draws.apply(each.random)) for each in self.replicas.contexts]
            self._outer = draws.after

    def _draws_so_far(self) -> Draws | None:
        """Return what the program's own code has drawn."""
        if self._outer is None:
            return None
        draws = Draws.between(self._outer, capture_rng(self._device))
        if draws is not None:
            self._draws_checksum = zlib.crc32(repr((self._draws_checksum, draws.counts)).encode())
        return draws

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

    def _remember_start(self) -> None:
        """Remember the state before a step that may have to be taken back."""
        if not (self.sync.may_defer and self._member.elastic):
            return
        adaptation = copy.deepcopy(self.adaptation.state_dict()) if self.adaptation.is_active else {}
        tracked = {name: copy.deepcopy(each.state_dict()) for name, each in self.state.tracked.items()}
        options = [options_of(optimizer) for optimizer in self.state.optimizers]
        self._step_start = StepUndo(
            replace(self.progress), self.replicas.contexts, self.state.first_buffers, adaptation, tracked, options
        )

    def _start_to_lend(self) -> dict[str, Any]:
        """Return in what the state with which the step in progress began differs from the present one, if others can
        begin with it: the program may have changed tracked objects before the first pass."""
        start = self._step_start
        if self._step is None or start is None or start.progress.passes != self.phases.passes:
            return {}
        return {"tracked": start.tracked, "buffers": start.first_buffers, "contexts": start.contexts}

    def _undo_step(self) -> None:
        """Go back to the state before the step that was taken back."""
        undo, self._undo = self._undo, None
        assert undo is not None, "it was remembered"
        self.progress.set(undo.progress)
        self.replicas.contexts = undo.contexts
        self.state.use_first_buffers(undo.first_buffers)
        if undo.adaptation:
            self.adaptation.load_state_dict(undo.adaptation)
        self.deferred.undo_step()
        for reducer, gradients in zip(self.reducers, undo.gradients, strict=True):
            reducer.carry(gradients)
        for name, saved in undo.tracked.items():
            self.state.tracked[name].load_state_dict(saved)
        for optimizer, groups in zip(self.state.optimizers, undo.options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        self._exchange.clear()
        self._outer, self._dealt, self._passes_in_step = None, -1, 0

    # --- what all workers do together, outside of steps ---

    def together(self, ask: Callable[[Engine], T], alone: Callable[[], T], place: str) -> T:
        """Return what `ask` returns; `place` says in an error where the program is. All workers call this at the same
        place of their program; if one is lost, the others ask again in a new view, so that all get an answer. In a step
        that was taken back, or with a single worker, return what `alone` does."""
        if self.turn is not None:
            raise TrainError(
                f"{place} in the turn of replica {self.turn.replica}: all workers must call it together, after the loop over "
                "the step. To average a number over the replicas, use step.log in the turn"
            )
        self.settle()
        answers: list[T] = []

        def exchange() -> Action:
            answers.append(ask(self._current_engine()) if self.size > 1 else alone())
            return self._handle(SumsArrived(for_sure=self.size == 1))

        if self._joins_late or not self.wait_for_sums():
            return alone()  # the others do not take part: here the program runs without effect
        self._perform(self._handle(PassBegun(has_turns=False)), exchange, place)
        return answers[-1] if not self.is_taken_back else alone()

    def share_of(self, shards: Sequence[int]) -> list[int]:
        """Return which of these shards this worker takes: all, where the others do not take part."""
        return list(shards if self._joins_late or self.is_taken_back else shards[self.rank :: self.size])

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

    def begin_shards(self) -> None:
        """Begin an evaluation, in which every replica has its shard."""
        if self.turn is not None:
            raise TrainError("job.evaluate in a turn: evaluate outside of the loop over a step")
        self.settle()
        self.wait_for_sums()
        self._note_draws()
        self.state.keep_first_buffers()
        self._outer = None
        if self._is_before_pass:
            self._first_batch, self._dealt = None, -1  # the batches of this step are loaded afterwards

    def begin_shard(self, replica: int) -> None:
        restore_rng(self.replicas.contexts[replica].random, self._device)

    def end_shard(self) -> RngState:
        return capture_rng(self._device)

    def end_shards(self, states: dict[int, RngState]) -> None:
        """End an evaluation: every replica goes on from the state after its shard."""
        contexts = self.replicas.contexts
        self.replicas.contexts = [
            each.with_random(states[replica]) if replica in states else each for replica, each in enumerate(contexts)
        ]
        if self._is_before_pass:
            self._step_contexts = self.replicas.contexts
            self._first_batch, self._dealt = None, -1  # a change of view may have loaded one meanwhile
        self._run_outer_code(loads=self._is_before_pass)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns on the first worker. It runs there with the random state of replica 0."""
        self.begin_shards()

        def run() -> dict[str, Any]:
            self.begin_shard(0)
            return {"result": function(), "random": self.end_shard().to_bytes()}

        def ask(engine: Engine) -> Any:
            return spread_state(engine, run() if engine.rank == 0 else None)

        found = self.together(ask, run, "job.on_first")
        self.end_shards({0: RngState.from_bytes(found["random"])})
        return found["result"]

    def end_epoch(self, epoch: int) -> None:
        """The program has come to the end of an epoch."""
        self.settle()
        if self.progress.epoch == epoch and self.wait_for_sums():
            self.progress.epoch += 1
            self.progress.epoch_step = 0

    def finish(self) -> None:
        """Leave once every worker has the last step: until then one of them may need this worker's state."""
        self.settle()

        def meet(engine: Engine) -> None:
            self._guard.compare_at_end(engine, self.progress.step)
            engine.barrier("finish")

        if self.size > 1:
            try:
                self.together(meet, lambda: None, "the end of the last epoch")
            except Left:
                if not self._member.over:
                    raise
                return  # another worker has passed the barrier, so all of them have the last step
        self._handle(ProgramEnded())

    @property
    def step_times(self) -> tuple[float, float]:
        """Seconds since the step in progress began, and how many of them the replicas hosted here computed."""
        return time.monotonic() - self._timer.began_s, self._timer.compute_s

    def check_outer(self, what: str) -> None:
        """Raise TrainError if `what` is called where it does not belong: in a turn, or after a loop that was left."""
        if self.turn is not None:
            raise TrainError(
                f"{what} in the turn of replica {self.turn.replica}: it belongs after the loop over the step, where it "
                "runs once for all replicas"
            )
        if self._left_early:
            raise TrainError(
                f"{what} in step {self.progress.step}, whose loop was left before all replicas had their turn: "
                "use step.skip() and go on, or break out of the outer loop"
            )


def _trace_slice(what: str, name: str, index: int, peer: int, begin_s: float, end_s: float) -> None:
    """Add a slice to the trace."""
    trace.event(what, f"{name}[{index}]" + ("" if what == "back" else f" to {peer}"), begin_s, end_s)
