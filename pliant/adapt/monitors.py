"""Monitors of a job: moving averages, the gradient noise scale, the variance of gradients, and stalls.

The noise scale of McCandlish et al. 2018 is estimated from two batch sizes. The expected square of a mean gradient over
a batch of size b is |G|^2 + S/b, where G is the true gradient and S the sum of the variances of its elements for one
sample. Two sizes give two equations: the small batch is one replica's, the big batch is that of all replicas together.
S/|G|^2 is about the batch size from which larger batches stop paying. The small square is the mean over all replicas:
it varies less than one replica's, and it is never below the big one, so S is never negative.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pliant.errors import ConfigError

MONITORS = ("noise_scale", "variance")
NOISE_ALPHA = 0.98
"""The noise scale remembers about fifty measurements: the error of one is often larger than the scale itself."""


# --- which monitors run ---


def check_monitors(monitors: Mapping[str, int]) -> dict[str, int]:
    """Return the monitors with their intervals in steps.

    Raises:
        ConfigError: a monitor is unknown, or an interval is not a whole number above 0.
    """
    for name, interval in monitors.items():
        if name not in MONITORS:
            raise ConfigError(f"monitor {name!r} is not known: use {' or '.join(MONITORS)}")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"monitor {name}={interval!r}: use the number of steps between measurements, 1 or more")
    return dict(monitors)


def parse_monitors(text: str) -> dict[str, int]:
    """Parse `noise_scale=1,variance=8`; a monitor without a number runs in every step."""
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, interval = part.partition("=")
        if interval and not interval.isdigit():
            raise ConfigError(f"--monitor {part!r}: write NAME=STEPS, such as noise_scale=1,variance=8")
        found[name.replace("-", "_")] = int(interval or 1)
    return check_monitors(found)


# --- averages ---


class Ema:
    """Exponential moving average: m <- alpha * m + (1 - alpha) * x. The first value sets it."""

    def __init__(self, alpha: float, cap: float | None = None, *, warm: bool = False) -> None:
        """
        Args:
            alpha: the share of the past that is kept, 0 <= alpha < 1.
            cap: clip each value to between 1/`cap` and `cap` times the present average.
            warm: use the plain mean as long as there are fewer values than the average remembers, so that an odd first
                value does not linger.
        """
        if not 0 <= alpha < 1:
            raise ConfigError(f"alpha={alpha!r}: how much of the past an average keeps, use 0 or more and less than 1")
        if cap is not None and not cap > 1:
            raise ConfigError(f"cap={cap!r}: use a factor above 1, or None")
        self.alpha, self.cap, self.warm = alpha, cap, warm
        self.value: float | None = None
        self.count = 0
        """Number of values so far."""

    def update(self, value: float) -> float:
        """Add a value and return the new average. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return self.value if self.value is not None else math.nan
        self.count += 1
        if self.value is None:
            self.value = float(value)
            return self.value
        if self.cap is not None:
            ends = sorted((self.value / self.cap, self.value * self.cap))  # a negative average swaps them
            value = min(max(value, ends[0]), ends[1])
        alpha = min(self.alpha, 1 - 1 / self.count) if self.warm else self.alpha
        self.value = alpha * self.value + (1 - alpha) * value
        return self.value

    def update_if_positive(self, value: float | None) -> None:
        """Add an estimate of a positive quantity. None, and values that are not above 0, are ignored."""
        if value is not None and value > 0:
            self.update(value)


# --- noise of the gradients ---


class NoiseScale:
    """Estimator of the gradient noise scale. Workers that are given the same numbers get the same value."""

    def __init__(self, alpha: float = NOISE_ALPHA) -> None:
        self._sqr, self._var = Ema(alpha, warm=True), Ema(alpha, warm=True)

    def update(self, small: float, big: float, batch: float, replicas: int) -> None:
        """Add one step's gradients. Steps that say nothing (one replica, an overflow) are ignored.

        Args:
            small: the mean over the replicas of |g_r|^2.
            big: |mean of g_r|^2.
            batch: samples in each replica's batch.
        """
        if replicas < 2 or batch <= 0 or not (math.isfinite(small) and math.isfinite(big)):
            return
        whole = batch * replicas
        self._sqr.update((whole * big - batch * small) / (whole - batch))
        self._var.update((small - big) / (1 / batch - 1 / whole))

    @property
    def count(self) -> int:
        """Number of measurements so far."""
        return self._sqr.count

    @property
    def gradient_sqr(self) -> float | None:
        """|G|^2. It may be negative where noise hides the gradient."""
        return self._sqr.value

    @property
    def gradient_var(self) -> float | None:
        """S: the variance of one sample's gradient, summed over all elements."""
        return self._var.value

    @property
    def ratio(self) -> float | None:
        """S / |G|^2 with its sign; None if it is not known."""
        sqr, var = self.gradient_sqr, self.gradient_var
        if sqr is None or var is None or sqr == 0:
            return None
        found = var / sqr
        return found if math.isfinite(found) else None

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None if it is not known yet, or if noise hides the gradient altogether."""
        found = self.ratio
        return found if found is not None and found >= 0 else None

    def state_dict(self) -> dict[str, Any]:
        return {"sqr": [self._sqr.value, self._sqr.count], "var": [self._var.value, self._var.count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sqr.value, self._sqr.count = state["sqr"]
        self._var.value, self._var.count = state["var"]


class Variance:
    """Variance of the gradients between replicas: the sum over variables of the L2 norm of var_r(g_r)."""

    def __init__(self) -> None:
        self.value: float | None = None

    def update(self, norms: Sequence[float]) -> None:
        """Set the value from the norms of the variables' variances, or sums of several. An overflow is ignored."""
        found = math.fsum(norms)
        if math.isfinite(found):
            self.value = found

    def state_dict(self) -> dict[str, float | None]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.value = state["value"]


def gain(scale: float, var: float, sqr: float) -> float:
    """Return AdaScale's gain: the number of steps that one step with a batch s times as large replaces.

    It is (var + sqr) / (var/s + sqr), between 1 and s for s >= 1. `var` and `sqr` are those of the batch with s = 1.

    Raises:
        ConfigError: the scale is not above 0, or the gradient is 0.
    """
    if not scale > 0 or var < 0 or sqr < 0 or var + sqr <= 0:
        raise ConfigError(f"gain(scale={scale}, var={var}, sqr={sqr}): use a scale above 0 and a gradient above 0")
    return (var + sqr) / (var / scale + sqr)


# --- stalls ---

STALL_PERIOD_S = 3.0
STALL_VARIABLES = ("PLIANT_STALL_DETECTION", "KUNGFU_CONFIG_ENABLE_STALL_DETECTION")


def wants_stall_detection(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment turns stall detection on."""
    found = os.environ if environ is None else environ
    return any(found.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in STALL_VARIABLES)


class StallDetector:
    """Reports operations that take suspiciously long, while they still run.

        with stalls.watch("all-reduce"):
            handle.wait()

    A thread looks every few seconds. Any thread may watch operations. Close it, or use it in `with`.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        period_s: float = STALL_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        """Number of stalls so far."""
        self._report, self._period_s, self._clock = report, period_s, clock
        self._open: dict[int, tuple[str, float]] = {}
        """The operations being watched: name, and time of the beginning."""
        self._reported: set[int] = set()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Report the block if it takes long."""
        number, since_s = next(self._numbers), self._clock()
        self._open[number] = (name, since_s)
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
                if number in self._reported:
                    self._reported.discard(number)
                    self._report(f"{name} recovered after {self._clock() - since_s:.1f}s")

    @property
    def stalled_s(self) -> float:
        """Duration of the longest stall that is going on now; 0 if there is none."""
        now_s = self._clock()
        with self._lock:
            return max((now_s - self._open[number][1] for number in self._reported), default=0.0)

    def look(self) -> None:
        """Report the operations that have taken long by now."""
        now_s = self._clock()
        with self._lock:
            for number, (name, since_s) in self._open.copy().items():
                if now_s - since_s >= self._period_s:
                    self.count += number not in self._reported
                    self._reported.add(number)
                    self._report(f"{name} stalled for {now_s - since_s:.1f}s")

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            self.look()

    def __enter__(self) -> StallDetector:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()
