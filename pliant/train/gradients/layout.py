"""DDP's buckets: which gradients are summed as one flat tensor. The bits of the sum depend on it.

gloo cuts a bucket into one chunk per rank and sums each chunk in an order of its own, so an element's
bits follow from its place in its bucket. Stock DDP uses two layouts: one bucket per type in the
order of the parameters at the first step (L1), and then buckets of 1 and 25 MiB in the order in which
the gradients of rank 0 became ready (L2), for ever. Pure values: no gradients here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FIRST_BYTES = 1 << 20
"""DDP's first bucket is small, so that its reduction begins early."""
CAP_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """What a layout must know of one parameter."""

    kind: Hashable
    """Type and device: what differs in it never shares a bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """For each bucket, the indices of its parameters in order."""

    buckets: tuple[tuple[int, ...], ...]

    def to_json(self) -> list[list[int]]:
        return [list(bucket) for bucket in self.buckets]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[int]]) -> Layout:
        return cls(tuple(tuple(int(index) for index in bucket) for bucket in value))


def first_layout(items: Sequence[Item], *, find_unused: bool = False, cap_bytes: int | None = None) -> Layout:
    """What DDP begins with: L1, or with `find_unused` the small buckets that it then keeps."""
    limits = limits_of(cap_bytes) if find_unused else (math.inf,)
    return _assign(items, range(len(items)), limits)


def rebuilt_layout(items: Sequence[Item], ready_order: Sequence[int], *, cap_bytes: int | None = None) -> Layout:
    """L2: the parameters in the order in which replica 0's gradients became ready at the first step."""
    return _assign(items, ready_order, limits_of(cap_bytes))


def limits_of(cap_bytes: int | None) -> tuple[float, ...]:
    """The sizes at which buckets are closed; the last one repeats. A cap that the user gives holds for all."""
    return (FIRST_BYTES, CAP_BYTES) if cap_bytes is None else (cap_bytes,)


def _assign(items: Sequence[Item], order: Sequence[int], limits: Sequence[float]) -> Layout:
    """Fill buckets in `order`, one open bucket per kind; a bucket is closed by the parameter that fills it."""
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    closed_of_kind: dict[Hashable, int] = {}
    closed: list[tuple[int, ...]] = []
    for index in order:
        kind = items[index].kind
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + items[index].num_bytes
        limit = limits[min(closed_of_kind.get(kind, 0), len(limits) - 1)]
        if sizes[kind] >= limit:
            closed.append(tuple(open_buckets.pop(kind)))
            sizes[kind] = 0
            closed_of_kind[kind] = closed_of_kind.get(kind, 0) + 1
    closed.extend(tuple(bucket) for bucket in open_buckets.values())
    return Layout(tuple(closed))
