"""Counters of the engine: bytes per peer, throughput per topology, and how often the network was the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.comm.operations import CompiledPlan


@dataclass(frozen=True, slots=True)
class Counters:
    """Payload bytes exchanged with each peer (by its name, host:port) since the engine was opened."""

    egress_bytes: Mapping[str, int]
    ingress_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LaneThroughput:
    """Bytes that one topology of the strategy has carried since the last call."""

    num_bytes: int
    busy_s: float
    """Time from the first beginning to the last end."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TimedBytes:
    """A count of bytes sent, and of the seconds in which they were sent."""

    num_bytes: int
    seconds: float

    def rate_since(self, earlier: TimedBytes) -> float:
        """Return bytes per second since `earlier`; 0 if no time was counted."""
        seconds = self.seconds - earlier.seconds
        return (self.num_bytes - earlier.num_bytes) / seconds if seconds > 0 else 0.0


SliceWatcher = Callable[[str, str, int, int, float, float], None]
"""Called for slices with the event (push, reply, back), the collective's name, the slice, the peer, begin and end."""


class BackpressureGauge:
    """Adds up the times in which some link had more to send than the kernel would take.

    An interval lasts from the moment at which the kernel's queue is full to the moment at which ours is empty. The
    kernel's queue is full at both, so what was handed over in between is what has left.
    """

    def __init__(self) -> None:
        self._num_bytes, self._seconds = 0, 0.0
        self._since: tuple[int, float] | None = None
        """Bytes sent, and the time, when the present interval began."""

    def update(self, limited: bool, sent_bytes: int, now_s: float) -> None:
        """Note that `sent_bytes` were handed over in total; `limited` says whether the kernel refuses more."""
        if self._since is not None:
            self._num_bytes += sent_bytes - self._since[0]
            self._seconds += now_s - self._since[1]
        self._since = (sent_bytes, now_s) if limited else None

    @property
    def in_interval(self) -> bool:
        return self._since is not None

    def drop_interval(self) -> None:
        """Discard the present interval: a link is gone, and with it the count of what it had sent."""
        self._since = None

    @property
    def total(self) -> TimedBytes:
        """The sum of all intervals so far; any thread may read it."""
        return TimedBytes(self._num_bytes, self._seconds)


class LaneStats:
    """Adds up what each topology carried. The engine's thread writes; any thread may call `take`.

    Collectives are only counted here, because there are many; `take` computes the bytes.
    """

    def __init__(self) -> None:
        self._counts: dict[CompiledPlan, int] = {}
        self._first_s = self._last_s = 0.0

    def add(self, compiled: CompiledPlan, began_s: float, ended_s: float) -> None:
        counts = self._counts
        if not counts or began_s < self._first_s:
            self._first_s = began_s
        self._last_s = ended_s
        counts[compiled] = counts.get(compiled, 0) + 1

    def take(self) -> dict[int, LaneThroughput]:
        """Return the throughput of each topology since the last call."""
        counts, self._counts = self._counts, {}
        lanes: Counter[int] = Counter()
        for compiled, count in counts.items():
            for lane, num_bytes in compiled.lane_bytes.items():
                lanes[lane] += count * num_bytes
        busy_s = self._last_s - self._first_s
        return {lane: LaneThroughput(num_bytes, busy_s) for lane, num_bytes in sorted(lanes.items())}
