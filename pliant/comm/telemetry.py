"""What the engine counts: bytes per peer, and throughput per topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Counters:
    """Payload bytes exchanged with each peer (by its name, host:port) since the engine was opened."""

    egress_bytes: Mapping[str, int]
    ingress_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LaneThroughput:
    """What one topology of the strategy has carried since the last look."""

    num_bytes: int
    busy_s: float
    """From the first beginning to the last end."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a connection's other end has acknowledged, and for how long something was on its way to where there was room."""

    num_bytes: int
    busy_s: float

    def rate_since(self, earlier: Delivered) -> float:
        """Bytes per second of the time that something was on its way; 0 if nothing was."""
        busy_s = self.busy_s - earlier.busy_s
        return (self.num_bytes - earlier.num_bytes) / busy_s if busy_s > 0 else 0.0


Watcher = Callable[[str, str, int, int, float, float], None]
"""Told of slices: what happened (push, reply, back), the collective's name, the slice, the peer, from when to when."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What went out while the network was the limit."""

    num_bytes: int
    seconds: float

    def rate_since(self, earlier: Pressure) -> float:
        """Bytes per second since then; 0 if the network was never the limit."""
        seconds = self.seconds - earlier.seconds
        return (self.num_bytes - earlier.num_bytes) / seconds if seconds > 0 else 0.0


class PressureGauge:
    """Adds up the times in which some link had more to send than the kernel would take.

    Counted from the moment that the kernel's queue is full to the moment that ours is empty: it is full at both, so
    what was handed over meanwhile is what has left.
    """

    def __init__(self) -> None:
        self._num_bytes, self._seconds = 0, 0.0
        self._since: tuple[int, float] | None = None
        """Bytes sent, and the time, when the present interval began."""

    def note(self, pressed: bool, sent_bytes: int, now_s: float) -> None:
        """`sent_bytes` in all have been handed over by now; `pressed` says whether the kernel refuses more."""
        if self._since is not None:
            self._num_bytes += sent_bytes - self._since[0]
            self._seconds += now_s - self._since[1]
        self._since = (sent_bytes, now_s) if pressed else None

    @property
    def pressed(self) -> bool:
        """Whether an interval is open."""
        return self._since is not None

    def forget(self) -> None:
        """A link is gone, and with it what it had sent: the present interval does not count."""
        self._since = None

    @property
    def total(self) -> Pressure:
        """So far; from any thread."""
        return Pressure(self._num_bytes, self._seconds)


class Carried(Protocol):
    """A collective's program, as far as this module cares."""

    @property
    def lane_bytes(self) -> Mapping[int, int]:
        """What it puts on each topology."""


class LaneStats:
    """Adds up what each topology carried. The engine's thread writes; `take` may be called from any.

    Collectives are only counted here, as there are many; the bytes follow when somebody asks.
    """

    def __init__(self) -> None:
        self._counts: dict[Carried, int] = {}
        self._first_s = self._last_s = 0.0

    def add(self, program: Carried, began_s: float, ended_s: float) -> None:
        counts = self._counts
        if not counts or began_s < self._first_s:
            self._first_s = began_s
        self._last_s = ended_s
        counts[program] = counts.get(program, 0) + 1

    def take(self) -> dict[int, LaneThroughput]:
        """The throughput of each topology since the last call."""
        counts, self._counts = self._counts, {}
        lanes: Counter[int] = Counter()
        for program, count in counts.items():
            for lane, num_bytes in program.lane_bytes.items():
                lanes[lane] += count * num_bytes
        busy_s = self._last_s - self._first_s
        return {lane: LaneThroughput(num_bytes, busy_s) for lane, num_bytes in sorted(lanes.items())}
