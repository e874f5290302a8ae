"""Topologies and strategies: which rank sends partial sums to which, and which rank receives results from which.

Pure functions from the hosts of the ranks to pairs of trees. Nothing here opens a socket or knows what a tensor is;
`comm.plan` turns a topology into the steps of one rank.

A forest is an array of parents: `f[i]` is the parent of rank i, and a root is its own parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.errors import ConfigError

STRATEGIES = (
    "STAR", "MULTI_STAR", "CLIQUE", "RING", "TREE", "BINARY_TREE", "BINARY_TREE_STAR", "MULTI_BINARY_TREE_STAR", "AUTO",
)  # fmt: skip

Edge = tuple[int, int]
Forest = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The route of a slice: partial sums go up `reduce_to` to the root, the result goes down `bcast_from`.

    Most strategies use one tree in both directions; a ring does not.
    """

    reduce_to: Forest
    """The rank to which each rank sends its partial sum; the root names itself."""
    bcast_from: Forest
    """The rank from which each rank receives the result; the root names itself."""

    @property
    def size(self) -> int:
        return len(self.reduce_to)

    @property
    def root(self) -> int:
        return next(rank for rank, parent in enumerate(self.bcast_from) if parent == rank)

    @property
    def reduce_edges(self) -> tuple[Edge, ...]:
        return tuple(sorted((i, parent) for i, parent in enumerate(self.reduce_to) if i != parent))

    @property
    def bcast_edges(self) -> tuple[Edge, ...]:
        return tuple(sorted((parent, i) for i, parent in enumerate(self.bcast_from) if i != parent))

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that send partial sums to `rank`."""
        return tuple(i for i, parent in enumerate(self.reduce_to) if parent == rank and i != rank)

    def listeners(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that receive the result from `rank`."""
        return tuple(i for i, parent in enumerate(self.bcast_from) if parent == rank and i != rank)


# --- strategies ---


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy by name, or a tree given by the user."""

    name: str = "AUTO"
    forest: Forest = ()

    @property
    def names_ranks(self) -> bool:
        """Whether the strategy lists ranks, so that it is only valid for all workers of one view."""
        return bool(self.forest) or "@" in self.name

    def topologies(self, hosts: Sequence[str], order: str) -> tuple[Topology, ...]:
        """Return the topologies over ranks on `hosts` for sums in this order. A user's tree of another size falls back to AUTO."""
        if self.forest:
            if len(self.forest) == len(hosts):
                return (tree(self.forest),)
            return topologies("AUTO", hosts)
        if order == "ddp" and self.name.upper() == "RING":
            # gloo's chain descends through the ranks. A ring that descends as well may fold at
            # every hop; one that ascends would have to carry every operand to its end.
            return tuple(ring(len(hosts), root, step=-1) for root in range(len(hosts)))
        return topologies(self.name, hosts)


def parse_strategy(text: str | Sequence[int]) -> Strategy:
    """Return the strategy written as a name, as a list of parents, or as parents separated by commas.

    Raises:
        ConfigError: the parents are not numbers.
    """
    if isinstance(text, str) and not text[:1].isdecimal():
        return Strategy(text.upper())
    try:
        return Strategy("FOREST", tuple(map(int, text.split(",") if isinstance(text, str) else text)))
    except ValueError:
        raise ConfigError(f"strategy {text!r}: use a name, or the parent of each rank, such as 0,0,1") from None


def check_strategy(strategy: str | Sequence[int] | Strategy, hosts: Sequence[str]) -> Strategy:
    """Return `strategy`, a name or a list of parents, as a `Strategy` that is valid for ranks on `hosts`.

    Raises:
        ConfigError: there is no such strategy, or the parents are not a tree over these ranks.
    """
    wanted = strategy if isinstance(strategy, Strategy) else parse_strategy(strategy)
    # A Strategy object may have been made for another view; it falls back to AUTO where it does not fit.
    if wanted is not strategy and wanted.name == "FOREST" and len(wanted.forest) != len(hosts):
        raise ConfigError(
            f"forest {list(wanted.forest)} has {len(wanted.forest)} entries, but there are {len(hosts)} ranks"
        )
    wanted.topologies(hosts, "fast")
    return wanted


def topologies(strategy: str, hosts: Sequence[str]) -> tuple[Topology, ...]:
    """Return the topologies of a strategy, over which slices are spread. `hosts` holds the host of each rank.

    AUTO is CLIQUE on one host (every rank owns a share, and with shared memory all of it is one hop) and MULTI_STAR
    between hosts (every host owns a share and sends each byte once). `MULTI_STAR@1,2` gives shares only to the hosts
    of ranks 1 and 2.

    Raises:
        ConfigError: there is no such strategy.
    """
    size, leaders = len(hosts), host_leaders(hosts)
    match strategy.upper():
        case name if name.startswith("MULTI_STAR@"):
            return tuple(_over_leaders(hosts, [leader] * len(leaders)) for leader in _share_owners(name, hosts))
        case "STAR":
            return (star(size),)
        case "CLIQUE":
            return tuple(star(size, root) for root in range(size))
        case "RING":
            return tuple(ring(size, root) for root in range(size))
        case "BINARY_TREE":
            return (tree(_heap(range(size), size)),)
        case "TREE":
            return (_over_leaders(hosts, [leaders[0]] * len(leaders)),)
        case "BINARY_TREE_STAR":
            return (_over_leaders(hosts, _leader_heap(leaders, 0)),)
        case "MULTI_STAR":
            return tuple(_over_leaders(hosts, [leader] * len(leaders)) for leader in leaders)
        case "MULTI_BINARY_TREE_STAR":
            return tuple(_over_leaders(hosts, _leader_heap(leaders, offset)) for offset in range(len(leaders)))
        case "AUTO":
            return topologies("CLIQUE" if len(leaders) == 1 else "MULTI_STAR", hosts)
    raise ConfigError(f"-strategy {strategy!r} is unknown: use one of {', '.join(STRATEGIES)}")


def host_leaders(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the first rank of each host, in the order of ranks."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return tuple(first.values())


def _share_owners(strategy: str, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the leaders of the hosts to which `MULTI_STAR@rank,rank,...` gives shares."""
    listed = strategy.partition("@")[2].split(",")
    if not all(rank.isdecimal() and int(rank) < len(hosts) for rank in listed):
        raise ConfigError(f"-strategy {strategy!r}: after the @ list ranks below {len(hosts)}, such as MULTI_STAR@0,1")
    leader_of = {hosts[leader]: leader for leader in host_leaders(hosts)}
    return tuple(dict.fromkeys(leader_of[hosts[int(rank)]] for rank in listed))


def _heap(ranks: Sequence[int], size: int) -> list[int]:
    """Return the parents of a binary heap over `ranks`; every other rank is its own parent."""
    parents = list(range(size))
    for position, rank in enumerate(ranks):
        parents[rank] = ranks[max(0, (position - 1) // 2)]
    return parents


def _leader_heap(leaders: Sequence[int], offset: int) -> list[int]:
    """Return the parent of each leader in a binary heap over the leaders rotated by `offset`."""
    rotated = [*leaders[offset:], *leaders[:offset]]
    parents = _heap(rotated, max(leaders) + 1)
    return [parents[leader] for leader in leaders]


def _over_leaders(hosts: Sequence[str], leader_parents: Sequence[int]) -> Topology:
    """Return a star on every host with the given tree between the leaders of the hosts."""
    leaders = host_leaders(hosts)
    leader_of = {hosts[leader]: leader for leader in leaders}
    parents = [leader_of[host] for host in hosts]
    for leader, parent in zip(leaders, leader_parents, strict=True):
        parents[leader] = parent
    return tree(parents)


# --- trees ---


def tree(forest: Sequence[int]) -> Topology:
    """Return the topology that uses one tree, given as a forest array, in both directions.

    Raises:
        ConfigError: a parent is not a rank, the parents form a cycle, or there is not exactly one root.
    """
    parents = check_forest(forest)
    roots = [i for i, parent in enumerate(parents) if i == parent]
    if len(roots) != 1:
        raise ConfigError(f"forest {list(forest)} has {len(roots)} roots {roots}: exactly one rank is its own parent")
    return Topology(parents, parents)


def check_forest(forest: Sequence[int]) -> Forest:
    """Return `forest` as a tuple.

    Raises:
        ConfigError: a parent is not a rank, or the parents form a cycle.
    """
    parents = tuple(int(parent) for parent in forest)
    for start, parent in enumerate(parents):
        if not 0 <= parent < len(parents):
            raise ConfigError(
                f"forest {list(forest)}: parent {parent} of rank {start} is not a rank below {len(parents)}"
            )
    for start in range(len(parents)):
        rank, steps = start, 0
        while parents[rank] != rank:
            rank, steps = parents[rank], steps + 1
            if steps > len(parents):
                raise ConfigError(f"forest {list(forest)}: the parents of rank {start} form a cycle without a root")
    return parents


def reroot(forest: Forest, root: int) -> Forest:
    """Return the same tree with another root: the path from `root` to the old root is reversed."""
    parents = list(forest)
    rank, parent = root, root
    while True:
        above = forest[rank]
        parents[rank] = parent
        if above == rank:
            return tuple(parents)
        rank, parent = above, rank


def star(size: int, root: int = 0) -> Topology:
    """Return the topology in which every rank exchanges with `root` directly."""
    return tree([root] * size)


def ring(size: int, root: int, step: int = 1) -> Topology:
    """Return a ring: partial sums go round in direction `step` and end at `root`; the result continues from there."""
    reduce_to = tuple(root if i == root else (i + step) % size for i in range(size))
    bcast_from = tuple(root if i == root else (i - step) % size for i in range(size))
    return Topology(reduce_to, bcast_from)


def minimum_spanning_tree(weights: Sequence[Sequence[float]]) -> tuple[Edge, ...]:
    """Return the lightest tree over all ranks: Prim from rank 0 on the symmetrised weights, ties to lower ranks."""
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
    """Return the forest array of an undirected tree with the given root."""
    near: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for i, j in edges:
        near[i].append(j)
        near[j].append(i)
    parents, todo = list(range(size)), [root]
    seen = {root}
    while todo:
        rank = todo.pop()
        for other in near[rank]:
            if other not in seen:
                seen.add(other)
                parents[other] = rank
                todo.append(other)
    return tuple(parents)
