"""What a job may adapt by: what `pliant run` was told, and what the program says beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pliant.adapt import Decision, Policies, Policy
from pliant.adapt.monitors import check_monitors, parse_monitors
from pliant.adapt.policy import maths_decisions
from pliant.errors import ConfigError
from pliant.identity import WorkerSpec


@dataclass(slots=True)
class Settings:
    """What a job may adapt by: policies, monitors with their intervals, files."""

    policies: Policies = field(default_factory=lambda: Policies(()))
    monitors: dict[str, int] = field(default_factory=dict)
    record: str = ""
    replayed: Mapping[int, Sequence[Decision]] | None = None
    """What another run has decided about the maths, by step; then no policy does."""
    metrics: bool = False
    tensorboard: str = ""

    @property
    def is_active(self) -> bool:
        """Whether anything travels with the steps."""
        asked = (self.policies, self.monitors, self.record, self.metrics, self.tensorboard)
        return any(asked) or self.replayed is not None

    def __str__(self) -> str:
        """What must be the same on all workers, for people to compare."""
        if not self.is_active:
            return "nothing to adapt by"
        watched = ", ".join(f"{name} every {steps} steps" for name, steps in sorted(self.monitors.items()))
        return f"{len(self.policies)} policies, {watched or 'no monitors'}"


def adaptation_settings(
    spec: WorkerSpec | None, policies: Sequence[Policy], monitor: Mapping[str, int], record: str, replay: str
) -> Settings:
    """Everything together; the command line's policies come first.

    Raises:
        ConfigError: a monitor or policy that is not known, an interval that is none, a file said twice.
    """
    told = spec.adapting if spec is not None else {}
    every = Policies([*_told_policies(told.get("policy", "")), *policies])
    monitors = dict(every.needs)
    for name, interval in [*parse_monitors(told.get("monitor", "")).items(), *check_monitors(monitor).items()]:
        monitors[name] = min(interval, monitors.get(name, interval))
    for name, value in (("record", record), ("replay", replay)):
        if value and told.get(name) and told[name] != value:
            raise ConfigError(f"{name}={value!r} in the program, but --{name} {told[name]}: give one of them")
    return Settings(
        policies=every,
        monitors=check_monitors(monitors),
        record=record or told.get("record", ""),
        replayed=maths_decisions(replay) if (replay := replay or told.get("replay", "")) else None,
        metrics=told.get("metrics", "") == "1" or os.environ.get("KUNGFU_CONFIG_ENABLE_MONITORING") == "true",
        tensorboard=told.get("tensorboard", ""),
    )


def _told_policies(text: str) -> list[Policy]:
    """One on each line."""
    from pliant.adapt import registry  # the user's own are imported by it

    return [registry.parse(line) for line in text.splitlines()]
