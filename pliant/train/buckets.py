"""DDP's buckets in memory, and how they are cut into units.

With priority a bucket is cut into units, which travel by themselves; the order of summation stays that of the bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.plan import Portion
from pliant.train.bucket_layout import BucketLayout, parameter_views

if TYPE_CHECKING:
    from pliant.train.sync import SyncConfig


# --- buckets in memory ---


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket: a flat tensor for each replica hosted here, and one for the sum."""

    number: int
    name: str
    indices: list[int]
    """The indices of its parameters."""
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    """The number of elements of each parameter."""
    parts: list[torch.Tensor]
    """The gradients, one tensor per hosted replica, in memory that the workers of a host share."""
    total: torch.Tensor
    """The sum, in the same kind of memory. It is the only part itself if there is just one."""
    whole: int
    """A bit for each parameter."""
    is_plain: bool
    """Whether all parameters are contiguous."""
    sums: Sequence[torch.Tensor] = ()
    """Each parameter's view of the sum."""
    copied: torch.cuda.Event | None = None
    """CUDA: recorded when the present replica's bucket has left the device."""
    seen: int = 0
    """The bits of the parameters whose gradient has come in this turn."""
    handle: Handle | None = None

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the present replica; None for parameters that it has not used."""
        found = [parameter.grad for parameter in self.parameters]
        if self.seen == self.whole:
            return found
        return [gradient if self.seen >> number & 1 else None for number, gradient in enumerate(found)]


@dataclass(frozen=True, slots=True, eq=False)
class GradientSlot:
    """The place of one parameter's gradient."""

    bucket: Bucket
    bit: int
    """Its bit in `Bucket.seen`."""
    begin: int
    end: int
    """`begin` and `end` of its elements in the bucket's flat tensors."""
    views: list[torch.Tensor]
    """CPU: where the gradient goes, for each hosted replica."""


@dataclass(slots=True, eq=False)
class UnitBuffer:
    """A unit of a bucket, and its sum in the step in progress."""

    name: str
    indices: list[int]
    """The indices of its parameters."""
    parameters: list[torch.nn.Parameter]
    parts: list[torch.Tensor]
    total: torch.Tensor
    sums: Sequence[torch.Tensor]
    portion: Portion
    priority: int = 0
    missing: int = 0
    """Gradients that have not come yet in this turn."""
    handle: Handle | None = None


def allocate_buckets(
    layout: BucketLayout,
    parameters: Sequence[torch.nn.Parameter],
    engine: Engine,
    hosted: int,
    *,
    prefix: str,
    on_device: bool,
) -> list[Bucket]:
    """Allocate buckets for `hosted` replicas, with the same names on all workers. If gradients are `on_device`, pin the
    memory for copies from there."""
    made = []
    for number, indices in enumerate(layout.buckets):
        members = [parameters[index] for index in indices]
        sizes = [parameter.numel() for parameter in members]
        empty = partial(engine.empty, sum(sizes), members[0].dtype)
        parts = [empty() for _ in range(hosted)]
        bucket = Bucket(
            number,
            f"{prefix}:{number}",
            list(indices),
            members,
            sizes,
            parts,
            total=parts[0] if hosted == 1 else empty(),
            whole=(1 << len(members)) - 1,
            is_plain=all(parameter.is_contiguous() for parameter in members),
        )
        if on_device:
            for memory in (*bucket.parts, bucket.total):
                engine.pin(memory)
        else:
            bucket.sums = parameter_views(bucket.total, members)
        made.append(bucket)
    return made


def gradient_slots(buckets: Sequence[Bucket]) -> list[GradientSlot]:
    """Return the place of each parameter's gradient, by its index."""
    places: dict[int, GradientSlot] = {}
    for bucket in buckets:
        views = zip(*(parameter_views(part, bucket.parameters) for part in bucket.parts), strict=True)
        begins = accumulate(bucket.sizes, initial=0)
        for number, (index, begin, size, of_replicas) in enumerate(
            zip(bucket.indices, begins, bucket.sizes, views, strict=False)
        ):
            places[index] = GradientSlot(bucket, 1 << number, begin, begin + size, list(of_replicas))
    return [places[index] for index in range(len(places))]


def cut_unit_buffers(buckets: Sequence[Bucket], config: SyncConfig, num_lanes: int) -> list[UnitBuffer]:
    """Return the units that travel by themselves with this configuration."""
    sizes = [bucket.sizes for bucket in buckets]
    item_bytes = [bucket.total.dtype.itemsize for bucket in buckets]
    if config.mode == "baseline":
        units = layer_units(sizes, item_bytes, config.slice_bytes // 4, num_lanes)
    else:
        units = cut_units(sizes, item_bytes, config.slice_bytes, num_lanes)
    made = []
    for unit in units:
        bucket = buckets[unit.bucket]
        members = slice(unit.first, unit.last + 1)
        elements = slice(unit.portion.begin, unit.portion.begin + unit.length)
        parameters, total = bucket.parameters[members], bucket.total[elements]
        made.append(
            UnitBuffer(
                f"{bucket.name}:{unit.first}",
                bucket.indices[members],
                parameters,
                [part[elements] for part in bucket.parts],
                total,
                parameter_views(total, parameters),
                unit.portion,
            )
        )
    return made


# --- CUDA ---


def flatten_gradients(
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
    num_replicas: int,
    *,
    is_plain: bool = False,
) -> torch.Tensor:
    """Return these gradients as one flat tensor, scaled by 1/N, with zeros for None: few large operations instead of
    many small ones."""
    there = [
        torch.zeros_like(parameter) if found is None else found
        for parameter, found in zip(parameters, gradients, strict=True)
    ]
    if is_plain and len(there) > 1:
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(there)  # type: ignore[no-untyped-call]
    else:
        length = sum(parameter.numel() for parameter in parameters)
        flat = torch.empty(length, dtype=parameters[0].dtype, device=parameters[0].device)
        torch._foreach_copy_(parameter_views(flat, parameters), there)
    return flat.mul_(1.0 / num_replicas)


class DeviceCopier:
    """Moves flat tensors on a stream of its own, while backward goes on."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def copy_to_host(self, flat: torch.Tensor, part: torch.Tensor) -> torch.cuda.Event:
        """Copy `flat` to the host; return the event of its completion."""
        return self._on_side_stream(flat, lambda: part.copy_(flat, non_blocking=True))

    def _on_side_stream(self, flat: torch.Tensor, act: Callable[[], object]) -> torch.cuda.Event:
        present = torch.cuda.current_stream(flat.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            act()
            done: torch.cuda.Event = self._stream.record_event()
        flat.record_stream(self._stream)
        return done

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def unflatten_sum(flat: torch.Tensor, bucket: Bucket) -> Sequence[torch.Tensor]:
    """Return each parameter's view of the bucket's sum."""
    if bucket.is_plain:
        views: Sequence[torch.Tensor] = torch._utils._unflatten_dense_tensors(flat, bucket.parameters)  # type: ignore[no-untyped-call]
        return views
    return parameter_views(flat, bucket.parameters)


# --- units ---


FIRST_PRIORITY = -1
"""The priority of what every worker needs before it can begin its next step: before all units."""
MIN_SLICE_BYTES = 8 << 10
"""No slice needs to be smaller than this, however urgent: each message has a cost."""
URGENT_SHARE = 8
"""What is needed before a unit is this many times a slice of it."""
MAX_SLICES = 4096
"""The most slices of one unit: a description of more would not be worth its bytes."""


@dataclass(frozen=True, slots=True)
class SyncUnit:
    """The parameters [first, last] of a bucket."""

    bucket: int
    first: int
    last: int
    length: int
    """The number of elements."""
    portion: Portion


def cut_units(
    sizes: Sequence[Sequence[int]], item_bytes: Sequence[int], slice_bytes: int, num_lanes: int
) -> list[SyncUnit]:
    """Cut buckets whose parameters have these numbers of elements into units; each slice has one owner.

    Buckets hold gradients in the order in which they come, so the next forward needs the last ones first. A slice is a
    fraction of all that is needed before it, at most `slice_bytes`: the very first layers, for which everybody waits,
    travel in small slices through many owners at once. Owners get equal shares by bytes: the largest slices are
    assigned first, each to the owner with the least.
    """
    units: list[tuple[int, int, int, int, int]] = []
    """(bucket, first, last, begin, length) of each unit, from the end"""
    limits: list[int] = []
    behind = 0
    for bucket in reversed(range(len(sizes))):
        lengths, size = sizes[bucket], item_bytes[bucket]
        end, total, last, limit = sum(lengths), 0, len(lengths) - 1, 0
        for place in reversed(range(len(lengths))):
            if total and (total + lengths[place]) * size > limit:
                units.append((bucket, place + 1, last, end - total, total))
                limits.append(limit)
                behind += total * size
                end, total, last = end - total, 0, place
            if not total:
                limit = max(min(slice_bytes, MIN_SLICE_BYTES), min(slice_bytes, behind // URGENT_SHARE))
            total += lengths[place]
        if lengths:
            units.append((bucket, 0, last, 0, total))
            limits.append(limit)
            behind += total * size
    totals = [length * item_bytes[bucket] for bucket, _, _, _, length in units]
    counts = [
        max(1, min(MAX_SLICES, run[-1], -(-total // limit)))
        for run, total, limit in zip(units, totals, limits, strict=True)
    ]
    lanes = _assign_lanes([total // count for total, count in zip(totals, counts, strict=True)], counts, num_lanes)
    return [
        SyncUnit(bucket, first, last, length, Portion(sum(sizes[bucket]), begin, lanes[index]))
        for index, (bucket, first, last, begin, length) in enumerate(units)
    ]


def layer_units(
    sizes: Sequence[Sequence[int]], item_bytes: Sequence[int], bound: int, num_lanes: int
) -> list[SyncUnit]:
    """Make one unit per parameter, cut as MXNet's key-value store cuts arrays: those of `bound` elements and more into
    one part per owner, others whole and placed by a hash of their number."""
    units, number = [], 0
    for bucket, lengths in enumerate(sizes):
        begin = 0
        for place, length in enumerate(lengths):
            lanes = tuple(range(num_lanes)) if length >= max(bound, num_lanes) else (number * 9973 % num_lanes,)
            units.append(SyncUnit(bucket, place, place, length, Portion(sum(lengths), begin, lanes)))
            begin += length
            number += 1
    return units


def _assign_lanes(slice_bytes: Sequence[int], counts: Sequence[int], num_lanes: int) -> list[tuple[int, ...]]:
    """Return the lanes of the slices of each unit."""
    load = [(0, lane) for lane in range(num_lanes)]
    lanes: list[tuple[int, ...]] = [()] * len(counts)
    for index in sorted(range(len(counts)), key=lambda index: (-slice_bytes[index], index)):
        chosen = []
        for _ in range(counts[index]):
            taken, lane = load[0]
            heapq.heapreplace(load, (taken + slice_bytes[index], lane))
            chosen.append(lane)
        lanes[index] = tuple(chosen)
    return lanes
