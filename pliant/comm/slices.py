"""Slices: pieces of a tensor that travel alone, and the queue that decides which goes next.

Pure: element ranges and priorities, no tensors and no sockets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from pliant.comm.order import chunk_length, chunks_between

T = TypeVar("T")

WHOLE_BYTES = 64 << 10
"""A tensor up to this size is not cut: a message costs more than its bytes."""
WHOLE_SHARED_BYTES = 512 << 10
"""The same, where all ranks share memory and the bytes cost still less."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a tensor, travelling on topology number `lane`."""

    begin: int
    end: int
    lane: int
    chunk: int | None
    """The chunk of the exact order it lies in; None where it spans several, or where the order is free."""

    @property
    def length(self) -> int:
        return self.end - self.begin


def even_partition(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges that cover all elements; the first ones are longer by one where it does not divide."""
    size, longer = divmod(num_elements, parts)
    ranges, begin = [], 0
    for part in range(parts):
        end = begin + size + (part < longer)
        ranges.append((begin, end))
        begin = end
    return ranges


def name_hash(name: str) -> int:
    """The sum of the squared code points (KungFu's hash of names)."""
    return sum(ord(letter) ** 2 for letter in name)


def spread(name: str) -> int:
    """Spreads names over topologies, equally on every rank.

    Squares are 0 or 1 modulo 4, so KungFu's hash alone would give two of four owners nearly everything.
    """
    return name_hash(name) * 2654435761 >> 15


def cut(
    name: str, num_elements: int, item_bytes: int, lanes: int, slice_bytes: int, whole_bytes: int = WHOLE_BYTES
) -> list[Slice]:
    """Slices of about equal size, dealt out to the lanes in turn. Their order of summation is free."""
    if num_elements == 0:
        return []
    parts = max(1, -(-num_elements * item_bytes // slice_bytes))
    if parts < lanes and num_elements * item_bytes > whole_bytes:
        parts = min(lanes, num_elements)
    first = spread(name)
    return [
        Slice(begin, end, (first + index) % lanes, None)
        for index, (begin, end) in enumerate(even_partition(num_elements, parts))
    ]


def cut_exact(
    name: str,
    num_elements: int,
    item_bytes: int,
    lanes: int,
    slice_bytes: int,
    num_replicas: int,
    whole_bytes: int = WHOLE_BYTES,
) -> list[Slice]:
    """Slices that each lie in one chunk of the exact order; the chunks are spread over the lanes.

    A small tensor stays whole and spans all its chunks: whoever folds it folds each part in its order.
    """
    if num_elements == 0:
        return []
    if num_elements * item_bytes <= whole_bytes:
        return [Slice(0, num_elements, spread(name) % lanes, 0 if num_replicas == 1 else None)]
    slices = []
    for begin, end, chunk in chunks_between(0, num_elements, chunk_length(num_elements, item_bytes, num_replicas)):
        parts = max(1, -(-(end - begin) * item_bytes // slice_bytes))
        lane = chunk * lanes // num_replicas
        slices += [Slice(begin + low, begin + high, lane, chunk) for low, high in even_partition(end - begin, parts)]
    return slices


@dataclass(frozen=True, slots=True)
class Portion:
    """A run of a larger tensor that travels by itself, in slices and with owners of its own.

    Its exact order is that of the larger tensor: however the larger one is cut, the bits of the sum are the same.
    """

    whole: int
    """Elements of the larger tensor."""
    begin: int
    """Where the run begins in it."""
    lanes: tuple[int, ...]
    """The lane of each slice; the run is cut evenly into as many."""


def cut_portion(
    portion: Portion, num_elements: int, item_bytes: int, lanes: int, num_replicas: int | None
) -> list[Slice]:
    """The slices of a run of `num_elements`; `num_replicas` is None where the order of summation is free."""
    length = chunk_length(portion.whole, item_bytes, num_replicas) if num_replicas else 0
    slices = []
    ranges = even_partition(num_elements, max(1, min(len(portion.lanes), num_elements)))
    for (begin, end), lane in zip(ranges, portion.lanes, strict=False):
        first, last = portion.begin + begin, portion.begin + end - 1
        in_one_chunk = length and first // length == last // length
        slices.append(Slice(begin, end, lane % lanes, first // length if in_one_chunk else None))
    return slices if num_elements else []


class PriorityQueue(Generic[T]):
    """Lowest priority number first, and among equals the oldest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._age = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, priority: int, item: T) -> None:
        heapq.heappush(self._heap, (priority, self._age, item))
        self._age += 1

    def pop(self) -> T:
        return heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        self._heap.clear()
