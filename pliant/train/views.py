"""The view that a worker is in, and all that depends on it: the engine, the hosted replicas, the memory of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pliant.train import trace
from pliant.train.rendezvous import EnteredView, reclaim_state
from pliant.train.replicas import Blocks, Placement, place_replicas
from pliant.train.sync import StepTimer, SyncController

if TYPE_CHECKING:
    import torch

    from pliant.cluster import View
    from pliant.comm.engine import Engine
    from pliant.elastic.member import Member
    from pliant.progress_board import ProgressBoard
    from pliant.train.events import ViewChanges
    from pliant.train.guard import Guard
    from pliant.train.job_state import JobState
    from pliant.train.pass_exchange import PassExchange
    from pliant.train.step_batches import StepBatches


class WorkerViews:
    """The present view of a worker. Tells all parts of the job about it, and prepares the next one."""

    def __init__(
        self,
        member: Member,
        state: JobState,
        batches: StepBatches,
        exchange: PassExchange,
        sync: SyncController,
        guard: Guard,
        changes: ViewChanges,
        board: ProgressBoard,
        device: torch.device,
        blocks: Blocks | None = None,
        *,
        follows_view: bool = False,
    ) -> None:
        """`follows_view`: there is one replica for each worker."""
        self._member, self._state, self._replicas = member, state, state.replicas
        self._batches, self._exchange, self._sync, self._guard = batches, exchange, sync, guard
        self._device, self._blocks, self._follows_view = device, blocks, follows_view
        self.changes, self._board = changes, board
        self.engine: Engine | None = None
        """None before the first view."""
        self.hosted = range(0)
        """The replicas that this worker hosts."""
        self.announces = False
        """Whether this worker tells about the last change of view."""
        self.timer = StepTimer()
        self.is_alone = False
        """Whether this worker has no others beside it, and hosts the only replica."""
        self.is_new = False
        """Whether nothing was exchanged in this view yet. New workers have not drawn what the others have."""
        self.last_pass_in = self.reported = -1
        """The views in which this worker has done its last pass, and in which it has last reported a step."""

    @property
    def rank(self) -> int:
        return self.engine.rank if self.engine is not None else 0

    @property
    def size(self) -> int:
        return self.engine.view.size if self.engine is not None else 1

    def current_engine(self) -> Engine:
        assert self.engine is not None, "join() comes first"
        return self.engine

    # --- the next view ---

    def prepare(self, view: View) -> None:
        """Have the memory that the gradients need in a view that is about to be entered, while the program trains in an
        older one."""
        if self.engine is not None and view.size > 1:
            placement = self._placement(view.size, view.rank_of(self._member.me))
            hosted, count = placement.hosted, sum(placement.blocks)
            missing = [each for reducer in self._state.reducers for each in reducer.missing_memory(hosted, count)]
            self._member.transport.reserve(missing, pins=self._device.type == "cuda")

    def warm_memory(self) -> None:
        """Have the memory that the gradients of one replica will need, before the others count on this new worker. Its
        buckets are not known yet."""
        wanted = [each for each in self._state.reducers if each.wanted]
        num_bytes = sum(parameter.nbytes for each in wanted for parameter in each.parameters)
        if num_bytes:
            self._member.transport.reserve(num_bytes=num_bytes + num_bytes // 8, pins=self._device.type == "cuda")

    def place(self, engine: Engine) -> Placement:
        """Return where the replicas are in the view of this engine."""
        return self._placement(engine.view.size, engine.rank)

    def _placement(self, size: int, rank: int) -> Placement:
        return place_replicas(size if self._follows_view else self._replicas.count, size, rank, self._blocks)

    def use(self, entered: EnteredView, placement: Placement) -> None:
        """Use this view from now on, and host the replicas that it places here."""
        changed, engine = self.engine is not None and self.engine is not entered.engine, entered.engine
        state = self._state
        self.engine, self.announces = engine, entered.announces
        self.deal()
        self.hosted = placement.hosted
        self._batches.enter_view(placement.hosted)
        self._exchange.enter_view(engine, placement)
        for reducer in state.reducers:
            if changed and not state.keeps_layout:
                reducer.use_layout(None)
            reducer.enter_view(engine, placement.blocks)
        if state.averaging is not None:
            state.averaging.enter_view(engine, placement.blocks)
        self._board.enter_view(engine.rank)
        self._sync.enter_view()
        self.timer = StepTimer.of(engine)
        self.trace_engine()
        state.adaptation.enter_view(engine, self._sync.waited_s)
        self._guard.enter_view()
        self.is_alone = engine.size == 1 and self._replicas.count == 1
        self.is_new = True
        if not entered.was_planned:
            self._member.settled()

    def deal(self) -> None:
        """Deal the rest of the epoch to one replica per worker, if that is their number."""
        progress = self._state.progress
        if self._follows_view and self.size != self._replicas.count:
            self._replicas.deal_to(self.size, progress.epoch, progress.step, self._device)
        for reducer in self._state.reducers:
            reducer.num_replicas = self._replicas.count

    def trace_engine(self) -> None:
        """Add the engine's slices to the trace, if one is written."""
        if trace.enabled() and self.engine is not None:
            self.engine.watch(_trace_slice)

    # --- the present view ---

    def report_step(self) -> None:
        """Report that a step was done in this view: new members can enter after that, and all members have the state."""
        self.reported = self._member.entered
        self._member.settled(after_step=True)
        reclaim_state(self._member)


def _trace_slice(what: str, name: str, index: int, peer: int, begin_s: float, end_s: float) -> None:
    """Add a slice to the trace."""
    trace.event(what, f"{name}[{index}]" + ("" if what == "back" else f" to {peer}"), begin_s, end_s)
