"""The N replicas of a job: what the next turn of each depends on, and how the samples of an epoch are dealt to them.

All of it is known to every worker, whichever replicas it hosts. Who takes turns when is the trainer's affair.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from pliant.errors import ConfigError
from pliant.train import rng
from pliant.train.buffers import Buffers, Tensors
from pliant.train.context import Context
from pliant.train.data.dealing import num_batches, samples_used
from pliant.train.data.options import LoaderOptions
from pliant.train.data.stream import Stream
from pliant.train.rng import RngState


class Replicas:
    """Their number, their contexts, and their data."""

    def __init__(self, count: int, num_samples: int, loading: LoaderOptions) -> None:
        self.count = count
        """N: fixed, unless it follows the number of workers."""
        self.contexts: list[Context] = []
        """Of all replicas, at the boundary where the last step was committed."""
        self.num_samples = num_samples
        self.loading = loading
        """How samples are dealt and loaded, now: decisions may change the batch size."""

    @property
    def num_loader_workers(self) -> int:
        return self.loading.num_workers

    @property
    def num_batches(self) -> int:
        """Of each in a whole epoch, with the batch size of now."""
        return num_batches(self.num_samples, self.count, self.loading)

    def batches_left(self, epoch: int) -> int:
        """Of each in this epoch."""
        stream = self.stream_of(0, epoch)
        return num_batches(self.num_samples, self.count, self.loading, stream.consumed) - stream.batch

    def stream_of(self, replica: int, epoch: int) -> Stream:
        """Where the replica's data stand, in the epoch that the job is in."""
        stream = self.contexts[replica].stream
        while stream.epoch < epoch:
            stream = stream.next_epoch(self.loading)
        return stream

    def _rest(self, epoch: int) -> Stream:
        """The place from which what is left of the epoch is dealt anew."""
        stream = self.stream_of(0, epoch)
        return Stream(stream.epoch, consumed=samples_used(self.num_samples, self.count, stream, self.loading))

    def deal_to(self, count: int, epoch: int, step: int, device: torch.device) -> None:
        """Go on with another number of replicas: the rest of the epoch's samples is dealt to these."""
        rest = self._rest(epoch)
        states = [context.random for context in self.contexts[:count]]
        for replica in range(len(states), count):
            label = f"{step}:{replica}".encode()
            states.append(rng.seeded(int.from_bytes(hashlib.sha256(label).digest()[:4]), device))
        own = [context.buffers for context in self.contexts[:count]]
        own += [self.contexts[0].buffers] * (count - len(own))
        self.contexts = [Context(state, rest, buffers) for state, buffers in zip(states, own, strict=True)]
        self.count = count

    def set_batch_size(self, size: int, epoch: int) -> None:
        """From the next step on: what is left of the epoch is dealt anew.

        Raises:
            ConfigError: an epoch would not have one such batch.
        """
        if num_batches(self.num_samples, self.count, replace(self.loading, batch_size=size)) == 0:
            raise ConfigError(
                f"{self.num_samples} samples give {self.count} replicas not one batch of {size}: "
                "decide for less, or use drop_last=False"
            )
        rest = self._rest(epoch)
        self.contexts = [context.at(rest) for context in self.contexts]
        self.use_batch_size(size)

    def use_batch_size(self, size: int) -> None:
        """As `set_batch_size`, where the replicas' places in their data say so already."""
        self.loading = replace(self.loading, batch_size=size)


class ReplicaSwitch:
    """Swaps the state of one hosted replica for that of another: random generators and buffers.

    The trainer calls `restore` when a replica's turn begins, and the two captures when it ends. A benchmark may put a
    wrapper in its place (`job.replica_switch = ...`) to measure what the swap costs.
    """

    def __init__(self, buffers: Buffers, device: torch.device, sync_buffers: bool) -> None:
        self._buffers, self._device, self._sync_buffers = buffers, device, sync_buffers

    def restore(self, context: Context, first_buffers: Tensors) -> None:
        """Begin a turn: load the replica's random state, and the buffers of replica 0 or its own."""
        rng.restore(context.random, self._device)
        if self._sync_buffers or not context.buffers:
            self._buffers.load(first_buffers)
        else:
            flat = torch.frombuffer(bytearray(context.buffers), dtype=torch.uint8)
            self._buffers.load(self._buffers.unpack(flat))

    def capture_random(self) -> RngState:
        """Return the state of all random generators after a turn."""
        return rng.capture(self._device)

    def capture_buffers(self) -> Tensors:
        """Return copies of the model's buffers after a turn."""
        return self._buffers.save()
