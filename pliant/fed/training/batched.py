"""Many clients trained at once: their models are rows of stacked tensors, and each step is one computation for all of them.

Two ways to get all clients' gradients: `layered`, for models of layers that it knows, and `torch.func.vmap` for the rest.
Which one a model takes is found by a trial on the CPU, against the model itself, and so is the same in every process.

Clients may do different numbers of steps: those with most are the first rows, and each step is done by as many rows as
still have to do it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pliant.fed.data.partition import Ints
from pliant.fed.data.task import Task
from pliant.fed.training import layered, optim
from pliant.fed.training.feed import Feed, stream
from pliant.fed.updates import Weights
from pliant.fed.work import Training

Gradients = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""Of stacked parameters, buffers (which change), inputs and labels (clients x samples): gradients, and losses of samples."""
RTOL, ATOL = 1e-3, 1e-5
"""Of the trial: what a wrong layer would do to the gradients is far beyond it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all clients of a unit, in its order."""

    changes: list[Weights]
    losses: list[Tensor]
    """Of each client's stream."""


class Together:
    """A model's way to train many clients at once."""

    def __init__(self, task: Task, module: nn.Module, known: layered.Layered | None) -> None:
        """`module` is a model of the task, `known` the same as layers of many; its own parameters are never used."""
        self._task = task
        self._gradients = by_layers(known) if known is not None else by_vmap(module)
        self._names = [name for name, _ in module.named_parameters()]
        self._learning = [name for name, each in module.named_parameters() if each.requires_grad]
        self._buffers = [name for name, _ in module.named_buffers()]

    def train(self, start: Weights, unit: Training, feed: Feed, mu: float) -> Outcome:
        """All clients' parts of a round. Whatever is drawn comes from torch's generators as they are."""
        order = sorted(range(len(unit.clients)), key=lambda i: (-unit.steps[i], i))
        steps = [unit.steps[i] for i in order]
        batches = self._batches(unit, order, feed)
        stacked = {
            name: each.unsqueeze(0).repeat(len(order), *[1] * each.dim())
            for name, each in zip((*self._names, *self._buffers), start.all, strict=True)
        }
        optimizer = optim.make(self._task.config.local, unit.lr)
        anchors = [each for name, each in zip(self._names, start.parameters, strict=True) if name in self._learning]
        seen = []
        for number in range(steps[0]):
            rows = sum(1 for each in steps if each > number)
            now = {name: each[:rows] for name, each in stacked.items()}
            parameters = {name: now[name] for name in self._learning}
            others = {name: each for name, each in now.items() if name not in parameters}
            gradients, losses = self._gradients(parameters, others, *batches(number, rows))
            optim.move(optimizer, list(parameters.values()), gradients, anchors, mu)
            seen.append(losses)
        return self._outcome(start, stacked, seen, steps, order)

    def _batches(self, unit: Training, order: Sequence[int], feed: Feed) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """The batch of a step, for the first rows."""
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
    ) -> Outcome:
        old, new = start.all, list(stacked.values())
        # As one copy for each tensor: a GPU's memory is far away.
        changes = [_difference(b, a).cpu() for a, b in zip(old, new, strict=True)]
        whole = torch.stack(
            [torch.nn.functional.pad(each, (0, 0, 0, len(order) - len(each))) for each in seen], 1
        ).cpu()
        count = len(start.parameters)
        at = {i: row for row, i in enumerate(order)}
        size = whole.shape[-1]
        return Outcome(
            [
                Weights([each[at[i]] for each in changes[:count]], [each[at[i]] for each in changes[count:]])
                for i in range(len(order))
            ],
            [whole[at[i]].reshape(-1)[: steps[at[i]] * size] for i in range(len(order))],
        )


def _difference(new: Tensor, old: Tensor) -> Tensor:
    return new - old if new.is_floating_point() else new.to(torch.int64) - old.to(torch.int64)


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
            # Some operations are done one client after the other; whether that is worth it is measured, see `batching`.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found, (_, losses) = every(parameters, others, inputs, labels)
        return [found[name] for name in parameters], losses.detach()

    return gradients


def as_layers(task: Task, module: nn.Module) -> layered.Layered | None:
    """`module`, a model of this task on any device, as layers of many models; None where these do not know it."""
    trial = _trial(task)
    known = layered.of(trial)
    return layered.of(module) if known is not None and _right(task, trial, by_layers(known)) else None


def together(task: Task, module: nn.Module, known: layered.Layered | None) -> Together | None:
    """How to train many clients of this task at once, given what `as_layers` says; None: only in turn."""
    if known is None:
        trial = _trial(task)
        if not _right(task, trial, by_vmap(trial)):
            return None
    return Together(task, module, known)


def _trial(task: Task) -> nn.Module:
    module = task.model().train()
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0  # what is drawn differs; the rest must not
    return module


def _right(task: Task, module: nn.Module, gradients: Gradients) -> bool:
    """Whether two clients' gradients and buffers are those of the module itself."""
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
        # What a model does that cannot be done for many raises all kinds of errors. In turn, its own ones will be seen.
        return False
    finally:
        torch.set_rng_state(state)
    return True
