"""The warm-up of a new worker: one step that it takes alone, without effect, before the others count on it.

Whoever is started for a job that runs already would hold the others up in its first step: the device, its libraries, the
memory and compiled code are cold, and compilation can take minutes. So its program first runs alone: the code up to the
loop, one turn on a real batch, the outer body, and the rest of an epoch's body. Then everything is put back to where it was,
only caches stay warm; the worker reports that it is ready, enters the job between two steps, and loads its state.

Nothing that happens in the shadow leaves it. There are no commits, listeners, records, checkpoints or exchanges. Batches come
from a feeder of the shadow's own. What needs the other workers is answered alone: a sum is the worker's own value, an
evaluation has one batch, and functions for the first worker do not run, as they may write files. A program that cannot live
with that fails, and is started again without a shadow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from pliant.train.context import DataPosition, capture_rng, restore_rng
from pliant.train.current_step import CurrentStep
from pliant.train.events import Progress
from pliant.train.feeder import Feeder
from pliant.train.job_state import JobState
from pliant.train.step import Outcome, Step, Turn
from pliant.train.wrapping import device_of

T = TypeVar("T")


class Unknown(float):
    """Stands for an answer that only the others know: not a number, and so is each of its items."""

    def __new__(cls) -> Unknown:
        return super().__new__(cls, "nan")

    def __getitem__(self, key: object) -> Unknown:
        return self

    __iter__ = None  # else it would have items without end


class Snapshot:
    """What the program's first step may change of the job's objects: copies, in the memory of the host."""

    def __init__(self, state: JobState) -> None:
        self._state, self._device = state, device_of(state.models, is_free=True)
        self._random = capture_rng(self._device)
        self._modules = [(module, module.training) for model in state.models for module in model.modules()]
        self._parameters = [
            (parameter, parameter.grad, parameter.requires_grad, _to_host(parameter))
            for model in state.models
            for parameter in model.parameters()
        ]
        self._buffers = state.buffers.save()
        self._optimizers = [_copied(optimizer.state_dict()) for optimizer in state.optimizers]
        self._tracked = {name: _copied(each.state_dict()) for name, each in state.tracked.items()}

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for parameter, gradient, requires_grad, values in self._parameters:
                parameter.copy_(values)
                parameter.grad = gradient
                parameter.requires_grad_(requires_grad)
        for module, training in self._modules:
            module.training = training
        self._state.buffers.load(self._buffers)
        for optimizer, saved in zip(self._state.optimizers, self._optimizers, strict=True):
            optimizer.load_state_dict(saved)
        for name, saved in self._tracked.items():
            self._state.tracked[name].load_state_dict(saved)
        restore_rng(self._random, self._device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy whose tensors are on the host."""
    copies: dict[str, Any] = copy.deepcopy(tree_map_only(torch.Tensor, _to_host, state))
    return copies


class Shadow:
    """Stands in for the trainer while a new worker warms up: gives the program one step with one turn."""

    is_taken_back = True
    """The step does not count: the program runs to its end without effect."""

    def __init__(self, state: JobState, feeder: Feeder, first: Progress) -> None:
        """`first` is where the program begins if it starts a job. `feeder` is closed with the shadow."""
        self._state, self.replicas = state, state.replicas
        self.feeder = feeder
        self.current = CurrentStep(first)
        self.replica = state.replicas.count - 1
        """Whose turn is taken. Programs often print in that of replica 0."""
        self._first = first
        self._batch: tuple[Any, ...] = ()
        self._has_begun = False
        self._snapshot = Snapshot(state)
        for model in state.models:
            model.zero_grad(set_to_none=True)  # those of the snapshot are put back

    def close(self) -> None:
        """Leave the shadow: everything is as it was before, and warm."""
        self.feeder.close()
        self._batch = ()
        self._state.keep_memory()
        self._snapshot.restore()

    # --- steps and turns ---

    def steps(self) -> Iterator[Step]:
        """Yield one step, the first time."""
        if self._has_begun:
            return
        self._has_begun = True
        first, replicas = self._first, self.replicas
        self.feeder.host({self.replica: DataPosition(first.epoch)}, replicas.count, replicas.loading)
        if self.feeder.has_more([self.replica]):
            try:
                self._batch = (self.feeder.next(self.replica),)
            except StopIteration:
                return
            yield Step(self, first.step, first.epoch, 0, is_shadow=True)

    def turns(self, step: Step) -> Iterator[Any]:
        """Yield the batch of one replica. Its gradients stay where backward puts them."""
        current = self.current
        current.turn = turn = Turn(self.replica, 0, is_last=True)
        try:
            yield from self._batch
        finally:
            current.turn = None
        step.add_figures([turn.row])
        current.kept[self.replica] = {**current.kept_by(self.replica), **turn.kept}

    def skip_turn(self, what: str, outcome: Outcome) -> None:
        self.current.running_turn(what).outcome = outcome

    # --- what all workers would do together ---

    def together(self, ask: object, alone: Callable[[], T], place: str) -> T:
        return alone()

    def begin_shards(self, what: str) -> None:
        """Begin an evaluation."""

    def share_of(self, shards: Sequence[int]) -> list[int]:
        return [self.replica]

    def begin_shard(self, replica: int) -> None:
        """Begin the evaluation of a shard, with whatever random state there is."""

    def end_shard(self, replica: int) -> bytes:
        return b""

    def end_shards(self, left: dict[int, bytes]) -> None:
        """End an evaluation."""
