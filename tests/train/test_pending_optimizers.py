"""Every optimizer of torch, while sums are on their way: a step done parameter by parameter is the plain step, or undone."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from late_sums import (
    EVERYTHING,
    MARKS,
    OPTIMIZERS,
    WORDS,
    Loop,
    Make,
    Shelf,
    X,
    Zoo,
    assert_alike,
    changed,
    loop_before_sums,
    make_optimizer,
    same,
    state_of,
    train_both,
    train_once,
    twins,
    watching_uses,
    zoo_loss,
)
from torch import Tensor, nn

from pliant.train.sync import SyncConfig

pytestmark = MARKS


def test_every_dense_optimizer_of_torch_is_tried() -> None:
    there = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    tried = {kind for kind, _ in OPTIMIZERS}
    assert there - tried == {"Optimizer", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=str)
def test_a_deferred_step_is_the_plain_step(kind: str, settings: dict[str, Any]) -> None:
    """Two groups; the order of uses, and what has arrived before them, is another in each step."""
    chance = random.Random(11)
    model, plain = Shelf(), Shelf()
    make = functools.partial(make_optimizer, kind, settings)
    mine, theirs = [make(model)], [make(plain)]
    loop = Loop(model, *mine, can_undo=True)
    for step in range(6):
        order = chance.sample(range(6), 6)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loop.deliver(lambda _: chance.random() < 0.3)
        train_both(loop, mine, plain, theirs, lambda m: m(x, order))  # noqa: B023 - called at once
        assert bool(loop.pending) == (step > 0)
    assert not loop.said
    loop.deferred.flush()
    assert same(state_of(model, mine), state_of(plain, theirs))


def test_a_scheduler_does_not_change_a_step_that_was_called_before() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    loop, mine, plain, theirs = twins(lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5))
    mine_scheduled, theirs_scheduled = schedule(mine[0]), schedule(theirs[0])
    for _ in range(3):
        with watching_uses(loop.model):
            train_once(loop, loop.model, mine, zoo_loss, after=mine_scheduled.step)
        assert mine[0].param_groups[0]["lr"] == mine_scheduled.get_last_lr()[0], "the new rate is there at once"
        train_once(None, plain, theirs, zoo_loss, after=theirs_scheduled.step)
    assert loop.pending == EVERYTHING
    loop.model(WORDS)
    assert_alike(loop, mine, plain, theirs)


def test_two_optimizers_share_a_model() -> None:
    model, plain = Zoo(), Zoo()

    def make(model: Any) -> list[torch.optim.Optimizer]:
        rest = [*model.lstm.parameters(), model.scale, model.embedding.weight]
        return [torch.optim.Adam(model.last.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    mine, theirs = make(model), make(plain)
    loop = Loop(model, *mine)
    train_both(loop, mine, plain, theirs, steps=4)
    loop.deferred.flush()
    assert same(state_of(model, mine), state_of(plain, theirs))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["before forward", "after step"])
def test_gradients_are_cleared_before_or_after(first: bool, set_to_none: bool) -> None:
    loop, mine, plain, theirs = twins()

    def train(loop: Loop | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if first:
            optimizer.zero_grad(set_to_none=set_to_none)
        if loop is not None:
            loop.begin()
        zoo_loss(model).backward()  # type: ignore[no-untyped-call]
        if loop is not None:
            loop.end()
        optimizer.step()
        if not first:
            optimizer.zero_grad(set_to_none=set_to_none)

    for step in range(4):
        with watching_uses(loop.model):
            train(loop, loop.model, mine[0])
        train(None, plain, theirs[0])
        assert bool(loop.pending) == (step > 0), "it waited for what the next forward would have waited for"
    assert not loop.network.waited or loop.deferred.waits.count > 0
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (loop.model, plain)]
    assert same(*gradients)
    assert_alike(loop, mine, plain, theirs)


def test_gradients_accumulate_over_batches() -> None:
    """Four backwards, of which the last one is summed."""
    loop, mine, plain, theirs = twins()
    batches = [torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def compute(model: nn.Module, loop: Loop | None) -> Tensor:
        for batch in batches[:-1]:
            if loop is not None:
                loop.gradients.no_sync = True
            zoo_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if loop is not None:
            loop.gradients.no_sync = False
        return zoo_loss(model, batches[-1])

    for _ in range(3):
        with watching_uses(loop.model):
            train_once(loop, loop.model, mine, functools.partial(compute, loop=loop))
        train_once(None, plain, theirs, functools.partial(compute, loop=None))
    assert loop.pending == EVERYTHING
    assert_alike(loop, mine, plain, theirs)


def test_a_step_that_is_left_out_leaves_the_parameters() -> None:
    """The program looks at its loss and does not call step."""
    loop, mine, plain, theirs = loop_before_sums()
    for optimizers in (mine, []):
        with watching_uses(loop.model):
            train_once(loop, loop.model, optimizers, zoo_loss)
        mine[0].zero_grad()
    for optimizers in (theirs, []):
        train_once(None, plain, optimizers, zoo_loss)
        theirs[0].zero_grad()
    assert_alike(loop, mine, plain, theirs)


# --- what needs all sums at once ---


class Foreign(torch.optim.SGD):
    """Somebody's own."""


def _with_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: Foreign(model.parameters(), lr=0.1), "Foreign is not one of torch's own"),
        (_with_hook, "SGD has step hooks"),
    ],
    ids=["foreign", "hooks"],
)
def test_other_optimizers_wait_for_all_and_it_is_said_once(make: Make, says: str) -> None:
    loop, mine, plain, theirs = twins(make)
    for _ in range(4):
        train_both(loop, mine, plain, theirs)
        assert loop.pending == set()
    assert_alike(loop, mine, plain, theirs)
    [line] = loop.said
    assert says in line
    assert "priority cannot help" in line


def test_clipping_waits_for_all_and_it_is_said_once() -> None:
    loop, mine, plain, theirs = twins()

    def train(loop: Loop | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        if loop is not None:
            loop.begin()
        zoo_loss(model).backward()  # type: ignore[no-untyped-call]
        if loop is not None:
            loop.end()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for _ in range(4):
        with watching_uses(loop.model):
            norm = train(loop, loop.model, mine[0])
        assert loop.pending == set()
        assert torch.equal(norm, train(None, plain, theirs[0]))
    assert_alike(loop, mine, plain, theirs)
    [line] = loop.said
    assert "clipping" in line


def test_an_update_with_the_rate_of_later_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.train.pending._copy_options", lambda group: group)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        test_a_scheduler_does_not_change_a_step_that_was_called_before()


# --- a step of which only some sums come ---


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=str)
def test_what_was_updated_too_early_is_taken_back(kind: str, settings: dict[str, Any]) -> None:
    """Some sums of a step have come and were used, the others never come: all is as it was before that step."""
    model = Shelf()
    mine = [make_optimizer(kind, settings, model)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine[0], 0.9)
    loop = Loop(model, *mine, can_undo=True)
    x = torch.randn(3, 4)
    for steps in range(2, 4):
        for _ in range(steps):
            train_once(loop, model, mine, lambda m: m(x, range(6)), after=scheduler.step)
        loop.deferred.flush()
        before = state_of(model, mine)
        known = len(mine[0].state)
        train_once(loop, model, mine, lambda m: m(x, range(6)), after=scheduler.step)
        for index in (4, 1):
            loop.model.weights[index].sum()  # type: ignore[index]
        assert len(loop.pending) == 4
        assert changed(model, before) == [1, 4]
        loop.network.broken = True
        model(x, range(6))
        assert loop.lost == steps - 1
        assert loop.pending == set(), "a program that goes on must not wait again and again"
        loop.deferred.undo_step()
        loop.network.broken = False
        assert same(state_of(model, mine), before)
        assert len(mine[0].state) == known
        assert all(parameter.grad is None for parameter in model.parameters()), "what was cleared came back"


def test_the_first_update_of_all_is_taken_back() -> None:
    """The optimizer has no state before it, and none afterwards."""
    loop, mine, _, _ = twins(can_undo=True)
    loop.way = SyncConfig("priority", slice_bytes=1)
    before = state_of(loop.model, mine)
    train_once(loop, loop.model, mine, zoo_loss)
    loop.model.last(X)  # type: ignore[operator]
    assert len(changed(loop.model, before)) == 2
    loop.network.broken = True
    loop.model(WORDS)
    loop.deferred.undo_step()
    assert same(state_of(loop.model, mine), before)
    assert not mine[0].state


def test_what_was_updated_at_once_is_taken_back_too() -> None:
    """A gradient that was looked at before the step is summed by then, so its parameter is updated in the step itself."""
    loop, mine, _, _ = twins(can_undo=True)
    train_once(loop, loop.model, mine, zoo_loss)
    loop.deferred.flush()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine[0], 0.5)
    before = state_of(loop.model, mine)
    loop.begin()
    zoo_loss(loop.model).backward()  # type: ignore[no-untyped-call]
    loop.end()
    assert loop.model.scale.grad is not None
    loop.model.last.bias.data.mul_(2)  # type: ignore[union-attr, operator]
    scheduler.step()  # before the step, as programs of old do
    mine[0].step()
    assert len(changed(loop.model, before)) >= 2
    loop.network.broken = True
    loop.model(WORDS)
    loop.model.embedding.weight.data.zero_()  # type: ignore[union-attr, operator]  # in the pass that does not count
    loop.deferred.undo_step()
    assert same(state_of(loop.model, mine), before)


def test_an_update_knows_nothing_of_the_mode_it_happens_in() -> None:
    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)  # multiplies matrices

    loop, mine, plain, theirs = loop_before_sums(adafactor)
    with torch.autocast("cpu", torch.bfloat16):
        loop.model.last(X)  # type: ignore[operator]
    assert_alike(loop, mine, plain, theirs)
    train_both(loop, mine, plain, theirs)
    with torch.inference_mode():
        loop.model(WORDS)
    train_both(loop, mine, plain, theirs)
    assert_alike(loop, mine, plain, theirs)


def test_an_update_that_fails_is_tried_again() -> None:
    loop, mine, plain, theirs = loop_before_sums()
    original = torch.optim.Adam._init_group

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    torch.optim.Adam._init_group = fail  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(MemoryError):
            loop.model(WORDS)
    finally:
        torch.optim.Adam._init_group = original  # type: ignore[method-assign]
    assert_alike(loop, mine, plain, theirs)


def test_what_is_whole_is_not_taken_back() -> None:
    loop, mine, plain, theirs = loop_before_sums(can_undo=True)
    loop.model(WORDS)
    assert loop.whole == 1
    loop.deferred.undo_step()
    assert_alike(loop, mine, plain, theirs)


def test_nothing_is_kept_where_nothing_can_be_taken_back() -> None:
    loop, _, _, _ = loop_before_sums(can_undo=False)
    loop.model.last(X)  # type: ignore[operator]
    assert not loop.deferred._undo_log._saved
    loop, _, _, _ = loop_before_sums(can_undo=True)
    loop.model.last(X)  # type: ignore[operator]
    assert len(loop.deferred._undo_log._saved) == 2
    loop.deliver()
    loop.model(WORDS)
    assert not loop.deferred._undo_log._saved
