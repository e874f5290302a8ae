"""Policies that decide on the batch size, and how the learning rate follows it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pliant.adapt.base import Policy
from pliant.adapt.decisions import MOST_BATCH, Decision, SetBatchSize, SetLearningRate
from pliant.adapt.observation import Observation
from pliant.errors import ConfigError

LEAST_CHANGE = 0.01
"""A learning rate that differs by less is left alone."""
LAG = 3
"""Steps after which what was decided is surely seen in the observations."""


# --- how the learning rate follows the batch ---


def adascale_gain(scale: float, noise_scale: float, base_batch: float) -> float:
    """How many steps of the base batch one step of a batch `scale` times as large is worth; from 1 to `scale`."""
    noise = noise_scale / base_batch
    return (noise + 1) / (noise / scale + 1)


RULES: dict[str, Callable[[float, float, float], float]] = {
    "none": lambda scale, noise_scale, base: 1.0,
    "linear": lambda scale, noise_scale, base: scale,
    "sqrt": lambda scale, noise_scale, base: math.sqrt(scale),
    "adascale": adascale_gain,
}
"""From the growth of the global batch, the noise scale and the base batch to the factor of the learning rate."""


def check_rule(name: str) -> str:
    if name not in RULES:
        raise ConfigError(f"lr={name!r}: use one of {', '.join(RULES)}")
    return name


def lr_factor(rule: str, batch: float, base_batch: float, noise_scale: float | None) -> float | None:
    """The factor of the program's own learning rate; None where it is not known yet."""
    scale = batch / base_batch
    if rule == "adascale" and scale > 1 and noise_scale is None:
        return None
    return RULES[rule](max(1.0, scale), max(0.0, noise_scale or 0.0), base_batch)


class LearningRate:
    """Lets the learning rate follow the global batch, by a rule; says so only when the factor has moved."""

    def __init__(self, rule: str) -> None:
        self.rule = check_rule(rule)
        self.base_batch = 0
        """The global batch that the program's own learning rate is meant for: the first one seen."""
        self.factor = 1.0

    def begin(self, seen: Observation) -> None:
        if not self.base_batch:
            self.base_batch, self.factor = seen.global_batch, seen.learning_rate_factor

    def follow(self, batch: int, noise_scale: float | None) -> list[Decision]:
        """For a global batch of so many samples."""
        factor = lr_factor(self.rule, batch, self.base_batch, noise_scale)
        if self.rule == "none" or factor is None or abs(factor / self.factor - 1) <= LEAST_CHANGE:
            return []
        self.factor = factor
        noise = f", noise scale {noise_scale:.0f}" if self.rule == "adascale" and noise_scale is not None else ""
        return [SetLearningRate(factor=factor, reason=f"{self.rule}: global batch {batch} of {self.base_batch}{noise}")]

    def state(self) -> list[float]:
        return [self.base_batch, self.factor]

    def load(self, state: list[float]) -> None:
        self.base_batch, self.factor = int(state[0]), state[1]


class CappedAverage:
    """An exponential moving average that no single value can move by more than a factor of `cap`."""

    def __init__(self, keep: float, cap: float = 2.0) -> None:
        if not 0 <= keep < 1:
            raise ConfigError(f"smoothing={keep}: use a number from 0, which forgets at once, to below 1")
        self.keep, self.cap = keep, cap
        self.value: float | None = None
        self.count = 0

    def add(self, value: float | None) -> None:
        """Estimates that are no number, or not positive, say nothing."""
        if value is None or not math.isfinite(value) or value <= 0:
            return
        self.count += 1
        if self.value is None:
            self.value = value
            return
        kept = min(max(value, self.value / self.cap), self.value * self.cap)
        self.value = self.keep * self.value + (1 - self.keep) * kept

    def state(self) -> list[float | None]:
        return [self.value, self.count]

    def load(self, state: list[float | None]) -> None:
        self.value, self.count = state[0], int(state[1] or 0)


# --- the policies ---


class GrowBatchSize(Policy):
    """Grows the batch while the gradient's noise says that larger ones are worth it, and never shrinks it.

    A global batch as large as the noise scale makes half the progress per sample of a tiny one, and one far below it
    nearly all: so the batch may grow as long as the grown one is at most the noise scale over `threshold`. With 1, each
    doubling makes at least 1.5 times the progress per step. What would grow by less than `least_growth` stays as it is.

    Args:
        threshold: how many times the noise scale must be the grown global batch.
        max_batch: of one replica; or give `memory_bytes` and `bytes_per_sample`, or both.
        interval: steps between two changes at least; 0: changes at the ends of epochs only.
        lr: how the learning rate follows: none, linear, sqrt or adascale.
        warmup: measurements before the first change, and between two: the monitor's average remembers as many.
        max_growth: of one change.
        smoothing: of the noise scale, from one measurement to the next.
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
        max_growth: float = 2.0,
        least_growth: float = 1.5,
        smoothing: float = 0.9,
        memory_bytes: float = 0.0,
        bytes_per_sample: float = 0.0,
    ) -> None:
        if not threshold > 0:
            raise ConfigError(f"threshold={threshold}: use a number above 0")
        if not 1 <= max_batch <= MOST_BATCH:
            raise ConfigError(f"max_batch={max_batch}: use a number of samples from 1 to {MOST_BATCH}")
        if interval < 0 or warmup < 0:
            raise ConfigError(f"interval={interval}, warmup={warmup}: use 0 or more")
        if not 1 < least_growth <= max_growth:
            raise ConfigError(
                f"least_growth={least_growth}, max_growth={max_growth}: use numbers above 1, the least first"
            )
        if memory_bytes and bytes_per_sample:
            max_batch = max(1, min(max_batch, int(memory_bytes / bytes_per_sample)))
        elif memory_bytes or bytes_per_sample:
            raise ConfigError("memory_bytes and bytes_per_sample: give both, or none")
        self.threshold, self.max_batch, self.interval, self.warmup = threshold, max_batch, interval, warmup
        self.max_growth, self.least_growth = max_growth, least_growth
        self.noise = CappedAverage(smoothing)
        self.rate = LearningRate(lr)
        self.grown_at = 0
        """When the batch was changed last, in steps."""
        self.measured_at = 0
        """How much was measured when it was."""

    def before_train(self, seen: Observation) -> None:
        self.rate.begin(seen)

    def after_step(self, seen: Observation) -> list[Decision]:
        self.rate.begin(seen)
        self.noise.add(seen.noise_scale)
        if self.measured_at and seen.step - self.grown_at < LAG:
            return []
        if self.interval and seen.step - self.grown_at >= self.interval:
            grown = self._grow(seen)
            if grown:
                return grown
        # The noise scale grows as training goes on, and what a step is worth with it.
        return self.rate.follow(seen.global_batch, self.noise.value)

    def after_epoch(self, seen: Observation) -> list[Decision]:
        return [] if self.interval else self._grow(seen)

    def _grow(self, seen: Observation) -> list[Decision]:
        noise, now = self.noise.value, seen.batch_size
        if noise is None or self.noise.count - self.measured_at < self.warmup:
            return []
        size = min(int(now * self.max_growth), self.max_batch, int(noise / self.threshold / seen.replicas))
        if seen.steps_per_epoch:
            size = min(size, now * seen.steps_per_epoch)
        if size < now * self.least_growth:
            return []
        self.grown_at, self.measured_at = seen.step, self.noise.count
        reason = f"noise scale {noise:.0f} is {noise / seen.global_batch:.1f} x the global batch of {seen.global_batch}"
        return [SetBatchSize(size=size, reason=reason), *self.rate.follow(size * seen.replicas, noise)]

    def state_dict(self) -> dict[str, Any]:
        changed = [self.grown_at, self.measured_at]
        return {"noise": self.noise.state(), "rate": self.rate.state(), "changed": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.load(state["noise"])
        self.rate.load(state["rate"])
        self.grown_at, self.measured_at = state["changed"]


class KungFuBatchSize(Policy):
    """KungFu's own rule, of its figure 4: double when the noise over the batch has risen since the last epoch.

    It asks neither how large the noise is nor whether it has risen by much, and leaves the learning rate alone.
    """

    needs: Mapping[str, int] = {"noise_scale": 1}

    def __init__(self, *, max_batch: int = 1024, smoothing: float = 0.9) -> None:
        if not 1 <= max_batch <= MOST_BATCH:
            raise ConfigError(f"max_batch={max_batch}: use a number of samples from 1 to {MOST_BATCH}")
        self.max_batch = max_batch
        self.ratio = CappedAverage(smoothing)
        self.last: float | None = None
        """The ratio at the end of the epoch before."""

    def after_step(self, seen: Observation) -> None:
        self.ratio.add(abs(seen.noise_scale) / seen.batch_size if seen.noise_scale is not None else None)

    def after_epoch(self, seen: Observation) -> Decision | None:
        before, self.last = self.last, self.ratio.value
        size = min(2 * seen.batch_size, self.max_batch)
        if before is None or self.last is None or self.last <= before or size <= seen.batch_size:
            return None
        reason = f"noise scale / batch size has risen from {before:.3g} to {self.last:.3g} in an epoch"
        return SetBatchSize(size=size, reason=reason)

    def state_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio.state(), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ratio.load(state["ratio"])
        self.last = state["last"]


class ScheduledBatchSize(Policy):
    """These sizes from these steps on.

    Args:
        schedule: the size of one replica's batch by the number of steps after which it begins.
        lr: how the learning rate follows: none, linear or sqrt.
    """

    def __init__(self, schedule: Mapping[int, int], *, lr: str = "none") -> None:
        self.schedule = check_schedule(schedule, least=1)
        if lr == "adascale":
            raise ConfigError("lr='adascale' needs the noise scale, which a schedule does not look at: use linear")
        self.rate = LearningRate(lr)
        self.asked: int | None = None
        """The step of the entry that was decided last."""

    def before_train(self, seen: Observation) -> list[Decision]:
        self.rate.begin(seen)
        return self._due(seen)

    def after_step(self, seen: Observation) -> list[Decision]:
        self.rate.begin(seen)
        return self._due(seen)

    def _due(self, seen: Observation) -> list[Decision]:
        entry = latest(self.schedule, seen.step)
        if entry is None or entry == self.asked:
            return []
        self.asked, size = entry, self.schedule[entry]
        decisions: list[Decision] = []
        if size != seen.batch_size:
            decisions.append(SetBatchSize(size=size, reason=f"the schedule has {size} from step {entry} on"))
        return decisions + self.rate.follow(size * seen.replicas, None)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "rate": self.rate.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]
        self.rate.load(state["rate"])


def check_schedule(schedule: Mapping[int, int], *, least: int) -> dict[int, int]:
    """By step.

    Raises:
        ConfigError: it is empty, or has what is no whole number.
    """
    for step, value in schedule.items():
        for number, smallest in ((step, 0), (value, least)):
            if isinstance(number, bool) or not isinstance(number, int) or number < smallest:
                raise ConfigError(
                    f"schedule entry {step!r}: {value!r}: use whole numbers, STEP from 0, SIZE from {least}"
                )
    if not schedule:
        raise ConfigError("the schedule is empty: give STEP: SIZE for one step or more")
    return dict(sorted(schedule.items()))


def latest(schedule: Mapping[int, int], step: int) -> int | None:
    """The step of the last entry that has begun after `step` steps."""
    return max((each for each in schedule if each <= step), default=None)
