"""Ways to spoil a part of what keeps the bits, for negative controls: each is in force for the time of its `with`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from pliant.comm import order
from pliant.train import data, gradients, rng, trainer


@contextlib.contextmanager
def no_random_state() -> Iterator[None]:
    """Replicas share the worker's generators."""
    with mock.patch.object(rng, "restore"):
        yield


@contextlib.contextmanager
def no_buffers() -> Iterator[None]:
    """Replicas share the worker's buffers."""
    with mock.patch.object(trainer.Trainer, "_load_buffers"):
        yield


@contextlib.contextmanager
def no_loader_state() -> Iterator[None]:
    """Loader workers begin anew in the middle of an epoch."""
    original: Callable[[bytes], data.Stream] = data.Stream.from_bytes
    with mock.patch.object(data.Stream, "from_bytes", lambda state: replace(original(state), workers=())):
        yield


@contextlib.contextmanager
def no_loader_position() -> Iterator[None]:
    """Replicas begin their epoch anew."""
    original: Callable[[bytes], data.Stream] = data.Stream.from_bytes
    with mock.patch.object(data.Stream, "from_bytes", lambda state: replace(original(state), batch=0)):
        yield


@contextlib.contextmanager
def first_layout_for_ever() -> Iterator[None]:
    """Gradients stay in one bucket, in the order of the parameters."""

    def rebuild(self: gradients.Gradients, ready_order: Sequence[int]) -> None:
        self.use_layout(self.layout)

    with mock.patch.object(gradients.Gradients, "rebuild", rebuild):
        yield


@contextlib.contextmanager
def parameters_order() -> Iterator[None]:
    """The second layout is made in the order of the parameters, not in that of replica 0's gradients."""
    original = gradients.Gradients.rebuild

    def rebuild(self: gradients.Gradients, ready_order: Sequence[int]) -> None:
        original(self, sorted(ready_order))

    with mock.patch.object(gradients.Gradients, "rebuild", rebuild):
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
def nothing() -> Iterator[None]:
    """The control of the controls."""
    yield
