"""What a job does to the program's optimizers and to its own state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pliant.errors import TrainError, Unsliceable
from pliant.train.current_step import CurrentStep
from pliant.train.events import Progress
from pliant.train.step import Turn
from pliant.train.wrapping import StateNamespace, choose_device, device_of, hook_optimizer


def make_optimizer() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_takes_the_rates_that_policies_decide_and_the_program_sees_its_own() -> None:
    parameter, optimizer = make_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rates = SimpleNamespace(learning_rate_factor=1.0)
    remove = hook_optimizer(optimizer, CurrentStep(Progress()), rates)
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.5))
    rates.learning_rate_factor = 0.5
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.25))
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    rates.learning_rate_factor = 8.0
    remove()
    optimizer.step()
    assert torch.equal(parameter, torch.zeros(3))


def test_a_step_in_the_wrong_place_or_with_a_closure_changes_nothing() -> None:
    parameter, optimizer = make_optimizer()
    current = CurrentStep(Progress())
    hook_optimizer(optimizer, current, SimpleNamespace(learning_rate_factor=2.0))
    current.turn = Turn(3, 0, True)
    with pytest.raises(TrainError, match=r"optimizer\.step\(\) in the turn of replica 3"):
        optimizer.step()
    current.turn, current.left_early = None, True
    with pytest.raises(TrainError, match=r"optimizer\.step\(\) in step 0, whose loop was left"):
        optimizer.step()
    refused = r"SGD\.step\(closure\) computes several gradients"
    with pytest.raises(Unsliceable, match=refused):
        optimizer.step(lambda: 1.0)
    with pytest.raises(Unsliceable, match=refused):
        optimizer.step(closure=lambda: 1.0)
    assert torch.equal(parameter, torch.ones(3))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_generator_of_one_gpu_is_switched_and_models_on_several_are_refused() -> None:
    host, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert choose_device([host, host]) == host
    assert choose_device([host, second, second]) == second, "as where an embedding is kept in the host's memory"
    with pytest.raises(Unsliceable, match=r"2 GPUs \(cuda:0, cuda:1\).* on one GPU, or use determinism='D0'"):
        choose_device([second, host, first])
    assert choose_device([second, host, first], is_free=True) == second
    assert device_of([torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, device="meta")]) == host


def test_a_namespace_is_replaced_as_a_whole() -> None:
    state = StateNamespace({"iter_num": 0, "best": 1e9})
    state.iter_num += 1
    saved = state.state_dict()
    state.iter_num, state.extra = 7, "x"
    assert saved == {"iter_num": 1, "best": 1e9}, "a copy"
    state.load_state_dict(saved)
    assert (state.iter_num, hasattr(state, "extra"), repr(state)) == (1, False, "state(iter_num=1, best=1000000000.0)")
