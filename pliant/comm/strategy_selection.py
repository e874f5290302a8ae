"""Selection of a strategy by the measured rates of the links between the workers. Pure: rates in, a strategy out.

The time of an all-reduce is predicted from the bytes that each link and each host has to send and receive; the busiest
one decides. The bytes follow from the topology and from the order of summation, as in `comm.plan`, but without
slices, so that dozens of topologies can be compared in a moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pliant.comm.order import even_partition, operands_of_ranks, tree_fold
from pliant.comm.topology import (
    Forest,
    Strategy,
    Topology,
    forest_of_edges,
    host_leaders,
    minimum_spanning_tree,
    reroot,
)

Rates = Sequence[Sequence[float]]
"""Bytes per second from rank i to rank j."""
NAMES = ("MULTI_STAR", "RING", "TREE", "BINARY_TREE_STAR", "MULTI_BINARY_TREE_STAR", "STAR", "CLIQUE", "BINARY_TREE")
SLICE_BYTES = 1 << 20
SAME = 1.02
"""Predicted times that differ by less than this factor count as equal."""
MAX_ROOTS = 8
"""Only this many of the best hosts are tried as roots."""
MAX_TREE_HOSTS = 48
"""With more hosts, trees along the best links are not searched: it would take seconds."""
MAX_CLIMB_HOSTS = 12
"""Up to this many hosts, trees are improved host by host."""


@dataclass(frozen=True)
class Network:
    """The workers, their hosts, and the rate of each link between them."""

    hosts: tuple[str, ...]
    """The host of each rank."""
    rates: Rates
    replicas: int = 0
    """The number of replicas in total; 0 means one per worker."""
    order: str = "ddp"
    """How their values are added: ddp or tree."""

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return host_leaders(self.hosts)

    @cached_property
    def place(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        number = {self.hosts[leader]: index for index, leader in enumerate(self.leaders)}
        return tuple(number[host] for host in self.hosts)

    @cached_property
    def links(self) -> tuple[tuple[float, ...], ...]:
        """Bytes per second from host to host, at least 1, so that no predicted time is infinite."""
        return tuple(tuple(max(1.0, self.rates[a][b]) for b in self.leaders) for a in self.leaders)

    @cached_property
    def egress(self) -> tuple[float, ...]:
        """The rate at which each host can send: the mean of the better half of its links."""
        return tuple(_upper_mean([rate for j, rate in enumerate(row) if j != i]) for i, row in enumerate(self.links))

    @cached_property
    def ingress(self) -> tuple[float, ...]:
        """The rate at which each host can receive."""
        size = len(self.leaders)
        return tuple(_upper_mean([self.links[i][j] for i in range(size) if i != j]) for j in range(size))

    @cached_property
    def best_first(self) -> tuple[int, ...]:
        """The numbers of the hosts, those that can send and receive fastest first."""
        able = [min(out, into) for out, into in zip(self.egress, self.ingress, strict=True)]
        return tuple(sorted(range(len(able)), key=lambda host: (-able[host], host)))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The replicas of each rank as a bit mask."""
        ranges = even_partition(self.num_replicas, len(self.hosts))
        return tuple(sum(1 << replica for replica in range(*each)) for each in ranges)

    @property
    def num_replicas(self) -> int:
        return max(self.replicas, len(self.hosts))


def _upper_mean(rates: Sequence[float]) -> float:
    """Return the mean of the better half, which limits of single peers and single errors affect little."""
    if not rates:
        return 1.0
    half = sorted(rates)[len(rates) // 2 :]
    return sum(half) / len(half)


def operands_up(tree: Topology, network: Network, chunks: Sequence[int]) -> list[float]:
    """Return the number of operands that each rank hands to its parent, averaged over these chunks of gloo's order.

    Only the beginning of a chunk's chain of summation can be folded on the way, as far as it lies in one subtree.
    """
    inside = list(network.blocks)
    for rank in _leaves_first(tree.reduce_to):
        inside[tree.reduce_to[rank]] |= inside[rank]
    parents = {parent for rank, parent in enumerate(tree.reduce_to) if parent != rank}
    found = []
    for rank, replicas in enumerate(inside):
        size = replicas.bit_count()
        read_in_place = rank not in parents and network.hosts[rank] == network.hosts[tree.reduce_to[rank]]
        if size == 1 or read_in_place:
            found.append(float(size))
        else:
            folded = sum(max(0, _prefix(chunk, replicas, network.num_replicas) - 1) for chunk in chunks)
            found.append(size - folded / len(chunks))
    return found


def _prefix(chunk: int, replicas: int, num_replicas: int) -> int:
    """Return how many replicas at the beginning of the chunk's chain (`comm.order.chain`) are in `replicas`."""
    length = 0
    while length < num_replicas and replicas >> (chunk - 1 - length) % num_replicas & 1:
        length += 1
    return length


def _leaves_first(parents: Forest) -> list[int]:
    """Return all ranks, each before its parent."""
    children: dict[int, list[int]] = defaultdict(list)
    root = -1
    for rank, parent in enumerate(parents):
        if rank == parent:
            root = rank
        else:
            children[parent].append(rank)
    order = [root]
    for rank in order:
        order.extend(children[rank])
    return order[::-1]


Lane = tuple[float, Topology, list[float]]
"""Share of the tensor, topology, and the number of operands that each rank hands up on it."""


def lanes(strategy: Strategy, network: Network) -> list[Lane]:
    """Return each topology of the strategy that has a share of the tensor."""
    trees = strategy.topologies(network.hosts, network.order)
    replicas = network.num_replicas
    if network.order == "tree":
        parts = [end - begin for begin, end in even_partition(replicas, len(network.hosts))]
        own = operands_of_ranks(parts, "tree")
        ranks = range(len(network.hosts))
        return [
            (1 / len(trees), tree, [float(len(tree_fold(tree, own, rank).result)) for rank in ranks]) for tree in trees
        ]
    chunks_of: list[list[int]] = [[] for _ in trees]
    for chunk in range(replicas):
        chunks_of[chunk * len(trees) // replicas].append(chunk)
    return [
        (len(chunks) / replicas, tree, operands_up(tree, network, chunks))
        for tree, chunks in zip(trees, chunks_of, strict=True)
        if chunks
    ]


def traffic(each_lane: Sequence[Lane]) -> dict[tuple[int, int], float]:
    """Return the bytes from rank to rank for each byte of a tensor that is all-reduced."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for share, tree, ups in each_lane:
        for rank, parent in enumerate(tree.reduce_to):
            if parent != rank:
                sent[rank, parent] += share * ups[rank]
        for rank, parent in enumerate(tree.bcast_from):
            if parent != rank:
                sent[parent, rank] += share
    return sent


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time and load of an all-reduce."""

    seconds: float
    """Time until the busiest link or host is done and the last slice has passed."""
    load: float
    """The mean square of the seconds for which each host is busy; lower is more even."""


def predict(strategy: Strategy, network: Network, num_bytes: float) -> Prediction:
    """Predict an all-reduce of `num_bytes`.

    The links of a host share the rate of the host; links within a host cost nothing.
    """
    each_lane = lanes(strategy, network)
    place, links = network.place, network.links
    out, into, between = [0.0] * len(links), [0.0] * len(links), dict[tuple[int, int], float]()
    for (source, target), share in traffic(each_lane).items():
        i, j = place[source], place[target]
        if i != j:
            out[i] += share
            into[j] += share
            between[i, j] = between.get((i, j), 0.0) + share
    hosts = [share / rate for share, rate in zip(out, network.egress, strict=True)]
    hosts += [share / rate for share, rate in zip(into, network.ingress, strict=True)]
    busiest = max(hosts + [share / links[i][j] for (i, j), share in between.items()])
    seconds = busiest * num_bytes + max(_slice_s(lane, network, num_bytes) for lane in each_lane)
    return Prediction(seconds, sum((busy * num_bytes) ** 2 for busy in hosts) / len(hosts))


def predict_s(strategy: Strategy, network: Network, num_bytes: float) -> float:
    """Predict the seconds of an all-reduce of `num_bytes`."""
    return predict(strategy, network, num_bytes).seconds


def _slice_s(lane: Lane, network: Network, num_bytes: float) -> float:
    """Return the seconds that one slice takes up the tree and down again."""
    share, tree, ups = lane
    order = _leaves_first(tree.reduce_to)
    up = [0.0] * tree.size
    for rank in order:
        parent = tree.reduce_to[rank]
        up[parent] = max(up[parent], up[rank] + ups[rank] * _cost(network, rank, parent))
    down = [0.0] * tree.size
    for rank in reversed(order if tree.bcast_from == tree.reduce_to else _leaves_first(tree.bcast_from)):
        parent = tree.bcast_from[rank]
        down[rank] = down[parent] + _cost(network, parent, rank)
    return min(SLICE_BYTES, share * num_bytes) * (max(up) + max(down))


def _cost(network: Network, source: int, target: int) -> float:
    """Return the seconds per byte from `source` to `target`."""
    a, b = network.place[source], network.place[target]
    return 0.0 if a == b else 1 / network.links[a][b]


# --- candidates ---
def candidates(network: Network) -> Iterator[Strategy]:
    """Yield named strategies, stars and shared stars on the best hosts, and trees along the best links."""
    yield from map(Strategy, NAMES)
    size, best = len(network.leaders), network.best_first
    if size < 2:
        return
    for count in sorted({size - 1, size - 2, size - 3, size - 4, 3 * size // 4, size // 2, 2}, reverse=True):
        if 2 <= count < size:
            yield Strategy("MULTI_STAR@" + ",".join(str(network.leaders[host]) for host in sorted(best[:count])))
    for root in best[:MAX_ROOTS]:
        yield _over_hosts((root,) * size, network)
    if size > MAX_TREE_HOSTS:
        return
    heap = list(range(size))
    for position, host in enumerate(best):
        heap[host] = best[max(0, (position - 1) // 2)]
    yield _over_hosts(tuple(heap), network)
    edges = minimum_spanning_tree(
        [[-min(network.links[i][j], network.links[j][i]) for j in range(size)] for i in range(size)]
    )
    for root in best[:MAX_ROOTS]:
        yield _over_hosts(forest_of_edges(edges, size, root), network)


def _over_hosts(parents: Forest, network: Network) -> Strategy:
    """Return the strategy with this tree between hosts, given as parents of host numbers, and a star on each host."""
    forest = [network.leaders[place] for place in network.place]
    for host, parent in enumerate(parents):
        forest[network.leaders[host]] = network.leaders[parent]
    return Strategy("FOREST", tuple(forest))


def climb(start: Strategy, network: Network, num_bytes: float) -> Strategy:
    """Improve a tree as long as moving one host to another parent, or choosing another root, makes it faster."""
    leaders, size = network.leaders, len(network.leaders)
    parents = tuple(network.place[start.forest[leader]] for leader in leaders)
    found_s = predict_s(start, network, num_bytes)
    while True:
        near = {reroot(parents, root) for root in range(size)}
        for host in range(size):
            if parents[host] != host:
                below = _below(parents, host)
                near |= {(*parents[:host], other, *parents[host + 1 :]) for other in range(size) if other not in below}
        timed = sorted((predict_s(_over_hosts(other, network), network, num_bytes), other) for other in near)
        if not timed or timed[0][0] >= found_s / 1.001:
            return _over_hosts(parents, network)
        found_s, parents = timed[0]


def _below(parents: Forest, top: int) -> set[int]:
    """Return `top` and all its descendants."""
    found = set()
    for host in range(len(parents)):
        path = [host]
        while path[-1] != top and parents[path[-1]] != path[-1]:
            path.append(parents[path[-1]])
        if path[-1] == top:
            found.update(path)
    return found


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The chosen strategy, with its predicted time and that of the present one."""

    strategy: Strategy
    predicted_s: float
    present_s: float


def choose(
    network: Network, num_bytes: float, present: Strategy, *, preferred: Sequence[Strategy] = (), margin: float = 0.15
) -> StrategyChoice:
    """Return the strategy with the least predicted time; the present one, unless another is faster by `margin`.

    Of equals the `preferred` come first, then the one that spreads the load best: if a slow host decides in any case,
    the others need not be as busy.
    """
    present_s = predict_s(present, network, num_bytes)
    listed: dict[tuple[Topology, ...], Strategy] = {}
    for each in (*preferred, *candidates(network)):
        listed.setdefault(each.topologies(network.hosts, network.order), each)
    timed = [(each, predict(each, network, num_bytes)) for each in listed.values()]
    if 3 <= len(network.leaders) <= MAX_CLIMB_HOSTS:
        start = min((each for each in timed if each[0].forest), key=lambda each: each[1].seconds, default=None)
        climbed = climb(start[0], network, num_bytes) if start is not None else timed[0][0]
        timed.append((climbed, predict(climbed, network, num_bytes)))
    least_s = min(found.seconds for _, found in timed)
    strategy, found = min(
        (each for each in timed if each[1].seconds <= least_s * SAME),
        key=lambda each: (each[0] not in preferred, each[1].load),
    )
    if present_s <= found.seconds * (1 + margin):
        return StrategyChoice(present, present_s, present_s)
    return StrategyChoice(strategy, found.seconds, present_s)


def is_faster(one: Strategy, other: Strategy, network: Network, num_bytes: float, margin: float) -> bool:
    """Return whether `one` is predicted to be faster than `other` by more than `margin`."""
    return predict_s(one, network, num_bytes) * (1 + margin) < predict_s(other, network, num_bytes)
