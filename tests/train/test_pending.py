"""Parameters whose sums are still on their way: every use waits for just what it uses, and gets what plain torch has."""

from __future__ import annotations

import copy
import io
import pickle
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
    Watch,
    X,
    adam,
    leaves,
    loop_before_sums,
    same,
    state_of,
    train_once,
    watching_uses,
    zoo_loss,
)
from torch import Tensor, nn

from pliant.errors import TrainError
from pliant.train.deferred import DeferredUpdates

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
    assert same(state_of(loop.model, mine), state_of(plain, theirs))
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
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


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
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


def test_the_optimizers_state_dict_is_that_of_the_step() -> None:
    loop, mine, plain, theirs = loop_before_sums()
    found, expected = mine[0].state_dict(), theirs[0].state_dict()
    assert loop.pending == set()
    assert same(leaves(found), leaves(expected))
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


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
        with watching_uses(model):
            train_once(loop, model, [mine], lambda m: m(X))
        train_once(None, plain, [theirs], lambda m: m(X))
        if step > 1:
            layers = [int(name.rpartition(":")[2]) // 2 for name in loop.network.waited]
            assert sorted(layers, reverse=True) == layers, "it waited in another order than it used"
    loop.wait_for_sums()
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
        with watching_uses(model):
            train_once(loop, model, [mine], lambda m: m(X, branch))  # noqa: B023 - called at once
        train_once(None, plain, [theirs], lambda m: m(X, branch))  # noqa: B023
    loop.wait_for_sums()
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
