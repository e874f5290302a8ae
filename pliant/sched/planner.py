"""Planner: assigns the N replicas of a job to devices of several types, and proposes which devices to ask for next. Pure.

This is EasyScale's model (SC'23, section 4; `waste`, `perf`, `inc_perf` as in its artifact). A device of type i computes
C_i replica-steps per second and hosts A_i replicas, which take turns. A global step lasts as long as on the slowest
device: f = max A_i/C_i. Speed that is not used for the N replicas is waste, and perf = sum(C) - waste = N/f, in
replica-steps per second. Summing gradients is not counted; the scheduler falls back if a measurement contradicts
(`devices_to_keep`).

All devices of a type host equally many replicas. This loses nothing: for a given f each device of a type has room for
the same floor(f*C_i) replicas. The best f is found by repeatedly giving one more replica to every device of the type that
is then the least late. These f only grow, so the first one with room for N replicas is the smallest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pliant.errors import ConfigError

MAX_WASTE = 0.30
"""Largest share of the devices' speed that a proposal may waste."""
MAX_GROWTH = 2
"""A proposal has at most this many times the present number of devices."""
Counts = Mapping[str, int]
"""Number of devices by type; types that are not there count as 0."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """One type of device, with the speed that was measured for a job."""

    name: str
    speed: float
    """Replica-steps per second of one executor that has the device to itself."""
    max_executors: int = 1
    """Most processes on one device at once; several help if one process cannot fill the device."""
    interference: float = 1.0
    """Factor of each executor's speed if there are several on a device."""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and self.speed < float("inf")):
            raise ConfigError(f"speed {self.name}={self.speed}: use replica-steps per second, above 0")
        if self.max_executors < 1:
            raise ConfigError(f"executors {self.name}={self.max_executors}: use 1 or more")
        if not 0 < self.interference <= 1:
            raise ConfigError(f"interference {self.name}={self.interference}: use a factor above 0 and at most 1")

    def executor_speed(self, executors: int) -> float:
        return self.speed * (self.interference if executors > 1 else 1.0)


Types = tuple[DeviceType, ...]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Assignment of all replicas to devices. Tuples have one element for each device type of the job."""

    replicas: int
    types: Types
    given: tuple[int, ...]
    """Devices that the job has."""
    used: tuple[int, ...]
    """Devices that have work. Without the others a step would take equally long."""
    executors: tuple[int, ...]
    per_device: tuple[int, ...]
    """A_i: slots for replicas on each used device."""
    overload: float
    """f: seconds of a global step."""

    @property
    def perf(self) -> float:
        """Replica-steps per second."""
        return self.replicas / self.overload

    @property
    def capability(self) -> float:
        """Replica-steps per second of the given devices if none had to wait."""
        return sum(
            count * executors * kind.executor_speed(executors)
            for kind, count, executors in zip(self.types, self.given, self.executors, strict=True)
        )

    @property
    def waste(self) -> float:
        """Unused share of `capability`: waiting for the slowest device, and empty slots.

        Written as its definition, device by device; a test shows that it is 1 - perf/capability.
        """
        unused = 0.0
        slots = 0
        for kind, given, used, executors, hosted in zip(
            self.types, self.given, self.used, self.executors, self.per_device, strict=True
        ):
            unused += given * executors * kind.executor_speed(executors) - used * hosted / self.overload
            slots += used * hosted
        return (unused + (slots - self.replicas) / self.overload) / self.capability

    @property
    def devices(self) -> dict[str, int]:
        """Used devices by type."""
        return {kind.name: count for kind, count in zip(self.types, self.used, strict=True) if count}

    @property
    def idle(self) -> dict[str, int]:
        return {
            kind.name: given - used
            for kind, given, used in zip(self.types, self.given, self.used, strict=True)
            if given > used
        }

    def assignment(self) -> list[tuple[str, int]]:
        """Return every used device with its number of replicas, N in total; empty slots are on the slowest devices."""
        left, places = self.replicas, []
        for kind, used, hosted in zip(self.types, self.used, self.per_device, strict=True):
            for _ in range(used):
                taken = min(hosted, left)
                places.append((kind.name, taken))
                left -= taken
        return places


@lru_cache(maxsize=1 << 18)
def best_plan(replicas: int, types: Types, given: tuple[int, ...]) -> DevicePlan | None:
    """Return the plan with the shortest step; of equals the one with fewer executors, then fewer devices.

    None means that there is no device.
    """
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: use 1 or more")
    if not any(given):
        return None
    choices = [range(1, (kind.max_executors if count else 1) + 1) for kind, count in zip(types, given, strict=True)]
    plans = [_fill(replicas, types, given, executors) for executors in itertools.product(*choices)]
    return min(plans, key=lambda plan: (plan.overload, sum(plan.executors)))


def _fill(replicas: int, types: Types, given: tuple[int, ...], executors: tuple[int, ...]) -> DevicePlan:
    speeds = [kind.executor_speed(number) for kind, number in zip(types, executors, strict=True)]
    turns = [0] * len(types)
    room, overload = 0, 0.0
    there = [index for index, count in enumerate(given) if count]
    if len(there) == 1:
        [index] = there
        turns[index] = -(-replicas // (given[index] * executors[index]))
        room, overload = turns[index] * given[index] * executors[index], turns[index] / speeds[index]
    while room < replicas:
        index = min(there, key=lambda each: (turns[each] + 1) / speeds[each])
        turns[index] += 1
        room += given[index] * executors[index]
        overload = turns[index] / speeds[index]
    hosted = tuple(turn * number for turn, number in zip(turns, executors, strict=True))
    return DevicePlan(
        replicas, types, given, _trim(speeds, given, hosted, room - replicas), executors, hosted, overload
    )


def _trim(speeds: list[float], given: tuple[int, ...], hosted: tuple[int, ...], spare: int) -> tuple[int, ...]:
    """Leave out devices that do not shorten the step, the slowest first."""
    used = [count if places else 0 for count, places in zip(given, hosted, strict=True)]
    for index in sorted(range(len(speeds)), key=lambda each: speeds[each]):
        if used[index]:
            gone = min(used[index], spare // hosted[index])
            used[index] -= gone
            spare -= gone * hosted[index]
    return tuple(used)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal to add devices of one type."""

    kind: str
    more: int
    plan: DevicePlan
    """The plan with the additional devices."""
    speedup: float
    """Speed-up of the job over its present devices; its perf if it has none."""
    per_device: float
    """inc_perf = (speedup - 1)/more + 1, which the scheduler compares between jobs."""


@lru_cache(maxsize=1 << 18)
def proposals(replicas: int, types: Types, held: tuple[int, ...], limits: tuple[int, ...]) -> tuple[Proposal, ...]:
    """Return the best increment of each type within `limits`, the best per device first.

    Of equals, the one with more devices comes first, then the one with less waste. Each proposal is faster than the
    present devices, wastes at most 30 %, and at most doubles the devices. Devices that no longer get a replica are not
    part of its plan: a faster device may replace a slower one. A job without devices starts with one: the proposal with
    the fastest comes first, the one with the slowest last.
    """
    now = best_plan(replicas, types, held)
    found = []
    for index, kind in enumerate(types):
        most = min(limits[index], (MAX_GROWTH - 1) * sum(held) if now else 1, replicas)
        best: Proposal | None = None
        for more in range(1, most + 1):
            proposal = _proposal(replicas, types, held, index, more, now)
            if proposal and (best is None or proposal.plan.overload < best.plan.overload * (1 - 1e-12)):
                best = proposal
        if best is not None and best.kind == kind.name:
            found.append(best)
    return tuple(sorted(found, key=lambda each: (-round(each.per_device, 12), -each.more, each.plan.waste)))


def _proposal(
    replicas: int, types: Types, held: tuple[int, ...], index: int, more: int, now: DevicePlan | None
) -> Proposal | None:
    wanted = tuple(count + more * (place == index) for place, count in enumerate(held))
    with_all = best_plan(replicas, types, wanted)
    assert with_all is not None, "a proposal has devices"
    if with_all.used[index] < wanted[index]:
        return None  # some of the new devices would be idle, so a smaller proposal is equally good
    plan = best_plan(replicas, types, with_all.used)
    assert plan is not None, "trimmed plans keep a device"
    speedup = plan.perf / now.perf if now else plan.perf
    if plan.waste > MAX_WASTE + 1e-12 or (now and speedup <= 1 + 1e-9):
        return None
    return Proposal(types[index].name, more, plan, speedup, (speedup - 1) / more + 1)


def devices_to_keep(before: Counts, before_speed: float, after: Counts, after_speed: float) -> Counts:
    """Return the devices to keep once the throughput on new ones is measured: `before` if those were faster.

    A job that falls back releases what is not in `before`, and remembers `after` so as not to ask for it again.
    """
    return before if after_speed < before_speed else after
