"""One worker whose sums arrive when the test says so.

One process, with everything that matters real (gradient hooks, buckets, units, optimizers) but for the network: its sums
arrive when the test says, or when somebody waits for them. There are two replicas with equal gradients, and half of each
is added twice, which is exact: so plain training with torch alone is the reference, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pliant.comm.handle import Handle
from pliant.errors import WorkerLost
from pliant.train.deferred import DeferredUpdates, gate_evaluation
from pliant.train.gradients import GradientReducer
from pliant.train.pending import Pending
from pliant.train.sync import SyncConfig
from pliant.train.wrapping import defer_optimizer

MARKS = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]
"""Of every test with such a worker."""

Optimizers = Sequence[torch.optim.Optimizer]


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

    def wake(self) -> None:
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
        self.network = Network()
        self.said: list[str] = []
        self.gradients = GradientReducer(
            list(model.named_parameters()),
            2,
            find_unused=find_unused,
            before_backward=lambda: self.deferred.unused_parameters(),
        )
        self.gradients.enter_view(self.network, (1, 1))  # type: ignore[arg-type]
        self.deferred = DeferredUpdates(
            self.gradients.parameters, self.gradients.names, can_undo, self.said.append, optimizers=optimizers
        )
        gate_evaluation(model, self.deferred)
        self.whole = 0
        self.lost = 0
        self.way = SyncConfig()
        for optimizer in optimizers:
            defer_optimizer(
                optimizer, self.deferred, lambda _: None, lambda: self.deferred.lost is not None, lambda: 1.0
            )

    # --- of a GradientCollector ---

    def sum_arrived(self, index: int) -> None:
        """A sum has become a gradient."""

    def sums_complete(self) -> None:
        self.whole += 1

    def halt(self) -> None:
        self.lost += 1

    # --- of the trainer ---

    def begin(self) -> None:
        """A pass begins, and the turn of the only replica hosted here."""
        self.network.sums = [] if not self.deferred.is_pending else self.network.sums
        cleared = self.deferred.cleared
        if cleared is None:
            self.deferred.flush()
        self.gradients.begin_pass(cleared=cleared or {})
        if self.way.mode == "fifo":
            self.deferred.observe()
        self.gradients.plan_step(self.way, self.deferred.order)
        self.gradients.begin_turn(0)

    def end(self) -> None:
        """The turn is over, and the sums are on their way."""
        if self.gradients.are_deferred:
            sums = self.gradients.pending_sums()
            self.deferred.begin(sums, list(range(len(self.gradients.parameters))), self)
        else:
            self.gradients.wait()
        self.gradients.end_turns()
        self.way = SyncConfig("priority", slice_bytes=1)

    def end_after_backward(self) -> None:
        """End each turn with its backward."""
        done = self.gradients._backward_done

        def done_and_over() -> None:
            done()
            self.end()

        self.gradients._backward_done = done_and_over  # type: ignore[method-assign]

    @property
    def pending(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if type(parameter) is Pending}

    def deliver(self, chosen: Callable[[Sum], bool] = lambda _: True) -> None:
        """Let sums arrive that nobody has waited for."""
        for each in self.network.sums:
            if chosen(each):
                each.arrive()


def train_once(
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
    if loop is not None:
        loop.end()
    for optimizer in optimizers:
        optimizer.step()
    after()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)


def state_of(model: nn.Module, optimizers: Optimizers) -> list[Any]:
    """All there is, with references to nothing."""
    found: list[Any] = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [copy.deepcopy(value) for name, value in sorted(group.items()) if name != "params"]
            for parameter in group["params"]:
                found += [copy.deepcopy(value) for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return found


def same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def train_both(
    loop: Loop,
    mine: Optimizers,
    plain: nn.Module,
    theirs: Optimizers,
    compute: Callable[[nn.Module], Tensor] | None = None,
    *,
    steps: int = 1,
) -> None:
    """Do the same steps as a job, watching its uses, and by plain torch."""
    for _ in range(steps):
        with watching_uses(loop.model):
            train_once(loop, loop.model, mine, compute or zoo_loss)
        train_once(None, plain, theirs, compute or zoo_loss)


def assert_alike(loop: Loop, mine: Optimizers, plain: nn.Module, theirs: Optimizers) -> None:
    """Fail unless the job has what plain torch has."""
    assert same(state_of(loop.model, mine), state_of(plain, theirs))


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
def watching_uses(model: nn.Module) -> Iterator[None]:
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


def zoo_loss(model: nn.Module, words: Tensor = WORDS) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten().flip(0))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def twins(make: Make = adam, **settings: Any) -> tuple[Loop, list[Any], nn.Module, list[Any]]:
    """The job, its optimizers, and plain twins of its model and optimizers."""
    model, plain = Zoo(), Zoo()
    mine, theirs = make(model), make(plain)
    return Loop(model, mine, **settings), [mine], plain, [theirs]


def loop_before_sums(make: Make = adam, **settings: Any) -> tuple[Loop, list[Any], nn.Module, list[Any]]:
    """The same after two steps, with the second one's sums still to come."""
    loop, mine, plain, theirs = twins(make, **settings)
    for _ in range(2):
        train_once(loop, loop.model, mine, zoo_loss)
        train_once(None, plain, theirs, zoo_loss)
    assert loop.pending == set(loop.gradients.names)
    loop.network.waited.clear()
    return loop, mine, plain, theirs


LAST, LSTM = (
    {"last.weight", "last.bias"},
    {f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
)
EVERYTHING = LAST | LSTM | {"scale", "embedding.weight"}
X = torch.rand(2, 3, 4)


def leaves(value: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]


def changed(model: nn.Module, before: Sequence[Any]) -> list[int]:
    """Which parameters are others now; without looking at them as a program would."""
    with torch._C.DisableTorchFunctionSubclass():
        pairs = zip(model.parameters(), before, strict=False)
        return [number for number, (mine, old) in enumerate(pairs) if not torch.equal(mine, old)]


# --- optimizers ---


def make_optimizer(kind: str, settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
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
