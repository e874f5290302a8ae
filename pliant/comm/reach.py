"""The shared memory of this host that a worker can reach in a view: its own, and what its peers let it map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from pliant.comm.link import Link, header
from pliant.comm.operation import Span
from pliant.comm.shm import SharedMemory
from pliant.comm.wire import Kind, Place


class Reach:
    """Spans by their place (owner's rank, arena, offset). They stay, so views on them may be kept.

    The mappings themselves belong to the links, and outlive the view.
    """

    def __init__(self, rank: int, memory: SharedMemory, links: Mapping[int, Link]) -> None:
        self._rank = rank
        self._memory = memory
        self._links = links
        self.told = 0
        """How many of our own arenas all peers know."""
        self._early: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._spans: dict[tuple[int, int, int, torch.dtype, int], Span] = {}

    def span(self, place: Place, dtype: torch.dtype, length: int) -> Span:
        """`length` elements at `place`."""
        key = (*place, dtype, length)
        found = self._spans.get(key)
        if found is None:
            owner, arena, offset = place
            arenas = self._memory.arenas if owner == self._rank else self._links[owner].arenas
            found = self._spans[key] = Span(arenas[arena].flat(offset, dtype, length), owner, arena, offset)
            found.lasting = True
        return found

    def announce(self, arena: int, view: int, links: Iterable[Link]) -> None:
        """Let every peer of this host map our memory: one may hear of it from another before it hears from us."""
        for link in links:
            while link.told <= arena:
                mine = self._memory.arenas[link.told]
                link.say(header(Kind.ARENA, view, piece=link.told, extra=mine.size), fd=mine.fd)
                link.told += 1
        self.told = arena + 1

    def arrived(self, rank: int, arena: int) -> list[Callable[[], None]]:
        """What had to wait for this memory of a peer, which is mapped now."""
        return self._early.pop((rank, arena), [])

    def covers(self, places: Iterable[Place], otherwise: Callable[[], None]) -> bool:
        """Whether all places can be reached; if not, `otherwise` shall be called once the missing memory is here.

        A peer may speak of a third worker's memory while that worker's own word is still on its way.
        """
        for owner, arena, _ in places:
            if owner != self._rank and arena not in self._links[owner].arenas:
                self._early.setdefault((owner, arena), []).append(otherwise)
                return False
        return True
