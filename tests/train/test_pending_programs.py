"""Programs that do unusual things while sums are on their way; what cannot be seen is found, and done without crossing."""

from __future__ import annotations

import copy
import ctypes
import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_sums import (
    MARKS,
    Loop,
    Optimizers,
    X,
    Zoo,
    adam,
    loop_before_sums,
    same,
    state_of,
    train_once,
    twins,
    watching_uses,
    zoo_loss,
)
from torch import Tensor, nn

import pliant
from pliant.train.deferred import hidden_uses

pytestmark = MARKS

# --- what cannot be seen ---


def test_scripted_and_compiled_modules_are_found() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.compile(backend="eager")

    class Odd(nn.Parameter):
        pass

    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    traced = torch.jit.trace(nn.Linear(4, 4), X)  # type: ignore[no-untyped-call]
    odd = nn.Linear(4, 4)
    odd.weight = Odd(odd.weight.data)
    assert hidden_uses(Zoo()) == ""
    assert "1 is scripted" in hidden_uses(scripted)
    assert "scripted" in hidden_uses(traced)
    assert "inner is compiled" in hidden_uses(Compiled())
    assert "compiled" in hidden_uses(torch.compile(Zoo(), backend="eager"))  # type: ignore[arg-type]
    assert "weight is a Odd" in hidden_uses(odd)


def test_the_address_of_a_parameter_is_that_of_its_new_values() -> None:
    """Whoever asks for it reads it where torch does not see that."""
    loop, _, plain, _ = loop_before_sums()
    size = 4 * 4
    found = ctypes.string_at(loop.model.scale.data_ptr(), size)  # type: ignore[operator]
    assert found == ctypes.string_at(plain.scale.data_ptr(), size)  # type: ignore[operator]


def test_a_compiled_function_never_computes_with_a_stale_weight() -> None:
    """It is not a module, so nobody knows of it at the start. Optimizers compute otherwise while something is compiled."""
    compiled = torch.compile(lambda x, scale: (x * scale).pow(2).mean(), backend="eager")
    loop, mine, plain, theirs = loop_before_sums()
    for _ in range(2):
        train_once(loop, loop.model, mine, lambda m: compiled(X, m.scale) + zoo_loss(m))
        train_once(None, plain, theirs, lambda m: compiled(X, m.scale) + zoo_loss(m))
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


def test_a_fast_path_for_evaluation_is_taken_as_ever() -> None:
    """Encoder layers take another way through torch, with other bits, where they see a tensor of a special kind."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, plain = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    mine, theirs = [adam(model)], [adam(plain)]
    loop, x = Loop(model, *mine), torch.randn(2, 5, 8)
    for _ in range(3):
        train_once(loop, model, mine, lambda m: m(x).pow(2).mean())
        train_once(None, plain, theirs, lambda m: m(x).pow(2).mean())
    found = []
    for each in (model, plain):
        each.eval()
        with torch.no_grad():
            found.append(each(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("register", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_of_all_optimizers_see_all_parameters(register: str) -> None:
    def clamp(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.3, 0.3)

    loop, mine, plain, theirs = twins()
    handle = getattr(importlib.import_module("torch.optim.optimizer"), register)(clamp)
    try:
        for _ in range(3):
            train_once(loop, loop.model, mine, zoo_loss)
            train_once(None, plain, theirs, zoo_loss)
    finally:
        handle.remove()
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


def test_a_step_of_the_programs_own_is_done_as_it_is() -> None:
    """The program has put a function of its own in the place of `step`, before it was wrapped."""

    def change(optimizer: Any) -> torch.optim.Optimizer:
        plain_step = optimizer.step

        def step() -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.clamp_(-1e-3, 1e-3)
            plain_step()

        optimizer.step = step
        return optimizer  # type: ignore[no-any-return]

    loop, mine, plain, theirs = twins(lambda m: change(torch.optim.SGD(m.parameters(), lr=0.1)))
    for _ in range(3):
        train_once(loop, loop.model, mine, zoo_loss)
        train_once(None, plain, theirs, zoo_loss)
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


def test_parameters_that_share_memory_are_found() -> None:
    pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    pair[1].weight = nn.Parameter(pair[0].weight.data)
    assert "0.weight and 1.weight share memory" in hidden_uses(pair)


# --- programs that do unusual things ---


def _plain_step(model: Any, optimizers: Optimizers) -> None:
    zoo_loss(model).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _never_clears(model: Any, optimizers: Optimizers) -> None:
    zoo_loss(model).backward()  # type: ignore[no-untyped-call]
    optimizers[0].step()


def _clears_the_model(model: Any, optimizers: Optimizers) -> None:
    model.zero_grad()
    _never_clears(model, optimizers)


def _clears_by_hand(model: Any, optimizers: Optimizers) -> None:
    _never_clears(model, optimizers)
    for parameter in model.parameters():
        parameter.grad = None


def _changes_the_rate(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, optimizers)
    optimizers[0].param_groups[0]["lr"] *= 0.5


def _steps_twice(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, [optimizers[0], optimizers[0]])


def _clears_the_state(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, optimizers)
    optimizers[0].state.clear()


def _replaces_the_state(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, optimizers)
    optimizers[0].state = defaultdict(dict)


def _looks_at_the_state(model: Any, optimizers: Optimizers) -> None:
    """And lets its next rate depend on it."""
    _plain_step(model, optimizers)
    momentum = sum(float(state["exp_avg"].abs().sum()) for state in optimizers[0].state.values())
    optimizers[0].param_groups[0]["lr"] = 0.01 + 0.01 * momentum


def _copies_the_optimizer(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, optimizers)
    copied = copy.deepcopy(optimizers[0]) if len(optimizers[0].state) else optimizers[0]
    model.scale.data.mul_(1 + 0.01 * float(next(iter(copied.state.values()))["exp_avg"].abs().sum()))


def _halves_the_momentum(model: Any, optimizers: Optimizers) -> None:
    _plain_step(model, optimizers)
    for state in optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)


def _goes_back(model: Any, optimizers: Optimizers) -> None:
    """To the state that it had after its first step."""
    _plain_step(model, optimizers)
    if not hasattr(model, "kept"):
        model.kept = copy.deepcopy(optimizers[0].state_dict())
    else:
        optimizers[0].load_state_dict(copy.deepcopy(model.kept))


def _some(model: nn.Module) -> Optimizers:
    return [torch.optim.Adam(list(model.parameters())[:3], lr=0.01)]


def _shared(model: nn.Module) -> Optimizers:
    return [adam(model), torch.optim.SGD(list(model.parameters())[:2], lr=0.1)]


UNUSUAL: list[tuple[Callable[[Any, Optimizers], None], Callable[[nn.Module], Optimizers]]] = [
    (_plain_step, _some),
    (_plain_step, _shared),
    *(
        (act, lambda model: [adam(model)])
        for act in (
            _never_clears, _clears_the_model, _clears_by_hand, _changes_the_rate, _steps_twice, _clears_the_state,
            _looks_at_the_state, _copies_the_optimizer, _halves_the_momentum, _goes_back, _replaces_the_state,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("act", "make"), UNUSUAL, ids=lambda value: value.__name__.strip("_<>"))
def test_programs_may_do_unusual_things(
    act: Callable[[Any, Optimizers], None], make: Callable[[nn.Module], Optimizers]
) -> None:
    model, plain = Zoo(), Zoo()
    mine, theirs = make(model), make(plain)
    loop = Loop(model, *mine)
    for _ in range(4):
        loop.begin()
        with watching_uses(model):
            act(model, mine)
        act(plain, theirs)
    assert same(state_of(model, mine), state_of(plain, theirs))
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, plain)]
    assert same(*gradients)


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


@pytest.mark.parametrize("sync", ["priority", "slicing", "auto", "fifo"])
def test_a_job_stays_with_fifo_where_uses_cannot_be_seen(sync: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pliant.join(replicas=2, sync=sync) as job:
        _, _, loader = job.wrap(model, optimizer, Numbers(), batch_size=2)
        for _ in job.epochs(1):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert job.sync_stats().mode == "fifo"
    said = capsys.readouterr().out
    if sync in ("priority", "slicing"):
        assert f"sync: '{sync}' is not possible, because 1 is scripted" in said
        assert "using 'fifo'" in said
    else:
        assert "not possible" not in said
