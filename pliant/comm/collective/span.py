"""Memory that a collective works on: runs of elements that this process can reach, and where operands land.

Views are kept: a training job asks for the same ranges at every step, and making a view costs more than
summing a bias. Who may use which memory when is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pliant.comm.kernels import Recipe
from pliant.comm.plan import Step
from pliant.comm.transport.wire import Place


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


@dataclass(frozen=True, slots=True)
class Folded:
    """A fold as it was done last: good for the next time if result and operands lie in the same places. The last
    operand has it, as long as it lands in the same place."""

    out: Span
    others: list[Span]
    """All operands but the last, and the other places where the result goes."""
    recipe: Recipe


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
