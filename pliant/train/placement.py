"""Which worker hosts which replicas: each a block of them, in the order of ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pliant.errors import TrainError

Blocks = Callable[[int], Sequence[int]]
"""How many replicas each of so many workers hosts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank r hosts `blocks[r]` replicas; this is how `rank` sees it."""

    blocks: tuple[int, ...] = ()
    rank: int = 0

    @property
    def hosted(self) -> range:
        """The replicas of this rank."""
        begin = sum(self.blocks[: self.rank])
        return range(begin, begin + self.blocks[self.rank]) if self.blocks else range(0)

    def owner_of(self, replica: int) -> int:
        """The rank that hosts a replica."""
        for rank, size in enumerate(self.blocks):
            replica -= size
            if replica < 0:
                return rank
        raise AssertionError(f"no such replica: {replica}")


def place(num_replicas: int, size: int, rank: int, wanted: Blocks | None = None) -> Placement:
    """The replicas on so many workers: evenly, or as the program wants it.

    Raises:
        TrainError: what it wants does not place every replica, or leaves a worker without one.
    """
    blocks = tuple(wanted(size)) if wanted else even_blocks(num_replicas, size)
    if len(blocks) != size or sum(blocks) != num_replicas or min(blocks) < 1:
        raise TrainError(f"blocks {blocks} do not place {num_replicas} replicas on {size} workers, one or more on each")
    return Placement(blocks, rank)


def even_blocks(num_replicas: int, num_workers: int) -> tuple[int, ...]:
    """How many replicas each worker hosts: as even as can be, the first ones one more."""
    share, more = divmod(num_replicas, num_workers)
    return tuple(share + (rank < more) for rank in range(num_workers))
