"""Model of goodput: throughput x statistical efficiency of a number of workers and a batch size, as in AdaptDL (Pollux).

A step computes its gradients (T_grad, linear in the batch of a replica) and sums them (T_sync, linear in the number of
workers). The two overlap in part: T = (T_grad^g + T_sync^g)^(1/g), from no overlap (g = 1) to perfect overlap (g large).
The five parameters are fitted to the steps of a running job.

A batch that is s times as large does not replace s steps. How many steps it replaces (its gain) follows from the noise
of the gradient; gain/s is what each sample is still worth. Pure: every worker that fits the same steps finds the same
bits.

Qiao et al. 2021, "Pollux", sections 3.1 and 3.2; Johnson et al. 2020, "AdaScale SGD", for the gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.adapt.monitors import gain

Vector = NDArray[np.float64]
TOLERANCE = 1e-12
MAX_OVERLAP = 10.0
"""Largest exponent g. Beyond it nothing is left that could overlap better."""
_OVERLAP_PENALTY = 0.01
"""Weak preference for g = 1, which decides where the steps say nothing about g."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Number of workers and batch size with which steps run."""

    workers: int
    batch: int
    """Samples in the batch of one replica."""
    replicas: int | None = None
    """Total number of replicas if it is fixed; None means one per worker."""

    @property
    def turns(self) -> int:
        """Replicas that the worker with the most replicas computes one after the other."""
        return math.ceil(self.total_replicas / self.workers)

    @property
    def total_replicas(self) -> int:
        return self.workers if self.replicas is None else self.replicas

    @property
    def total_batch(self) -> int:
        """Samples in a step of all replicas together."""
        return self.batch * self.total_replicas


@dataclass(frozen=True, slots=True)
class StepModel:
    """Prediction of how long a step takes in any configuration."""

    grad_fixed_s: float
    """a_c: time of one replica's turn that does not depend on the batch."""
    grad_per_sample_s: float
    """b_c: time of each sample."""
    sync_fixed_s: float
    """a_n: time of summing over two workers."""
    sync_per_worker_s: float
    """b_n: additional time of summing for each worker beyond two."""
    overlap: float = 1.0
    """g: the exponent of the overlap."""

    def grad_s(self, batch: int) -> float:
        """Return the time of one replica's turn without waiting."""
        return self.grad_fixed_s + self.grad_per_sample_s * batch

    def sync_s(self, workers: int) -> float:
        """Return the time of the sum over the workers if nothing else runs."""
        return self.sync_fixed_s + self.sync_per_worker_s * (workers - 2) if workers > 1 else 0.0

    def step_s(self, configuration: Configuration) -> float:
        """Return the duration of a step. Only the last of a worker's turns can overlap with the sum."""
        grad_s = self.grad_s(configuration.batch)
        last_s = _overlapped_s(grad_s, self.sync_s(configuration.workers), self.overlap)
        return (configuration.turns - 1) * grad_s + last_s


def _overlapped_s(one_s: float, other_s: float, overlap: float) -> float:
    """Return (a^g + b^g)^(1/g) without overflow."""
    longer_s, shorter_s = max(one_s, other_s), min(one_s, other_s)
    if longer_s <= 0:
        return 0.0
    return float(longer_s * (1 + (shorter_s / longer_s) ** overlap) ** (1 / overlap))


def efficiency(total_batch: float, base_batch: float, noise_scale: float) -> float:
    """Return the worth of a sample in a batch relative to a sample in the base batch, by AdaScale's gain."""
    scale = total_batch / base_batch
    return gain(scale, noise_scale / base_batch, 1.0) / scale


def fit(steps_s: Mapping[Configuration, float]) -> StepModel:
    """Fit the model to the measured durations of steps with the least relative errors; 1 <= g <= 10.

    Parameters that the steps do not determine are assumed. With one batch size only, half of a turn is taken to be
    fixed. With one worker only, sums are free, so that a policy tries more workers. With at most two numbers of workers,
    one of them 1, a sum takes equally long on all larger numbers.
    """
    unit_s = max(steps_s.values())
    biggest = max(each.batch for each in steps_s)
    observed = np.array(list(steps_s.values())) / unit_s
    batches = {each.batch for each in steps_s}
    shared = {each.workers for each in steps_s if each.workers > 1}
    known = np.array([len(batches) > 1, True, bool(shared), len(shared) > 1, bool(shared) and len(steps_s) > 3])

    def model_of(values: Vector) -> StepModel:
        fixed, per_batch, sync, per_worker, overlap = (float(value) for value in values)
        if not known[0]:
            fixed = per_batch  # half of a turn each
        scale_s = unit_s / biggest
        return StepModel(fixed * unit_s, per_batch * scale_s, sync * unit_s, per_worker * unit_s, overlap)

    def errors(values: Vector) -> Vector:
        model = model_of(values)
        predicted = np.array([model.step_s(each) for each in steps_s]) / unit_s
        apart = np.log(np.maximum(predicted, 1e-9) / observed)
        return np.append(apart, _OVERLAP_PENALTY * math.sqrt(len(observed)) * (values[4] - 1) / MAX_OVERLAP)

    lower = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    upper = np.where(known, [2.0, 2.0, 4.0, 4.0, MAX_OVERLAP], lower)
    overlaps = (1.0, 2.0, 6.0) if known[4] else (1.0,)  # g has several local optima
    return model_of(fit_bounded(errors, [[0.2, 0.5, 0.3, 0.05, overlap] for overlap in overlaps], lower, upper))


def fit_bounded(
    errors: Callable[[Vector], Vector],
    starts: Sequence[Sequence[float]],
    lower: Sequence[float] | Vector,
    upper: Sequence[float] | Vector,
) -> Vector:
    """Return the parameters within the bounds with the least sum of squared errors, from the best of several starts.

    A parameter whose bounds are equal is not fitted.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # imported late: it loads slowly

    low, high = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    free = low < high
    if not free.any():
        return low

    def whole(values: Vector) -> Vector:
        found = low.copy()
        found[free] = values
        return found

    trials = []
    for start in starts:
        begin = np.clip(np.asarray(start, np.float64), low, high)[free]
        trials.append(
            least_squares(
                lambda values: errors(whole(values)),
                begin,
                bounds=(low[free], high[free]),
                method="dogbox",  # unlike trf it reaches a bound exactly
                xtol=TOLERANCE,
                ftol=TOLERANCE,
                gtol=TOLERANCE,
            )
        )
    return whole(min(trials, key=lambda trial: float(trial.cost)).x)
