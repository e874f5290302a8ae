"""What follows from a spec for all collectives that have it: its numbers here, its plan, whom it concerns.

Not one collective's own state, which is `operation`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from pliant.comm.collective.span import Span
from pliant.comm.kernels import Recipe
from pliant.comm.plan import Plan, Spec
from pliant.comm.transport.link import Link


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
