"""One collective in progress on one rank: its memory, its program, and what it still waits for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pliant.comm.handle import Handle
from pliant.comm.kernels import Recipe, Reducer
from pliant.comm.link import Link
from pliant.comm.plan import Plan, Spec, Step
from pliant.comm.wire import Place


class Span:
    """A flat run of elements in memory that this process can reach, its own or a peer's."""

    __slots__ = ("_bytes", "_cuts", "arena", "flat", "folded", "lasting", "offset", "owner")

    def __init__(self, flat: torch.Tensor, owner: int = -1, arena: int = 0, offset: int = 0) -> None:
        self.flat = flat
        self.owner = owner
        """Whose shared memory it is; -1 where it is no shared memory."""
        self.arena = arena
        self.offset = offset
        self.lasting = False
        """Whether this very object is kept for as long as the engine, so that views on it may be, too."""
        self.folded: Folded | None = None
        """How it was folded with others the last time."""
        # A training job asks for the same ranges at every step, and making a view costs more than
        # summing a bias.
        self._cuts: dict[tuple[int, int], torch.Tensor] = {}
        self._bytes: dict[tuple[int, int], memoryview] = {}

    def cut(self, begin: int, end: int) -> torch.Tensor:
        key = (begin, end)
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = self.flat[begin:end]
        return found

    def bytes(self, begin: int, end: int) -> memoryview:
        key = (begin, end)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = bytes_of(self.cut(begin, end))
        return found

    def place(self, begin: int = 0) -> Place:
        return self.owner, self.arena, self.offset + begin * self.flat.dtype.itemsize


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat CPU tensor."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Landing:
    """Memory into which the operands of one slice are received from one peer, kept from step to step: making it, and
    the views on it, costs more than adding a small slice up."""

    __slots__ = ("bytes", "parts", "scratch", "step")

    def __init__(self, scratch: torch.Tensor) -> None:
        self.scratch = scratch
        self.bytes = bytes_of(scratch)
        self.step: Step | None = None
        """What they were operands of the last time."""
        self.parts: list[Span] = []
        """The operands in it, for that step."""


class Known:
    """A spec that this rank or a peer has used, with the numbers that stand for it here. One object for all equal
    specs, so that comparing them is comparing objects."""

    __slots__ = ("channel", "number", "programs", "spec", "told")

    def __init__(self, spec: Spec, number: int, channel: int) -> None:
        self.spec = spec
        self.number = number
        self.channel = channel
        self.told: set[int] = set()
        """Peers to whom the number was explained."""
        self.programs: dict[int, Program] = {}
        """What it means here, by the number of the strategy."""


@dataclass(frozen=True, slots=True)
class Again:
    """A step as it was taken last: good for the next time if the memory is the same."""

    out: Span
    own: list[Span]
    offers: dict[int, list[Span]]
    recipe: Recipe
    links: list[Link]
    """Whom to tell."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A fold as it was done last: good for the next time if result and operands lie in the same places. The last
    operand has it, as long as it lands in the same place."""

    out: Span
    others: list[Span]
    """All operands but the last, and the other places where the result goes."""
    recipe: Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A plan with what follows from it for every collective of the same spec, computed once."""

    known: Known
    spec: Spec
    plan: Plan
    ready: tuple[int, ...]
    """Steps that this rank can take at once."""
    missing: dict[int, int]
    """For the other steps that this rank takes: how many children it must hear first."""
    offer_to: tuple[int, ...]
    """Peers of this host who read or write this rank's memory."""
    by_offer: dict[int, tuple[int, ...]]
    """Steps that come nearer when this child offers its memory."""
    offered_bytes: dict[int, int]
    """Operands that each peer reads from this rank's memory."""
    read_bytes: dict[int, int]
    """Operands that this rank reads from each peer's memory."""
    lane_bytes: dict[int, int]
    offering: list[tuple[Link, int]]
    """The links to `offer_to`, and the bytes each reads; filled when they know the spec."""
    again: dict[int, Again]
    """Steps made ready for the next time; filled as they are taken."""
    offers: dict[tuple[int, int, int], list[Span]]
    """Memory that peers have offered before, by (rank, arena, offset)."""


def make_program(known: Known, plan: Plan, shares_memory: Callable[[int], bool], item_bytes: int) -> Program:
    """Derive the program; `shares_memory(rank)` says who is on this host."""
    ready, missing = [], {}
    offer_to: set[int] = set()
    by_offer: defaultdict[int, list[int]] = defaultdict(list)
    offered: Counter[int] = Counter()
    lanes: Counter[int] = Counter()
    read: Counter[int] = Counter()
    for index, step in plan.steps.items():
        lanes[step.lane] += step.length * item_bytes
        if step.source is not None and shares_memory(step.source):
            offer_to.add(step.source)
        if step.offers and step.up is not None:
            offer_to.add(step.up)
            offered[step.up] += step.num_up * step.length * item_bytes
        elif step.children:
            missing[index] = len(step.children)
            counts = dict(step.children)
            for child in step.offered:
                by_offer[child].append(index)
                read[child] += counts[child] * step.length * item_bytes
        elif step.reduces or step.source is None:
            ready.append(index)
    by_child = {child: tuple(steps) for child, steps in by_offer.items()}
    return Program(
        known=known,
        spec=known.spec,
        plan=plan,
        ready=tuple(ready),
        missing=missing,
        offer_to=tuple(sorted(offer_to)),
        by_offer=by_child,
        offered_bytes=dict(offered),
        read_bytes=dict(read),
        lane_bytes=dict(lanes),
        offering=[],
        again={},
        offers={},
    )


class Burst:
    """Collectives that were submitted together. A thread that waits for the first would only be in the way of
    the others if it were woken before them."""

    __slots__ = ("open",)

    def __init__(self, size: int) -> None:
        self.open = size
        """How many have not ended."""


ARRIVED = -1
LandingKey = tuple[int, int, int, int]
"""The peer, its number of the spec, the slice, and the length in bytes."""
_NOTHING: dict[Any, Any] = {}


class Operation:
    """The state of one submitted collective; touched by the engine's thread only, once submitted.

    A plain class with slots: one is made for every tensor and step.
    """

    __slots__ = (
        "base",
        "began_s",
        "begin",
        "burst",
        "failed",
        "finished",
        "handle",
        "kept",
        "key",
        "landings",
        "left",
        "missing",
        "offers",
        "operands",
        "out",
        "owed",
        "own",
        "priority",
        "program",
        "prompt",
        "reduce",
        "result",
        "seq",
    )  # fmt: skip

    handle: Handle
    burst: Burst
    prompt: bool
    """Whether it is announced by itself, whatever it was submitted with."""
    begin: Callable[[Operation], None]
    """What the engine's thread shall do with it."""

    def __init__(
        self,
        program: Program,
        seq: int,
        priority: int,
        out: Span,
        own: list[Span],
        reduce: Reducer | None,
        result: torch.Tensor | None,
        finished: Callable[[Operation], None],
        base: int = 0,
    ) -> None:
        self.program = program
        self.seq = seq
        self.key = program.known.channel << 32 | seq
        self.priority = priority
        self.out = out
        """Where the result belongs."""
        self.own = own
        """This rank's operands; `[out]` where it reduces in place."""
        self.base = base
        """The element of the whole that `out` begins with (a gather's senders hold only their own part)."""
        self.reduce = reduce
        self.result = result
        """What `wait` shall return."""
        self.finished = finished
        """What remains to be done when the result is in place, such as copying it to where the user wants it."""
        self.began_s = 0.0
        self.prompt = False
        self.left = len(program.plan.steps)
        """Steps and frames that are not done yet."""
        self.missing = program.missing.copy()
        """For each step, how many children have not been heard; ARRIVED once its result has come."""
        self.offers: dict[int, list[Span]] = {}
        """The memory of peers: where their result belongs, then their operands if these lie elsewhere."""
        # The rest is not needed where all peers share memory, and an empty dict has its price, too:
        # between two steps of a model hundreds of megabytes pass through the cache.
        self.operands: dict[tuple[int, int], list[Span]] = _NOTHING
        """(step, child) -> what it sent."""
        self.owed: dict[int, list[int]] = _NOTHING
        """Results for peers that have not yet said where they belong."""
        self.kept: tuple[object, ...] = ()
        """Memory that others may still read."""
        self.landings: list[tuple[LandingKey, Landing]] = []
        """Where operands have arrived, to be used again when this is complete."""
        self.failed = False

    def hear(self, index: int, child: int, spans: list[Span]) -> None:
        """Note what a child sent for a step."""
        if self.operands is _NOTHING:
            self.operands = {}
        self.operands[index, child] = spans

    def owe(self, peer: int, index: int) -> None:
        """Note that a peer must get the result of a step, once it says where."""
        if self.owed is _NOTHING:
            self.owed = {}
        self.owed.setdefault(peer, []).append(index)

    def waiting_for(self) -> set[int]:
        """The ranks from which something is missing."""
        ranks: set[int] = set()
        for index, step in list(self.program.plan.steps.items()):
            missing = self.missing.get(index, 0)
            if missing > 0:
                ranks |= {c for c, _ in step.children if (index, c) not in self.operands and c not in self.offers}
            elif step.source is not None and missing != ARRIVED:
                ranks.add(step.source)
        return ranks
