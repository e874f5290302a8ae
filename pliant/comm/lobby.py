"""What arrives outside the view that a worker is in: from workers that are not in it, or sent in another one.

Only what concerns the connection itself matters then. The rest is of a view that has passed.
"""

from __future__ import annotations

from pliant.comm.collective.core import Core
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import LENGTH, Frame, Kind, header
from pliant.errors import CommError


class Lobby:
    """Takes frames that belong to no view, or to one that this worker has left."""

    def __init__(self) -> None:
        self.core: Core | None = None
        """The view that the worker is in."""

    def on_frame(self, link: Link, frame: Frame, payload: bytes) -> None:
        kind, _, _, view, _, _, piece, extra, _ = frame
        core = self.core
        if core is not None and core.peers.links.get(link.rank) is not link:
            core = None
        match kind:
            case Kind.ARENA:
                link.take_arena(piece, extra)
                if core is not None:
                    core.reach.on_arena(link.rank, piece)
            case Kind.BYE:
                link.said_bye = True
                if core is not None:
                    core.peers.on_bye(link, view, payload)
            case Kind.PING:
                link.say(header(Kind.PONG, view, extra=extra))
            case _ if kind not in frozenset(Kind):
                raise CommError(f"a frame of unknown kind {kind}: do all workers run the same version?")
            case _:
                pass

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        return None

    def on_bulk(self, link: Link, frame: Frame) -> None:
        link.ingress_bytes += frame[LENGTH]
