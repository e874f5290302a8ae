"""Parameters whose sums are still on their way: every use waits for just what it uses, and gets what plain torch has.

One process, with everything that matters real (gradient hooks, buckets, units, optimizers) but for the network: its sums
arrive when the test says, or when somebody waits for them. There are two replicas with equal gradients, and half of each
is added twice, which is exact: so plain training with torch alone is the reference, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import importlib
import io
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pliant
from pliant.comm.handle import Handle
from pliant.errors import TrainError, WorkerLost
from pliant.train import guards
from pliant.train.gates import gate_evaluation, gate_state, hidden_uses
from pliant.train.gradients import Gradients
from pliant.train.priority import Crossing, Pending
from pliant.train.trainer import Turn
from pliant.train.tuning import Choice

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]

Optimizers = Sequence[torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors, and others may need the processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- a network that does what the test says ---


class Sum:
    """One sum under way."""

    timeout_s = 5.0

    def __init__(self, network: Network, name: str, tensor: Tensor, priority: int) -> None:
        self.handle = Handle(name, self, None)
        self.name, self.priority = name, priority
        self._network, self._tensor = network, tensor

    def arrive(self) -> None:
        if not self.handle.done:
            self.handle.finish(self._tensor.mul_(2))

    def fail(self) -> None:
        if not self.handle.done:
            self.handle.fail(WorkerLost("host:1", 1, "the test says so"))

    def hurry(self) -> None:
        """Somebody waits."""
        self._network.waited.append(self.name)
        if self._network.broken:
            self.fail()
        else:
            self.arrive()

    def missing(self, handle: Handle) -> tuple[str, ...]:
        return ()


class Network:
    """The engine of the first of two workers."""

    rank, size, num_lanes, may_be_written_to = 0, 2, 2, False

    def __init__(self) -> None:
        self.sums: list[Sum] = []
        """Of the last step."""
        self.waited: list[str] = []
        self.broken = False

    def empty(self, shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def all_reduce(self, name: str, tensor: Tensor, *, priority: int = 0, **_: Any) -> Handle:
        self.sums.append(Sum(self, name, tensor, priority))
        return self.sums[-1].handle


class Loop:
    """A worker's job, as far as gradients and updates go: what the trainer does around the program's own lines."""

    def __init__(
        self, model: nn.Module, *optimizers: torch.optim.Optimizer, can_undo: bool = False, find_unused: bool = False
    ) -> None:
        self.model = model
        self.adaptation = SimpleNamespace(learning_rate_factor=1.0)
        self.network = Network()
        self.said: list[str] = []
        self.lost: list[Exception] = []
        self.gradients = Gradients(
            list(model.named_parameters()),
            2,
            find_unused=find_unused,
            on_backward=self._backward_over,
            before_backward=lambda: self.crossing.leftover(),
        )
        self.gradients.arrange(self.network, (1, 1))  # type: ignore[arg-type]
        self.crossing = Crossing(
            self.gradients.parameters, self.gradients.names, can_undo, self.said.append, optimizers=optimizers
        )
        self.crossing.on_lost = self.lost.append
        gate_evaluation(model, self.crossing)
        self.whole = 0
        self.crossing.on_whole = self._whole
        self.turn = Turn(0, 0, True)
        self.may_commit, self.torn = True, None
        self.way = Choice()
        for optimizer in optimizers:
            guards.patch_optimizer(optimizer, lambda: self, lambda: self)  # type: ignore[arg-type, return-value]
            gate_state(optimizer, self.crossing)

    def finish_sums(self) -> bool:
        self.crossing.flush()
        return True

    def _whole(self) -> None:
        self.whole += 1

    def begin(self) -> None:
        """The program is given its next batch."""
        if self.way.mode == "fifo":
            self.crossing.observe()
        self.network.sums = [] if not self.crossing.is_open else self.network.sums
        self.gradients.travel(self.way, self.crossing.order)
        self.turn.done = False
        self.gradients.begin_turn(0)

    def _backward_over(self) -> None:
        self.turn.done = True
        if self.gradients.crosses:
            sums = self.gradients.under_way()
            self.crossing.begin(sums, list(range(len(self.gradients.parameters))))
        else:
            self.gradients.wait()
        self.way = Choice("priority", slice_bytes=1)

    @property
    def pending(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if type(parameter) is Pending}

    def deliver(self, chosen: Callable[[Sum], bool] = lambda _: True) -> None:
        """Let sums arrive that nobody has waited for."""
        for each in self.network.sums:
            if chosen(each):
                each.arrive()


def _train(
    loop: Loop | None,
    model: nn.Module,
    optimizers: Optimizers,
    compute: Callable[[nn.Module], Tensor],
    *,
    after: Callable[[], None] = lambda: None,
    set_to_none: bool = True,
) -> None:
    """One step of the program; with `loop`, as a job."""
    if loop is not None:
        loop.begin()
    compute(model).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
    after()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)


def _state(model: nn.Module, optimizers: Optimizers) -> list[Any]:
    """All there is, with references to nothing."""
    found: list[Any] = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [copy.deepcopy(value) for name, value in sorted(group.items()) if name != "params"]
            for parameter in group["params"]:
                found += [copy.deepcopy(value) for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return found


def _same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


class Watch(TorchDispatchMode):
    """Looks below all of torch's Python: no operator may get the memory of a parameter that is still to be updated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stale: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    parameter = self._parameters.get(value.untyped_storage().data_ptr())
                    if type(parameter) is Pending:
                        self.stale.append(str(func))
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    with Watch(model) as watch:
        yield
    assert not watch.stale, f"used before they were updated: {watch.stale}"


# --- a model with a bit of everything ---


class Zoo(nn.Module):
    """Registered in another order than it is used in; a parameter of its own; an embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.scale = nn.Parameter(torch.rand(4))
        self.embedding = nn.Embedding(11, 4)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.lstm(self.embedding(words) * self.scale)[0]
        return F.linear(self.last(torch.tanh(hidden)), self.embedding.weight)


WORDS = torch.randint(0, 11, (5, 3), generator=torch.Generator().manual_seed(5))


def _zoo_loss(model: nn.Module, words: Tensor = WORDS) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten().flip(0))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def _pair(make: Make = _adam, **settings: Any) -> tuple[Loop, list[Any], nn.Module, list[Any]]:
    """The job, its optimizers, and plain twins of its model and optimizers."""
    model, plain = Zoo(), Zoo()
    mine, theirs = make(model), make(plain)
    return Loop(model, mine, **settings), [mine], plain, [theirs]


def _under_way(make: Make = _adam, **settings: Any) -> tuple[Loop, list[Any], nn.Module, list[Any]]:
    """The same after two steps, with the second one's sums still to come."""
    loop, mine, plain, theirs = _pair(make, **settings)
    for _ in range(2):
        _train(loop, loop.model, mine, _zoo_loss)
        _train(None, plain, theirs, _zoo_loss)
    assert loop.pending == set(loop.gradients.names)
    loop.network.waited.clear()
    return loop, mine, plain, theirs


# --- uses ---

LAST, LSTM = (
    {"last.weight", "last.bias"},
    {f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
)
EVERYTHING = LAST | LSTM | {"scale", "embedding.weight"}
X = torch.rand(2, 3, 4)


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


def _leaves(value: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]


@pytest.mark.parametrize("kind", USES)
def test_a_use_waits_for_exactly_what_it_uses(kind: str) -> None:
    use, names = USES[kind]
    loop, mine, plain, theirs = _under_way()
    with _watched(loop.model):
        found = use(loop.model)
    assert loop.pending == set(loop.gradients.names) - names
    assert len(loop.network.waited) == len(names)
    assert loop.crossing.waits.count == len(names)
    assert _same(_leaves(found), _leaves(use(plain)))
    use(loop.model)
    assert len(loop.network.waited) == len(names), "it waited again"
    use(plain)
    assert _same(_state(loop.model, mine), _state(plain, theirs))
    assert loop.pending == set()


def test_a_gradient_is_the_sum() -> None:
    """Read between backward and step, or after it where it was not cleared."""
    loop, mine, plain, theirs = _under_way()
    _train(loop, loop.model, [], _zoo_loss)
    _train(None, plain, [], _zoo_loss)
    assert loop.pending == set(loop.gradients.names)
    assert torch.equal(loop.model.scale.grad, plain.scale.grad)  # type: ignore[arg-type]
    assert loop.pending == set(loop.gradients.names) - {"scale"}
    for optimizer in (*mine, *theirs):
        optimizer.step()
    assert torch.equal(loop.model.last.bias.grad, plain.last.bias.grad)  # type: ignore[arg-type, union-attr]
    assert _same(_state(loop.model, mine), _state(plain, theirs))


METADATA = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda", "is_sparse", "is_quantized",
    "is_meta", "grad_fn", "nbytes", "itemsize",
)  # fmt: skip
QUESTIONS = (
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset", "is_floating_point",
    "is_complex", "is_signed", "get_device", "__len__", "__hash__",
)  # fmt: skip


def test_questions_about_a_parameter_do_not_wait() -> None:
    loop, _, plain, _ = _under_way()
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
    loop, _, _, _ = _under_way()
    loop.deliver(lambda each: each is loop.network.sums[0])
    before = loop.crossing.waits.count
    with _watched(loop.model):
        loop.model(WORDS)
    assert loop.crossing.waits.count == before + len(EVERYTHING) - 1
    assert loop.whole == 1


def test_all_is_taken_in_when_all_is_there() -> None:
    loop, mine, plain, theirs = _under_way()
    loop.deliver()
    F.linear(X, loop.model.last.weight)  # type: ignore[union-attr, arg-type]
    assert loop.pending == set()
    assert loop.whole == 1
    assert loop.crossing.waits.count == 0
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_the_optimizers_state_dict_is_that_of_the_step() -> None:
    loop, mine, plain, theirs = _under_way()
    found, expected = mine[0].state_dict(), theirs[0].state_dict()
    assert loop.pending == set()
    assert _same(_leaves(found), _leaves(expected))
    assert _same(_state(loop.model, mine), _state(plain, theirs))


# --- optimizers ---


def _make_optimizer(kind: str, settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003}]
    return getattr(torch.optim, kind)(groups, **{"lr": 0.02, **settings})  # type: ignore[no-any-return]


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 1e-4}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("SGD", {"momentum": 0.9, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 1e-2}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("Adam", {"lr": torch.tensor(0.02)}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("NAdam", {"momentum_decay": 0.1}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("ASGD", {"t0": 2}),
    ("Adafactor", {}),
    ("Muon", {}),
]


class Shelf(nn.Module):
    """Takes what it needs in the order that it is told. Matrices only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4) / 2) for _ in range(6))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = torch.tanh(x @ self.weights[index]) + x
        return x.pow(2).mean()


def test_every_dense_optimizer_of_torch_is_tried() -> None:
    there = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    tried = {kind for kind, _ in OPTIMIZERS}
    assert there - tried == {"Optimizer", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=str)
def test_a_deferred_step_is_the_plain_step(kind: str, settings: dict[str, Any]) -> None:
    """Two groups; the order of uses, and what has arrived before them, is another in each step."""
    chance = random.Random(11)
    model, plain = Shelf(), Shelf()
    make = functools.partial(_make_optimizer, kind, settings)
    mine, theirs = [make(model)], [make(plain)]
    loop = Loop(model, *mine, can_undo=True)
    for step in range(6):
        order = chance.sample(range(6), 6)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loop.deliver(lambda _: chance.random() < 0.3)
        with _watched(model):
            _train(loop, model, mine, lambda m: m(x, order))  # noqa: B023 - called at once
        _train(None, plain, theirs, lambda m: m(x, order))  # noqa: B023
        assert bool(loop.pending) == (step > 0)
    assert not loop.said
    loop.finish_sums()
    assert _same(_state(model, mine), _state(plain, theirs))


def test_a_scheduler_does_not_change_a_step_that_was_called_before() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    loop, mine, plain, theirs = _pair(lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5))
    mine_scheduled, theirs_scheduled = schedule(mine[0]), schedule(theirs[0])
    for _ in range(3):
        with _watched(loop.model):
            _train(loop, loop.model, mine, _zoo_loss, after=mine_scheduled.step)
        assert mine[0].param_groups[0]["lr"] == mine_scheduled.get_last_lr()[0], "the new rate is there at once"
        _train(None, plain, theirs, _zoo_loss, after=theirs_scheduled.step)
    assert loop.pending == EVERYTHING
    loop.model(WORDS)
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_two_optimizers_share_a_model() -> None:
    model, plain = Zoo(), Zoo()

    def make(model: Any) -> list[torch.optim.Optimizer]:
        rest = [*model.lstm.parameters(), model.scale, model.embedding.weight]
        return [torch.optim.Adam(model.last.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    mine, theirs = make(model), make(plain)
    loop = Loop(model, *mine)
    for _ in range(4):
        with _watched(model):
            _train(loop, model, mine, _zoo_loss)
        _train(None, plain, theirs, _zoo_loss)
    loop.finish_sums()
    assert _same(_state(model, mine), _state(plain, theirs))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["before forward", "after step"])
def test_gradients_are_cleared_before_or_after(first: bool, set_to_none: bool) -> None:
    loop, mine, plain, theirs = _pair()

    def train(loop: Loop | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if loop is not None:
            loop.begin()
        if first:
            optimizer.zero_grad(set_to_none=set_to_none)
        _zoo_loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not first:
            optimizer.zero_grad(set_to_none=set_to_none)

    for step in range(4):
        with _watched(loop.model):
            train(loop, loop.model, mine[0])
        train(None, plain, theirs[0])
        assert bool(loop.pending) == (step > 0), "it waited for what the next forward would have waited for"
    assert not loop.network.waited or loop.crossing.waits.count > 0
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (loop.model, plain)]
    assert _same(*gradients)
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_gradients_accumulate_over_batches() -> None:
    """Four backwards, of which the last one is summed."""
    loop, mine, plain, theirs = _pair()
    batches = [torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def compute(model: nn.Module, loop: Loop | None) -> Tensor:
        for batch in batches[:-1]:
            if loop is not None:
                loop.gradients.no_sync = True
            _zoo_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if loop is not None:
            loop.gradients.no_sync = False
        return _zoo_loss(model, batches[-1])

    for _ in range(3):
        with _watched(loop.model):
            _train(loop, loop.model, mine, functools.partial(compute, loop=loop))
        _train(None, plain, theirs, functools.partial(compute, loop=None))
    assert loop.pending == EVERYTHING
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_a_step_that_is_left_out_leaves_the_parameters() -> None:
    """The program looks at its loss and does not call step."""
    loop, mine, plain, theirs = _under_way()
    for optimizers in (mine, []):
        with _watched(loop.model):
            _train(loop, loop.model, optimizers, _zoo_loss)
        mine[0].zero_grad()
    for optimizers in (theirs, []):
        _train(None, plain, optimizers, _zoo_loss)
        theirs[0].zero_grad()
    assert _same(_state(loop.model, mine), _state(plain, theirs))


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
    loop, mine, plain, theirs = _pair(make)
    for _ in range(4):
        with _watched(loop.model):
            _train(loop, loop.model, mine, _zoo_loss)
        _train(None, plain, theirs, _zoo_loss)
        assert loop.pending == set()
    assert _same(_state(loop.model, mine), _state(plain, theirs))
    [line] = loop.said
    assert says in line
    assert "priority cannot help" in line


def test_clipping_waits_for_all_and_it_is_said_once() -> None:
    loop, mine, plain, theirs = _pair()

    def train(loop: Loop | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        if loop is not None:
            loop.begin()
        _zoo_loss(model).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for _ in range(4):
        with _watched(loop.model):
            norm = train(loop, loop.model, mine[0])
        assert loop.pending == set()
        assert torch.equal(norm, train(None, plain, theirs[0]))
    assert _same(_state(loop.model, mine), _state(plain, theirs))
    [line] = loop.said
    assert "clipping" in line


# --- a step that does not count ---


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=str)
def test_what_was_updated_too_early_is_taken_back(kind: str, settings: dict[str, Any]) -> None:
    """Some sums of a step have come and were used, the others never come: all is as it was before that step."""
    model = Shelf()
    mine = [_make_optimizer(kind, settings, model)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine[0], 0.9)
    loop = Loop(model, *mine, can_undo=True)
    x = torch.randn(3, 4)
    for steps in range(2, 4):
        for _ in range(steps):
            _train(loop, model, mine, lambda m: m(x, range(6)), after=scheduler.step)
        loop.finish_sums()
        before = _state(model, mine)
        known = len(mine[0].state)
        _train(loop, model, mine, lambda m: m(x, range(6)), after=scheduler.step)
        for index in (4, 1):
            loop.model.weights[index].sum()  # type: ignore[index]
        assert len(loop.pending) == 4
        assert _changed(model, before) == [1, 4]
        loop.network.broken = True
        model(x, range(6))
        assert len(loop.lost) == steps - 1
        assert loop.pending == set(), "a program that goes on must not wait again and again"
        loop.crossing.take_back()
        loop.network.broken = False
        assert _same(_state(model, mine), before)
        assert len(mine[0].state) == known
        assert all(parameter.grad is None for parameter in model.parameters()), "what was cleared came back"


def _changed(model: nn.Module, before: Sequence[Any]) -> list[int]:
    """Which parameters are others now; without looking at them as a program would."""
    with torch._C.DisableTorchFunctionSubclass():
        pairs = zip(model.parameters(), before, strict=False)
        return [number for number, (mine, old) in enumerate(pairs) if not torch.equal(mine, old)]


def test_the_first_update_of_all_is_taken_back() -> None:
    """The optimizer has no state before it, and none afterwards."""
    loop, mine, _, _ = _pair(can_undo=True)
    loop.way = Choice("priority", slice_bytes=1)
    before = _state(loop.model, mine)
    _train(loop, loop.model, mine, _zoo_loss)
    loop.model.last(X)  # type: ignore[operator]
    assert len(_changed(loop.model, before)) == 2
    loop.network.broken = True
    loop.model(WORDS)
    loop.crossing.take_back()
    assert _same(_state(loop.model, mine), before)
    assert not mine[0].state


def test_what_was_updated_at_once_is_taken_back_too() -> None:
    """A gradient that was looked at before the step is summed by then, so its parameter is updated in the step itself."""
    loop, mine, _, _ = _pair(can_undo=True)
    _train(loop, loop.model, mine, _zoo_loss)
    loop.finish_sums()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine[0], 0.5)
    before = _state(loop.model, mine)
    loop.begin()
    _zoo_loss(loop.model).backward()  # type: ignore[no-untyped-call]
    assert loop.model.scale.grad is not None
    loop.model.last.bias.data.mul_(2)  # type: ignore[union-attr, operator]
    scheduler.step()  # before the step, as programs of old do
    mine[0].step()
    assert len(_changed(loop.model, before)) >= 2
    loop.network.broken = True
    loop.model(WORDS)
    loop.model.embedding.weight.data.zero_()  # type: ignore[union-attr, operator]  # in the pass that does not count
    loop.crossing.take_back()
    assert _same(_state(loop.model, mine), before)


def test_an_update_knows_nothing_of_the_mode_it_happens_in() -> None:
    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)  # multiplies matrices

    loop, mine, plain, theirs = _under_way(adafactor)
    with torch.autocast("cpu", torch.bfloat16):
        loop.model.last(X)  # type: ignore[operator]
    loop.finish_sums()
    assert _same(_state(loop.model, mine), _state(plain, theirs))
    _train(loop, loop.model, mine, _zoo_loss)
    _train(None, plain, theirs, _zoo_loss)
    with torch.inference_mode():
        loop.model(WORDS)
    _train(loop, loop.model, mine, _zoo_loss)
    _train(None, plain, theirs, _zoo_loss)
    loop.finish_sums()
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_parameters_that_share_memory_are_found() -> None:
    pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    pair[1].weight = nn.Parameter(pair[0].weight.data)
    assert "0.weight and 1.weight share memory" in hidden_uses(pair)


def test_an_update_that_fails_is_tried_again() -> None:
    loop, mine, plain, theirs = _under_way()
    original = torch.optim.Adam._init_group

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    torch.optim.Adam._init_group = fail  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(MemoryError):
            loop.model(WORDS)
    finally:
        torch.optim.Adam._init_group = original  # type: ignore[method-assign]
    loop.finish_sums()
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_what_is_whole_is_not_taken_back() -> None:
    loop, mine, plain, theirs = _under_way(can_undo=True)
    loop.model(WORDS)
    assert loop.whole == 1
    loop.crossing.take_back()
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_nothing_is_kept_where_nothing_can_be_taken_back() -> None:
    loop, _, _, _ = _under_way(can_undo=False)
    loop.model.last(X)  # type: ignore[operator]
    assert not loop.crossing._before
    loop, _, _, _ = _under_way(can_undo=True)
    loop.model.last(X)  # type: ignore[operator]
    assert len(loop.crossing._before) == 2
    loop.deliver()
    loop.model(WORDS)
    assert not loop.crossing._before


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
    used = [loop.gradients.names[index].split(".")[1] for index in loop.crossing.order]
    assert list(dict.fromkeys(used)) == ["4", "3", "2", "1", "0"]
    assert len(used) == 10
    optimizer.step()
    optimizer.zero_grad()
    _train(loop, model, [optimizer], lambda m: m(X))
    wanted = [each.priority for each in loop.network.sums if each.name.endswith((":8", ":9"))]
    assert sorted(wanted) == [0, 1], "the layer that is used first is not the most urgent"


def test_a_model_that_is_used_in_another_order_never_has_a_stale_weight() -> None:
    model, plain = Backwards(), Backwards()
    mine, theirs = _adam(model), _adam(plain)
    loop = Loop(model, mine)
    for step in range(5):
        loop.network.waited.clear()
        with _watched(model):
            _train(loop, model, [mine], lambda m: m(X))
        _train(None, plain, [theirs], lambda m: m(X))
        if step > 1:
            layers = [int(name.rpartition(":")[2]) // 2 for name in loop.network.waited]
            assert sorted(layers, reverse=True) == layers, "it waited in another order than it used"
    loop.finish_sums()
    assert _same(_state(model, [mine]), _state(plain, [theirs]))


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
        with _watched(model):
            _train(loop, model, [mine], lambda m: m(X, branch))  # noqa: B023 - called at once
        _train(None, plain, [theirs], lambda m: m(X, branch))  # noqa: B023
    loop.finish_sums()
    assert _same(_state(model, [mine]), _state(plain, [theirs]))


# --- controls ---


def test_a_use_that_is_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if compiled code had taken the weight: the gradient that comes back gives it away."""
    loop, mine, _, _ = _under_way()
    before = loop.model.scale._version
    monkeypatch.setattr(Crossing, "use", lambda *_: None)
    with pytest.raises(TrainError, match=r"got a gradient, but its last update was still under way.*sync='fifo'"):
        _train(loop, loop.model, mine, _zoo_loss)
    assert loop.model.scale._version == before, "nothing was updated behind its back"


def test_a_use_that_is_not_seen_is_refused_where_only_one_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, mine, _, _ = _under_way()
    use, hidden = Crossing.use, loop.gradients.names.index("scale")

    def blind(crossing: Crossing, index: int) -> None:
        if index != hidden:
            use(crossing, index)

    monkeypatch.setattr(Crossing, "use", blind)
    # Where backward needs the old values as well, torch notices first that they have changed meanwhile.
    with pytest.raises((TrainError, RuntimeError), match="'scale' got a gradient|modified by an inplace operation"):
        _train(loop, loop.model, mine, _zoo_loss)


def test_what_is_not_seen_and_gives_no_gradient_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the other tests of this file could fail: both the values and the watch tell."""
    loop, _, plain, _ = _under_way()
    monkeypatch.setattr(Crossing, "use", lambda *_: None)
    with torch.no_grad(), Watch(loop.model) as watch:
        found = loop.model(WORDS)
    assert watch.stale
    assert not torch.equal(found, plain(WORDS))


def test_an_update_with_the_rate_of_later_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.train.priority._options", lambda group: group)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        test_a_scheduler_does_not_change_a_step_that_was_called_before()


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
    loop, _, plain, _ = _under_way()
    size = 4 * 4
    found = ctypes.string_at(loop.model.scale.data_ptr(), size)  # type: ignore[operator]
    assert found == ctypes.string_at(plain.scale.data_ptr(), size)  # type: ignore[operator]


def test_a_compiled_function_never_computes_with_a_stale_weight() -> None:
    """It is not a module, so nobody knows of it at the start. Optimizers compute otherwise while something is compiled."""
    compiled = torch.compile(lambda x, scale: (x * scale).pow(2).mean(), backend="eager")
    loop, mine, plain, theirs = _under_way()
    for _ in range(2):
        _train(loop, loop.model, mine, lambda m: compiled(X, m.scale) + _zoo_loss(m))
        _train(None, plain, theirs, lambda m: compiled(X, m.scale) + _zoo_loss(m))
    assert _same(_state(loop.model, mine), _state(plain, theirs))


def test_a_fast_path_for_evaluation_is_taken_as_ever() -> None:
    """Encoder layers take another way through torch, with other bits, where they see a tensor of a special kind."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, plain = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    mine, theirs = [_adam(model)], [_adam(plain)]
    loop, x = Loop(model, *mine), torch.randn(2, 5, 8)
    for _ in range(3):
        _train(loop, model, mine, lambda m: m(x).pow(2).mean())
        _train(None, plain, theirs, lambda m: m(x).pow(2).mean())
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

    loop, mine, plain, theirs = _pair()
    handle = getattr(importlib.import_module("torch.optim.optimizer"), register)(clamp)
    try:
        for _ in range(3):
            _train(loop, loop.model, mine, _zoo_loss)
            _train(None, plain, theirs, _zoo_loss)
    finally:
        handle.remove()
    assert _same(_state(loop.model, mine), _state(plain, theirs))


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

    loop, mine, plain, theirs = _pair(lambda m: change(torch.optim.SGD(m.parameters(), lr=0.1)))
    for _ in range(3):
        _train(loop, loop.model, mine, _zoo_loss)
        _train(None, plain, theirs, _zoo_loss)
    assert _same(_state(loop.model, mine), _state(plain, theirs))


# --- programs that do unusual things ---


def _plain_step(model: Any, optimizers: Optimizers) -> None:
    _zoo_loss(model).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _never_clears(model: Any, optimizers: Optimizers) -> None:
    _zoo_loss(model).backward()  # type: ignore[no-untyped-call]
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
    return [_adam(model), torch.optim.SGD(list(model.parameters())[:2], lr=0.1)]


UNUSUAL: list[tuple[Callable[[Any, Optimizers], None], Callable[[nn.Module], Optimizers]]] = [
    (_plain_step, _some),
    (_plain_step, _shared),
    *(
        (act, lambda model: [_adam(model)])
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
        with _watched(model):
            act(model, mine)
        act(plain, theirs)
    assert _same(_state(model, mine), _state(plain, theirs))
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, plain)]
    assert _same(*gradients)


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
        job.wrap(model, optimizer, Numbers(), batch_size=2)
        for _ in job.epochs(1):
            for batch in job._loader or ():
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
