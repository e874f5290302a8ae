"""DDP's layouts: which gradients are summed as one flat tensor, in which order, and where they lie in it.

gloo cuts a bucket into one chunk per rank and sums each chunk in an order of its own, so the bits of an element follow
from its place in its bucket. Stock DDP uses two layouts. The first (L1) has one bucket per type, in the order of the
parameters. After the first step it is replaced for good by L2: buckets of 1 and 25 MiB, in the order in which the gradients
of rank 0 became ready.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

FIRST_BYTES = 1 << 20
"""DDP's first bucket is small, so that its reduction begins early."""
CAP_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class BucketItem:
    """What a layout must know of one parameter."""

    kind: Hashable
    """Type and device. Parameters of different kinds never share a bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """For each bucket, the indices of its parameters in order."""

    buckets: tuple[tuple[int, ...], ...]

    def to_json(self) -> list[list[int]]:
        return [list(bucket) for bucket in self.buckets]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[int]]) -> BucketLayout:
        return cls(tuple(tuple(int(index) for index in bucket) for bucket in value))


def first_layout(
    items: Sequence[BucketItem], *, find_unused: bool = False, cap_bytes: int | None = None
) -> BucketLayout:
    """Return the layout that DDP begins with: L1, or with `find_unused` the small buckets that it then keeps."""
    if find_unused:
        return rebuilt_layout(items, range(len(items)), cap_bytes=cap_bytes)
    return _fill_buckets(items, range(len(items)), (math.inf,))


def rebuilt_layout(
    items: Sequence[BucketItem], ready_order: Sequence[int], *, cap_bytes: int | None = None
) -> BucketLayout:
    """Return L2: the parameters in the order in which replica 0's gradients became ready at the first step."""
    return _fill_buckets(items, ready_order, (FIRST_BYTES, CAP_BYTES) if cap_bytes is None else (cap_bytes,))


def _fill_buckets(items: Sequence[BucketItem], order: Sequence[int], limits: Sequence[float]) -> BucketLayout:
    """Fill buckets in `order`, one open bucket per kind; the parameter that reaches the limit closes it. The last limit
    repeats."""
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
    return BucketLayout(tuple(closed))


# --- flat tensors ---


def parameter_views(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return each parameter's view of a flat tensor, in the memory order of the parameter, as DDP lays them out."""
    views, offset = [], 0  # not by split(): programs could not change gradients in place while autograd records
    for parameter in parameters:
        if is_dense(parameter):
            views.append(flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset))
        else:
            views.append(flat[offset : offset + parameter.numel()].view(parameter.size()))
        offset += parameter.numel()
    return views


def in_memory_order(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a flat tensor, in the memory order of the parameter."""
    gradient = gradient.to_dense()
    if not is_dense(parameter):
        return gradient.reshape(-1)
    if gradient.stride() == parameter.stride():
        return gradient.as_strided((parameter.numel(),), (1,))
    flat = torch.empty(parameter.numel(), dtype=gradient.dtype, device=gradient.device)
    flat.as_strided(parameter.size(), parameter.stride()).copy_(gradient)
    return flat


def is_dense(parameter: torch.nn.Parameter) -> bool:
    """Return whether the elements fill a run of memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
