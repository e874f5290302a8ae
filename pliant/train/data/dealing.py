"""Which samples each of N replicas gets in an epoch, as N processes with `DistributedSampler` and `DataLoader` would.

Functions of the dataset's length, the options and the place in the epoch; nothing is loaded here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pliant.train.data.options import LoaderOptions
from pliant.train.data.stream import Stream


def batches(
    length: int, num_replicas: int, replica: int, epoch: int, options: LoaderOptions, consumed: int = 0
) -> list[list[int]]:
    """The samples of each batch of `replica` in `epoch`, of a dataset of `length`.

    The first `consumed` samples in the order of that epoch are left out, and the rest is dealt to the replicas.
    """
    share = dealt(length, num_replicas, epoch, options, consumed)[replica::num_replicas]
    return [batch(share, number, options) for number in range(num_batches(length, num_replicas, options, consumed))]


def num_batches(length: int, num_replicas: int, options: LoaderOptions, consumed: int = 0) -> int:
    """Batches of every replica in an epoch of which `consumed` samples are used."""
    share = _padded(length - consumed, num_replicas, options) // num_replicas
    return share // options.batch_size if options.drop_last else math.ceil(share / options.batch_size)


def samples_used(length: int, num_replicas: int, stream: Stream, options: LoaderOptions) -> int:
    """Samples of the epoch that are used when all replicas stand where `stream` does: where to deal anew."""
    return min(length, stream.consumed + stream.batch * options.batch_size * num_replicas)


def dealt(length: int, num_replicas: int, epoch: int, options: LoaderOptions, consumed: int) -> Tensor:
    """All samples in the order in which they are dealt to the replicas, round and round."""
    if options.shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(options.seed + epoch))
    else:
        order = torch.arange(length)
    order = order[consumed:]
    size = _padded(len(order), num_replicas, options)
    return order.repeat(math.ceil(size / max(1, len(order))))[:size]


def batch(share: Tensor, number: int, options: LoaderOptions) -> list[int]:
    """The samples of a replica's batch with this number; `share` is what was dealt to that replica."""
    samples: list[int] = share[number * options.batch_size : (number + 1) * options.batch_size].tolist()
    return samples


def _padded(length: int, num_replicas: int, options: LoaderOptions) -> int:
    if options.sampler_drop_last:
        return length // num_replicas * num_replicas
    return math.ceil(length / num_replicas) * num_replicas
