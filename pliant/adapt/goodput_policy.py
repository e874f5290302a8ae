"""The policy that decides on batch size and number of workers together: for most progress per second. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from pliant.adapt.base import Policy
from pliant.adapt.batch_size import LAG, CappedAverage, LearningRate
from pliant.adapt.decisions import MOST_BATCH, Decision, SetBatchSize
from pliant.adapt.goodput_model import Choice, Noise, StepTime, fit
from pliant.adapt.observation import Observation
from pliant.adapt.size import Wish, next_size
from pliant.errors import ConfigError

MOST_QUIET = 8
"""Intervals between two looks at most, where nothing changes: each costs a fit."""


class Goodput(Policy):
    """Looks for the batch size and the number of workers of most goodput: samples per second x what a sample is worth.

    What a choice gives is known where it was tried, and predicted by a model that is fitted to all that was tried where it
    was not. A worker must add `alpha` of its fair share, as with `Provision`, and what is better by less than
    `least_gain` is not worth a change.

    Args:
        interval: steps of one measurement, after which a change can be decided.
        max_batch: of one replica; it is never below the one that the job began with.
        max_workers: never ask for more; 0: as many as there are replicas, or as come.
        alpha: how much of its fair share of the goodput a worker must add.
        least_gain: by how much more a change must promise than what there is.
        max_growth: of the batch, and of the number of workers beyond those tried, in one change.
        lr: how the learning rate follows: none, linear, sqrt or adascale.
        give_up_s: how long to wait for workers that were asked for.
    """

    needs: Mapping[str, int] = {"noise_scale": 1}

    def __init__(
        self,
        *,
        interval: int = 50,
        max_batch: int = 1024,
        max_workers: int = 0,
        alpha: float = 1 / 3,
        least_gain: float = 0.05,
        max_growth: float = 2.0,
        lr: str = "adascale",
        smoothing: float = 0.9,
        give_up_s: float = 120.0,
    ) -> None:
        if interval < 2 or max_workers < 0 or not 1 <= max_batch <= MOST_BATCH:
            raise ConfigError(
                f"interval={interval}, max_batch={max_batch}, max_workers={max_workers}: "
                f"use 2 or more steps, 1 to {MOST_BATCH} samples, 0 or more workers"
            )
        if alpha < 0 or least_gain < 0 or not max_growth > 1 or not give_up_s > 0:
            raise ConfigError(
                f"alpha={alpha}, least_gain={least_gain}, max_growth={max_growth}, give_up_s={give_up_s}: "
                "use 0 or more, a growth above 1, and a time above 0"
            )
        self.interval, self.max_batch, self.max_workers = interval, max_batch, max_workers
        self.alpha, self.least_gain, self.max_growth, self.give_up_s = alpha, least_gain, max_growth, give_up_s
        self.noise = CappedAverage(smoothing)
        self.rate = LearningRate(lr)
        self.wish = Wish()
        self.base_size = 0
        """The batch of one replica that the job began with."""
        self.replicas = 0
        """How many the workers share among them; 0: one each, as far as we know."""
        self.now: list[int] = []
        """[view, workers, batch, replicas] of the steps that are being measured."""
        self.steps_s: list[float] = []
        self.quiet = 1
        """Intervals until the next decision."""
        self.tried: dict[str, float] = {}
        """How long a step took, by "workers,batch,replicas"; 0 replicas: one per worker."""

    def before_train(self, seen: Observation) -> None:
        self._begin(seen)

    def _begin(self, seen: Observation) -> None:
        self.rate.begin(seen)
        self.base_size = self.base_size or seen.batch_size

    def after_step(self, seen: Observation) -> list[Decision]:
        self._begin(seen)
        self.noise.add(seen.noise_scale)
        if self.wish.is_open(seen):
            self.now, self.steps_s = [], []
            given_up = self.wish.give_up(seen, self.give_up_s)
            if given_up is None:
                return []
            self.max_workers = seen.num_workers
            return [given_up]
        now = [seen.view, seen.num_workers, seen.batch_size, seen.replicas]
        if now != self.now:
            self.now, self.steps_s, self.quiet = now, [], 1
            return []
        self.steps_s.append(seen.step_s)
        if len(self.steps_s) < LAG + self.interval * self.quiet:
            return []
        decided = self._decide(seen)
        self.steps_s, self.quiet = [], 1 if decided else min(MOST_QUIET, 2 * self.quiet)
        return decided or self.rate.follow(seen.global_batch, self.noise.value)

    # --- the choice ---

    def _decide(self, seen: Observation) -> list[Decision]:
        if seen.replicas != seen.num_workers:
            self.replicas = seen.replicas
        here = Choice(seen.num_workers, seen.batch_size, self.replicas or None)
        step_s = median(self.steps_s[LAG:])
        if step_s > 0:
            self.tried[_key(here)] = step_s
        if self.noise.value is None or not self.tried:
            return []
        worth = self._worth(here)
        best = self._best(here, worth, self._choices(seen))
        if best == here:
            return []
        gain = worth(best) / worth(here)
        what = f"goodput {worth(here):.4g} samples/s with {here.workers} workers x batches of {here.batch}, {gain:.3f} x that"
        reason = f"{what} with {best.workers} x {best.batch}; noise scale {self.noise.value:.0f}"
        decided: list[Decision] = []
        if best.batch != here.batch:
            decided.append(SetBatchSize(size=best.batch, reason=reason))
            decided += self.rate.follow(best.total_batch, self.noise.value)
        if best.workers != here.workers:
            decided.append(self.wish.ask(seen, best.workers, reason))
        return decided

    def _worth(self, here: Choice) -> Callable[[Choice], float]:
        """The goodput of a choice."""
        times = [StepTime(_choice(key), step_s) for key, step_s in self.tried.items()]
        model = fit([each for each in times if (each.choice.replicas is None) == (here.replicas is None)]).model
        assert self.noise.value is not None, "asked for when it is known"
        noise = Noise.of_scale(self.noise.value, self.rate.base_batch)

        def worth(choice: Choice) -> float:
            step_s = self.tried.get(_key(choice)) or model.step_s(choice)
            return choice.total_batch / step_s * noise.efficiency(choice.total_batch)

        return worth

    def _choices(self, seen: Observation) -> list[list[Choice]]:
        """What could be next, by the number of workers."""
        most = self.max_growth * max(_choice(key).workers for key in self.tried)
        # Half a power of two is as fine as the noise scale is known.
        steps = range(2 * math.ceil(math.log2(max(1.0, self.max_batch / self.base_size))) + 1)
        grid = {round(self.base_size * 2 ** (step / 2)) for step in steps}
        limit = min(self.max_batch, self.max_growth * seen.batch_size)
        batches = sorted({each for each in grid if each <= limit} | {seen.batch_size})
        fixed = self.replicas or None
        sizes: list[int] = []
        size: int | None = 1
        while size is not None and size <= most:
            sizes.append(size)
            size = next_size(size, self.replicas, self.max_workers)
        return [[Choice(size, batch, fixed) for batch in batches] for size in sorted({*sizes, seen.num_workers})]

    def _best(self, here: Choice, worth: Callable[[Choice], float], choices: Sequence[Sequence[Choice]]) -> Choice:
        def weighed(choice: Choice) -> float:
            """With a bonus for what there is: hysteresis."""
            bonus = 1 + self.least_gain if choice == here else 1.0
            return worth(choice) * bonus

        best, *larger = (max(of_size, key=weighed) for of_size in choices)
        for choice in larger:
            bar = 1 + self.alpha * (choice.workers - best.workers) / choice.workers
            if weighed(choice) >= bar * weighed(best):
                best = choice
        return best

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "noise": self.noise.state(),
            "rate": self.rate.state(),
            "wish": asdict(self.wish),
            "limits": [self.base_size, self.max_workers, self.replicas, self.quiet],
            "window": [list(self.now), list(self.steps_s)],
            "tried": dict(self.tried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.load(state["noise"])
        self.rate.load(state["rate"])
        self.wish = Wish(**state["wish"])
        self.base_size, self.max_workers, self.replicas, self.quiet = state["limits"]
        self.now, self.steps_s = (list(each) for each in state["window"])
        self.tried = dict(state["tried"])


def _key(choice: Choice) -> str:
    return f"{choice.workers},{choice.batch},{choice.replicas or 0}"


def _choice(key: str) -> Choice:
    workers, batch, replicas = map(int, key.split(","))
    return Choice(workers, batch, replicas or None)
