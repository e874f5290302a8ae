"""A pass, from the turns that were taken here to what it leaves in the state of the job.

The workers exchange what their turns have left (`pass_exchange`). The result is kept until the pass counts: then it becomes
part of the state, in the same way on every worker. Where updates are deferred, a step may have to be undone after that.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pliant.errors import CommError
from pliant.train import trace
from pliant.train.exchange import StepMessage
from pliant.train.pass_exchange import MAX_PASSES, PassExchange, PassResult
from pliant.train.phases import ChangeAgreed, PhaseMachine, SumsArrived

if TYPE_CHECKING:
    from pliant.elastic.member import Member
    from pliant.train.current_step import CurrentStep
    from pliant.train.deferred import DeferredUpdates
    from pliant.train.guard import Guard
    from pliant.train.job_state import JobState
    from pliant.train.outer_code import OuterCode
    from pliant.train.step_batches import StepBatches
    from pliant.train.step_start import StepStart
    from pliant.train.sync import SyncController
    from pliant.train.views import WorkerViews

COMPLAINT_WAIT_S = 10.0
"""How long a worker that has found an error waits until all others have found it, too."""


class Passes:
    """Exchanges what the turns of a pass leave, and keeps the result once the pass counts."""

    def __init__(
        self,
        machine: PhaseMachine,
        member: Member,
        state: JobState,
        views: WorkerViews,
        exchange: PassExchange,
        current: CurrentStep,
        batches: StepBatches,
        outer: OuterCode,
        deferred: DeferredUpdates,
        sync: SyncController,
        guard: Guard,
    ) -> None:
        self._machine, self._member, self._state, self._views = machine, member, state, views
        self._exchange, self._current, self._batches, self._outer = exchange, current, batches, outer
        self._deferred, self._sync, self._guard = deferred, sync, guard
        self._result: PassResult | None = None
        """What the pass leaves whose sums are here, until it counts."""
        self._undo: StepStart | None = None
        """The start of the step whose sums were last deferred."""

    def run(self) -> SumsArrived:
        """Sum the gradients, and send everybody what the next pass depends on. The sums of earlier steps are here.

        Raises:
            CommError: a worker is lost.
        """
        views, current, step, began_s = self._views, self._current, self._state.progress.step, time.monotonic()
        engine, checksum = views.current_engine(), 0
        if not current.passes and self._guard.is_due(step, engine.size):
            checksum = self._guard.checksum()
        message = StepMessage(
            step * MAX_PASSES + current.passes,
            self._member.prepared,
            self._sync.proposed,
            views.timer.last,
            self._state.adaptation.pack_row(),
            self._exchange.rows,
            0 if views.is_new else self._outer.checksum,
            checksum,
            has_group=any(each.group is not None and each.group.is_ready for each in self._state.reducers),
        )
        result = self._result = self._exchange.run(message, shares_kept=self._member.elastic)
        views.is_new = False
        if result.complaint:
            return self._complain(result.complaint)
        if result.agreed_view > self._member.entered:
            self._machine.handle(ChangeAgreed(result.agreed_view))
        ended_s = time.monotonic()
        self._deferred.waits.add(began_s, ended_s)
        if trace.enabled():
            trace.event("wait", "all workers", began_s, ended_s)
        if result.awaited is not None:
            gradients = [reducer.bases for reducer in self._state.reducers]
            self._undo = replace(current.start, gradients=gradients) if current.start is not None else None
            self._sync.defer_updates(result.awaited)
        return SumsArrived(for_sure=engine.size == 1 or result.awaited is not None)

    def finish(self) -> SumsArrived:
        """Compare the states of all workers after the last step, and wait until each has come to the end.

        Raises:
            CommError: a worker is lost.
        """
        engine = self._views.current_engine()
        if engine.size > 1:
            if complaint := self._guard.compare_at_end(engine, self._state.progress.step):
                return self._complain(complaint)
            engine.barrier("finish")
        return SumsArrived(for_sure=engine.size == 1)

    def _complain(self, complaint: str) -> SumsArrived:
        """Return what ends the job with an error that every worker has found."""
        engine = self._views.current_engine()
        if engine.size > 1:
            with contextlib.suppress(CommError):  # whoever ends before the others know would be taken for lost
                engine.barrier("complaint", timeout_s=COMPLAINT_WAIT_S)
        return SumsArrived(complaint)

    def count(self) -> None:
        """Keep what the pass leaves: it counts."""
        state, result, self._result = self._state, self._result, None
        state.progress.passes, self._outer.checksum = self._machine.passes, 0
        for reducer in state.reducers:
            reducer.end_pass()
        if result is None:
            return  # it had no turns
        contexts = list(state.replicas.contexts)
        for replica, context in result.contexts.items():
            contexts[replica] = context
        state.replicas.contexts = contexts
        self._batches.move_past(range(len(contexts)))
        if result.buffers is not None:
            state.use_first_buffers(result.buffers, are_in_models=self._views.hosted == range(1))
        for number, order in result.orders.items():
            state.reducers[number].rebuild(order)
        for reducer in state.reducers:
            if reducer.group is not None:
                reducer.group.use_if(all(each.has_group for each in result.messages))
        measured = [each.measured for each in result.messages]
        self._sync.apply_decision(result.messages[0].sync_config, measured, self._views.rank)
        if result.adaptation is not None:
            state.adaptation.learn(result.adaptation)
        current = self._current
        for replica, values in result.kept.items():
            current.kept[replica] = {**current.kept_by(replica), **values}
        if current.step is not None:
            current.step.add_figures(result.rows)
        current.passes += 1
        self._exchange.clear()

    def undo_step(self) -> None:
        """Go back to the state before the step whose sums were last deferred: they will never come."""
        undo, self._undo = self._undo, None
        assert undo is not None, "it was remembered"
        self._deferred.undo_step()
        undo.restore(self._state)
        self._exchange.clear()
        self._outer.drop()
        self._batches.forget()
        self._batches.end_step()
        self._current.end()
