"""Policies that decide on the number of workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from pliant.adapt.base import Policy
from pliant.adapt.batch_size import check_schedule, latest
from pliant.adapt.decisions import Resize
from pliant.adapt.observation import Observation
from pliant.errors import ConfigError

SURE = 3.0
"""Two rates are apart when they differ by so many standard errors."""
PRECISION = 1 / 6
"""Of what a worker must add: a rate is known when its standard error is less."""


class ScheduledSize(Policy):
    """So many workers from these steps on. Each entry is asked for once: what others wish in between stands.

    Args:
        schedule: the number of workers by the number of steps after which it shall be; 0 workers end the job.
    """

    def __init__(self, schedule: Mapping[int, int]) -> None:
        self.schedule = check_schedule(schedule, least=0)
        self._asked: int | None = None

    def before_train(self, seen: Observation) -> Resize | None:
        return self.after_step(seen)

    def after_step(self, seen: Observation) -> Resize | None:
        entry = latest(self.schedule, seen.step)
        if entry is None or entry == self._asked:
            return None
        self._asked, workers = entry, self.schedule[entry]
        if workers == seen.num_workers:
            return None
        return Resize(workers=workers, reason=f"the schedule has {workers} from step {entry} on")


@dataclass(slots=True)
class Rate:
    """Samples per second with so many workers, as a window of steps has shown it."""

    workers: int
    median: float
    error: float
    """The standard error of the median."""

    @classmethod
    def of(cls, workers: int, rates: Sequence[float]) -> Rate:
        middle = median(rates)
        # From the middle half of the values: a hiccup, however long, is one value.
        spread = 1.4826 * median([abs(rate - middle) for rate in rates])
        return cls(workers, middle, 1.2533 * spread / math.sqrt(len(rates)))


@dataclass(slots=True)
class Wish:
    """A number of workers that was asked for and is not there yet; 0: none."""

    workers: int = 0
    since_s: float = 0.0

    def ask(self, seen: Observation, workers: int, reason: str) -> Resize:
        self.workers, self.since_s = workers, seen.time_s
        return Resize(workers=workers, reason=reason)

    def is_open(self, seen: Observation) -> bool:
        """Whether it is still waited for."""
        if self.workers == seen.num_workers:
            self.workers = 0
        return self.workers != 0

    def give_up(self, seen: Observation, after_s: float) -> Resize | None:
        """Ask for what there is, if the workers did not come in time."""
        if seen.time_s - self.since_s < after_s:
            return None
        asked, self.workers = self.workers, 0
        reason = f"{asked} workers were asked for {after_s:g} s ago and did not come: staying with {seen.num_workers}"
        return Resize(workers=seen.num_workers, reason=reason)


@dataclass(slots=True)
class Window:
    """The steps that are being counted now."""

    view: int = -1
    global_batch: int = 0
    rates: list[float] = field(default_factory=list)
    """Samples per second of each step."""


class Provision(Policy):
    """Adds workers as long as each is worth it, and takes the last one back when it was not.

    As KungFu's policy of figure 6: after `change_step` steps the throughput of the window's second half is compared with
    the one before the last worker came; n workers are worth it when they give 1 + alpha/n times the throughput of
    n - 1. Unlike KungFu's, it takes medians; goes on measuring, up to `patience` windows, while the difference lies
    within the error of measurement; measures the smaller size again before it believes that the larger one was not worth it, in
    case the machines have become slower meanwhile; and passes over sizes that cannot be faster, because one of their
    workers would have as many replicas as with fewer workers.

    Args:
        change_step: steps of a window.
        alpha: how much of its fair share a worker must add.
        max_workers: never ask for more; 0: as many as there are replicas, or as come.
        give_up_s: how long to wait for a worker that was asked for.
        patience: windows at most for one decision.
        confirm: whether to measure the smaller size again.
    """

    def __init__(
        self,
        *,
        change_step: int = 50,
        alpha: float = 1 / 3,
        max_workers: int = 0,
        give_up_s: float = 120.0,
        patience: int = 6,
        confirm: bool = True,
    ) -> None:
        if change_step < 2 or patience < 1:
            raise ConfigError(f"change_step={change_step}, patience={patience}: use 2 and 1 or more")
        if not alpha > 0 or not give_up_s > 0 or max_workers < 0:
            raise ConfigError(
                f"alpha={alpha}, give_up_s={give_up_s}, max_workers={max_workers}: use numbers above 0, max_workers from 0"
            )
        self.change_step, self.alpha, self.max_workers = change_step, alpha, max_workers
        self.give_up_s, self.patience, self.confirm = give_up_s, patience, confirm
        self.window = Window()
        self.before: Rate | None = None
        """What the size before this one gave; None at the first size."""
        self.larger: Rate | None = None
        """The size that was not worth it, while the smaller one is measured again."""
        self.wish = Wish()
        self.replicas = 0
        """How many the workers share among them; 0: one each, as far as we know."""
        self.done = False
        self.history: list[list[float]] = []
        """[workers, samples per second] of every window that was decided on."""

    def after_step(self, seen: Observation) -> Resize | None:
        if self.done:
            return None
        if self.wish.is_open(seen):
            self.window = Window()
            given_up = self.wish.give_up(seen, self.give_up_s)
            self.done = given_up is not None
            return given_up
        fresh = seen.view != self.window.view or seen.global_batch != self.window.global_batch
        if fresh:  # this step may have had the change in it
            self.window = Window(seen.view, seen.global_batch)
            return None
        if seen.replicas != seen.num_workers:
            self.replicas = seen.replicas
        if seen.samples_per_s > 0:
            self.window.rates.append(seen.samples_per_s)
        count = len(self.window.rates)
        if count == 0 or count % self.change_step:
            return None
        return self._decide(seen, Rate.of(seen.num_workers, self.window.rates[self.change_step // 2 :]))

    def _decide(self, seen: Observation, now: Rate) -> Resize | None:
        hurried = len(self.window.rates) >= self.patience * self.change_step
        if not hurried and now.error > PRECISION * self.alpha / (now.workers + 1) * now.median:
            return None
        if self.larger is not None:
            smaller, larger = now, self.larger
        elif self.before is not None and self.before.workers < now.workers:
            smaller, larger = self.before, now
        else:  # the first size; or others have changed it, and we begin anew
            return self._grow(now, seen, f"{now.median:.4g} samples/s with {now.workers}")
        bar = 1 + self.alpha * (larger.workers - smaller.workers) / larger.workers
        excess = larger.median - bar * smaller.median
        if not hurried and abs(excess) < SURE * math.hypot(larger.error, bar * smaller.error):
            return None
        gain = larger.median / smaller.median
        reason = (
            f"{larger.median:.4g} samples/s with {larger.workers} are {gain:.3f} x those with {smaller.workers}, "
            f"of {bar:.3f} that make it worth it"
        )
        if self.larger is not None:
            return self._end_confirming(now, seen, reason, worth_it=excess >= 0)
        return self._grow(now, seen, reason) if excess >= 0 else self._take_back(now, seen, reason)

    def _grow(self, now: Rate, seen: Observation, reason: str) -> Resize | None:
        self._note(now)
        target = next_size(now.workers, self.replicas, self.max_workers)
        if target is None:
            self.done = True
            return None
        self.before = now
        return self.wish.ask(seen, target, reason)

    def _take_back(self, now: Rate, seen: Observation, reason: str) -> Resize:
        self._note(now)
        assert self.before is not None, "there was a smaller size"
        if self.confirm:
            self.larger = now
        else:
            self.done = True
        return self.wish.ask(seen, self.before.workers, reason)

    def _end_confirming(self, now: Rate, seen: Observation, reason: str, *, worth_it: bool) -> Resize | None:
        """The smaller size was measured again. If it is slower than before, the larger one gets its due, and that is it."""
        self._note(now)
        assert self.larger is not None, "it is what was to be confirmed"
        larger, self.larger = self.larger, None
        if not worth_it:
            self.done = True
            return None
        self.before, self.confirm = now, False  # once is enough: nobody shall see it go up and down
        return self.wish.ask(seen, larger.workers, f"measured again, {reason}")

    def _note(self, rate: Rate) -> None:
        self.history.append([rate.workers, rate.median])

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": asdict(self.window),
            "before": asdict(self.before) if self.before else None,
            "larger": asdict(self.larger) if self.larger else None,
            "wish": asdict(self.wish),
            "flags": [self.confirm, self.done, self.replicas],
            "history": [list(each) for each in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window = Window(**state["window"])
        self.before = Rate(**state["before"]) if state["before"] else None
        self.larger = Rate(**state["larger"]) if state["larger"] else None
        self.wish = Wish(**state["wish"])
        self.confirm, self.done, self.replicas = state["flags"]
        self.history = [list(each) for each in state["history"]]


def next_size(workers: int, replicas: int, max_workers: int = 0) -> int | None:
    """The next larger number of workers that can be faster; None: there is none.

    Args:
        replicas: how many the workers share among them; 0: they have one each, whatever their number.
    """
    target = workers + 1
    if replicas:
        turns = math.ceil(replicas / workers)  # of the worker that has most
        if turns == 1:
            return None
        target = math.ceil(replicas / (turns - 1))
    return target if not max_workers or target <= max_workers else None
