"""What follows from a spec for all collectives that have it: its numbers here, its plan, whom it concerns.

Not one collective's own state, which is `operation`'s.

One collective in progress on one rank: its memory, its program, and what it still waits for.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from pliant.comm.connection import Link
    from pliant.comm.handle import Handle
    from pliant.comm.kernels import Recipe, Reducer
    from pliant.comm.memory import Landing, Span
    from pliant.comm.plan import Plan, Spec, Step

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Lowest priority number first, and among equals the oldest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._age = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, priority: int, item: T) -> None:
        heapq.heappush(self._heap, (priority, self._age, item))
        self._age += 1

    def pop(self) -> T:
        return heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        self._heap.clear()


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

    def cut(self, step: Step) -> torch.Tensor:
        """The place of a slice's result."""
        return self.out.cut(step.begin - self.base, step.end - self.base)

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
