"""Who sends to whom, as a graph of workers or, where they are many, of hosts, with the rates of its links. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pliant.comm.topology import Topology, topologies, tree
from pliant.errors import ConfigError
from pliant.ui.story import Crew, Links

MOST_NODES = 64
MOST_EDGES = 600


@dataclass(frozen=True, slots=True)
class Node:
    """A worker, or a host with several."""

    name: str
    workers: int
    is_root: bool
    """Whether sums, or shares of them, end here."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way of partial sums from one node to another."""

    source: int
    target: int
    lanes: int
    """How many of the strategy's topologies use it."""
    bytes_per_s: float | None
    """As measured; None: not, or within one host."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The graph, and what was left out of it."""

    nodes: tuple[Node, ...] = ()
    links: tuple[Link, ...] = ()
    note: str = ""


def picture(crew: Crew, measured: Links | None) -> Picture:
    """The topology of a crew."""
    hosts = [name.rpartition(":")[0] or name for name in crew.workers]
    try:
        lanes = lanes_of(crew.strategy or "AUTO", hosts)
    except (ConfigError, ValueError) as error:
        return Picture(note=f"topology {crew.strategy!r} cannot be drawn: {error}")
    by_host = len(crew.workers) > MOST_NODES
    labels = hosts if by_host else list(crew.workers)
    names = list(dict.fromkeys(labels))
    place = {name: number for number, name in enumerate(names)}
    roots = {place[labels[lane.root]] for lane in lanes}
    used: Counter[tuple[int, int]] = Counter()
    for lane in lanes:
        for rank, father in lane.reduce_edges:
            pair = place[labels[rank]], place[labels[father]]
            if pair[0] != pair[1]:
                used[pair] += 1
    sizes = Counter(labels)
    rates = _Rates(measured)
    shown = [pair for pair in used if max(pair) < MOST_NODES]
    kept = shown[:: -(-len(shown) // MOST_EDGES) or 1]  # evenly, where they are too many
    host_of = dict(zip(labels, hosts, strict=True))
    return Picture(
        tuple(Node(name, sizes[name], place[name] in roots) for name in names[:MOST_NODES]),
        tuple(
            Link(*pair, used[pair], rates.between(host_of[names[pair[0]]], host_of[names[pair[1]]])) for pair in kept
        ),
        _left_out(by_host, len(names), len(used) - len(kept)),
    )


def lanes_of(strategy: str, hosts: list[str]) -> tuple[Topology, ...]:
    """The topologies of a strategy, or of each rank's father: `0,0,1`.

    Raises:
        ConfigError: there is no such strategy, or it is no tree of these workers.
    """
    if len(hosts) == 1:
        return (tree([0]),)
    if strategy.replace(",", "").isdecimal():
        fathers = [int(father) for father in strategy.split(",")]
        if len(fathers) != len(hosts):
            raise ConfigError(f"{len(fathers)} fathers for {len(hosts)} workers")
        return (tree(fathers),)
    if len(hosts) > MOST_NODES:  # a star for each of 1000 ranks is a million edges, and shows what one does
        name = {"CLIQUE": "STAR", "RING": "RING", "AUTO": "MULTI_STAR"}.get(strategy.upper(), strategy)
        return topologies(name, hosts)[:MOST_NODES]
    return topologies(strategy, hosts)


class _Rates:
    def __init__(self, measured: Links | None) -> None:
        self._measured = measured
        self._place = {host: number for number, host in enumerate(measured.hosts)} if measured else {}

    def between(self, source: str, target: str) -> float | None:
        one, other = self._place.get(source), self._place.get(target)
        if self._measured is None or one is None or other is None or one == other:
            return None
        return self._measured.bytes_per_s[one][other] or None


def _left_out(by_host: bool, num_nodes: int, num_links: int) -> str:
    parts = ["hosts, not workers: there are many"] if by_host else []
    if num_nodes > MOST_NODES:
        parts.append(f"the first {MOST_NODES} of {num_nodes} hosts")
    elif num_links > 0:
        parts.append(f"without {num_links} more links")
    return "; ".join(parts)
