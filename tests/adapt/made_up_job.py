"""A made-up job whose truth is known, for policies to be driven through, and what can be asked of its decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.adapt import Decision, Observation, Policies, Policy, Resize, SetBatchSize, SetLearningRate, WorkerFigures

Decided = tuple[int, Decision]


@dataclass
class Job:
    """A job that does as it is told, one step after it was decided, as a real one does."""

    step_s: Callable[[int, int], float] = lambda workers, batch: 0.01
    """By workers and the batch of one replica."""
    noise_scale: Callable[[int], float | None] = lambda step: None
    replicas: int = 4
    """0: one per worker."""
    workers: int = 1
    batch: int = 32
    samples: int = 32 * 4 * 20
    comes_after: int = 3
    """Steps between the wish for workers and their coming."""
    never_above: int = 99
    """Workers that exist."""
    may_resize: bool = True
    spread: float = 0.0
    """Of the time of a step."""
    seed: int = 0
    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    view: int = 1
    time_s: float = 0.0
    factor: float = 1.0
    decided: list[Decided] = field(default_factory=list)
    _pending: list[tuple[str, Decision]] = field(default_factory=list)
    _wished: tuple[int, int] | None = None
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def all_replicas(self) -> int:
        return self.replicas or self.workers

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // (self.batch * self.all_replicas))

    def run(self, policies: Policies, steps: int) -> list[Decided]:
        """The decisions that were carried out so far, with their steps."""
        if self.step == 0:
            self._pending = policies.ask("before_train", self.seen())
        for _ in range(steps):
            self._do_step(policies)
        return self.decided

    def _do_step(self, policies: Policies) -> None:
        figures_s = self._last_s  # a step's figures travel with the next one
        took_s = self.step_s(self.workers, self.batch) * max(0.2, self._random.gauss(1, self.spread))
        if self.spread and self._random.random() < 0.02:
            took_s *= 8  # a hiccup
        self._last_s, self.time_s = took_s, self.time_s + took_s
        self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
        carried_out, self._pending = self._pending, []
        for _, decision in carried_out:
            self.decided.append((self.step, decision))
            self._carry_out(decision)
        seen = self.seen(figures_s)
        self._pending = policies.ask("after_step", seen)
        if self.epoch_step >= self.steps_per_epoch:
            self._pending += policies.ask("after_epoch", seen)
            self.epoch, self.epoch_step = self.epoch + 1, 0
        if self._wished is not None and self.step >= self._wished[0]:
            self.workers, self.view, self._wished = self._wished[1], self.view + 1, None

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case SetBatchSize():
                self.batch = decision.size
            case SetLearningRate():
                self.factor = decision.factor
            case Resize() if decision.workers <= self.never_above:
                self._wished = (self.step + self.comes_after, decision.workers)

    def seen(self, figures_s: float = 0.0) -> Observation:
        workers = [WorkerFigures(name=f"127.0.0.1:{10000 + rank}", step_s=figures_s) for rank in range(self.workers)]
        return Observation(
            step=self.step,
            epoch=self.epoch,
            epoch_step=self.epoch_step,
            steps_per_epoch=self.steps_per_epoch,
            time_s=self.time_s,
            view=self.view,
            replicas=self.all_replicas,
            batch_size=self.batch,
            learning_rate_factor=self.factor,
            noise_scale=self.noise_scale(self.step),
            may_resize=self.may_resize,
            workers=tuple(workers),
        )


def run(policy: Policy, steps: int, **job: Any) -> tuple[Job, list[Decided]]:
    made = Job(**job)
    return made, made.run(Policies([policy]), steps)


def batch_sizes(decided: Sequence[Decided]) -> list[int]:
    return [decision.size for _, decision in decided if isinstance(decision, SetBatchSize)]


def worker_counts(decided: Sequence[Decided]) -> list[int]:
    return [decision.workers for _, decision in decided if isinstance(decision, Resize)]


def noisy(truth: Callable[[int], float], spread: float = 0.5) -> Callable[[int], float | None]:
    """An estimate as it comes: scattered, at times negative, at times none."""

    def estimate(step: int) -> float | None:
        draw = random.Random(step)
        if step < 3 or draw.random() < 0.05:
            return None
        return truth(step) * draw.gauss(1, spread) if draw.random() < 0.95 else -truth(step)

    return estimate
