"""Choosing a topology by what the links between the workers carry now. Pure: rates in, a strategy out.

The time of an all-reduce is predicted from the bytes that each link and each host has to send and receive: the busiest
one decides. How many bytes travel where follows from the topology and from the exact order of summation, as in
`comm.plan`, but without slices, so that dozens of topologies can be compared in a moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pliant.comm.order import even_partition
from pliant.comm.topology import (
    Forest,
    Strategy,
    Topology,
    forest_of_edges,
    masters,
    minimum_spanning_tree,
    rerooted,
)

Rates = Sequence[Sequence[float]]
"""Bytes per second from rank i to rank j."""
NAMES = ("MULTI_STAR", "RING", "TREE", "BINARY_TREE_STAR", "MULTI_BINARY_TREE_STAR", "STAR", "CLIQUE", "BINARY_TREE")
SLICE_BYTES = 1 << 20
SAME = 1.02
"""Times that differ by less are equal."""
MOST_ROOTS = 8
"""Of many hosts, only the best are tried as roots."""
MOST_TREES = 48
"""With more hosts than that, trees whose links differ are not looked for: it would take seconds."""
MOST_CLIMBED = 12
"""Up to so many hosts, trees are improved host by host."""


@dataclass(frozen=True)
class Network:
    """Workers on hosts, and how fast each link between them is."""

    hosts: tuple[str, ...]
    """Of each rank."""
    rates: Rates
    replicas: int = 0
    """In all; 0: one per worker."""
    exact: bool = True

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return masters(self.hosts)

    @cached_property
    def place(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        number = {self.hosts[head]: index for index, head in enumerate(self.heads)}
        return tuple(number[host] for host in self.hosts)

    @cached_property
    def links(self) -> tuple[tuple[float, ...], ...]:
        """Bytes per second from host to host. Nothing passes at less than a byte per second: no time is infinite."""
        return tuple(tuple(max(1.0, self.rates[a][b]) for b in self.heads) for a in self.heads)

    @cached_property
    def egress(self) -> tuple[float, ...]:
        """What each host can send: as much as the better half of its links have shown."""
        return tuple(_better([rate for j, rate in enumerate(row) if j != i]) for i, row in enumerate(self.links))

    @cached_property
    def ingress(self) -> tuple[float, ...]:
        """What each host can receive."""
        size = len(self.heads)
        return tuple(_better([self.links[i][j] for i in range(size) if i != j]) for j in range(size))

    @cached_property
    def best_first(self) -> tuple[int, ...]:
        """The hosts' numbers, those that can send and receive most first."""
        able = [min(out, into) for out, into in zip(self.egress, self.ingress, strict=True)]
        return tuple(sorted(range(len(able)), key=lambda host: (-able[host], host)))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The replicas of each rank, as bits."""
        ranges = even_partition(self.num_replicas, len(self.hosts))
        return tuple(sum(1 << replica for replica in range(*each)) for each in ranges)

    @property
    def num_replicas(self) -> int:
        return max(self.replicas, len(self.hosts))


def _better(rates: Sequence[float]) -> float:
    """The mean of the better half: the peers' own limits do not matter, and single errors little."""
    if not rates:
        return 1.0
    half = sorted(rates)[len(rates) // 2 :]
    return sum(half) / len(half)


def operands_up(tree: Topology, network: Network, chunks: Sequence[int]) -> list[float]:
    """How many operands each rank hands to its father, on average over these chunks of the exact order.

    Of a chunk's chain of summation, only the beginning can be folded on the way: as far as it lies in one subtree.
    """
    inside = list(network.blocks)
    for rank in _leaves_first(tree.reduce_to):
        inside[tree.reduce_to[rank]] |= inside[rank]
    fathers = {father for rank, father in enumerate(tree.reduce_to) if father != rank}
    found = []
    for rank, replicas in enumerate(inside):
        size = replicas.bit_count()
        read_in_place = rank not in fathers and network.hosts[rank] == network.hosts[tree.reduce_to[rank]]
        if not network.exact:
            found.append(1.0)
        elif size == 1 or read_in_place:
            found.append(float(size))
        else:
            folded = sum(max(0, _prefix(chunk, replicas, network.num_replicas) - 1) for chunk in chunks)
            found.append(size - folded / len(chunks))
    return found


def _prefix(chunk: int, replicas: int, num_replicas: int) -> int:
    """How much of the chunk's chain (`comm.order.chain`) lies in `replicas` before the first one that does not."""
    length = 0
    while length < num_replicas and replicas >> (chunk - 1 - length) % num_replicas & 1:
        length += 1
    return length


def _leaves_first(fathers: Forest) -> list[int]:
    """All ranks, each before its father."""
    children: dict[int, list[int]] = defaultdict(list)
    root = -1
    for rank, father in enumerate(fathers):
        if rank == father:
            root = rank
        else:
            children[father].append(rank)
    order = [root]
    for rank in order:
        order.extend(children[rank])
    return order[::-1]


Lane = tuple[float, Topology, list[float]]
"""A topology with its share of the tensor, and the operands that each rank hands up on it."""


def lanes(strategy: Strategy, network: Network) -> list[Lane]:
    """Each topology of the strategy that has a share."""
    trees = strategy.topologies(network.hosts, network.exact)
    if not network.exact:
        return [(1 / len(trees), tree, operands_up(tree, network, (0,))) for tree in trees]
    replicas = network.num_replicas
    chunks_of: list[list[int]] = [[] for _ in trees]
    for chunk in range(replicas):
        chunks_of[chunk * len(trees) // replicas].append(chunk)
    return [
        (len(chunks) / replicas, tree, operands_up(tree, network, chunks))
        for tree, chunks in zip(trees, chunks_of, strict=True)
        if chunks
    ]


def traffic(each_lane: Sequence[Lane]) -> dict[tuple[int, int], float]:
    """Bytes from rank to rank for each byte of a tensor that is all-reduced."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for share, tree, ups in each_lane:
        for rank, father in enumerate(tree.reduce_to):
            if father != rank:
                sent[rank, father] += share * ups[rank]
        for rank, father in enumerate(tree.bcast_from):
            if father != rank:
                sent[father, rank] += share
    return sent


@dataclass(frozen=True, slots=True)
class Prediction:
    """An all-reduce that has not taken place."""

    seconds: float
    """Until the busiest link or host is done, and the last slice through."""
    load: float
    """How unevenly the hosts are busy: the mean square of the seconds of each."""


def predict(strategy: Strategy, network: Network, num_bytes: float) -> Prediction:
    """How long an all-reduce of `num_bytes` takes.

    A host's links share what one of them can carry; links within a host cost nothing.
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
    """Only the time of it."""
    return predict(strategy, network, num_bytes).seconds


def _slice_s(lane: Lane, network: Network, num_bytes: float) -> float:
    """How long one slice is on its way up and down again."""
    share, tree, ups = lane
    order = _leaves_first(tree.reduce_to)
    up = [0.0] * tree.size
    for rank in order:
        father = tree.reduce_to[rank]
        up[father] = max(up[father], up[rank] + ups[rank] * _cost(network, rank, father))
    down = [0.0] * tree.size
    for rank in reversed(order if tree.bcast_from == tree.reduce_to else _leaves_first(tree.bcast_from)):
        father = tree.bcast_from[rank]
        down[rank] = down[father] + _cost(network, father, rank)
    return min(SLICE_BYTES, share * num_bytes) * (max(up) + max(down))


def _cost(network: Network, source: int, target: int) -> float:
    """Seconds per byte."""
    a, b = network.place[source], network.place[target]
    return 0.0 if a == b else 1 / network.links[a][b]


# --- candidates ---
def candidates(network: Network) -> Iterator[Strategy]:
    """What is worth a look: the named strategies, stars and shared stars on the best hosts, and trees along the best links."""
    yield from map(Strategy, NAMES)
    size, best = len(network.heads), network.best_first
    if size < 2:
        return
    for count in sorted({size - 1, size - 2, size - 3, size - 4, 3 * size // 4, size // 2, 2}, reverse=True):
        if 2 <= count < size:
            yield Strategy("MULTI_STAR@" + ",".join(str(network.heads[host]) for host in sorted(best[:count])))
    for root in best[:MOST_ROOTS]:
        yield _over_hosts((root,) * size, network)
    if size > MOST_TREES:
        return
    heap = list(range(size))
    for position, host in enumerate(best):
        heap[host] = best[max(0, (position - 1) // 2)]
    yield _over_hosts(tuple(heap), network)
    edges = minimum_spanning_tree(
        [[-min(network.links[i][j], network.links[j][i]) for j in range(size)] for i in range(size)]
    )
    for root in best[:MOST_ROOTS]:
        yield _over_hosts(forest_of_edges(edges, size, root), network)


def _over_hosts(fathers: Forest, network: Network) -> Strategy:
    """A tree of hosts, given by the fathers of their numbers, with a star on each."""
    forest = [network.heads[place] for place in network.place]
    for host, father in enumerate(fathers):
        forest[network.heads[host]] = network.heads[father]
    return Strategy("FOREST", tuple(forest))


def climb(start: Strategy, network: Network, num_bytes: float) -> Strategy:
    """The best tree that can be reached from a tree by hanging one host after the other elsewhere, or by another root."""
    heads, size = network.heads, len(network.heads)
    fathers = tuple(network.place[start.forest[head]] for head in heads)
    found_s = predict_s(start, network, num_bytes)
    while True:
        near = {rerooted(fathers, root) for root in range(size)}
        for host in range(size):
            if fathers[host] != host:
                below = _below(fathers, host)
                near |= {(*fathers[:host], other, *fathers[host + 1 :]) for other in range(size) if other not in below}
        timed = sorted((predict_s(_over_hosts(other, network), network, num_bytes), other) for other in near)
        if not timed or timed[0][0] >= found_s / 1.001:
            return _over_hosts(fathers, network)
        found_s, fathers = timed[0]


def _below(fathers: Forest, top: int) -> set[int]:
    """`top`, and whoever reaches it going up."""
    found = set()
    for host in range(len(fathers)):
        path = [host]
        while path[-1] != top and fathers[path[-1]] != path[-1]:
            path.append(fathers[path[-1]])
        if path[-1] == top:
            found.update(path)
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The best topology, and what it is better than."""

    strategy: Strategy
    predicted_s: float
    present_s: float
    """What the present one would take."""

    @property
    def gain(self) -> float:
        """How much faster than the present one: 0.5 is half as fast again."""
        return self.present_s / self.predicted_s - 1 if self.predicted_s > 0 else 0.0


def choose(
    network: Network, num_bytes: float, present: Strategy, *, preferred: Sequence[Strategy] = (), margin: float = 0.15
) -> Choice:
    """The strategy that is predicted to be fastest; the present one, unless another is so by more than `margin`.

    Of equals, the `preferred` are taken first, then the one that spreads the load best: where a slow host decides
    in any case, the others need not be as busy.
    """
    present_s = predict_s(present, network, num_bytes)
    listed: dict[tuple[Topology, ...], Strategy] = {}
    for each in (*preferred, *candidates(network)):
        listed.setdefault(each.topologies(network.hosts, network.exact), each)
    timed = [(each, predict(each, network, num_bytes)) for each in listed.values()]
    if 3 <= len(network.heads) <= MOST_CLIMBED:
        start = min((each for each in timed if each[0].forest), key=lambda each: each[1].seconds, default=None)
        climbed = climb(start[0], network, num_bytes) if start is not None else timed[0][0]
        timed.append((climbed, predict(climbed, network, num_bytes)))
    least_s = min(found.seconds for _, found in timed)
    strategy, found = min(
        (each for each in timed if each[1].seconds <= least_s * SAME),
        key=lambda each: (each[0] not in preferred, each[1].load),
    )
    if present_s <= found.seconds * (1 + margin):
        return Choice(present, present_s, present_s)
    return Choice(strategy, found.seconds, present_s)


def is_faster(one: Strategy, other: Strategy, network: Network, num_bytes: float, margin: float) -> bool:
    """Whether `one` is predicted to be faster than `other` by more than `margin`."""
    return predict_s(one, network, num_bytes) * (1 + margin) < predict_s(other, network, num_bytes)
