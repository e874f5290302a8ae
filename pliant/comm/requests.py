"""Fetching what a peer has stored: questions out, answers into their place. Engine's thread only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pliant.comm.link import Link, header
from pliant.comm.operation import bytes_of
from pliant.comm.store import Store
from pliant.comm.wire import Frame, Kind
from pliant.errors import Mismatch, NotStored

Answer = Callable[[Exception | None], None]
"""Called once: with None when the tensor is there, else with what went wrong."""


class Requests:
    """This worker's open questions, and its answers to others'."""

    def __init__(self, view: int, store: Store) -> None:
        self._view = view
        self._store = store
        self._open: dict[int, tuple[Answer, torch.Tensor, int]] = {}
        self._count = 0

    def ask(self, link: Link, name: str, version: int | None, out: torch.Tensor, answer: Answer) -> None:
        """Fetch what the peer has stored under a name into the flat CPU tensor `out`."""
        self._count += 1
        self._open[self._count] = (answer, out, link.rank)
        payload = name.encode()
        extra = 0 if version is None else version + 1
        link.say(header(Kind.ASK, self._view, seq=self._count, extra=extra, length=len(payload)), payload)

    def on_ask(self, link: Link, frame: Frame, payload: bytes) -> None:
        version = frame[7] - 1 if frame[7] else None
        found = self._store.get(payload.decode(errors="replace"), version)
        views = [bytes_of(found)] if found is not None else []
        size = sum(map(len, views))
        link.egress_bytes += size
        link.send(0, header(Kind.TELL, self._view, seq=frame[5], piece=found is not None, length=size), views, None)

    def place_for(self, frame: Frame) -> memoryview | None:
        """Where an answer belongs; if it does not fit, nowhere."""
        if frame[5] in self._open:
            place = bytes_of(self._open[frame[5]][1])
            if len(place) == frame[8]:
                return place
        return None

    def on_told(self, link: Link, frame: Frame) -> None:
        asked = self._open.pop(frame[5], None)
        if asked is None:
            return
        answer, out, _ = asked
        if not frame[6]:
            answer(NotStored(f"{link.worker} (rank {link.rank}) has nothing stored under that name and version"))
        elif frame[8] != out.nbytes:
            answer(Mismatch(f"{link.worker} stored {frame[8]} bytes, but {out.nbytes} were asked for"))
        else:
            answer(None)

    def fail(self, error: Exception, rank: int | None = None) -> None:
        """Give up all questions, or those to `rank`."""
        for number, (answer, _, asked) in list(self._open.items()):
            if rank is None or asked == rank:
                del self._open[number]
                answer(error)
