"""What a number of workers and a batch size are worth: throughput x statistical efficiency, as AdaptDL (Pollux) has it.

A step computes its gradients (T_grad, linear in the batch of a replica) and sums them (T_sync, linear in the number of
workers), and part of one hides behind the other: T = (T_grad^g + T_sync^g)^(1/g), from one after the other (g = 1) to
perfect overlap (g large). Five parameters, fitted to the steps of a running job. Larger batches need fewer steps, but not
as many fewer as they are larger: the gain of a batch s times as large follows from the noise of the gradient, and gain/s
is how much each sample is still worth. Pure; every worker that fits the same steps finds the same bits.

Qiao et al. 2021, "Pollux", sections 3.1 and 3.2; Johnson et al. 2020, "AdaScale SGD", for the gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.adapt.fitting import Vector, damped
from pliant.errors import ConfigError

MAX_OVERLAP = 10.0
"""Of the exponent g. Beyond this, nothing is left that could overlap better."""
_OVERLAP_PRICE = 0.01
"""Weak wish for g = 1, which decides where the steps tell nothing about g."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the next steps."""

    workers: int
    batch: int
    """Samples of one replica's turn."""
    replicas: int | None = None
    """N, where it is fixed; None: one per worker."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.batch < 1 or (self.replicas is not None and self.replicas < self.workers):
            raise ConfigError(f"{self}: use 1 worker and 1 sample or more, and no more workers than replicas")

    @property
    def turns(self) -> int:
        """Replicas of the worker that has the most, one after the other."""
        return math.ceil(self.total_replicas / self.workers)

    @property
    def total_replicas(self) -> int:
        return self.workers if self.replicas is None else self.replicas

    @property
    def total_batch(self) -> int:
        """Samples of a step, all replicas together."""
        return self.batch * self.total_replicas


@dataclass(frozen=True, slots=True)
class StepTime:
    """One observation: how long a step took."""

    choice: Choice
    step_s: float

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and math.isfinite(self.step_s)):
            raise ConfigError(f"a step of {self.step_s} s: use a time above 0")


@dataclass(frozen=True, slots=True)
class StepModel:
    """How long a step takes, whatever the choice."""

    grad_fixed_s: float
    """a_c: of one replica's turn, whatever its batch."""
    grad_per_sample_s: float
    """b_c."""
    sync_fixed_s: float
    """a_n: of summing over two workers."""
    sync_per_worker_s: float
    """b_n: of each worker beyond two."""
    overlap: float = 1.0
    """g."""

    def grad_s(self, batch: int) -> float:
        """One replica's turn, with nothing to wait for."""
        return self.grad_fixed_s + self.grad_per_sample_s * batch

    def sync_s(self, workers: int) -> float:
        """The sum over the workers, with nothing beside it."""
        return self.sync_fixed_s + self.sync_per_worker_s * (workers - 2) if workers > 1 else 0.0

    def step_s(self, choice: Choice) -> float:
        """Only the last of a worker's turns can overlap with the sum."""
        grad_s = self.grad_s(choice.batch)
        return (choice.turns - 1) * grad_s + _joined(grad_s, self.sync_s(choice.workers), self.overlap)

    def throughput(self, choice: Choice) -> float:
        """Samples per second."""
        return choice.total_batch / self.step_s(choice)


def _joined(one_s: float, other_s: float, overlap: float) -> float:
    """(a^g + b^g)^(1/g), without overflow."""
    longer_s, shorter_s = max(one_s, other_s), min(one_s, other_s)
    if longer_s <= 0:
        return 0.0
    return float(longer_s * (1 + (shorter_s / longer_s) ** overlap) ** (1 / overlap))


@dataclass(frozen=True, slots=True)
class Noise:
    """What the gradients of batches of `base_batch` samples are made of."""

    var: float
    """The expected squared distance of such a gradient from the true one."""
    sqr: float
    """The squared length of the true one."""
    base_batch: float

    def __post_init__(self) -> None:
        if not (self.var >= 0 and self.sqr >= 0 and self.var + self.sqr > 0 and self.base_batch > 0):
            raise ConfigError(f"{self}: use values that are not negative, not both 0, and a batch above 0")

    @classmethod
    def of_scale(cls, noise_scale: float, base_batch: float) -> Noise:
        """From the gradient noise scale tr(Sigma)/|G|^2; one below 0, an estimator's accident, counts as 0.

        Raises:
            ConfigError: not a number, or a batch of nothing.
        """
        if math.isnan(noise_scale) or not base_batch > 0:
            raise ConfigError(f"a noise scale of {noise_scale} for a batch of {base_batch}: wait for a first estimate")
        if math.isinf(noise_scale):
            return cls(1.0, 0.0, base_batch)
        return cls(max(0.0, noise_scale) / base_batch, 1.0, base_batch)

    def gain(self, total_batch: float) -> float:
        """How many steps with the base batch one step with this batch is worth: AdaScale's gain."""
        return gain(total_batch / self.base_batch, self.var, self.sqr)

    def efficiency(self, total_batch: float) -> float:
        """How much a sample of this batch is worth, against one of the base batch."""
        return self.gain(total_batch) * self.base_batch / total_batch


def gain(scale: float, var: float, sqr: float) -> float:
    """(var + sqr) / (var/s + sqr), between 1 and s for s >= 1; `var` and `sqr` are those of the batch with s = 1.

    Raises:
        ConfigError: a scale that is not above 0, or a gradient that is nothing.
    """
    if not scale > 0 or var < 0 or sqr < 0 or var + sqr <= 0:
        raise ConfigError(f"gain(scale={scale}, var={var}, sqr={sqr}): use a scale above 0 and a gradient above 0")
    return (var + sqr) / (var / scale + sqr)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Both halves together."""

    steps: StepModel
    noise: Noise

    def value(self, choice: Choice) -> float:
        """Samples per second, counted as what they are worth."""
        return self.steps.throughput(choice) * self.noise.efficiency(choice.total_batch)

    def best(self, choices: Iterable[Choice]) -> Choice:
        """The choice of most goodput; of equals the one with fewer workers, then with the smaller batch.

        Raises:
            ConfigError: no choice.
        """
        listed = sorted(choices, key=lambda each: (each.workers, each.batch, each.total_replicas))
        if not listed:
            raise ConfigError("best of no choice: give at least one")
        return max(listed, key=self.value)


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and how well it says what was seen."""

    model: StepModel
    residuals: tuple[float, ...]
    """Of each observation: predicted over observed, minus 1."""
    num_parameters: int
    """How many of the five the observations could tell; the others were assumed."""

    @property
    def worst(self) -> float:
        """The largest residual, without its sign."""
        return max(map(abs, self.residuals))


def fit(observations: Sequence[StepTime]) -> Fit:
    """The model of least relative errors, with all times at least 0 and 1 <= g <= 10.

    What the observations cannot tell is assumed. With one batch size only, half of a turn is taken to be fixed: neither
    free samples nor none. With one worker only, sums are free, so that a policy would try more; with two sizes at most, of
    which one is 1, a sum lasts equally long on all larger ones.

    Raises:
        ConfigError: no observation.
    """
    if not observations:
        raise ConfigError("a fit to no step: give at least one")
    unit_s = max(each.step_s for each in observations)
    biggest = max(each.choice.batch for each in observations)
    seen = np.array([each.step_s for each in observations]) / unit_s
    batches = {each.choice.batch for each in observations}
    sizes = {each.choice.workers for each in observations}
    shared = {size for size in sizes if size > 1}
    told = np.array([len(batches) > 1, True, bool(shared), len(shared) > 1, bool(shared) and len(observations) > 3])

    def model_of(values: Vector) -> StepModel:
        fixed, per_batch, sync, per_worker, overlap = (float(value) for value in values)
        if not told[0]:
            fixed = per_batch  # half of a turn each
        scale_s = unit_s / biggest
        return StepModel(fixed * unit_s, per_batch * scale_s, sync * unit_s, per_worker * unit_s, overlap)

    def errors(values: Vector) -> Vector:
        model = model_of(values)
        predicted = np.array([model.step_s(each.choice) for each in observations]) / unit_s
        apart = np.log(np.maximum(predicted, 1e-9) / seen)
        return np.append(apart, _OVERLAP_PRICE * math.sqrt(len(seen)) * (values[4] - 1) / MAX_OVERLAP)

    lower = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    upper = np.where(told, [2.0, 2.0, 4.0, 4.0, MAX_OVERLAP], lower)
    trials = [
        damped(errors, [0.2, 0.5, 0.3, 0.05, overlap], lower.tolist(), upper.tolist()) for overlap in _starts(told)
    ]
    model = model_of(min(trials, key=lambda trial: trial[1])[0])
    residuals = tuple(model.step_s(each.choice) / each.step_s - 1 for each in observations)
    return Fit(model, residuals, int(told.sum()))


def _starts(told: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[float, ...]:
    """The valley of g has more than one end."""
    return (1.0, 2.0, 6.0) if told[4] else (1.0,)
