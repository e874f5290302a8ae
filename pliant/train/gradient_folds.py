"""Sums of gradients of replicas that take their turns in one worker: nothing leaves the device.

A set holds one tensor for each parameter: the gradients of one replica, or the sum of several. Sets are the very tensors
that backward has made, they are added by few large calls, and the last one becomes `.grad`. `TreeFold` adds them along the
tree over the replicas, as turns end, and keeps at most log2(N) + 1 sets. `ChainFold` adds them in the order of stock DDP on
gloo, which depends on the place of an element in its bucket, so it needs all N sets. `HostTreeFold` and `HostChainFold` do
the same additions, but keep all sets except the newest in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from pliant.comm import order
from pliant.train.bucket_layout import BucketLayout, in_memory_order, is_dense, parameter_views

GradientSet = list[torch.Tensor]
"""One tensor for each parameter."""
HostMemory = Callable[[int, torch.dtype], torch.Tensor]
"""Allocates a flat tensor in host memory."""
CACHED_BYTES = 1 << 18
"""On a CPU the chains are computed for so many bytes of a set at a time, which stay in the cache."""
PIECE_BYTES = 16 << 20
"""How much of a set comes back from the host at a time."""


class GradientFold(Protocol):
    """Adds up sets of gradients."""

    def clear(self) -> None:
        """Drop all sets: the turns begin, for the first time or again."""

    def add(self, gradients: GradientSet) -> None:
        """Add the gradients of the next replica. The fold owns them from now on, and may overwrite them."""

    def take_sum(self) -> GradientSet:
        """Return the sum of all replicas; the fold is empty afterwards."""


def make_fold(
    order_name: str,
    parameters: Sequence[torch.nn.Parameter],
    layout: BucketLayout,
    num_replicas: int,
    host_memory: HostMemory | None = None,
) -> GradientFold:
    """Return the fold for this order ("tree" or "ddp"). `host_memory`: keep sets there instead of on the device."""
    if order_name == "tree":
        if host_memory is not None:
            return HostTreeFold(parameters, num_replicas, host_memory)
        return TreeFold(parameters, range(num_replicas), num_replicas)
    if host_memory is not None:
        return HostChainFold(parameters, layout, num_replicas, host_memory)
    return ChainFold(parameters, layout, num_replicas)


# --- on the device ---


def _count_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, and other objects, use the memory of this one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_SINGLE_USE = _count_uses(torch.empty(1))


def own_memory(gradients: GradientSet) -> None:
    """Replace gradients whose memory others use by copies, so that the set may be overwritten.

    Backward hands on views where it can: the gradients of `a` and `b` share their memory after `a.view(-1) + b.view(-1)`,
    or share it with what the rest of backward, or the program, still reads.
    """
    count = torch._C._storage_Use_Count
    uses = [count(gradient.untyped_storage()._cdata) for gradient in gradients]
    if uses.count(_SINGLE_USE) != len(uses):
        for index, gradient in enumerate(gradients):
            if _count_uses(gradient) != _SINGLE_USE:
                gradients[index] = gradient.clone()


class SetAdder:
    """Adds one set to another in few calls: one for each type and device, as torch's fused kernels want it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, parameter in enumerate(parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(index)
        self._groups = list(groups.values()) if len(groups) > 1 else None
        """The parameters of each type and device; None if all are alike."""

    def add(self, target: GradientSet, other: GradientSet) -> None:
        """Compute target + other in the place of `target`."""
        for left, right in zip(self._split(target), self._split(other), strict=True):
            torch._foreach_add_(left, right)

    def scale(self, target: GradientSet, factor: float) -> None:
        """Multiply a set by `factor`, as `torch.mul` does: also for types of 16 bits, the factor has 24."""
        for group in self._split(target):
            if group[0].is_cuda:
                torch._foreach_mul_(group, factor)
            else:  # here the same call would first round a number to the type of the tensors
                wide = group[0].dtype in (torch.float64, torch.complex128)
                torch._foreach_mul_(group, torch.tensor(factor, dtype=torch.float64 if wide else torch.float32))

    def _split(self, gradients: GradientSet) -> list[GradientSet]:
        if self._groups is None:
            return [gradients]
        return [[gradients[index] for index in group] for group in self._groups]


def count_merges(block: range, num_replicas: int) -> list[int]:
    """Return for each replica of a block how many nodes of the tree over all replicas are complete with it, if the nodes
    must lie within the block."""
    merges = [0] * len(block)

    def visit(low: int, high: int) -> None:
        if high - low > 1:
            middle = low + order.tree_split(high - low)
            if block.start <= low and high <= block.stop:
                merges[high - 1 - block.start] += 1
            visit(low, middle)
            visit(middle, high)

    visit(0, num_replicas)
    return merges


class TreeFold:
    """Adds sets along the tree over the replicas: like a binary counter, two sums of a size at once become one."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], block: range, num_replicas: int) -> None:
        """The replicas of `block` are added one after the other."""
        self._adder = SetAdder(parameters)
        self._merges = count_merges(block, num_replicas)
        self._added = 0
        self._sets: list[GradientSet] = []
        """The sums of the subtrees that are complete, from left to right."""

    def clear(self) -> None:
        self._sets, self._added = [], 0

    def add(self, gradients: GradientSet) -> None:
        for _ in range(self._merges[self._added]):
            left = self._sets.pop()
            self._adder.add(left, gradients)
            gradients = left
        self._sets.append(gradients)
        self._added += 1

    def take_sum(self) -> GradientSet:
        [total] = self._sets
        self.clear()
        return total


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter, in its memory order, that are added in the same order."""

    index: int
    begin: int
    end: int
    is_whole: bool
    """Whether these are all of its elements."""


def plan_chains(
    parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, num_replicas: int, batch_bytes: float
) -> list[tuple[order.Term, list[Piece]]]:
    """Return what to add in which order of replicas, for all elements of all buckets. Pieces with the same order come
    together, in batches of at most so many bytes."""
    by_chunk: dict[int, list[Piece]] = {}
    for indices in layout.buckets:
        sizes = [parameters[index].numel() for index in indices]
        item_bytes = parameters[indices[0]].element_size()
        length = order.chunk_length(sum(sizes), item_bytes, num_replicas)
        for index, first, size in zip(indices, accumulate(sizes, initial=0), sizes, strict=False):
            for begin, end, chunk in order.chunks_between(first, first + size, length):
                for piece_begin, piece_end in _cut(begin - first, end - first, batch_bytes / item_bytes):
                    piece = Piece(index, piece_begin, piece_end, piece_end - piece_begin == size)
                    by_chunk.setdefault(chunk, []).append(piece)
    kinds = [f"{parameter.dtype} {parameter.device}" for parameter in parameters]
    plan: list[tuple[order.Term, list[Piece]]] = []
    for chunk, pieces in by_chunk.items():
        chain, batch, kind, batched = order.chain(chunk, num_replicas), list[Piece](), "", 0.0
        for piece in sorted(pieces, key=lambda piece: kinds[piece.index]):
            num_bytes = (piece.end - piece.begin) * parameters[piece.index].element_size()
            if batch and (batched + num_bytes > batch_bytes or kinds[piece.index] != kind):
                plan.append((chain, batch))
                batch, batched = [], 0.0
            batch.append(piece)
            batched, kind = batched + num_bytes, kinds[piece.index]
        plan.append((chain, batch))
    return plan


def _cut(begin: int, end: int, length: float) -> list[tuple[int, int]]:
    """Split a range into pieces of at most this length."""
    if end - begin <= length:
        return [(begin, end)]
    step = max(1, int(length))
    return [(first, min(first + step, end)) for first in range(begin, end, step)]


class _Chains:
    """Finds the pieces of a plan in sets of gradients."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, num_replicas: int, batch_bytes: float
    ) -> None:
        self.plan = plan_chains(parameters, layout, num_replicas, batch_bytes)
        cut = {piece.index for _, pieces in self.plan for piece in pieces if not piece.is_whole}
        self._cut = [(index, parameters[index]) for index in sorted(cut)]
        self._strides = {index: parameter.stride() if is_dense(parameter) else None for index, parameter in self._cut}

    def arrange(self, gradients: GradientSet) -> None:
        """Give the gradients that are cut the memory order of their parameters. Nearly always they have it already."""
        for index, parameter in self._cut:
            gradient, stride = gradients[index], self._strides[index]
            if gradient.stride() != stride if stride is not None else not gradient.is_contiguous():
                flat = in_memory_order(parameter, gradient)
                [gradients[index]] = parameter_views(flat.contiguous(), [parameter])

    def cut(self, gradients: GradientSet, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return these pieces of a set that was arranged."""
        found = []
        for piece in pieces:
            gradient = gradients[piece.index]
            if not piece.is_whole:
                place = gradient.storage_offset() + piece.begin
                gradient = gradient.as_strided((piece.end - piece.begin,), (1,), place)
            found.append(gradient)
        return found


class ChainFold:
    """Adds sets in the order of stock DDP on gloo: each chunk of a bucket along a chain of its own."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, num_replicas: int) -> None:
        batch_bytes = float("inf") if parameters[0].is_cuda else CACHED_BYTES
        self._chains = _Chains(parameters, layout, num_replicas, batch_bytes)
        self._last = num_replicas - 1
        self._sets: list[GradientSet] = []

    def clear(self) -> None:
        self._sets = []

    def add(self, gradients: GradientSet) -> None:
        self._chains.arrange(gradients)
        self._sets.append(gradients)

    def take_sum(self) -> GradientSet:
        sets, self._sets = self._sets, []
        for replicas, pieces in self._chains.plan:
            operands = [self._chains.cut(sets[replica], pieces) for replica in replicas]
            place = replicas.index(self._last)
            # The sum takes the place of the last replica's gradients. What comes before it in the chain is added in
            # the place of the first one.
            total = operands[0]
            for number, other in enumerate(operands[1:], start=1):
                if number == place:
                    total, other = other, total
                torch._foreach_add_(total, other)
        return sets[self._last]


# --- with sets in host memory ---


class _HostSets:
    """Sets of gradients in host memory. All copies run on the current stream, so they are ordered with the compute, and
    the device's memory is free again as soon as a set has left it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], memory: HostMemory) -> None:
        self._parameters, self._memory = list(parameters), memory
        self._free: list[list[torch.Tensor]] = []

    def save(self, gradients: GradientSet) -> list[torch.Tensor]:
        """Copy a set to the host; return flat tensors in the memory order of the parameters."""
        saved = self._free.pop() if self._free else [self._memory(p.numel(), p.dtype) for p in self._parameters]
        for host, gradient, parameter in zip(saved, gradients, self._parameters, strict=True):
            host.copy_(in_memory_order(parameter, gradient), non_blocking=True)
        return saved

    def release(self, saved: list[torch.Tensor]) -> None:
        """Use this memory for another set."""
        self._free.append(saved)


class HostTreeFold:
    """Adds sets along the tree. The sums of complete subtrees are kept in host memory."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], num_replicas: int, memory: HostMemory) -> None:
        self._parameters = list(parameters)
        self._host = _HostSets(parameters, memory)
        self._merges = count_merges(range(num_replicas), num_replicas)
        self._sets: list[list[torch.Tensor]] = []
        self._added = 0
        self._total: GradientSet = []

    def clear(self) -> None:
        for saved in self._sets:
            self._host.release(saved)
        self._sets, self._total, self._added = [], [], 0

    def add(self, gradients: GradientSet) -> None:
        for _ in range(self._merges[self._added]):
            left = self._sets.pop()
            for index, parameter in enumerate(self._parameters):
                right = in_memory_order(parameter, gradients[index])
                for begin, end in _cut(0, right.numel(), PIECE_BYTES / right.element_size()):
                    right[begin:end].add_(left[index][begin:end].to(right.device, non_blocking=True))
                [gradients[index]] = parameter_views(right, [parameter])
            self._host.release(left)
        self._added += 1
        if self._added < len(self._merges):
            self._sets.append(self._host.save(gradients))
        else:
            self._total = gradients

    def take_sum(self) -> GradientSet:
        total = self._total
        self.clear()
        return total


class HostChainFold:
    """Adds sets in the order of stock DDP on gloo. All sets but the last are kept in host memory."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, num_replicas: int, memory: HostMemory
    ) -> None:
        self._parameters, self._last = list(parameters), num_replicas - 1
        self._chains = _Chains(parameters, layout, num_replicas, PIECE_BYTES)
        self._host = _HostSets(parameters, memory)
        self._sets: list[list[torch.Tensor]] = []
        self._newest: GradientSet = []

    def clear(self) -> None:
        for saved in self._sets:
            self._host.release(saved)
        self._sets, self._newest = [], []

    def add(self, gradients: GradientSet) -> None:
        if len(self._sets) < self._last:
            self._sets.append(self._host.save(gradients))
        else:
            self._newest = gradients

    def take_sum(self) -> GradientSet:
        pairs = zip(self._parameters, self._newest, strict=True)
        flats = [in_memory_order(parameter, gradient) for parameter, gradient in pairs]
        for replicas, pieces in self._chains.plan:
            for piece in pieces:
                self._add_piece(flats[piece.index], replicas, piece)
        self.clear()
        return parameter_views_of_each(flats, self._parameters)

    def _add_piece(self, flat: torch.Tensor, replicas: order.Term, piece: Piece) -> None:
        newest, total = flat[piece.begin : piece.end], None
        for replica in replicas:
            if replica == self._last:
                total = newest if total is None else newest.add_(total)
                continue
            saved = self._sets[replica][piece.index][piece.begin : piece.end]
            operand = saved.to(flat.device, non_blocking=True, copy=total is None)
            total = operand if total is None else total.add_(operand)


def parameter_views_of_each(
    flats: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Return each flat tensor in the form of its parameter."""
    return [parameter_views(flat, [parameter])[0] for flat, parameter in zip(flats, parameters, strict=True)]
