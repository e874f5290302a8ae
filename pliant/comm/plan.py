"""The plan of one rank for one collective: per slice, whose operands it receives, what it folds, and what it sends.

Pure: element ranges and ranks, no tensors and no sockets. A `Spec` is what all ranks must agree on. `make_plan` turns
it, together with a strategy and the hosts, into the steps of one rank. Every rank derives the same slices and
topologies from the same spec, so no rank ever has to ask another what comes next.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from pliant.comm import order
from pliant.comm.frames import TAGGED, channel_tag
from pliant.comm.order import (
    ORDERS,
    Expression,
    Fold,
    Terms,
    chunk_length,
    chunks_between,
    even_partition,
    operands_of_ranks,
)
from pliant.comm.topology import Strategy, Topology, reroot
from pliant.errors import CommError

WHOLE_BYTES = 64 << 10
"""A tensor up to this size is not cut, because a message costs more than its bytes."""
WHOLE_SHARED_BYTES = 512 << 10
"""The same limit if all ranks share memory, where bytes cost even less."""
INTERNAL = "pliant:"
"""Prefix of the names that the engine uses for collectives of its own."""


# --- slices ---


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a tensor, which travel by themselves on topology number `lane`."""

    begin: int
    end: int
    lane: int
    chunk: int | None
    """The chunk of gloo's order that contains it; None if it spans several chunks or if the order has no chunks."""

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Portion:
    """A run of a larger tensor that is reduced by itself, with slices and owners of its own.

    It is summed in the order of the larger tensor, so the bits do not depend on how the larger one is cut.
    """

    whole: int
    """The number of elements of the larger tensor."""
    begin: int
    """The first element of the run within the larger tensor."""
    lanes: tuple[int, ...]
    """The lane of each slice. The run is cut evenly into this many slices."""


def name_hash(name: str) -> int:
    """Return the sum of the squared code points: KungFu's hash of names."""
    return sum(ord(letter) ** 2 for letter in name)


def _first_lane(name: str) -> int:
    """Return a number that spreads names over lanes, equal on every rank.

    Squares are 0 or 1 modulo 4, so KungFu's hash alone would give two of four owners nearly everything.
    """
    return name_hash(name) * 2654435761 >> 15


def cut(
    name: str, num_elements: int, item_bytes: int, lanes: int, slice_bytes: int, whole_bytes: int = WHOLE_BYTES
) -> list[Slice]:
    """Cut a tensor into slices of about equal size, spread over the lanes; for orders that know no chunks."""
    if num_elements == 0:
        return []
    parts = max(1, -(-num_elements * item_bytes // slice_bytes))
    if parts < lanes and num_elements * item_bytes > whole_bytes:
        parts = min(lanes, num_elements)
    first = _first_lane(name)
    return [
        Slice(begin, end, (first + index) % lanes, None)
        for index, (begin, end) in enumerate(even_partition(num_elements, parts))
    ]


def cut_chunks(
    name: str,
    num_elements: int,
    item_bytes: int,
    lanes: int,
    slice_bytes: int,
    num_replicas: int,
    whole_bytes: int = WHOLE_BYTES,
) -> list[Slice]:
    """Cut a tensor into slices that each lie in one chunk of gloo's order; chunks are spread over the lanes.

    A small tensor stays whole and spans all its chunks. The rank that folds it folds each chunk in its own order.
    """
    if num_elements == 0:
        return []
    if num_elements * item_bytes <= whole_bytes:
        return [Slice(0, num_elements, _first_lane(name) % lanes, 0 if num_replicas == 1 else None)]
    slices = []
    for begin, end, chunk in chunks_between(0, num_elements, chunk_length(num_elements, item_bytes, num_replicas)):
        parts = max(1, -(-(end - begin) * item_bytes // slice_bytes))
        lane = chunk * lanes // num_replicas
        slices += [Slice(begin + low, begin + high, lane, chunk) for low, high in even_partition(end - begin, parts)]
    return slices


def cut_portion(
    portion: Portion, num_elements: int, item_bytes: int, lanes: int, num_replicas: int | None
) -> list[Slice]:
    """Cut a run of `num_elements` elements; `num_replicas` is None if the order knows no chunks."""
    length = chunk_length(portion.whole, item_bytes, num_replicas) if num_replicas else 0
    slices = []
    ranges = even_partition(num_elements, max(1, min(len(portion.lanes), num_elements)))
    for (begin, end), lane in zip(ranges, portion.lanes, strict=False):
        first, last = portion.begin + begin, portion.begin + end - 1
        in_one_chunk = length and first // length == last // length
        slices.append(Slice(begin, end, lane % lanes, first // length if in_one_chunk else None))
    return slices if num_elements else []


# --- specs ---

Channel = tuple[str, str, tuple[int, ...]]
"""Kind, name and members of a collective: what successive collectives under one name have in common."""

KINDS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather")


@dataclass(frozen=True, slots=True)
class Spec:
    """The description of a collective on which all ranks must agree. Ranks are those of the view."""

    kind: str
    name: str
    members: tuple[int, ...]
    """The ranks that take part, in ascending order."""
    dtype: str
    length: int
    """The number of elements in the tensor of one rank."""
    op: str
    order: str
    """How the sum is formed: one of `order.ORDERS`; "none" for collectives that reduce nothing."""
    root: int
    """The root of a reduce, broadcast or gather; -1 for other kinds."""
    parts: tuple[int, ...] = ()
    """The number of replicas of each member; empty means one each."""
    portion: Portion | None = None
    """For an all_reduce or reduce of a run of a larger tensor: which run it is."""

    @property
    def operands(self) -> tuple[Terms, ...]:
        """The operands of each member, with the replicas in each."""
        return operands_of_ranks(self.parts or (1,) * len(self.members), self.order)

    @property
    def channel(self) -> Channel:
        """The key that successive collectives under one name share, whatever their shapes."""
        return self.kind, self.name, self.members

    def pack(self) -> bytes:
        """Return the spec as the payload of a DEFINE frame."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Spec:
        """Return the spec that `pack` wrote.

        Raises:
            CommError: `payload` is not a spec.
        """
        try:
            kind, name, members, dtype, length, op, asked, root, parts, run = json.loads(payload)
            portion = Portion(int(run[0]), int(run[1]), tuple(map(int, run[2]))) if run is not None else None
            sizes = int(length), op, str(asked), int(root), tuple(parts), portion
            spec = cls(kind, name, tuple(members), dtype, *sizes)
        except (ValueError, TypeError, IndexError) as error:
            raise CommError(f"a peer sent a damaged description of a collective: {error}") from None
        if spec.kind not in KINDS:
            raise CommError(f"a peer asked for an unknown collective {spec.kind!r}: do all run the same version?")
        if spec.order not in (*ORDERS, "none"):
            raise CommError(f"a peer asked for an unknown order {spec.order!r}: do all run the same version?")
        return spec


# --- plans ---


RangedSum = tuple[tuple[int, int, Expression], ...]
"""A sum whose order differs from range to range: (low, high, expression), relative to the slice's beginning."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    """The part of one rank in one slice: elements [begin, end) of the whole. Peers are ranks of the view."""

    begin: int
    end: int
    children: tuple[tuple[int, int], ...]
    """The ranks that send operands, and the number of operands of each."""
    sums: tuple[RangedSum, ...]
    """The sums that are formed here; one at the root."""
    passed_on: tuple[int, ...]
    """The operands that are forwarded as they are, after the sums."""
    up: int | None
    """The rank that gets the sums and the forwarded operands; None at the root and if nothing is reduced."""
    source: int | None
    """The rank that sends the result; None if the result is computed or present here."""
    listeners: tuple[int, ...]
    """The ranks to which this rank sends the result."""
    reduces: bool
    """Whether the collective has a reduction phase."""
    lane: int = 0
    """The number of the topology that the slice uses."""
    offered: tuple[int, ...] = ()
    """The children whose operands are read in place, from the memory that they offered for the whole tensor."""
    offers: bool = False
    """Whether the parent reads this rank's operands in place."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def num_up(self) -> int:
        """The number of operands that go up."""
        return len(self.sums) + len(self.passed_on)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The steps of one rank by the index of the slice. A slice in which the rank has no part is absent."""

    steps: Mapping[int, SliceStep]
    out_length: int
    """The number of elements in the tensor that the ranges of the steps refer to."""

    def egress(self, item_bytes: int) -> Counter[int]:
        """Return the payload bytes that this rank sends to each peer."""
        sent: Counter[int] = Counter()
        for step in self.steps.values():
            if step.up is not None:
                sent[step.up] += step.num_up * step.length * item_bytes
            for listener in step.listeners:
                sent[listener] += step.length * item_bytes
        return sent


def make_plan(
    spec: Spec, rank: int, hosts: Sequence[str], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> RankPlan:
    """Return the plan of `rank`, one of `spec.members`; `hosts` holds the host of every rank of the view."""
    me = spec.members.index(rank)
    member_hosts = tuple(hosts[member] for member in spec.members)
    if strategy.names_ranks and len(spec.members) < len(hosts):
        strategy = Strategy()
    match spec.kind:
        case "all_reduce" | "reduce":
            return _plan_reduce(spec, me, member_hosts, strategy, item_bytes, slice_bytes)
        case "broadcast":
            return _plan_broadcast(spec, me, member_hosts, strategy, item_bytes, slice_bytes)
        case "gather" | "all_gather":
            return _plan_gather(spec, me, item_bytes, slice_bytes)
    raise AssertionError(f"no such kind of collective: {spec.kind}")


def _plan_reduce(
    spec: Spec, me: int, hosts: tuple[str, ...], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> RankPlan:
    num_replicas = sum(spec.parts) or len(spec.members)
    has_chunks = spec.order == "ddp"
    trees = strategy.topologies(hosts, spec.order)
    if spec.kind == "reduce":
        trees = (_with_root(trees, spec.members.index(spec.root)),)
    whole_bytes = min(slice_bytes, WHOLE_SHARED_BYTES if len(set(hosts)) == 1 else WHOLE_BYTES)
    if spec.portion is not None:
        slices = cut_portion(spec.portion, spec.length, item_bytes, len(trees), num_replicas if has_chunks else None)
    elif has_chunks:
        slices = cut_chunks(spec.name, spec.length, item_bytes, len(trees), slice_bytes, num_replicas, whole_bytes)
    else:
        slices = cut(spec.name, spec.length, item_bytes, len(trees), slice_bytes, whole_bytes)
    whole, offset = (spec.portion.whole, spec.portion.begin) if spec.portion is not None else (spec.length, 0)
    borders = order.chunk_length(whole, item_bytes, num_replicas)
    steps = {}
    for index, piece in enumerate(slices):
        tree = trees[piece.lane]
        raw = _read_in_place(tree, hosts)
        fold = _fold(spec, tree, raw, me, piece.chunk)
        sums = _ranged_sums(spec, tree, fold, me, piece, borders, offset)
        steps[index] = SliceStep(
            begin=piece.begin,
            end=piece.end,
            children=tuple(
                (spec.members[child], len(_fold(spec, tree, raw, child, piece.chunk).result))
                for child in tree.children(me)
            ),
            sums=sums,
            passed_on=fold.passed_on if tree.reduce_to[me] != me or not sums else (),
            up=None if tree.reduce_to[me] == me else spec.members[tree.reduce_to[me]],
            source=None if tree.bcast_from[me] == me or spec.kind == "reduce" else spec.members[tree.bcast_from[me]],
            listeners=_listeners(spec, tree, me) if spec.kind == "all_reduce" else (),
            reduces=True,
            lane=piece.lane,
            offered=tuple(spec.members[child] for child in tree.children(me) if child in raw),
            offers=me in raw,
        )
    return RankPlan(steps, spec.length)


def _with_root(trees: Sequence[Topology], root: int) -> Topology:
    """Return the topology that has this root, or else the first one with its root moved there."""
    tree = next((tree for tree in trees if tree.bcast_from[root] == root), trees[0])
    parents = reroot(tree.bcast_from, root)
    return Topology(parents, parents)


@lru_cache(maxsize=1024)
def _read_in_place(tree: Topology, hosts: tuple[str, ...]) -> frozenset[int]:
    """Return the leaves whose parent is on the same host."""
    edges = set(tree.reduce_edges)
    inner = {parent for _, parent in edges}
    return frozenset(leaf for leaf, parent in edges if leaf not in inner and hosts[leaf] == hosts[parent])


def _fold(spec: Spec, tree: Topology, raw: frozenset[int], who: int, chunk: int | None) -> Fold:
    if spec.order == "tree":
        return order.tree_fold(tree, spec.operands, who)
    if spec.order == "fast":
        return order.fast_fold(tree, spec.operands, raw, who)
    if chunk is None:
        return order.carrying_fold(tree, spec.operands, who)
    return order.ddp_fold(tree, spec.operands, raw, who, chunk)


def _ranged_sums(
    spec: Spec, tree: Topology, fold: Fold, me: int, piece: Slice, borders: int, offset: int
) -> tuple[RangedSum, ...]:
    """Return the sums that are formed here; chunks are counted from `offset` elements before."""
    if spec.order == "ddp" and piece.chunk is None and tree.reduce_to[me] == me and len(fold.operands) > 1:
        first = offset + piece.begin
        pieces = order.chunks_between(first, offset + piece.end, borders)
        return (
            tuple(
                (begin - first, end - first, order.fold_order(fold.operands, chunk, len(fold.operands)))
                for begin, end, chunk in pieces
            ),
        )
    return tuple(((0, piece.length, each),) for each in fold.sums)


def _listeners(spec: Spec, tree: Topology, me: int) -> tuple[int, ...]:
    return tuple(spec.members[listener] for listener in tree.listeners(me))


def _plan_broadcast(
    spec: Spec, me: int, hosts: tuple[str, ...], strategy: Strategy, item_bytes: int, slice_bytes: int
) -> RankPlan:
    root = spec.members.index(spec.root)
    trees = strategy.topologies(hosts, spec.order)
    direct = _with_root(trees, root)
    hosts_served = {hosts[rank] for rank in direct.listeners(root)} - {hosts[root]}
    if len(hosts_served) > 2 and len(trees) > 1 and spec.length * item_bytes > WHOLE_BYTES:
        # The root's link would carry the tensor once for each host. Instead every rank passes on a share of it, so that
        # each link carries it about twice, however many hosts there are.
        relays = [reroot(tree.bcast_from, root) for tree in trees]
        routes = [Topology(parents, parents) for parents in relays]
    else:
        routes = [direct]
    slices = cut(spec.name, spec.length, item_bytes, len(routes), slice_bytes)
    steps = {index: _step_down(spec, routes[s.lane], me, s.begin, s.end) for index, s in enumerate(slices)}
    return RankPlan(steps, spec.length)


def _plan_gather(spec: Spec, me: int, item_bytes: int, slice_bytes: int) -> RankPlan:
    """Plan a gather or all_gather: each tensor goes straight to the root, or to every rank."""
    size = len(spec.members)
    steps, index = {}, 0
    if spec.kind == "gather":
        root = spec.members.index(spec.root)
    for sender in range(size):
        parents = [sender] * size if spec.kind == "all_gather" else list(range(size))
        if spec.kind == "gather":
            parents[root] = sender
        tree = Topology(tuple(parents), tuple(parents))
        parts = max(1, -(-spec.length * item_bytes // slice_bytes)) if spec.length else 0
        for low, high in even_partition(spec.length, parts) if parts else ():
            if spec.kind == "all_gather" or me in (sender, root):
                offset = sender * spec.length
                steps[index] = _step_down(spec, tree, me, offset + low, offset + high, sender)
            index += 1
    return RankPlan(steps, spec.length * size)


def _step_down(spec: Spec, tree: Topology, me: int, begin: int, end: int, origin: int | None = None) -> SliceStep:
    """Return the step for a slice that only travels down, from the root of `tree` or from `origin`."""
    at_source = tree.bcast_from[me] == me if origin is None else me == origin
    return SliceStep(
        begin=begin,
        end=end,
        children=(),
        sums=(),
        passed_on=(),
        up=None,
        source=None if at_source else spec.members[tree.bcast_from[me]],
        listeners=_listeners(spec, tree, me),
        reduces=False,
    )


@lru_cache(maxsize=64)
def local_ranks(hosts: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks on the host of `rank`."""
    return tuple(other for other, host in enumerate(hosts) if host == hosts[rank])


# --- changes of the strategy ---

Counts = Mapping[bytes, int]
"""The number of collectives submitted on each channel, by the tag of the channel."""


class StrategyHistory:
    """The successive strategies of one rank. A strategy has the same number on every rank.

    A strategy may change while collectives are in flight. What any rank had submitted before the change still uses the
    old strategy on all ranks, so a rank that lagged behind uses the old one, channel by channel, until it catches up.
    """

    def __init__(self, first: Strategy) -> None:
        self._all = [first]
        self._lagging: dict[bytes, list[tuple[int, int]]] = {}
        """Channels on which this rank lagged at a change: (number of collectives before it, number of the strategy)."""

    def __getitem__(self, number: int) -> Strategy:
        return self._all[number]

    @property
    def latest(self) -> int:
        """The number of the newest strategy; it applies to new submissions on channels where this rank does not lag."""
        return len(self._all) - 1

    def number_for(self, spec: Spec, seq: int) -> int:
        """Return the number of the strategy that this collective uses on every rank."""
        if self._lagging:
            tag = channel_tag(spec.channel)
            for before, number in self._lagging.get(tag, ()):
                if seq < before:
                    return number
            self._lagging.pop(tag, None)
        return len(self._all) - 1

    def change(self, wanted: Strategy, mine: Counts, most: Counts) -> None:
        """Use `wanted` from now on. This rank has submitted `mine`, the rank furthest ahead has submitted `most`."""
        for tag, count in most.items():
            if count > mine.get(tag, 0):
                self._lagging.setdefault(tag, []).append((count, self.latest))
        self._all.append(wanted)


def pack_counts(counts: Counts) -> bytes:
    return b"".join(TAGGED.pack(tag, count) for tag, count in counts.items())


def highest_counts(packed: Iterable[bytes]) -> dict[bytes, int]:
    """Return for each channel the number of collectives that the rank furthest ahead has submitted."""
    most: dict[bytes, int] = {}
    for counts in packed:
        for tag, count in TAGGED.iter_unpack(counts):
            most[tag] = max(most.get(tag, 0), count)
    return most
