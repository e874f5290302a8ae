"""Values of the engine: registered specs, their compiled plans, and one collective in progress on one rank."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

    from pliant.comm.connection import PeerLink
    from pliant.comm.handle import Handle
    from pliant.comm.kernels import PreparedFold, Reducer
    from pliant.comm.memory import OperandBuffer, Span
    from pliant.comm.plan import RankPlan, SliceStep, Spec

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """A queue that returns the lowest priority number first, and the oldest item among equals."""

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


# --- what all collectives of one spec have in common ---


class RegisteredSpec:
    """A spec that this rank or a peer has used, with the numbers that stand for it here.

    There is one object for all equal specs, so specs are compared by identity.
    """

    __slots__ = ("channel", "defined_for", "number", "plans", "spec")

    def __init__(self, spec: Spec, number: int, channel: int) -> None:
        self.spec = spec
        self.number = number
        self.channel = channel
        self.defined_for: set[int] = set()
        """The peers to which the meaning of the number was sent."""
        self.plans: dict[int, CompiledPlan] = {}
        """The compiled plans by the number of the strategy."""


@dataclass(frozen=True, slots=True)
class CachedStep:
    """A step that can be repeated as it is if all its memory is the same as last time."""

    out: Span
    own: list[Span]
    offers: dict[int, list[Span]]
    prepared: PreparedFold
    links: list[PeerLink]
    """The links on which completion is announced."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPlan:
    """A plan with everything that follows from it for all collectives of the same spec, computed once."""

    registered: RegisteredSpec
    spec: Spec
    plan: RankPlan
    ready: tuple[int, ...]
    """The steps that this rank can take at once."""
    missing: dict[int, int]
    """For the other steps that this rank takes: the number of children whose operands it must receive first."""
    offer_to: tuple[int, ...]
    """The peers of this host that read or write this rank's memory."""
    by_offer: dict[int, tuple[int, ...]]
    """The steps that depend on the memory that each child offers."""
    offered_bytes: dict[int, int]
    """The bytes of operands that each peer reads from this rank's memory."""
    read_bytes: dict[int, int]
    """The bytes of operands that this rank reads from each peer's memory."""
    lane_bytes: dict[int, int]
    """The bytes that this rank handles on each topology."""
    offering: list[tuple[PeerLink, int]] = field(default_factory=list)
    """The links to `offer_to` with the bytes that each reads; filled when the peers know the spec."""
    cached_steps: dict[int, CachedStep] = field(default_factory=dict)
    """Steps prepared for the next time; filled as they are taken."""
    offers: dict[tuple[int, int, int], list[Span]] = field(default_factory=dict)
    """Memory that peers have offered before, by (rank, arena, offset)."""


def compile_plan(
    registered: RegisteredSpec, plan: RankPlan, shares_memory: Callable[[int], bool], item_bytes: int
) -> CompiledPlan:
    """Derive the compiled plan; `shares_memory(rank)` says which ranks are on this host."""
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
    return CompiledPlan(
        registered=registered,
        spec=registered.spec,
        plan=plan,
        ready=tuple(ready),
        missing=missing,
        offer_to=tuple(sorted(offer_to)),
        by_offer={child: tuple(steps) for child, steps in by_offer.items()},
        offered_bytes=dict(offered),
        read_bytes=dict(read),
        lane_bytes=dict(lanes),
    )


# --- one collective ---


class Burst:
    """Collectives that were submitted together.

    A thread that waits for the first one would only compete with the others if it were woken before they are done.
    """

    __slots__ = ("open",)

    def __init__(self, size: int) -> None:
        self.open = size
        """The number of collectives that have not ended."""


ARRIVED = -1
OperandBufferKey = tuple[int, int, int, int]
"""The peer, its number of the spec, the slice, and the length in bytes."""
_NOTHING: dict[Any, Any] = {}


class Operation:
    """The state of one submitted collective. Once submitted, only the engine's thread uses it.

    A plain class with slots, because one is made for every tensor and step.
    """

    __slots__ = (
        "base", "began_s", "begin", "buffers", "burst", "compiled", "failed", "handle", "kept", "key", "left", "missing",
        "offers", "on_complete", "operands", "out", "owed", "own", "priority", "prompt", "reduce", "result", "seq",
    )  # fmt: skip

    handle: Handle
    burst: Burst
    prompt: bool
    """Whether waiters are notified as soon as it is complete, whatever it was submitted with."""
    begin: Callable[[Operation], None]
    """The function that the engine's thread calls to begin it."""

    def __init__(
        self,
        compiled: CompiledPlan,
        seq: int,
        priority: int,
        out: Span,
        own: list[Span],
        reduce: Reducer | None,
        result: torch.Tensor | None,
        on_complete: Callable[[Operation], None],
        base: int = 0,
    ) -> None:
        self.compiled = compiled
        self.seq = seq
        self.key = compiled.registered.channel << 32 | seq
        self.priority = priority
        self.out = out
        """The memory of the result."""
        self.own = own
        """The operands of this rank; `[out]` if it reduces in place."""
        self.base = base
        """The element of the whole with which `out` begins (the senders of a gather hold only their own part)."""
        self.reduce = reduce
        self.result = result
        """The tensor that `wait` returns."""
        self.on_complete = on_complete
        """Called when the result is in `out`: copies it where the user wants it, and finishes the handle."""
        self.began_s = 0.0
        self.prompt = False
        self.left = len(compiled.plan.steps)
        """The number of steps and frames that are not done yet."""
        self.missing = compiled.missing.copy()
        """For each step the number of children whose operands are missing; ARRIVED once its result has come."""
        self.offers: dict[int, list[Span]] = {}
        """The memory of peers: the span of their result, then those of their operands if these lie elsewhere."""
        # What follows is not needed if all peers share memory, and even an empty dict has its price:
        # between two steps of a model hundreds of megabytes pass through the cache.
        self.operands: dict[tuple[int, int], list[Span]] = _NOTHING
        """Received operands by (step, child)."""
        self.owed: dict[int, list[int]] = _NOTHING
        """Steps whose result is owed to a peer that has not yet offered memory for it."""
        self.kept: tuple[object, ...] = ()
        """Objects that own memory which peers may still read."""
        self.buffers: list[tuple[OperandBufferKey, OperandBuffer]] = []
        """The buffers of received operands, which are reused when the collective is complete."""
        self.failed = False

    def cut(self, step: SliceStep) -> torch.Tensor:
        """Return the memory of the result of a slice."""
        return self.out.cut(step.begin - self.base, step.end - self.base)

    def add_operands(self, index: int, child: int, spans: list[Span]) -> None:
        """Keep the operands that a child sent for a step."""
        if self.operands is _NOTHING:
            self.operands = {}
        self.operands[index, child] = spans

    def owe_result(self, peer: int, index: int) -> None:
        """Note that the result of a step must be written to a peer's memory once the peer offers it."""
        if self.owed is _NOTHING:
            self.owed = {}
        self.owed.setdefault(peer, []).append(index)

    def waiting_for(self) -> set[int]:
        """Return the ranks from which something is missing."""
        ranks: set[int] = set()
        for index, step in list(self.compiled.plan.steps.items()):
            missing = self.missing.get(index, 0)
            if missing > 0:
                ranks |= {c for c, _ in step.children if (index, c) not in self.operands and c not in self.offers}
            elif step.source is not None and missing != ARRIVED:
                ranks.add(step.source)
        return ranks
