"""What all workers exchange when the turns of a pass are taken: rows of the turns, contexts, buffers, sums.

Nothing here changes the state of the job. The result of an exchange is kept until the pass counts, because a worker may be
lost in the middle: then the turns are taken again, and the result of the first attempt must leave no trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_map_only

from pliant.comm.engine import Engine
from pliant.train.adaptation import ReceivedRows
from pliant.train.context import DataPosition, ReplicaContext
from pliant.train.exchange import StepExchange, StepMessage
from pliant.train.pending import PendingSum
from pliant.train.rendezvous import spread_state
from pliant.train.replicas import Placement, ReplicaSwitch, Tensors
from pliant.train.step import OWN_COUNTER, Outcome, Turn, TurnRow, complaint_about

if TYPE_CHECKING:
    from pliant.train.gradients import GradientReducer
    from pliant.train.guard import Guard
    from pliant.train.job_state import JobState

MAX_PASSES = 1 << 16
"""The most passes that a step may have."""
StallWatch = Callable[[str], contextlib.AbstractContextManager[None]]
"""Watches over a wait that may take long."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass leaves, if it counts."""

    complaint: str = ""
    """What is wrong, the same on every worker; empty if nothing is."""
    messages: Sequence[StepMessage] = ()
    adaptation: ReceivedRows | None = None
    rows: Sequence[TurnRow] = ()
    """The turns of all replicas, with the figures that they have logged."""
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each replica has kept."""
    contexts: dict[int, ReplicaContext] = field(default_factory=dict)
    buffers: Tensors | None = None
    """Those of replica 0."""
    orders: dict[int, list[int]] = field(default_factory=dict)
    """For each reducer that still has its first layout, the order in which the gradients of replica 0 became ready."""
    awaited: Sequence[PendingSum] | None = None
    """Sums that are waited for where they are used."""

    @property
    def agreed_view(self) -> int:
        """The newest view that all workers are prepared for, if it is the same for all; else 0."""
        prepared = {each.prepared for each in self.messages}
        return prepared.pop() if len(prepared) == 1 else 0


class PassExchange:
    """Keeps what the turns of a pass leave here, and exchanges it."""

    def __init__(self, state: JobState, guard: Guard, stall_watch: StallWatch, device: torch.device) -> None:
        self._state, self._guard, self._stall_watch, self._device = state, guard, stall_watch, device
        self._exchange = StepExchange(state.buffers, state.replicas.num_loader_workers)
        self._engine: Engine | None = None
        self._turns: list[Turn] = []
        """The turns of this pass that were taken here."""
        self._own_orders: dict[int, list[int]] = {}

    def enter_view(self, engine: Engine, placement: Placement) -> None:
        self._engine = engine
        self._exchange.enter_view(engine, placement)
        self.clear()

    def clear(self) -> None:
        """Drop what the turns have left: they are taken for the first time, or again."""
        self._exchange.clear()
        self._turns, self._own_orders = [], {}

    def add(self, turn: Turn, stream: DataPosition, switch: ReplicaSwitch) -> None:
        """Keep what a turn leaves: its context, and the buffers of replica 0."""
        state = self._state
        own = b"" if state.sync_buffers else bytes(state.buffers.pack(switch.capture_buffers()).numpy())
        self._exchange.new_contexts[turn.replica] = ReplicaContext(switch.capture_random(), stream, own)
        if turn.replica == 0:
            self._exchange.new_buffers = switch.capture_buffers()
            self._own_orders = {
                number: list(reducer.ready_order)
                for number, reducer in enumerate(state.reducers)
                if reducer.waits_for_order
            }
        self._turns.append(turn)

    @property
    def rows(self) -> list[bytes]:
        """What the other workers learn of the turns taken here."""
        is_alone = self._engine is None or self._engine.size == 1
        return [] if is_alone else [turn.pack() for turn in self._turns]

    def run(self, message: StepMessage, *, shares_kept: bool) -> PassResult:
        """Exchange everything, and wait for the sums of gradients. `shares_kept`: every worker gets what the replicas have
        kept, because it may have to host any of them.

        Raises:
            CommError: a worker is lost.
        """
        engine, contexts, adaptation = self._engine, self._state.replicas.contexts, self._state.adaptation
        assert engine is not None, "enter_view() comes first"
        step, is_first_pass = self._state.progress.step, message.number % MAX_PASSES == 0
        messages, rows = [message], [turn.row for turn in self._turns]
        if engine.size > 1:
            self._exchange.send(message, contexts)
            with self._stall_watch(f"the turns of step {step}"):
                messages = self._exchange.receive(contexts, adaptation.row_size)
            rows = [TurnRow.from_bytes(row) for each in messages for row in each.turns]
        complaint = (
            self._complaint_about_places(messages, engine)
            or complaint_about(rows, step)
            or self._complaint_about_workers(messages, engine)
        )
        if complaint:
            return PassResult(complaint)
        reducers = self._summed_reducers(rows)
        with self._stall_watch(f"the sums of step {step}"):
            awaited = self._wait(reducers, is_alone=engine.size == 1)
            orders = self._share_orders(reducers, engine) if awaited is None else {}
        return PassResult(
            messages=messages,
            adaptation=adaptation.receive([each.figures for each in messages]) if is_first_pass else None,
            rows=rows,
            kept=self._share_kept(rows, engine, among_all=shares_kept),
            contexts=dict(self._exchange.new_contexts),
            buffers=self._exchange.new_buffers,
            orders=orders,
            awaited=awaited,
        )

    # --- sums ---

    def _summed_reducers(self, rows: Sequence[TurnRow]) -> dict[int, GradientReducer]:
        """Return the reducers whose gradients are summed in this pass, by their numbers."""
        if all(row.outcome in (Outcome.LOGGED, Outcome.PASSED_OVER, Outcome.NO_DATA) for row in rows):
            return {}
        models = 0
        for row in rows:
            models |= row.models
        if not models and len(self._state.reducers) == 1:
            models = 1  # all replicas contribute zeros
        return {number: reducer for number, reducer in enumerate(self._state.reducers) if models >> number & 1}

    def _wait(self, reducers: dict[int, GradientReducer], *, is_alone: bool) -> Sequence[PendingSum] | None:
        """Wait for the sums; or return those that are waited for where they are used."""
        if self._turns[-1].outcome is Outcome.SKIPPED:
            for reducer in reducers.values():
                reducer.contribute_zeros()
        if reducers and not is_alone and self._state.reducers[0].are_deferred:
            return self._state.reducers[0].pending_sums()
        for reducer in reducers.values():
            reducer.wait()
        if reducers and self._state.averaging is not None:
            self._state.averaging.wait()
        return None

    def _share_orders(self, reducers: dict[int, GradientReducer], engine: Engine) -> dict[int, list[int]]:
        orders = {}
        for number, reducer in reducers.items():
            if reducer.waits_for_order:
                order = self._own_orders.get(number, [])
                if engine.size > 1:
                    order = self._exchange.share_order(f"order:{number}", order, len(reducer.parameters))
                if len(set(order)) == len(reducer.parameters):  # else replica 0 has skipped its turn
                    orders[number] = order
        return orders

    # --- what replicas keep ---

    def _share_kept(self, rows: Sequence[TurnRow], engine: Engine, *, among_all: bool) -> dict[int, dict[str, Any]]:
        if not any(row.keeps for row in rows):
            return {}
        own = {turn.replica: turn.kept for turn in self._turns}
        if engine.size == 1 or not among_all:
            return own
        kept: dict[int, dict[str, Any]] = {}
        for rank in range(engine.size):
            found = spread_state(engine, own if engine.rank == rank else None, rank)
            kept |= cast(dict[int, dict[str, Any]], found)
        kept |= own
        return {
            replica: tree_map_only(torch.Tensor, lambda each: each.to(self._device), values)
            for replica, values in kept.items()
        }

    # --- complaints ---

    def _complaint_about_places(self, messages: Sequence[StepMessage], engine: Engine) -> str:
        """Return which workers are at different places of the program; empty if all are in the same pass."""
        numbers = [each.number for each in messages]
        if len(set(numbers)) == 1:
            return ""
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        here, there = (
            f"{engine.view.workers[rank]} is in loop {numbers[rank] % MAX_PASSES + 1} over step {numbers[rank] // MAX_PASSES}"
            for rank in (0, other)
        )
        return f"{here}, but {there}: all workers must iterate over a step equally often. {OWN_COUNTER}"

    def _complaint_about_workers(self, messages: Sequence[StepMessage], engine: Engine) -> str:
        """Return in what the workers differ that must be the same everywhere; empty if they do not."""
        workers, step = engine.view.workers, self._state.progress.step
        draws = [each.draws for each in messages]
        if self._guard.is_on and len(set(draws)) > 1:
            other = next(rank for rank, each in enumerate(draws) if each != draws[0])
            return (
                f"before the loop over step {step} the workers {workers[0]} and {workers[other]} drew different amounts of "
                "random numbers, outside of that loop: let all workers run the same code, or draw from a generator of "
                "your own (torch.Generator, random.Random)"
            )
        return self._guard.compare(engine, [each.checksum for each in messages], step)
