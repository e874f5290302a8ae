"""How the sums of a step travel: the sync mode, the size of slices, and how much may be in flight.

The first worker decides and tells the others with every step, so all of them change at the same step. It decides by what
all workers have measured: how long they computed, what they sent, and at which rate the network took it. None of this
changes a bit of the result.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pliant.comm.engine import Engine
from pliant.comm.telemetry import TimedBytes
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.train.deferred import DeferredUpdates
    from pliant.train.gradients import GradientReducer
    from pliant.train.pending import PendingSum


SYNC_MODES = ("fifo", "slicing", "priority", "baseline")
SYNC_OPTIONS = ("fifo", "priority", "auto", "slicing", "baseline")
FIRST_SLICE_BYTES = 128 << 10
FIRST_IN_FLIGHT_BYTES = 192 << 10
MIN_SLICE_BYTES = 16 << 10
MAX_SLICE_BYTES = 1 << 20
MIN_IN_FLIGHT_BYTES = 24 << 10
MAX_IN_FLIGHT_BYTES = 1 << 20
BASELINE_BYTES = 4_000_000
"""The baseline cuts arrays of this size and more, as MXNet does by default."""
SLICE_SHARE = 0.007
"""A slice takes this fraction of a step on the wire: urgent data wait for about one slice. Smaller slices cost
processor time, larger ones delay.
"""
IN_FLIGHT_SHARE = 0.008
SIGNIFICANT = 0.2
"""A rate that differs by this fraction from the tuned one is worth a change."""
USEFUL_R = 0.6
USELESS_R = 0.5
"""`auto` turns priority on when T/C, the time on the wire over the time of compute, reaches USEFUL_R, and off below USELESS_R. Below 0.66 the sums of all layers but
the first can be done before backward is, so there is nothing to win (assuming that backward takes twice as long as forward).
"""
CONFIRMING_STEPS = 3
"""After this many steps without a limit by the network, its rate counts as unknown."""
PROBE_STEPS = 3
"""`auto` measures this many steps before it decides."""
MAX_BYTES = 1 << 30
_WIRE = struct.Struct("<BIIddd")


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """How the sums of one step travel."""

    mode: str = "fifo"
    slice_bytes: int = FIRST_SLICE_BYTES
    in_flight_bytes: int = FIRST_IN_FLIGHT_BYTES


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One worker's measurements of its last step."""

    compute_s: float = 0.0
    """Time spent computing, without waits for the network."""
    sent_bytes: float = 0.0
    """Bytes sent to other hosts."""
    rate: float = 0.0
    """Bytes per second while the network was the limit; 0 if it never was."""


@dataclass(frozen=True, slots=True)
class SyncStats:
    """How sums travel, as shown to the program."""

    mode: str
    waits: int
    """How often a forward, or a barrier, had to wait for the network."""
    waited_s: float
    waited_until_s: float
    """When the last of these waits ended, by time.monotonic()."""
    slice_bytes: int
    in_flight_bytes: int
    rate_bytes_per_s: float
    """The rate of this worker's egress; 0 if the network was never the limit."""
    r: float
    """T/C, the time on the wire divided by the time of compute; 0 if unknown."""


SYNC_BYTES = _WIRE.size


def pack_sync(config: SyncConfig, measured: StepMeasurement) -> bytes:
    return _WIRE.pack(
        SYNC_MODES.index(config.mode),
        config.slice_bytes,
        config.in_flight_bytes,
        measured.compute_s,
        measured.sent_bytes,
        measured.rate,
    )


def unpack_sync(data: bytes) -> tuple[SyncConfig, StepMeasurement]:
    mode, slice_bytes, in_flight_bytes, *figures = _WIRE.unpack(data)
    return SyncConfig(SYNC_MODES[mode], slice_bytes, in_flight_bytes), StepMeasurement(*figures)


def check_sync_options(option: str, slice_bytes: int | None, in_flight_bytes: int | None) -> None:
    """Raise ConfigError for options of `join` that do not exist."""
    if option not in SYNC_OPTIONS:
        raise ConfigError(
            f"sync={option!r}: use 'priority', 'fifo' or 'auto' (or, to compare, {' or '.join(map(repr, SYNC_OPTIONS[3:]))})"
        )
    for name, value, least in (("slice_bytes", slice_bytes, 1024), ("in_flight_bytes", in_flight_bytes, 4096)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_BYTES
        ):
            raise ConfigError(
                f"{name}={value!r}: use {least} to {MAX_BYTES} bytes, or None to have it tuned while running"
            )


class SyncTuner:
    """Chooses the configuration of the next step by what all workers measured in the last steps."""

    def __init__(
        self, option: str, slice_bytes: int | None, in_flight_bytes: int | None, notify: Callable[[str], None]
    ) -> None:
        self._option = option
        self._fixed_slice, self._fixed_in_flight = slice_bytes, in_flight_bytes
        self._notify = notify
        if option == "baseline":
            self._fixed_slice = slice_bytes = slice_bytes or BASELINE_BYTES
        first = SyncConfig("fifo" if option == "auto" else option)
        self.config = replace(
            first,
            slice_bytes=slice_bytes or first.slice_bytes,
            in_flight_bytes=in_flight_bytes or first.in_flight_bytes,
        )
        self.r = 0.0
        self.rate = 0.0
        """The estimated rate of the network."""
        self._tuned_for = 0.0
        """The bytes that the network carries in a step, as of the last tuning."""
        self._in_steps: deque[float] = deque(maxlen=3)
        """The same for each of the last steps."""
        self._outlier_rate = 0.0
        """The rate of the last step, if it was far from the estimate."""
        self._unlimited_steps = 0
        self._steps = 0
        self._notified = ""
        self._decides = True

    @property
    def may_defer(self) -> bool:
        """Whether steps may overlap."""
        return self._option != "fifo"

    def learn(self, steps: Sequence[StepMeasurement], *, decides: bool = True) -> SyncConfig:
        """Learn what all workers measured in a step; return the configuration of the next one.

        Only a worker that `decides` prints what it changes.
        """
        if not any(measured.compute_s for measured in steps):
            return self.config  # a view's first step: nothing was measured
        self._steps += 1
        self._decides = decides
        compute_s = max(measured.compute_s for measured in steps)
        rates = [measured.rate for measured in steps if measured.rate > 0]
        if rates:
            self._update_rate(_common_rate(rates))
        self._unlimited_steps = 0 if rates else self._unlimited_steps + 1
        if self._unlimited_steps >= CONFIRMING_STEPS:
            self.rate = 0.0  # the network has not been the limit for a while: its rate is unknown
        self.r = 0.0
        if self.rate and compute_s > 0:
            self.r = max(measured.sent_bytes for measured in steps) / self.rate / compute_s
            self._tune(compute_s)
        if self._option == "auto" and self._steps >= PROBE_STEPS:
            self._choose_mode()
        return self.config

    def _update_rate(self, rate: float) -> None:
        """Follow slow drifts slowly, and a jump at once when a second step confirms it."""
        if not self.rate or abs(rate / self.rate - 1) <= SIGNIFICANT:
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
            self._outlier_rate = 0.0
        elif self._outlier_rate and (rate > self.rate) == (self._outlier_rate > self.rate):
            self.rate, self._outlier_rate = (rate + self._outlier_rate) / 2, 0.0
        else:
            self._outlier_rate = rate

    def _tune(self, compute_s: float) -> None:
        self._in_steps.append(self.rate * compute_s * max(1.0, self.r))
        in_a_step = statistics.median_low(self._in_steps)  # ignore a single outlier
        if self._tuned_for and abs(in_a_step / self._tuned_for - 1) <= SIGNIFICANT:
            return
        old = self.config
        self._tuned_for = in_a_step
        slice_bytes = self._fixed_slice or _rounded(in_a_step * SLICE_SHARE, MIN_SLICE_BYTES, MAX_SLICE_BYTES)
        in_flight = self._fixed_in_flight or _rounded(
            in_a_step * IN_FLIGHT_SHARE, MIN_IN_FLIGHT_BYTES, MAX_IN_FLIGHT_BYTES
        )
        self.config = replace(old, slice_bytes=slice_bytes, in_flight_bytes=in_flight)
        if self.config != old and old.mode != "fifo" and self._decides:
            self._notify(
                f"sync: slice {old.slice_bytes >> 10} -> {slice_bytes >> 10} KiB, in flight {old.in_flight_bytes >> 10} -> "
                f"{in_flight >> 10} KiB, at an estimated {self.rate * 8e-6:.0f} Mbit/s (sending takes {self.r:.2f} of the compute time)"
            )

    def _choose_mode(self) -> None:
        mode = self.config.mode
        if mode == "fifo" and self.r >= USEFUL_R:
            mode = "priority"
            self._notify_once(
                f"sync: priority from now on: sending takes {self.r:.2f} of the compute time at an estimated {self.rate * 8e-6:.0f} Mbit/s"
            )
        elif self.r < USELESS_R:
            mode = "fifo"
            self._notify_once(
                f"sync: priority would not help here: sending takes {self.r:.2f} of the compute time (it helps from about 0.66 on); using fifo"
            )
        self.config = replace(self.config, mode=mode)

    def _notify_once(self, text: str) -> None:
        kind = text[:40]
        if kind != self._notified and self._decides:  # once, until something else is to be said
            self._notified = kind
            self._notify(text)


def _common_rate(rates: Sequence[float]) -> float:
    """Return what the slowest link carries. A measured rate can only be too low, if a processor was late; so among
    links that seem equal the median is nearer to the truth than the minimum."""
    middle, least = statistics.median(rates), min(rates)
    return middle if least >= (1 - SIGNIFICANT) * middle else least


def _rounded(num_bytes: float, least: int, most: int) -> int:
    """Round to one of a few sizes within bounds: each size that was used leaves its plans in memory."""
    steps = round(2 * math.log2(max(1.0, num_bytes)))
    return int(min(most, max(least, 2 ** (steps / 2)))) >> 10 << 10


class SyncController:
    """Carries out on this worker what the first worker's tuner has chosen."""

    def __init__(self, reducers: Sequence[GradientReducer], deferred: DeferredUpdates, tuner: SyncTuner) -> None:
        """With several reducers the tuner must not defer."""
        self._reducers, self._deferred, self._tuner = reducers, deferred, tuner
        self._now = SyncConfig()
        self._next: SyncConfig | None = None
        self._never_defers = False
        self._in_flight_bytes = 0
        """The limit that the connections were given last."""

    @property
    def proposed(self) -> SyncConfig:
        """The configuration that this worker proposes; that of the first worker counts."""
        return self._tuner.config

    @property
    def may_defer(self) -> bool:
        """Whether steps may overlap."""
        return self._tuner.may_defer

    @property
    def waited_s(self) -> float:
        """How long the program has waited for the network so far."""
        return self._deferred.waits.seconds

    def enter_view(self) -> None:
        self._next = None

    def stop_deferring(self) -> None:
        """Wait for all sums from now on: a step of this program has several passes, and could not be taken back."""
        if self.may_defer and not self._never_defers:
            self._never_defers = True
            self._deferred.warn_once(
                "sync: a step has several passes: all sums are waited for, so priority cannot help"
            )

    def begin_step(self, engine: Engine) -> None:
        """Begin a step. In a view's first step sums travel by buckets, because new workers do not know better, and the
        order in which parameters are used is observed meanwhile."""
        config = self._next if not self._never_defers else None
        if config is None and self._tuner.may_defer and engine.size > 1 and not self._never_defers:
            self._deferred.observe()
        if config is not None and config.in_flight_bytes != self._in_flight_bytes:
            self._in_flight_bytes = config.in_flight_bytes
            engine.limit_kernel_queue(config.in_flight_bytes)
        self._now = config or SyncConfig()
        for reducer in self._reducers:
            reducer.plan_step(self._now, self._deferred.order)

    def apply_decision(self, chosen: SyncConfig, measured: Sequence[StepMeasurement], rank: int) -> None:
        """Follow the first worker's choice. The tuners of the others keep up, because they may be first in the next
        view."""
        self._next = chosen
        self._tuner.learn(measured, decides=rank == 0)
        if rank != 0:
            self._tuner.config = chosen

    def defer_updates(self, awaited: Sequence[PendingSum]) -> None:
        """Let the program go on: each of these sums is applied when its parameter is needed."""
        wanted = {index: place for place, index in enumerate(self._deferred.order)}
        [reducer] = self._reducers
        priorities = [wanted.get(index, len(wanted)) for index in range(len(reducer.parameters))]
        self._deferred.begin(awaited, priorities, reducer)

    def stats(self) -> SyncStats:
        waits, config = self._deferred.waits, self._now
        return SyncStats(
            config.mode,
            waits.count,
            waits.seconds,
            waits.until_s,
            config.slice_bytes,
            config.in_flight_bytes,
            self._tuner.rate,
            self._tuner.r,
        )


@dataclass(slots=True)
class StepTimer:
    """Measures the step in progress; keeps the measurements of the last one."""

    compute_s: float = 0.0
    last: StepMeasurement = field(default_factory=StepMeasurement)
    began_s: float = 0.0
    """When the step in progress began, by time.monotonic()."""
    _turn_began_s: float = 0.0
    _waited_s: float = 0.0
    """Time waited for the network when the turn began."""
    _pressure: TimedBytes = field(default_factory=lambda: TimedBytes(0, 0.0))
    _sent_bytes: int = 0

    @classmethod
    def of(cls, engine: Engine) -> StepTimer:
        """Return a timer for a new view."""
        return cls(_pressure=engine.backpressure(), _sent_bytes=engine.wire_bytes)

    def begin_step(self, engine: Engine) -> None:
        """Start the timer of a step. The step before it has ended."""
        now_s, sent, pressure = time.monotonic(), engine.wire_bytes, engine.backpressure()
        self.last = StepMeasurement(self.compute_s, sent - self._sent_bytes, pressure.rate_since(self._pressure))
        self.began_s, self.compute_s = now_s, 0.0
        self._sent_bytes, self._pressure = sent, pressure

    def begin_turn(self, waited_s: float, began_s: float | None = None) -> None:
        """Begin to compute, now or at a time before; `waited_s` is the total time waited for the network so far."""
        self._turn_began_s, self._waited_s = time.monotonic() if began_s is None else began_s, waited_s

    def end_turn(self, waited_s: float) -> None:
        self.compute_s += max(0.0, time.monotonic() - self._turn_began_s - (waited_s - self._waited_s))
