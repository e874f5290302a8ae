"""What the program asks of all workers together, outside of turns: sums, evaluations in shards, functions of a replica."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from pliant.comm.engine import Engine
from pliant.errors import TrainError
from pliant.train.context import RNG_BYTES, ReplicaContext, RngState, capture_rng
from pliant.train.phases import SumsArrived

if TYPE_CHECKING:
    from pliant.train.current_step import CurrentStep
    from pliant.train.driver import PhaseDriver
    from pliant.train.job_state import JobState
    from pliant.train.outer_code import OuterCode
    from pliant.train.step_batches import StepBatches
    from pliant.train.views import WorkerViews

T = TypeVar("T")


class OuterCalls:
    """Finds answers that are the same on all workers, and runs shards with the random state of their replicas."""

    def __init__(
        self,
        state: JobState,
        driver: PhaseDriver,
        views: WorkerViews,
        current: CurrentStep,
        batches: StepBatches,
        outer: OuterCode,
        settle: Callable[[], None],
        device: torch.device,
    ) -> None:
        """`settle` ends a step that the program has left."""
        self._state, self.replicas, self._driver, self._views = state, state.replicas, driver, views
        self._current, self._batches, self._outer, self._device = current, batches, outer, device
        self._settle = settle
        self._answers_read = 0

    def together(self, ask: Callable[[Engine], T], alone: Callable[[], T], place: str) -> T:
        """Return what `ask` returns; `place` says in an error where the program is. All workers call this at the same
        place of their program; if one is lost, the others ask again in a new view, so that all get an answer.

        A new worker that runs the program's code before its first step gets the answers that the others got there. Where
        there are none, in a step that is taken back, or with a single worker, return what `alone` does.
        """
        current, driver, views = self._current, self._driver, self._views
        if current.turn is not None:
            raise TrainError(
                f"{place} in the turn of replica {current.turn.replica}: all workers must call it together, after the loop over "
                "the step. To average a number over the replicas, use step.log in the turn"
            )
        current.check_outer(place)
        self._settle()
        if self._has_answer:
            self._answers_read += 1
            answer: T = copy.deepcopy(self._state.answers[self._answers_read - 1])
            return answer
        if driver.joins_late or not driver.wait_for_sums():
            return alone()  # the others do not take part: here the program runs without effect
        answers: list[T] = []

        def exchange() -> SumsArrived:
            answers.append(ask(views.current_engine()) if views.size > 1 else alone())
            return SumsArrived(for_sure=views.size == 1)

        driver.meet(exchange, place)
        if driver.is_taken_back:
            return alone()
        if current.step is None and self._state.progress.epoch_step == 0:
            self._state.answers.append(copy.deepcopy(answers[-1]))
        return answers[-1]

    @property
    def _has_answer(self) -> bool:
        """Whether the next thing that all workers do together has been done by the others already."""
        return self._driver.joins_late and self._answers_read < len(self._state.answers)

    # --- shards ---

    def begin_shards(self, what: str) -> None:
        """Begin an evaluation, in which every replica has its shard."""
        self._current.check_outer(what)
        self._settle()
        self._driver.wait_for_sums()
        self._outer.end()

    def share_of(self, shards: Sequence[int]) -> list[int]:
        """Return which of these shards this worker takes: those of the replicas hosted here, or all of them where the
        others do not take part."""
        if self._has_answer:
            return []
        takes_all = self._driver.joins_late or self._driver.is_taken_back
        return [shard for shard in shards if takes_all or shard in self._views.hosted]

    def begin_shard(self, replica: int) -> None:
        self._outer.switch_to(replica)

    def end_shard(self, replica: int) -> bytes:
        """Return what a shard leaves: the random state of its replica, and the buffers that later turns begin with, if the
        shard has changed them."""
        state = self._state
        changed, present = b"", self._outer.switch.capture_buffers()
        if replica == 0 or not state.sync_buffers:
            packed = bytes(state.buffers.pack(present).numpy())
            before = self.replicas.contexts[replica].buffers or bytes(state.buffers.pack(state.first_buffers).numpy())
            changed = packed if packed != before else b""
        return capture_rng(self._device).to_bytes() + changed

    def end_shards(self, left: dict[int, bytes]) -> None:
        """End an evaluation: each of these replicas goes on with what its shard has left."""
        state, contexts = self._state, list(self.replicas.contexts)
        for replica, data in left.items():
            before, random, changed = contexts[replica], RngState.from_bytes(data[:RNG_BYTES]), data[RNG_BYTES:]
            own = b"" if state.sync_buffers else changed or before.buffers
            contexts[replica] = ReplicaContext(random, before.stream, own)
            if changed and replica == 0:
                flat = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
                state.use_first_buffers(state.buffers.unpack(flat))
        self.replicas.contexts = contexts
        self._batches.move_past(left.keys())
        self._outer.begin()
