"""Parameters whose sums are still on their way: every use waits for just what it uses, and gets what plain torch has."""

from __future__ import annotations

import copy
import ctypes
import importlib
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from late_sums import (
    EVERYTHING,
    LAST,
    LSTM,
    MARKS,
    WORDS,
    Loop,
    Optimizers,
    Watch,
    X,
    Zoo,
    adam,
    assert_alike,
    leaves,
    loop_before_sums,
    same,
    state_of,
    train_both,
    train_once,
    twins,
    watching_uses,
    zoo_loss,
)
from torch import Tensor, nn

import pliant
from pliant.errors import TrainError
from pliant.train.deferred import DeferredUpdates, hidden_uses

pytestmark = MARKS


class Times(torch.autograd.Function):
    """A function of the program's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum((0, 1))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _loaded(value: Any) -> Any:
    return torch.load(io.BytesIO(_saved(value)), weights_only=False)


def _clipped(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_([model.scale], 1e-3)


def _without_grad(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.add(model.scale, 1)


Use = Callable[[Any], Any]
USES: dict[str, tuple[Use, set[str]]] = {
    "module": (lambda m: m.last(X), LAST),
    "functional": (lambda m: F.linear(X, m.last.weight), {"last.weight"}),
    "keyword": (lambda m: F.linear(X, weight=m.last.weight, bias=m.last.bias), LAST),
    "tied": (lambda m: F.linear(X, m.embedding.weight), {"embedding.weight"}),
    "embedding": (lambda m: m.embedding(WORDS), {"embedding.weight"}),
    "lstm": (lambda m: m.lstm(X)[0], LSTM),
    "of a module with children": (lambda m: X * m.scale, {"scale"}),
    "own function": (lambda m: Times.apply(X, m.scale), {"scale"}),  # type: ignore[no-untyped-call]
    "in a list": (lambda m: torch.stack([m.scale, m.last.bias]), {"scale", "last.bias"}),
    "in a nested list": (lambda m: torch.einsum("a,a->", [m.scale, m.last.bias]), {"scale", "last.bias"}),
    "foreach": (lambda m: torch._foreach_add([m.scale, m.last.bias], 1), {"scale", "last.bias"}),
    "operator": (lambda m: torch.ops.aten.mul(X, m.scale), {"scale"}),
    "no_grad": (_without_grad, {"scale"}),
    "data": (lambda m: m.scale.data, {"scale"}),
    "detach": (lambda m: m.scale.detach(), {"scale"}),
    "numpy": (lambda m: torch.from_numpy(m.scale.detach().numpy()), {"scale"}),
    "dlpack": (lambda m: torch.utils.dlpack.from_dlpack(m.scale.detach()), {"scale"}),
    "storage": (lambda m: m.scale.untyped_storage().tolist(), {"scale"}),
    "tolist": (lambda m: m.scale.tolist(), {"scale"}),
    "print": (lambda m: str(m.scale), {"scale"}),
    "format": (lambda m: f"{m.scale[0]:.9f}", {"scale"}),
    "iterate": (lambda m: [float(value) for value in m.scale], {"scale"}),
    "compare": (lambda m: m.scale > 0.5, {"scale"}),
    "deepcopy": (lambda m: copy.deepcopy(m.scale), {"scale"}),
    "deepcopy of a module": (lambda m: copy.deepcopy(m.last)(X), LAST),
    "deepcopy of all": (lambda m: copy.deepcopy(m)(WORDS), EVERYTHING),
    "pickle": (lambda m: pickle.loads(pickle.dumps(m.last))(X), LAST),
    "save": (lambda m: _loaded(m)(WORDS), EVERYTHING),
    "save state_dict": (lambda m: list(_loaded(m.last.state_dict()).values()), LAST),
    "state_dict": (lambda m: list(m.last.state_dict().values()), LAST),
    "vector": (lambda m: nn.utils.parameters_to_vector(m.last.parameters()), LAST),
    "functional call": (lambda m: torch.func.functional_call(m.last, dict(m.last.named_parameters()), (X,)), LAST),
    "module.to": (lambda m: list(m.last.to(torch.float64).parameters()), LAST),
    "checkpointing": (lambda m: torch.utils.checkpoint.checkpoint(m.last, X, use_reentrant=False), LAST),
    "in place": (lambda m: m.scale.data.clamp_(0.4, 0.6), {"scale"}),
    "init": (lambda m: nn.init.ones_(m.scale), {"scale"}),
    "all": (lambda m: m(WORDS), EVERYTHING),
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
def test_a_use_waits_for_exactly_what_it_uses(kind: str) -> None:
    use, names = USES[kind]
    loop, mine, plain, theirs = loop_before_sums()
    with watching_uses(loop.model):
        found = use(loop.model)
    assert loop.pending == set(loop.gradients.names) - names
    assert len(loop.network.waited) == len(names)
    assert loop.deferred.waits.count == len(names)
    assert same(leaves(found), leaves(use(plain)))
    use(loop.model)
    assert len(loop.network.waited) == len(names), "it waited again"
    use(plain)
    assert_alike(loop, mine, plain, theirs)
    assert loop.pending == set()


def test_a_gradient_is_the_sum() -> None:
    """Read between backward and step, or after it where it was not cleared."""
    loop, mine, plain, theirs = loop_before_sums()
    train_once(loop, loop.model, [], zoo_loss)
    train_once(None, plain, [], zoo_loss)
    assert loop.pending == set(loop.gradients.names)
    assert torch.equal(loop.model.scale.grad, plain.scale.grad)  # type: ignore[arg-type]
    assert loop.pending == set(loop.gradients.names) - {"scale"}
    for optimizer in (*mine, *theirs):
        optimizer.step()
    assert torch.equal(loop.model.last.bias.grad, plain.last.bias.grad)  # type: ignore[arg-type, union-attr]
    assert_alike(loop, mine, plain, theirs)


METADATA = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda", "is_sparse", "is_quantized",
    "is_meta", "grad_fn", "nbytes", "itemsize",
)  # fmt: skip
QUESTIONS = (
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset", "is_floating_point",
    "is_complex", "is_signed", "get_device", "__len__", "__hash__",
)  # fmt: skip


def test_questions_about_a_parameter_do_not_wait() -> None:
    loop, _, plain, _ = loop_before_sums()
    for mine, theirs in zip(loop.model.parameters(), plain.parameters(), strict=True):
        for name in METADATA:
            assert getattr(mine, name) == getattr(theirs, name)
        for name in QUESTIONS:
            found, expected = getattr(mine, name)(), getattr(theirs, name)()
            assert found == expected or name == "__hash__"
        assert isinstance(mine, nn.Parameter)
        assert mine in {mine}
        mine.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in loop.model.parameters() if parameter.requires_grad) > 100
    loop.model.train()
    loop.model.eval()
    assert len(list(loop.model.named_parameters())) == len(EVERYTHING)
    assert repr(loop.model)
    assert not loop.network.waited
    assert loop.pending == EVERYTHING


def test_what_has_arrived_is_taken_in_without_waiting() -> None:
    loop, _, _, _ = loop_before_sums()
    loop.deliver(lambda each: each is loop.network.sums[0])
    before = loop.deferred.waits.count
    with watching_uses(loop.model):
        loop.model(WORDS)
    assert loop.deferred.waits.count == before + len(EVERYTHING) - 1
    assert loop.whole == 1


def test_all_is_taken_in_when_all_is_there() -> None:
    loop, mine, plain, theirs = loop_before_sums()
    loop.deliver()
    F.linear(X, loop.model.last.weight)  # type: ignore[union-attr, arg-type]
    assert loop.pending == set()
    assert loop.whole == 1
    assert loop.deferred.waits.count == 0
    assert_alike(loop, mine, plain, theirs)


def test_the_optimizers_state_dict_is_that_of_the_step() -> None:
    loop, mine, plain, theirs = loop_before_sums()
    found, expected = mine[0].state_dict(), theirs[0].state_dict()
    assert loop.pending == set()
    assert same(leaves(found), leaves(expected))
    assert_alike(loop, mine, plain, theirs)


# --- orders ---


class Backwards(nn.Module):
    """Uses its layers in the opposite of the order in which they are registered, as in Megatron-LM's issue 950."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


@pytest.mark.parametrize("zero_first", [False, True])
def test_the_observed_order_is_that_of_the_forward(zero_first: bool) -> None:
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(model, optimizer)
    loop.begin()
    if zero_first:
        optimizer.zero_grad()
    model(X).backward()
    loop.end()
    used = [loop.gradients.names[index].split(".")[1] for index in loop.deferred.order]
    assert list(dict.fromkeys(used)) == ["4", "3", "2", "1", "0"]
    assert len(used) == 10
    optimizer.step()
    optimizer.zero_grad()
    train_once(loop, model, [optimizer], lambda m: m(X))
    wanted = [each.priority for each in loop.network.sums if each.name.endswith((":8", ":9"))]
    assert sorted(wanted) == [0, 1], "the layer that is used first is not the most urgent"


def test_a_model_that_is_used_in_another_order_never_has_a_stale_weight() -> None:
    model, plain = Backwards(), Backwards()
    mine, theirs = adam(model), adam(plain)
    loop = Loop(model, mine)
    for step in range(5):
        loop.network.waited.clear()
        train_both(loop, [mine], plain, [theirs], lambda m: m(X))
        if step > 1:
            layers = [int(name.rpartition(":")[2]) // 2 for name in loop.network.waited]
            assert sorted(layers, reverse=True) == layers, "it waited in another order than it used"
    loop.deferred.flush()
    assert same(state_of(model, [mine]), state_of(plain, [theirs]))


def test_branches_are_waited_for_when_they_are_taken() -> None:
    """Parameters that no replica has used keep what they have."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, branch: int) -> Tensor:
            return self.branches[branch](x).pow(2).mean()  # type: ignore[no-any-return]

    model, plain = Branches(), Branches()
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    loop = Loop(model, mine, find_unused=True)
    for branch in (0, 1, 0, 0, 2, 1):
        train_both(loop, [mine], plain, [theirs], lambda m: m(X, branch))  # noqa: B023 - called at once
    loop.deferred.flush()
    assert same(state_of(model, [mine]), state_of(plain, [theirs]))


# --- controls ---


def test_a_use_that_is_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if compiled code had taken the weight: the gradient that comes back gives it away."""
    loop, mine, _, _ = loop_before_sums()
    before = loop.model.scale._version
    monkeypatch.setattr(DeferredUpdates, "use", lambda *_: None)
    with pytest.raises(TrainError, match=r"got a gradient, but its last update was still under way.*sync='fifo'"):
        train_once(loop, loop.model, mine, zoo_loss)
    assert loop.model.scale._version == before, "nothing was updated behind its back"


def test_a_use_that_is_not_seen_is_refused_where_only_one_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, mine, _, _ = loop_before_sums()
    use, hidden = DeferredUpdates.use, loop.gradients.names.index("scale")

    def blind(deferred: DeferredUpdates, index: int) -> None:
        if index != hidden:
            use(deferred, index)

    monkeypatch.setattr(DeferredUpdates, "use", blind)
    # Where backward needs the old values as well, torch notices first that they have changed meanwhile.
    with pytest.raises((TrainError, RuntimeError), match="'scale' got a gradient|modified by an inplace operation"):
        train_once(loop, loop.model, mine, zoo_loss)


def test_what_is_not_seen_and_gives_no_gradient_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the other tests of this file could fail: both the values and the watch tell."""
    loop, _, plain, _ = loop_before_sums()
    monkeypatch.setattr(DeferredUpdates, "use", lambda *_: None)
    with torch.no_grad(), Watch(loop.model) as watch:
        found = loop.model(WORDS)
    assert watch.stale
    assert not torch.equal(found, plain(WORDS))


# --- programs that cannot be seen through, or do unusual things ---

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
    train_both(loop, mine, plain, theirs, lambda m: compiled(X, m.scale) + zoo_loss(m), steps=2)
    assert_alike(loop, mine, plain, theirs)


def test_a_fast_path_for_evaluation_is_taken_as_ever() -> None:
    """Encoder layers take another way through torch, with other bits, where they see a tensor of a special kind."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, plain = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    mine, theirs = [adam(model)], [adam(plain)]
    loop, x = Loop(model, *mine), torch.randn(2, 5, 8)
    train_both(loop, mine, plain, theirs, lambda m: m(x).pow(2).mean(), steps=3)
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
        train_both(loop, mine, plain, theirs, steps=3)
    finally:
        handle.remove()
    assert_alike(loop, mine, plain, theirs)


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
    train_both(loop, mine, plain, theirs, steps=3)
    assert_alike(loop, mine, plain, theirs)


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
    loop.end_after_backward()
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
        job.wrap(model, optimizer)
        loader = job.loader(Numbers(), batch_size=2)
        for _ in job.epochs(1):
            for step in loader:
                for batch in step:
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
