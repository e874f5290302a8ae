"""Local training steps: which samples a client trains on, its optimizer, and the training of many clients as one computation.

A client's stream is its samples again and again, each time in a new order. Every batch is thus full, and the first pass is
the beginning of the stream. It follows from the job's seed, the client and the round.

The models of many clients are rows of stacked tensors, and each step is one computation for all of them. There are two ways
to get the gradients: `layered` for models of known layers, and `torch.func.vmap` for the rest. A trial on the CPU against the
model itself finds which one a model takes, so it is the same in every process. Clients may do different numbers of steps:
those with most are the first rows, and each step is done by as many rows as still have to do it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pliant.errors import TrainError
from pliant.fed import layered
from pliant.fed.aggregation import proximal_
from pliant.fed.config import LocalConfig
from pliant.fed.data.partition import Ints
from pliant.fed.data.task import InMemory, Samples, Task
from pliant.fed.work import Training, Weights, difference

STREAM, DRAWS = 3, 4
"""Purposes of random draws; see `data.build.LIARS`."""


def stream(task: Task, client: int, round_number: int, count: int) -> Ints:
    """Return the first `count` samples that the client trains on in this round."""
    if not 0 <= client < task.num_clients:
        raise TrainError(f"client {client} of {task.num_clients}: the unit is of another job")
    own = task.partition.of(client)
    chance = np.random.default_rng((task.config.seed, STREAM, client, round_number))
    passes = [chance.permutation(own) for _ in range(-(-count // len(own)))]
    return np.concatenate(passes)[:count] if len(passes) != 1 else passes[0][:count]


def seed_of_draws(task: Task, clients: Sequence[int], round_number: int) -> int:
    """Return the seed for what models draw (such as dropout) while these clients train together."""
    words = np.random.SeedSequence((task.config.seed, DRAWS, round_number, *clients)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


class Feed:
    """Samples on a device. Data sets in memory are copied there as a whole; others are read at each call."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self._samples, self.device = samples, device
        self._data = samples.data.to(device) if isinstance(samples, InMemory) else None
        self._labels = samples.labels.to(device)

    def inputs(self, samples: Ints) -> Tensor:
        """Return inputs with the shape of `samples`, followed by that of one input."""
        if self._data is not None:
            flat = self._data.index_select(0, self._moved(samples))
        else:
            once, places = np.unique(samples, return_inverse=True)
            read = self._samples.inputs(once).to(self.device)
            flat = read.index_select(0, self._moved(places))
        return flat.reshape(*samples.shape, *flat.shape[1:])

    def labels(self, samples: Ints) -> Tensor:
        flat = self._labels.index_select(0, self._moved(samples))
        return flat.reshape(*samples.shape, *flat.shape[1:])

    def many(self, samples: Ints) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
        """Return a function that gives inputs and labels of the first rows of `samples` (clients x streams), from one position to another.

        All indices are copied to the device now, so that no step waits for the host.
        """
        data, places = self._data, samples
        if data is None:
            once, places = np.unique(samples, return_inverse=True)
            data = self._samples.inputs(once).to(self.device)
        known, at, labelled = data, self._moved(places).view(samples.shape), self._moved(samples).view(samples.shape)

        def drawn(rows: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
            shape = rows, end - begin
            inputs = known.index_select(0, at[:rows, begin:end].reshape(-1))
            labels = self._labels.index_select(0, labelled[:rows, begin:end].reshape(-1))
            return inputs.view(*shape, *inputs.shape[1:]), labels.view(*shape, *labels.shape[1:])

        return drawn

    def part(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of successive samples."""
        if self._data is not None:
            return self._data[begin:end], self._labels[begin:end]
        return self._samples.inputs(np.arange(begin, end)).to(self.device), self._labels[begin:end]

    def _moved(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64).reshape(-1)).to(self.device)


class LocalOptimizer(Protocol):
    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change the parameters in place. Both lists hold the same tensors each time, or fewer of their first rows."""
        ...


class SGD:
    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._buffers: list[Tensor] = []

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if self._weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self._weight_decay))
        if self._momentum:
            if not self._buffers:
                self._buffers = [each.clone() for each in gradients]
                gradients = self._buffers
            else:
                gradients = self._gathered(gradients)
        torch._foreach_add_(parameters, gradients, alpha=-self._lr)

    def _gathered(self, gradients: list[Tensor]) -> list[Tensor]:
        buffers = rows(self._buffers, gradients)
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, gradients)
        return buffers


class AdamW:
    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, lr: float, weight_decay: float) -> None:
        self._lr, self._weight_decay = lr, weight_decay
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []
        self._count = 0

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._first:
            self._first = [torch.zeros_like(each) for each in gradients]
            self._second = [torch.zeros_like(each) for each in gradients]
        self._count += 1
        first, second = rows(self._first, gradients), rows(self._second, gradients)
        torch._foreach_mul_(parameters, 1 - self._lr * self._weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - self.BETAS[0])
        torch._foreach_mul_(second, self.BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - self.BETAS[1])
        step_size = self._lr / (1 - self.BETAS[0] ** self._count)
        scale = math.sqrt(1 - self.BETAS[1] ** self._count)
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, scale)
        torch._foreach_add_(below, self.EPSILON)
        torch._foreach_addcdiv_(parameters, first, below, -step_size)


def rows(kept: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Return the first rows of each tensor, as many as `like` has."""
    if kept and kept[0].shape == like[0].shape:
        return list(kept)
    return [each[: len(other)] for each, other in zip(kept, like, strict=True)]


def move_parameters(
    optimizer: LocalOptimizer, parameters: list[Tensor], gradients: list[Tensor], anchors: list[Tensor], mu: float
) -> None:
    """Take a step, after adding FedProx' part to the gradients if `mu` is not 0."""
    with torch.no_grad():
        if mu:
            proximal_(gradients, parameters, anchors, mu)
        optimizer.step(parameters, gradients)


def make_optimizer(config: LocalConfig, lr: float) -> LocalOptimizer:
    """Create an optimizer without state, as each client has in each round."""
    if config.optimizer == "adamw":
        return AdamW(lr, config.weight_decay)
    return SGD(lr, config.momentum, config.weight_decay)


Gradients = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""A function of stacked parameters, buffers (which change), inputs and labels (clients x samples) that returns gradients and the
losses of the samples.
"""
RTOL, ATOL = 1e-3, 1e-5
"""Tolerances of the trial; the error of a wrong layer is far greater."""


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The results of all clients of a unit, in its order."""

    changes: list[Weights]
    losses: list[Tensor]
    """Losses of each client's stream."""


class BatchedTrainer:
    """Trains many clients of one model as one computation."""

    def __init__(self, task: Task, module: nn.Module, known: layered.Layered | None) -> None:
        """`module` is a model of the task, `known` its traced layers, if any; its own parameters are not used."""
        self._task = task
        self._gradients = by_layers(known) if known is not None else by_vmap(module)
        self._names = [name for name, _ in module.named_parameters()]
        self._learning = [name for name, each in module.named_parameters() if each.requires_grad]
        self._buffers = [name for name, _ in module.named_buffers()]

    def train(self, start: Weights, unit: Training, feed: Feed, mu: float) -> BatchOutcome:
        """Train all clients of a unit. Random numbers come from torch's generators as they are."""
        order = sorted(range(len(unit.clients)), key=lambda i: (-unit.steps[i], i))
        steps = [unit.steps[i] for i in order]
        batches = self._batches(unit, order, feed)
        stacked = {
            name: each.unsqueeze(0).repeat(len(order), *[1] * each.dim())
            for name, each in zip((*self._names, *self._buffers), start.all, strict=True)
        }
        optimizer = make_optimizer(self._task.config.local, unit.lr)
        anchors = [each for name, each in zip(self._names, start.parameters, strict=True) if name in self._learning]
        seen = []
        for number in range(steps[0]):
            rows = sum(1 for each in steps if each > number)
            now = {name: each[:rows] for name, each in stacked.items()}
            parameters = {name: now[name] for name in self._learning}
            others = {name: each for name, each in now.items() if name not in parameters}
            gradients, losses = self._gradients(parameters, others, *batches(number, rows))
            move_parameters(optimizer, list(parameters.values()), gradients, anchors, mu)
            seen.append(losses)
        return self._outcome(start, stacked, seen, steps, order)

    def _batches(self, unit: Training, order: Sequence[int], feed: Feed) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """Return a function that gives the batch of a step for the first rows."""
        size = self._task.config.local.batch_size
        samples: Ints = np.zeros((len(order), unit.steps[order[0]] * size), np.int64)
        for row, i in enumerate(order):
            count = unit.steps[i] * size
            samples[row, :count] = stream(self._task, unit.clients[i], unit.round_number, count)
        draw = feed.many(samples)
        liars = self._task.malicious[[unit.clients[i] for i in order]]
        shuffle = self._task.shuffle.to(feed.device) if liars.any() else None
        lying = torch.from_numpy(liars).to(feed.device)

        def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
            inputs, labels = draw(rows, number * size, (number + 1) * size)
            if shuffle is not None:
                wrong = lying[:rows].view(rows, *[1] * (labels.dim() - 1))
                labels = torch.where(wrong, shuffle[labels], labels)
            return inputs, labels

        return batch

    def _outcome(
        self, start: Weights, stacked: dict[str, Tensor], seen: list[Tensor], steps: list[int], order: Sequence[int]
    ) -> BatchOutcome:
        old, new = start.all, list(stacked.values())
        # One copy per tensor: transfers from a GPU are slow.
        changes = [difference(b, a).cpu() for a, b in zip(old, new, strict=True)]
        whole = torch.stack(
            [torch.nn.functional.pad(each, (0, 0, 0, len(order) - len(each))) for each in seen], 1
        ).cpu()
        count = len(start.parameters)
        at = {i: row for row, i in enumerate(order)}
        size = whole.shape[-1]
        return BatchOutcome(
            [
                Weights([each[at[i]] for each in changes[:count]], [each[at[i]] for each in changes[count:]])
                for i in range(len(order))
            ],
            [whole[at[i]].reshape(-1)[: steps[at[i]] * size] for i in range(len(order))],
        )


def by_layers(model: layered.Layered) -> Gradients:
    def gradients(
        parameters: dict[str, Tensor], others: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        leaves = {name: each.detach().requires_grad_() for name, each in parameters.items()}
        outputs = model({**leaves, **others}, inputs.movedim(1, -1).contiguous())
        losses = Task.loss(outputs.transpose(1, 2).flatten(0, 1), labels.flatten(0, 1)).view(labels.shape[:2])
        found = torch.autograd.grad(losses.mean(1).sum(), list(leaves.values()))
        return list(found), losses.detach()

    return gradients


def by_vmap(module: nn.Module) -> Gradients:
    def loss(
        parameters: dict[str, Tensor], others: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = Task.loss(functional_call(module, (parameters, others), (inputs,)), labels)
        return losses.mean(), losses

    every = vmap(grad_and_value(loss, has_aux=True), randomness="different")

    def gradients(
        parameters: dict[str, Tensor], others: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        with warnings.catch_warnings():
            # Some operations are done one client after the other; whether that is worth it is measured (`choose_batching`).
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found, (_, losses) = every(parameters, others, inputs, labels)
        return [found[name] for name in parameters], losses.detach()

    return gradients


def traced_layers(task: Task, module: nn.Module) -> layered.Layered | None:
    """Trace a model of this task on any device; None if its layers are not supported, or give other gradients."""
    trial = _trial(task)
    known = layered.trace_layers(trial)
    return (
        layered.trace_layers(module)
        if known is not None and _gives_module_gradients(task, trial, by_layers(known))
        else None
    )


def batched_trainer_for(task: Task, module: nn.Module, known: layered.Layered | None) -> BatchedTrainer | None:
    """Return how to train many clients of this task at once, given `traced_layers`; None if only in turn."""
    if known is None:
        trial = _trial(task)
        if not _gives_module_gradients(task, trial, by_vmap(trial)):
            return None
    return BatchedTrainer(task, module, known)


def _trial(task: Task) -> nn.Module:
    module = task.model().train()
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0  # random draws differ; nothing else may
    return module


def _gives_module_gradients(task: Task, module: nn.Module, gradients: Gradients) -> bool:
    """Return whether the gradients and buffers of two clients are those of the module itself."""
    size = min(4, len(task.train.labels) // 2)
    samples = np.arange(2 * size)
    inputs = task.train.inputs(samples)
    labels = task.train.labels[: 2 * size]
    inputs, labels = (each.reshape(2, size, *each.shape[1:]) for each in (inputs, labels))
    learning = [name for name, each in module.named_parameters() if each.requires_grad]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    stacked = {name: each.detach().unsqueeze(0).repeat(2, *[1] * each.dim()) for name, each in tensors.items()}
    parameters = {name: stacked[name] for name in learning}
    others = {name: each for name, each in stacked.items() if name not in parameters}
    state = torch.get_rng_state()
    try:
        found, losses = gradients(parameters, others, inputs, labels)
        for row in range(2):
            alone = copy.deepcopy(module)
            expected = Task.loss(alone(inputs[row]), labels[row])
            own = [each for each in alone.parameters() if each.requires_grad]
            theirs = torch.autograd.grad(expected.mean(), own)
            pairs = [(losses[row], expected.detach())]
            pairs += zip([each[row] for each in found], theirs, strict=True)
            pairs += [(others[name][row], each) for name, each in alone.named_buffers()]
            if not all(torch.allclose(a.double(), b.double(), rtol=RTOL, atol=ATOL) for a, b in pairs):
                return False
    except Exception:
        # A model that cannot be batched may raise anything. If it is trained in turn, its own errors will show.
        return False
    finally:
        torch.set_rng_state(state)
    return True
