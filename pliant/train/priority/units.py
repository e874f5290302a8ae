"""Units: what of a bucket travels by itself, so that what the next forward needs first may overtake the rest.

A unit is a run of one bucket: several small neighbours, or one parameter cut into slices. Every worker derives the
same units from the same layout. The order of summation is the bucket's, so units never change a bit. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.comm.plan import Portion

FIRST = -1
"""The priority of what every worker needs before it can begin its next step: before all units."""
LEAST_BYTES = 8 << 10
"""No slice need be smaller than this, whatever is urgent: a message has its price."""
SHARE = 8
"""What is needed before a unit is so many times a slice of it."""
MAX_SLICES = 4096
"""Of one unit: a description of more would not be worth its bytes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Places [first, last] of a bucket."""

    bucket: int
    first: int
    last: int
    length: int
    """Elements."""
    portion: Portion


def cut_units(
    sizes: Sequence[Sequence[int]], item_bytes: Sequence[int], slice_bytes: int, num_lanes: int
) -> list[Unit]:
    """The units of buckets whose parameters have these numbers of elements; each slice has one owner.

    Buckets hold gradients in the order in which they come, so what lies behind a place is needed before it. Slices are
    a part of all that is needed until then, at most `slice_bytes`: the very first layers, for which everybody waits, go
    and come back in small ones, through many owners at once. Owners get equal shares by bytes: the largest slices are
    dealt first, each to whoever has least.
    """
    runs: list[tuple[int, int, int, int, int]] = []
    """(bucket, first place, last place, begin, length), from behind"""
    limits: list[int] = []
    behind = 0
    for bucket in reversed(range(len(sizes))):
        lengths, size = sizes[bucket], item_bytes[bucket]
        end, total, last, limit = sum(lengths), 0, len(lengths) - 1, 0
        for place in reversed(range(len(lengths))):
            if total and (total + lengths[place]) * size > limit:
                runs.append((bucket, place + 1, last, end - total, total))
                limits.append(limit)
                behind += total * size
                end, total, last = end - total, 0, place
            if not total:
                limit = max(min(slice_bytes, LEAST_BYTES), min(slice_bytes, behind // SHARE))
            total += lengths[place]
        if lengths:
            runs.append((bucket, 0, last, 0, total))
            limits.append(limit)
            behind += total * size
    totals = [length * item_bytes[bucket] for bucket, _, _, _, length in runs]
    counts = [
        max(1, min(MAX_SLICES, run[-1], -(-total // limit)))
        for run, total, limit in zip(runs, totals, limits, strict=True)
    ]
    lanes = _dealt([total // count for total, count in zip(totals, counts, strict=True)], counts, num_lanes)
    return [
        Unit(bucket, first, last, length, Portion(sum(sizes[bucket]), begin, lanes[index]))
        for index, (bucket, first, last, begin, length) in enumerate(runs)
    ]


def layer_units(sizes: Sequence[Sequence[int]], item_bytes: Sequence[int], bound: int, num_lanes: int) -> list[Unit]:
    """One unit per parameter, cut as MXNet's key-value store cuts arrays: those of `bound` elements and more equally into
    one part per owner, others whole and placed by a hash of their number."""
    units, number = [], 0
    for bucket, lengths in enumerate(sizes):
        begin = 0
        for place, length in enumerate(lengths):
            lanes = tuple(range(num_lanes)) if length >= max(bound, num_lanes) else (number * 9973 % num_lanes,)
            units.append(Unit(bucket, place, place, length, Portion(sum(lengths), begin, lanes)))
            begin += length
            number += 1
    return units


def _dealt(slice_bytes: Sequence[int], counts: Sequence[int], num_lanes: int) -> list[tuple[int, ...]]:
    """For each run, the lanes of its slices."""
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
