"""Sums of replicas in one worker: the additions of the order, whatever the tensors look like, and few sets at a time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from pliant.comm import order
from pliant.train import gradient_folds
from pliant.train.bucket_layout import BucketItem, BucketLayout, first_layout, in_memory_order, rebuilt_layout
from pliant.train.determinism import fold as fold_by_formula
from pliant.train.gradient_folds import GradientFold, SetAdder, count_merges, make_fold

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
SIZES = [1, 2, 3, 4, 6, 7, 8, 13]


def parameters() -> list[Parameter]:
    """Of several types and layouts: contiguous, channels last, transposed, with holes, a scalar, one that is cut."""
    chance = torch.Generator().manual_seed(3)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    return [
        Parameter(each)
        for each in (
            make(257, 129),
            make(16, 8, 3, 3).to(memory_format=torch.channels_last),
            make(7, 50).t(),
            make(6, 10)[:, ::2],
            make(1)[0],
            make(33, dtype=torch.bfloat16),
            make(300, dtype=torch.bfloat16),
            make(21, dtype=torch.float64),
            make(20000),
        )
    ]


def gradients(of: Sequence[Parameter], replicas: int, *, seed: int = 5) -> list[list[Tensor]]:
    """As backward leaves them: one set for each replica. The sums of 16 orders of magnitude show every other order."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(replicas):
        each: list[Tensor] = []
        for parameter in of:
            value = torch.randn(parameter.shape, generator=chance) * 10 ** (
                8 * torch.rand(parameter.shape, generator=chance) - 4
            )
            loss = (parameter * value.to(parameter.dtype)).sum()
            [gradient] = torch.autograd.grad(loss, parameter)
            each.append(gradient)
        found.append(each)
    return found


def copies(sets: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[each.clone() for each in gradients] for gradients in sets]


def host(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype)


def run(fold: GradientFold, sets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    fold.clear()
    for each in copies(sets):
        fold.add(each)
    return fold.take_sum()


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """The definition: the left subtree has the largest power of two of the replicas."""
    if len(values) == 1:
        return values[0]
    left = 1
    while left * 2 < len(values):
        left *= 2
    return tree_sum(values[:left]) + tree_sum(values[left:])


def layouts(of: Sequence[Parameter]) -> list[BucketLayout]:
    items = [BucketItem((p.dtype, p.device), p.numel() * p.element_size()) for p in of]
    order_of_last = list(reversed(range(len(of))))
    return [
        first_layout(items),
        rebuilt_layout(items, order_of_last),
        rebuilt_layout(items, order_of_last, cap_bytes=999),
    ]


def ddp_sum(of: Sequence[Parameter], layout: BucketLayout, sets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each bucket as one flat tensor, summed by the formula that a job compares with gloo at its start."""
    totals: dict[int, Tensor] = {}
    for indices in layout.buckets:
        flats = [torch.cat([in_memory_order(of[i], each[i]) for i in indices]) for each in sets]
        total = fold_by_formula(flats) if len(flats) > 1 else flats[0]
        for index, flat in zip(indices, _split(total, [of[i] for i in indices]), strict=True):
            totals[index] = flat
    return [totals[index] for index in range(len(of))]


def _split(flat: Tensor, of: Sequence[Parameter]) -> Sequence[Tensor]:
    return torch.split(flat, [parameter.numel() for parameter in of])


def same(of: Sequence[Parameter], mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        a.shape == p.shape and a.dtype == p.dtype and torch.equal(in_memory_order(p, a), b.view(-1))
        for p, a, b in zip(of, mine, theirs, strict=True)
    )


@pytest.mark.parametrize("replicas", SIZES)
@pytest.mark.parametrize("memory", [None, host])
def test_the_tree_adds_left_and_right(replicas: int, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_folds, "PIECE_BYTES", 1 << 10)
    of = parameters()
    sets, other = gradients(of, replicas), gradients(of, replicas, seed=6)
    fold = make_fold("tree", of, layouts(of)[0], replicas, memory)
    for each in (sets, other, sets):
        expected = [in_memory_order(p, tree_sum([one[i] for one in each])) for i, p in enumerate(of)]
        assert same(of, run(fold, each), expected)
    if replicas > 2:
        in_turn = [in_memory_order(p, sum(one[i] for one in sets[1:]) + sets[0][i]) for i, p in enumerate(of)]
        assert not same(of, run(fold, sets), in_turn), "these values do not tell orders apart"


@pytest.mark.parametrize("replicas", SIZES)
@pytest.mark.parametrize("memory", [None, host])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_ddp_adds_each_chunk_of_a_bucket_in_its_own_order(
    replicas: int, memory: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_folds, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(gradient_folds, "CACHED_BYTES", 1 << 10)
    of = parameters()
    layout = layouts(of)[number]
    sets, other = gradients(of, replicas), gradients(of, replicas, seed=6)
    fold = make_fold("ddp", of, layout, replicas, memory)
    for each in (sets, other, sets):
        assert same(of, run(fold, each), ddp_sum(of, layout, each))
    if replicas > 2 and memory is None:
        another = layouts(of)[number - 1]
        assert not same(of, run(make_fold("ddp", of, another, replicas), sets), ddp_sum(of, layout, sets))


def test_one_call_adds_all_gradients_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [Parameter(torch.randn(5)) for _ in range(40)]
    calls: list[int] = []
    original = torch._foreach_add_

    def counted(left: list[Tensor], right: list[Tensor]) -> None:
        calls.append(len(left))
        original(left, right)

    monkeypatch.setattr(torch, "_foreach_add_", counted)
    run(make_fold("tree", of, layouts(of)[0], 4), gradients(of, 4))
    assert calls == [40] * 3
    calls.clear()
    run(make_fold("ddp", of, layouts(of)[0], 4), gradients(of, 4))
    assert len(calls) == 4 * 3, "a chain of 3 additions for each of 4 chunks"


def _most_sets(order_name: str, replicas: int, memory: Any = None) -> int:
    """The most sets of gradients that live at a time, with the newest, while the fold is filled."""
    of = [Parameter(torch.randn(50)), Parameter(torch.randn(4, 4))]
    fold = make_fold(order_name, of, layouts(of)[0], replicas, memory)
    living: list[weakref.ref[Tensor]] = []
    most = 0
    for _ in range(replicas):
        new = [torch.randn(parameter.shape) for parameter in of]
        living.append(weakref.ref(new[0]))
        most = max(most, sum(each() is not None for each in living))
        fold.add(new)
        del new
    total = fold.take_sum()
    assert sum(each() is not None for each in living) <= 1
    assert len(total) == len(of)
    return most


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 8, 16])
def test_the_tree_keeps_few_sets(replicas: int) -> None:
    assert _most_sets("tree", replicas) <= (replicas - 1).bit_length() + 1
    assert _most_sets("tree", replicas, host) == 1, "the newest"
    assert _most_sets("ddp", replicas) == replicas, "or nothing is measured"
    assert _most_sets("ddp", replicas, host) == 1


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 6, 8, 11, 16])
def test_a_block_is_folded_to_its_largest_subtrees(replicas: int) -> None:
    for begin in range(replicas):
        for end in range(begin + 1, replicas + 1):
            stack: list[range] = []
            for replica, merges in zip(range(begin, end), count_merges(range(begin, end), replicas), strict=True):
                stack.append(range(replica, replica + 1))
                for _ in range(merges):
                    right, left = stack.pop(), stack.pop()
                    assert left.stop == right.start
                    stack.append(range(left.start, right.stop))
            assert stack == order.subtrees(begin, end, replicas)


@pytest.mark.parametrize("replicas", [3, 4, 6, 1000])
def test_sets_are_scaled_as_by_multiplication(replicas: int) -> None:
    of = parameters()
    [scaled] = gradients(of, 1)
    expected = [torch.mul(each, 1 / replicas) for each in scaled]
    SetAdder(of).scale(scaled, 1 / replicas)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(scaled, expected, strict=True))
