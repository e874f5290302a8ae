"""Units: every parameter travels exactly once, in runs of one bucket, and the owners have equal shares."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from pliant_repro.profiles import tensor_sizes

from pliant.comm.order import Order
from pliant.comm.plan import cut_portion
from pliant.comm.transport import loopback_engines
from pliant.train.bucket_layout import BucketItem, rebuilt_layout
from pliant.train.buckets import (
    MAX_SLICES,
    MIN_SLICE_BYTES,
    SyncUnit,
    cut_units,
    layer_units,
)
from pliant.train.gradients import GradientReducer

KIB = 1 << 10


def _resnet50() -> list[int]:
    return tensor_sizes("resnet50")


def _vgg19() -> list[int]:
    """Weights and biases of VGG-19, from its layers: a bias for each output."""
    sizes: list[int] = []
    inputs = 3
    for width, layers in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(layers):
            sizes += [inputs * width * 9, width]
            inputs = width
    for source, target in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        sizes += [source * target, target]
    return sizes


MODELS = {"resnet50": _resnet50(), "vgg19": _vgg19()}


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """As DDP lays them out, gradients coming last layer first."""
    layout = rebuilt_layout([BucketItem("float32", 4 * size) for size in sizes], range(len(sizes) - 1, -1, -1))
    return [[sizes[index] for index in bucket] for bucket in layout.buckets]


def _check_cover(units: Sequence[SyncUnit], sizes: Sequence[Sequence[int]]) -> None:
    """Every parameter is in exactly one unit; the units of a bucket are its neighbouring runs, in order."""
    for bucket, lengths in enumerate(sizes):
        found = sorted((unit for unit in units if unit.bucket == bucket), key=lambda unit: unit.first)
        places = [place for unit in found for place in range(unit.first, unit.last + 1)]
        assert places == list(range(len(lengths)))
        begin = 0
        for unit in found:
            assert unit.portion.whole == sum(lengths)
            assert unit.portion.begin == begin
            assert unit.length == sum(lengths[unit.first : unit.last + 1])
            begin += unit.length
        assert begin == sum(lengths)


def _loads(units: Sequence[SyncUnit], item_bytes: Sequence[int], lanes: int, replicas: int) -> list[int]:
    """Bytes of each owner, by the slices that really travel."""
    loads: Counter[int] = Counter()
    for unit in units:
        size = item_bytes[unit.bucket]
        slices = cut_portion(unit.portion, unit.length, size, lanes, replicas)
        assert sum(each.length for each in slices) == unit.length
        for each in slices:
            loads[each.lane] += each.length * size
    return [loads[lane] for lane in range(lanes)]


@pytest.mark.parametrize("slice_bytes", [16 * KIB, 50_000, 128 * KIB, 1024 * KIB])
@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_owners_have_equal_shares_of_real_models(model: str, lanes: int, slice_bytes: int) -> None:
    sizes = _buckets(MODELS[model])
    item_bytes = [4] * len(sizes)
    units = cut_units(sizes, item_bytes, slice_bytes, lanes)
    _check_cover(units, sizes)
    for unit in units:
        assert unit.length * 4 <= slice_bytes or unit.first == unit.last
        largest = -(-unit.length // len(unit.portion.lanes)) * 4
        assert largest <= slice_bytes or len(unit.portion.lanes) == MAX_SLICES
    loads = _loads(units, item_bytes, lanes, lanes)
    assert max(loads) <= 1.05 * sum(loads) / lanes
    assert units == cut_units([tuple(bucket) for bucket in sizes], item_bytes, slice_bytes, lanes), (
        "not the same anywhere"
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_sizes_are_covered(seed: int) -> None:
    """Small and large, empty ones among them, of several types."""
    chance = random.Random(seed)
    sizes = [
        [chance.choice([0, 1, 2, 7, 100, 1000, 5000, 100_000]) for _ in range(chance.randint(0, 9))]
        for _ in range(chance.randint(1, 6))
    ]
    item_bytes = [chance.choice([1, 2, 4, 8]) for _ in sizes]
    slice_bytes, lanes = chance.choice([1, 64, 4096, 65536]), chance.randint(1, 5)
    units = cut_units(sizes, item_bytes, slice_bytes, lanes)
    _check_cover(units, sizes)
    for unit in units:
        cut = [length for length in sizes[unit.bucket][unit.first : unit.last + 1] if length]
        assert unit.length * item_bytes[unit.bucket] <= slice_bytes or len(cut) == 1
        assert 1 <= len(unit.portion.lanes) <= max(1, min(MAX_SLICES, unit.length))
        assert all(0 <= lane < lanes for lane in unit.portion.lanes)
    total = sum(size * sum(bucket) for bucket, size in zip(sizes, item_bytes, strict=True))
    assert sum(_loads(units, item_bytes, lanes, 3)) == total
    _check_cover(layer_units(sizes, item_bytes, 1000, lanes), sizes)


def test_neighbours_share_a_unit_until_it_is_full() -> None:
    """From behind: what came last is needed first."""
    units = cut_units([[10, 10, 10, 100, 1]], [4], 100, 2)
    assert [(each.first, each.last, each.length) for each in units] == [(4, 4, 1), (3, 3, 100), (1, 2, 20), (0, 0, 10)]
    assert [each.portion.begin for each in units] == [130, 30, 10, 0]


def test_a_large_parameter_is_cut_and_dealt_to_all() -> None:
    [unit] = cut_units([[20_000]], [4], MIN_SLICE_BYTES, 4)
    assert sorted(Counter(unit.portion.lanes).values()) == [2, 2, 3, 3]
    slices = cut_portion(unit.portion, unit.length, 4, 4, None)
    assert [(each.begin, each.end) for each in slices] == list(pairwise(range(0, 20_001, 2_000)))


def test_what_is_needed_first_goes_in_small_slices() -> None:
    """They grow with what is needed before them, up to the size that was asked for."""
    sizes = [[2**18]] * 40  # of 1 MiB each
    units = cut_units(sizes, [4] * 40, 512 * KIB, 2)
    assert [unit.bucket for unit in units] == list(range(39, -1, -1))
    slices = [unit.length * 4 // len(unit.portion.lanes) for unit in units]
    assert slices == sorted(slices)
    assert slices[0] <= MIN_SLICE_BYTES
    assert slices[2] <= 2048 * KIB // 8
    assert slices[-1] == 512 * KIB


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_layers_are_placed_as_by_mxnet(lanes: int) -> None:
    """Whole ones by a hash of their number; from the bound on in one equal part per server (kvstore_dist.h)."""
    bound = 1000
    lengths = [999, 1000, 5, 100_003, 7, 8]
    units = layer_units([lengths[:2], lengths[2:]], [4, 4], bound, lanes)
    assert [(unit.bucket, unit.first, unit.last) for unit in units] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3)]  # fmt: skip
    for number, (unit, length) in enumerate(zip(units, lengths, strict=True)):
        assert unit.length == length
        expected = tuple(range(lanes)) if length >= bound else (number * 9973 % lanes,)
        assert unit.portion.lanes == expected
        ends = [each.end for each in cut_portion(unit.portion, length, 4, lanes, None)]
        assert all(
            abs(end - round(length / len(expected) * (part + 1))) <= len(expected) for part, end in enumerate(ends)
        )


@pytest.mark.parametrize(
    ("order", "blocks", "rank", "per_bucket"),
    [
        ("ddp", (1, 3), 0, 1),
        ("ddp", (2, 2), 0, 3),
        ("ddp", (3, 1), 0, 4),
        ("tree", (2, 2), 1, 1),
        ("tree", (3, 1), 0, 3),
        ("tree", (1, 3), 1, 3),
        ("tree", (3, 5), 1, 3),  # replica 3, and the right half
        ("tree", (1, 6, 1), 1, 5),  # 1, 2 and 3, 4 and 5, 6: more subtrees than 6 has bits
        ("tree", (3, 2, 3), 1, 3),  # the two are in different halves
    ],
)
def test_the_memory_of_a_coming_view_is_known_before_it_is_entered(
    order: Order, blocks: tuple[int, ...], rank: int, per_bucket: int
) -> None:
    """So that it can be pinned in advance. What the present view has is not needed again."""
    count, begin = sum(blocks), sum(blocks[:rank])
    hosted = range(begin, begin + blocks[rank])
    with loopback_engines("A" * len(blocks)) as engines:
        parameters = [("a", torch.nn.Parameter(torch.zeros(70))), ("b", torch.nn.Parameter(torch.zeros(30)))]
        reducer = GradientReducer(parameters, count, order=order, find_unused=True, cap_bytes=200)
        expected = reducer.missing_memory(hosted, count)
        reducer.enter_view(engines[rank], blocks)
        reducer.begin_turn(0)
        assert reducer._sums is not None
        memory = {id(each): each for bucket in reducer._sums.buckets for each in (*bucket.parts, bucket.total)}
        assert len(memory) == 2 * per_bucket
        assert sorted(length for length, _ in expected) == sorted(each.numel() for each in memory.values())
        assert reducer.missing_memory(hosted, count) == []
        more = reducer.missing_memory(range(1, 8), 16)
        assert len(more) == max(0, 2 * (8 if order == "ddp" else 4) - len(memory))
        reducer.close()
