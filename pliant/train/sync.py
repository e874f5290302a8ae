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
    from pliant.train.gradients import GradientCollector
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
"""Arrays of this size and more are cut by the baseline, as MXNet does by default."""

SLICE_SHARE = 0.007
"""A slice takes this part of a step on the wire: what is urgent waits for about one of them. More and smaller ones cost
processor time, fewer and larger ones delay."""

IN_FLIGHT_SHARE = 0.008

SIGNIFICANT = 0.2
"""A rate that differs by this much from the one tuned for is worth a change."""

USEFUL_R = 0.6

USELESS_R = 0.5
"""`auto` takes to priorities when T/C reaches the first, and leaves them below the second. Below 0.66 the sums of all
layers but the first can be done before backward is: there is nothing to win (reference: F:B = 1:2)."""

CONFIRMING_STEPS = 3
"""So many steps in which the network was never the limit mean that it is not."""

PROBE_STEPS = 3
"""So many steps are measured before `auto` says anything."""

MAX_BYTES = 1 << 30

_WIRE = struct.Struct("<BIIddd")


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """How one step's sums travel."""

    mode: str = "fifo"
    slice_bytes: int = FIRST_SLICE_BYTES
    in_flight_bytes: int = FIRST_IN_FLIGHT_BYTES


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One worker's last step."""

    compute_s: float = 0.0
    """Without what it waited for the network."""
    sent_bytes: float = 0.0
    """To other hosts."""
    rate: float = 0.0
    """Bytes per second, while the network was the limit; 0 where it never was."""


@dataclass(frozen=True, slots=True)
class SyncStats:
    """What a program may know of the way its sums travel."""

    mode: str
    waits: int
    """How often a forward, or a barrier, had to wait for the network."""
    waited_s: float
    waited_until_s: float
    """When the last of these waits ended, by time.monotonic()."""
    slice_bytes: int
    in_flight_bytes: int
    rate_bytes_per_s: float
    """Of this worker's egress; 0 if the network was never the limit."""
    r: float
    """T/C: time on the wire by time of compute; 0 if unknown."""


SYNC_BYTES = _WIRE.size


def pack_sync(config: SyncConfig, measured: StepMeasurement) -> bytes:
    """What a worker says with its step."""
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
    """Raises ConfigError where `join` was asked for something that there is not."""
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
    """Decides for the next step from what all workers measured in the last ones."""

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
        """What the network takes, by the steps so far."""
        self._tuned_for = 0.0
        """The bytes that the network would have carried in a step, when sizes were last chosen."""
        self._in_steps: deque[float] = deque(maxlen=3)
        """The same of the last steps."""
        self._outlier_rate = 0.0
        """Of the last step, where it was far from what is known."""
        self._unlimited_steps = 0
        self._steps = 0
        self._notified = ""
        self._decides = True

    @property
    def may_defer(self) -> bool:
        """Whether steps may overlap."""
        return self._option != "fifo"

    def learn(self, steps: Sequence[StepMeasurement], *, decides: bool = True) -> SyncConfig:
        """What all workers measured in a step; the choice for the steps to come.

        Only the one that `decides` has anything to say about it.
        """
        if not any(measured.compute_s for measured in steps):
            return self.config  # a view's first step: nobody has measured anything
        self._steps += 1
        self._decides = decides
        compute_s = max(measured.compute_s for measured in steps)
        rates = [measured.rate for measured in steps if measured.rate > 0]
        if rates:
            self._update_rate(_common_rate(rates))
        self._unlimited_steps = 0 if rates else self._unlimited_steps + 1
        if self._unlimited_steps >= CONFIRMING_STEPS:
            self.rate = 0.0  # the network has not been the limit for a while: nobody knows how fast it is
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
        in_a_step = statistics.median_low(self._in_steps)  # one odd step is no news
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
                f"{in_flight >> 10} KiB, at an estimated {self.rate * 8e-6:.0f} Mbit/s (T/C = {self.r:.2f})"
            )

    def _choose_mode(self) -> None:
        mode = self.config.mode
        if mode == "fifo" and self.r >= USEFUL_R:
            mode = "priority"
            self._notify_once(
                f"sync: priority from now on: T/C = {self.r:.2f} at an estimated {self.rate * 8e-6:.0f} Mbit/s"
            )
        elif self.r < USELESS_R:
            mode = "fifo"
            self._notify_once(
                f"sync: priority would not help here: T/C = {self.r:.2f} (it begins to at about 0.66); using fifo"
            )
        self.config = replace(self.config, mode=mode)

    def _notify_once(self, text: str) -> None:
        kind = text[:40]
        if kind != self._notified and self._decides:  # once, until there is something else to say
            self._notified = kind
            self._notify(text)


def _common_rate(rates: Sequence[float]) -> float:
    """What the slowest line carries. A measured rate can only be too low, where a processor was late to hand something
    over; so among lines that seem alike the middle one is nearer to the truth than the least."""
    middle, least = statistics.median(rates), min(rates)
    return middle if least >= (1 - SIGNIFICANT) * middle else least


def _rounded(num_bytes: float, least: int, most: int) -> int:
    """To one of a few sizes within bounds: each size that was used leaves its plans behind."""
    steps = round(2 * math.log2(max(1.0, num_bytes)))
    return int(min(most, max(least, 2 ** (steps / 2)))) >> 10 << 10


# --- way ---


class SyncController:
    """The way of the step in progress, and of the next one."""

    def __init__(self, gradients: GradientCollector, deferred: DeferredUpdates, tuner: SyncTuner) -> None:
        self._gradients, self._deferred, self._tuner = gradients, deferred, tuner
        self._now = SyncConfig()
        self._next: SyncConfig | None = None
        self._in_flight_bytes = 0
        """What the connections were told last."""

    @property
    def proposed(self) -> SyncConfig:
        """How this worker would have them travel; counts where it is the first."""
        return self._tuner.config

    def enter_view(self) -> None:
        """There is another view."""
        self._next = None

    def begin_step(self, engine: Engine) -> None:
        """In a view's first step by buckets: newcomers know no better, and the order in which parameters are used is
        observed meanwhile."""
        config = self._next
        if config is None and self._tuner.may_defer and engine.size > 1:
            self._deferred.observe()
        if config is not None and config.in_flight_bytes != self._in_flight_bytes:
            self._in_flight_bytes = config.in_flight_bytes
            engine.limit_kernel_queue(config.in_flight_bytes)
        self._now = config or SyncConfig()
        self._gradients.sums.plan_step(self._now, self._deferred.order)

    def apply_decision(self, chosen: SyncConfig, measured: Sequence[StepMeasurement], rank: int) -> None:
        """The first worker has chosen for all. The others keep up with it, for they may be first in the next view."""
        self._next = chosen
        self._tuner.learn(measured, decides=rank == 0)
        if rank != 0:
            self._tuner.config = chosen

    def defer_updates(self, awaited: Sequence[PendingSum]) -> None:
        """These sums are under way: the program goes on, and each is taken in when it is needed."""
        wanted = {index: place for place, index in enumerate(self._deferred.order)}
        priorities = [wanted.get(index, len(wanted)) for index in range(len(self._gradients.parameters))]
        self._deferred.begin(awaited, priorities)

    def stats(self) -> SyncStats:
        """How the sums travel now, and what the network has cost so far."""
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


# --- measuring ---


@dataclass(slots=True)
class StepTimer:
    """The figures of the step in progress, and those of the last one."""

    compute_s: float = 0.0
    last: StepMeasurement = field(default_factory=StepMeasurement)
    began_s: float = 0.0
    """When the step in progress began, by time.monotonic()."""
    _turn_began_s: float = 0.0
    _waited_s: float = 0.0
    """At gates, when the turn began."""
    _pressure: TimedBytes = field(default_factory=lambda: TimedBytes(0, 0.0))
    _sent_bytes: int = 0

    @classmethod
    def of(cls, engine: Engine) -> StepTimer:
        """In a new view, where nobody has done a step yet."""
        return cls(_pressure=engine.backpressure(), _sent_bytes=engine.wire_bytes)

    def begin_step(self, engine: Engine) -> None:
        """Start the timer of a step. The step before it has ended."""
        now_s, sent, pressure = time.monotonic(), engine.wire_bytes, engine.backpressure()
        self.last = StepMeasurement(self.compute_s, sent - self._sent_bytes, pressure.rate_since(self._pressure))
        self.began_s, self.compute_s = now_s, 0.0
        self._sent_bytes, self._pressure = sent, pressure

    def begin_turn(self, waited_s: float) -> None:
        """A replica computes from now on; `waited_s` is what the network has cost so far."""
        self._turn_began_s, self._waited_s = time.monotonic(), waited_s

    def end_turn(self, waited_s: float) -> None:
        self.compute_s += max(0.0, time.monotonic() - self._turn_began_s - (waited_s - self._waited_s))
