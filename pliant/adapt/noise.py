"""How noisy gradients are: the noise scale of McCandlish et al. 2018 from two batch sizes, and the variance. Pure.

The expected square of a mean gradient over a batch of size b is |G|^2 + S/b, where G is the true gradient and S the
sum of the variances of its elements for one sample. Two sizes give two equations: the small one is a replica's batch,
the big one is that of all replicas together. S/|G|^2 is about the batch size from which larger batches
stop paying. The small square is the mean over all replicas, whose spread is less than one replica's,
and which is never below the big one: S is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pliant.adapt.ema import Ema

ALPHA = 0.98
"""Some fifty measurements are remembered: one alone is often further off than the scale is large."""


class NoiseScale:
    """Estimates the gradient noise scale. Any worker that is given the same numbers gets the same value."""

    def __init__(self, alpha: float = ALPHA) -> None:
        self._sqr, self._var = Ema(alpha, warm=True), Ema(alpha, warm=True)

    def update(self, small: float, big: float, batch: float, replicas: int) -> None:
        """One step's gradients: the mean over replicas of |g_r|^2, and |mean of g_r|^2; each replica's batch had `batch`
        samples. What says nothing (one replica, an overflow) is left out."""
        if replicas < 2 or batch <= 0 or not (math.isfinite(small) and math.isfinite(big)):
            return
        whole = batch * replicas
        self._sqr.update((whole * big - batch * small) / (whole - batch))
        self._var.update((small - big) / (1 / batch - 1 / whole))

    @property
    def count(self) -> int:
        """Measurements so far."""
        return self._sqr.count

    @property
    def gradient_sqr(self) -> float | None:
        """|G|^2: may be negative where noise hides the gradient."""
        return self._sqr.value

    @property
    def gradient_var(self) -> float | None:
        """S: the variance of one sample's gradient, over all elements."""
        return self._var.value

    @property
    def ratio(self) -> float | None:
        """S / |G|^2 with whatever sign it has."""
        sqr, var = self.gradient_sqr, self.gradient_var
        if sqr is None or var is None or sqr == 0:
            return None
        found = var / sqr
        return found if math.isfinite(found) else None

    @property
    def value(self) -> float | None:
        """The noise scale, in samples; None as long as it is not known, or noise hides the gradient altogether."""
        found = self.ratio
        return found if found is not None and found >= 0 else None

    def state_dict(self) -> dict[str, Any]:
        return {"sqr": self._sqr.state_dict(), "var": self._var.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sqr.load_state_dict(state["sqr"])
        self._var.load_state_dict(state["var"])


class Variance:
    """The variance of gradients between replicas: the sum over variables of the L2 norm of var_r(g_r)."""

    def __init__(self) -> None:
        self.value: float | None = None

    def update(self, norms: Sequence[float]) -> None:
        """The norm of each variable's variance, or sums of several. An overflow is left out."""
        found = math.fsum(norms)
        if math.isfinite(found):
            self.value = found

    def state_dict(self) -> dict[str, float | None]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.value = state["value"]
