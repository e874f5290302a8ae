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
from pliant.train.sampling import (
    LoaderOptions,
    batch_indices,
    loader_options,
    num_batches,
    num_steps,
    sample_order,
    samples_used,
)

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


class Ranked(DistributedSampler[int]):
    pass


DATA = Numbers()
WEIGHTED = WeightedRandomSampler([1.0] * LENGTH, 10)


def test_what_is_not_dealt_is_each_replicas_own() -> None:
    for source, overrides, steps in (
        (DataLoader(DATA, 4, sampler=WEIGHTED, drop_last=True), {}, 2),
        (DataLoader(DATA, 4, sampler=OwnSampler(DATA)), {}, 7),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), {}, LENGTH),
        (DataLoader(DATA, batch_sampler=[[0, 1], [3]]), {}, 2),
        (DataLoader(Endless(), batch_size=None), {}, None),
        (DATA, {"sampler": WEIGHTED, "batch_size": 4}, 3),
        (DATA, {"sampler": lambda replica: [replica] * 8, "batch_size": 3}, 3),
        (DATA, {"batch_sampler": BatchSampler(WEIGHTED, 4, False)}, 3),
        (DATA, {"batch_sampler": lambda replica: iter([[0]])}, None),
        (DATA, {"sampler": WEIGHTED, "batch_size": None}, 10),
        (Endless(), {"batch_size": 2}, None),
        (lambda replica: Sized(), {"batch_size": 2}, 2),
        (Sized(), {"batch_size": 2, "drop_last": True}, 1),
    ):
        dataset, options = loader_options(source, **overrides)
        assert not options.is_dealt
        assert not options.shuffle
        assert num_steps(dataset, options) == steps, overrides


def test_samplers_that_torch_deals_are_dealt_wherever_they_are_given() -> None:
    sampler = DistributedSampler(DATA, 4, 1, shuffle=False, seed=9)
    for overrides in ({"sampler": sampler, "batch_size": 3}, {"batch_sampler": BatchSampler(sampler, 3, False)}):
        options = loader_options(DATA, **overrides)[1]
        assert options.is_dealt
        assert (options.batch_size, options.shuffle, options.seed) == (3, False, 9)
    assert loader_options(DATA, sampler=RandomSampler(DATA))[1] == LoaderOptions()


class Sized(Endless):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("source", "overrides", "error", "says"),
    [
        (DATA, {"batch_size": None, "drop_last": True}, ConfigError, "no batches to drop"),
        (DATA, {"sampler": Ranked(DATA, 4, 1)}, ConfigError, r"rank 1 of 4.*sampler=lambda replica: Ranked\("),
        (DataLoader(DATA, sampler=Ranked(DATA, 4, 1)), {}, ConfigError, "rank 1 of 4"),
        (DATA, {"sampler": OwnSampler}, ConfigError, r"sampler=lambda replica: OwnSampler\("),
        (DATA, {"sampler": 3}, ConfigError, "sampler=int"),
        (DATA, {"sampler": WEIGHTED, "shuffle": True}, ConfigError, "shuffle=True beside sampler="),
        (DATA, {"batch_sampler": [[0]], "batch_size": 2}, ConfigError, "batch_size beside batch_sampler="),
        (DATA, {"batch_sampler": BatchSampler([0], 1, False), "batch_size": 2}, ConfigError, "batch_size beside"),
        (Endless(), {"shuffle": True}, ConfigError, "its own order"),
        (Endless(), {"sampler": [0]}, ConfigError, "its own order"),
        (DataLoader(DATA, num_workers=1, in_order=False), {}, Unsliceable, "in_order"),
        (DataLoader(DATA, batch_size=4), {"batch_size": 8}, ConfigError, "batch_size given beside a DataLoader"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), {"seed": 1}, ConfigError, "seed given beside"),
        (DATA, {"batchsize": 8}, ConfigError, "unknown loader settings batchsize: known are batch_size"),
        (DATA, {"batch_size": 0}, ConfigError, "batch_size=0"),
        (DATA, {"batch_size": True}, ConfigError, "batch_size=True"),
        (DATA, {"num_workers": -1}, ConfigError, "num_workers=-1"),
        (DATA, {"prefetch_factor": 2}, ConfigError, "set num_workers"),
        (DATA, {"persistent_workers": True}, ConfigError, "set num_workers"),
        (DATA, {"num_workers": 1, "multiprocessing_context": "twin"}, ConfigError, "choose from"),
        (object(), {}, ConfigError, "object is no dataset"),
    ],
    ids=lambda value: ",".join(value) or "-" if isinstance(value, dict) else "",
)
def test_what_cannot_be_dealt_is_refused(
    source: Any, overrides: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        loader_options(source, **overrides)
