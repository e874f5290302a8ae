"""The policy that decides on batch size and number of workers together, for most progress per second. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from pliant.adapt.batch_size import LAG, NOISE_CAP, LearningRate
from pliant.adapt.goodput_model import Configuration, Noise, StepTime, fit
from pliant.adapt.monitors import Ema
from pliant.adapt.policy import MOST_BATCH, Decision, Observation, Policy, SetBatchSize
from pliant.adapt.size import PendingResize, next_size
from pliant.errors import ConfigError

MOST_QUIET = 8
"""Most intervals between two evaluations while nothing changes: each evaluation costs a fit."""


class Goodput(Policy):
    """Looks for the batch size and the number of workers with the most goodput: samples per second x worth of a sample.

    The duration of a step is known for configurations that were tried. For the others it is predicted by a model that is
    fitted to all that were tried. A worker must add `alpha` of its fair share, as with `Provision`. A change must promise
    at least `least_gain` more.

    Args:
        interval: number of steps in one measurement, after which a change can be decided.
        max_batch: largest batch of one replica; at least the one that the job began with.
        max_workers: most workers to ask for; 0 means as many as there are replicas, or as come.
        alpha: share of its fair share of the goodput that a worker must add.
        least_gain: relative gain that a change must promise.
        max_growth: largest factor, in one change, of the batch and of the number of workers beyond those tried.
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
        self.noise = Ema(smoothing, NOISE_CAP)
        self.rate = LearningRate(lr)
        self.pending = PendingResize()
        self.base_size = 0
        """Batch size of one replica when the job began."""
        self.replicas = 0
        """Total number of replicas if it is fixed; 0 while every observation had one per worker."""
        self.now: list[int] = []
        """[view, workers, batch, replicas] of the steps being measured."""
        self.steps_s: list[float] = []
        self.quiet = 1
        """Intervals until the next evaluation."""
        self.tried: dict[str, float] = {}
        """Duration of a step by "workers,batch,replicas"; 0 replicas means one per worker."""

    def before_train(self, obs: Observation) -> None:
        self._begin(obs)

    def _begin(self, obs: Observation) -> None:
        self.rate.begin(obs)
        self.base_size = self.base_size or obs.batch_size

    def after_step(self, obs: Observation) -> list[Decision]:
        self._begin(obs)
        self.noise.update_if_positive(obs.noise_scale)
        if self.pending.is_open(obs):
            self.now, self.steps_s = [], []
            given_up = self.pending.give_up(obs, self.give_up_s)
            if given_up is None:
                return []
            self.max_workers = obs.num_workers
            return [given_up]
        now = [obs.view, obs.num_workers, obs.batch_size, obs.replicas]
        if now != self.now:
            self.now, self.steps_s, self.quiet = now, [], 1
            return []
        self.steps_s.append(obs.step_s)
        if len(self.steps_s) < LAG + self.interval * self.quiet:
            return []
        decided = self._decide(obs)
        self.steps_s, self.quiet = [], 1 if decided else min(MOST_QUIET, 2 * self.quiet)
        return decided or self.rate.follow(obs.global_batch, self.noise.value)

    def _decide(self, obs: Observation) -> list[Decision]:
        if obs.replicas != obs.num_workers:
            self.replicas = obs.replicas
        here = Configuration(obs.num_workers, obs.batch_size, self.replicas or None)
        step_s = median(self.steps_s[LAG:])
        if step_s > 0:
            self.tried[_key(here)] = step_s
        if self.noise.value is None or not self.tried:
            return []
        worth = self._goodput_of(here)
        best = self._best(here, worth, self._candidates(obs))
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
            decided.append(self.pending.ask(obs, best.workers, reason))
        return decided

    def _goodput_of(self, here: Configuration) -> Callable[[Configuration], float]:
        """Return the function that gives the goodput of a configuration."""
        times = [StepTime(_parse_key(key), step_s) for key, step_s in self.tried.items()]
        model = fit([each for each in times if (each.configuration.replicas is None) == (here.replicas is None)]).model
        assert self.noise.value is not None, "called only when it is known"
        noise = Noise.of_scale(self.noise.value, self.rate.base_batch)

        def worth(configuration: Configuration) -> float:
            step_s = self.tried.get(_key(configuration)) or model.step_s(configuration)
            return configuration.total_batch / step_s * noise.efficiency(configuration.total_batch)

        return worth

    def _candidates(self, obs: Observation) -> list[list[Configuration]]:
        """Return the configurations to consider next: one list for each number of workers."""
        most = self.max_growth * max(_parse_key(key).workers for key in self.tried)
        # The noise scale is not known more precisely than half a power of two.
        steps = range(2 * math.ceil(math.log2(max(1.0, self.max_batch / self.base_size))) + 1)
        grid = {round(self.base_size * 2 ** (step / 2)) for step in steps}
        limit = min(self.max_batch, self.max_growth * obs.batch_size)
        batches = sorted({each for each in grid if each <= limit} | {obs.batch_size})
        fixed = self.replicas or None
        sizes: list[int] = []
        size: int | None = 1
        while size is not None and size <= most:
            sizes.append(size)
            size = next_size(size, self.replicas, self.max_workers)
        return [[Configuration(size, batch, fixed) for batch in batches] for size in sorted({*sizes, obs.num_workers})]

    def _best(
        self,
        here: Configuration,
        worth: Callable[[Configuration], float],
        candidates: Sequence[Sequence[Configuration]],
    ) -> Configuration:
        def weighed(configuration: Configuration) -> float:
            """Add a bonus to the present configuration: hysteresis."""
            bonus = 1 + self.least_gain if configuration == here else 1.0
            return worth(configuration) * bonus

        best, *larger = (max(of_size, key=weighed) for of_size in candidates)
        for configuration in larger:
            bar = 1 + self.alpha * (configuration.workers - best.workers) / configuration.workers
            if weighed(configuration) >= bar * weighed(best):
                best = configuration
        return best

    def state_dict(self) -> dict[str, Any]:
        return {
            "noise": [self.noise.value, self.noise.count],
            "rate": self.rate.state(),
            "wish": asdict(self.pending),
            "limits": [self.base_size, self.max_workers, self.replicas, self.quiet],
            "window": [list(self.now), list(self.steps_s)],
            "tried": dict(self.tried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.value, self.noise.count = state["noise"]
        self.rate.load(state["rate"])
        self.pending = PendingResize(**state["wish"])
        self.base_size, self.max_workers, self.replicas, self.quiet = state["limits"]
        self.now, self.steps_s = (list(each) for each in state["window"])
        self.tried = dict(state["tried"])


def _key(configuration: Configuration) -> str:
    return f"{configuration.workers},{configuration.batch},{configuration.replicas or 0}"


def _parse_key(key: str) -> Configuration:
    workers, batch, replicas = map(int, key.split(","))
    return Configuration(workers, batch, replicas or None)
