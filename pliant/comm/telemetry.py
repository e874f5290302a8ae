"""What the engine counts: bytes per peer, and throughput per topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
