"""Plans and the exact order that they keep, proved symbolically; and changes of the strategy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pliant.comm import order
from pliant.comm.frames import channel_tag
from pliant.comm.order import even_partition
from pliant.comm.plan import (
    Portion,
    RankPlan,
    Spec,
    StrategyHistory,
    cut,
    cut_chunks,
    highest_counts,
    make_plan,
    name_hash,
    pack_counts,
)
from pliant.comm.topology import STRATEGIES, Strategy

Expr = object
"""The number of a replica, or a pair (a, b) for a + b."""


def test_chunks_are_gloos() -> None:
    assert order.chunk_length(10, 4, 4) == 4
    assert order.chunk_length(1_000_000, 4, 3) == 333_334
    assert order.chunk_length(6_553_600, 4, 4) == 1_638_406
    assert order.chunks_between(0, 10, 4) == [(0, 4, 0), (4, 8, 1), (8, 10, 2)]
    assert order.chain(0, 4) == (3, 2, 1, 0)
    assert order.chain(1, 3) == (0, 2, 1)


def test_partition_and_hash_are_kungfus() -> None:
    assert even_partition(10, 3) == [(0, 4), (4, 7), (7, 10)]
    assert name_hash("part::g[0:10]") == 93045
    assert name_hash("part::g[0:262144]") == 104065
    assert name_hash("part::g[262144:524288]") == 118546
    assert [s.length for s in cut("g", 600_000, 4, 1, 1 << 20)] == [200_000] * 3


@pytest.mark.parametrize("length", [1, 3, 1000, 16384, 16385, 262144, 262145, 3 * (1 << 20) + 7])
@pytest.mark.parametrize("replicas", [1, 2, 3, 6, 8])
def test_slices_cover_everything_once(length: int, replicas: int) -> None:
    for slices in (cut("x", length, 4, replicas, 1 << 20), cut_chunks("x", length, 4, replicas, 1 << 20, replicas)):
        assert [s.begin for s in slices] == [0, *(s.end for s in slices)][:-1]
        assert slices[-1].end == length
        assert all(0 <= s.lane < replicas and s.length * 4 <= 1 << 20 for s in slices)


def run(plans: list[RankPlan], blocks: Sequence[Sequence[Expr]]) -> list[dict[int, Expr]]:
    """Follow the plans of all ranks; return the expression that each rank gets for each slice and piece."""
    ranks = range(len(plans))

    def operands(rank: int, index: int) -> list[Expr]:
        step = plans[rank].steps[index]
        found: list[Expr] = list(blocks[rank])
        for child, count in step.children:
            # Memory that is read in place holds the child's own operands as they are.
            sent = list(blocks[child]) if child in step.offered else handed_up(child, index)
            assert len(sent) == count
            found += sent
        return found

    def fold(values: list[Expr], expression: order.Expression) -> Expr:
        if isinstance(expression, int):
            return values[expression]
        acc, *others = (fold(values, part) for part in expression)
        for other in others:
            acc = (other, acc)
        return acc

    def handed_up(rank: int, index: int) -> list[Expr]:
        step, values = plans[rank].steps[index], operands(rank, index)
        return [fold(values, ranges[0][2]) for ranges in step.sums] + [values[i] for i in step.passed_on]

    def result(rank: int, index: int) -> dict[int, Expr]:
        step = plans[rank].steps[index]
        if step.source is not None:
            assert rank in plans[step.source].steps[index].listeners
            return result(step.source, index)
        values = operands(rank, index)
        if not step.sums:
            assert len(values) == 1
            return {step.begin: values[0]}
        (ranges,) = step.sums
        return {step.begin + low: fold(values, expression) for low, _, expression in ranges}

    merged: list[dict[int, Expr]] = []
    for rank in ranks:
        mine: dict[int, Expr] = {}
        for index in plans[rank].steps:
            mine.update(result(rank, index))
        merged.append(mine)
    return merged


def gloo(chunk: int, num: int) -> Expr:
    first, *rest = order.chain(chunk, num)
    acc: Expr = first
    for replica in rest:
        acc = (replica, acc)
    return acc


def blocks_of(parts: tuple[int, ...]) -> list[list[int]]:
    """Return the replicas of each rank."""
    ends = list(itertools.accumulate(parts))
    return [list(range(end - count, end)) for end, count in zip(ends, parts, strict=True)]


def spec(size: int, length: int, *, order: str = "ddp", parts: tuple[int, ...] = ()) -> Spec:
    return Spec("all_reduce", "g", tuple(range(size)), "float32", length, "sum", order, -1, parts)


@pytest.mark.parametrize("length", [5, 1000, 300_001, 2_000_000])
@pytest.mark.parametrize("hosts", ["A", "AA", "AAA", "AABB", "ABCD", "AABBC", "ABCABCAB"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_sums_in_gloos_order(strategy: str, hosts: str, length: int) -> None:
    size = len(hosts)
    plans = [make_plan(spec(size, length), rank, hosts, Strategy(strategy), 4, 1 << 20) for rank in range(size)]
    borders = order.chunk_length(length, 4, size)
    for found in run(plans, [[rank] for rank in range(size)]):
        for begin, expression in found.items():
            assert expression == gloo(begin // borders, size)


@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (4, 2), (3, 3), (2, 2, 2), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_on_fewer_workers_sum_in_the_same_order(strategy: str, parts: tuple[int, ...]) -> None:
    size, num, length = len(parts), sum(parts), 2_000_000
    plans = [
        make_plan(spec(size, length, parts=parts), rank, "ABC"[:size], Strategy(strategy), 4, 1 << 20)
        for rank in range(size)
    ]
    borders = order.chunk_length(length, 4, num)
    for found in run(plans, blocks_of(parts)):
        for begin, expression in found.items():
            assert expression == gloo(begin // borders, num)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_fast_order_is_the_same_on_all_ranks_and_omits_nobody(strategy: str) -> None:
    def leaves(expression: Expr) -> list[int]:
        return [expression] if isinstance(expression, int) else [x for part in expression for x in leaves(part)]

    plans = [make_plan(spec(5, 900_000, order="fast"), r, "AABBC", Strategy(strategy), 4, 1 << 20) for r in range(5)]
    found = run(plans, [[rank] for rank in range(5)])
    assert all(other == found[0] for other in found)
    assert all(sorted(leaves(expression)) == list(range(5)) for expression in found[0].values())


def test_a_ring_that_descends_carries_one_operand_per_hop() -> None:
    for rank in range(4):
        plan = make_plan(spec(4, 4_000_000), rank, "ABCD", Strategy("RING"), 4, 1 << 20)
        assert sum(plan.egress(4).values()) == 2 * 3 * 4_000_000  # 2 (N-1)/N S, with S = 16 MB


@pytest.mark.parametrize("lanes", [(0,), (2, 1, 0), (0, 1, 2, 3, 0, 1)], ids=str)
@pytest.mark.parametrize("hosts", ["AAA", "AABB", "ABCD"])
@pytest.mark.parametrize("parts", [(), (2, 1, 1, 2)], ids=str)
def test_a_portion_sums_in_the_order_of_the_whole(hosts: str, parts: tuple[int, ...], lanes: tuple[int, ...]) -> None:
    size, whole, length = len(hosts), 100_000, 30_000
    counts = parts[:size] or (1,) * size
    num = sum(counts)
    borders = order.chunk_length(whole, 4, num)
    for begin in (0, 12_345, 70_000):
        asked = replace(spec(size, length, parts=counts), portion=Portion(whole, begin, lanes))
        plans = [make_plan(asked, rank, hosts, Strategy("AUTO"), 4, 1 << 20) for rank in range(size)]
        assert all(len(plan.steps) == len(lanes) for plan in plans)
        for found in run(plans, blocks_of(counts)):
            assert sorted(found)[0] == 0
            for at, expression in found.items():
                assert expression == gloo((begin + at) // borders, num)


def test_a_portion_that_forgets_its_place_sums_in_another_order() -> None:
    asked = replace(spec(4, 30_000), portion=Portion(30_000, 0, (0, 1, 2)))
    plans = [make_plan(asked, rank, "ABCD", Strategy("AUTO"), 4, 1 << 20) for rank in range(4)]
    borders = order.chunk_length(100_000, 4, 4)
    found = run(plans, [[rank] for rank in range(4)])[0]
    assert any(expression != gloo((70_000 + at) // borders, 4) for at, expression in found.items())


# --- the tree ---


def tree(begin: int, end: int) -> Expr:
    """Return the sum of replicas [begin, end) in a balanced binary tree: the left half is a power of two."""
    if end - begin == 1:
        return begin
    middle = begin + max(size for size in (1, 2, 4, 8, 16) if size < end - begin)
    return tree(begin, middle), tree(middle, end)


def test_the_largest_subtrees_of_a_block() -> None:
    assert order.subtrees(0, 16, 16) == [range(16)]
    assert order.subtrees(6, 11, 16) == [range(6, 8), range(8, 10), range(10, 11)]
    assert order.subtrees(4, 6, 6) == [range(4, 6)]
    assert order.subtrees(3, 6, 6) == [range(3, 4), range(4, 6)]
    assert order.operands_of_ranks((3, 3), "tree") == (((0, 1), (2,)), ((3,), (4, 5)))
    assert order.operands_of_ranks((2, 1), "ddp") == (((0,), (1,)), ((2,),))


def random_cases() -> Iterator[tuple[int, tuple[int, ...], str, Strategy, Portion | None]]:
    chance = random.Random(5)
    for num in (1, 2, 3, 6, 7, 16, 16, 31):
        for _ in range(24):
            size = chance.randint(1, min(num, 6))
            cuts = [0, *sorted(chance.sample(range(1, num), size - 1)), num]
            parts = tuple(end - begin for begin, end in itertools.pairwise(cuts))
            hosts = "".join(chance.choice("ABC") for _ in range(size))
            if chance.random() < 0.4:
                parents = [chance.randint(0, max(0, rank - 1)) for rank in range(size)]
                names = chance.sample(range(size), size)
                forest = [0] * size
                for rank, parent in enumerate(parents):
                    forest[names[rank]] = names[parent]
                strategy = Strategy("FOREST", tuple(forest))
            else:
                strategy = Strategy(chance.choice(STRATEGIES))
            portion = Portion(900_000, 11, (0, 1, 0)) if chance.random() < 0.3 else None
            yield num, parts, hosts, strategy, portion


def test_the_tree_is_the_same_for_every_placement() -> None:
    for num, parts, hosts, strategy, portion in random_cases():
        asked = replace(spec(len(parts), 300_000, order="tree", parts=parts), portion=portion)
        plans = [make_plan(asked, rank, hosts, strategy, 4, 1 << 18) for rank in range(len(parts))]
        own = [[tree(term[0], term[-1] + 1) for term in terms] for terms in asked.operands]
        for found in run(plans, own):
            assert set(found.values()) == {tree(0, num)}, f"{parts} on {hosts}, {strategy}"


def test_in_the_tree_a_block_that_is_a_subtree_sends_one_operand() -> None:
    for which, sent in (("ddp", 4), ("tree", 1)):
        asked = spec(4, 1_000_000, order=which, parts=(4, 4, 4, 4))
        plans = [make_plan(asked, rank, "ABCD", Strategy("AUTO"), 4, 1 << 20) for rank in range(4)]
        ups = [step.num_up for plan in plans for step in plan.steps.values() if step.up is not None]
        assert max(ups) == sent


def test_another_tree_is_noticed() -> None:
    asked = spec(3, 1000, order="tree", parts=(2, 2, 2))
    plans = [make_plan(asked, rank, "ABC", Strategy("STAR"), 4, 1 << 20) for rank in range(3)]
    own = [[tree(term[0], term[-1] + 1) for term in terms] for terms in asked.operands]
    halves = (((0, 1), 2), ((3, 4), 5))
    assert run(plans, own)[0][0] == tree(0, 6) != halves
    assert tree(0, 6) != gloo(0, 6)


# --- changes of the strategy ---

SPECS = [Spec("all_reduce", name, (0, 1, 2), "float32", 10, "sum", "ddp", -1) for name in ("a", "b", "c")]


def change_on_all(ranks: list[StrategyHistory], submitted: list[dict[str, int]], wanted: str) -> None:
    """Change the strategy as `Engine.set_strategy` does, given what each rank has submitted under each name."""
    counts = [{channel_tag(spec.channel): each[spec.name] for spec in SPECS if spec.name in each} for each in submitted]
    most = highest_counts([pack_counts(mine) for mine in counts])
    for rank, mine in zip(ranks, counts, strict=True):
        rank.change(Strategy(wanted), mine, most)


def test_a_rank_that_lags_uses_the_old_strategy_until_it_has_caught_up() -> None:
    ranks = [StrategyHistory(Strategy("STAR")) for _ in range(2)]
    change_on_all(ranks, [{"a": 5}, {"a": 3, "b": 1}], "RING")
    ahead, behind = ranks
    assert [behind[behind.number_for(SPECS[0], seq)].name for seq in (3, 4, 5)] == ["STAR", "STAR", "RING"]
    assert ahead[ahead.number_for(SPECS[0], 5)].name == "RING"
    assert ahead[ahead.number_for(SPECS[1], 0)].name == "STAR", "the other rank had submitted it before the change"
    assert ahead[ahead.number_for(SPECS[2], 0)].name == "RING"


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_use_the_same_strategy_whatever_they_had_submitted(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [StrategyHistory(Strategy("STAR")) for _ in range(3)]
    taken: list[dict[tuple[str, int], int]] = [{} for _ in ranks]
    done: list[dict[str, int]] = [{} for _ in ranks]

    def submit(rank: int, spec: Spec) -> None:
        seq = done[rank].get(spec.name, 0)
        done[rank][spec.name] = seq + 1
        taken[rank][spec.name, seq] = ranks[rank].number_for(spec, seq)

    for wanted in ("RING", "TREE", "CLIQUE", "STAR"):
        for _ in range(30):
            submit(chance.randrange(3), chance.choice(SPECS))
        change_on_all(ranks, done, wanted)
    for rank in range(3):
        for spec in SPECS:
            while done[rank].get(spec.name, 0) < 60:
                submit(rank, spec)
    assert taken[0] == taken[1] == taken[2]
    assert set(taken[0].values()) == {0, 1, 2, 3, 4}
