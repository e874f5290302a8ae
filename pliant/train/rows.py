"""What workers tell each other with every step: how far each is, what it has measured, and its replicas' contexts.

A context is some ten kilobytes, nearly all of it the words of random generators, and everybody needs those of everybody:
with many workers that is more than the gradients. The words rarely change, so from a view's second step on only what
has changed is told, in a little room. Where that is too much for it (dropout on the host draws a word for every
element), the whole contexts follow, and lead in the next step: a program pays for the second round only when it changes
its habits. All workers see the same rows, so all know which form comes next.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pliant.train.context import Context
from pliant.train.priority import tuning
from pliant.train.priority.tuning import Choice, Measured

_HEAD = struct.Struct("<QQ?")
"""The step, the newest roll that the worker is prepared for, and whether its changes fit into the room for them."""
_WORD = np.dtype("<u8")
_CHANGE = np.dtype([("place", "<u2"), ("word", _WORD)])
_COUNT = struct.Struct("<H")
MOST_CHANGES = 16
ROOM = _COUNT.size + MOST_CHANGES * _CHANGE.itemsize
"""Bytes for what has changed in one context."""


@dataclass(frozen=True, slots=True)
class Said:
    """One worker's row, without the contexts."""

    step: int
    prepared: int
    way: Choice
    """How it would have the sums travel."""
    measured: Measured
    figures: bytes
    fits: bool = True


class Rows:
    """Packs this worker's row, and reads those of all. Contexts that everybody has are `known`."""

    def __init__(self) -> None:
        self.brief = False
        """Whether the next rows hold changes in place of contexts."""
        self._blocks: tuple[int, ...] = ()
        self._hosted = range(0)

    def arrange(self, blocks: Sequence[int], hosted: range) -> None:
        """In this view rank r hosts `blocks[r]` replicas, and this worker `hosted`."""
        self._blocks, self._hosted, self.brief = tuple(blocks), hosted, False

    @property
    def name(self) -> str:
        """Of the collective that the next rows take."""
        return "changes" if self.brief else "step"

    def pack(self, said: Said, new: Mapping[int, Context], known: Sequence[Context], num_loaders: int) -> torch.Tensor:
        """This worker's row."""
        whole = [new[replica].to_bytes(num_loaders) for replica in self._hosted]
        changes = [
            changed(known[replica].to_bytes(num_loaders), data)
            for replica, data in zip(self._hosted, whole, strict=True)
        ]
        fits = None not in changes
        head = _HEAD.pack(said.step, said.prepared, fits) + tuning.pack(said.way, said.measured) + said.figures
        if self.brief:
            return self._padded(head, [change or b"" for change in changes], ROOM)
        return self._padded(head, whole, len(whole[0]))

    def rest(self, new: Mapping[int, Context], num_loaders: int) -> torch.Tensor:
        """This worker's contexts, where changes were too little."""
        whole = [new[replica].to_bytes(num_loaders) for replica in self._hosted]
        return self._padded(b"", whole, len(whole[0]))

    def _padded(self, head: bytes, bodies: Sequence[bytes], room: int) -> torch.Tensor:
        row = head + b"".join(body.ljust(room, b"\0") for body in bodies)
        return torch.frombuffer(bytearray(row.ljust(len(head) + room * max(self._blocks), b"\0")), dtype=torch.uint8)

    def read(
        self, rows: torch.Tensor, new: dict[int, Context], known: Sequence[Context], num_loaders: int, num_figures: int
    ) -> tuple[list[Said], bool]:
        """What all have said; the contexts of other workers' replicas go to `new`. Whether these are complete: if not,
        everybody must tell the `rest`."""
        begin = _HEAD.size + tuning.ROW_BYTES
        data = [bytes(row.numpy()) for row in rows]
        heads = [_HEAD.unpack_from(each) for each in data]
        said = [
            Said(
                step, prepared, *tuning.unpack(each[_HEAD.size : begin]), each[begin : begin + num_figures], fits
            )
            for each, (step, prepared, fits) in zip(data, heads, strict=True)
        ]  # fmt: skip
        was_brief, self.brief = self.brief, all(each.fits for each in said)
        if was_brief and not self.brief:
            return said, False
        bodies = [each[begin + num_figures :] for each in data]
        for replica, body in self._of_replicas(bodies, ROOM if was_brief else 0):
            if replica not in new:
                whole = applied(known[replica].to_bytes(num_loaders), body) if was_brief else body
                new[replica] = Context.from_bytes(whole, num_loaders)
        return said, True

    def read_rest(self, rows: torch.Tensor, new: dict[int, Context], num_loaders: int) -> None:
        for replica, whole in self._of_replicas([bytes(row.numpy()) for row in rows], 0):
            if replica not in new:
                new[replica] = Context.from_bytes(whole, num_loaders)

    def _of_replicas(self, bodies: Sequence[bytes], room: int) -> list[tuple[int, bytes]]:
        """Each replica's part; `room` bytes, or as many as there are."""
        found: list[tuple[int, bytes]] = []
        room = room or len(bodies[0]) // max(self._blocks)
        for body, count in zip(bodies, self._blocks, strict=True):
            found += [(len(found) + slot, body[slot * room : (slot + 1) * room]) for slot in range(count)]
        return found


def changed(before: bytes, after: bytes) -> bytes | None:
    """What makes `after` out of `before`, in at most `ROOM` bytes; None if that is too little."""
    old, new = _words(before), _words(after)
    if len(old) != len(new) or len(old) > 1 << 16:
        return None
    places = np.flatnonzero(old != new)
    if len(places) > MOST_CHANGES:
        return None
    changes = np.empty(len(places), dtype=_CHANGE)
    changes["place"], changes["word"] = places, new[places]
    return _COUNT.pack(len(places)) + changes.tobytes()


def applied(before: bytes, change: bytes) -> bytes:
    """What `changed` was given as `after`."""
    [count] = _COUNT.unpack_from(change)
    changes = np.frombuffer(change, dtype=_CHANGE, count=count, offset=_COUNT.size)
    words = _words(before).copy()
    words[changes["place"]] = changes["word"]
    return words.tobytes()[: len(before)]


def _words(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(data.ljust(-(-len(data) // _WORD.itemsize) * _WORD.itemsize, b"\0"), dtype=_WORD)
