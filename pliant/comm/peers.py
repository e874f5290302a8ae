"""The peers of one rank in a view: the links to them, which of them are gone, and small exchanges with them.

The exchanges are: shared memory (`SharedMemoryMap`), definitions of specs (`SpecRegistry`), notices of what is offered
and done (`NoticeBatch`) and round-trip times (`Pings`). Only the engine's thread calls them, unless a method says
otherwise.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from pliant.comm.frames import TAGGED, FrameKind, Place, channel_tag, header
from pliant.comm.memory import SharedMemory, Span
from pliant.comm.operations import RegisteredSpec
from pliant.errors import CommError, ViewChanged, WorkerLost

if TYPE_CHECKING:
    from pliant.cluster import View
    from pliant.comm.connection import PeerLink
    from pliant.comm.plan import Channel, Spec


class Peers:
    """The links of a view by rank, filled when the view is entered, and the ranks that are gone."""

    def __init__(self, view: View, rank: int) -> None:
        self.view = view
        self.rank = rank
        """The rank of this worker."""
        self.links: dict[int, PeerLink] = {}
        self.lost: dict[int, WorkerLost] = {}
        """The ranks that have left the job, in good order or not."""
        self.absent: dict[int, CommError] = {}
        """The lost ranks and those that have only left the view, with the reason."""
        self.retired = False
        """Whether this worker has moved to another view, so that nothing more is sent in this one."""
        self._finished_by: dict[int, dict[bytes, int]] = {}
        """For ranks that left in good order: the number of collectives of each channel that they had finished."""
        self._moved_on: set[int] = set()
        """Ranks that left the job from a later view: they had finished with this one."""

    def send_to_all(self, kind: FrameKind, payload: bytes, piece: int = 0) -> None:
        """Send the same control frame to every rank that is not lost."""
        for rank, link in self.links.items():
            if rank not in self.lost:
                link.send_control(header(kind, self.view.number, piece=piece, length=len(payload)), payload)

    def mark_lost(self, rank: int, why: str) -> WorkerLost:
        """Note that a worker is gone from the job; return the error that collectives with it fail with."""
        error = self.lost[rank] = self.absent[rank] = WorkerLost(str(self.view.workers[rank]), rank, why)
        return error

    def on_bye(self, link: PeerLink, view: int, payload: bytes) -> None:
        """Handle a peer that is about to leave the job, from this view or from one before or after it."""
        link.is_leaving = True
        if view > self.view.number:
            self._moved_on.add(link.rank)
        else:
            counts = TAGGED.iter_unpack(payload) if view == self.view.number else ()
            self._finished_by[link.rank] = dict(counts)

    def on_moved(self, link: PeerLink, payload: bytes) -> ViewChanged:
        """Handle a peer that has left this view for another one."""
        self._finished_by[link.rank] = dict(TAGGED.iter_unpack(payload))
        error = ViewChanged(f"{link.worker} has moved on to another view")
        if link.rank not in self.lost:
            self.absent[link.rank] = error
        return error

    def is_missing(self, rank: int, spec: Spec, seq: int) -> bool:
        """Return whether a collective needs a rank that is gone: not if the rank had finished it before."""
        if rank in self._moved_on:
            return False
        finished = self._finished_by.get(rank)
        return finished is None or seq >= finished.get(channel_tag(spec.channel), 0)

    def why_incomplete(self, spec: Spec, seq: int) -> CommError | None:
        """Return why a collective can never be complete; None if no member is missing."""
        absent = self.absent
        return next((absent[r] for r in spec.members if r in absent and self.is_missing(r, spec, seq)), None)


class SharedMemoryMap:
    """The shared memory of this host that a worker can access in a view: its own, and what its peers let it map.

    Spans are found by their place (rank of the owner, arena, offset). They are kept, so views on them may be kept. The
    mappings themselves belong to the links and outlive the view.
    """

    def __init__(self, memory: SharedMemory, peers: Peers) -> None:
        self.memory = memory
        self.peers = peers
        self._num_announced = 0
        """The number of our own arenas that all peers know."""
        self._on_mapped: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._spans: dict[tuple[int, int, int, torch.dtype, int], Span] = {}

    def span(self, place: Place, dtype: torch.dtype, length: int) -> Span:
        """Return the span of `length` elements at `place`."""
        key = (*place, dtype, length)
        found = self._spans.get(key)
        if found is None:
            owner, arena, offset = place
            arenas = self.memory.arenas if owner == self.peers.rank else self.peers.links[owner].arenas
            found = self._spans[key] = Span(arenas[arena].flat(offset, dtype, length), owner, arena, offset)
            found.lasting = True
        return found

    def new_span(self, flat: torch.Tensor) -> Span:
        """Return a span on newly allocated memory; the span keeps the tensor, and with it the memory."""
        arena, offset = self.memory.locate(flat) or (0, 0)
        return Span(flat, self.peers.rank, arena, offset)

    def announce(self, arena: int) -> None:
        """Let every peer of this host map our arenas up to `arena`.

        All peers, because one may hear of a place in it from another peer before it hears from us.
        """
        if arena < self._num_announced:
            return
        for link in self.peers.links.values():
            if link.shared and link.rank not in self.peers.lost:
                link.send_arenas(self.memory.arenas, arena, self.peers.view.number)
        self._num_announced = arena + 1

    def on_arena(self, rank: int, arena: int) -> None:
        """Continue with what had to wait until this arena of a peer was mapped."""
        for act in self._on_mapped.pop((rank, arena), []):
            act()

    def close(self) -> None:
        """Let go of the memory of peers, because the view is left: that of those that are gone is unmapped.

        Not when the garbage is collected, which is rare, as a program with torch has very many objects.
        """
        self._spans.clear()
        self._on_mapped.clear()
        for link in self.peers.links.values():
            if link.closed:
                link.arenas.clear()

    def is_mapped(self, places: Iterable[Place], otherwise: Callable[[], None]) -> bool:
        """Return whether all places are mapped; if not, `otherwise` is called once the missing arena is.

        A peer may refer to a third worker's memory while that worker's own announcement is still on its way.
        """
        for owner, arena, _ in places:
            if owner != self.peers.rank and arena not in self.peers.links[owner].arenas:
                self._on_mapped.setdefault((owner, arena), []).append(otherwise)
                return False
        return True


class SpecRegistry:
    """The numbers that stand for specs in frames: those that this rank has assigned, and those of its peers.

    There is one `RegisteredSpec` for each spec, whether the user or a peer mentions it first.
    """

    def __init__(self, view: int) -> None:
        self.by_peer: defaultdict[int, dict[int, RegisteredSpec]] = defaultdict(dict)
        """The meaning of each peer's numbers, by the rank of the peer."""
        self._view = view
        self._registered: dict[Spec, RegisteredSpec] = {}
        self._channels: dict[Channel, int] = {}
        self._numbering = threading.Lock()

    def register(self, spec: Spec) -> RegisteredSpec:
        """Return the registered spec of `spec`, registering it if it is new. Thread-safe."""
        found = self._registered.get(spec)
        if found is None:
            with self._numbering:
                channel = self._channels.setdefault(spec.channel, len(self._channels))
                found = self._registered.setdefault(spec, RegisteredSpec(spec, len(self._registered), channel))
        return found

    def define(self, registered: RegisteredSpec, link: PeerLink) -> None:
        """Send a peer the meaning of our number, unless it was sent before."""
        if link.rank not in registered.defined_for:
            registered.defined_for.add(link.rank)
            payload = registered.spec.pack()
            head = header(FrameKind.DEFINE, self._view, spec=registered.number, length=len(payload))
            link.send_control(head, payload)

    def on_definition(self, link: PeerLink, number: int, spec: Spec) -> None:
        """Note the meaning of a peer's number."""
        self.by_peer[link.rank][number] = self.register(spec)

    def channel_tags(self) -> dict[int, bytes]:
        """Return the tag of each of our channels, by its number here."""
        return {number: channel_tag(channel) for channel, number in self._channels.items()}

    def close(self) -> None:
        """Let go of all memory that plans have kept for the next time, because the view is left."""
        for registered in list(self._registered.values()):
            for compiled in list(registered.plans.values()):
                compiled.offering.clear()
                compiled.cached_steps.clear()
                compiled.offers.clear()


class NoticeBatch:
    """Offers and completions for the peers of this host, collected over one turn and sent in one frame per peer.

    Entries have the format `frames.OFFERED` or `frames.FINISHED`; callers append them.
    """

    def __init__(self, peers: Peers) -> None:
        self.offers: defaultdict[PeerLink, bytearray] = defaultdict(bytearray)
        self.done: defaultdict[PeerLink, bytearray] = defaultdict(bytearray)
        self._peers = peers

    def send(self) -> None:
        """Send the notices and clear the batch."""
        for kind, notices in ((FrameKind.OFFER, self.offers), (FrameKind.DONE, self.done)):
            if notices:
                for link, entries in notices.items():
                    if link.rank not in self._peers.lost:
                        link.send_control(header(kind, self._peers.view.number, length=len(entries)), bytes(entries))
                notices.clear()


OnPong = Callable[[int, float], None]
"""Called once for each ping with the rank and the round-trip time in seconds, infinite if the peer is gone."""


class Pings:
    """Pings on their way. A peer answers them in order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._open: defaultdict[int, deque[OnPong]] = defaultdict(deque)

    def send(self, link: PeerLink, on_pong: OnPong) -> None:
        """Measure the round-trip time to a peer."""
        if link.rank in self._peers.lost:
            on_pong(link.rank, float("inf"))
            return
        self._open[link.rank].append(on_pong)
        link.send_control(header(FrameKind.PING, self._peers.view.number, extra=time.perf_counter_ns()))

    def on_pong(self, link: PeerLink, sent_ns: int) -> None:
        if self._open[link.rank]:
            seconds = (time.perf_counter_ns() - sent_ns) / 1e9
            self._open[link.rank].popleft()(link.rank, seconds)

    def waiting_for(self) -> list[int]:
        """Return the ranks that have not answered. Thread-safe."""
        return [rank for rank, waiting in list(self._open.items()) if waiting]

    def cancel(self, rank: int | None = None) -> None:
        """Answer the open pings to one rank, or to all ranks, with an infinite time."""
        for gone in list(self._open) if rank is None else [rank]:
            for on_pong in self._open.pop(gone, ()):
                on_pong(gone, float("inf"))
