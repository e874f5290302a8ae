"""The exact sum on a process group: the plan by its values, and sums on gloo with all ranks in one process."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from views import on_all

from pliant.comm import order, process_group
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.group_sum import GroupOrder, fold, operands_of_block, pack, plan_of
from pliant.comm.process_group import GroupOffer, SumGroup, choose_backend
from pliant.comm.transport import loopback_transports, view_of
from pliant.errors import CommError, ConfigError, EngineClosed, ViewChanged, WorkerLost

pytestmark = [pytest.mark.usefixtures("store_used", "no_leaks"), pytest.mark.timeout(60)]

PLACEMENTS = [(2, 2), (1, 1, 1, 1), (1, 2, 1), (3, 3), (2, 2, 2), (2, 2, 1, 1), (1, 5), (4, 1, 1)]
"""N = 4 and 6 on 2, 3 and 4 workers."""
LENGTHS = [1, 5, 64, 1003, 40_000]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store_used() -> None:
    """Use a store of torch once, before `no_leaks` counts descriptors: the process keeps a pipe for it."""
    dist.TCPStore("127.0.0.1", 0, 1, True)


def gradients(num_replicas: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the gradient of each replica: many magnitudes, so that the order of summation shows in the bits."""
    made = torch.Generator().manual_seed(num_replicas * 1000 + length)
    scales = torch.pow(2.0, torch.randint(-12, 4, (num_replicas, length), generator=made).float())
    return list((torch.randn(num_replicas, length, generator=made) * scales).to(dtype))


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over the tree of all replicas, straight from its definition."""
    if len(values) == 1:
        return values[0]
    middle = order.tree_split(len(values))
    return tree_sum(values[:middle]) + tree_sum(values[middle:])


def stock_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum by torch's own all_reduce on gloo, with one rank per replica."""
    store, size = dist.HashStore(), len(values)

    def run(rank: int) -> torch.Tensor:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=30)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        total = values[rank].clone()
        group.allreduce([total]).wait()
        return total

    with ThreadPoolExecutor(size) as pool:
        sums = list(pool.map(run, range(size)))
    assert all(torch.equal(each, sums[0]) for each in sums)
    return sums[0]


@lru_cache
def expected_sum(order_name: GroupOrder, count: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of `gradients` in an order, by its definition or by stock torch."""
    values = gradients(count, length, dtype)
    return tree_sum(values) if order_name == "tree" else stock_sum(values)


def own_operands(
    order_name: GroupOrder, blocks: Sequence[int], rank: int, values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what a worker contributes: sums of whole subtrees, or single replicas."""
    begin, end = list(pairwise(accumulate(blocks, initial=0)))[rank]
    return [tree_sum(values[each.start : each.stop]) for each in operands_of_block(order_name, begin, end, sum(blocks))]


# --- the plan ---


def test_operands_are_the_largest_subtrees_of_a_block_or_its_replicas() -> None:
    assert operands_of_block("tree", 0, 2, 4) == (range(2),)
    assert operands_of_block("tree", 2, 4, 4) == (range(2, 4),)
    assert operands_of_block("tree", 0, 3, 6) == (range(2), range(2, 3))
    assert operands_of_block("tree", 3, 6, 6) == (range(3, 4), range(4, 6))
    assert operands_of_block("ddp", 3, 6, 6) == (range(3, 4), range(4, 5), range(5, 6))


@pytest.mark.parametrize("order_name", ["tree", "ddp"])
def test_the_plan_gives_the_bits_of_its_order_for_every_placement(order_name: GroupOrder) -> None:
    for length in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for count in (4, 6):
                values = gradients(count, length, dtype)
                wanted = expected_sum(order_name, count, length, dtype)
                for blocks in (each for each in PLACEMENTS if sum(each) == count):
                    assert torch.equal(by_hand(order_name, blocks, values), wanted), (length, dtype, blocks)


def by_hand(order_name: GroupOrder, blocks: tuple[int, ...], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do what all ranks of a group do, one after the other."""
    plan = plan_of(order_name, blocks, values[0].numel(), values[0].element_size())
    ranks = range(len(blocks))
    packed = [pack(plan, rank, own_operands(order_name, blocks, rank, values)) for rank in ranks]
    cut = [each.split(plan.send_splits(rank)) for rank, each in enumerate(packed)]
    total = values[0].new_empty(plan.padded_length)
    for rank in ranks:
        received = torch.cat([cut[source][rank] for source in ranks])
        assert received.numel() == sum(plan.receive_splits(rank))
        begin, end = plan.shard(rank)
        fold(plan, rank, received, total[begin:end])
    return total[: plan.length]


def test_another_order_has_other_bits() -> None:
    """A control: the inputs show the order of summation."""
    values = gradients(6, 1003)
    assert not torch.equal(expected_sum("tree", 6, 1003), expected_sum("ddp", 6, 1003))
    assert not torch.equal(by_hand("tree", (3, 3), values), by_hand("ddp", (3, 3), values))
    assert not torch.equal(by_hand("tree", (3, 3), values[::-1]), tree_sum(values))


def test_shards_cover_all_elements_and_begin_at_wide_borders() -> None:
    for length in range(1, 70):
        for size in (2, 3, 4, 7):
            plan = plan_of("tree", (1,) * size, length, 4)
            shards = [plan.shard(rank) for rank in range(size)]
            assert shards[0][0] == 0
            assert shards[-1][1] == length
            assert all(before[1] == after[0] for before, after in pairwise(shards))
            assert plan.shard_length % 4 == 0
            assert length <= plan.padded_length < length + 4 * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_operand_per_rank_costs_the_bytes_of_a_ring(size: int) -> None:
    length = 12_000
    plan = plan_of("tree", (1,) * size, length, 4)
    assert [plan.sent_bytes(rank) for rank in range(size)] == [2 * (size - 1) * length // size * 4] * size
    # Two replicas per worker are one operand in a tree, and two in the order of DDP.
    assert plan_of("tree", (2,) * size, length, 4).sent_bytes(0) == plan.sent_bytes(0)
    shards = (size - 1) * length // size * 4
    assert plan_of("ddp", (2,) * size, length, 4).sent_bytes(0) == 3 * shards


# --- which group ---


def test_the_backend_that_all_workers_can_use() -> None:
    first, second = GroupOffer("nccl", "GPU-1", "2.27"), GroupOffer("nccl", "GPU-2", "2.27")
    assert choose_backend([first, second]) == ("nccl", "")
    assert choose_backend([first, first]) == ("", "some workers share a GPU")
    assert choose_backend([first, GroupOffer("nccl", "GPU-2", "2.26")])[0] == ""
    assert choose_backend([first, GroupOffer("", reason="this torch has no NCCL")]) == ("", "this torch has no NCCL")
    assert choose_backend([GroupOffer("gloo"), GroupOffer("gloo")]) == ("gloo", "")
    assert choose_backend([GroupOffer("gloo"), first])[0] == ""


def test_what_a_worker_offers() -> None:
    assert GroupOffer.of(CPU, environ={}).backend == ""
    assert GroupOffer.of(CPU, environ={"PLIANT_SUM_GROUP": "gloo"}) == GroupOffer("gloo")
    assert GroupOffer.of(torch.device("cuda"), environ={"PLIANT_SUM_GROUP": "off"}).backend == ""
    assert "TLS" in GroupOffer.of(torch.device("cuda"), encrypted=True, environ={}).reason
    with pytest.raises(ConfigError, match="PLIANT_SUM_GROUP=mpi"):
        GroupOffer.of(CPU, environ={"PLIANT_SUM_GROUP": "mpi"})


# --- groups on gloo, all ranks in one process ---


@contextmanager
def groups(size: int, offers: Sequence[GroupOffer] | None = None) -> Iterator[tuple[list[SumGroup], list[Any]]]:
    """Yield a started group for each rank, and the transports under them."""
    view = view_of(["127.0.0.1"] * size)
    with loopback_transports(view.workers, EngineConfig(collective_timeout_s=20)) as transports:
        engines = [transport.enter(view) for transport in transports]
        made = [
            SumGroup(engine, CPU, offers[engine.rank] if offers is not None else GroupOffer("gloo"))
            for engine in engines
        ]
        try:
            for each in made:
                each.start()
            yield made, transports
        finally:
            for each in made:
                each.close()
            for each in made:
                assert each.join(20), "the group's thread has not ended"


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "it has not happened within 20 s"
        time.sleep(0.001)  # pacing a poll with a deadline


def ready(made: Sequence[SumGroup]) -> None:
    until(lambda: all(each.is_ready for each in made))


def sums_of_all(
    made: Sequence[SumGroup], order_name: GroupOrder, blocks: tuple[int, ...], buckets: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Sum several buckets on every rank, all submitted before the first is awaited."""

    def work(rank: int) -> list[torch.Tensor]:
        handles = [
            made[rank].sum(f"bucket {number}", own_operands(order_name, blocks, rank, values), blocks, order_name)
            for number, values in enumerate(buckets)
        ]
        return [handle.wait(20) for handle in handles]  # type: ignore[misc]

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(work, range(len(made))))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_give_the_bits_of_the_engine_and_of_stock_ddp(size: int) -> None:
    with groups(size) as (made, transports):
        ready(made)
        for order_name in ("tree", "ddp"):
            for blocks in (each for each in PLACEMENTS if len(each) == size):
                count = sum(blocks)
                buckets = [gradients(count, length) for length in LENGTHS]
                for sums in sums_of_all(made, order_name, blocks, buckets):
                    for length, total in zip(LENGTHS, sums, strict=True):
                        assert torch.equal(total, expected_sum(order_name, count, length)), (order_name, blocks)
                engines = [transport.engine for transport in transports]
                by_engine = engine_sums(engines, order_name, blocks, buckets[-1])
                assert all(torch.equal(each, sums[-1]) for each in by_engine), (order_name, blocks)
        assert made[0].backend == "gloo"
        assert made[0].num_sums > 0


def engine_sums(
    engines: Sequence[Engine], order_name: GroupOrder, blocks: tuple[int, ...], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the sum on every rank, by the engine."""

    def work(engine: Engine) -> torch.Tensor:
        own, total = own_operands(order_name, blocks, engine.rank, values), torch.empty_like(values[0])
        name = f"{order_name} {blocks}"
        engine.all_reduce(name, total, contributions=own, parts=blocks, order=order_name).wait(20)
        return total

    return on_all(engines, work)


class CountingGroup:
    """Counts the bytes that leave this rank, and passes everything on to a group of torch."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self.sent_bytes = 0

    def alltoall_base(self, output: torch.Tensor, source: torch.Tensor, outs: list[int], ins: list[int]) -> Any:
        self.sent_bytes += (sum(ins) - ins[self._rank]) * source.element_size()
        return self._group.alltoall_base(output, source, outs, ins)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        self.sent_bytes += (self._size - 1) * source.nbytes
        return self._group._allgather_base(output, source)


def test_the_group_sends_the_bytes_of_the_plan() -> None:
    with groups(3) as (made, _):
        ready(made)
        counting = [CountingGroup(each._group, rank, 3) for rank, each in enumerate(made)]
        for each, counted in zip(made, counting, strict=True):
            each._group = counted
        sums_of_all(made, "tree", (2, 2, 2), [gradients(6, 12_000)])
        assert [each.sent_bytes for each in counting] == [2 * 2 * 12_000 // 3 * 4] * 3


def test_workers_that_cannot_have_a_group_say_why() -> None:
    shared = GroupOffer("nccl", "GPU-1", "2.27")
    with groups(2, [shared, shared]) as (made, _):
        assert all(each.join(20) for each in made)
        assert not any(each.is_ready for each in made)
        assert {each.reason for each in made} == {"some workers share a GPU"}


def test_a_lost_worker_fails_all_open_sums_at_once_and_all_later_ones() -> None:
    with groups(3) as (made, transports):
        ready(made)
        values = gradients(3, 1003)
        # Rank 2 never comes: without the engine the others would wait in gloo until its timeout of half an hour.
        handles = [made[rank].sum("torn", [values[rank]], (1, 1, 1), "tree") for rank in (0, 1)]
        begun_s = time.monotonic()
        for link in list(transports[2].connections.links.values()):
            link.sock.shutdown(socket.SHUT_RDWR)
        for handle in handles:
            with pytest.raises(WorkerLost):  # of rank 2; or of another, if rank 2 was the first to notice
                handle.wait(10)
        assert time.monotonic() - begun_s < 1.0
        until(lambda: not made[0].is_ready)
        with pytest.raises(WorkerLost):
            made[0].sum("later", [values[0]], (1, 1, 1), "tree").wait(10)


def test_leaving_the_view_ends_the_group_and_the_next_view_has_another() -> None:
    with groups(2) as (made, transports):
        ready(made)
        values = gradients(2, 64)
        [open_sum] = [made[0].sum("open", [values[0]], (1, 1), "tree")]
        view = view_of(["127.0.0.1"] * 2, number=1)
        engines = [transport.enter(view) for transport in transports]
        with pytest.raises(ViewChanged):
            open_sum.wait(10)
        again = [SumGroup(engine, CPU, GroupOffer("gloo")) for engine in engines]
        for each in again:
            each.start()
        ready(again)
        for sums in sums_of_all(again, "tree", (1, 1), [values]):
            assert torch.equal(sums[0], tree_sum(values))
        for each in again:
            each.close()
        assert all(each.join(20) for each in again)


def test_a_closed_group_refuses_sums() -> None:
    with groups(2) as (made, _):
        ready(made)
        made[0].close()
        with pytest.raises(EngineClosed):
            made[0].sum("late", gradients(2, 5)[:1], (1, 1), "tree").wait(10)


def test_a_group_of_torch_that_fails_is_an_error_and_not_a_hang(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "NOTICE_S", 0.01)

    class Broken:
        def alltoall_base(self, *_: object) -> Any:
            raise RuntimeError("no route")

    with groups(2) as (made, _):
        ready(made)
        made[0]._group = Broken()
        with pytest.raises(CommError, match="no route"):
            made[0].sum("broken", gradients(2, 5)[:1], (1, 1), "tree").wait(10)
    assert "no route" in caplog.text
