"""What an executor does with a unit: train clients in turn or together, or test a part of the samples.

A result depends on the unit, the model and the job's config, and on nothing that ran before: models draw from a generator that
is seeded for the unit, and the CPU computes with one thread, because sums depend on their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pliant.errors import CheckpointError, ConfigError, TrainError
from pliant.fed.choice.selection import LossMeter
from pliant.fed.config import FedConfig
from pliant.fed.data.task import Task, as_task
from pliant.fed.fold import aggregators
from pliant.fed.fold.aggregators import FedProx
from pliant.fed.training import batched, optim
from pliant.fed.training.batched import Together
from pliant.fed.training.feed import Feed, seed_of_draws, stream
from pliant.fed.training.layered import Layered
from pliant.fed.updates import Update, Weights
from pliant.fed.work import Done, Evaluation, Score, Trained, Training, Unit

PART = 250
"""Test samples at a time: what they become on the way stays in the processor's caches."""


class Trainer:
    """One process's model, data and device; does units one after the other."""

    def __init__(self, task: Task, *, device: str = "cpu") -> None:
        self.task = task
        self.device = device_of(device)
        self.mu = proximal_weight(task.config)
        self.module = task.model().to(self.device)
        self.train = Feed(task.train, self.device)
        self._test: Feed | None = None
        self._given: tuple[Weights, Weights] | None = None

    def run(self, model: Weights, unit: Unit) -> Done:
        """The result of the unit, in the CPU's memory.

        Raises:
            TrainError: the unit or the model are of another job.
        """
        with alone(self.device):
            start = self._here(model)
            if isinstance(unit, Evaluation):
                return self._evaluated(start, unit)
            return self._trained(start, unit)

    def _here(self, model: Weights) -> Weights:
        """The model on this device; moved there once for all units of a round."""
        if self.device.type == "cpu":
            return model
        if self._given is None or self._given[0] is not model:
            self._given = model, to(model, self.device)
        return self._given[1]

    def _trained(self, start: Weights, unit: Training) -> tuple[Trained, ...]:
        if not unit.clients or len(unit.clients) != len(unit.steps) or min(unit.steps) < 1:
            raise TrainError(
                f"a unit of clients {unit.clients} with steps {unit.steps}: give one number for each, above 0"
            )
        way = self.together if len(unit.clients) > 1 else None
        if way is None:
            return tuple(self._in_turn(start, c, n, unit) for c, n in zip(unit.clients, unit.steps, strict=True))
        self.module.train()
        seed(self.device, seed_of_draws(self.task, unit.clients, unit.round_number))
        done = way.train(start, unit, self.train, self.mu)
        return tuple(map(self._brought, unit.clients, done.changes, done.losses))

    @cached_property
    def together(self) -> Together | None:
        """How several clients are trained at once; None where the model does not allow it."""
        return batched.together(self.task, self.module, self._layers)

    @cached_property
    def _layers(self) -> Layered | None:
        return batched.as_layers(self.task, self.module)

    def _in_turn(self, start: Weights, client: int, steps: int, unit: Training) -> Trained:
        """One client's part of a round: a plain loop."""
        local, module = self.task.config.local, self.module
        size = local.batch_size
        samples = stream(self.task, client, unit.round_number, steps * size)
        inputs, labels = self.train.inputs(samples), self.train.labels(samples)
        if self.task.malicious[client]:
            labels = self.task.shuffle.to(self.device)[labels]
        start.into(module)
        module.train()
        seed(self.device, seed_of_draws(self.task, (client,), unit.round_number))
        learning = [each for each in module.parameters() if each.requires_grad]
        step = Step(optim.make(local, unit.lr), learning, self._anchors(start), self.mu)
        seen = []
        for at in range(0, steps * size, size):
            losses = self.task.loss(module(inputs[at : at + size]), labels[at : at + size])
            step(torch.autograd.grad(losses.mean(), learning, allow_unused=True))
            seen.append(losses.detach())
        end = Weights([each.detach() for each in module.parameters()], list(module.buffers()))
        return self._brought(client, to(start.change_to(end), torch.device("cpu")), torch.cat(seen))

    def _anchors(self, start: Weights) -> list[Tensor]:
        return [a for a, each in zip(start.parameters, self.module.parameters(), strict=True) if each.requires_grad]

    def _brought(self, client: int, change: Weights, losses: Tensor) -> Trained:
        """`losses` are those of the client's stream; the first pass counts."""
        size = int(self.task.sizes[client])
        meter = LossMeter()
        meter.add(losses[:size].cpu().numpy())
        return Trained(Update(client, change, float(size), meter.mean), meter.utility())

    def _evaluated(self, model: Weights, unit: Evaluation) -> Score:
        if not 0 <= unit.begin <= unit.end <= self.task.num_test:
            raise TrainError(f"test samples {unit.begin} to {unit.end} of {self.task.num_test}: a unit of another job")
        if self._test is None:
            self._test = Feed(self.task.test, self.device)
        model.into(self.module)
        self.module.eval()
        known = self._layers if self.device.type == "cpu" else None
        score = Score(0, 0, 0, 0.0)
        with torch.no_grad():
            for begin in range(unit.begin, unit.end, PART):
                inputs, labels = self._test.part(begin, min(begin + PART, unit.end))
                score += scored(self.module(inputs) if known is None else known.alone(self.module, inputs), labels)
        return score


class Step:
    """Moves those parameters that the loss depends on; others are left as they are, as torch's optimizers do."""

    def __init__(
        self, optimizer: optim.Optimizer, parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float
    ) -> None:
        self._optimizer, self._mu = optimizer, mu
        self._all = [each.detach() for each in parameters], list(anchors)
        self._used: list[bool] | None = None

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        used = [each is not None for each in gradients]
        if self._used is None:
            self._used = used
            self._parameters, self._anchors = (list(itertools.compress(each, used)) for each in self._all)
        elif used != self._used:
            raise TrainError("the model's loss depends on other parameters in each step: let it use all in every step")
        along = [each for each in gradients if each is not None]
        optim.move(self._optimizer, self._parameters, along, self._anchors, self._mu)


def scored(outputs: Tensor, labels: Tensor) -> Score:
    """Of texts each character counts as a sample."""
    flat, right = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1, 1)
    best = flat.topk(min(5, flat.shape[-1]), dim=-1).indices == right
    losses = nn.functional.cross_entropy(flat, right.squeeze(1), reduction="none")
    return Score(len(right), int(best[:, 0].sum()), int(best.sum()), float(losses.double().sum()))


def proximal_weight(config: FedConfig) -> float:
    """FedProx' mu; 0 for all other aggregators."""
    if config.aggregator.kind != FedProx.name:
        return 0.0
    made = aggregators.make(FedProx.name, dict(config.aggregator.options))  # type: ignore[arg-type]
    return made.mu if isinstance(made, FedProx) else 0.0


def device_of(name: str) -> torch.device:
    """The device of that name; empty: a GPU where there is one.

    Raises:
        ConfigError: it is not there.
    """
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: no GPU is there; use cpu")
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def to(weights: Weights, device: torch.device) -> Weights:
    return Weights([each.to(device) for each in weights.parameters], [each.to(device) for each in weights.buffers])


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def seed(device: torch.device, number: int) -> None:
    """For all that is drawn from now on, within `alone`."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        _generator(device).manual_seed(number)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """One thread, kernels that give the same bits each time, and the caller's random state as it was afterwards."""
    threads, generators = torch.get_num_threads(), {torch.default_generator, _generator(device)}
    states = [(each, each.get_state()) for each in generators]
    torch.set_num_threads(1)
    try:
        with exact_kernels() if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def exact_kernels() -> Iterator[None]:
    """On GPUs: no TF32, or training at once and in turn would differ by more than rounding; and no kernels by trial."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    wanted: list[tuple[Any, str, object]] = [
        # The older switches, too: torch refuses to answer where the two contradict each other. They reset the newer ones.
        *((part, "allow_tf32", False) for part in (cuda, cudnn)),
        *((part, "fp32_precision", "ieee") for part in (cuda, cudnn.conv, cudnn.rnn)),  # type: ignore[attr-defined]
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
    ]
    before = [(part, name, getattr(part, name)) for part, name, _ in wanted]
    try:
        for part, name, value in wanted:
            setattr(part, name, value)
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def kind_of(device: torch.device) -> str:
    """What must be alike wherever a job is computed, or bits differ."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} with torch {torch.__version__.partition('+')[0]}"


class InProcess:
    """`Workers` in this process: the twin of a pool of executors."""

    def __init__(self, task: Task | FedConfig, device: str = "cpu") -> None:
        self._trainer = Trainer(as_task(task), device=device)

    @property
    def kind(self) -> str:
        return kind_of(self._trainer.device)

    def expect_kind(self, kind: str) -> None:
        if kind != self.kind:
            raise CheckpointError(
                f"the job was begun on {kind:.80}, and this process computes on {self.kind}, so bits would differ: "
                "go on with what it was begun on, or begin anew in another folder"
            )

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[Done]:
        """The result of each unit, in their order, as it is asked for."""
        for unit in units:
            yield self._trainer.run(model, unit)
