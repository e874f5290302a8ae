"""The way of gradients over a process group of torch, for workers with a GPU each: nothing goes through the host's memory.

The group of a view is made beside training (`comm.process_group`). Until every worker has it, sums take the way through the
host, which has the same bits. The workers tell each other in the messages of a pass, so all of them change over at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pliant.comm.process_group import GroupOffer, SumGroup
from pliant.train.gradient_folds import count_merges

if TYPE_CHECKING:
    from pliant.comm.engine import Engine
    from pliant.comm.group_sum import GroupOrder
    from pliant.comm.handle import Handle

JOIN_S = 2.0
"""How long the end of the job waits for the threads of the last group."""


class GroupPath:
    """Sums the buckets of one reducer. All workers begin their sums in the order of the buckets, as a group demands."""

    def __init__(self, offer: GroupOffer, device: torch.device, order: GroupOrder) -> None:
        self.in_use = False
        """Whether the sums of the present pass take this way. It changes between passes, on all workers alike."""
        self._offer, self._device, self._order = offer, device, order
        self._group: SumGroup | None = None
        self._blocks: tuple[int, ...] = ()
        self._merges: list[int] = []
        """For each replica hosted here, how many operands of a bucket are complete subtrees with it."""
        self._operands: dict[int, list[torch.Tensor]] = {}
        """The operands of each bucket so far, by its number."""
        self._num_added: dict[int, int] = {}
        """The replicas that were added to each bucket."""
        self._names: dict[int, str] = {}
        self._handles: list[Handle] = []

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Begin to make a group of the workers of this view. Rank r hosts `blocks[r]` replicas."""
        self.close(join_s=0.0)
        self.in_use, self._blocks = False, tuple(blocks)
        begin, count = sum(blocks[: engine.rank]), blocks[engine.rank]
        is_tree = self._order == "tree"
        self._merges = count_merges(range(begin, begin + count), sum(blocks)) if is_tree else [0] * count
        if engine.size > 1 and self._offer.backend:
            self._group = SumGroup(engine, self._device, self._offer)
            self._group.start()

    def close(self, join_s: float = JOIN_S) -> None:
        """End the group, if there is one; wait at most so long for its threads."""
        group, self._group, self.in_use = self._group, None, False
        self.clear()
        if group is not None:
            group.close()
            group.join(join_s)

    @property
    def is_ready(self) -> bool:
        """Whether this worker could sum on the group now."""
        return self._group is not None and self._group.is_ready

    def use_if(self, all_ready: bool) -> None:
        """Take this way from the next pass on, if all workers were ready in the last one. It is never left in a view."""
        self.in_use = self.in_use or (all_ready and self._group is not None)

    def clear(self) -> None:
        """Forget the buckets: their turns begin, for the first time or again."""
        self._operands, self._num_added, self._handles = {}, {}, []

    def add(self, number: int, name: str, flat: torch.Tensor) -> None:
        """Add a bucket of the replica whose turn it is. The path owns the tensor, and may add to it.

        With the last replica hosted here its sum begins, as soon as those of all buckets with lower numbers have.
        """
        operands, added = self._operands.setdefault(number, []), self._num_added.get(number, 0)
        operands.append(flat)
        for _ in range(self._merges[added]):
            right = operands.pop()
            operands[-1].add_(right)
        self._num_added[number], self._names[number] = added + 1, name
        assert self._group is not None, "it is in use"
        while self._num_added.get(next_number := len(self._handles)) == len(self._merges):
            del self._num_added[next_number]
            complete = self._operands.pop(next_number)
            self._handles.append(self._group.sum(self._names[next_number], complete, self._blocks, self._order))

    def wait(self, number: int) -> torch.Tensor:
        """Return the sum of a bucket, as a flat tensor on the device. Raises CommError if a worker is lost."""
        total = self._handles[number].wait()
        assert total is not None, "a sum has a result on every rank"
        return total
