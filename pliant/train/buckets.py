"""DDP's buckets in memory, and how they are cut into units.

With priority a bucket is cut into units, which travel by themselves; the order of summation stays that of the bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.handle import Handle
from pliant.comm.plan import Portion
from pliant.train.bucket_layout import BucketLayout, parameter_views

if TYPE_CHECKING:
    from pliant.comm.engine import Engine
    from pliant.train.sync import SyncConfig


# --- buckets in memory ---


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One bucket: a flat tensor for each operand of this worker, and one for the sum."""

    name: str
    indices: list[int]
    """The indices of its parameters."""
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    """The number of elements of each parameter."""
    parts: list[torch.Tensor]
    """The operands, in memory that the workers of a host share."""
    total: torch.Tensor
    """The sum, in the same kind of memory. It is the only part itself if there is just one."""


@dataclass(slots=True, eq=False)
class UnitBuffer:
    """What travels by itself, a bucket or a unit of one; and its sum in the step in progress."""

    name: str
    indices: list[int]
    """The indices of its parameters."""
    parameters: list[torch.nn.Parameter]
    parts: list[torch.Tensor]
    total: torch.Tensor
    portion: Portion | None
    """Its place in its bucket; None if it is a whole bucket."""
    is_plain: bool
    """Whether all parameters are contiguous."""
    views: list[list[torch.Tensor]]
    """Each parameter's view of each part."""
    sums: Sequence[torch.Tensor]
    """Each parameter's view of the sum."""
    last: int = -1
    """The parameter whose gradient comes last, as far as is known."""
    priority: int = 0
    is_taken: bool = False
    """Whether the gradients of the present turn were taken."""
    sets: list[list[torch.Tensor]] = field(default_factory=list)
    """The sums of subtrees of this worker's replicas that are not complete yet, from left to right."""
    handle: Handle | None = None
    flat: torch.Tensor | None = None
    """CUDA: where the sum comes back to on the device."""
    copied: torch.cuda.Event | None = None
    """CUDA: recorded when the last operand has left the device."""
    fetched: torch.cuda.Event | None = None
    """CUDA: recorded when the sum is in `flat`."""


def allocate_buckets(
    layout: BucketLayout,
    parameters: Sequence[torch.nn.Parameter],
    engine: Engine,
    num_parts: int,
    *,
    prefix: str,
    on_device: bool,
) -> list[Bucket]:
    """Allocate buckets for so many operands, with the same names on all workers. If gradients are `on_device`, pin the
    memory for copies from there."""
    made = []
    for number, indices in enumerate(layout.buckets):
        members = [parameters[index] for index in indices]
        sizes = [parameter.numel() for parameter in members]
        empty = partial(engine.empty, sum(sizes), members[0].dtype)
        parts = [empty() for _ in range(num_parts)]
        total = parts[0] if num_parts == 1 else empty()
        made.append(Bucket(f"{prefix}:{number}", list(indices), members, sizes, parts, total))
        if on_device:
            for memory in (*parts, total):
                engine.pin(memory)
    return made


def whole_units(buckets: Sequence[Bucket]) -> list[UnitBuffer]:
    """Return one unit for each bucket."""
    return [
        _make_unit(bucket.name, bucket.indices, bucket.parameters, bucket.parts, bucket.total, None)
        for bucket in buckets
    ]


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
        parts = [part[elements] for part in bucket.parts]
        name, total = f"{bucket.name}:{unit.first}", bucket.total[elements]
        made.append(_make_unit(name, bucket.indices[members], bucket.parameters[members], parts, total, unit.portion))
    return made


def _make_unit(
    name: str,
    indices: list[int],
    parameters: list[torch.nn.Parameter],
    parts: list[torch.Tensor],
    total: torch.Tensor,
    portion: Portion | None,
) -> UnitBuffer:
    return UnitBuffer(
        name,
        indices,
        parameters,
        parts,
        total,
        portion,
        all(parameter.is_contiguous() for parameter in parameters),
        [parameter_views(part, parameters) for part in parts],
        parameter_views(total, parameters),
    )


# --- CUDA ---


def flatten_set(unit: UnitBuffer, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of a unit as one new flat tensor: few large operations instead of many small ones."""
    if unit.is_plain and len(gradients) > 1:
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        return flat
    flat = torch.empty(len(unit.total), dtype=unit.total.dtype, device=unit.parameters[0].device)
    torch._foreach_copy_(parameter_views(flat, unit.parameters), list(gradients))
    return flat


class DeviceCopier:
    """Moves flat tensors on streams of its own, while backward goes on: for each device one to the host, and one back."""

    def __init__(self) -> None:
        self._out: dict[torch.device, torch.cuda.Stream] = {}
        self._back: dict[torch.device, torch.cuda.Stream] = {}

    def copy_to_host(self, flat: torch.Tensor, part: torch.Tensor) -> torch.cuda.Event:
        """Copy `flat` to the host, after what the current stream does now; return the event of its completion."""
        stream = _stream_of(self._out, flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            part.copy_(flat, non_blocking=True)
            done: torch.cuda.Event = stream.record_event()
        flat.record_stream(stream)
        return done

    def copy_to_device(self, total: torch.Tensor, flat: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy `total` to the device once `flat` is free, after the event; return the event of its completion. Any
        thread may call this, one at a time."""
        stream = _stream_of(self._back, flat.device)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            flat.copy_(total, non_blocking=True)
            done: torch.cuda.Event = stream.record_event()
        flat.record_stream(stream)
        return done

    def wait(self) -> None:
        """Wait until no copy uses any memory."""
        for stream in (*self._out.values(), *self._back.values()):
            stream.synchronize()


def _stream_of(streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device; make it the first time."""
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


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
