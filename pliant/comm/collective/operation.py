"""One collective in progress on one rank: its memory, its program, and what it still waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pliant.comm.collective.program import Program
from pliant.comm.collective.span import Landing, Span
from pliant.comm.handle import Handle
from pliant.comm.kernels import Reducer
from pliant.comm.plan import Step


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
