"""The batches that accelerate gives each of N ranks, for the replicas of a job.

accelerate deals whole batches: batch k of rank r is batch k * N + r of the shuffled samples, and the last round is filled
up with the first samples. Its loader is one batch ahead of the program, so a dataset or collator that draws random
numbers draws them before the model does in the step before. With gradient accumulation a turn takes several batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pliant.errors import ConfigError
from pliant.train.context import DataPosition, RngState, capture_rng, restore_rng
from pliant.train.feeder import ReplicaLoader
from pliant.train.replicas import Replicas
from pliant.train.sampler_copies import draw_base_seed
from pliant.train.sampling import LoaderOptions, num_batches


def deal_batches(order: torch.Tensor, num_ranks: int, batch_size: int, *, drop_last: bool) -> torch.Tensor:
    """Return the samples of each batch, as accelerate's BatchSamplerShard deals them: [number, rank, place in batch]."""
    in_round = num_ranks * batch_size
    if drop_last:
        rounds = len(order) // in_round
        order = order[: rounds * in_round]
    else:
        rounds = math.ceil(len(order) / in_round)
        first, missing = order[:in_round], rounds * in_round - len(order)
        order = torch.cat([order, first.repeat(math.ceil(missing / max(1, len(first))))[:missing]])
    return order.view(rounds, num_ranks, batch_size)


Order = Callable[[int], torch.Tensor]
"""Returns all samples in the order of an epoch."""


def seeded_order(length: int, seed: int) -> Order:
    """Return the order of accelerate's SeedableRandomSampler: every epoch has a seed of its own."""
    return lambda epoch: torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))


def drawn_order(length: int, seed: int) -> Order:
    """Return the order of a RandomSampler with a generator: it goes on from epoch to epoch."""

    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2 * epoch):  # it draws once more at the end of an epoch, for samples beyond the last
            torch.randperm(length, generator=generator)
        return torch.randperm(length, generator=generator)

    return order


class _Batches(ReplicaLoader):
    """Loads the batches of each replica in accelerate's order."""

    def __init__(
        self, dataset: Any, options: LoaderOptions, num_ranks: int, order: Order | None, *, seeds_by_rank: bool
    ) -> None:
        super().__init__(dataset, options, num_ranks)
        self._given, self._order = options, order
        self._seed_step = options.num_workers if seeds_by_rank else 0

    def _sample_order(self, stream: DataPosition) -> torch.Tensor:
        options, length = self._given, len(self._dataset)
        chosen = self._order_of(stream)
        order = torch.arange(length) if self._order is None else self._order(stream.epoch if chosen is None else chosen)
        dealt = deal_batches(order, self._num_replicas, options.batch_size, drop_last=options.drop_last)
        return dealt.transpose(1, 2).reshape(-1)  # every N-th sample is of the same rank, as the loader expects it

    def next(self, replica: int) -> Any:
        hosted = self._hosted_replica(replica)
        if hosted.base_seed is None:
            hosted.base_seed = draw_base_seed(self._generator, hosted.seeds) + self._seed_step * replica
            hosted.seeds += 1
        return super().next(replica)


class RankLoader:
    """A feeder that gives each replica what accelerate's loader gives that rank: a list of batches for each step."""

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        num_ranks: int,
        order: Order | None = None,
        batches_per_step: int = 1,
        *,
        seeds_by_rank: bool = False,
        has_set_epoch: bool = True,
    ) -> None:
        """Args:
        options: those of a single batch.
        order: returns the samples of an epoch in order. If None, they are taken as they are.
        seeds_by_rank: whether rank r adds r times `num_workers` to the seeds of its loader processes, as the Trainer
            of transformers does.
        has_set_epoch: whether `set_epoch` has an effect on the order.
        """
        self._batches = _Batches(dataset, options, num_ranks, order, seeds_by_rank=seeds_by_rank)
        self._options, self._per_step, self._has_set_epoch = options, batches_per_step, has_set_epoch
        self.num_batches = num_batches(len(dataset), num_ranks, options)
        """The batches of each rank in an epoch."""
        # Without loader processes, a position holds the random state with which the batch ahead was made.
        self._loading = replace(
            options,
            batch_size=options.batch_size * batches_per_step,
            num_workers=max(1, options.num_workers),
            drop_last=options.drop_last and batches_per_step == 1,
        )
        self.replicas = Replicas(num_ranks, len(dataset), self._loading)
        """What the job knows of the samples."""
        self._sizes: dict[int, int] = {}
        """The samples of each replica's last step."""
        self._positions: dict[int, DataPosition] = {}
        self._ahead: dict[int, Any] = {}
        """The batch that each replica has loaded ahead."""

    def host(
        self, streams: Mapping[int, DataPosition], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None:
        """Load for these replicas from now on, from these positions."""
        if options is not None and options.batch_size != self._loading.batch_size:
            raise ConfigError(
                f"a policy has changed the batch size to {options.batch_size} samples per replica, but the plan of this training "
                f"has {self._loading.batch_size}: use policies that leave it"
            )
        self._ahead, self._positions = {}, dict(streams)
        self._batches.host({replica: self._loader_position(stream) for replica, stream in streams.items()})

    def _loader_position(self, stream: DataPosition) -> DataPosition:
        return stream if self._options.num_workers else replace(stream, workers=())

    def next(self, replica: int) -> list[Any]:
        """Return the batches of a step. The generators of this process must be those of the replica."""
        taken = []
        left = self.num_batches - self._positions[replica].batch
        for _ in range(min(self._per_step, left)):
            if replica not in self._ahead:
                self._load_again(replica)
            taken.append(self._ahead.pop(replica))
            self._load_ahead(replica)
        if not taken:
            raise StopIteration
        self._sizes[replica] = len(taken) * self._options.batch_size
        return taken

    def _load_again(self, replica: int) -> None:
        """Load the first batch of an epoch; or once more the one that another worker had loaded ahead."""
        position = self._positions[replica]
        drawn = position.workers[0] if position.workers and not self._options.num_workers else None
        if drawn is None:
            self._ahead[replica] = self._batches.next(replica)
            return
        present = capture_rng()
        restore_rng(RngState.from_bytes(drawn))
        self._ahead[replica] = self._batches.next(replica)
        restore_rng(present)

    def _load_ahead(self, replica: int) -> None:
        position = self._batches.stream(replica)
        if position.batch < self.num_batches:
            if not self._options.num_workers:
                position = replace(position, workers=(capture_rng().to_bytes(),))
            self._ahead[replica] = self._batches.next(replica)
        self._positions[replica] = position

    def last_size(self, replica: int) -> int:
        """Return the number of samples in the last step of `replica`."""
        return self._sizes.get(replica, 0)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of samples of this epoch, if accelerate's sampler does."""
        if self._has_set_epoch:
            self._batches.set_epoch(epoch)

    def stream(self, replica: int) -> DataPosition:
        """Return the position of `replica` after the batches taken so far."""
        return self._positions[replica]

    def has_more(self, replicas: Sequence[int]) -> bool:
        return self._positions[replicas[0]].batch < self.num_batches

    def close(self) -> None:
        self._batches.close()
        self._ahead = {}
