"""What a job does to the program's optimizers and to its own state."""

from __future__ import annotations

import pytest
import torch

from pliant.errors import TrainError, Unsliceable
from pliant.train.wrapping import StateNamespace, hook_optimizer


def make_optimizer() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_takes_the_rates_that_policies_decide_and_the_program_sees_its_own() -> None:
    parameter, optimizer = make_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    factor, places = [1.0], list[str]()
    remove = hook_optimizer(optimizer, places.append, lambda: factor[0])
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.5))
    factor[0] = 0.5
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.25))
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert places == ["optimizer.step()"] * 2
    remove()
    optimizer.step()
    assert torch.equal(parameter, torch.zeros(3))
    assert len(places) == 2


def test_a_step_in_the_wrong_place_or_with_a_closure_changes_nothing() -> None:
    parameter, optimizer = make_optimizer()

    def refuse(what: str) -> None:
        raise TrainError(f"{what} in a turn")

    hook_optimizer(optimizer, refuse, lambda: 2.0)
    with pytest.raises(TrainError, match=r"optimizer\.step\(\) in a turn"):
        optimizer.step()
    refused = r"SGD\.step\(closure\) computes several gradients"
    with pytest.raises(Unsliceable, match=refused):
        optimizer.step(lambda: 1.0)
    with pytest.raises(Unsliceable, match=refused):
        optimizer.step(closure=lambda: 1.0)
    assert torch.equal(parameter, torch.ones(3))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_namespace_is_replaced_as_a_whole() -> None:
    state = StateNamespace({"iter_num": 0, "best": 1e9})
    state.iter_num += 1
    saved = state.state_dict()
    state.iter_num, state.extra = 7, "x"
    assert saved == {"iter_num": 1, "best": 1e9}, "a copy"
    state.load_state_dict(saved)
    assert (state.iter_num, hasattr(state, "extra"), repr(state)) == (1, False, "state(iter_num=1, best=1000000000.0)")
