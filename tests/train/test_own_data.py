"""Replicas with samplers or streams of their own get the batches of DDP ranks with DataLoaders of their own, to the bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gang import FULL
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import pliant
from pliant.errors import ConfigError, TrainError
from pliant.train.context import DataPosition, RngState, capture_rng, restore_rng
from pliant.train.feeder import ReplicaLoader
from pliant.train.outer_draws import DrawsBetween
from pliant.train.replica_copies import load_attributes, pack_record, save_attributes, unpack_record
from pliant.train.sampling import loader_options
from pliant.train.stream_loader import StreamLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
LENGTH, EPOCHS, N = 26, 2, 3


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    torch.set_num_threads(1)
    before = capture_rng()
    yield
    restore_rng(before)


# --- data ---


def sample(index: int, own: Any = None) -> torch.Tensor:
    """A sample that depends on all three generators, or on one of its own, and on the loader worker that makes it."""
    info = get_worker_info()
    who = [-1, -1, -1] if info is None else [info.id, info.num_workers, info.seed % 2**20]
    chance = (
        [random.random(), np.random.rand(), torch.rand(()).item()]
        if own in (None, random) or info
        else [own.random()] * 3
    )
    return torch.tensor([index, *who, *chance], dtype=torch.float64)


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.stack([sample(each) for each in index]) if isinstance(index, list) else sample(index)


DATA = Augmented()


class RankSampler(Sampler[int]):
    """A share of the samples in an order that `set_epoch` and the number of epochs so far decide."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas, self.epoch, self.times = rank, num_replicas, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.rank, LENGTH - LENGTH % self.num_replicas, self.num_replicas))
        random.Random(100 * self.epoch + self.times).shuffle(order)
        self.times += 1
        return iter(order)


class EagerBatches:
    """Draws from two global generators where `iter` is called, not where the first batch is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        return iter([order[each : each + 4] for each in range(random.randrange(2), 20, 4)])

    def __len__(self) -> int:
        return 5


class DrawsAsItGoes(Sampler[int]):
    """Draws from a generator of its own between batches, and its choice depends on what it drew before."""

    def __init__(self, *, is_global: bool = False) -> None:
        self.chance = np.random.default_rng(5)
        self.inner = SimpleNamespace(chance=random.Random(3))
        self.is_global = is_global

    def __iter__(self) -> Iterator[int]:
        last = 0
        for _ in range(18):
            step = int(self.chance.integers(7)) + self.inner.chance.randrange(3)
            if self.is_global:
                step = int(torch.randint(5, ()) + np.random.randint(4)) + random.randrange(2)
            last = (last + step) % LENGTH
            yield last


class Stream(IterableDataset[torch.Tensor]):
    """Its share of the samples, through a small shuffle buffer; loader workers share it unevenly."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, *, chance: Any = random) -> None:
        self.rank, self.num_ranks, self.epoch, self.begun, self.chance = rank, num_ranks, 0, 0, chance

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> list[int]:
        info = get_worker_info()
        own = list(range(100 * self.rank, 100 * self.rank + 17))
        return own if info is None else own[:12] if info.id == 0 else own[12:]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        buffer: list[int] = []
        for number in self.numbers():
            buffer.append(number + 1000 * self.begun + 10000 * self.epoch)
            if len(buffer) == 4:
                yield sample(buffer.pop(int(self.chance.random() * 4)), self.chance)
        yield from (sample(number, self.chance) for number in buffer)


class Walk:
    """An iterator with a state."""

    def __init__(self, numbers: list[int]) -> None:
        self.left, self.sum = list(numbers), torch.zeros((), dtype=torch.int64)

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.sum += self.left.pop(random.randrange(len(self.left)))
        return sample(int(self.sum))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.sum = list(state["left"]), state["sum"].clone()


class WalkStream(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        return Walk([number + self.begun for number in self.numbers()])


class StatefulStream(Stream):
    """A dataset with a state, which its next `iter` continues from."""

    at, buffer = 0, ()

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = self.numbers()
        while self.at < len(numbers) or self.buffer:
            if self.at < len(numbers):
                self.buffer, self.at = (*self.buffer, numbers[self.at]), self.at + 1
            if len(self.buffer) == 4 or self.at == len(numbers):
                chosen = random.randrange(len(self.buffer))
                number, self.buffer = self.buffer[chosen], self.buffer[:chosen] + self.buffer[chosen + 1 :]
                yield sample(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]


def shift(worker: int) -> None:
    """A worker_init_fn that changes the loader worker's copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    info.dataset.rank += 7 + worker + random.randrange(5)


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + random.random()


# --- the cases ---


@dataclass
class Case:
    dataset: Callable[[int], Any] = lambda rank: DATA
    loading: Callable[[int], dict[str, Any]] = lambda rank: {"batch_size": 3}
    """What DDP's rank gives to DataLoader."""
    common: dict[str, Any] = field(default_factory=dict)
    by_replica: bool = False
    """Whether the program must give functions of the replica."""
    sets_epoch: bool = False

    def loader(self, rank: int, num_workers: int) -> DataLoader[Any]:
        return DataLoader(self.dataset(rank), num_workers=num_workers, **self.common, **self.loading(rank))

    def feeder(self, num_workers: int) -> ReplicaLoader | StreamLoader:
        """As `job.loader` makes it."""
        if self.by_replica:
            data = self.dataset if isinstance(self.dataset(0), IterableDataset) else self.dataset(0)
            loading = self.loading(0)
            for name in {"sampler", "batch_sampler"} & set(loading):
                loading[name] = lambda replica, name=name: self.loading(replica)[name]
            dataset, options = loader_options(data, num_workers=num_workers, **self.common, **loading)
        else:
            dataset, options = loader_options(self.loader(0, num_workers))
        return StreamLoader(dataset, options) if options.stream else ReplicaLoader(dataset, options, N)


def weights(rank: int) -> dict[str, Any]:
    return {"batch_size": 4, "sampler": WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 21)}


def with_generator(rank: int) -> dict[str, Any]:
    shared = torch.Generator().manual_seed(3)
    sampler = RandomSampler(DATA, replacement=True, num_samples=50, generator=shared)
    return {"batch_size": 7, "sampler": sampler, "generator": shared, "drop_last": True}


SAMPLERS = {
    "weighted": Case(loading=weights),
    "replacement": Case(loading=with_generator),
    "subset": Case(loading=lambda rank: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 16))}),
    "rank": Case(
        loading=lambda rank: {"batch_size": 3, "sampler": RankSampler(rank, N)}, by_replica=True, sets_epoch=True
    ),
    "eager": Case(loading=lambda rank: {"batch_sampler": EagerBatches()}, common={"collate_fn": mixed}),
    "as it goes": Case(loading=lambda rank: {"batch_sampler": BatchSampler(DrawsAsItGoes(), 4, False)}),
    "global": Case(loading=lambda rank: {"batch_size": 4, "sampler": DrawsAsItGoes(is_global=True)}),
    "unbatched": Case(
        loading=lambda rank: {"batch_size": None, "sampler": BatchSampler(range(rank, 18, 3), 2, False)},
        by_replica=True,
    ),
    "distributed": Case(
        loading=lambda rank: {"batch_size": 3, "sampler": DistributedSampler(DATA, N, rank, seed=4)},
        by_replica=True,
        sets_epoch=True,
    ),
}
STREAMS = {
    "plain": Case(lambda rank: Stream(chance=random.Random(1)), common={"collate_fn": mixed}),
    "global": Case(lambda rank: Stream(rank, chance=random), by_replica=True),
    "rank": Case(lambda rank: Stream(rank, chance=random.Random(rank)), by_replica=True, sets_epoch=True),
    "drop last": Case(lambda rank: Stream(chance=np.random.default_rng(4)), lambda rank: {"batch_size": 5, "drop_last": True}),
    "unbatched": Case(lambda rank: Stream(chance=random.Random(2)), lambda rank: {"batch_size": None}),
    "iterator with a state": Case(lambda rank: WalkStream(rank), by_replica=True),
    "dataset with a state": Case(lambda rank: StatefulStream(rank), by_replica=True),
}  # fmt: skip


# --- what DDP's ranks get, and what replicas get ---


@dataclass
class Replicas:
    """What each replica has got, and the generators it has left."""

    got: dict[int, list[torch.Tensor]]
    worlds: dict[int, RngState]

    @classmethod
    def new(cls) -> Replicas:
        worlds = {}
        for rank in range(N):
            random.seed(rank), np.random.seed(100 + rank), torch.manual_seed(200 + rank)
            worlds[rank] = capture_rng()
        return cls({rank: [] for rank in range(N)}, worlds)

    def assert_equal(self, other: Replicas) -> None:
        for rank, mine in self.got.items():
            assert len(mine) == len(other.got[rank]), f"replica {rank}"
            for number, (ours, theirs) in enumerate(zip(mine, other.got[rank], strict=True)):
                assert torch.equal(ours, theirs), f"replica {rank}, batch {number}"
            assert mine, "nothing was compared"
        assert self.worlds == other.worlds, "another number of draws in the training process"


def train() -> None:
    """The model draws, too."""
    torch.rand(1), np.random.rand(), random.random()


def stock(case: Case, num_workers: int, leaves: int | None = None) -> Replicas:
    """What `DataLoader` gives to each rank, in generators of its own; the program `leaves` each epoch after so many batches."""
    told = Replicas.new()
    for rank in range(N):
        restore_rng(told.worlds[rank])
        loader = case.loader(rank, num_workers)
        for epoch in range(EPOCHS):
            if case.sets_epoch:
                for each in (loader.dataset, loader.sampler):
                    if hasattr(each, "set_epoch"):
                        each.set_epoch(epoch + 5)
            for number, batch in enumerate(loader, 1):
                told.got[rank].append(batch.clone())
                train()
                if number == leaves:
                    break
        told.worlds[rank] = capture_rng()
    return told


def ours(case: Case, num_workers: int, *, moves: bool = False, leaves: int | None = None) -> Replicas:
    """The same from a feeder; or from two, with replicas dealt to them anew before every step. Each third step is done
    twice, and so is the first one of the second epoch, with the batches changed in place meanwhile."""
    told = Replicas.new()
    streams = dict.fromkeys(range(N), DataPosition())
    chance = random.Random(1)
    feeders = [case.feeder(num_workers) for _ in range(1 + moves)]
    options = feeders[0].options if isinstance(feeders[0], StreamLoader) else feeders[0]._options
    try:
        for epoch in range(EPOCHS):
            step, has_more = 0, True
            for feeder in feeders if case.sets_epoch else ():
                feeder.set_epoch(epoch + 5)
            while has_more and step != leaves:
                repeats = (step + 2 * epoch) % 3 == 2
                homes = {replica: chance.choice(feeders) for replica in streams}
                before = dict(told.worlds), {replica: list(got) for replica, got in told.got.items()}
                for attempt in range(2 if repeats else 1):
                    told.worlds, told.got = dict(before[0]), {replica: list(got) for replica, got in before[1].items()}
                    for feeder in feeders:
                        feeder.host({v: streams[v] for v in homes if homes[v] is feeder})
                    has_more = {take(homes[replica], replica, told) for replica in homes} == {True}
                    assert has_more or sum(map(len, told.got.values())) == sum(map(len, before[1].values()))
                    if attempt == 0 and repeats:
                        for replica in told.got if has_more else ():
                            told.got[replica][-1].zero_()
                streams = {v: carried(feeder.stream(v), num_workers) for v, feeder in homes.items()}
                step += 1
            assert leaves or moves or not feeders[0].has_more([v for v in homes if homes[v] is feeders[0]])
            streams = {replica: stream.next_epoch(options) for replica, stream in streams.items()}
    finally:
        for feeder in feeders:
            feeder.close()
    return told


def take(feeder: ReplicaLoader | StreamLoader, replica: int, told: Replicas) -> bool:
    restore_rng(told.worlds[replica])
    try:
        batch = feeder.next(replica)
    except StopIteration:
        told.worlds[replica] = capture_rng()
        return False
    told.got[replica].append(batch)
    assert feeder.last_size(replica) == (len(batch) if batch.dim() == 2 and not _is_unbatched(feeder) else 1)
    train()
    told.worlds[replica] = capture_rng()
    return True


def _is_unbatched(feeder: ReplicaLoader | StreamLoader) -> bool:
    return not (feeder.options if isinstance(feeder, StreamLoader) else feeder._options).batches


def carried(stream: DataPosition, num_workers: int) -> DataPosition:
    """As it arrives at another worker."""
    arrived = DataPosition.from_bytes(stream.to_bytes(num_workers))
    return DataPosition(*[getattr(arrived, name) for name in arrived.__slots__[:-1]], extra=stream.extra)


@pytest.mark.processes
def with_and_without_processes(names: Iterable[str], with_processes: set[str]) -> list[tuple[str, int]]:
    """Loader processes take time, so only some cases have them, unless all are wanted."""
    return [(name, count) for name in names for count in (0, 2) if count == 0 or FULL or name in with_processes]


@pytest.mark.parametrize(("name", "num_workers"), with_and_without_processes(SAMPLERS, {"as it goes", "global"}))
def test_samplers_draw_what_those_of_ranks_draw(name: str, num_workers: int, no_leaks: None) -> None:
    oracle = stock(SAMPLERS[name], num_workers)
    for moves in (False, True) if num_workers == 0 else (True,):  # with processes each replica also stays now and then
        ours(SAMPLERS[name], num_workers, moves=moves).assert_equal(oracle)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "num_workers"), with_and_without_processes(STREAMS, {"dataset with a state", "global"})
)
def test_streams_give_what_those_of_ranks_give(name: str, num_workers: int, no_leaks: None) -> None:
    oracle = stock(STREAMS[name], num_workers)
    for moves in (False, True) if num_workers == 0 else (True,):  # with processes each replica also stays now and then
        ours(STREAMS[name], num_workers, moves=moves).assert_equal(oracle)


@pytest.mark.processes
def test_persistent_loader_processes_keep_their_streams_and_samplers(no_leaks: None) -> None:
    persistent = {"persistent_workers": True, "worker_init_fn": shift}
    for case, early in (
        (Case(lambda rank: Stream(rank), common=persistent, by_replica=True), 1),
        (Case(lambda rank: StatefulStream(rank), common=persistent, by_replica=True), 3),
        (Case(loading=lambda rank: {"batch_sampler": EagerBatches()}, common={"persistent_workers": True}), 1),
    ):
        for leaves in (None, early):  # loader workers go on from what they have loaded ahead
            oracle = stock(case, 2, leaves)
            ours(case, 2, leaves=leaves).assert_equal(oracle)
            ours(case, 2, moves=True, leaves=leaves).assert_equal(oracle)


@pytest.mark.parametrize("case", [SAMPLERS["global"], STREAMS["global"]], ids=["sampler", "stream"])
def test_what_training_draws_between_batches_counts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the copy on another worker draws something else, which is noticed."""
    monkeypatch.setattr(DrawsBetween, "draw_again", lambda *_: None)
    with pytest.raises(
        TrainError, match=r"of replica \d cannot be continued here: what it gave in the first \d batches"
    ):
        ours(case, 0, moves=True)


def test_the_state_of_a_copy_is_that_of_its_attributes() -> None:
    def make(seed: int) -> Any:
        chance = [torch.Generator().manual_seed(seed), random.Random(seed), np.random.default_rng(seed)]
        inner = SimpleNamespace(epoch=seed, chance=chance, old=np.random.RandomState(seed), data=[seed] * 100)
        return SimpleNamespace(inner=inner, table={"at": seed}, text="x" * seed, shared=DATA, me=None)

    one, other = make(1), make(2)
    one.me = one
    torch.rand(3, generator=one.inner.chance[0])
    load_attributes(other, unpack_record(pack_record(save_attributes(one, DATA))), DATA)
    assert torch.equal(*[torch.rand((), generator=each.inner.chance[0]) for each in (one, other)])
    assert [each.random() for each in other.inner.chance[1:]] == [each.random() for each in one.inner.chance[1:]]
    assert other.inner.old.rand() == one.inner.old.rand()
    assert (other.inner.epoch, other.table, other.text) == (1, {"at": 1}, "x")
    assert other.inner.data == [2] * 100, "data are not state"


@pytest.mark.processes
def test_a_program_may_call_set_epoch_of_its_own_sampler_or_dataset() -> None:
    """As it does in a script for DDP: the replicas' copies notice at the start of the next epoch."""
    sampler, stream = RankSampler(0, 1), Stream(chance=random.Random(0))
    for given, make in (
        (sampler, lambda: ReplicaLoader(*loader_options(DATA, sampler=sampler, batch_size=4), N)),
        (stream, lambda: StreamLoader(*loader_options(stream, batch_size=4))),
    ):
        found = []
        for moves in (False, True):
            given.epoch = 0
            feeder, got, position = make(), [], DataPosition()
            for epoch in range(3):
                if moves:  # to a new worker, whose program has just made its objects
                    feeder.close()
                    given.epoch = 0
                    feeder = make()
                given.set_epoch(3 * epoch)
                feeder.host({1: position})
                for _ in range(3):
                    torch.manual_seed(0)
                    got.append(feeder.next(1)[:, 0])
                position = feeder.stream(1).next_epoch(loader_options(DATA)[1])
            feeder.close()
            found.append(torch.stack(got))
        assert torch.equal(*found), "on another worker, too"
        assert not torch.equal(found[0][0], found[0][3])


def test_shares_of_different_lengths_are_an_error_and_unknown_lengths_have_no_len() -> None:
    def stream(replica: int) -> Any:
        made = Stream(replica, chance=random.Random(0))
        made.numbers = lambda: list(range(8 if replica else 6))  # type: ignore[method-assign]
        return made

    with pliant.join(replicas=N) as job:
        model = torch.nn.Linear(7, 1, dtype=torch.float64)
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(stream, batch_size=2)
        with pytest.raises(TypeError, match=r"len\(loader\): the number of steps is not known"):
            len(loader)
        steps: list[int] = []

        def train_all() -> None:
            for _epoch in job.epochs(2):
                for step in loader:
                    for batch in step:
                        model(batch).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append(step.number)

        with pytest.raises(
            TrainError, match="the data of replica 0 ended before step 3, but those of replica 1 did not"
        ):
            train_all()
        assert steps == [0, 1, 2]


def test_what_cannot_be_copied_is_refused() -> None:
    stream = Stream(chance=random.Random(0))
    stream.lock = threading.Lock()  # type: ignore[attr-defined]
    problem = r"dataset Stream cannot be copied for each replica.*dataset=lambda replica"
    with StreamLoader(*loader_options(stream)) as feeder, pytest.raises(ConfigError, match=problem):
        feeder.host({0: DataPosition()})
