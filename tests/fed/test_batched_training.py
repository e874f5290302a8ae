"""Clients trained at once: close to each by itself, the same bits each time, and whatever else ran before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.fed import layered
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task, digits
from pliant.fed.data.task import InMemory, Numbers, Task
from pliant.fed.local_steps import batched_trainer_for, by_layers, by_vmap, traced_layers
from pliant.fed.trainer import ClientTrainer
from pliant.fed.work import Evaluation, Trained, Training, Weights

CLOSE = 2e-6
"""Sums are taken in another order; changes in these tests are some hundredths."""


def task_of(**given: object) -> Task:
    config = {"data": {"kind": "digits", "clients": 20}, "model": "cnn", "malicious": 0.2, **given}
    return build_task(FedConfig.model_validate(config))


def run(trainer: ClientTrainer, clients: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Trained, ...]:
    done = trainer.run(Weights.of(trainer.task.model()), Training(4, clients, steps, 0.05))
    assert isinstance(done, tuple)
    return done


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of two results' tensors."""
    pairs = zip(one.update.change.all, other.update.change.all, strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


CASES = [
    pytest.param("cnn", {}, id="cnn"),
    pytest.param("cnn", {"momentum": 0.9, "weight_decay": 0.01}, id="momentum"),
    pytest.param("cnn", {"optimizer": "adamw", "lr": 0.001}, id="adamw"),
    pytest.param("cnn-bn", {}, id="batch-norm"),
    pytest.param("logistic", {}, id="logistic"),
]


@pytest.mark.parametrize(("model", "local"), CASES)
def test_several_at_once_are_close_to_each_by_itself(model: str, local: dict[str, object]) -> None:
    """Clients of different numbers of steps, one of them a liar; buffers (BatchNorm's) are part of the change."""
    trainer = ClientTrainer(task_of(model=model, local=local, aggregator={"kind": "fed-prox", "mu": 0.5}))
    liar = int(trainer.task.malicious.argmax())
    clients = tuple(sorted({liar, 2, 7, 11}))
    steps = tuple(range(3, 3 + len(clients)))
    at_once = run(trainer, clients, steps)
    for client, count, batched in zip(clients, steps, at_once, strict=True):
        (alone,) = run(trainer, (client,), (count,))
        limit = 5e-3 if local.get("optimizer") else CLOSE  # Adam divides by gradients that are nearly 0
        assert apart(alone, batched) < limit < max(each.abs().max().item() for each in alone.update.change.parameters)
        assert batched.utility == pytest.approx(alone.utility, rel=1e-4)
        assert batched.update.loss == pytest.approx(alone.update.loss, rel=1e-4)
        assert (batched.update.client, batched.update.samples) == (client, alone.update.samples)
        for ours, theirs in zip(batched.update.change.buffers, alone.update.change.buffers, strict=True):
            assert ours.dtype == theirs.dtype
    assert apart(at_once[0], at_once[1]) > 100 * CLOSE


def test_a_unit_has_the_same_bits_whatever_ran_before() -> None:
    task = task_of(model="cnn-bn")
    clients, steps = (1, 4, 9), (3, 5, 2)
    expected = run(ClientTrainer(task), clients, steps)
    busy = ClientTrainer(task)
    run(busy, (3,), (4,))
    torch.manual_seed(99)
    busy.run(Weights.of(task.model()), Evaluation(0, 50))
    run(busy, (2, 5), (3, 3))
    assert all(apart(a, b) == 0 for a, b in zip(expected, run(busy, clients, steps), strict=True))
    assert all(a.utility == b.utility for a, b in zip(expected, run(busy, clients, steps), strict=True))


class Watching(nn.Module):
    """Sees how many threads it is computed with: on small data, their number changes no bit."""

    seen: ClassVar[set[int]] = set()

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add(torch.get_num_threads())
        return self.head(inputs.flatten(1))


def test_everything_is_computed_with_one_thread() -> None:
    trainer = ClientTrainer(task_of(model=f"{__name__}:Watching"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Watching.seen.clear()
        run(trainer, (1,), (2,))
        run(trainer, (1, 2), (2, 2))
        trainer.run(Weights.of(trainer.task.model()), Evaluation(0, 20))
        assert Watching.seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_client_with_fewer_steps_has_what_it_has_in_its_own_group() -> None:
    trainer = ClientTrainer(task_of())
    mixed = run(trainer, (1, 2, 3), (6, 2, 4))
    even = run(trainer, (1, 2, 3), (2, 2, 2))
    assert apart(mixed[1], even[1]) < CLOSE < apart(mixed[0], even[0])


class Dropping(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.first(inputs.flatten(1)))))


class Plain(nn.Module):
    """A forward pass that no trace can follow for many: it looks at values."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        return self.head(flat if float(flat.sum()) > math.inf else flat * 0.5)


class Scaled(nn.Module):
    """Has a parameter of its own, which only vmap can follow."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(64, classes), nn.Parameter(torch.ones(classes))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.flatten(1)) * self.scale


def test_what_models_draw_follows_from_the_unit() -> None:
    trainer = ClientTrainer(task_of(model=f"{__name__}:Dropping"))
    before = torch.get_rng_state()
    first, second = (run(trainer, (1, 2), (3, 3)) for _ in range(2))
    assert all(apart(a, b) == 0 for a, b in zip(first, second, strict=True))
    assert apart(run(trainer, (1,), (3,))[0], run(trainer, (1,), (3,))[0]) == 0
    assert apart(first[0], run(trainer, (1, 3), (3, 3))[0]) > 0  # other clients, other draws
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_looks_at_values_is_trained_in_turn() -> None:
    task = task_of(model=f"{__name__}:Plain")
    assert traced_layers(task, task.model()) is None
    assert batched_trainer_for(task, task.model(), None) is None
    trainer = ClientTrainer(task)
    both = run(trainer, (1, 2), (3, 2))
    assert apart(both[1], run(trainer, (2,), (2,))[0]) == 0


def test_a_model_with_something_unknown_goes_by_vmap() -> None:
    task = task_of(model=f"{__name__}:Scaled")
    assert traced_layers(task, task.model()) is None
    assert batched_trainer_for(task, task.model(), None) is not None
    trainer = ClientTrainer(task)
    assert apart(run(trainer, (1, 2), (3, 3))[0], run(trainer, (1,), (3,))[0]) < CLOSE


NETS: list[tuple[str, Callable[[], nn.Module]]] = [
    ("strides and paddings", lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), bias=False), nn.Tanh())),
    ("pooling with a rest", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d((3, 2)), nn.Conv2d(4, 2, 1))),
    ("means", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.GELU(), nn.AdaptiveAvgPool2d(1))),
    (
        "in place",
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
    ),
    ("norms", lambda: nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))),
]


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in NETS])
def test_layers_of_many_models_are_each_models_layers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(3, 5, 2, 11, 9), torch.randint(0, 3, (3, 5))
    images[:, :, :, :4] = 0.5  # equal pixels: which one of a window is the largest?
    body = make()
    width = body(images[0]).flatten(1).shape[1]
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(width, 3)).train()
    known = layered.trace_layers(model)
    assert known is not None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stacked = [{n: e.detach().unsqueeze(0).repeat(3, *[1] * e.dim()) for n, e in tensors.items()} for _ in range(2)]
    names = [name for name, _ in model.named_parameters()]
    found = []
    for way, each in zip((by_layers(known), by_vmap(model)), stacked, strict=True):
        others = {name: value for name, value in each.items() if name not in names}
        gradients, losses = way({name: each[name] for name in names}, others, images, labels)
        found.append([*gradients, losses, *others.values()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    model.eval()
    torch.testing.assert_close(known.alone(model, images[0]), model(images[0]), rtol=1e-4, atol=1e-5)


def test_of_equal_pixels_the_first_learns() -> None:
    image = torch.ones(1, 1, 2, 2, 1, requires_grad=True)
    (gradient,) = torch.autograd.grad(layered.max_pool2d(image, (2, 2)).sum(), image)
    assert gradient.flatten().tolist() == [1, 0, 0, 0]
    other = torch.ones(1, 1, 2, 2, requires_grad=True)
    assert torch.equal(torch.autograd.grad(F.max_pool2d(other, 2).sum(), other)[0].flatten(), gradient.flatten())


class Filed:
    """Digits as a data set that is read when it is asked for."""

    def __init__(self, whole: InMemory) -> None:
        self._whole = whole
        self.labels, self.classes, self.clients = whole.labels, whole.classes, whole.clients

    def inputs(self, samples: Numbers) -> Tensor:
        assert len(set(np.asarray(samples).tolist())) == len(samples), "read once for each call"
        return self._whole.inputs(samples)


def filed_digits() -> tuple[Filed, Filed]:
    train, test = digits()
    return Filed(train), Filed(test)


def test_samples_that_are_read_when_needed_give_the_same_bits() -> None:
    memory, files = task_of(), task_of(data={"kind": f"{__name__}:filed_digits", "clients": 20})
    for clients, steps in (((3,), (9,)), ((1, 2, 3), (9, 4, 7))):
        pair = [run(ClientTrainer(task), clients, steps) for task in (memory, files)]
        assert all(apart(a, b) == 0 for a, b in zip(*pair, strict=True))
    model = Weights.of(memory.model())
    assert ClientTrainer(memory).run(model, Evaluation(10, 60)) == ClientTrainer(files).run(model, Evaluation(10, 60))
