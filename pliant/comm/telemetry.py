"""What the engine counts: bytes per peer, and throughput per topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


class LaneStats:
    """Adds up what each topology carried. The engine's thread writes; `take` may be called from any."""

    def __init__(self) -> None:
        self._lanes: dict[int, list[float]] = {}

    def add(self, lane_bytes: Mapping[int, int], began_s: float, ended_s: float) -> None:
        lanes = self._lanes
        for lane, num_bytes in lane_bytes.items():
            found = lanes.get(lane)
            if found is None:
                lanes[lane] = [num_bytes, began_s, ended_s]
            else:
                found[0] += num_bytes
                found[1] = min(found[1], began_s)
                found[2] = ended_s

    def take(self) -> dict[int, LaneThroughput]:
        """The throughput of each topology since the last call."""
        lanes, self._lanes = self._lanes, {}
        return {lane: LaneThroughput(int(n), last - first) for lane, (n, first, last) in sorted(lanes.items())}
