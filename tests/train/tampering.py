"""Ways to spoil a part of what keeps the bits, for negative controls: each is in force for the time of its `with`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from pliant.comm import order
from pliant.comm.engine import Engine
from pliant.comm.execution import StepRunner
from pliant.comm.operations import Operation
from pliant.comm.reactor import ReactorCall
from pliant.train import gradients, pending
from pliant.train.context import DataPosition, ReplicaContext, restore_rng
from pliant.train.deferred import DeferredUpdates
from pliant.train.gradients import GradientReducer
from pliant.train.pending import UndoLog
from pliant.train.replicas import ReplicaSwitch, Tensors
from pliant.train.sync import StepMeasurement, SyncConfig, SyncTuner
from pliant.train.trainer import Trainer


@contextlib.contextmanager
def no_random_state() -> Iterator[None]:
    """Replicas share the worker's generators."""

    def restore(self: ReplicaSwitch, context: ReplicaContext, first_buffers: Tensors) -> None:
        self._buffers.load(first_buffers)

    with mock.patch.object(ReplicaSwitch, "restore", restore):
        yield


@contextlib.contextmanager
def no_buffers() -> Iterator[None]:
    """Replicas share the worker's buffers."""

    def restore(self: ReplicaSwitch, context: ReplicaContext, first_buffers: Tensors) -> None:
        restore_rng(context.random, self._device)

    with mock.patch.object(ReplicaSwitch, "restore", restore):
        yield


@contextlib.contextmanager
def no_loader_state() -> Iterator[None]:
    """Loader workers begin anew in the middle of an epoch."""
    original: Callable[[bytes], DataPosition] = DataPosition.from_bytes
    with mock.patch.object(DataPosition, "from_bytes", lambda state: replace(original(state), workers=())):
        yield


@contextlib.contextmanager
def no_loader_position() -> Iterator[None]:
    """Replicas begin their epoch anew."""
    original: Callable[[bytes], DataPosition] = DataPosition.from_bytes
    with mock.patch.object(DataPosition, "from_bytes", lambda state: replace(original(state), batch=0)):
        yield


@contextlib.contextmanager
def first_layout_for_ever() -> Iterator[None]:
    """Gradients stay in one bucket, in the order of the parameters."""

    def rebuild(self: GradientReducer, ready_order: Sequence[int]) -> None:
        self.use_layout(self.layout)

    with mock.patch.object(GradientReducer, "rebuild", rebuild):
        yield


@contextlib.contextmanager
def parameters_order() -> Iterator[None]:
    """The second layout is made in the order of the parameters, not in that of replica 0's gradients."""
    original = GradientReducer.rebuild

    def rebuild(self: GradientReducer, ready_order: Sequence[int]) -> None:
        original(self, sorted(ready_order))

    with mock.patch.object(GradientReducer, "rebuild", rebuild):
        yield


@contextlib.contextmanager
def division() -> Iterator[None]:
    """Gradients are divided by N rather than multiplied by 1/N."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def mul(gradient: torch.Tensor, factor: float, *, out: torch.Tensor) -> None:
            torch.div(gradient, round(1 / factor), out=out)

    with mock.patch.object(gradients, "torch", Torch()):
        yield


@contextlib.contextmanager
def ascending_fold() -> Iterator[None]:
    """Sums run from replica 0 up in all chunks."""
    with mock.patch.object(order, "chain", lambda chunk, num_replicas: tuple(range(num_replicas))):
        yield


@contextlib.contextmanager
def fickle() -> Iterator[None]:
    """The tuner has another opinion about slices in every third step."""
    original = SyncTuner.learn

    def learn(self: SyncTuner, *args: Any, **kwargs: Any) -> SyncConfig:
        original(self, *args, **kwargs)
        size = (4096, 65536, 8192)[self._steps // 3 % 3]
        self.config = replace(self.config, slice_bytes=size, in_flight_bytes=2 * size)
        return self.config

    with mock.patch.object(SyncTuner, "learn", learn):
        yield


@contextlib.contextmanager
def wavering() -> Iterator[None]:
    """What workers measure says now that priority helps, now that it does not."""
    original = SyncTuner.learn

    def learn(self: SyncTuner, steps: Sequence[StepMeasurement], **kwargs: Any) -> SyncConfig:
        r = 1.0 if self._steps // 3 % 2 else 0.1
        measured = [StepMeasurement(0.5, r * 0.5 * 4e6, 4e6) for _ in steps]
        return original(self, measured, **kwargs)

    with mock.patch.object(SyncTuner, "learn", learn):
        yield


@contextlib.contextmanager
def blind_uses() -> Iterator[None]:
    """Nobody notices that a parameter is used."""
    with mock.patch.object(DeferredUpdates, "use"):
        yield


@contextlib.contextmanager
def late_options() -> Iterator[None]:
    """An update that was put off is done with the learning rate of later."""
    with mock.patch.object(pending, "_copy_options", lambda group: group):
        yield


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Updates that came too early cannot be taken back."""
    with mock.patch.object(UndoLog, "save"):
        yield


@contextlib.contextmanager
def withholding(first: int = 3) -> Iterator[None]:
    """From this step of a view on, this worker's part of all sums but the most urgent ones is never done. Over TCP only."""
    original = StepRunner._run_step

    def step(self: StepRunner, operation: Operation, index: int) -> None:
        if not (_is_gradient(operation) and operation.priority > 0 and operation.seq >= first - 1):
            original(self, operation, index)

    with mock.patch.object(StepRunner, "_run_step", step):
        yield


def withholding_the_last_of_an_epoch() -> contextlib.AbstractContextManager[None]:
    return withholding(4)


@contextlib.contextmanager
def slow_rest() -> Iterator[None]:
    """All sums but the most urgent ones are done when the program has updated its first layer, as if the network were
    slow; or when it waits for everything. Over TCP only."""
    held: list[tuple[StepRunner, Operation, int]] = []
    engines: list[Engine] = []
    flowing = False
    step, enter_view = StepRunner._run_step, Trainer.enter_view
    take_in, flush, unused_parameters = (
        DeferredUpdates._apply_sums,
        DeferredUpdates.flush,
        DeferredUpdates.unused_parameters,
    )

    def held_step(self: StepRunner, operation: Operation, index: int) -> None:
        if _is_gradient(operation) and operation.priority > 0 and not flowing:
            held.append((self, operation, index))
        else:
            step(self, operation, index)

    def release() -> None:
        for owner, operation, index in held:
            owner.runnable.push(operation.priority, (operation, index))
        held.clear()

    def let_go() -> None:
        nonlocal flowing
        flowing = True
        for engine in engines[-1:]:
            engine._reactor.post(ReactorCall(release, lambda _: None))

    def noted_enter_view(self: Trainer, engine: Engine) -> None:
        engines.append(engine)
        enter_view(self, engine)

    def noted_apply_sums(self: DeferredUpdates, *args: Any, **kwargs: Any) -> None:
        take_in(self, *args, **kwargs)
        let_go()

    def noted_flush(self: DeferredUpdates) -> None:
        let_go()
        flush(self)

    def noted_unused(self: DeferredUpdates) -> set[int]:
        nonlocal flowing
        found = unused_parameters(self)
        flowing = False  # what backward hands in from now on is the next step's
        return found

    with (
        mock.patch.object(StepRunner, "_run_step", held_step),
        mock.patch.object(Trainer, "enter_view", noted_enter_view),
        mock.patch.object(DeferredUpdates, "_apply_sums", noted_apply_sums),
        mock.patch.object(DeferredUpdates, "flush", noted_flush),
        mock.patch.object(DeferredUpdates, "unused_parameters", noted_unused),
    ):
        yield


def _is_gradient(operation: Operation) -> bool:
    return operation.compiled.spec.name.startswith("grad:")


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """The control of the controls."""
    yield
