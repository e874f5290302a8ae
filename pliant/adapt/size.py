"""Policies that decide on the number of workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pliant.adapt.policy import Observation, Policy, Resize, check_schedule, latest_entry
from pliant.errors import ConfigError

SURE = 3.0
"""Number of standard errors by which two rates must differ to count as different."""
PRECISION = 1 / 6
"""A rate is known when its standard error is below this share of what a worker must add."""
PATIENCE = 6
"""Most windows that are measured for one decision."""


class ScheduledSize(Policy):
    """Asks for given numbers of workers from given steps on. Each entry is asked for once, so resizes by others last.

    Args:
        schedule: the number of workers by the step from which it holds; 0 workers end the job.
    """

    def __init__(self, schedule: Mapping[int, int]) -> None:
        self.schedule = check_schedule(schedule, least=0)
        self._asked: int | None = None

    def before_train(self, obs: Observation) -> Resize | None:
        return self.after_step(obs)

    def after_step(self, obs: Observation) -> Resize | None:
        entry = latest_entry(self.schedule, obs.step)
        if entry is None or entry == self._asked:
            return None
        self._asked, workers = entry, self.schedule[entry]
        if workers == obs.num_workers:
            return None
        return Resize(workers=workers, reason=f"the schedule has {workers} from step {entry} on")


@dataclass
class MeasuredRate:
    """Samples per second with a number of workers, measured over a window of steps. With 0 workers, none was measured."""

    workers: int = 0
    median: float = 0.0
    error: float = 0.0
    """Standard error of the median."""

    @classmethod
    def of(cls, workers: int, rates: Sequence[float]) -> MeasuredRate:
        middle = median(rates)
        # The median absolute deviation: one long step counts as one value, however long it is.
        spread = 1.4826 * median([abs(rate - middle) for rate in rates])
        return cls(workers, middle, 1.2533 * spread / math.sqrt(len(rates)))


@dataclass
class PendingResize:
    """A number of workers that was asked for and is not there yet; 0 means none."""

    workers: int = 0
    since_s: float = 0.0

    def ask(self, obs: Observation, workers: int, reason: str) -> Resize:
        self.workers, self.since_s = workers, obs.time_s
        return Resize(workers=workers, reason=reason)

    def is_open(self, obs: Observation) -> bool:
        """Return whether the workers are still awaited."""
        if self.workers == obs.num_workers:
            self.workers = 0
        return self.workers != 0

    def give_up(self, obs: Observation, after_s: float) -> Resize | None:
        """Ask for the present number of workers if the others did not come in time."""
        if obs.time_s - self.since_s < after_s:
            return None
        asked, self.workers = self.workers, 0
        reason = f"{asked} workers were asked for {after_s:g} s ago and did not come: staying with {obs.num_workers}"
        return Resize(workers=obs.num_workers, reason=reason)


@dataclass
class RateWindow:
    """Steps that are being measured now."""

    view: int = -1
    global_batch: int = 0
    rates: list[float] = field(default_factory=list)
    """Samples per second of each step."""


class Provision(Policy):
    """Adds workers as long as each one pays, and removes the last one if it did not.

    Like KungFu's policy of figure 6, it compares the throughput of the second half of a window of `change_step` steps
    with the throughput before the last worker came. n workers pay if they give 1 + alpha/n times the throughput of n - 1.

    Unlike KungFu's policy, it uses medians. While the difference is within the error of measurement it continues to
    measure. Before it concludes that a size does not pay, it measures the smaller size again, in case the machines have
    become slower meanwhile. It skips sizes that cannot be faster because one of their workers would have as many replicas
    as with fewer workers.

    Args:
        change_step: number of steps in a window.
        alpha: share of its fair share of the throughput that a worker must add.
        max_workers: most workers to ask for; 0 means as many as there are replicas, or as come.
        give_up_s: how long to wait for a worker that was asked for.
    """

    def __init__(
        self, *, change_step: int = 50, alpha: float = 1 / 3, max_workers: int = 0, give_up_s: float = 120.0
    ) -> None:
        if change_step < 2 or not alpha > 0 or not give_up_s > 0 or max_workers < 0:
            raise ConfigError(
                f"change_step={change_step}, alpha={alpha}, give_up_s={give_up_s}, max_workers={max_workers}: "
                "use 2 or more steps, numbers above 0, and 0 or more workers"
            )
        self.change_step, self.alpha, self.max_workers, self.give_up_s = change_step, alpha, max_workers, give_up_s
        self._window = RateWindow()
        self._before = MeasuredRate()
        """Rate of the previous size; none at the first size."""
        self._larger = MeasuredRate()
        """Rate of the size that did not pay, while the smaller size is measured again; otherwise none."""
        self._pending = PendingResize()
        self._replicas = 0
        """Total number of replicas if it is fixed; 0 while every observation had one per worker."""
        self._confirms = True
        """Whether a smaller size is measured again; only once, so that the policy cannot oscillate."""
        self._done = False
        self._history: list[list[float]] = []

    @property
    def done(self) -> bool:
        """Whether the best size was found."""
        return self._done

    @property
    def history(self) -> list[list[float]]:
        """[workers, samples per second] of every window that led to a decision."""
        return self._history

    def after_step(self, obs: Observation) -> Resize | None:
        if self._done or not obs.may_resize:
            return None
        if self._pending.is_open(obs):
            self._window = RateWindow()
            given_up = self._pending.give_up(obs, self.give_up_s)
            self._done = given_up is not None
            return given_up
        if obs.view != self._window.view or obs.global_batch != self._window.global_batch:
            # This step may include the change itself.
            self._window = RateWindow(obs.view, obs.global_batch)
            return None
        if obs.replicas != obs.num_workers:
            self._replicas = obs.replicas
        if obs.samples_per_s > 0:
            self._window.rates.append(obs.samples_per_s)
        count = len(self._window.rates)
        if count == 0 or count % self.change_step:
            return None
        return self._decide(obs, MeasuredRate.of(obs.num_workers, self._window.rates[self.change_step // 2 :]))

    def _decide(self, obs: Observation, now: MeasuredRate) -> Resize | None:
        hurried = len(self._window.rates) >= PATIENCE * self.change_step
        if not hurried and now.error > PRECISION * self.alpha / (now.workers + 1) * now.median:
            return None
        if self._larger.workers:
            smaller, larger = now, self._larger
        elif 0 < self._before.workers < now.workers:
            smaller, larger = self._before, now
        else:  # the first size, or somebody else has changed it
            return self._grow(now, obs, f"{now.median:.4g} samples/s with {now.workers}")
        bar = 1 + self.alpha * (larger.workers - smaller.workers) / larger.workers
        excess = larger.median - bar * smaller.median
        if not hurried and abs(excess) < SURE * math.hypot(larger.error, bar * smaller.error):
            return None
        gain = larger.median / smaller.median
        reason = (
            f"{larger.median:.4g} samples/s with {larger.workers} are {gain:.3f} x those with {smaller.workers}, "
            f"of {bar:.3f} that make it worth it"
        )
        if self._larger.workers:
            return self._end_confirming(now, obs, reason, worth_it=excess >= 0)
        return self._grow(now, obs, reason) if excess >= 0 else self._take_back(now, obs, reason)

    def _grow(self, now: MeasuredRate, obs: Observation, reason: str) -> Resize | None:
        self._history.append([now.workers, now.median])
        target = next_size(now.workers, self._replicas, self.max_workers)
        if target is None:
            self._done = True
            return None
        self._before = now
        return self._pending.ask(obs, target, reason)

    def _take_back(self, now: MeasuredRate, obs: Observation, reason: str) -> Resize:
        self._history.append([now.workers, now.median])
        if self._confirms:
            self._larger = now
        else:
            self._done = True
        return self._pending.ask(obs, self._before.workers, reason)

    def _end_confirming(self, now: MeasuredRate, obs: Observation, reason: str, *, worth_it: bool) -> Resize | None:
        """Decide after the smaller size was measured again: return to the larger size if it pays after all."""
        self._history.append([now.workers, now.median])
        larger, self._larger = self._larger, MeasuredRate()
        if not worth_it:
            self._done = True
            return None
        self._before, self._confirms = now, False
        return self._pending.ask(obs, larger.workers, f"measured again, {reason}")


def next_size(workers: int, replicas: int, max_workers: int = 0) -> int | None:
    """Return the next larger number of workers that can be faster, or None if there is none.

    Args:
        replicas: total number of replicas; 0 means one per worker, whatever their number.
    """
    target = workers + 1
    if replicas:
        turns = math.ceil(replicas / workers)  # of the worker with the most replicas
        if turns == 1:
            return None
        target = math.ceil(replicas / (turns - 1))
    return target if not max_workers or target <= max_workers else None
