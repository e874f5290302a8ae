"""Trains and evaluates clients in this process: one model, one data set, one device. `choose_batching` measures how many at once.

The grouping of clients changes the last bits of their results, so it must not change while a job runs. Which grouping is
fast depends on model and machine: a GPU wants hundreds of small clients, a CPU as many as its caches hold, and a model that
keeps its device busy by itself wants one.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pliant.errors import CheckpointError, ConfigError, TrainError
from pliant.fed.aggregation import FedProx, make_aggregator
from pliant.fed.config import FedConfig
from pliant.fed.data.task import Task
from pliant.fed.history import WorkFigures
from pliant.fed.layered import Layered
from pliant.fed.local_steps import (
    BatchedTrainer,
    Feed,
    batched_trainer_for,
    make_optimizer,
    move_parameters,
    seed_of_draws,
    stream,
    traced_layers,
)
from pliant.fed.selection.base import mean_of, statistical_utility
from pliant.fed.work import Evaluation, Score, Trained, Training, Unit, UnitResult, Update, Weights
from pliant.train.gpu_meter import GpuMeter

PART = 250
"""Test samples that are evaluated at a time, so that intermediate results stay in the CPU's caches."""


class ClientTrainer:
    """The model, data and device of one process; does units one after the other."""

    def __init__(self, task: Task, *, device: str = "cpu") -> None:
        self.task = task
        self.device = resolve_device(device)
        self.mu = proximal_weight(task.config)
        self.module = task.model().to(self.device)
        self.train = Feed(task.train, self.device)
        self._test: Feed | None = None
        self._given: tuple[Weights, Weights] | None = None

    def run(self, model: Weights, unit: Unit) -> UnitResult:
        """Return the result of a unit, in CPU memory.

        Raises TrainError if the unit or the model belong to another job.
        """
        with alone(self.device):
            start = self._on_device(model)
            if isinstance(unit, Evaluation):
                return self._evaluate(start, unit)
            return self._train(start, unit)

    def _on_device(self, model: Weights) -> Weights:
        """Return the model on this device; it is copied once for all units of a round."""
        if self.device.type == "cpu":
            return model
        if self._given is None or self._given[0] is not model:
            self._given = model, model.map(lambda each: each.to(self.device))
        return self._given[1]

    def _train(self, start: Weights, unit: Training) -> tuple[Trained, ...]:
        if not unit.clients or len(unit.clients) != len(unit.steps) or min(unit.steps) < 1:
            raise TrainError(f"clients {unit.clients} with steps {unit.steps}: give one number for each, above 0")
        way = self.together if len(unit.clients) > 1 else None
        if way is None:
            return tuple(self._in_turn(start, c, n, unit) for c, n in zip(unit.clients, unit.steps, strict=True))
        self.module.train()
        seed(self.device, seed_of_draws(self.task, unit.clients, unit.round_number))
        done = way.train(start, unit, self.train, self.mu)
        return tuple(map(self._make_result, unit.clients, done.changes, done.losses))

    @cached_property
    def together(self) -> BatchedTrainer | None:
        """How several clients are trained at once; None if the model does not allow it."""
        return batched_trainer_for(self.task, self.module, self._layers)

    @cached_property
    def _layers(self) -> Layered | None:
        return traced_layers(self.task, self.module)

    def _in_turn(self, start: Weights, client: int, steps: int, unit: Training) -> Trained:
        """Train one client with a plain loop."""
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
        anchors = [a for a, each in zip(start.parameters, module.parameters(), strict=True) if each.requires_grad]
        optimizer = make_optimizer(local, unit.lr)
        moved: list[Tensor] = []
        near: list[Tensor] = []
        seen, used = [], None
        for at in range(0, steps * size, size):
            losses = self.task.loss(module(inputs[at : at + size]), labels[at : at + size])
            gradients = torch.autograd.grad(losses.mean(), learning, allow_unused=True)
            now = [each is not None for each in gradients]
            if used is None:
                # Parameters that the loss does not depend on stay as they are, as with torch's optimizers.
                used, near = now, list(itertools.compress(anchors, now))
                moved = [each.detach() for each in itertools.compress(learning, now)]
            elif now != used:
                raise TrainError("the loss depends on other parameters in each step: use all in every step")
            move_parameters(optimizer, moved, [each for each in gradients if each is not None], near, self.mu)
            seen.append(losses.detach())
        end = Weights([each.detach() for each in module.parameters()], list(module.buffers()))
        return self._make_result(client, start.change_to(end).map(Tensor.cpu), torch.cat(seen))

    def _make_result(self, client: int, change: Weights, losses: Tensor) -> Trained:
        """Make the result of a client; `losses` are those of its stream, of which the first pass counts."""
        size = int(self.task.sizes[client])
        seen = losses[:size].cpu().numpy()
        return Trained(Update(client, change, float(size), mean_of(seen)), statistical_utility(seen))

    def _evaluate(self, model: Weights, unit: Evaluation) -> Score:
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
                score += score_outputs(
                    self.module(inputs) if known is None else known.alone(self.module, inputs), labels
                )
        return score


def score_outputs(outputs: Tensor, labels: Tensor) -> Score:
    """Score outputs; for texts each character counts as a sample."""
    flat, right = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1, 1)
    best = flat.topk(min(5, flat.shape[-1]), dim=-1).indices == right
    losses = nn.functional.cross_entropy(flat, right.squeeze(1), reduction="none")
    return Score(len(right), int(best[:, 0].sum()), int(best.sum()), float(losses.double().sum()))


def proximal_weight(config: FedConfig) -> float:
    """Return FedProx' mu; 0 for all other aggregators."""
    if config.aggregator.kind != FedProx.name:
        return 0.0
    made = make_aggregator(FedProx.name, dict(config.aggregator.options))  # type: ignore[arg-type]
    return made.mu if isinstance(made, FedProx) else 0.0


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; empty: a GPU if there is one."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: no GPU is there; use cpu")
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def seed(device: torch.device, number: int) -> None:
    """Seed the generators for what is drawn within `alone`."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        _generator(device).manual_seed(number)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Use one thread and deterministic kernels within the block, and restore the caller's random state after it."""
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
    """On GPUs, use no TF32 (batched and single training would differ by more than rounding) and no autotuned kernels."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    wanted: list[tuple[Any, str, object]] = [
        # The older switches, too: torch raises if both contradict each other. They reset the newer ones.
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


def describe_device(device: torch.device) -> str:
    """Return the kind of device and the torch version, which must be equal wherever a job is computed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} with torch {torch.__version__.partition('+')[0]}"


class InProcess:
    """`Workers` in this process."""

    def __init__(self, task: Task, device: str = "cpu") -> None:
        self._trainer = ClientTrainer(task, device=device)
        self._gpu = GpuMeter(self._trainer.device)

    def take_figures(self) -> WorkFigures:
        """Return what the GPU of this process did."""
        held, use = self._gpu.read(time.monotonic())
        return WorkFigures(gpu_bytes=held, gpu_use=use)

    @property
    def kind(self) -> str:
        return describe_device(self._trainer.device)

    def expect_kind(self, kind: str) -> None:
        if kind != self.kind:
            raise CheckpointError(
                f"the job was begun on {kind:.80}, and this process computes on {self.kind}, so bits would differ: "
                "go on with what it was begun on, or begin anew in another folder"
            )

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """Yield the result of each unit, in their order, computed when it is asked for."""
        for unit in units:
            yield self._trainer.run(model, unit)


ON_CPU = (2, 4, 8, 16)
ON_GPU = (4, 16, 32, 64, 128, 256)
SHARES = (2, 8)
"""A round makes units for at least and at most this many workers; in between, for as many as this machine has cores."""
STEPS = 5
"""Steps of a trial: enough that the fixed cost of a unit matters little."""
BUSY_S = 0.5
"""If the first step takes longer, it keeps the machine busy by itself, and a trial would gain nothing."""
WORTH = 1.1
"""Batched training must be this many times as fast as training in turn, or it is not worth its different bits."""
ALIKE = 0.95
"""A smaller batch with this share of the best rate is taken: smaller units are shared better among workers."""


def choose_batching(task: Task, device: str = "cpu", *, limit_s: float = 4.0) -> int:
    """Measure how many clients to train at once; 1 if that is impossible, or not faster than in turn.

    Takes about `limit_s`, or a few steps of one client if those take longer.
    """
    trainer = ClientTrainer(task, device=device)
    # On the CPU, measure the time of this thread: other processes may be busy.
    clock = time.perf_counter if trainer.device.type == "cuda" else time.thread_time
    start = Weights.of(task.model())
    shares = min(max(len(os.sched_getaffinity(0)), SHARES[0]), SHARES[1])
    sizes = candidates(task.num_clients, task.config.participants, trainer.device.type, shares)
    began = clock()
    trainer.run(start, _unit(task, 1, 1))
    if not sizes or clock() - began > BUSY_S or trainer.together is None:
        return 1
    rates: dict[int, float] = {}
    for size in (1, *sizes, 1, *sizes):
        # Two passes, the better one of each: disturbances then hit all sizes alike.
        if len(rates) > 1 and clock() - began > limit_s:
            break
        try:
            rates[size] = max(rates.get(size, 0.0), _rate(trainer, start, size, clock))
        except torch.OutOfMemoryError:
            break
    return best(rates)


def best(rates: Mapping[int, float]) -> int:
    """Return the smallest batch that is nearly as fast as the fastest, if that is worth it; `rates` are clients per second."""
    fastest = max(rates.values())
    if fastest < WORTH * rates[1]:
        return 1
    return min(size for size, rate in rates.items() if size > 1 and rate >= ALIKE * fastest)


def candidates(num_clients: int, participants: int, device_type: str, shares: int) -> tuple[int, ...]:
    """Return batch sizes to try. On CPUs, a round is cut into a multiple of `shares` units, so that as many workers end together."""
    if device_type == "cuda":
        return tuple(size for size in ON_GPU if size <= min(num_clients, participants))
    sizes = set()
    for size in ON_CPU:
        units = max(1, round(participants / size / shares)) * shares
        sizes.add(-(-participants // units))
    return tuple(sorted(size for size in sizes if 1 < size <= num_clients))


def _rate(trainer: ClientTrainer, start: Weights, size: int, clock: Callable[[], float]) -> float:
    """Return clients per second, if all did as many steps as the trial."""
    trainer.run(start, _unit(trainer.task, size, 1))  # the first run of a size takes longer
    began = clock()
    trainer.run(start, _unit(trainer.task, size, STEPS))
    return size / max(clock() - began, 1e-9)


def _unit(task: Task, size: int, steps: int) -> Training:
    return Training(0, tuple(range(size)), (steps,) * size, task.config.local.lr)
