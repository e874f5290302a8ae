"""The engine with all ranks in one process: the result of each collective, and its errors."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import FULL
from views import on_all

from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.kernels import dtype_name
from pliant.comm.order import ORDERS, Order, subtrees
from pliant.comm.plan import Portion, Spec, make_plan
from pliant.comm.probe import latencies
from pliant.comm.topology import STRATEGIES, Strategy
from pliant.comm.transport import loopback_engines, view_of
from pliant.errors import CollectiveTimeout, CommError, ConfigError, EngineClosed, Mismatch, NotStored, WorkerLost
from pliant.identity import WorkerSpec
from pliant.train import determinism

pytestmark = pytest.mark.usefixtures("no_leaks")

QUICK = EngineConfig(collective_timeout_s=20)
MIXED = ["AAAA", "AABB", "ABCD"] if FULL else ["AABB"]
"""Hosts on which some ranks share memory and some do not, so that both transports are used."""


@pytest.mark.parametrize("hosts", ["A", "AA", "AAB", "AABB", "ABCDE"])
def test_all_collectives(hosts: str) -> None:
    with loopback_engines(hosts, QUICK) as ranks:
        size = len(ranks)
        total = size * (size + 1) / 2

        def work(engine: Engine) -> None:
            mine = torch.full((3, 100_000), engine.rank + 1.0)
            assert torch.equal(engine.all_reduce("sum", mine.clone()).wait(), torch.full_like(mine, total))
            assert torch.equal(engine.all_reduce("max", mine.clone(), op="max").wait(), torch.full_like(mine, size))
            assert torch.equal(engine.all_reduce("min", mine.clone(), op="min").wait(), torch.ones_like(mine))
            reduced = mine.clone()
            engine.reduce("reduce", reduced, root=size - 1).wait()
            assert torch.equal(reduced, torch.full_like(mine, total) if engine.rank == size - 1 else mine)
            received = mine.clone()
            engine.broadcast("broadcast", received, root=size - 1).wait()
            assert torch.equal(received, torch.full_like(mine, size))
            everybody = torch.stack([torch.full_like(mine, rank + 1.0) for rank in range(size)])
            assert torch.equal(engine.all_gather("all_gather", mine).wait(), everybody)
            gathered = engine.gather("gather", mine, root=0).wait()
            assert torch.equal(gathered, everybody) if engine.rank == 0 else gathered is None
            engine.barrier()
            assert engine.consensus("same", b"x")
            assert engine.consensus("other", bytes([engine.rank])) is (size == 1)

        on_all(ranks, work)


def test_products_numpy_arrays_and_strided_tensors() -> None:
    with loopback_engines("AB", QUICK) as ranks:

        def work(engine: Engine) -> None:
            array = np.full(5, 3.0)
            engine.all_reduce("numpy", array, op="prod").wait()
            assert array.tolist() == [9.0] * 5
            strided = torch.full((4, 6), 2.0).t()[::2]
            engine.all_reduce("strided", strided).wait()
            assert torch.equal(strided, torch.full((3, 4), 4.0))
            scalar = torch.tensor(1.5)
            engine.all_reduce("scalar", scalar).wait()
            assert scalar.item() == 3.0

        on_all(ranks, work)


def test_collectives_of_some_ranks() -> None:
    with loopback_engines("AABB", QUICK) as ranks:

        def work(engine: Engine) -> None:
            local = torch.tensor([float(engine.rank)])
            engine.all_reduce("local", local, ranks=engine.local_ranks).wait()
            assert local.item() == (1.0 if engine.rank < 2 else 5.0)
            assert engine.cross_ranks == (0, 2)
            if engine.rank in engine.cross_ranks:
                cross = torch.tensor([float(engine.rank)])
                engine.all_reduce("cross", cross, ranks=engine.cross_ranks).wait()
                assert cross.item() == 2.0
            if engine.rank != 1:
                some = torch.tensor([1.0])
                engine.all_reduce("some", some, ranks=[0, 2, 3]).wait()
                assert some.item() == 3.0
            else:
                with pytest.raises(ConfigError, match="rank 1 is not one of"):
                    engine.all_reduce("some", torch.ones(1), ranks=[0, 2, 3])

        on_all(ranks, work)


@pytest.mark.parametrize("hosts", ["AABB", "ABCD", "AAAA"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_egress_is_exactly_that_of_the_plan(strategy: str, order: Order, hosts: str) -> None:
    length = 1_000_003
    config = EngineConfig(strategy=Strategy(strategy), order=order)
    with loopback_engines(hosts, config) as ranks:
        on_all(ranks, lambda engine: engine.all_reduce("g", torch.ones(length)).wait(20))
        for engine in ranks:
            spec = Spec("all_reduce", "g", (0, 1, 2, 3), "float32", length, "sum", order, -1)
            plan = make_plan(spec, engine.rank, engine.view.hosts, Strategy(strategy), 4, 1 << 20)
            names = [str(worker) for worker in engine.view.workers]
            found = engine.counters().egress_bytes
            assert {names.index(n): b for n, b in found.items() if b} == dict(plan.egress(4))
        received = sum(sum(engine.counters().ingress_bytes.values()) for engine in ranks)
        assert received == sum(sum(engine.counters().egress_bytes.values()) for engine in ranks)


def test_one_name_again_and_again_without_waiting() -> None:
    with loopback_engines("AB", QUICK) as ranks:

        def work(engine: Engine) -> None:
            tensors = [torch.full((100,), float(i)) for i in range(50)]
            for handle in [engine.all_reduce("same", tensor) for tensor in tensors]:
                handle.wait()
            assert [t[0].item() for t in tensors] == [2.0 * i for i in range(50)]

        on_all(ranks, work)


def test_replicas_on_fewer_ranks_give_the_same_bits() -> None:
    length, num = 700_001, 6
    values = [torch.randn(length, generator=torch.Generator().manual_seed(i)) for i in range(num)]
    results = []
    for hosts, parts in [("AAAAAA", (1,) * 6), ("AB", (4, 2)), ("AAB", (2, 3, 1)), ("A", (6,)), ("ABC", (1, 1, 4))]:
        firsts = [0, *itertools.accumulate(parts)]
        with loopback_engines(hosts, QUICK) as ranks:

            def work(engine: Engine, parts: tuple[int, ...] = parts, firsts: list[int] = firsts) -> torch.Tensor:
                mine = [value.clone() for value in values[firsts[engine.rank] : firsts[engine.rank + 1]]]
                out = torch.empty(length)
                engine.all_reduce("g", out, contributions=mine, parts=parts).wait()
                return out

            results += on_all(ranks, work)
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], sum(values[1:], values[0]))


def recursive_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a balanced binary tree over all values: the left half is the largest power of two below."""
    if len(values) == 1:
        return values[0].clone()
    left = 1
    while 2 * left < len(values):
        left *= 2
    return recursive_sum(values[:left]) + recursive_sum(values[left:])


def halved_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of another tree, which cuts in the middle."""
    middle = len(values) // 2
    return halved_sum(values[:middle]) + halved_sum(values[middle:]) if middle else values[0]


@pytest.mark.parametrize("num", [2, 3, 6, 7, 16])
def test_the_tree_is_the_recursive_sum_of_every_element(num: int) -> None:
    chance = random.Random(num)
    lengths = (5, 20_000, 300_007)
    values = {
        length: [torch.randn(length, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 5) for i in range(num)]
        for length in lengths
    }
    expected = {length: recursive_sum(values[length]) for length in lengths}
    for case in range(4 if FULL else 2):
        size = min(num, chance.randint(2, 5))
        cuts = [0, *sorted(chance.sample(range(1, num), size - 1)), num]
        parts = [end - begin for begin, end in itertools.pairwise(cuts)]
        hosts = "".join(chance.choice("AB" if case else "A") for _ in range(size))
        config = replace(QUICK, slice_bytes=chance.choice([1 << 14, 1 << 17, 1 << 20]), order="tree")
        forest = [0] + [chance.randrange(rank) for rank in range(1, size)]
        with loopback_engines(hosts, config) as ranks:

            def work(
                engine: Engine, parts: Sequence[int] = parts, cuts: Sequence[int] = cuts, forest: list[int] = forest
            ) -> None:
                own = subtrees(cuts[engine.rank], cuts[engine.rank + 1], num)
                for strategy in ("AUTO", "RING", "BINARY_TREE", forest):
                    engine.set_strategy(strategy)
                    for length, all_values in values.items():
                        for shares in (True, False):
                            sums = [recursive_sum(all_values[term.start : term.stop]) for term in own]
                            if shares:
                                sums = [engine.empty(length).copy_(each) for each in sums]
                            out = sums[0] if len(sums) == 1 else torch.empty(length)
                            for _ in range(2):  # the second time with cached steps
                                given = [each.clone() for each in sums]
                                engine.all_reduce("g", out, contributions=sums, parts=parts).wait()
                                assert torch.equal(out, expected[length]), f"{parts}, {strategy}"
                                for each, before in zip(sums, given, strict=True):
                                    each.copy_(before)
                        begin = length // 3
                        portion = Portion(length, begin, (0, 1, 2))
                        rest = [recursive_sum(all_values[term.start : term.stop])[begin:] for term in own]
                        part = torch.empty(length - begin)
                        engine.all_reduce("p", part, contributions=rest, parts=parts, portion=portion).wait()
                        assert torch.equal(part, expected[length][begin:])
                        if engine.size == num:
                            one = all_values[engine.rank].clone()
                            engine.all_reduce("one", one).wait()
                            assert torch.equal(one, expected[length])
                with pytest.raises(ConfigError, match="in the order 'tree': the sums of the replicas"):
                    engine.all_reduce("g", torch.empty(5), contributions=[torch.ones(5)] * 7, parts=parts)

            on_all(ranks, work)
    if num > 3:
        longest = lengths[-1]
        assert not torch.equal(expected[longest], halved_sum(values[longest])) or num == 16
        assert not torch.equal(expected[longest], determinism.fold(values[longest]))
        assert not torch.equal(expected[longest], sum(values[longest][1:], values[longest][0]))


def test_ranks_that_ask_for_different_orders_are_told_of_both() -> None:
    def work(engine: Engine) -> None:
        with pytest.raises(Mismatch, match=r"tree.*ddp|ddp.*tree"):
            engine.all_reduce("g", torch.ones(4), order="tree" if engine.rank else "ddp").wait()

    with loopback_engines("AB", QUICK) as ranks:
        on_all(ranks, work)


@pytest.mark.parametrize("hosts", MIXED)
def test_switching_topology_under_load_loses_nothing(hosts: str) -> None:
    choices: list[Any] = ["RING", [1, 1, 1, 1], "BINARY_TREE", [0, 0, 1, 2], "CLIQUE", [3, 0, 0, 3], "MULTI_STAR"]

    def work(engine: Engine) -> None:
        def load() -> None:
            order = random.Random(engine.rank)
            for round_number in range(30):
                names = [f"load{i}" for i in range(8)]
                order.shuffle(names)
                tensors = [torch.full((30_000,), 1.0 + round_number) for _ in names]
                for handle in [engine.all_reduce(n, t) for n, t in zip(names, tensors, strict=True)]:
                    handle.wait(20)
                assert all(torch.equal(t, torch.full_like(t, 4.0 * (1 + round_number))) for t in tensors)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load)
            for choice in choices:
                engine.set_strategy(choice, timeout_s=20)
            loading.result(60)

    with loopback_engines(hosts, QUICK) as ranks:
        on_all(ranks, work)


def test_ranks_that_want_different_topologies_keep_the_old_one() -> None:
    with loopback_engines("AB", QUICK) as ranks:

        def work(engine: Engine) -> None:
            with pytest.raises(Mismatch, match="different strategies"):
                engine.set_strategy("RING" if engine.rank else "STAR")
            assert engine.strategy == Strategy("AUTO")
            with pytest.raises(ConfigError, match="cycle"):
                engine.set_strategy([1, 0])
            engine.set_strategy("RING")
            assert engine.strategy == Strategy("RING")

        on_all(ranks, work)


def test_a_name_with_two_shapes_is_an_error_on_every_rank() -> None:
    with loopback_engines("AAB", QUICK) as ranks:

        def work(engine: Engine) -> None:
            with pytest.raises(Mismatch, match="one name must mean the same"):
                engine.all_reduce("g", torch.ones(10 + engine.rank % 2)).wait()
            after = torch.ones(10)
            engine.all_reduce("after", after).wait()
            assert torch.equal(after, torch.full((10,), 3.0))

        on_all(ranks, work)


def test_a_timeout_names_the_missing_rank() -> None:
    with loopback_engines("AAB", QUICK) as ranks:
        handles = [engine.all_reduce("g", torch.ones(10)) for engine in ranks[:2]]
        with pytest.raises(CollectiveTimeout, match=r"waiting for B:10002 \(rank 2\)"):
            handles[0].wait(0.2)
        ranks[2].all_reduce("g", torch.ones(10)).wait()
        for handle in handles:
            handle.wait()


def test_a_rank_that_leaves_fails_only_what_waits_for_it() -> None:
    with loopback_engines("AAB", QUICK) as ranks:
        on_all(ranks, lambda engine: engine.barrier())
        ranks[2].close()
        for engine in ranks[:2]:
            with pytest.raises(WorkerLost, match=r"B:10002 \(rank 2\)"):
                engine.all_reduce("g", torch.ones(1)).wait(5)
        on_all(ranks[:2], lambda engine: engine.all_reduce("h", torch.ones(1), ranks=[0, 1]).wait(5))


def test_a_closed_engine_fails_what_waits_and_refuses_more() -> None:
    with loopback_engines("AB", QUICK) as ranks:
        waiting = ranks[0].all_reduce("never", torch.ones(1))
        ranks[0].close()
        with pytest.raises(EngineClosed):
            waiting.wait(5)
        with pytest.raises(EngineClosed):
            ranks[0].all_reduce("g", torch.ones(1))


def test_stored_tensors_are_fetched_by_name() -> None:
    with loopback_engines("AAB", QUICK) as ranks:
        for engine, value in itertools.product(ranks, range(2)):
            engine.save("model", torch.full((4,), 10.0 * engine.rank + value))
        for engine, peer in itertools.product(ranks, range(3)):
            out = torch.empty(2, 2)
            assert torch.equal(engine.request(peer, "model", out).wait(5), torch.full((2, 2), 10.0 * peer + 1))
        for peer in (0, 2):
            with pytest.raises(NotStored):
                ranks[0].request(peer, "nothing", out).wait(5)
        with pytest.raises(Mismatch, match="stored 16 bytes"):
            ranks[0].request(1, "model", torch.empty(3)).wait(5)
        with pytest.raises(ConfigError, match="rank 7"):
            ranks[0].request(7, "model", out)


def test_throughput_and_latencies() -> None:
    with loopback_engines("AAB", QUICK) as ranks:
        on_all(ranks, lambda engine: engine.all_reduce("g", torch.ones(1_000_000)).wait())
        lanes = ranks[0].throughput()
        assert sum(lane.num_bytes for lane in lanes.values()) == 4_000_000
        assert all(lane.bytes_per_s > 0 for lane in lanes.values())
        assert ranks[0].throughput() == {}
        for row, engine in enumerate(ranks):
            found = latencies(engine)
            assert found[row] == 0
            assert all(0 < s < 5 for rank, s in enumerate(found) if rank != row)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda e: e.all_reduce("x", torch.ones(1), op="xor"), "op='xor' is unknown"),
        (lambda e: e.all_reduce("x", torch.ones(1, dtype=torch.complex64), op="max"), "complex numbers have no order"),
        (lambda e: e.all_reduce("x", torch.ones(1).to(torch.float8_e5m2)), "cannot be reduced"),
        (lambda e: e.all_reduce("x", torch.ones(1), ranks=[0, 9]), "must be some of"),
        (lambda e: e.broadcast("x", torch.ones(1), root=5), "root=5 is not one of"),
        (lambda e: e.set_strategy("HYPERCUBE"), "is unknown: use one of"),
        (lambda e: e.set_strategy([0, 0, 0]), "3 entries, but there are 2 ranks"),
        (lambda e: e.all_reduce("x", torch.ones(1), parts=[1]), "must have one number, 1 or more, for each of 2 ranks"),
        (lambda e: contribute(e, torch.ones(4), torch.ones(4)), "2 contributions, but by `parts` this rank has 1"),
        (lambda e: contribute(e, torch.ones(3)), "must be alike"),
        (lambda e: contribute(e, torch.ones(4, dtype=torch.float64)), "must be alike"),
        (lambda e: EngineConfig(order="sloppy"), "use one of ddp, tree, fast"),
        (lambda e: e.all_reduce("x", torch.ones(1), order="exact"), "use one of ddp, tree, fast"),
        (lambda e: EngineConfig(heartbeat_timeout_s=0), "positive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_calls_are_refused_at_once(call: Callable[[Engine], object], reason: str) -> None:
    with loopback_engines("AB", QUICK) as ranks, pytest.raises(ConfigError, match=reason):
        call(ranks[0])


def contribute(engine: Engine, *tensors: torch.Tensor) -> None:
    engine.all_reduce("g", torch.empty(4), contributions=tensors)


def test_memory_of_earlier_collectives_is_given_back() -> None:
    """And what is still in use keeps its values, also for peers of this host that have mapped it."""
    length = 3_000_000

    def resident() -> int:
        found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line[:9] == "RssShmem:")
        return int(found.split()[1]) << 10

    with loopback_engines("AAB", QUICK) as ranks:
        kept = [engine.empty(length) for engine in ranks]
        gone = [engine.empty(length).fill_(1.0) for engine in ranks]
        on_all(ranks, lambda engine: engine.all_reduce("gone", gone[engine.rank]).wait())
        on_all(ranks, lambda engine: engine.all_reduce("kept", kept[engine.rank].fill_(engine.rank + 1.0)).wait())
        before = resident()
        gone.clear()
        for engine in ranks:
            engine.release_unused()
        on_all(ranks, lambda engine: engine.barrier())
        assert before - resident() > 3 * 4 * length * 0.9
        assert all(bool((tensor == 6.0).all()) for tensor in kept)
        on_all(ranks, lambda engine: engine.all_reduce("kept", kept[engine.rank]).wait())
        assert all(bool((tensor == 18.0).all()) for tensor in kept)
        again = [engine.empty(length).fill_(2.0) for engine in ranks]
        on_all(ranks, lambda engine: engine.all_reduce("again", again[engine.rank]).wait())
        assert all(bool((tensor == 6.0).all()) for tensor in again)


def test_shared_memory_is_used_again_when_its_tensors_are_gone() -> None:
    with loopback_engines("A", QUICK) as (engine,):
        first = engine.empty((1000, 100))
        address = first.data_ptr()
        view = first[5:7]
        del first
        assert engine.empty((1000, 100)).data_ptr() != address, "a view keeps the memory"
        del view
        assert engine.empty((1000, 100)).data_ptr() == address
        assert engine.empty(0).numel() == 0
        assert dtype_name(engine.empty(3, torch.bfloat16).dtype) == "bfloat16"


def test_contributions_that_alternate_between_two_buffers_are_all_read() -> None:
    with loopback_engines("AA", QUICK) as ranks:

        def work(engine: Engine) -> None:
            out = engine.empty(1000)
            buffers = [engine.empty(1000), engine.empty(1000)]
            for step in range(6):
                buffers[step % 2].fill_(step + 1)
                engine.all_reduce("g", out, contributions=[buffers[step % 2]]).wait()
                assert out[0].item() == 2 * (step + 1)

        on_all(ranks, work)


def test_contributions_live_as_long_as_they_are_needed() -> None:
    with loopback_engines("AA", QUICK) as ranks:
        out = ranks[0].empty(1000)
        mine = ranks[0].empty(1000).fill_(1)
        handle = ranks[0].all_reduce("g", out, contributions=[mine])
        del mine
        ranks[0].empty(1000).fill_(777)
        ranks[1].all_reduce("g", torch.full((1000,), 2.0)).wait()
        handle.wait()
        assert out[0].item() == 3.0


def test_closing_right_after_submitting_ends_every_handle_on_both_sides() -> None:
    for _ in range(10):
        with loopback_engines("AB", QUICK) as ranks:
            mine = [ranks[0].all_reduce(f"t{i}", torch.ones(10)) for i in range(100)]
            theirs = [ranks[1].all_reduce(f"t{i}", torch.ones(10)) for i in range(100)]
            ranks[0].close()
            for handle in mine + theirs:
                with contextlib.suppress(EngineClosed, WorkerLost):
                    handle.wait(10)


def test_a_broadcast_reaches_a_rank_that_submits_after_the_root_has_left() -> None:
    with loopback_engines("AB", QUICK) as ranks:
        ranks[0].broadcast("model", torch.full((10,), 7.0)).wait()
        ranks[0].close()
        received = torch.empty(10)
        ranks[1].broadcast("model", received).wait(10)
        assert received[0].item() == 7.0


def test_one_bad_tensor_does_not_end_the_engine() -> None:
    with loopback_engines("AA", QUICK) as ranks:

        def work(engine: Engine) -> None:
            with pytest.raises(CommError, match="failed here"):
                engine.all_reduce("bad", torch.ones(1).expand(10)).wait()
            good = torch.ones(10)
            engine.all_reduce("good", good).wait()
            assert good[0].item() == 2.0

        on_all(ranks, work)


def test_hundreds_of_arenas_are_mapped() -> None:
    with loopback_engines("AA", QUICK) as ranks:
        kept = [engine.empty(64 << 20, torch.uint8) for engine in ranks for _ in range(80)]

        def work(engine: Engine) -> None:
            tensor = engine.empty(10).fill_(1)
            engine.all_reduce("g", tensor).wait()
            assert tensor[0].item() == 2.0

        on_all(ranks, work)
        del kept


def test_a_barrier_on_both_sides_of_a_change_of_topology() -> None:
    with loopback_engines("ABCD", QUICK) as ranks:

        def work(engine: Engine) -> None:
            early = ThreadPoolExecutor(1)
            before = early.submit(engine.barrier, "b") if engine.rank == 0 else None
            engine.set_strategy([3, 3, 3, 3], timeout_s=20)
            if before is None:
                engine.barrier("b", timeout_s=20)
            else:
                before.result(20)
            early.shutdown()

        on_all(ranks, work)


def test_the_secret_is_not_shown() -> None:
    spec = WorkerSpec(worker=view_of("A").workers[0], view=view_of("A"), secret=b"swordfish")
    assert "swordfish" not in repr(spec)


@pytest.mark.parametrize("hosts", ["ABCDEF", "AABCD", "ABCABC"])
@pytest.mark.parametrize("root", [0, 3])
def test_a_large_broadcast_does_not_crowd_the_roots_link(hosts: str, root: int) -> None:
    """Every rank passes a share on, so no host sends more than about twice the tensor; the root of a star sends it to each."""
    length = 300_000
    with loopback_engines(hosts, QUICK) as ranks:

        def work(engine: Engine) -> None:
            received = torch.arange(length, dtype=torch.float32) if engine.rank == root else torch.zeros(length)
            engine.broadcast("state", received, root=root).wait(20)
            assert torch.equal(received, torch.arange(length, dtype=torch.float32))
            engine.barrier()

        on_all(ranks, work)
        size = 4 * length
        for host in set(hosts):
            there = {str(ranks[rank].view.workers[rank]) for rank in range(len(hosts)) if hosts[rank] == host}
            sent = sum(
                num_bytes
                for rank, engine in enumerate(ranks)
                if hosts[rank] == host
                for name, num_bytes in engine.counters().egress_bytes.items()
                if name not in there
            )
            assert sent < 2.1 * size, f"host {host} sent {sent / size:.2f} times the tensor"


def test_a_small_broadcast_takes_one_hop() -> None:
    with loopback_engines("ABCDEF", QUICK) as ranks:
        on_all(ranks, lambda engine: engine.broadcast("word", torch.ones(100), root=2).wait(20))
        assert [sum(engine.counters().egress_bytes.values()) for engine in ranks] == [0, 0, 5 * 400, 0, 0, 0]
