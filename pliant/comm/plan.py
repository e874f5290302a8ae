"""What one rank does for one collective: for each slice, whom it hears, what it folds, whom it tells.

Pure. A `Spec` is what all ranks must agree on; `make_plan` turns it, together with a strategy and
the hosts, into this rank's steps. Every rank derives the same slices and topologies from the same
spec, so no rank ever has to ask another what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pliant.comm import graph, order
from pliant.comm.graph import Forest, Topology
from pliant.comm.order import Fold, Term
from pliant.comm.slices import (
    WHOLE_BYTES,
    WHOLE_SHARED_BYTES,
    Portion,
    Slice,
    cut,
    cut_exact,
    cut_portion,
    even_partition,
)

Channel = tuple[str, str, tuple[int, ...]]
"""Kind, name and members: what successive collectives under one name have in common."""

KINDS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather")


@dataclass(frozen=True, slots=True)
class Spec:
    """A collective as all ranks must see it. Ranks are those of the view."""

    kind: str
    name: str
    members: tuple[int, ...]
    """Who takes part, in ascending order."""
    dtype: str
    length: int
    """Elements in one rank's tensor."""
    op: str
    exact: bool
    """Whether the sum has the order of `comm.order`."""
    root: int
    """For reduce, broadcast and gather: the rank at the centre; else -1."""
    parts: tuple[int, ...] = ()
    """How many contributions each member brings (its replicas); empty means one each."""
    portion: Portion | None = None
    """For an all_reduce or a reduce: which run of which larger tensor this is, if it is one."""

    @property
    def channel(self) -> Channel:
        """What successive collectives under one name have in common, whatever their shapes."""
        return self.kind, self.name, self.members


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
                return (graph.tree(self.forest),)
            return graph.topologies("AUTO", hosts)
        if exact and self.name.upper() == "RING":
            # gloo's chain descends through the ranks. A ring that descends as well may fold at
            # every hop; one that ascends would have to carry every operand to its end.
            return tuple(graph.ring(len(hosts), root, step=-1) for root in range(len(hosts)))
        return graph.topologies(self.name, hosts)


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part in one slice. Elements [begin, end) of the whole; peers are ranks of the view."""

    begin: int
    end: int
    children: tuple[tuple[int, int], ...]
    """Who sends operands, and how many each."""
    folds: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(low, high, operands in order) relative to `begin`: acc = first; acc = next + acc; ..."""
    passed_on: tuple[int, ...]
    up: int | None
    """Who gets the outcome; None at the root, and where nothing is reduced."""
    source: int | None
    """From whom the result comes; None where it is already here."""
    listeners: tuple[int, ...]
    """Whom to tell the result."""
    reduces: bool
    """Whether there is a phase of reduction at all."""
    lane: int = 0
    """The number of the topology it travels on."""
    offered: tuple[int, ...] = ()
    """Children whose operands are read in place, from the memory they offered with the whole tensor."""
    offers: bool = False
    """Whether this rank's own operands are read in place: it has nothing to send up."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def num_up(self) -> int:
        """How many operands go up."""
        return bool(self.folds) + len(self.passed_on)


@dataclass(frozen=True, slots=True)
class Plan:
    """This rank's steps, by the index of the slice; a slice it has no part in is absent."""

    steps: Mapping[int, Step]
    out_length: int
    """Elements in the tensor that the steps' ranges refer to."""

    def egress(self, item_bytes: int) -> Counter[int]:
        """Payload bytes that this rank sends to each peer: the proof of what travels."""
        sent: Counter[int] = Counter()
        for step in self.steps.values():
            if step.up is not None:
                sent[step.up] += step.num_up * step.length * item_bytes
            for listener in step.listeners:
                sent[listener] += step.length * item_bytes
        return sent


def make_plan(
    spec: Spec, rank: int, hosts: Sequence[str], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> Plan:
    """The plan of `rank`, one of `spec.members`; `hosts` holds the host of every rank of the view."""
    me = spec.members.index(rank)
    member_hosts = tuple(hosts[member] for member in spec.members)
    if strategy.names_ranks and len(spec.members) < len(hosts):
        strategy = Strategy()
    match spec.kind:
        case "all_reduce" | "reduce":
            return _reducing(spec, me, member_hosts, strategy, item_bytes, slice_bytes)
        case "broadcast":
            return _broadcasting(spec, me, member_hosts, strategy, item_bytes, slice_bytes)
        case "gather" | "all_gather":
            return _gathering(spec, me, item_bytes, slice_bytes)
    raise AssertionError(f"no such kind of collective: {spec.kind}")


def _reducing(
    spec: Spec, me: int, hosts: tuple[str, ...], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> Plan:
    blocks = _blocks(spec)
    num_replicas = sum(map(len, blocks))
    trees = strategy.topologies(hosts, spec.exact)
    if spec.kind == "reduce":
        trees = (_rooted(trees, spec.members.index(spec.root)),)
    whole_bytes = min(slice_bytes, WHOLE_SHARED_BYTES if len(set(hosts)) == 1 else WHOLE_BYTES)
    if spec.portion is not None:
        slices = cut_portion(spec.portion, spec.length, item_bytes, len(trees), num_replicas if spec.exact else None)
    elif spec.exact:
        slices = cut_exact(spec.name, spec.length, item_bytes, len(trees), slice_bytes, num_replicas, whole_bytes)
    else:
        slices = cut(spec.name, spec.length, item_bytes, len(trees), slice_bytes, whole_bytes)
    whole, offset = (spec.portion.whole, spec.portion.begin) if spec.portion is not None else (spec.length, 0)
    borders = order.chunk_length(whole, item_bytes, num_replicas)
    steps = {}
    for index, piece in enumerate(slices):
        tree = trees[piece.lane]
        raw = _read_in_place(tree, hosts)
        fold, folds = _folding(spec, tree, blocks, raw, me, piece, borders, offset)
        steps[index] = Step(
            begin=piece.begin,
            end=piece.end,
            children=_children(spec, tree, blocks, raw, me, piece),
            folds=folds,
            passed_on=fold.passed_on if tree.reduce_to[me] != me or not folds else (),
            up=None if tree.reduce_to[me] == me else spec.members[tree.reduce_to[me]],
            source=None if tree.bcast_from[me] == me or spec.kind == "reduce" else spec.members[tree.bcast_from[me]],
            listeners=_listeners(spec, tree, me) if spec.kind == "all_reduce" else (),
            reduces=True,
            lane=piece.lane,
            offered=tuple(spec.members[child] for child in tree.children(me) if child in raw),
            offers=me in raw,
        )
    return Plan(steps, spec.length)


def _rooted(trees: Sequence[Topology], root: int) -> Topology:
    """The topology that has this root, or else the first one hung up there."""
    tree = next((tree for tree in trees if tree.bcast_from[root] == root), trees[0])
    fathers = graph.rerooted(tree.bcast_from, root)
    return Topology(fathers, fathers)


@lru_cache(maxsize=1024)
def _read_in_place(tree: Topology, hosts: tuple[str, ...]) -> frozenset[int]:
    """The leaves whose father is on the same host."""
    fathers = set(tree.reduce_edges)
    inner = {father for _, father in fathers}
    return frozenset(leaf for leaf, father in fathers if leaf not in inner and hosts[leaf] == hosts[father])


def _blocks(spec: Spec) -> tuple[Term, ...]:
    """The replicas of each member: contiguous, in the order of ranks."""
    blocks, first = [], 0
    for count in spec.parts or (1,) * len(spec.members):
        blocks.append(tuple(range(first, first + count)))
        first += count
    return tuple(blocks)


def _fold(
    spec: Spec, tree: Topology, blocks: tuple[Term, ...], raw: frozenset[int], who: int, chunk: int | None
) -> Fold:
    if not spec.exact:
        return order.fast_fold(tree, blocks, raw, who)
    if chunk is None:
        return order.carrying_fold(tree, blocks, who)
    return order.exact_fold(tree, blocks, raw, who, chunk)


Folds = tuple[tuple[int, int, tuple[int, ...]], ...]


def _folding(
    spec: Spec,
    tree: Topology,
    blocks: tuple[Term, ...],
    raw: frozenset[int],
    me: int,
    piece: Slice,
    borders: int,
    offset: int,
) -> tuple[Fold, Folds]:
    """What is folded here, with the ranges it is folded over; chunks are counted from `offset` elements before."""
    fold = _fold(spec, tree, blocks, raw, me, piece.chunk)
    if spec.exact and piece.chunk is None and tree.reduce_to[me] == me and len(fold.operands) > 1:
        first = offset + piece.begin
        pieces = order.chunks_between(first, offset + piece.end, borders)
        return fold, tuple(
            (begin - first, end - first, order.fold_order(fold.operands, chunk, len(fold.operands)))
            for begin, end, chunk in pieces
        )
    return fold, ((0, piece.length, fold.folded),) if fold.folded else ()


def _children(
    spec: Spec, tree: Topology, blocks: tuple[Term, ...], raw: frozenset[int], me: int, piece: Slice
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (spec.members[child], len(_fold(spec, tree, blocks, raw, child, piece.chunk).result))
        for child in tree.children(me)
    )


def _listeners(spec: Spec, tree: Topology, me: int) -> tuple[int, ...]:
    return tuple(spec.members[listener] for listener in tree.listeners(me))


def _broadcasting(
    spec: Spec, me: int, hosts: tuple[str, ...], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> Plan:
    root = spec.members.index(spec.root)
    trees = strategy.topologies(hosts, False)
    direct = _rooted(trees, root)
    if _crowded(direct, root, hosts) and len(trees) > 1 and spec.length * item_bytes > WHOLE_BYTES:
        # The root's link would carry the tensor once for each host. Instead everybody passes on a share of it: each
        # link carries it about twice, however many there are.
        relays = [graph.rerooted(tree.bcast_from, root) for tree in trees]
        hung = [Topology(fathers, fathers) for fathers in relays]
    else:
        hung = [direct]
    slices = cut(spec.name, spec.length, item_bytes, len(hung), slice_bytes)
    steps = {index: _telling(spec, hung[s.lane], me, s.begin, s.end) for index, s in enumerate(slices)}
    return Plan(steps, spec.length)


def _crowded(tree: Topology, root: int, hosts: Sequence[str]) -> bool:
    """Whether the root tells more than two other hosts itself."""
    return len({hosts[rank] for rank in tree.listeners(root)} - {hosts[root]}) > 2


def _gathering(spec: Spec, me: int, item_bytes: int, slice_bytes: int) -> Plan:
    """Everybody's tensor goes straight to the root, or to everybody."""
    size = len(spec.members)
    steps, index = {}, 0
    if spec.kind == "gather":
        root = spec.members.index(spec.root)
    for sender in range(size):
        fathers = [sender] * size if spec.kind == "all_gather" else list(range(size))
        if spec.kind == "gather":
            fathers[root] = sender
        tree = Topology(tuple(fathers), tuple(fathers))
        parts = max(1, -(-spec.length * item_bytes // slice_bytes)) if spec.length else 0
        for low, high in even_partition(spec.length, parts) if parts else ():
            involved = spec.kind == "all_gather" or me in (sender, root)
            if involved:
                offset = sender * spec.length
                steps[index] = _telling(spec, tree, me, offset + low, offset + high, sender)
            index += 1
    return Plan(steps, spec.length * size)


def _telling(spec: Spec, tree: Topology, me: int, begin: int, end: int, origin: int | None = None) -> Step:
    """A slice that only travels down, from the root of `tree` or from `origin`."""
    at_source = tree.bcast_from[me] == me if origin is None else me == origin
    return Step(
        begin=begin,
        end=end,
        children=(),
        folds=(),
        passed_on=(),
        up=None,
        source=None if at_source else spec.members[tree.bcast_from[me]],
        listeners=_listeners(spec, tree, me),
        reduces=False,
    )


@lru_cache(maxsize=64)
def local_ranks(hosts: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks on the host of `rank`."""
    return tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
