"""Policies that decide on the batch size, and rules by which the learning rate follows it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pliant.adapt.monitors import Ema, gain
from pliant.adapt.policy import (
    MOST_BATCH,
    Decision,
    Observation,
    Policy,
    SetBatchSize,
    SetLearningRate,
    check_schedule,
    latest_entry,
)
from pliant.errors import ConfigError

LEAST_CHANGE = 0.01
"""A learning rate that would change by a smaller share is left alone."""
LAG = 3
"""Steps after which observations surely show the effect of a decision."""
SMOOTHING, NOISE_CAP = 0.9, 2.0
"""Share of the past that the average of the noise scale keeps, and the most by which one estimate can move it."""
LEAST_GROWTH, MOST_GROWTH = 1.5, 2.0
"""A batch grows by factors between these: less is not worth a change, more is not safe."""


# --- learning rate ---


RULES: dict[str, Callable[[float, float, float], float]] = {
    "none": lambda scale, noise_scale, base: 1.0,
    "linear": lambda scale, noise_scale, base: scale,
    "sqrt": lambda scale, noise_scale, base: math.sqrt(scale),
    "adascale": lambda scale, noise_scale, base: gain(scale, noise_scale / base, 1.0),
}
"""Factor of the learning rate from the growth of the global batch, the noise scale and the base batch."""


def lr_factor(rule: str, batch: float, base_batch: float, noise_scale: float | None) -> float | None:
    """Return the factor of the program's own learning rate; None if it is not known yet."""
    scale = batch / base_batch
    if rule == "adascale" and scale > 1 and noise_scale is None:
        return None
    return RULES[rule](max(1.0, scale), max(0.0, noise_scale or 0.0), base_batch)


class LearningRate:
    """Lets the learning rate follow the global batch by a rule; decides only when the factor has changed."""

    def __init__(self, rule: str) -> None:
        if rule not in RULES:
            raise ConfigError(f"lr={rule!r}: use one of {', '.join(RULES)}")
        self.rule = rule
        self.base_batch = 0
        """Global batch that the program's own learning rate is meant for: the first one observed."""
        self.factor = 1.0

    def begin(self, obs: Observation) -> None:
        if not self.base_batch:
            self.base_batch, self.factor = obs.global_batch, obs.learning_rate_factor

    def follow(self, batch: int, noise_scale: float | None) -> list[Decision]:
        """Return the decision that fits a global batch of `batch` samples, if the factor changes."""
        factor = lr_factor(self.rule, batch, self.base_batch, noise_scale)
        if self.rule == "none" or factor is None or abs(factor / self.factor - 1) <= LEAST_CHANGE:
            return []
        self.factor = factor
        noise = f", noise scale {noise_scale:.0f}" if self.rule == "adascale" and noise_scale is not None else ""
        return [SetLearningRate(factor=factor, reason=f"{self.rule}: global batch {batch} of {self.base_batch}{noise}")]


# --- policies ---


class GrowBatchSize(Policy):
    """Grows the batch while the gradient's noise shows that larger batches pay, and never shrinks it.

    Per sample, a global batch as large as the noise scale makes half the progress of a tiny batch, and a batch far below
    it nearly as much. So the batch grows as long as the new one is at most the noise scale over `threshold`. With a
    threshold of 1, each doubling makes at least 1.5 times the progress per step.

    Args:
        threshold: how many times the grown global batch the noise scale must be.
        max_batch: largest batch of one replica.
        interval: least number of steps between two changes; 0 changes only at the ends of epochs.
        lr: how the learning rate follows: none, linear, sqrt or adascale.
        warmup: measurements before the first change and between two changes; the monitor remembers as many.
    """

    needs: Mapping[str, int] = {"noise_scale": 1}

    def __init__(
        self,
        *,
        threshold: float = 1.0,
        max_batch: int = 1024,
        interval: int = 0,
        lr: str = "adascale",
        warmup: int = 50,
    ) -> None:
        if not threshold > 0:
            raise ConfigError(f"threshold={threshold}: use a number above 0")
        if not 1 <= max_batch <= MOST_BATCH:
            raise ConfigError(f"max_batch={max_batch}: use a number of samples from 1 to {MOST_BATCH}")
        if interval < 0 or warmup < 0:
            raise ConfigError(f"interval={interval}, warmup={warmup}: use 0 or more")
        self.threshold, self.max_batch, self.interval, self.warmup = threshold, max_batch, interval, warmup
        self._noise = Ema(SMOOTHING, NOISE_CAP)
        self._rate = LearningRate(lr)
        self._grown_at = 0
        """Step of the last change."""
        self._measured_at = 0
        """Number of measurements at the last change."""

    def before_train(self, obs: Observation) -> None:
        self._rate.begin(obs)

    def after_step(self, obs: Observation) -> list[Decision]:
        self._rate.begin(obs)
        self._noise.update_if_positive(obs.noise_scale)
        if self._measured_at and obs.step - self._grown_at < LAG:
            return []
        if self.interval and obs.step - self._grown_at >= self.interval:
            grown = self._grow(obs)
            if grown:
                return grown
        # The noise scale grows during training, and with it what a step is worth.
        return self._rate.follow(obs.global_batch, self._noise.value)

    def after_epoch(self, obs: Observation) -> list[Decision]:
        return [] if self.interval else self._grow(obs)

    def _grow(self, obs: Observation) -> list[Decision]:
        noise, now = self._noise.value, obs.batch_size
        if noise is None or self._noise.count - self._measured_at < self.warmup:
            return []
        size = min(int(now * MOST_GROWTH), self.max_batch, int(noise / self.threshold / obs.replicas))
        if obs.steps_per_epoch:
            size = min(size, now * obs.steps_per_epoch)
        if size < now * LEAST_GROWTH:
            return []
        self._grown_at, self._measured_at = obs.step, self._noise.count
        reason = f"noise scale {noise:.0f} is {noise / obs.global_batch:.1f} x the global batch of {obs.global_batch}"
        return [SetBatchSize(size=size, reason=reason), *self._rate.follow(size * obs.replicas, noise)]


class KungFuBatchSize(Policy):
    """KungFu's rule of its figure 4: double the batch when noise / batch size has risen since the last epoch.

    It considers neither how large the noise is nor by how much it has risen, and leaves the learning rate alone.
    """

    needs: Mapping[str, int] = {"noise_scale": 1}

    def __init__(self, *, max_batch: int = 1024) -> None:
        if not 1 <= max_batch <= MOST_BATCH:
            raise ConfigError(f"max_batch={max_batch}: use a number of samples from 1 to {MOST_BATCH}")
        self.max_batch = max_batch
        self._ratio = Ema(SMOOTHING, NOISE_CAP)
        self._last: float | None = None
        """Ratio at the end of the previous epoch."""

    def after_step(self, obs: Observation) -> None:
        if obs.noise_scale is not None:
            self._ratio.update_if_positive(abs(obs.noise_scale) / obs.batch_size)

    def after_epoch(self, obs: Observation) -> Decision | None:
        before, self._last = self._last, self._ratio.value
        size = min(2 * obs.batch_size, self.max_batch)
        if before is None or self._last is None or self._last <= before or size <= obs.batch_size:
            return None
        reason = f"noise scale / batch size has risen from {before:.3g} to {self._last:.3g} in an epoch"
        return SetBatchSize(size=size, reason=reason)


class ScheduledBatchSize(Policy):
    """Sets given batch sizes from given steps on.

    Args:
        schedule: the batch size of one replica by the step from which it holds.
        lr: how the learning rate follows: none, linear or sqrt.
    """

    def __init__(self, schedule: Mapping[int, int], *, lr: str = "none") -> None:
        self.schedule = check_schedule(schedule, least=1)
        if lr == "adascale":
            raise ConfigError("lr='adascale' needs the noise scale, which a schedule does not look at: use linear")
        self._rate = LearningRate(lr)
        self._asked: int | None = None
        """Step of the last entry that was decided."""

    def before_train(self, obs: Observation) -> list[Decision]:
        return self.after_step(obs)

    def after_step(self, obs: Observation) -> list[Decision]:
        self._rate.begin(obs)
        entry = latest_entry(self.schedule, obs.step)
        if entry is None or entry == self._asked:
            return []
        self._asked, size = entry, self.schedule[entry]
        decisions: list[Decision] = []
        if size != obs.batch_size:
            decisions.append(SetBatchSize(size=size, reason=f"the schedule has {size} from step {entry} on"))
        return decisions + self._rate.follow(size * obs.replicas, None)
