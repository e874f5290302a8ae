"""The shared memory of this host that a worker can reach: its own, and what its peers let it map."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

from pliant.comm.link import Link, header
from pliant.comm.operation import Span
from pliant.comm.shm import Arena, SharedMemory
from pliant.comm.wire import Kind, Place
from pliant.errors import CommError


class Reach:
    """Spans by their place (owner's rank, arena, offset). They stay, so views on them may be kept."""

    def __init__(self, rank: int, memory: SharedMemory) -> None:
        self._rank = rank
        self._memory = memory
        self._arenas: dict[tuple[int, int], Arena] = {}
        self.told = 0
        """How many of our own arenas the peers know."""
        self._early: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._spans: dict[tuple[int, int, int, torch.dtype, int], Span] = {}

    def span(self, place: Place, dtype: torch.dtype, length: int) -> Span:
        """`length` elements at `place`."""
        key = (*place, dtype, length)
        found = self._spans.get(key)
        if found is None:
            owner, arena, offset = place
            memory = self._memory.arenas[arena] if owner == self._rank else self._arenas[owner, arena]
            found = self._spans[key] = Span(memory.flat(offset, dtype, length), owner, arena, offset)
            found.lasting = True
        return found

    def announce(self, arena: int, view: int, links: Iterable[Link]) -> None:
        """Let every peer of this host map our memory: one may hear of it from another before it hears from us."""
        while self.told <= arena:
            mine = self._memory.arenas[self.told]
            for link in links:
                link.say(header(Kind.ARENA, view, piece=self.told, extra=mine.size), fd=mine.fd)
            self.told += 1

    def take(self, link: Link, number: int, size: int) -> list[Callable[[], None]]:
        """Map the memory that a peer announced; what had to wait for that."""
        if not link.fds:
            raise CommError(f"{link.worker} announced shared memory, but no descriptor came with it")
        fd = link.fds.popleft()
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise CommError(f"{link.worker} announced {size} bytes of shared memory, but gave less")
        arena = self._arenas[link.rank, number] = Arena(fd, size)
        arena.close()  # the mapping stays
        return self._early.pop((link.rank, number), [])

    def covers(self, places: Iterable[Place], otherwise: Callable[[], None]) -> bool:
        """Whether all places can be reached; if not, `otherwise` shall be called once the missing memory is here.

        A peer may speak of a third worker's memory while that worker's own word is still on its way.
        """
        for owner, arena, _ in places:
            if owner != self._rank and (owner, arena) not in self._arenas:
                self._early.setdefault((owner, arena), []).append(otherwise)
                return False
        return True
