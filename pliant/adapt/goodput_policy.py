"""The policy that decides on batch size and number of workers together, for most progress per second. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from pliant.adapt.batch_size import LAG, MOST_GROWTH, NOISE_CAP, SMOOTHING, LearningRate
from pliant.adapt.goodput_model import Configuration, efficiency, fit
from pliant.adapt.monitors import Ema
from pliant.adapt.policy import MOST_BATCH, Decision, Observation, Policy, SetBatchSize
from pliant.adapt.size import PendingResize, next_size
from pliant.errors import ConfigError

MOST_QUIET = 8
"""Most intervals between two evaluations while nothing changes: each evaluation costs a fit."""


ALPHA = 1 / 3
"""Share of its fair share of the goodput that a worker must add, as with `Provision`."""
LEAST_GAIN = 0.05
"""Relative gain that a change must promise."""


class Goodput(Policy):
    """Looks for the batch size and the number of workers with the most goodput: samples per second x worth of a sample.

    The duration of a step is known for configurations that were tried. For the others it is predicted by a model that is
    fitted to all that were tried. In one change, the batch grows to twice its size at most, and the number of workers to
    twice what was tried. Under `pliant serve` the scheduler decides on workers, and the policy on the batch.

    Args:
        interval: number of steps in one measurement, after which a change can be decided.
        max_batch: largest batch of one replica; at least the one that the job began with.
        max_workers: most workers to ask for; 0 means as many as there are replicas, or as come.
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
        lr: str = "adascale",
        give_up_s: float = 120.0,
    ) -> None:
        if interval < 2 or max_workers < 0 or not 1 <= max_batch <= MOST_BATCH or not give_up_s > 0:
            raise ConfigError(
                f"interval={interval}, max_batch={max_batch}, max_workers={max_workers}, give_up_s={give_up_s}: "
                f"use 2 or more steps, 1 to {MOST_BATCH} samples, 0 or more workers, and a time above 0"
            )
        self.interval, self.max_batch, self.give_up_s = interval, max_batch, give_up_s
        self._max_workers = max_workers
        self._noise = Ema(SMOOTHING, NOISE_CAP)
        self._rate = LearningRate(lr)
        self._pending = PendingResize()
        self._base_size = 0
        """Batch size of one replica when the job began."""
        self._replicas = 0
        """Total number of replicas if it is fixed; 0 while every observation had one per worker."""
        self._now: list[int] = []
        """[view, workers, batch, replicas] of the steps being measured."""
        self._steps_s: list[float] = []
        self._quiet = 1
        """Intervals until the next evaluation."""
        self._tried: dict[str, float] = {}
        """Duration of a step by "workers,batch,replicas"; 0 replicas means one per worker."""

    def before_train(self, obs: Observation) -> None:
        self._begin(obs)

    def _begin(self, obs: Observation) -> None:
        self._rate.begin(obs)
        self._base_size = self._base_size or obs.batch_size

    def after_step(self, obs: Observation) -> list[Decision]:
        self._begin(obs)
        self._noise.update_if_positive(obs.noise_scale)
        if self._pending.is_open(obs):
            self._now, self._steps_s = [], []
            given_up = self._pending.give_up(obs, self.give_up_s)
            if given_up is None:
                return []
            self._max_workers = obs.num_workers
            return [given_up]
        now = [obs.view, obs.num_workers, obs.batch_size, obs.replicas]
        if now != self._now:
            self._now, self._steps_s, self._quiet = now, [], 1
            return []
        self._steps_s.append(obs.step_s)
        if len(self._steps_s) < LAG + self.interval * self._quiet:
            return []
        decided = self._decide(obs)
        self._steps_s, self._quiet = [], 1 if decided else min(MOST_QUIET, 2 * self._quiet)
        return decided or self._rate.follow(obs.global_batch, self._noise.value)

    def _decide(self, obs: Observation) -> list[Decision]:
        if obs.replicas != obs.num_workers:
            self._replicas = obs.replicas
        here = Configuration(obs.num_workers, obs.batch_size, self._replicas or None)
        step_s = median(self._steps_s[LAG:])
        if step_s <= 0:
            return []
        self._tried[_key(here)] = step_s
        if self._noise.value is None:
            return []
        worth = self._goodput_of(here)
        best = self._best(here, worth, self._candidates(obs))
        if best == here:
            return []
        gain = worth(best) / worth(here)
        what = f"goodput {worth(here):.4g} samples/s with {here.workers} workers x batches of {here.batch}, {gain:.3f} x that"
        reason = f"{what} with {best.workers} x {best.batch}; noise scale {self._noise.value:.0f}"
        decided: list[Decision] = []
        if best.batch != here.batch:
            decided.append(SetBatchSize(size=best.batch, reason=reason))
            decided += self._rate.follow(best.total_batch, self._noise.value)
        if best.workers != here.workers:
            decided.append(self._pending.ask(obs, best.workers, reason))
        return decided

    def _goodput_of(self, here: Configuration) -> Callable[[Configuration], float]:
        """Return the function that gives the goodput of a configuration."""
        tried = {_parse_key(key): step_s for key, step_s in self._tried.items()}
        alike = {each: tried[each] for each in tried if (each.replicas is None) == (here.replicas is None)}
        model = fit(alike)
        noise_scale, base_batch = self._noise.value or 0.0, self._rate.base_batch

        def worth(configuration: Configuration) -> float:
            step_s = tried.get(configuration) or model.step_s(configuration)
            total = configuration.total_batch
            return total / step_s * efficiency(total, base_batch, noise_scale)

        return worth

    def _candidates(self, obs: Observation) -> list[list[Configuration]]:
        """Return the configurations to consider next: one list for each number of workers."""
        most = MOST_GROWTH * max(_parse_key(key).workers for key in self._tried)
        # The noise scale is not known more precisely than half a power of two.
        steps = range(2 * math.ceil(math.log2(max(1.0, self.max_batch / self._base_size))) + 1)
        grid = {round(self._base_size * 2 ** (step / 2)) for step in steps}
        limit = min(self.max_batch, MOST_GROWTH * obs.batch_size)
        batches = sorted({each for each in grid if each <= limit} | {obs.batch_size})
        fixed = self._replicas or None
        sizes: list[int] = []
        size: int | None = 1 if obs.may_resize else None
        while size is not None and size <= most:
            sizes.append(size)
            size = next_size(size, self._replicas, self._max_workers)
        return [[Configuration(size, batch, fixed) for batch in batches] for size in sorted({*sizes, obs.num_workers})]

    def _best(
        self,
        here: Configuration,
        worth: Callable[[Configuration], float],
        candidates: Sequence[Sequence[Configuration]],
    ) -> Configuration:
        def weighed(configuration: Configuration) -> float:
            """Add a bonus to the present configuration: hysteresis."""
            bonus = 1 + LEAST_GAIN if configuration == here else 1.0
            return worth(configuration) * bonus

        best, *larger = (max(of_size, key=weighed) for of_size in candidates)
        for configuration in larger:
            bar = 1 + ALPHA * (configuration.workers - best.workers) / configuration.workers
            if weighed(configuration) >= bar * weighed(best):
                best = configuration
        return best


def _key(configuration: Configuration) -> str:
    return f"{configuration.workers},{configuration.batch},{configuration.replicas or 0}"


def _parse_key(key: str) -> Configuration:
    workers, batch, replicas = map(int, key.split(","))
    return Configuration(workers, batch, replicas or None)
