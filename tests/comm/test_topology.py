"""Topologies and strategies: golden vectors, the laws of trees, and invalid input."""

from __future__ import annotations

import pytest

from pliant.comm import topology
from pliant.comm.topology import Strategy, check_strategy, parse_strategy
from pliant.errors import ConfigError

AABB = ("A", "A", "B", "B")
ABCD = ("A", "B", "C", "D")


def bcast(strategy: str, hosts: tuple[str, ...]) -> list[set[tuple[int, int]]]:
    return [set(tree.bcast_edges) for tree in topology.topologies(strategy, hosts)]


def test_golden_vectors_on_two_hosts() -> None:
    tree = {(0, 1), (2, 3), (0, 2)}
    assert bcast("TREE", AABB) == bcast("BINARY_TREE_STAR", AABB) == [tree]
    assert bcast("MULTI_STAR", AABB) == bcast("MULTI_BINARY_TREE_STAR", AABB) == [tree, {(0, 1), (2, 3), (2, 0)}]
    assert bcast("BINARY_TREE", AABB) == [{(0, 1), (0, 2), (1, 3)}]
    assert bcast("STAR", AABB) == [{(0, 1), (0, 2), (0, 3)}]
    assert len(bcast("CLIQUE", AABB)) == 4
    assert bcast("CLIQUE", AABB)[2] == {(2, 0), (2, 1), (2, 3)}


def test_golden_vectors_on_four_hosts() -> None:
    assert bcast("BINARY_TREE_STAR", ABCD) == [{(0, 1), (0, 2), (1, 3)}]
    assert bcast("MULTI_BINARY_TREE_STAR", ABCD) == [
        {(0, 1), (0, 2), (1, 3)},
        {(1, 2), (1, 3), (2, 0)},
        {(2, 3), (2, 0), (3, 1)},
        {(3, 0), (3, 1), (0, 2)},
    ]
    ring = topology.topologies("RING", ABCD)[0]
    assert set(ring.reduce_edges) == {(1, 2), (2, 3), (3, 0)}
    assert set(ring.bcast_edges) == {(0, 1), (1, 2), (2, 3)}


def test_auto_makes_every_rank_of_a_host_and_every_host_an_owner() -> None:
    assert topology.topologies("auto", ("A",) * 3) == topology.topologies("CLIQUE", ("A",) * 3)
    assert topology.topologies("AUTO", AABB) == topology.topologies("MULTI_STAR", AABB)


@pytest.mark.parametrize("hosts", ["A", "AA", "AB", "AAB", "ABA", "AABBB", "ABCABCAB"])
@pytest.mark.parametrize("strategy", topology.STRATEGIES)
def test_every_topology_is_a_tree_in_both_directions(strategy: str, hosts: str) -> None:
    for found in topology.topologies(strategy, tuple(hosts)):
        for forest in (found.reduce_to, found.bcast_from):
            assert topology.check_forest(forest) == forest
            assert [rank for rank, parent in enumerate(forest) if rank == parent] == [found.root]


@pytest.mark.parametrize(
    ("forest", "reason"),
    [([1, 0], "cycle"), ([0, 1], "2 roots"), ([0, 2], "not a rank"), ([1, 2, 1, 3], "cycle"), ([-1, 0], "not a rank")],
    ids=str,
)
def test_invalid_forests_are_refused(forest: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        topology.tree(forest)


@pytest.mark.parametrize("root", range(5))
def test_rerooting_keeps_the_edges(root: int) -> None:
    forest = (0, 0, 1, 1, 3)
    turned = topology.reroot(forest, root)
    assert topology.tree(turned).root == root
    assert undirected(turned) == undirected(forest)


def undirected(forest: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset((rank, parent)) for rank, parent in enumerate(forest) if rank != parent}


def test_minimum_spanning_tree() -> None:
    weights = [[0, 4, 1, 9], [4, 0, 2, 9], [1, 2, 0, 3.5], [9, 9, 3.5, 0]]
    edges = topology.minimum_spanning_tree(weights)
    assert edges == ((0, 2), (2, 1), (2, 3))
    assert topology.forest_of_edges(edges, 4) == (0, 2, 0, 2)
    assert topology.forest_of_edges(edges, 4, root=3) == (2, 2, 3, 3)


def test_strategies_are_parsed_and_checked() -> None:
    hosts = ["A", "A", "B"]
    assert parse_strategy("star") == Strategy("STAR")
    assert parse_strategy("MULTI_STAR@1,2") == Strategy("MULTI_STAR@1,2")
    assert check_strategy("ring", hosts) == Strategy("RING")
    assert check_strategy([0, 0, 1], hosts) == check_strategy("0,0,1", hosts) == Strategy("FOREST", (0, 0, 1))
    with pytest.raises(ConfigError, match="has 2 entries, but there are 3 ranks"):
        check_strategy([0, 0], hosts)
    for unknown in ("no such", "0,x", ["x"]):
        with pytest.raises(ConfigError):
            check_strategy(unknown, hosts)
    for wrong in ("MULTI_STAR@", "MULTI_STAR@9", "MULTI_STAR@a", "MULTI_STAR@-1"):
        with pytest.raises(ConfigError, match="list ranks below 4"):
            topology.topologies(wrong, "ABCD")
