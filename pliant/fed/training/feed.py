"""Which samples a client trains on in which step, and bringing them to where they are needed.

A client's stream is its samples again and again, each time in a new order: so every batch is full, and the first pass is the
beginning of the stream. It follows from the job's seed, the client and the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pliant.errors import TrainError
from pliant.fed.data.datasets import InMemory, Samples
from pliant.fed.data.partition import Ints
from pliant.fed.data.task import Task

STREAM, DRAWS = 3, 4
"""What a seed is drawn for; see `task.LIARS`."""


def stream(task: Task, client: int, round_number: int, count: int) -> Ints:
    """The first `count` samples that the client trains on in this round."""
    if not 0 <= client < task.num_clients:
        raise TrainError(f"client {client} of {task.num_clients}: the unit is of another job")
    own = task.partition.of(client)
    chance = np.random.default_rng((task.config.seed, STREAM, client, round_number))
    passes = [chance.permutation(own) for _ in range(-(-count // len(own)))]
    return np.concatenate(passes)[:count] if len(passes) != 1 else passes[0][:count]


def seed_of_draws(task: Task, clients: Sequence[int], round_number: int) -> int:
    """For what models draw while these clients train together, as dropout."""
    words = np.random.SeedSequence((task.config.seed, DRAWS, round_number, *clients)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


class Feed:
    """Samples on a device: those in memory lie there as a whole, others are read once for each call."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self._samples, self.device = samples, device
        self._data = samples.data.to(device) if isinstance(samples, InMemory) else None
        self._labels = samples.labels.to(device)

    def inputs(self, samples: Ints) -> Tensor:
        """Of the shape of `samples`, and then that of an input."""
        if self._data is not None:
            flat = self._data.index_select(0, self._moved(samples))
        else:
            once, places = np.unique(samples, return_inverse=True)
            read = self._samples.inputs(once).to(self.device)
            flat = read.index_select(0, self._moved(places))
        return flat.reshape(*samples.shape, *flat.shape[1:])

    def labels(self, samples: Ints) -> Tensor:
        flat = self._labels.index_select(0, self._moved(samples))
        return flat.reshape(*samples.shape, *flat.shape[1:])

    def many(self, samples: Ints) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
        """A way to get inputs and labels of the first rows of `samples` (clients x their streams), from one place to another.

        All numbers are brought to the device now, so that no step waits for the host.
        """
        data, places = self._data, samples
        if data is None:
            once, places = np.unique(samples, return_inverse=True)
            data = self._samples.inputs(once).to(self.device)
        known, at, labelled = data, self._moved(places).view(samples.shape), self._moved(samples).view(samples.shape)

        def drawn(rows: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
            shape = rows, end - begin
            inputs = known.index_select(0, at[:rows, begin:end].reshape(-1))
            labels = self._labels.index_select(0, labelled[:rows, begin:end].reshape(-1))
            return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape, *labels.shape[1:])

        return drawn

    def part(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of successive samples."""
        if self._data is not None:
            return self._data[begin:end], self._labels[begin:end]
        return self._samples.inputs(np.arange(begin, end)).to(self.device), self._labels[begin:end]

    def _moved(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64).reshape(-1)).to(self.device)
