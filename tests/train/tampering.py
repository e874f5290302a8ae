"""Ways to spoil a part of what keeps the bits, for negative controls: each is in force for the time of its `with`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from pliant.comm import order, process_group
from pliant.comm.engine import Engine
from pliant.comm.execution import SliceExecutor
from pliant.comm.operations import Operation
from pliant.comm.reactor import ReactorCall
from pliant.train import bucket_sums, step_batches
from pliant.train.context import DataPosition, ReplicaContext, restore_rng
from pliant.train.deferred import DeferredUpdates
from pliant.train.gradient_folds import SetAdder
from pliant.train.gradients import GradientReducer
from pliant.train.group_path import GroupPath
from pliant.train.pending import UndoLog
from pliant.train.replicas import ReplicaSwitch, Tensors
from pliant.train.sync import StepMeasurement, SyncConfig, SyncTuner

Tampering = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def no_random_state() -> Iterator[None]:
    """Replicas share the worker's generators."""

    def restore(self: ReplicaSwitch, context: ReplicaContext, first_buffers: Tensors) -> None:
        self._buffers.load(first_buffers)

    loading = mock.patch.object(step_batches, "restore_rng")
    with loading, mock.patch.object(ReplicaSwitch, "restore", restore):
        yield


def no_buffers() -> Tampering:
    """Replicas share the worker's buffers."""

    def restore(self: ReplicaSwitch, context: ReplicaContext, first_buffers: Tensors) -> None:
        restore_rng(context.random, self._device)

    return mock.patch.object(ReplicaSwitch, "restore", restore)


def _positions_with(**other: Any) -> Tampering:
    original: Callable[[bytes], DataPosition] = DataPosition.from_bytes
    return mock.patch.object(DataPosition, "from_bytes", lambda state: replace(original(state), **other))


def no_loader_state() -> Tampering:
    """Loader workers begin anew in the middle of an epoch."""
    return _positions_with(workers=())


def no_loader_position() -> Tampering:
    """Replicas begin their epoch anew."""
    return _positions_with(batch=0)


def first_layout_for_ever() -> Tampering:
    """Gradients stay in one bucket, in the order of the parameters."""
    return mock.patch.object(GradientReducer, "rebuild", lambda self, ready_order: self.use_layout(self.layout))


def parameters_order() -> Tampering:
    """The second layout is made in the order of the parameters, not in that of replica 0's gradients."""
    original = GradientReducer.rebuild
    return mock.patch.object(GradientReducer, "rebuild", lambda self, ready_order: original(self, sorted(ready_order)))


def division() -> Tampering:
    """Gradients are divided by N rather than multiplied by 1/N."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def mul(gradient: torch.Tensor, factor: float, *, out: torch.Tensor) -> None:
            torch.div(gradient, round(1 / factor), out=out)

    def scale(self: SetAdder, target: list[torch.Tensor], factor: float) -> None:
        torch._foreach_div_(target, round(1 / factor))

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(bucket_sums, "torch", Torch()))
    stack.enter_context(mock.patch.object(SetAdder, "scale", scale))
    return stack


def ascending_fold() -> Tampering:
    """Sums run from replica 0 up in all chunks."""
    return mock.patch.object(order, "chain", lambda chunk, num_replicas: tuple(range(num_replicas)))


def fickle() -> Tampering:
    """The tuner has another opinion about slices in every third step."""
    original = SyncTuner.learn

    def learn(self: SyncTuner, *args: Any, **kwargs: Any) -> SyncConfig:
        original(self, *args, **kwargs)
        size = (4096, 65536, 8192)[self._steps // 3 % 3]
        self.config = replace(self.config, slice_bytes=size, in_flight_bytes=2 * size)
        return self.config

    return mock.patch.object(SyncTuner, "learn", learn)


def wavering() -> Tampering:
    """What workers measure says now that priority helps, now that it does not."""
    original = SyncTuner.learn

    def learn(self: SyncTuner, steps: Sequence[StepMeasurement], **kwargs: Any) -> SyncConfig:
        r = 1.0 if self._steps // 3 % 2 else 0.1
        measured = [StepMeasurement(0.5, r * 0.5 * 4e6, 4e6) for _ in steps]
        return original(self, measured, **kwargs)

    return mock.patch.object(SyncTuner, "learn", learn)


def nothing_kept() -> Tampering:
    """Updates that came too early cannot be taken back."""
    return mock.patch.object(UndoLog, "save")


def withholding(first: int = 3) -> Tampering:
    """From this step of a view on, this worker's part of all sums but the most urgent ones is never done. Over TCP only."""
    original = SliceExecutor._run_step

    def step(self: SliceExecutor, operation: Operation, index: int) -> None:
        if not (_is_gradient(operation) and operation.priority > 0 and operation.seq >= first - 1):
            original(self, operation, index)

    return mock.patch.object(SliceExecutor, "_run_step", step)


def withholding_the_last_of_an_epoch() -> Tampering:
    return withholding(4)


@contextlib.contextmanager
def slow_rest() -> Iterator[None]:
    """All sums but the most urgent ones are done when the program has updated its first layer, as if the network were
    slow; or when it waits for everything. Over TCP only."""
    held: list[tuple[SliceExecutor, Operation, int]] = []
    engines: list[Engine] = []
    flowing = False
    step, enter_view = SliceExecutor._run_step, GradientReducer.enter_view
    take_in, flush, unused_parameters = (
        DeferredUpdates._apply_sums,
        DeferredUpdates.flush,
        DeferredUpdates.unused_parameters,
    )

    def held_step(self: SliceExecutor, operation: Operation, index: int) -> None:
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

    def noted_enter_view(self: GradientReducer, engine: Engine, blocks: Sequence[int]) -> None:
        engines.append(engine)
        enter_view(self, engine, blocks)

    def noted_apply_sums(self: DeferredUpdates, *args: Any, **kwargs: Any) -> None:
        take_in(self, *args, **kwargs)
        let_go()

    def noted_flush(self: DeferredUpdates) -> None:
        if self.is_pending:
            let_go()
        flush(self)

    def noted_unused(self: DeferredUpdates) -> set[int]:
        nonlocal flowing
        found = unused_parameters(self)
        flowing = False  # what backward hands in from now on is the next step's
        return found

    with (
        mock.patch.object(SliceExecutor, "_run_step", held_step),
        mock.patch.object(GradientReducer, "enter_view", noted_enter_view),
        mock.patch.object(DeferredUpdates, "_apply_sums", noted_apply_sums),
        mock.patch.object(DeferredUpdates, "flush", noted_flush),
        mock.patch.object(DeferredUpdates, "unused_parameters", noted_unused),
    ):
        yield


def _is_gradient(operation: Operation) -> bool:
    return operation.compiled.spec.name.startswith("grad:")


def no_backward() -> Tampering:
    """Turns end without one."""
    return mock.patch.object(torch.Tensor, "backward", return_value=None)


def nothing() -> Tampering:
    """The control of the controls."""
    return contextlib.nullcontext()


# --- sums on a process group ---


@contextlib.contextmanager
def sums_on_gloo() -> Iterator[None]:
    """Nothing is spoiled: gradients are summed on a process group of gloo, from the second pass of every view on."""
    enter = GroupPath.enter_view

    def enter_and_wait(path: GroupPath, engine: Any, blocks: Any) -> None:
        enter(path, engine, blocks)
        group, deadline_s = path._group, time.monotonic() + 30
        while group is not None and not group.is_ready and not group._ended.is_set():
            assert time.monotonic() < deadline_s, "there is no process group"
            time.sleep(0.001)

    with (
        mock.patch.dict(os.environ, {process_group.SETTING: "gloo"}),
        mock.patch.object(GroupPath, "enter_view", enter_and_wait),
    ):
        yield


@contextlib.contextmanager
def sums_on_gloo_in_another_order() -> Iterator[None]:
    """The operands of a shard are added from the first to the last, whatever the order of the job."""

    def fold(plan: Any, rank: int, received: torch.Tensor, result: torch.Tensor) -> None:
        rows = received.view(-1, max(1, plan.shard_size(rank)))
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        result.copy_(total)

    with sums_on_gloo(), mock.patch.object(process_group, "fold", fold):
        yield
