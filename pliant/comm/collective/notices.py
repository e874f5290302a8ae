"""What the peers of this host are told at the end of a turn: what is offered to them, and what is done; one frame each."""

from __future__ import annotations

from collections import defaultdict

from pliant.comm.collective.peers import Peers
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import Kind, header


class Notices:
    """Entries as `wire.OFFERED` and `wire.FINISHED` pack them; whoever has one appends it."""

    def __init__(self, peers: Peers) -> None:
        self.offers: defaultdict[Link, bytearray] = defaultdict(bytearray)
        self.done: defaultdict[Link, bytearray] = defaultdict(bytearray)
        self._peers = peers

    def say(self) -> None:
        """Send them, and begin anew."""
        for kind, notices in ((Kind.OFFER, self.offers), (Kind.DONE, self.done)):
            if notices:
                for link, entries in notices.items():
                    if link.rank not in self._peers.lost:
                        link.say(header(kind, self._peers.view.number, length=len(entries)), bytes(entries))
                notices.clear()
