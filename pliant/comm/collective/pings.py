"""Round trips to the peers of a view that somebody has asked for. Engine's thread only."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from pliant.comm.collective.peers import Peers
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import Kind, header

Answered = Callable[[int, float], None]
"""Called once for each ping, with the rank and the seconds: infinite if the peer is gone."""


class Pings:
    """Pings on their way; a peer answers them in order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._open: defaultdict[int, deque[Answered]] = defaultdict(deque)

    def send(self, link: Link, answered: Answered) -> None:
        """Ask a peer how far away it is."""
        if link.rank in self._peers.lost:
            answered(link.rank, float("inf"))
            return
        self._open[link.rank].append(answered)
        link.say(header(Kind.PING, self._peers.view.number, extra=time.perf_counter_ns()))

    def on_pong(self, link: Link, sent_ns: int) -> None:
        if self._open[link.rank]:
            seconds = (time.perf_counter_ns() - sent_ns) / 1e9
            self._open[link.rank].popleft()(link.rank, seconds)

    def waiting_for(self) -> list[int]:
        """Who has not answered; any thread."""
        return [rank for rank, waiting in list(self._open.items()) if waiting]

    def give_up(self, rank: int | None = None) -> None:
        """Nothing comes back any more from this rank, or from anybody."""
        for gone in list(self._open) if rank is None else [rank]:
            for answered in self._open.pop(gone, ()):
                answered(gone, float("inf"))
