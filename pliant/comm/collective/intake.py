"""Where what peers send is put, before it is used: straight into a collective's result, or where operands land.

A payload may come in fragments, between which others come. What was meant for a collective that has failed goes nowhere:
its memory may be somebody else's by then. Landings are kept from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pliant.comm.collective.operation import LandingKey, Operation
from pliant.comm.collective.span import Landing
from pliant.comm.collective.vocabulary import Vocabulary
from pliant.comm.shm import SharedMemory
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import EXTRA, FLAGS, FRAGMENT, KIND, LENGTH, PIECE, SEQ, SPEC, Frame, Kind

LANDING_BYTES = 256 << 20
"""At most this much memory for operands is kept from step to step."""

Target = Operation | Landing


@dataclass(slots=True, eq=False)
class Gathering:
    """A payload that comes in fragments."""

    view: memoryview | None
    """Where it goes; None: nowhere."""
    target: Target | None
    """What it is for."""
    total: int
    missing: int


class Intake:
    """The payloads of one core, one at a time per link."""

    def __init__(self, memory: SharedMemory, vocabulary: Vocabulary, operations: Mapping[int, Operation]) -> None:
        self._memory = memory
        self._vocabulary = vocabulary
        self._operations = operations
        """The open ones, by key."""
        self._arriving: dict[Link, Target | Gathering | None] = {}
        """What the payload of each link is for; None: for nothing any more."""
        self._gathering: dict[tuple[int, int, int, int, int], Gathering] = {}
        """By peer, kind, spec, number and slice."""
        self._landings: dict[LandingKey, Landing] = {}
        """Not in use now."""
        self._landing_bytes = 0

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the payload of this frame goes; None: nowhere."""
        if frame[FLAGS] != FRAGMENT:
            return self._place(link, frame)
        total, begin = frame[EXTRA] >> 32, frame[EXTRA] & 0xFFFFFFFF
        key = _key(link, frame)
        gathering = self._gathering.get(key)
        if gathering is None:
            view = self._place(link, (*frame[:8], total))
            target = self._arriving[link]
            assert not isinstance(target, Gathering), "that is what is made here"
            gathering = self._gathering[key] = Gathering(view, target, total, total)
        self._arriving[link] = gathering
        return None if gathering.view is None else gathering.view[begin : begin + frame[LENGTH]]

    def _place(self, link: Link, frame: Frame) -> memoryview:
        """Where a payload belongs as a whole."""
        found = self._result_place(link, frame)
        if found is not None:
            self._arriving[link] = found[0]
            return found[1]
        length = frame[LENGTH]
        landing = self._landings.pop((link.rank, frame[SPEC], frame[PIECE], length), None)
        if landing is None:
            landing = Landing(self._memory.empty(length, torch.uint8))
        else:
            self._landing_bytes -= length
        self._arriving[link] = landing
        return landing.bytes

    def _result_place(self, link: Link, frame: Frame) -> tuple[Operation, memoryview] | None:
        """The collective whose result a payload is, and the result's place; None where it is an operand, or comes early."""
        if frame[KIND] != Kind.BCAST:
            return None
        known = self._vocabulary.theirs[link.rank].get(frame[SPEC])
        operation = self._operations.get(known.channel << 32 | frame[SEQ]) if known else None
        if operation is None or operation.program.known is not known:
            return None
        step = operation.program.plan.steps[frame[PIECE]]
        place = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        return (operation, place) if len(place) == frame[LENGTH] else None

    def arrived(self, link: Link, frame: Frame) -> tuple[Frame, Target | None] | None:
        """A payload is in its place: the frame it came with, as a whole, and what it is for. None: there are fragments to
        come."""
        target = self._arriving.pop(link)
        if not isinstance(target, Gathering):
            return frame, target
        target.missing -= frame[LENGTH]
        if target.missing:
            return None
        del self._gathering[_key(link, frame)]
        return (*frame[:7], 0, target.total), target.target

    def divert(self, operation: Operation) -> None:
        """What is on its way to this collective goes nowhere."""
        for link, arriving in list(self._arriving.items()):
            if arriving is operation or (isinstance(arriving, Gathering) and arriving.target is operation):
                if arriving is operation:
                    self._arriving[link] = None
                link.divert()
        for gathering in self._gathering.values():
            if gathering.target is operation:
                gathering.view = gathering.target = None

    def recycle(self, landings: list[tuple[LandingKey, Landing]]) -> None:
        """Keep what a complete collective no longer needs for the next one."""
        for key, landing in landings:
            if key in self._landings:
                continue  # two of one name were under way at once
            if self._landing_bytes + key[3] > LANDING_BYTES:
                # Slices of another size than now, most likely: begin anew.
                self._landings.clear()
                self._landing_bytes = 0
            self._landings[key] = landing
            self._landing_bytes += key[3]

    def forget(self, rank: int) -> None:
        """Nothing more comes from this peer."""
        for key in [key for key in self._gathering if key[0] == rank]:
            del self._gathering[key]

    def close(self) -> None:
        self._arriving.clear()
        self._gathering.clear()


def _key(link: Link, frame: Frame) -> tuple[int, int, int, int, int]:
    return link.rank, frame[KIND], frame[SPEC], frame[SEQ], frame[PIECE]
