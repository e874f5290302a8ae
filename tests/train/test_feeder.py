"""Replicas that share a worker get the batches of a process of their own, to the bit."""

from __future__ import annotations

import json
import os
import pickle
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import TrainError
from pliant.train import loader_process
from pliant.train.context import DataPosition, RngState, capture_rng, restore_rng
from pliant.train.feeder import NumberFeeder, ReplicaLoader
from pliant.train.loader_process import pack_shared, receive_shared, send_shared
from pliant.train.sampling import LoaderOptions, loader_options, num_batches

pytestmark = pytest.mark.timeout(60)
LENGTH = 26
EPOCHS = 2


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    torch.set_num_threads(1)
    before = capture_rng()
    yield
    restore_rng(before)


class Augmented(Dataset[torch.Tensor]):
    """Every sample depends on all three generators and on the loader worker that makes it."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        who = [-1, -1, -1] if info is None else [info.id, info.num_workers, info.seed % 2**20]
        chance = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
        return torch.tensor([index, *who, *chance], dtype=torch.float64)


def draw_in_init(worker: int) -> None:
    random.random(), np.random.randn(worker + 1), torch.rand(worker)


def world(replica: int) -> RngState:
    """The generators of a replica's process when its program begins."""
    random.seed(replica), np.random.seed(100 + replica), torch.manual_seed(200 + replica)
    return capture_rng()


Batches = dict[int, list[torch.Tensor]]


@dataclass
class Replicas:
    """What each replica has got, and the generators it has left."""

    got: Batches
    worlds: dict[int, RngState]

    def assert_equal(self, other: Replicas) -> None:
        assert self.got.keys() == other.got.keys()
        for replica, mine in self.got.items():
            assert len(mine) == len(other.got[replica]), f"replica {replica}"
            for number, (ours, theirs) in enumerate(zip(mine, other.got[replica], strict=True)):
                assert torch.equal(ours, theirs), f"replica {replica}, batch {number}"
        assert self.worlds == other.worlds, "another number of draws in the training process"

    @classmethod
    def of(cls, num_replicas: int) -> Replicas:
        return cls({v: [] for v in range(num_replicas)}, {v: world(v) for v in range(num_replicas)})


def stock(
    num_replicas: int,
    options: LoaderOptions,
    dataset: Dataset[Any] | None = None,
    *,
    first: int = 0,
    leaves: int | None = None,
) -> Replicas:
    """What `DataLoader` with `DistributedSampler` gives to each rank, in generators of its own. The program begins with epoch
    `first`, and `leaves` each epoch after so many batches."""
    told = Replicas.of(num_replicas)
    for rank in range(num_replicas):
        restore_rng(told.worlds[rank])
        data = dataset or Augmented()
        sampler = DistributedSampler(data, num_replicas, rank, options.shuffle, options.seed, options.sampler_drop_last)
        generator = None if options.generator is None else options.generator.clone_state()
        loader = DataLoader(
            data,
            options.batch_size,
            sampler=sampler,
            drop_last=options.drop_last,
            num_workers=options.num_workers,
            worker_init_fn=options.worker_init_fn,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
            generator=generator,
        )
        for epoch in range(first, first + EPOCHS):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader, 1):
                told.got[rank].append(batch.clone())
                torch.rand(1), np.random.rand(), random.random()  # the model draws, too
                if number == leaves:
                    break
        told.worlds[rank] = capture_rng()
    return told


def take(feeder: ReplicaLoader, replica: int, told: Replicas) -> None:
    restore_rng(told.worlds[replica])
    try:
        told.got[replica].append(feeder.next(replica).clone())
        torch.rand(1), np.random.rand(), random.random()
    finally:
        told.worlds[replica] = capture_rng()


def ours(num_replicas: int, options: LoaderOptions, hosts: int = 1) -> Replicas:
    """The same from `hosts` feeders, with replicas dealt to them in blocks."""
    told = Replicas.of(num_replicas)
    streams = dict.fromkeys(range(num_replicas), DataPosition())
    feeders = [ReplicaLoader(Augmented(), options, num_replicas) for _ in range(hosts)]
    try:
        for _ in range(EPOCHS):
            for host, feeder in enumerate(feeders):
                mine = [v for v in streams if v * hosts // num_replicas == host]
                feeder.host({v: streams[v] for v in mine})
                while feeder.has_more(mine):
                    for replica in mine:
                        take(feeder, replica, told)
                with pytest.raises(StopIteration):
                    feeder.next(mine[0])
                assert len(feeder.pids) == options.num_workers
                streams |= {v: feeder.stream(v).next_epoch(options) for v in mine}
    finally:
        for feeder in feeders:
            feeder.close()
    return told


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_replicas", "options"),
    [
        (1, LoaderOptions(batch_size=4)),
        (3, LoaderOptions(batch_size=4, shuffle=False)),
        (4, LoaderOptions(batch_size=3, seed=7, drop_last=True)),
        (6, LoaderOptions(batch_size=2, sampler_drop_last=True)),
        (1, LoaderOptions(batch_size=3, num_workers=2)),
        (3, LoaderOptions(batch_size=2, num_workers=2, persistent_workers=True, worker_init_fn=draw_in_init)),
        (6, LoaderOptions(batch_size=2, num_workers=2, drop_last=True, sampler_drop_last=True, prefetch_factor=4)),
        (4, LoaderOptions(batch_size=2, num_workers=3, persistent_workers=True, shuffle=False, drop_last=True)),
        (2, LoaderOptions(batch_size=5, num_workers=2, generator=torch.Generator().manual_seed(5))),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"W{value.num_workers}",
)
def test_replicas_get_the_batches_of_processes_of_their_own(
    num_replicas: int, options: LoaderOptions, no_leaks: None
) -> None:
    oracle = stock(num_replicas, options)
    ours(num_replicas, options, hosts=1).assert_equal(oracle)
    if num_replicas == 3:
        ours(num_replicas, options, hosts=2).assert_equal(oracle)


SHARED = LoaderOptions(batch_size=2, num_workers=2)


@pytest.fixture(scope="module")
def shared_oracle() -> Replicas:
    before = capture_rng()
    told = stock(4, SHARED)
    restore_rng(before)
    return told


def carried(streams: Mapping[int, DataPosition], num_workers: int) -> dict[int, DataPosition]:
    """As they arrive at another worker."""
    arrived = {}
    for replica, stream in streams.items():
        data = stream.to_bytes(num_workers)
        assert len(data) == DataPosition.size(num_workers)
        arrived[replica] = DataPosition.from_bytes(data)
    return arrived


def moving(options: LoaderOptions, *, first: int = 0, leaves: int | None = None) -> Replicas:
    """Four replicas, dealt anew to two feeders before every step; and each third step is done twice."""
    told = Replicas.of(4)
    streams = dict.fromkeys(range(4), DataPosition(first))
    chance = random.Random(1)
    with ReplicaLoader(Augmented(), options, 4) as one, ReplicaLoader(Augmented(), options, 4) as two:
        for step in range(EPOCHS * (leaves or num_batches(LENGTH, 4, options))):
            homes = {v: chance.choice((one, two)) for v in streams}
            for attempt in range(2 if step % 3 == 2 else 1):
                for feeder in (one, two):
                    feeder.host({v: streams[v] for v in homes if homes[v] is feeder})
                before = dict(told.worlds), {v: list(got) for v, got in told.got.items()}
                for replica, feeder in homes.items():
                    take(feeder, replica, told)
                if attempt == 0 and step % 3 == 2:
                    told.worlds, told.got = before
            streams = carried({v: feeder.stream(v) for v, feeder in homes.items()}, options.num_workers)
            if not homes[0].has_more([0]) or streams[0].batch == leaves:
                streams = {v: stream.next_epoch(options) for v, stream in streams.items()}
    return told


@pytest.mark.processes
def test_moving_and_redoing_change_no_bit(shared_oracle: Replicas, no_leaks: None) -> None:
    moving(SHARED).assert_equal(shared_oracle)


@pytest.mark.processes
def test_epochs_that_are_left_early_and_generators_of_the_loader_move_along(no_leaks: None) -> None:
    """A persistent `DataLoader` has made batches that nobody takes, and its loader workers go on from there."""
    persistent = replace(SHARED, persistent_workers=True, prefetch_factor=1)
    moving(persistent, leaves=2).assert_equal(stock(4, persistent, leaves=2))
    drawing = replace(SHARED, generator=torch.Generator().manual_seed(5))
    moving(drawing, first=3).assert_equal(stock(4, drawing, first=3))


class OwnChance(Augmented):
    def __init__(self, chance: Any) -> None:
        super().__init__()
        self.inner = {"chance": [chance]}

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * self.inner["chance"][0].random()


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_of_the_dataset_or_of_collate_fn_is_noticed_when_it_draws(num_workers: int, no_leaks: None) -> None:
    chance = np.random.default_rng(3)
    cases: list[tuple[Dataset[Any], Any, str]] = [
        (OwnChance(chance), None, r"dataset\.inner\.chance\.0 is a random generator"),
        (
            Augmented(),
            lambda samples: torch.stack(samples) * chance.random(),
            r"collate_fn\.chance is a random generator",
        ),
    ]
    for data, collate_fn, complaint in cases:
        options = LoaderOptions(batch_size=2, num_workers=num_workers, collate_fn=collate_fn)
        with ReplicaLoader(data, options, 3) as feeder:
            feeder.host(dict.fromkeys(range(3), DataPosition()))
            with pytest.raises(TrainError, match=complaint):
                feeder.next(0)
    harmless = OwnChance(random.random.__self__)  # type: ignore[attr-defined]
    harmless.unused = random.Random(1)  # type: ignore[attr-defined]
    with ReplicaLoader(harmless, LoaderOptions(batch_size=2, num_workers=num_workers), 3) as feeder:
        feeder.host(dict.fromkeys(range(3), DataPosition()))
        for replica in (0, 1, 2, 0):
            feeder.next(replica)


def test_a_distributed_sampler_of_the_program_chooses_the_order_and_batches_may_come_from_the_dataset() -> None:
    sampler = DistributedSampler(Augmented(), 1, 0, seed=4)
    data, options = loader_options(DataLoader(Augmented(), batch_size=None, sampler=sampler))
    with ReplicaLoader(data, options, 3) as feeder:
        for epoch, order in ((0, 0), (1, 21), (2, 21)):  # it is set in epoch 1
            if epoch == 1:
                sampler.set_epoch(order)
            feeder.host({1: DataPosition(epoch)})
            expected = DistributedSampler(data, 3, 1, seed=4)
            expected.set_epoch(order)
            assert [int(feeder.next(1)[0]) for _ in range(9)] == list(expected)


@pytest.mark.processes
def test_moving_without_loader_processes_changes_no_bit() -> None:
    options = replace(SHARED, num_workers=0)
    moving(options).assert_equal(stock(4, options))


@pytest.mark.processes
def test_loader_workers_without_a_state_of_their_own_change_the_bits(
    shared_oracle: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, switch = os.getpid(), restore_rng
    monkeypatch.setattr(loader_process, "restore_rng", lambda state: switch(state) if os.getpid() == here else None)
    with pytest.raises(AssertionError, match="replica"):
        ours(4, SHARED).assert_equal(shared_oracle)
    monkeypatch.undo()
    ours(4, SHARED).assert_equal(shared_oracle)


@pytest.mark.processes
def test_batches_are_pinned_on_their_way(
    shared_oracle: Replicas, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """The path of a batch through the pinning thread; only the copy itself needs a GPU."""
    pinned = []
    monkeypatch.setattr("pliant.train.loader_pool.pin_memory", lambda data: pinned.append(len(data)) or data)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    ours(4, replace(SHARED, pin_memory=True)).assert_equal(shared_oracle)
    assert len(pinned) == sum(map(len, shared_oracle.got.values()))


@pytest.mark.processes
def test_a_redo_keeps_what_was_prefetched(tmp_path: Path) -> None:
    log = tmp_path / "loads"
    with ReplicaLoader(Logged(log), LoaderOptions(batch_size=1, shuffle=False, num_workers=2), 1) as feeder:
        feeder.host({0: DataPosition()})
        first = feeder.next(0)
        before = feeder.stream(0)
        second = feeder.next(0)
        feeder.host({0: before})
        assert torch.equal(feeder.next(0), second)
        third = feeder.next(0)
    loads = sorted(map(int, log.read_text().split()))
    assert loads.count(0) == loads.count(2) == 1, "batch 2 was prefetched and fits"
    assert loads.count(1) == 2, "batch 1 was done again"
    assert [first.item(), second.item(), third.item()] == [0, 1, 2]


class Logged(Augmented):
    def __init__(self, log: Path) -> None:
        super().__init__(6)
        self.log = log

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return torch.tensor(index)


class Faulty(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ZeroDivisionError("sample 2 is bad")
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


@pytest.mark.processes
def test_errors_of_the_dataset_keep_their_type_and_dead_processes_are_named(no_leaks: None) -> None:
    with ReplicaLoader(
        Faulty(8), LoaderOptions(batch_size=1, shuffle=False, num_workers=1, prefetch_factor=1), 1
    ) as feeder:
        feeder.host({0: DataPosition()})
        assert [feeder.next(0).item() for _ in range(2)] == [0, 1]
        with pytest.raises(ZeroDivisionError, match=r"loader process 0(.|\n)*Traceback(.|\n)*sample 2 is bad"):
            feeder.next(0)
        assert feeder.next(0).item() == 3, "the next batch is not affected"
        with pytest.raises(TrainError, match=rf"loader process 0 \(pid {feeder.pids[0]}\) was killed by SIGKILL"):
            feeder.next(0)


class Waiting(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        signal.pause()
        return torch.tensor(index)


@pytest.mark.processes
def test_a_silent_dataset_is_reported_and_ended(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.train.loader_pool._GRACE_S", 0.1)
    with ReplicaLoader(Waiting(), LoaderOptions(num_workers=1, timeout=0.2), 1) as feeder:
        feeder.host({0: DataPosition()})
        with pytest.raises(TrainError, match=r"gave no batch in timeout=0\.2 s"):
            feeder.next(0)
        (pid,) = feeder.pids
    assert not Path(f"/proc/{pid}").exists()


class Told(Augmented):
    """Says who may signal the process that loads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
        return torch.tensor([handlers == [signal.SIG_DFL, signal.SIG_IGN], os.getpid()])


@pytest.mark.processes
def test_loader_processes_leave_with_their_parent_and_do_not_run_its_handlers(no_leaks: None) -> None:
    reader, writer = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    pid = os.fork()
    if pid == 0:
        try:
            feeder = ReplicaLoader(Told(), LoaderOptions(num_workers=2), 1)
            feeder.host({0: DataPosition()})
            os.write(writer, json.dumps([feeder.next(0)[0].tolist() for _ in range(2)]).encode())
            signal.pause()
        finally:
            os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(writer)
    answers = json.loads(os.read(reader, 100))
    os.close(reader)
    assert [as_expected for as_expected, _ in answers] == [1, 1]
    pids = [loader for _, loader in answers]
    assert len({*pids, pid}) == 3
    watches = [os.pidfd_open(loader) for loader in pids]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for watch in watches:
        assert select.select([watch], [], [], 10)[0], "a loader process outlives its parent"
        os.close(watch)


class Changing(Augmented):
    stage = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.stage)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_the_dataset_is_seen_as_it_is_at_the_start_of_the_epoch(persistent: bool) -> None:
    dataset = Changing(2)
    options = LoaderOptions(num_workers=1, persistent_workers=persistent)
    with ReplicaLoader(dataset, options, 1) as feeder:
        stages, stream = [], DataPosition()
        for epoch in range(2):
            dataset.stage = epoch
            feeder.host({0: stream})
            stages += [feeder.next(0).item() for _ in range(2)]
            stream = feeder.stream(0).next_epoch(options)
    assert stages == ([0, 0, 0, 0] if persistent else [0, 0, 1, 1])


def test_tensors_arrive_in_shared_memory_with_what_they_share(no_leaks: None) -> None:
    base = torch.arange(6.0)
    empty = torch.empty(0, 3)
    many = [torch.tensor([number]) for number in range(300)]
    thing = {"views": (base[:3], base[3:].view(3, 1)), "same": base, "empty": empty, "many": many, "text": "x" * 10**6}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: send_shared(theirs, pack_shared(thing)))
        sender.start()
        got = receive_shared(ours)
        sender.join()
    assert got["text"] == thing["text"]
    assert got["empty"].shape == (0, 3)
    assert torch.equal(torch.cat(got["many"]), torch.arange(300))
    got["same"][:] = 7
    base[0] = 9
    assert torch.equal(got["views"][0], torch.tensor([9.0, 7, 7])), "one memory, here and there"
    assert got["same"].is_shared()


@pytest.mark.processes
def test_a_batch_that_cannot_be_sent_is_an_error_of_that_batch() -> None:
    options = LoaderOptions(
        num_workers=1, shuffle=False, collate_fn=lambda samples: (lambda: samples) if samples[0][0] == 1 else samples
    )
    with ReplicaLoader(Augmented(), options, 1) as feeder:
        feeder.host({0: DataPosition()})
        feeder.next(0)
        with pytest.raises((AttributeError, pickle.PicklingError), match="while a batch was pickled"):
            feeder.next(0)
        assert feeder.next(0)[0][0] == 2


def test_replicas_elsewhere_and_in_other_epochs_are_refused() -> None:
    with ReplicaLoader(Augmented(), LoaderOptions(), 2) as feeder:
        feeder.host({1: DataPosition()})
        with pytest.raises(AssertionError, match=r"replica 0 is not hosted here \(hosted: 1\)"):
            feeder.next(0)
        with pytest.raises(AssertionError, match="different epochs"):
            feeder.host({0: DataPosition(), 1: DataPosition(epoch=1)})


def test_the_order_of_an_epoch_can_be_chosen() -> None:
    """As `DistributedSampler.set_epoch`: other samples, the same number of batches, and the position goes on."""
    options = LoaderOptions(batch_size=5)
    found = []
    for order_epoch, epoch in ((None, 3), (3, 0), (None, 0)):
        with ReplicaLoader(Augmented(), options, 2) as feeder:
            if order_epoch is not None:
                feeder.set_epoch(order_epoch)
            feeder.host({1: DataPosition(epoch=epoch)})
            got = [feeder.next(1)[:, 0]]
            with ReplicaLoader(Augmented(), options, 2) as other:  # whose program has not come to the call
                other.host(carried({1: feeder.stream(1)}, 0))
                while other.has_more([1]):
                    got.append(other.next(1)[:, 0])
                assert other.stream(1).epoch == epoch
            found.append(torch.cat(got))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_program_that_makes_its_own_batches_gets_the_replicas_number() -> None:
    feeder = NumberFeeder(3)
    feeder.host({2: DataPosition(), 3: DataPosition(batch=1)})
    assert [feeder.next(2), feeder.next(3), feeder.next(2), feeder.next(3)] == [2, 3, 2, 3]
    assert (feeder.stream(2).batch, feeder.stream(3).batch, feeder.last_size(2)) == (2, 3, 1)
    assert feeder.has_more([2])
    assert not feeder.has_more([3])
    moved = NumberFeeder(3, lambda replica: replica * 10)
    moved.host({2: feeder.stream(2)})
    assert moved.next(2) == 20
    assert not moved.has_more([2])
