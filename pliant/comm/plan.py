"""Slices: pieces of a tensor that travel alone, and the queue that decides which goes next.

Pure: element ranges and priorities, no tensors and no sockets.

What one rank does for one collective: for each slice, whom it hears, what it folds, whom it tells.

Pure. A `Spec` is what all ranks must agree on; `make_plan` turns it, together with a strategy and
the hosts, into this rank's steps. Every rank derives the same slices and topologies from the same
spec, so no rank ever has to ask another what comes next.

Which strategy a collective takes: the same on every rank, though strategies change while collectives are in flight.

Pure. After a change, what any rank had submitted before it still takes the old strategy everywhere; so a
rank that lagged behind goes on with the old one until it has caught up, channel by channel. That the
ranks ask for the same, and how far each has come, is brought here by `comm.engine`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pliant.comm import order
from pliant.comm.frames import TAGGED, channel_tag
from pliant.comm.order import Fold, Term, chunk_length, chunks_between, even_partition
from pliant.comm.topology import Strategy, Topology, parse_strategy, rerooted
from pliant.errors import CommError, ConfigError

WHOLE_BYTES = 64 << 10
"""A tensor up to this size is not cut: a message costs more than its bytes."""
WHOLE_SHARED_BYTES = 512 << 10
"""The same, where all ranks share memory and the bytes cost still less."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a tensor, travelling on topology number `lane`."""

    begin: int
    end: int
    lane: int
    chunk: int | None
    """The chunk of the exact order it lies in; None where it spans several, or where the order is free."""

    @property
    def length(self) -> int:
        return self.end - self.begin


def name_hash(name: str) -> int:
    """The sum of the squared code points (KungFu's hash of names)."""
    return sum(ord(letter) ** 2 for letter in name)


def spread(name: str) -> int:
    """Spreads names over topologies, equally on every rank.

    Squares are 0 or 1 modulo 4, so KungFu's hash alone would give two of four owners nearly everything.
    """
    return name_hash(name) * 2654435761 >> 15


def cut(
    name: str, num_elements: int, item_bytes: int, lanes: int, slice_bytes: int, whole_bytes: int = WHOLE_BYTES
) -> list[Slice]:
    """Slices of about equal size, dealt out to the lanes in turn. Their order of summation is free."""
    if num_elements == 0:
        return []
    parts = max(1, -(-num_elements * item_bytes // slice_bytes))
    if parts < lanes and num_elements * item_bytes > whole_bytes:
        parts = min(lanes, num_elements)
    first = spread(name)
    return [
        Slice(begin, end, (first + index) % lanes, None)
        for index, (begin, end) in enumerate(even_partition(num_elements, parts))
    ]


def cut_exact(
    name: str,
    num_elements: int,
    item_bytes: int,
    lanes: int,
    slice_bytes: int,
    num_replicas: int,
    whole_bytes: int = WHOLE_BYTES,
) -> list[Slice]:
    """Slices that each lie in one chunk of the exact order; the chunks are spread over the lanes.

    A small tensor stays whole and spans all its chunks: whoever folds it folds each part in its order.
    """
    if num_elements == 0:
        return []
    if num_elements * item_bytes <= whole_bytes:
        return [Slice(0, num_elements, spread(name) % lanes, 0 if num_replicas == 1 else None)]
    slices = []
    for begin, end, chunk in chunks_between(0, num_elements, chunk_length(num_elements, item_bytes, num_replicas)):
        parts = max(1, -(-(end - begin) * item_bytes // slice_bytes))
        lane = chunk * lanes // num_replicas
        slices += [Slice(begin + low, begin + high, lane, chunk) for low, high in even_partition(end - begin, parts)]
    return slices


@dataclass(frozen=True, slots=True)
class Portion:
    """A run of a larger tensor that travels by itself, in slices and with owners of its own.

    Its exact order is that of the larger tensor: however the larger one is cut, the bits of the sum are the same.
    """

    whole: int
    """Elements of the larger tensor."""
    begin: int
    """Where the run begins in it."""
    lanes: tuple[int, ...]
    """The lane of each slice; the run is cut evenly into as many."""


def cut_portion(
    portion: Portion, num_elements: int, item_bytes: int, lanes: int, num_replicas: int | None
) -> list[Slice]:
    """The slices of a run of `num_elements`; `num_replicas` is None where the order of summation is free."""
    length = chunk_length(portion.whole, item_bytes, num_replicas) if num_replicas else 0
    slices = []
    ranges = even_partition(num_elements, max(1, min(len(portion.lanes), num_elements)))
    for (begin, end), lane in zip(ranges, portion.lanes, strict=False):
        first, last = portion.begin + begin, portion.begin + end - 1
        in_one_chunk = length and first // length == last // length
        slices.append(Slice(begin, end, lane % lanes, first // length if in_one_chunk else None))
    return slices if num_elements else []


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

    def pack(self) -> bytes:
        """Return the spec as it travels in a DEFINE frame."""
        portion = self.portion and (self.portion.whole, self.portion.begin, self.portion.lanes)
        fields = (self.kind, self.name, self.members, self.dtype, self.length, self.op, self.exact, self.root, self.parts)
        return json.dumps((*fields, portion)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Spec:
        """Return the spec that `pack` wrote.

        Raises:
            CommError: `payload` is not a spec.
        """
        try:
            kind, name, members, dtype, length, op, exact, root, parts, run = json.loads(payload)
            portion = Portion(int(run[0]), int(run[1]), tuple(map(int, run[2]))) if run is not None else None
            spec = cls(kind, name, tuple(members), dtype, int(length), op, bool(exact), int(root), tuple(parts), portion)
        except (ValueError, TypeError, IndexError) as error:
            raise CommError(f"a peer sent a damaged description of a collective: {error}") from None
        if spec.kind not in KINDS:
            raise CommError(f"a peer asked for an unknown kind of collective {spec.kind!r}: do all run the same version?")
        return spec


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
    fathers = rerooted(tree.bcast_from, root)
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
        relays = [rerooted(tree.bcast_from, root) for tree in trees]
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


Counts = Mapping[bytes, int]
"""For each channel, by its tag: how many collectives were submitted."""


class Strategies:
    """The strategies of one rank, one after the other; their numbers are the same on every rank."""

    def __init__(self, first: Strategy) -> None:
        self._all = [first]
        self._late: dict[bytes, list[tuple[int, int]]] = {}
        """Channels on which this rank lagged behind at a change: (collectives before, number of the strategy)."""

    def __getitem__(self, number: int) -> Strategy:
        return self._all[number]

    @property
    def latest(self) -> int:
        """The number of the strategy that collectives submitted from now on use, where this rank does not lag behind."""
        return len(self._all) - 1

    def number_for(self, spec: Spec, seq: int) -> int:
        """The number of the strategy that this collective takes, on every rank."""
        if self._late:
            tag = channel_tag(spec.channel)
            for before, number in self._late.get(tag, ()):
                if seq < before:
                    return number
            self._late.pop(tag, None)
        return len(self._all) - 1

    def change(self, wanted: Strategy, mine: Counts, furthest: Counts) -> None:
        """Take `wanted` from now on; this rank has submitted `mine`, the furthest one `furthest`."""
        for tag, count in furthest.items():
            if count > mine.get(tag, 0):
                self._late.setdefault(tag, []).append((count, self.latest))
        self._all.append(wanted)


def checked(strategy: str | Sequence[int] | Strategy, hosts: Sequence[str]) -> Strategy:
    """What was asked for, a name or everybody's father, as a strategy that these hosts can have.

    Raises:
        ConfigError: no such strategy, or no tree over these hosts.
    """
    wanted = strategy if isinstance(strategy, Strategy) else parse_strategy(strategy)
    # One that was made before may be of another view; it falls back where it does not fit.
    if wanted is not strategy and wanted.name == "FOREST" and len(wanted.forest) != len(hosts):
        raise ConfigError(
            f"forest {list(wanted.forest)} has {len(wanted.forest)} entries, but there are {len(hosts)} ranks"
        )
    wanted.topologies(hosts, exact=False)
    return wanted


def pack_counts(counts: Counts) -> bytes:
    return b"".join(TAGGED.pack(tag, count) for tag, count in counts.items())


def furthest(packed: Iterable[bytes]) -> dict[bytes, int]:
    """For each channel, what the furthest rank has submitted."""
    most: dict[bytes, int] = {}
    for counts in packed:
        for tag, count in TAGGED.iter_unpack(counts):
            most[tag] = max(most.get(tag, 0), count)
    return most


INTERNAL = "pliant:"
"""Names that begin so are the engine's own."""
