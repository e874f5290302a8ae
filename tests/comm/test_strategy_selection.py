"""Selection of a strategy by link rates: predicted bytes are those of the plan, and no tree is better than the choice."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from pliant.comm import topology
from pliant.comm.order import EXACT_ORDERS, even_partition
from pliant.comm.plan import Spec, make_plan
from pliant.comm.strategy_selection import SAME, Network, choose, lanes, predict_s, traffic
from pliant.comm.topology import STRATEGIES, Strategy
from pliant.errors import ConfigError

RATE = 12.5e6
MB = 1e6


def uniform(size: int, rate: float = RATE) -> list[list[float]]:
    return [[0.0 if i == j else rate for j in range(size)] for i in range(size)]


def hose(egress: list[float], ingress: list[float]) -> list[list[float]]:
    """Return link rates that are limited by the hosts at both ends only."""
    size = len(egress)
    return [[0.0 if i == j else min(egress[i], ingress[j]) for j in range(size)] for i in range(size)]


def all_trees(size: int) -> list[tuple[int, ...]]:
    """Return every tree over `size` ranks with every root."""
    found = []
    for parents in itertools.product(range(size), repeat=size):
        if sum(rank == parent for rank, parent in enumerate(parents)) == 1:
            try:
                found.append(topology.check_forest(parents))
            except ConfigError:
                continue
    return found


@pytest.mark.parametrize("hosts", ["AB", "ABC", "ABCD", "AABB", "AABCC", "ABCDEF", "AAAA"])
def test_the_bytes_are_those_of_the_plan(hosts: str) -> None:
    size, item = len(hosts), 4
    names = [*STRATEGIES, "MULTI_STAR@0", f"MULTI_STAR@0,{size - 1}"]
    strategies = [topology.parse_strategy(name) for name in names]
    strategies.append(Strategy("FOREST", tuple(max(0, rank - 1) for rank in range(size))))
    for replicas, strategy, order in itertools.product((size, 2 * size + 1), strategies, EXACT_ORDERS):
        network = Network(tuple(hosts), uniform(size), replicas, order)
        # Long enough to be cut, into chunks of the same length.
        length = replicas * 12 * 8192
        parts = tuple(end - begin for begin, end in even_partition(replicas, size))
        spec = Spec("all_reduce", "x", tuple(range(size)), "float32", length, "sum", order, -1, parts)
        planned: Counter[tuple[int, int]] = Counter()
        for rank in range(size):
            plan = make_plan(spec, rank, tuple(hosts), strategy, item, length * item)
            for peer, sent in plan.egress(item).items():
                planned[rank, peer] += sent
        predicted = traffic(lanes(strategy, network))
        for (rank, peer), sent in planned.items():
            if hosts[rank] != hosts[peer]:
                assert predicted[rank, peer] == pytest.approx(sent / (length * item), rel=0.02), (strategy, replicas)
        across = {edge for edge in predicted if hosts[edge[0]] != hosts[edge[1]]}
        assert across == {edge for edge in planned if hosts[edge[0]] != hosts[edge[1]]}


def test_on_equal_links_every_host_has_a_share() -> None:
    network = Network(tuple("ABCD"), uniform(4))
    found = choose(network, 100 * MB, Strategy("STAR"))
    assert found.strategy == Strategy("MULTI_STAR")
    # Each host sends 2(n-1)/n of the tensor, a star's root n-1 times the tensor.
    assert found.predicted_s == pytest.approx(1.5 * 100 * MB / RATE, rel=0.05)
    assert found.present_s == pytest.approx(3 * 100 * MB / RATE, rel=0.1)


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_host_has_no_share(slow: int) -> None:
    rates = [RATE * (0.2 if host == slow else 1) for host in range(4)]
    network = Network(tuple("ABCD"), hose(rates, [RATE] * 4))
    found = choose(network, 100 * MB, Strategy("FOREST", (slow,) * 4))
    others = ",".join(str(host) for host in range(4) if host != slow)
    assert found.strategy == Strategy(f"MULTI_STAR@{others}")
    # It cannot be faster than the slow host's own gradients get out.
    assert 5 * 100 * MB / RATE < found.predicted_s < 5.3 * 100 * MB / RATE


def test_several_workers_of_a_host_are_one_on_the_wire() -> None:
    rates = [[0.0 if i == j else 1e10 if i // 2 == j // 2 else RATE for j in range(6)] for i in range(6)]
    for i, j in itertools.product((0, 1), (2, 3, 4, 5)):
        rates[i][j] = RATE / 10
    network = Network(tuple("AABBCC"), rates)
    found = choose(network, 50 * MB, Strategy("STAR"))
    sent = traffic(lanes(found.strategy, network))
    # As a leaf, host A would have to carry both its operands in most chunks, for the sake of the exact order; as the
    # root of a chain it sends the sum, once.
    assert sum(share for (source, target), share in sent.items() if source < 2 <= target) == 1


def test_ties_go_to_the_present_one_and_small_gains_change_nothing() -> None:
    network = Network(tuple("ABCD"), uniform(4))
    for present in (Strategy("FOREST", (1, 1, 1, 1)), Strategy("STAR")):
        only_stars = choose(network, 50 * MB, present, margin=1.0)
        assert only_stars.strategy == present
    assert choose(network, 50 * MB, Strategy("AUTO")).strategy == Strategy("AUTO")
    slower = Network(tuple("ABCD"), hose([RATE * 0.9, RATE, RATE, RATE], [RATE] * 4))
    assert choose(slower, 50 * MB, Strategy("AUTO")).strategy == Strategy("AUTO")


def test_the_preferred_one_of_equals_is_taken() -> None:
    network = Network(tuple("ABCD"), uniform(4))
    found = choose(network, 50 * MB, Strategy("STAR"), preferred=(Strategy("AUTO"),))
    assert found.strategy == Strategy("AUTO")


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["hose", "links"])
def test_no_tree_at_all_is_better(size: int, kind: str) -> None:
    trees = [Strategy("FOREST", parents) for parents in all_trees(size)]
    assert len(trees) == size ** (size - 1)
    for seed in range(3 if size == 5 else 8):
        chance = random.Random(seed)
        if kind == "hose":
            rates = hose(*([RATE * chance.choice((0.1, 0.3, 0.5, 1, 1)) for _ in range(size)] for _ in range(2)))
        else:
            rates = [[RATE * chance.choice((0.05, 0.2, 0.5, 1)) for _ in range(size)] for _ in range(size)]
        network = Network(tuple("ABCDE"[:size]), rates)
        found = choose(network, 40 * MB, Strategy("STAR"), margin=0)
        least_s = min(predict_s(tree, network, 40 * MB) for tree in trees)
        assert found.predicted_s <= least_s * SAME


def test_a_dead_link_is_avoided_and_costs_no_division_by_zero() -> None:
    rates = uniform(4)
    rates[0][1] = rates[1][0] = 0.0
    found = choose(Network(tuple("ABCD"), rates), 10 * MB, Strategy("CLIQUE"))
    used = traffic(lanes(found.strategy, Network(tuple("ABCD"), rates)))
    assert (0, 1) not in used
    assert (1, 0) not in used


def test_one_host_and_many_hosts() -> None:
    one = Network(("A",) * 4, uniform(4, 1e10))
    assert choose(one, 10 * MB, Strategy("AUTO")).strategy == Strategy("AUTO")
    many = Network(tuple(map(str, range(130))), hose([RATE / 10] + [RATE] * 129, [RATE] * 130))
    assert 0 not in {
        tree.root for tree in choose(many, 10 * MB, Strategy("STAR")).strategy.topologies(many.hosts, True)
    }
