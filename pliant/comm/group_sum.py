"""The exact sum of a flat tensor on a process group of torch: which elements go where, and what is added to what.

The tensor is cut into one shard per rank. Every rank sends each shard of its operands to the owner of the shard
(`all_to_all`), the owner adds the operands in the order of the job, and every rank collects all sums (`all_gather`). With
one operand per rank these are the bytes of a ring all-reduce, and the order of summation is ours. In the order "tree" the
operands of a rank are the largest subtrees of its block of replicas, usually one; in "ddp" they are the replicas
themselves.

The plan is pure; `pack` and `fold` execute it on tensors, on whatever device these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch

from pliant.comm import order as orders

GroupOrder = Literal["ddp", "tree"]
ALIGNMENT = 16
"""Shards begin at multiples of this many bytes, so that kernels on a GPU can use wide loads."""
RESULT = -1
"""Stands for the memory of the result where an addition names its operands."""


@dataclass(frozen=True, slots=True)
class Addition:
    """`target = left + right` for the elements [begin, end) of a shard. Operands are numbered over all ranks."""

    left: int
    right: int
    target: int
    begin: int
    end: int


@dataclass(frozen=True)
class GroupPlan:
    """How the ranks of a view sum one flat tensor. Rank r hosts `blocks[r]` of the replicas, in the order of ranks."""

    order: GroupOrder
    blocks: tuple[int, ...]
    length: int
    item_bytes: int

    @property
    def num_replicas(self) -> int:
        return sum(self.blocks)

    @cached_property
    def operands(self) -> tuple[tuple[range, ...], ...]:
        """The replicas in each operand of each rank."""
        bounds = list(accumulate(self.blocks, initial=0))
        return tuple(operands_of_block(self.order, begin, end, self.num_replicas) for begin, end in pairwise(bounds))

    @cached_property
    def shard_length(self) -> int:
        """The length of each shard, except that the last ones may be shorter, or empty."""
        step = max(1, ALIGNMENT // self.item_bytes)
        return -(-self.length // (len(self.blocks) * step)) * step

    @property
    def padded_length(self) -> int:
        """The length of the memory for the sum: as many whole shards as there are ranks."""
        return self.shard_length * len(self.blocks)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return begin and end of the shard that `rank` owns."""
        return min(self.length, rank * self.shard_length), min(self.length, (rank + 1) * self.shard_length)

    def shard_size(self, rank: int) -> int:
        begin, end = self.shard(rank)
        return end - begin

    def send_splits(self, rank: int) -> list[int]:
        """Return how many elements `rank` sends to each rank in the exchange of shards."""
        return [len(self.operands[rank]) * self.shard_size(to) for to in range(len(self.blocks))]

    def receive_splits(self, rank: int) -> list[int]:
        """Return how many elements `rank` gets from each rank in the exchange of shards."""
        return [len(own) * self.shard_size(rank) for own in self.operands]

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that `rank` sends to others for one sum: shards of operands, then its shard of the sum."""
        splits = self.send_splits(rank)
        gathered = (len(self.blocks) - 1) * self.shard_length
        return (sum(splits) - splits[rank] + gathered) * self.item_bytes


@lru_cache(maxsize=1024)
def plan_of(order: GroupOrder, blocks: tuple[int, ...], length: int, item_bytes: int) -> GroupPlan:
    """Return the plan; one and the same object for the same arguments."""
    return GroupPlan(order, blocks, length, item_bytes)


def operands_of_block(order: GroupOrder, begin: int, end: int, num_replicas: int) -> tuple[range, ...]:
    """Return the operands that a worker with the replicas [begin, end) contributes, each as the replicas in it."""
    if order == "tree":
        return tuple(orders.subtrees(begin, end, num_replicas))
    return tuple(range(replica, replica + 1) for replica in range(begin, end))


@lru_cache(maxsize=4096)
def additions(plan: GroupPlan, rank: int) -> Sequence[Addition]:
    """Return what the owner of a shard adds, in order. The last addition of each element has the target RESULT."""
    begin, end = plan.shard(rank)
    if plan.order == "tree":
        return _tree_additions([each for own in plan.operands for each in own], end - begin)
    length = orders.chunk_length(plan.length, plan.item_bytes, plan.num_replicas)
    found = []
    for low, high, chunk in orders.chunks_between(begin, end, length):
        found += _chain_additions(orders.chain(chunk, plan.num_replicas), low - begin, high - begin)
    return found


def _tree_additions(operands: Sequence[range], length: int) -> list[Addition]:
    """Return the additions up the tree over all replicas, of which these subtrees are given."""
    where = {each: number for number, each in enumerate(operands)}
    found: list[Addition] = []

    def add_up(node: range) -> int:
        if node in where:
            return where[node]
        middle = node.start + orders.tree_split(len(node))
        left, right = add_up(range(node.start, middle)), add_up(range(middle, node.stop))
        found.append(Addition(left, right, left, 0, length))
        return left

    add_up(range(operands[0].start, operands[-1].stop))
    if not found:
        return []
    root = found.pop()
    return [*found, Addition(root.left, root.right, RESULT, 0, length)]


def _chain_additions(chain: Sequence[int], begin: int, end: int) -> list[Addition]:
    """Return the additions acc = next + acc along a chain of replicas."""
    first, *others = chain
    found = [Addition(replica, first, first, begin, end) for replica in others[:-1]]
    return [*found, *(Addition(replica, first, RESULT, begin, end) for replica in others[-1:])]


# --- on tensors ---


def pack(plan: GroupPlan, rank: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the flat operands of `rank` as the exchange of shards takes them: shard by shard."""
    if len(operands) == 1:
        return operands[0]
    shards = [plan.shard(to) for to in range(len(plan.blocks))]
    return torch.cat([operand[begin:end] for begin, end in shards for operand in operands])


def fold(plan: GroupPlan, rank: int, received: torch.Tensor, result: torch.Tensor) -> None:
    """Add the operands of the shard of `rank`, which lie one after the other in `received`, into `result`. The operands
    are overwritten."""
    size = plan.shard_size(rank)
    if not size:
        return
    rows = received.view(-1, size)
    memory = [*rows.unbind(), result]  # RESULT is -1, the last of them
    if len(rows) == 1:
        result.copy_(rows[0])
        return
    for each in additions(plan, rank):
        part = slice(each.begin, each.end)
        torch.add(memory[each.left][part], memory[each.right][part], out=memory[each.target][part])
