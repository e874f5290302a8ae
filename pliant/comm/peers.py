"""The other workers of a view as one rank sees them: the links to them, who is gone, and how far each had come.

What becomes of collectives that miss somebody is `core`'s to say.

The shared memory of this host that a worker can reach in a view: its own, and what its peers let it map.

The numbers that stand for specs in frames: those that this rank has given, and those that peers have explained.

What the peers of this host are told at the end of a turn: what is offered to them, and what is done; one frame each.

Round trips to the peers of a view that somebody has asked for. Engine's thread only.

Fetching what a peer has stored: questions out, answers into their place. Engine's thread only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from pliant.comm.frames import EXTRA, LENGTH, PIECE, SEQ, TAGGED, Frame, Kind, Place, channel_tag, header
from pliant.comm.memory import SharedMemory, Span, Store, bytes_of
from pliant.comm.operations import Known
from pliant.errors import CommError, Mismatch, NotStored, ViewChanged, WorkerLost

if TYPE_CHECKING:
    from pliant.cluster import View
    from pliant.comm.connection import Link
    from pliant.comm.plan import Channel, Spec


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


class Reach:
    """Spans by their place (owner's rank, arena, offset). They stay, so views on them may be kept.

    The mappings themselves belong to the links, and outlive the view.
    """

    def __init__(self, memory: SharedMemory, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._announced = 0
        """How many of our own arenas all peers know."""
        self._early: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._spans: dict[tuple[int, int, int, torch.dtype, int], Span] = {}

    def span(self, place: Place, dtype: torch.dtype, length: int) -> Span:
        """`length` elements at `place`."""
        key = (*place, dtype, length)
        found = self._spans.get(key)
        if found is None:
            owner, arena, offset = place
            arenas = self._memory.arenas if owner == self._peers.rank else self._peers.links[owner].arenas
            found = self._spans[key] = Span(arenas[arena].flat(offset, dtype, length), owner, arena, offset)
            found.lasting = True
        return found

    def new_span(self, flat: torch.Tensor) -> Span:
        """A span on memory that was just handed out; it keeps the tensor, and with it the place."""
        arena, offset = self._memory.locate(flat) or (0, 0)
        return Span(flat, self._peers.rank, arena, offset)

    def announce(self, arena: int) -> None:
        """Let every peer of this host map our memory: one may hear of it from another before it hears from us."""
        if arena < self._announced:
            return
        for link in self._peers.links.values():
            if link.shared and link.rank not in self._peers.lost:
                while link.told <= arena:
                    mine = self._memory.arenas[link.told]
                    link.say(header(Kind.ARENA, self._peers.view.number, piece=link.told, extra=mine.size), fd=mine.fd)
                    link.told += 1
        self._announced = arena + 1

    def on_arena(self, rank: int, arena: int) -> None:
        """Memory of a peer is mapped now: go on with what had to wait for it."""
        for act in self._early.pop((rank, arena), []):
            act()

    def covers(self, places: Iterable[Place], otherwise: Callable[[], None]) -> bool:
        """Whether all places can be reached; if not, `otherwise` shall be called once the missing memory is here.

        A peer may speak of a third worker's memory while that worker's own word is still on its way.
        """
        for owner, arena, _ in places:
            if owner != self._peers.rank and arena not in self._peers.links[owner].arenas:
                self._early.setdefault((owner, arena), []).append(otherwise)
                return False
        return True


class Vocabulary:
    """One `Known` for each spec, whoever mentions it first, the user or a peer."""

    def __init__(self, view: int) -> None:
        self.theirs: defaultdict[int, dict[int, Known]] = defaultdict(dict)
        """By peer: what its numbers mean. A number that is missing was never explained."""
        self._view = view
        self._known: dict[Spec, Known] = {}
        self._channels: dict[Channel, int] = {}
        self._numbering = threading.Lock()

    def know(self, spec: Spec) -> Known:
        """What stands for this spec here; any thread."""
        found = self._known.get(spec)
        if found is None:
            with self._numbering:
                channel = self._channels.setdefault(spec.channel, len(self._channels))
                found = self._known.setdefault(spec, Known(spec, len(self._known), channel))
        return found

    def explain(self, known: Known, link: Link) -> None:
        """Tell a peer what our number means, unless it was told."""
        if link.rank not in known.told:
            known.told.add(link.rank)
            payload = known.spec.pack()
            link.say(header(Kind.DEFINE, self._view, spec=known.number, length=len(payload)), payload)

    def learn(self, link: Link, number: int, spec: Spec) -> None:
        """A peer tells what its number means."""
        self.theirs[link.rank][number] = self.know(spec)

    def tags(self) -> dict[int, bytes]:
        """What stands for each of our channels on every rank."""
        return {number: channel_tag(channel) for channel, number in self._channels.items()}


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
