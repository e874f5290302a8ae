"""A step of which only some sums come: what it has updated already is taken back, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_sums import (
    MARKS,
    OPTIMIZERS,
    WORDS,
    Loop,
    Shelf,
    X,
    changed,
    loop_before_sums,
    make_optimizer,
    same,
    state_of,
    train_once,
    twins,
    zoo_loss,
)
from torch import nn

from pliant.train.sync import SyncConfig

pytestmark = MARKS


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
        loop.wait_for_sums()
        before = state_of(model, mine)
        known = len(mine[0].state)
        train_once(loop, model, mine, lambda m: m(x, range(6)), after=scheduler.step)
        for index in (4, 1):
            loop.model.weights[index].sum()  # type: ignore[index]
        assert len(loop.pending) == 4
        assert changed(model, before) == [1, 4]
        loop.network.broken = True
        model(x, range(6))
        assert len(loop.lost) == steps - 1
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
    loop.wait_for_sums()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine[0], 0.5)
    before = state_of(loop.model, mine)
    loop.begin()
    zoo_loss(loop.model).backward()  # type: ignore[no-untyped-call]
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
    loop.wait_for_sums()
    assert same(state_of(loop.model, mine), state_of(plain, theirs))
    train_once(loop, loop.model, mine, zoo_loss)
    train_once(None, plain, theirs, zoo_loss)
    with torch.inference_mode():
        loop.model(WORDS)
    train_once(loop, loop.model, mine, zoo_loss)
    train_once(None, plain, theirs, zoo_loss)
    loop.wait_for_sums()
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


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
    loop.wait_for_sums()
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


def test_what_is_whole_is_not_taken_back() -> None:
    loop, mine, plain, theirs = loop_before_sums(can_undo=True)
    loop.model(WORDS)
    assert loop.whole == 1
    loop.deferred.undo_step()
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


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
