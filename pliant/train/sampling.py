"""The options of a data loader, and the samples that they give each of N replicas in an epoch.

The options are read off a `DataLoader` or given with a dataset. Data are either *dealt* or *own*. What a
`DistributedSampler` can do is dealt: the samples of all replicas are a pure function of the epoch, those that N processes
with `DistributedSampler` and `DataLoader` would get. With any other sampler, a batch sampler or an iterable dataset each
replica draws from its own copy, as each of N processes would. Nothing is loaded here.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import ConfigError, Unsliceable
from pliant.train.replica_copies import is_function_of_replica, is_map, is_stream

if TYPE_CHECKING:
    from pliant.train.context import DataPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """The settings of `DataLoader` and `DistributedSampler`, by their names there unless noted."""

    batch_size: int = 1
    """The batch size of one replica."""
    batches: bool = True
    """If false, the dataset gives whole batches (`batch_size=None` of `DataLoader`)."""
    shuffle: bool = True
    seed: int = 0
    """The seed of the order of samples."""
    drop_last: bool = False
    """Drop a replica's last batch if it is short (`DataLoader`)."""
    sampler_drop_last: bool = False
    """Drop samples that are too few for all replicas, rather than repeat some (`DistributedSampler`)."""
    sampler: Any = None
    """Gives the indices of each replica: a sampler, of which each replica has a copy, or a function of the replica that
    returns its sampler. None: samples are dealt."""
    batch_sampler: Any = None
    """The same for a sampler that gives the indices of whole batches."""
    stream: bool = False
    """Whether the dataset is an `IterableDataset`."""
    dealer: Any = None
    """The program's `DistributedSampler`, if it has given one. If the program calls its `set_epoch`, samples come in the order
    of that epoch."""
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
    timeout: float = 0.0
    """How many seconds to wait for one batch of a loader process; 0: forever."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r}: must be a whole number")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ConfigError(f"prefetch_factor={self.prefetch_factor}: must be at least 1")
        if self.timeout < 0:
            raise ConfigError(f"timeout={self.timeout:g}: must not be negative; 0 waits for ever")
        if self.num_workers == 0:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                if getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)!r} needs loader processes: set num_workers")
        if isinstance(self.multiprocessing_context, str):
            known = multiprocessing.get_all_start_methods()
            if self.multiprocessing_context not in known:
                raise ConfigError(f"multiprocessing_context={self.multiprocessing_context!r}: choose from {known}")

    @property
    def is_dealt(self) -> bool:
        """Whether the samples of all replicas are a function of the epoch; if not, each replica draws its own."""
        return not self.stream and self.sampler is None and self.batch_sampler is None

    @property
    def prefetched(self) -> int:
        """How many batches of indices a `DataLoader` draws ahead."""
        return self.num_workers * (self.prefetch_factor or PREFETCH_FACTOR)

    def index_source(self, sampler: Any, batch_sampler: Any) -> Any:
        """Return what gives the indices of one batch after the other, as in a `DataLoader` with these samplers."""
        if batch_sampler is not None:
            return batch_sampler
        return BatchSampler(sampler, self.batch_size, self.drop_last) if self.batches else sampler


PREFETCH_FACTOR = 2
_NAMES = tuple(
    field.name for field in dataclasses.fields(LoaderOptions) if field.name not in ("batches", "stream", "dealer")
)
_SAMPLER_NAMES = ("seed", "sampler_drop_last")
"""Settings that a `DataLoader` does not have unless it has a `DistributedSampler`."""


def loader_options(source: Any, **overrides: Any) -> tuple[Any, LoaderOptions]:
    """Return the dataset in `source` and the options to load it with.

    `source` is a dataset (map-style or iterable), a function of the replica that returns its iterable dataset, or a
    `DataLoader`. The `num_replicas` and `rank` of a DistributedSampler are ignored, because the job decides who gets which
    share. Of a `DataLoader` only `seed` and `sampler_drop_last` can be overridden.

    Raises:
        Unsliceable: its samples cannot be given to replicas.
        ConfigError: settings are wrong, unknown, or given twice.
    """
    unknown = sorted(set(overrides) - set(_NAMES))
    if unknown:
        raise ConfigError(f"unknown loader settings {', '.join(unknown)}: known are {', '.join(_NAMES)}")
    if isinstance(source, DataLoader):
        dataset, settings = source.dataset, _settings_of(source, overrides)
    else:
        dataset, settings = source, _settings_beside(source, overrides)
    return dataset, LoaderOptions(**settings)


def _settings_beside(dataset: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for a dataset that is given without a DataLoader."""
    settings = dict(given)
    stream = settings["stream"] = is_stream(dataset) or is_function_of_replica(dataset)
    if not stream and not is_map(dataset):
        raise ConfigError(
            f"{type(dataset).__name__} is no dataset: give one with __len__ and __getitem__, a torch.utils.data."
            "IterableDataset, a function of the replica that returns one, or a DataLoader"
        )
    if type(batches := settings.get("batch_sampler")) is BatchSampler and "sampler" not in settings:
        own = {"sampler": batches.sampler, "batch_size": batches.batch_size, "drop_last": batches.drop_last}
        if set(own) & set(settings):
            raise ConfigError(f"{', '.join(sorted(set(own) & set(settings)))} beside batch_sampler=: leave it out")
        settings |= own | {"batch_sampler": None}
    sampler, batch_sampler = settings.get("sampler"), settings.get("batch_sampler")
    if settings.get("batch_size", 1) is None:
        if settings.get("drop_last"):
            raise ConfigError("drop_last=True with batch_size=None: there are no batches to drop")
        settings |= {"batch_size": 1, "batches": False}
    if stream:
        if sampler is not None or batch_sampler is not None or settings.get("shuffle"):
            raise ConfigError("an IterableDataset gives its own order: leave out sampler, batch_sampler and shuffle")
        return settings | {"shuffle": False}
    if batch_sampler is not None:
        twice = [name for name in ("batch_size", "shuffle", "drop_last", "sampler") if settings.get(name)]
        if twice:
            raise ConfigError(f"{', '.join(twice)} beside batch_sampler=, which gives whole batches: leave it out")
        _check_sampler(batch_sampler, "batch_sampler")
        return settings | {"shuffle": False, "batch_size": _size_of_batches(batch_sampler)}
    if sampler is not None:
        if settings.get("shuffle"):
            raise ConfigError("shuffle=True beside sampler=, which gives the order: leave one of them out")
        order = _dealt_order(sampler)
        if order is None:
            _check_sampler(sampler, "sampler")
            return settings | {"shuffle": False}
        return settings | {"sampler": None} | order
    return settings


def _settings_of(loader: DataLoader[Any], overrides: dict[str, Any]) -> dict[str, Any]:
    if not loader.in_order:
        raise Unsliceable("in_order=False: the order of batches would depend on timing. Leave it out")
    order = _order_of(loader)
    twice = sorted(name for name in overrides if name in order or name not in _SAMPLER_NAMES)
    if twice:
        raise ConfigError(
            f"{', '.join(twice)} given beside a DataLoader that has its own: "
            "set it there, or give the dataset instead of the DataLoader"
        )
    return {
        "batch_size": loader.batch_size or 1,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "generator": loader.generator,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
        **order,
        **overrides,
    }


def _order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings that say which samples a DataLoader gives in which order."""
    batches: Any = loader.batch_sampler
    if is_stream(loader.dataset):
        return {"stream": True, "shuffle": False, "batches": batches is not None}
    if not is_map(loader.dataset):
        raise ConfigError(f"{type(loader.dataset).__name__} is no map-style dataset: it needs __len__ and __getitem__")
    if batches is not None and type(batches) is not BatchSampler:
        _check_sampler(batches, "batch_sampler")
        return {"shuffle": False, "batch_sampler": batches, "batch_size": _size_of_batches(batches), "drop_last": False}
    sampler: Any = loader.sampler if batches is None else batches.sampler
    order = _dealt_order(sampler)
    if order is None:
        _check_sampler(sampler, "sampler")
        order = {"shuffle": False, "sampler": sampler}
    order |= {"batches": batches is not None}
    if batches is not None:  # a BatchSampler may also be given as such
        order |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    return order


def _dealt_order(sampler: Any) -> dict[str, Any] | None:
    """Return the settings that deal samples to replicas as this sampler would; None if each replica needs a copy."""
    # A subclass may do anything, so only torch's own types are dealt.
    if type(sampler) is DistributedSampler:
        own = {"shuffle": sampler.shuffle, "seed": sampler.seed, "sampler_drop_last": sampler.drop_last}
        return own | {"dealer": sampler}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"shuffle": False} if type(sampler) is SequentialSampler else None


def _check_sampler(sampler: Any, name: str) -> None:
    """Raise ConfigError if replicas cannot have copies of this sampler."""
    kind = sampler.__name__ if isinstance(sampler, type) else type(sampler).__name__
    if is_function_of_replica(sampler):
        return
    if isinstance(sampler, type) or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
        raise ConfigError(
            f"{name}={kind}: give a sampler, or a function of the replica: {name}=lambda replica: {kind}(...)"
        )
    for each in (sampler, getattr(sampler, "sampler", None)):
        rank, ranks = (getattr(each, attribute, None) for attribute in ("rank", "num_replicas"))
        if isinstance(rank, int) and isinstance(ranks, int) and ranks > 1:
            raise ConfigError(
                f"{name} {kind} is that of rank {rank} of {ranks}, and all replicas would have the same samples: give a "
                f"function of the replica, {name}=lambda replica: {kind}(..., num_replicas=job.replicas, rank=replica)"
            )


def _size_of_batches(batch_sampler: Any) -> int:
    """Return the batch size that a batch sampler names; 1 if it names none."""
    size = getattr(batch_sampler, "batch_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def num_steps(dataset: Any, options: LoaderOptions) -> int | None:
    """Return the number of batches of each replica in an epoch of own data; None if it is not known."""
    try:
        if options.stream:
            stream = dataset(0) if is_function_of_replica(dataset) else dataset
            _check_stream(stream)
            length = len(stream)
            if not options.batches:
                return length
            return length // options.batch_size if options.drop_last else math.ceil(length / options.batch_size)
        samplers = (
            each(0) if is_function_of_replica(each) else each for each in (options.sampler, options.batch_sampler)
        )
        return len(options.index_source(*samplers))
    except (TypeError, NotImplementedError):
        return None


def _check_stream(stream: Any) -> None:
    if not is_stream(stream):
        raise ConfigError(
            f"the function of the replica has returned a {type(stream).__name__}: it must return an IterableDataset. A "
            "map-style dataset is given as it is, with a function of the replica as sampler"
        )


# --- which samples ---


Indices = np.ndarray[Any, np.dtype[np.int64]]


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


def batch_indices(share: Tensor | Indices, number: int, options: LoaderOptions) -> list[int] | int:
    """Return the samples of a replica's batch, or the one sample that is a batch; `share` are all samples dealt to that
    replica. (Cutting an array of NumPy costs a fraction of cutting a tensor.)"""
    samples: list[int] = share[number * options.batch_size : (number + 1) * options.batch_size].tolist()
    return samples if options.batches else samples[0]


def _padded_length(length: int, num_replicas: int, options: LoaderOptions) -> int:
    if options.sampler_drop_last:
        return length // num_replicas * num_replicas
    return math.ceil(length / num_replicas) * num_replicas
