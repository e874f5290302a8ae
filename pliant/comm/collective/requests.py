"""Fetching what a peer has stored: questions out, answers into their place. Engine's thread only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pliant.comm.collective.peers import Peers
from pliant.comm.collective.span import bytes_of
from pliant.comm.store import Store
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import EXTRA, LENGTH, PIECE, SEQ, Frame, Kind, header
from pliant.errors import Mismatch, NotStored

Answer = Callable[[Exception | None], None]
"""Called once: with None when the tensor is there, else with what went wrong."""


class Requests:
    """This worker's open questions, and its answers to others'."""

    def __init__(self, peers: Peers, store: Store) -> None:
        self._peers = peers
        self._view = peers.view.number
        self._store = store
        self._open: dict[int, tuple[Answer, torch.Tensor, int]] = {}
        self._count = 0

    def ask(self, rank: int, name: str, version: int | None, out: torch.Tensor, answer: Answer) -> None:
        """Fetch what a rank, perhaps this one, has stored under a name into the flat CPU tensor `out`."""
        if rank in self._peers.lost:
            answer(self._peers.lost[rank])
        elif rank == self._peers.rank:
            answer(self._copy(name, version, out))
        else:
            self._ask(self._peers.links[rank], name, version, out, answer)

    def _copy(self, name: str, version: int | None, out: torch.Tensor) -> Exception | None:
        found = self._store.get(name, version)
        if found is None:
            return NotStored(f"nothing is stored here under {name!r} (version {version})")
        if found.nbytes != out.nbytes:
            return Mismatch(f"{name!r} was stored with {found.nbytes} bytes, but {out.nbytes} were asked for")
        out.view(torch.uint8).copy_(found.view(torch.uint8))
        return None

    def _ask(self, link: Link, name: str, version: int | None, out: torch.Tensor, answer: Answer) -> None:
        self._count += 1
        self._open[self._count] = (answer, out, link.rank)
        payload = name.encode()
        extra = 0 if version is None else version + 1
        link.say(header(Kind.ASK, self._view, seq=self._count, extra=extra, length=len(payload)), payload)

    def on_ask(self, link: Link, frame: Frame, payload: bytes) -> None:
        version = frame[EXTRA] - 1 if frame[EXTRA] else None
        found = self._store.get(payload.decode(errors="replace"), version)
        views = [bytes_of(found)] if found is not None else []
        size = sum(map(len, views))
        link.egress_bytes += size
        link.send(0, header(Kind.TELL, self._view, seq=frame[SEQ], piece=found is not None, length=size), views, None)

    def place_for(self, frame: Frame) -> memoryview | None:
        """Where an answer belongs; if it does not fit, nowhere."""
        if frame[SEQ] in self._open:
            place = bytes_of(self._open[frame[SEQ]][1])
            if len(place) == frame[LENGTH]:
                return place
        return None

    def on_told(self, link: Link, frame: Frame) -> None:
        asked = self._open.pop(frame[SEQ], None)
        if asked is None:
            return
        answer, out, _ = asked
        if not frame[PIECE]:
            answer(NotStored(f"{link.worker} (rank {link.rank}) has nothing stored under that name and version"))
        elif frame[LENGTH] != out.nbytes:
            answer(Mismatch(f"{link.worker} stored {frame[LENGTH]} bytes, but {out.nbytes} were asked for"))
        else:
            answer(None)

    def fail(self, error: Exception, rank: int | None = None) -> None:
        """Give up all questions, or those to `rank`."""
        for number, (answer, _, asked) in list(self._open.items()):
            if rank is None or asked == rank:
                del self._open[number]
                answer(error)
