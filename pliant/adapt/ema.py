"""An exponential moving average that may distrust outliers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pliant.errors import ConfigError


class Ema:
    """m <- alpha * m + (1 - alpha) * x; the first value sets it."""

    def __init__(self, alpha: float, cap: float | None = None, *, warm: bool = False) -> None:
        """
        Args:
            alpha: how much of the past is kept, 0 <= alpha < 1.
            cap: take a value as at most `cap` times and at least 1/`cap` of the present average.
            warm: a plain mean as long as there are fewer values than the average remembers, so that a first odd
                value does not linger.
        """
        if not 0 <= alpha < 1:
            raise ConfigError(f"alpha={alpha!r}: how much of the past an average keeps, use 0 or more and less than 1")
        if cap is not None and not cap > 1:
            raise ConfigError(f"cap={cap!r}: use a factor above 1, or None")
        self.alpha, self.cap, self.warm = alpha, cap, warm
        self.value: float | None = None
        self.count = 0
        """Values so far."""

    def update(self, value: float) -> float:
        """Take in a value; the new average. What is not finite is left out."""
        if not math.isfinite(value):
            return self.value if self.value is not None else math.nan
        self.count += 1
        if self.value is None:
            self.value = float(value)
            return self.value
        if self.cap is not None:
            ends = sorted((self.value / self.cap, self.value * self.cap))  # a negative average turns them round
            value = min(max(value, ends[0]), ends[1])
        alpha = min(self.alpha, 1 - 1 / self.count) if self.warm else self.alpha
        self.value = alpha * self.value + (1 - alpha) * value
        return self.value

    def state_dict(self) -> dict[str, float | int | None]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        value, count = state["value"], state["count"]
        self.value = None if value is None else float(value)
        self.count = int(count or 0)
