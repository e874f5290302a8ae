"""The options of a data loader, and the samples that they give each of N replicas in an epoch.

The options are read off a `DataLoader` or given with a dataset. Only what a `DistributedSampler` can do is accepted,
because only that can be dealt to replicas. The samples are those that N processes with `DistributedSampler` and
`DataLoader` would get. Nothing is loaded here.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import ConfigError, Unsliceable

if TYPE_CHECKING:
    from pliant.train.context import DataPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """The settings of `DataLoader` and `DistributedSampler`, by their names there unless noted."""

    batch_size: int = 1
    """The batch size of one replica."""
    shuffle: bool = True
    seed: int = 0
    """The seed of the order of samples."""
    drop_last: bool = False
    """Drop a replica's last batch if it is short (`DataLoader`)."""
    sampler_drop_last: bool = False
    """Drop samples that are too few for all replicas, rather than repeat some (`DistributedSampler`)."""
    num_workers: int = 0
    """The loader processes of one worker, whatever the number of replicas it hosts."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """None: torch's `default_collate`."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each loader process for each base seed. All replicas of the worker share the dataset there, so random
    numbers must come from the generators of Python, NumPy and torch, not from one inside the dataset."""
    pin_memory: bool = False
    prefetch_factor: int | None = None
    """Batches prefetched per loader process; None: 2."""
    persistent_workers: bool = False
    """Keep loader processes, and their random states, for the next epoch."""
    generator: torch.Generator | None = None
    """Draws the base seeds instead of the default generator. Must be used for nothing else."""
    multiprocessing_context: BaseContext | str | None = None
    timeout_s: float = 0.0
    """How long to wait for one batch of a loader process (`timeout` of `DataLoader`); 0: forever."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ConfigError(f"prefetch_factor={self.prefetch_factor}: must be at least 1")
        if self.timeout_s < 0:
            raise ConfigError(f"timeout_s={self.timeout_s:g}: must not be negative; 0 waits for ever")
        if self.num_workers == 0:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                if getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)!r} needs loader processes: set num_workers")
        if isinstance(self.multiprocessing_context, str):
            known = multiprocessing.get_all_start_methods()
            if self.multiprocessing_context not in known:
                raise ConfigError(f"multiprocessing_context={self.multiprocessing_context!r}: choose from {known}")


_NAMES = tuple(field.name for field in dataclasses.fields(LoaderOptions))
_SAMPLER_NAMES = ("seed", "sampler_drop_last")
"""Settings that a `DataLoader` does not have unless it has a `DistributedSampler`."""


def loader_options(source: Any, **overrides: Any) -> tuple[Any, LoaderOptions]:
    """Return the dataset in `source` (a map-style dataset or a `DataLoader`), and the options to load it with.

    The `num_replicas` and `rank` of a sampler are ignored, because the job decides who gets which share. Of a
    `DataLoader` only `seed` and `sampler_drop_last` can be overridden.

    Raises:
        Unsliceable: its samples cannot be dealt to replicas.
        ConfigError: settings are wrong, unknown, or given twice.
    """
    for name in ("sampler", "batch_sampler"):
        if name in overrides:
            raise Unsliceable(f"{name}=...: {_CUSTOM_ORDER}")
    unknown = sorted(set(overrides) - set(_NAMES))
    if unknown:
        raise ConfigError(f"unknown loader settings {', '.join(unknown)}: known are {', '.join(_NAMES)}")
    if isinstance(source, DataLoader):
        settings = _settings_of(source, overrides)
        dataset = source.dataset
    else:
        settings = overrides
        dataset = source
    _check_dataset(dataset)
    return dataset, LoaderOptions(**settings)


_CUSTOM_ORDER = (
    "the order of samples must be known to every worker, whichever replicas it hosts. Use shuffle=True or False, or "
    "a DistributedSampler; a fixed subset or weighting can be put into the dataset (torch.utils.data.Subset)"
)


def _settings_of(loader: DataLoader[Any], overrides: dict[str, Any]) -> dict[str, Any]:
    _check_dataset(loader.dataset)
    batches = loader.batch_sampler
    if batches is None:
        raise Unsliceable(
            "batch_size=None: without batches there are no equal shares. Give the DataLoader a batch_size; "
            "if the dataset makes batches itself, let it give one sample at a time"
        )
    if type(batches) is not BatchSampler:
        raise Unsliceable(f"batch_sampler {type(batches).__name__}: {_CUSTOM_ORDER}")
    if not loader.in_order:
        raise Unsliceable("in_order=False: the order of batches would depend on timing. Leave it out")
    order = _sampler_settings(batches.sampler)
    twice = sorted(name for name in overrides if name in order or name not in _SAMPLER_NAMES)
    if twice:
        raise ConfigError(
            f"{', '.join(twice)} given beside a DataLoader that has its own: "
            "set it there, or give the dataset instead of the DataLoader"
        )
    return {
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "generator": loader.generator,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout_s": loader.timeout,
        "shuffle": isinstance(batches.sampler, RandomSampler),
        **order,
        **overrides,
    }


def _sampler_settings(sampler: Any) -> dict[str, Any]:
    # A subclass may do anything, so only torch's own types are accepted.
    if type(sampler) is DistributedSampler:
        return {"shuffle": sampler.shuffle, "seed": sampler.seed, "sampler_drop_last": sampler.drop_last}
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise Unsliceable(
                f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples}): {_CUSTOM_ORDER}"
            )
        return {}
    if type(sampler) is SequentialSampler:
        return {}
    raise Unsliceable(f"sampler {type(sampler).__name__}: {_CUSTOM_ORDER}")


def _check_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise Unsliceable(
            f"{name} is an IterableDataset, of which no replica can be given its own part, or the place where another "
            "worker stopped. Use a map-style dataset (with __len__ and __getitem__)"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{name} is no map-style dataset: give one with __len__ and __getitem__, or a DataLoader")


# --- which samples ---


def num_batches(length: int, num_replicas: int, options: LoaderOptions, consumed: int = 0) -> int:
    """Return the number of batches of every replica in an epoch of which `consumed` samples are used."""
    share = _padded_length(length - consumed, num_replicas, options) // num_replicas
    return share // options.batch_size if options.drop_last else math.ceil(share / options.batch_size)


def samples_used(length: int, num_replicas: int, stream: DataPosition, options: LoaderOptions) -> int:
    """Return how many samples of the epoch are used when all replicas are at this position."""
    return min(length, stream.consumed + stream.batch * options.batch_size * num_replicas)


def sample_order(length: int, num_replicas: int, epoch: int, options: LoaderOptions, consumed: int) -> Tensor:
    """Return all samples in the order in which they are dealt to the replicas, round-robin."""
    if options.shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(options.seed + epoch))
    else:
        order = torch.arange(length)
    order = order[consumed:]
    size = _padded_length(len(order), num_replicas, options)
    return order.repeat(math.ceil(size / max(1, len(order))))[:size]


def batch_indices(share: Tensor, number: int, options: LoaderOptions) -> list[int]:
    """Return the samples of a replica's batch; `share` are all samples dealt to that replica."""
    samples: list[int] = share[number * options.batch_size : (number + 1) * options.batch_size].tolist()
    return samples


def _padded_length(length: int, num_replicas: int, options: LoaderOptions) -> int:
    if options.sampler_drop_last:
        return length // num_replicas * num_replicas
    return math.ceil(length / num_replicas) * num_replicas
