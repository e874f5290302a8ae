"""The training loop of one worker: the turns of its replicas, the commit of each step, the change to another view.

All N replicas commit a step, or none does. Each replica hosted here takes its turn: its context is restored, its batches
go through the user's loop, its gradients are collected, and its context is captured. In the last turn the gradients are
summed over the whole job. The contexts and the buffers of replica 0 travel with them, so every worker has the whole
state of the job afterwards. If a worker is lost before that, the step is torn: it is undone and repeated in a new view.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pliant.cluster import View
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Member
from pliant.errors import CommError, EngineClosed, PliantError, TrainError, ViewChanged, WorkerLost
from pliant.train import trace
from pliant.train.adaptation import Adaptation, AdaptationSettings
from pliant.train.context import ReplicaContext, restore_rng
from pliant.train.deferred import DeferredUpdates
from pliant.train.events import Progress, ViewChanges
from pliant.train.exchange import StepExchange, StepMessage
from pliant.train.gradients import GradientReducer
from pliant.train.rendezvous import reclaim_state
from pliant.train.replicas import Blocks, ModelBuffers, Replicas, ReplicaSwitch, Tensors, place_replicas
from pliant.train.sync import StepTimer, SyncController, SyncTuner

if TYPE_CHECKING:
    from pliant.train.feeder import ReplicaLoader
    from pliant.train.optim import AveragingOptimizer


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """One replica's turn in a step."""

    replica: int
    slot: int
    is_last: bool
    done: bool = False
    """Whether its gradients have been handed in."""


@dataclass(slots=True)
class UserObjects:
    """The objects that the program has given to `job.wrap`, and their data loader."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    feeder: ReplicaLoader
    sync_buffers: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class StepUndo:
    """The state of the job before a step whose sums have not all arrived."""

    progress: Progress
    contexts: list[ReplicaContext]
    first_buffers: Tensors
    adaptation: dict[str, Any]


class Trainer:
    """Runs the steps of this worker, in the program's own thread."""

    def __init__(
        self,
        member: Member,
        user: UserObjects,
        replicas: Replicas,
        gradients: GradientReducer,
        deferred: DeferredUpdates,
        tuner: SyncTuner,
        blocks: Blocks | None = None,
        *,
        follows_view: bool = False,
        keeps_layout: bool = True,
    ) -> None:
        self.user = user
        self.follows_view = follows_view
        """Whether there is one replica per worker, whatever their number (weak scaling)."""
        self.replicas = replicas
        self.gradients = gradients
        self.progress = Progress()
        self.buffers = ModelBuffers(user.model)
        self.first_buffers: Tensors = self.buffers.save()
        """The buffers of replica 0 at the last committed step: what DDP would broadcast."""
        self.replica_switch = ReplicaSwitch(self.buffers, user.device, user.sync_buffers)
        self.turn: Turn | None = None
        self.torn: CommError | None = None
        self.catching_up = False
        """Whether the program is at the end of an epoch that the job has already left."""
        self.switch_to: int | None = None
        """The membership that all workers have agreed to enter at the next boundary."""
        self.changes = ViewChanges()
        self.step_ended_s = 0.0
        """When the program came back from its last step for the next batch."""
        self.torn_s = 0.0
        """When the last loss of a worker was noticed."""
        self.engine: Engine | None = None
        self.hosted: range = range(0)
        self.enter_next_view: Callable[[], None] = lambda: None
        """Enters the next view; `rendezvous` provides it."""
        self.state_fetched: Handle | None = None
        """Done when everybody in the view has the state."""
        self.on_commit: Callable[[], None] = lambda: None
        self.deferred = deferred
        deferred.on_lost, deferred.on_complete = self.mark_torn, self._sums_complete
        deferred.on_sum = gradients.sum_arrived
        self.sync = SyncController(gradients, deferred, tuner)
        self.loss_scale: Callable[[], float] = lambda: 1.0
        """Returns the product of all gradient scalers' factors."""
        self.averaging: AveragingOptimizer | None = None
        """The optimizer, if it averages models instead of gradients."""
        self._undo: StepUndo | None = None
        self._tracked_before: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._timer = StepTimer()
        self.stall_watch: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        """Wraps waits that may take long, for the stall detector."""
        self.adaptation = Adaptation(AdaptationSettings(), self, replicas.loading.batch_size, None, lambda _: None)
        """By default there are no policies, and nothing is decided."""
        self.exchange = StepExchange(self.buffers, replicas.num_loader_workers)
        self.keeps_layout = keeps_layout
        """Whether the bucket layout outlives a view. If not, a new view begins with L1, as a restarted DDP would."""
        self._member = member
        self._blocks = blocks
        self._needs_hosting = True
        self._reported_view = -1

    # --- a view ---

    @property
    def view(self) -> View | None:
        return self.engine.view if self.engine is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0: it writes checkpoints, and requests scheduled resizes for the whole job."""
        return self.engine is None or self.engine.rank == 0

    def _current_engine(self) -> Engine:
        assert self.engine is not None, "enter_view() comes first"
        return self.engine

    def enter_view(self, engine: Engine) -> None:
        """Use this engine from now on, and host the replicas that its view places here."""
        changed = self.engine is not None and self.engine is not engine
        self.engine = engine
        size = engine.view.size
        if self.follows_view and size != self.replicas.count:
            self.replicas.deal_to(size, self.progress.epoch, self.progress.step, self.user.device)
            self.gradients.num_replicas = size
        placement = place_replicas(self.replicas.count, size, engine.rank, self._blocks)
        self.hosted = placement.hosted
        self.exchange.enter_view(engine, placement)
        if changed and not self.keeps_layout:
            self.gradients.use_layout(None)
        self.gradients.enter_view(engine, placement.blocks)
        if self.averaging is not None:
            self.averaging.enter_view(engine, placement.blocks)
        self.torn, self.switch_to, self._needs_hosting = None, None, True
        self.sync.enter_view()
        self._timer = StepTimer.of(engine)
        self.trace_engine()
        self.adaptation.enter_view(engine)

    def trace_engine(self) -> None:
        """Add the engine's slices to the trace, if one is written."""
        if trace.enabled() and self.engine is not None:
            self.engine.watch(_trace_slice)

    # --- the loop ---

    def steps(self) -> Iterator[Any]:
        """Yield the batches of the rest of this epoch, for the hosted replicas in turn."""
        self._needs_hosting = True
        self.catching_up = False
        epoch = self.progress.epoch
        try:
            while self._begin_step(epoch):
                for slot, replica in enumerate(self.hosted):
                    if not (yield from self._take_turn(slot, replica)):
                        return
                    if self.torn is not None:
                        break
                self._end_step()
        except GeneratorExit:
            # The program leaves its loop early. A complete step counts.
            if self.turn is not None and self.turn.is_last and self.turn.done and self.torn is None:
                self._end_step()
            raise
        finally:
            self.turn = None
            if not self.wait_for_sums():
                self.undo_step()
            self._rest()

    def _begin_step(self, epoch: int) -> bool:
        """Enter the right view and begin a step; return False if the epoch is over."""
        while True:
            if self.switch_to is not None:
                self.wait_for_sums()
            if self.torn is not None:
                self.undo_step()
            if self.torn is not None or self.switch_to is not None:
                self.enter_next_view()
            if self.progress.epoch != epoch:
                # The others had finished this epoch before they gave us their state. What the program does at its end
                # has already been done to that state.
                self.catching_up = True
                return False
            if self._needs_hosting:
                streams = {replica: self.replicas.stream_of(replica, epoch) for replica in self.hosted}
                self.user.feeder.host(streams, self.replicas.count, self.replicas.loading)
                self._needs_hosting = False
            if self.user.feeder.remaining(self.hosted[0]) > 0:
                if not self._begin_averaging():
                    continue
                self.adaptation.begin_epoch()
                self.sync.begin_step(self._current_engine())
                self.gradients.begin_step(self.progress.step)
                if trace.enabled() and self._timer.began_s:
                    trace.event("step", f"step {self.progress.step - 1}", self._timer.began_s)
                self._timer.begin_step(self._current_engine())
                return True
            self.wait_for_sums()
            if self.torn is None:
                self._await_newcomers()
            if self.torn is None:
                return False

    def _begin_averaging(self) -> bool:
        """Start the exchange of models, if models are averaged; return False if a worker is lost."""
        if self.averaging is not None:
            try:
                self.averaging.begin(self.progress.step)
            except CommError as error:
                self.mark_torn(error)
        return self.torn is None

    def wait_for_sums(self) -> bool:
        """Wait for the sums of the last step that are still on their way; return False if it was torn instead."""
        self.deferred.flush()
        return self.torn is None

    def _sums_complete(self) -> None:
        self.gradients.sums_complete()
        self._undo = None
        self._tracked_before.clear()

    def undo_step(self) -> None:
        """Undo the torn step, and the step before it if its sums had not all arrived."""
        self.changes.steps_begun = self.progress.step + 1
        if self._undo is not None:
            undo, self._undo = self._undo, None
            self.progress, self.first_buffers = undo.progress, undo.first_buffers
            self.replicas.contexts = undo.contexts
            if undo.adaptation:
                self.adaptation.load_state_dict(undo.adaptation)
        for thing, state in self._tracked_before.values():
            thing.load_state_dict(state)
        self._tracked_before.clear()
        self.deferred.undo_step()

    def save_tracked(self, name: str, thing: Any, state: dict[str, Any]) -> None:
        """Remember the state of a tracked object from before a step that may have to be undone."""
        self._tracked_before.setdefault(name, (thing, state))

    def _await_newcomers(self) -> None:
        """Wait until new workers have the state: what the program does at the end of an epoch may change what they
        read."""
        state_fetched, self.state_fetched = self.state_fetched, None
        if state_fetched is not None:
            try:
                state_fetched.wait()
            except CommError as error:
                self.mark_torn(error)

    def _take_turn(self, slot: int, replica: int) -> Generator[Any, None, bool]:
        """Yield the replica's batches until it hands in its gradients; return False if the epoch ended before."""
        context = self.replicas.contexts[replica]
        turn = self.turn = Turn(replica, slot, slot == len(self.hosted) - 1)
        self.replica_switch.restore(context, self.first_buffers)
        self.gradients.begin_turn(slot)
        taken = 0
        while not turn.done and self.torn is None:
            samples = self.user.feeder.next_size(replica)
            try:
                batch = self.user.feeder.next(replica)
            except StopIteration:
                log.warning("epoch %d ended in the middle of an accumulation, which is dropped", self.progress.epoch)
                self.turn = None
                return False
            if self.changes.is_ending:
                self.changes.end(self.progress.step, self._current_engine().view.size)
            self._timer.begin_turn(self.deferred.waits.seconds)
            taken += samples
            self.gradients.record_samples(taken, self.loss_scale)
            yield batch
        return True

    @property
    def may_commit(self) -> bool:
        """Whether the program shall now do what belongs to the step (optimizer, scheduler, ...)."""
        if self.turn is None:
            return not self.catching_up and self.torn is None
        return self.turn.is_last and self.turn.done and self.torn is None

    def end_turn(self) -> None:
        """Save the context of the replica that has handed in its gradients. After the last turn, exchange with all
        workers."""
        turn = self.turn
        if turn is None:
            raise TrainError("a summed backward outside of the loader's loop: call it on a batch that the loader gave")
        turn.done = True
        self._timer.end_turn(self.deferred.waits.seconds)
        own = b"" if self.user.sync_buffers else bytes(self.buffers.pack(self.replica_switch.capture_buffers()).numpy())
        context = ReplicaContext(self.replica_switch.capture_random(), self.user.feeder.stream(turn.replica), own)
        self.exchange.new_contexts[turn.replica] = context
        if turn.replica == 0:
            self.exchange.new_buffers = self.replica_switch.capture_buffers()
            if self.gradients.waits_for_order:
                self.exchange.new_order = list(self.gradients.ready_order)
        if turn.is_last:
            try:
                self._exchange()
            except CommError as error:
                self.gradients.fill_missing()
                self.mark_torn(error)

    def mark_torn(self, error: CommError) -> None:
        """Drop the step in progress because of a lost worker. Raises other errors, which no new view would cure."""
        if not self._member.elastic or not isinstance(error, WorkerLost | ViewChanged | EngineClosed):
            raise error  # no new view would follow
        log.debug("step %d is torn: %s", self.progress.step, error)
        self.gradients.halt()
        self.torn, self.torn_s = error, time.monotonic()

    # --- what travels with a step ---

    def _exchange(self) -> None:
        """Sum the gradients, and send everybody what the next step depends on."""
        if self._current_engine().view.size == 1:
            figures = self.adaptation.pack_row()  # the row of the last step, as with several workers
            self.gradients.wait()
            self.switch_to = self._agreed([self._member.prepared])
            self.adaptation.read_rows([figures])
            return
        gradients, contexts = self.gradients, self.replicas.contexts
        waiting = len(gradients.parameters) if gradients.waits_for_order else 0
        message = StepMessage(
            self.progress.step, self._member.prepared, self.sync.proposed, self._timer.last, self.adaptation.pack_row()
        )
        self.exchange.send(message, contexts, waiting)
        began_s = time.monotonic()
        awaited = gradients.pending_sums() if gradients.are_deferred else None
        with self.stall_watch(f"the sums of step {self.progress.step}"):
            if awaited is None:
                gradients.wait()
            if self.averaging is not None:
                self.averaging.wait()
            messages = self.exchange.receive(contexts, self.adaptation.row_size)
        self.switch_to = self._agreed([each.prepared for each in messages])
        measured = [each.measured for each in messages]
        self.sync.apply_decision(messages[0].sync_config, measured, self._current_engine().rank)
        self.adaptation.read_rows([each.figures for each in messages])
        ended_s = time.monotonic()
        self.deferred.waits.add(began_s, ended_s)
        if trace.enabled():
            trace.event("wait", "all workers", began_s, ended_s)
        if awaited is not None:
            self.sync.defer_updates(awaited)

    def _agreed(self, prepared: Sequence[int]) -> int | None:
        """Return the membership that all are prepared for, if it is new. The answer is the same on every worker."""
        number = min(prepared)
        return number if number == max(prepared) and number > self._member.entered else None

    # --- the end of a step ---

    def _end_step(self) -> None:
        self.turn = None
        self.step_ended_s = time.monotonic()
        if self.torn is not None:
            return
        if self.adaptation.has_decided and not self.wait_for_sums():
            return  # decisions wait until the step surely counts
        if self.deferred.is_pending:
            adaptation = copy.deepcopy(self.adaptation.state_dict()) if self.adaptation.is_active else {}
            self._undo = StepUndo(replace(self.progress), self.replicas.contexts, self.first_buffers, adaptation)
            self.replicas.contexts = list(self.replicas.contexts)
        new = self.exchange
        for replica, context in new.new_contexts.items():
            self.replicas.contexts[replica] = context
        if new.new_buffers is not None:
            self.first_buffers = new.new_buffers
        if self.gradients.waits_for_order and new.new_order is not None:
            assert not self.deferred.is_pending, "a view's first step has a barrier"
            self.gradients.rebuild(new.new_order)
        self.progress.step += 1
        self.progress.epoch_step += 1
        new.clear()
        if self._reported_view < 0 or self._reported_view != self._member.entered:
            # Reported for every membership: the server forgets it for workers that were not members for a while.
            self._reported_view = self._member.entered
            self._member.settled()
            reclaim_state(self._member)  # all members have done a step, so all have the state
        self.adaptation.record_timing(self._timer.compute_s)
        try:
            self.adaptation.end_step()
        except CommError as error:
            self.mark_torn(error)
        self.on_commit()

    @property
    def step_times(self) -> tuple[float, float]:
        """Seconds since the step in progress began, and how many of them the replicas hosted here computed."""
        return time.monotonic() - self._timer.began_s, self._timer.compute_s

    # --- what policies decide ---

    def set_batch_size(self, size: int) -> None:
        """Change the batch size of every replica from the next step on: deal the rest of the epoch anew.

        Raises:
            ConfigError: an epoch would not have one such batch.
        """
        self.replicas.set_batch_size(size, self.progress.epoch)
        self._needs_hosting = True

    def use_batch_size(self, size: int) -> None:
        """Change the batch size where the data positions of the replicas already account for it."""
        self.replicas.use_batch_size(size)
        self._needs_hosting = True

    def request_workers(self, num_workers: int) -> None:
        """Request a number of workers in the background."""

        def request() -> None:
            try:
                self._member.resize(num_workers)
            except PliantError as error:
                log.warning("%d workers cannot be had: %s", num_workers, error)

        threading.Thread(target=request, daemon=True).start()

    def _rest(self) -> None:
        """Between epochs, load the buffers of replica 0 and the random state of the first hosted replica."""
        self.gradients.end_turns()
        if self.hosted and self.replicas.contexts:
            restore_rng(self.replicas.contexts[self.hosted[0]].random, self.user.device)
        self.buffers.load(self.first_buffers)


def _trace_slice(what: str, name: str, index: int, peer: int, begin_s: float, end_s: float) -> None:
    """Add a slice to the trace."""
    trace.event(what, f"{name}[{index}]" + ("" if what == "back" else f" to {peer}"), begin_s, end_s)
