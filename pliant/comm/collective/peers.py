"""The other workers of a view as one rank sees them: the links to them, who is gone, and how far each had come.

What becomes of collectives that miss somebody is `core`'s to say.
"""

from __future__ import annotations

from pliant.cluster import View
from pliant.comm.plan import Spec
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import TAGGED, Kind, channel_tag, header
from pliant.errors import CommError, ViewChanged, WorkerLost


class Peers:
    """Links by rank, filled when the view is entered; and who of them is no longer there."""

    def __init__(self, view: View, rank: int) -> None:
        self.view = view
        self.rank = rank
        """This worker's own."""
        self.links: dict[int, Link] = {}
        self.lost: dict[int, WorkerLost] = {}
        """Who has left the job, in good order or not."""
        self.absent: dict[int, CommError] = {}
        """These, and who has only left the view; with the reason."""
        self.retired = False
        """Whether this worker itself has moved to another view: nothing is said in this one any more."""
        self._finished_by: dict[int, dict[bytes, int]] = {}
        """For those who went in good order: how many collectives of each channel they had finished."""
        self._moved_on: set[int] = set()
        """Ranks that left the job from a later view: they had finished with this one."""

    def tell_all(self, kind: Kind, payload: bytes, piece: int = 0) -> None:
        """Say the same to everybody who is there."""
        for rank, link in self.links.items():
            if rank not in self.lost:
                link.say(header(kind, self.view.number, piece=piece, length=len(payload)), payload)

    # --- who goes ---

    def lose(self, rank: int, why: str) -> WorkerLost:
        """A worker is gone from the job."""
        error = self.lost[rank] = self.absent[rank] = WorkerLost(str(self.view.workers[rank]), rank, why)
        return error

    def on_bye(self, link: Link, view: int, payload: bytes) -> None:
        """A peer is about to leave the job, from this view or from one before or after it."""
        link.said_bye = True
        if view > self.view.number:
            self._moved_on.add(link.rank)
        else:
            told = TAGGED.iter_unpack(payload) if view == self.view.number else ()
            self._finished_by[link.rank] = dict(told)

    def on_moved(self, link: Link, payload: bytes) -> ViewChanged:
        """A peer has left this view for another one."""
        self._finished_by[link.rank] = dict(TAGGED.iter_unpack(payload))
        error = ViewChanged(f"{link.worker} has moved on to another view")
        if link.rank not in self.lost:
            self.absent[link.rank] = error
        return error

    # --- what needs them ---

    def needs(self, rank: int, spec: Spec, seq: int) -> bool:
        """Whether a rank that is gone is missing in a collective: not if it had finished it before it went."""
        if rank in self._moved_on:
            return False
        finished = self._finished_by.get(rank)
        return finished is None or seq >= finished.get(channel_tag(spec.channel), 0)

    def missing_in(self, spec: Spec, seq: int) -> CommError | None:
        """Why a collective can never be complete; None if nobody is missing."""
        absent = self.absent
        return next((absent[r] for r in spec.members if r in absent and self.needs(r, spec, seq)), None)
