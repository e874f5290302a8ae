"""Samples are dealt to replicas as torch deals them to ranks, and what cannot be dealt is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import ConfigError, Unsliceable
from pliant.train.context import DataPosition
from pliant.train.sampling import LoaderOptions, batch_indices, loader_options, num_batches, sample_order, samples_used

pytestmark = pytest.mark.timeout(60)
LENGTH = 26


def replica_batches(
    length: int, num_replicas: int, replica: int, epoch: int, options: LoaderOptions, consumed: int = 0
) -> list[list[int]]:
    """The samples of each batch of `replica` in `epoch`."""
    share = sample_order(length, num_replicas, epoch, options, consumed)[replica::num_replicas]
    return [batch_indices(share, n, options) for n in range(num_batches(length, num_replicas, options, consumed))]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@given(
    length=st.integers(0, 40),
    num_replicas=st.integers(1, 7),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    sampler_drop_last=st.booleans(),
    batch_size=st.integers(1, 5),
)
def test_batches_are_those_of_torch(
    length: int, num_replicas: int, epoch: int, shuffle: bool, drop_last: bool, sampler_drop_last: bool, batch_size: int
) -> None:
    options = LoaderOptions(
        batch_size=batch_size, shuffle=shuffle, seed=5, drop_last=drop_last, sampler_drop_last=sampler_drop_last
    )
    for replica in range(num_replicas):
        sampler = DistributedSampler(range(length), num_replicas, replica, shuffle, 5, sampler_drop_last)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        theirs = list(BatchSampler(sampler, batch_size, drop_last))
        assert replica_batches(length, num_replicas, replica, epoch, options) == theirs
        assert num_batches(length, num_replicas, options) == len(theirs)


@given(length=st.integers(1, 60), before=st.integers(1, 5), after=st.integers(1, 5), steps=st.integers(0, 30))
def test_an_epoch_that_is_dealt_anew_uses_every_sample_once(length: int, before: int, after: int, steps: int) -> None:
    options = LoaderOptions(batch_size=2)
    steps = min(steps, num_batches(length, before, options))
    used = samples_used(length, before, DataPosition(batch=steps), options)
    first = [batch for v in range(before) for batch in replica_batches(length, before, v, 0, options)[:steps]]
    rest = [batch for v in range(after) for batch in replica_batches(length, after, v, 0, options, used)]
    assert set().union(*first, *rest) == set(range(length))
    repeated = sum(map(len, first + rest)) - length
    assert repeated < before + after, "only to give every replica as many"


def test_a_loader_is_described_by_its_own_settings() -> None:
    data = Numbers()
    dataset, options = loader_options(DataLoader(data, 8, shuffle=True, drop_last=True, num_workers=2), seed=4)
    assert dataset is data
    assert (options.batch_size, options.shuffle, options.seed, options.drop_last) == (8, True, 4, True)
    assert (options.num_workers, options.prefetch_factor) == (2, 2)
    assert not loader_options(DataLoader(data))[1].shuffle
    sampler = DistributedSampler(data, 4, 1, shuffle=False, seed=9, drop_last=True)
    options = loader_options(DataLoader(data, sampler=sampler))[1]
    assert (options.shuffle, options.seed, options.sampler_drop_last) == (False, 9, True)
    assert loader_options(data, batch_size=3)[1] == LoaderOptions(batch_size=3)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnSampler(RandomSampler):
    pass


DATA = Numbers()


@pytest.mark.parametrize(
    ("source", "overrides", "error", "says"),
    [
        (Endless(), {}, Unsliceable, "map-style"),
        (DataLoader(Endless()), {}, Unsliceable, "map-style"),
        (DataLoader(DATA, batch_size=None), {}, Unsliceable, "batch_size=None"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * LENGTH, 3)), {}, Unsliceable, "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=OwnSampler(DATA)), {}, Unsliceable, "OwnSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), {}, Unsliceable, "replacement=True"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), {}, Unsliceable, "batch_sampler list"),
        (DataLoader(DATA, num_workers=1, in_order=False), {}, Unsliceable, "in_order"),
        (DataLoader(DATA, batch_size=4), {"batch_size": 8}, ConfigError, "batch_size given beside a DataLoader"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), {"seed": 1}, ConfigError, "seed given beside"),
        (DATA, {"sampler": [0]}, Unsliceable, "sampler="),
        (DATA, {"batchsize": 8}, ConfigError, "unknown loader settings batchsize: known are batch_size"),
        (DATA, {"batch_size": 0}, ConfigError, "batch_size=0"),
        (DATA, {"batch_size": True}, ConfigError, "batch_size=True"),
        (DATA, {"num_workers": -1}, ConfigError, "num_workers=-1"),
        (DATA, {"prefetch_factor": 2}, ConfigError, "set num_workers"),
        (DATA, {"persistent_workers": True}, ConfigError, "set num_workers"),
        (DATA, {"num_workers": 1, "multiprocessing_context": "twin"}, ConfigError, "choose from"),
        (object(), {}, ConfigError, "map-style"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | str) else getattr(value, "__name__", type(value).__name__),
)
def test_what_cannot_be_dealt_is_refused(
    source: Any, overrides: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        loader_options(source, **overrides)
