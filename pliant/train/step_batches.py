"""The batches of a step, for the replicas that this worker hosts.

A DDP rank loads its batch before the body of its loop runs. Here a worker hosts several replicas: when a step begins, it
loads the batch of the first one, and those of the others when they need them. Batches stay until the step ends, because a
step can have several passes. If another worker takes over a replica meanwhile, it loads the batch again, from the context
with which the step began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pliant.train.context import ReplicaContext, RngState, capture_rng, restore_rng
from pliant.train.events import Progress
from pliant.train.feeder import Feeder
from pliant.train.replicas import Replicas

Batch = tuple[Any, int] | tuple[()]
"""A batch and its number of samples; nothing if the data of its replica have ended."""


class StepBatches:
    """Loads each batch of the step once, in the random state of its replica."""

    def __init__(self, feeder: Feeder, replicas: Replicas, progress: Progress, device: torch.device) -> None:
        self.hosted = range(0)
        self._feeder, self._replicas, self._progress, self._device = feeder, replicas, progress, device
        self._start: list[ReplicaContext] = []
        """The contexts with which the step began."""
        self._loaded: dict[int, tuple[Batch, RngState | None]] = {}
        self._is_open = False
        self._moved: set[int] = set()
        """The replicas whose contexts are those of after their batches."""
        self._dealt = -1

    def enter_view(self, hosted: range) -> None:
        """Load for these replicas from now on."""
        self.hosted = hosted
        self.forget()
        if not self._moved:
            self._start = list(self._replicas.contexts)  # they may have been dealt anew

    def forget(self) -> None:
        """Load again what is needed, from where the step began."""
        self._loaded, self._dealt = {}, -1

    def begin_step(self) -> bool:
        """Begin a step; return whether there may be batches for it."""
        self._start, self._loaded, self._moved, self._is_open = list(self._replicas.contexts), {}, set(), True
        self._host()
        return self._feeder.has_more(self.hosted)

    def end_step(self) -> None:
        self._loaded, self._moved, self._is_open = {}, set(), False

    def is_to_load(self, replica: int) -> bool:
        """Whether the context of this replica is the one of before its batch of this step."""
        return self._is_open and replica not in self._moved

    def move_past(self, replicas: Iterable[int]) -> None:
        """From now on the contexts of these replicas are those of after their batches."""
        self._moved.update(replicas)

    @property
    def may_go_on(self) -> bool:
        """Whether the feeder loads for the replicas hosted here, from where the last step has ended, and may have more."""
        return self._dealt == self._replicas.times_dealt and self._feeder.has_more(self.hosted)

    def begin_live_step(self) -> Batch:
        """Begin a step of the only replica, whose context is the process itself, and return its batch. Nobody asks for the
        number of its samples there."""
        self._moved, self._is_open = {0}, True
        batch: Batch
        try:
            batch = self._feeder.next(0), 0
        except StopIteration:
            batch = ()
        self._loaded = {0: (batch, None)}
        return batch

    def load(self, replica: int) -> Batch:
        """Return the batch of a hosted replica."""
        if replica not in self._loaded:
            self._host()
            restore_rng(self._start[replica].random, self._device)
            batch = self._next(replica)
            self._loaded[replica] = batch, capture_rng(self._device)
        return self._loaded[replica][0]

    def random_after(self, replica: int) -> RngState:
        """Load the batch of a hosted replica, and return the random state after it was loaded."""
        self.load(replica)
        random = self._loaded[replica][1]
        assert random is not None, "the context of a live replica is never that of before its batch"
        return random

    def _next(self, replica: int) -> Batch:
        try:
            return self._feeder.next(replica), self._feeder.last_size(replica)
        except StopIteration:
            return ()

    def _host(self) -> None:
        """Let the feeder load for the replicas hosted here, from where the step began."""
        if self._dealt == self._replicas.times_dealt:
            return
        epoch = self._progress.epoch
        streams = {replica: self._replicas.position_in(self._start[replica], epoch) for replica in self.hosted}
        self._feeder.host(streams, self._replicas.count, self._replicas.loading)
        self._dealt = self._replicas.times_dealt
