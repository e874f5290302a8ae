"""Topologies for collectives: who reduces to whom, and who receives from whom.

Pure functions from the hosts of the ranks to pairs of forests. Nothing here opens a socket or
knows what a tensor is; `comm.plan` turns a topology into what one rank does.

A forest is an array of fathers: `f[i]` is the father of rank i, and a root is its own father.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.errors import ConfigError

STRATEGIES = (
    "STAR",
    "MULTI_STAR",
    "CLIQUE",
    "RING",
    "TREE",
    "BINARY_TREE",
    "BINARY_TREE_STAR",
    "MULTI_BINARY_TREE_STAR",
    "AUTO",
)
Edge = tuple[int, int]
Forest = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """One way for a slice to travel: up `reduce_to` to the root, then down `bcast_from`.

    Most strategies use one tree in both directions; a ring does not.
    """

    reduce_to: Forest
    """To whom each rank sends its partial sum; the root names itself."""
    bcast_from: Forest
    """From whom each rank receives the result; the root names itself."""

    @property
    def size(self) -> int:
        return len(self.reduce_to)

    @property
    def root(self) -> int:
        return next(rank for rank, father in enumerate(self.bcast_from) if father == rank)

    @property
    def reduce_edges(self) -> tuple[Edge, ...]:
        return tuple(sorted((i, father) for i, father in enumerate(self.reduce_to) if i != father))

    @property
    def bcast_edges(self) -> tuple[Edge, ...]:
        return tuple(sorted((father, i) for i, father in enumerate(self.bcast_from) if i != father))

    def children(self, rank: int) -> tuple[int, ...]:
        """Who sends partial sums to `rank`."""
        return tuple(i for i, father in enumerate(self.reduce_to) if father == rank and i != rank)

    def listeners(self, rank: int) -> tuple[int, ...]:
        """Who receives the result from `rank`."""
        return tuple(i for i, father in enumerate(self.bcast_from) if father == rank and i != rank)


def tree(forest: Sequence[int]) -> Topology:
    """The topology of a user's forest array.

    Raises:
        ConfigError: a father that is no rank, a cycle, or not exactly one root.
    """
    fathers = check_forest(forest)
    roots = [i for i, father in enumerate(fathers) if i == father]
    if len(roots) != 1:
        raise ConfigError(f"forest {list(forest)} has {len(roots)} roots {roots}: exactly one rank is its own father")
    return Topology(fathers, fathers)


def check_forest(forest: Sequence[int]) -> Forest:
    """`forest` as a tuple; raises ConfigError if a father is no rank or the fathers go round in a circle."""
    fathers = tuple(int(father) for father in forest)
    for start, father in enumerate(fathers):
        if not 0 <= father < len(fathers):
            raise ConfigError(
                f"forest {list(forest)}: father {father} of rank {start} is not a rank below {len(fathers)}"
            )
    for start in range(len(fathers)):
        rank, steps = start, 0
        while fathers[rank] != rank:
            rank, steps = fathers[rank], steps + 1
            if steps > len(fathers):
                raise ConfigError(
                    f"forest {list(forest)}: the fathers of rank {start} go round in a circle, never to a root"
                )
    return fathers


def rerooted(forest: Forest, root: int) -> Forest:
    """The same tree, hung up at `root`: the path from there to the old root is turned round."""
    fathers = list(forest)
    rank, father = root, root
    while True:
        above = forest[rank]
        fathers[rank] = father
        if above == rank:
            return tuple(fathers)
        rank, father = above, rank


def star(size: int, root: int = 0) -> Topology:
    """Everybody sends to `root`, which answers everybody."""
    return tree([root] * size)


def ring(size: int, root: int, step: int = 1) -> Topology:
    """Partial sums walk the circle in direction `step` and end at `root`; the result walks on from there."""
    reduce_to = tuple(root if i == root else (i + step) % size for i in range(size))
    bcast_from = tuple(root if i == root else (i - step) % size for i in range(size))
    return Topology(reduce_to, bcast_from)


def masters(hosts: Sequence[str]) -> tuple[int, ...]:
    """The first rank of each host, in the order of ranks."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return tuple(first.values())


def topologies(strategy: str, hosts: Sequence[str]) -> tuple[Topology, ...]:
    """The topologies of a strategy; slices are spread over them. `hosts` holds the host of each rank.

    AUTO: on one host every rank owns a share (CLIQUE: with shared memory all of it is one hop);
    between hosts every host owns a share and sends each byte once (MULTI_STAR). `MULTI_STAR@1,2` leaves the shares to
    the hosts of ranks 1 and 2.

    Raises:
        ConfigError: no such strategy.
    """
    size, heads = len(hosts), masters(hosts)
    match strategy.upper():
        case name if name.startswith("MULTI_STAR@"):
            return tuple(_over_masters(hosts, [head] * len(heads)) for head in _owners(name, hosts))
        case "STAR":
            return (star(size),)
        case "CLIQUE":
            return tuple(star(size, root) for root in range(size))
        case "RING":
            return tuple(ring(size, root) for root in range(size))
        case "BINARY_TREE":
            return (tree(_heap(range(size), size)),)
        case "TREE":
            return (_over_masters(hosts, [heads[0]] * len(heads)),)
        case "BINARY_TREE_STAR":
            return (_over_masters(hosts, _heap_over(heads, 0)),)
        case "MULTI_STAR":
            return tuple(_over_masters(hosts, [head] * len(heads)) for head in heads)
        case "MULTI_BINARY_TREE_STAR":
            return tuple(_over_masters(hosts, _heap_over(heads, offset)) for offset in range(len(heads)))
        case "AUTO":
            return topologies("CLIQUE" if len(heads) == 1 else "MULTI_STAR", hosts)
    raise ConfigError(f"-strategy {strategy!r} is unknown: use one of {', '.join(STRATEGIES)}")


def _owners(strategy: str, hosts: Sequence[str]) -> tuple[int, ...]:
    """The masters of the hosts that `MULTI_STAR@rank,rank,...` gives shares to."""
    listed = strategy.partition("@")[2].split(",")
    if not all(rank.isdecimal() and int(rank) < len(hosts) for rank in listed):
        raise ConfigError(f"-strategy {strategy!r}: after the @ list ranks below {len(hosts)}, such as MULTI_STAR@0,1")
    master_of = {hosts[head]: head for head in masters(hosts)}
    return tuple(dict.fromkeys(master_of[hosts[int(rank)]] for rank in listed))


def _heap(ranks: Sequence[int], size: int) -> list[int]:
    """A binary heap over `ranks`: position i has the fathers (i - 1) // 2; all others stay their own."""
    fathers = list(range(size))
    for position, rank in enumerate(ranks):
        fathers[rank] = ranks[max(0, (position - 1) // 2)]
    return fathers


def _heap_over(heads: Sequence[int], offset: int) -> list[int]:
    """For each master, its father in a binary heap over the masters rotated by `offset`."""
    rotated = [*heads[offset:], *heads[:offset]]
    fathers = _heap(rotated, max(heads) + 1)
    return [fathers[head] for head in heads]


def _over_masters(hosts: Sequence[str], master_fathers: Sequence[int]) -> Topology:
    """A star on every host, and the given tree between the hosts' masters."""
    heads = masters(hosts)
    master_of = {hosts[head]: head for head in heads}
    fathers = [master_of[host] for host in hosts]
    for head, father in zip(heads, master_fathers, strict=True):
        fathers[head] = father
    return tree(fathers)


def minimum_spanning_tree(weights: Sequence[Sequence[float]]) -> tuple[Edge, ...]:
    """The lightest tree over all ranks: Prim from rank 0 on the symmetrised weights, ties to the lower ranks."""
    size = len(weights)
    if any(len(row) != size for row in weights):
        raise ConfigError(f"weights must be a square of {size} x {size} numbers")
    reached, edges = [0], []
    while len(reached) < size:
        _, near, far = min(
            ((weights[i][j] + weights[j][i]) / 2, i, j) for i in reached for j in range(size) if j not in reached
        )
        reached.append(far)
        edges.append((near, far))
    return tuple(edges)


def forest_of_edges(edges: Sequence[Edge], size: int, root: int = 0) -> Forest:
    """The forest array of an undirected tree, hung up at `root`."""
    near: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for i, j in edges:
        near[i].append(j)
        near[j].append(i)
    fathers, todo = list(range(size)), [root]
    seen = {root}
    while todo:
        rank = todo.pop()
        for other in near[rank]:
            if other not in seen:
                seen.add(other)
                fathers[other] = rank
                todo.append(other)
    return tuple(fathers)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy by name, or a user's own tree."""

    name: str = "AUTO"
    forest: Forest = ()

    @property
    def names_ranks(self) -> bool:
        """Whether it is made for the workers of one view, and means nothing to some of them."""
        return bool(self.forest) or "@" in self.name

    def topologies(self, hosts: Sequence[str], exact: bool) -> tuple[Topology, ...]:
        """The topologies over ranks on `hosts`; a subset of the ranks falls back from a user's tree to AUTO."""
        if self.forest:
            if len(self.forest) == len(hosts):
                return (tree(self.forest),)
            return topologies("AUTO", hosts)
        if exact and self.name.upper() == "RING":
            # gloo's chain descends through the ranks. A ring that descends as well may fold at
            # every hop; one that ascends would have to carry every operand to its end.
            return tuple(ring(len(hosts), root, step=-1) for root in range(len(hosts)))
        return topologies(self.name, hosts)


def parse_strategy(text: str | Sequence[int]) -> Strategy:
    """A strategy as it is written: by its name, as fathers, or as fathers with commas between them.

    Raises:
        ConfigError: fathers that are no numbers.
    """
    if isinstance(text, str) and not text[:1].isdecimal():
        return Strategy(text.upper())
    try:
        return Strategy("FOREST", tuple(map(int, text.split(",") if isinstance(text, str) else text)))
    except ValueError:
        raise ConfigError(f"strategy {text!r}: use a name, or the rank of everybody's father, such as 0,0,1") from None
