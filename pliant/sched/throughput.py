"""How fast a job is on which devices, from the steps that its record has. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pliant.sched.planner import Counts, DeviceType, Types

SKIPPED_STEPS = 2
"""The first steps on new devices are not measured: memory is allocated and connections are made in them."""
MIN_STEPS = 5
"""A speed is the median of at least this many steps."""
KEPT_STEPS = 15

Devices = tuple[tuple[str, int], ...]
"""Devices as a key: sorted items, without zeros."""


def device_key(devices: Counts) -> Devices:
    return tuple(sorted((kind, count) for kind, count in devices.items() if count))


@dataclass(slots=True)
class Throughput:
    """The measured speed of one job on the devices that it has had.

    A step on k devices of one type, each of which hosts up to A = ceil(N/k) replicas, takes A/C seconds. So C, the
    replica-steps per second that the planner uses, is A times the steps per second. C contains the cost of summing as far
    as k devices show it; where that makes more devices slower, `planner.devices_to_keep` says to go back.
    """

    replicas: int
    known: dict[Devices, float] = field(default_factory=dict)
    """Steps per second, as last measured on these devices."""
    _on: Devices = ()
    _seen: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _newest: dict[str, Devices] = field(default_factory=dict)
    """By type: the devices of this type alone that were measured last."""

    def place(self, devices: Counts) -> None:
        """Note that the job has these devices from now on."""
        if device_key(devices) != self._on:
            self._on, self._seen = device_key(devices), 0
            self._recent.clear()

    def add_step(self, workers: int, step_s: float) -> None:
        """Count a step by so many workers; a step from before the last change of devices is ignored."""
        if workers != sum(count for _, count in self._on) or step_s <= 0:
            return
        self._seen += 1
        if self._seen <= SKIPPED_STEPS:
            return
        self._recent.append(step_s)
        if len(self._recent) >= MIN_STEPS:
            self.known[self._on] = 1 / statistics.median(self._recent)
            if len(self._on) == 1:
                self._newest[self._on[0][0]] = self._on

    @property
    def steps_per_s(self) -> float | None:
        """Present speed; None until some steps were done on the present devices."""
        return self.known.get(self._on) if len(self._recent) >= MIN_STEPS else None

    def types(self, kinds: Iterable[str], said: Mapping[str, float]) -> Types:
        """Return the device types with this job's speed on each.

        The speed is the measured one; else the user's (`said`), scaled to what was measured; else that of the other types.
        """
        measured = {
            kind: -(-self.replicas // on[0][1]) * self.known[on] for kind, on in self._newest.items() if on[0][1]
        }
        scales = [measured[kind] / said[kind] for kind in measured if kind in said]
        scale = statistics.median(scales) if scales else 1.0
        fallback = statistics.median(measured.values()) if measured else 1.0
        return tuple(
            DeviceType(kind, measured.get(kind) or (said[kind] * scale if kind in said else fallback)) for kind in kinds
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "known": [[list(map(list, on)), speed] for on, speed in self.known.items()],
            "newest": [list(map(list, on)) for on in self._newest.values()],
        }

    @classmethod
    def from_json(cls, replicas: int, value: Mapping[str, Any]) -> Throughput:
        known = {device_key(dict(map(tuple, on))): float(speed) for on, speed in value["known"]}
        newest = [device_key(dict(map(tuple, on))) for on in value["newest"]]
        return cls(replicas, known, _newest={on[0][0]: on for on in newest})
