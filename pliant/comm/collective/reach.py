"""The shared memory of this host that a worker can reach in a view: its own, and what its peers let it map."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pliant.comm.collective.peers import Peers
from pliant.comm.collective.span import Span
from pliant.comm.shm import SharedMemory
from pliant.comm.transport.wire import Kind, Place, header


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
