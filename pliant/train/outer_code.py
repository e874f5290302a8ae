"""Whose random state and buffers are in force: those of a replica, in its turn, or those of the program's own code.

That code runs between turns, once on every worker, but as if on every DDP rank: with the buffers of replica 0 and the random
state of the first replica hosted here. What it draws moves the generators of all replicas: each rank of a DDP job would
have drawn as much.

A job of one replica can leave all of this to the process itself ("live"): its generators and buffers are those of the
replica, in turns and between them, and are looked at only if somebody asks for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from pliant.train.context import DataPosition, ReplicaContext, RngState, capture_rng, restore_rng
from pliant.train.job_state import JobState
from pliant.train.outer_draws import Draws
from pliant.train.replicas import ReplicaSwitch
from pliant.train.step_batches import StepBatches


class OuterCode:
    """Gives replicas and the program's own code their random state and buffers, and notes what that code draws."""

    def __init__(self, state: JobState, batches: StepBatches, device: torch.device) -> None:
        self._state, self._replicas, self._batches, self._device = state, state.replicas, batches, device
        self.switch = ReplicaSwitch(state.buffers, device, state.sync_buffers)
        """What swaps the replicas. A benchmark may put a wrapper in its place."""
        self._random: RngState | None = None
        """The random state with which the code began to run; None if it does not run, or its draws do not count."""
        self._before_loading: list[Draws] = []
        """What was drawn in this step, to be applied after a replica has loaded its batch."""
        self.checksum = 0
        """A checksum of the draws since it was last set to 0."""

    @property
    def is_running(self) -> bool:
        return self._random is not None or self._replicas.is_live

    def begin_live(self, stream: Callable[[], DataPosition]) -> None:
        """Leave generators and buffers to the process from now on: the program's own code runs, and the job has one
        replica. `stream` returns its position in the data."""
        device = self._device
        self._random, self._before_loading = None, []
        self._replicas.begin_live(lambda: ReplicaContext(capture_rng(device), stream()))

    def begin(self) -> None:
        """The program's own code runs from now on. When a step begins, the batch of the first replica is loaded before, as
        with DDP."""
        hosted = self._batches.hosted
        if not hosted or not self._replicas.contexts:
            return
        self._replicas.end_live()
        self._random = self.random_of(hosted[0])
        restore_rng(self._random, self._device)
        self._state.show_first_buffers()

    def end(self) -> None:
        """Turns, or the shards of an evaluation, follow."""
        self.note_draws()
        self._replicas.end_live()
        self._random = None
        self._state.keep_first_buffers()

    def drop(self) -> None:
        """What the program has drawn does not count."""
        assert not self._replicas.is_live, "it is only known what was drawn where contexts are kept"
        self._random = None

    def begin_step(self) -> None:
        self._before_loading = []

    def switch_to(self, replica: int) -> None:
        """Go on as this replica: its turn begins, or its shard of an evaluation."""
        context = self._replicas.contexts[replica].with_random(self.random_of(replica))
        self.switch.restore(context, self._state.first_buffers)

    def random_of(self, replica: int) -> RngState:
        """Return the random state in which a replica goes on: its batch is loaded, and the program has drawn."""
        if not self._batches.is_to_load(replica):
            return self._replicas.contexts[replica].random
        random = self._batches.random_after(replica)
        for draws in self._before_loading:
            random = draws.apply(random)
        return random

    def note_draws(self) -> None:
        """Move the generators of all replicas as far as the program's own code has moved those in force."""
        if self._random is None:
            return
        draws = Draws.between(self._random, capture_rng(self._device))
        if draws is None:
            return
        self.checksum = zlib.crc32(repr((self.checksum, draws.counts)).encode())
        self._random = draws.after
        self._before_loading.append(draws)
        contexts = self._replicas.contexts
        self._replicas.contexts = [
            each if self._batches.is_to_load(replica) else each.with_random(draws.apply(each.random))
            for replica, each in enumerate(contexts)
        ]
