"""Where the N replicas of a job go on devices of several types, and which devices it should ask for next. Pure.

EasyScale's model (SC'23, section 4; `waste`, `perf`, `inc_perf` by its artifact). A device of type i computes C_i
replica-steps per second and hosts A_i replicas, which take turns; a global step lasts as long as the slowest device:
f = max A_i/C_i. What is not used for the N replicas is waste, and perf = sum(C) - waste = N/f, in replica-steps per second.
Summing gradients is not counted; the scheduler falls back where a measurement says otherwise (`settled`).

Uniform within a type is no loss: whatever f is, each device of a type has room for the same floor(f*C_i) replicas, and f
decides everything. The best f is found by giving, again and again, one more replica to every device of the type that
would then be the least late: these f only grow, so the first one with room for N is the least.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pliant.errors import ConfigError

MAX_WASTE = 0.30
"""Of the devices' speed; a proposal that wastes more is not made."""
MAX_GROWTH = 2
"""A proposal has at most this many times the present devices."""
Counts = Mapping[str, int]
"""How many devices of each type."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """One type of device, as fast as it was measured with this job."""

    name: str
    speed: float
    """Replica-steps per second of one executor that has the device for itself."""
    max_executors: int = 1
    """Processes on one device at once; more than one helps where one alone cannot fill the device."""
    interference: float = 1.0
    """What is left of each executor's speed where there are several."""

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
class Plan:
    """A mapping of all replicas. Tuples go by the types of the job, in its order."""

    replicas: int
    types: Types
    given: tuple[int, ...]
    """Devices there are."""
    used: tuple[int, ...]
    """Devices that have work; the others could go, and the step would last as long."""
    executors: tuple[int, ...]
    per_device: tuple[int, ...]
    """A_i: places for replicas on each device that is used."""
    overload: float
    """f: seconds of a global step."""

    @property
    def perf(self) -> float:
        """Replica-steps per second."""
        return self.replicas / self.overload

    @property
    def capability(self) -> float:
        """What the given devices could do if none had to wait."""
        return sum(
            count * executors * kind.executor_speed(executors)
            for kind, count, executors in zip(self.types, self.given, self.executors, strict=True)
        )

    @property
    def waste(self) -> float:
        """What is not used of `capability`, as a fraction of it: waiting for the slowest, and empty places.

        Written as its definition has it, device by device; that it is 1 - perf/capability is a test.
        """
        unused = 0.0
        places = 0
        for kind, given, used, executors, hosted in zip(
            self.types, self.given, self.used, self.executors, self.per_device, strict=True
        ):
            unused += given * executors * kind.executor_speed(executors) - used * hosted / self.overload
            places += used * hosted
        return (unused + (places - self.replicas) / self.overload) / self.capability

    @property
    def devices(self) -> dict[str, int]:
        """Those that are used."""
        return {kind.name: count for kind, count in zip(self.types, self.used, strict=True) if count}

    @property
    def idle(self) -> dict[str, int]:
        return {
            kind.name: given - used
            for kind, given, used in zip(self.types, self.given, self.used, strict=True)
            if given > used
        }

    def assignment(self) -> list[tuple[str, int]]:
        """Every used device with its number of replicas, exactly N together; empty places are on the slowest devices."""
        left, places = self.replicas, []
        for kind, used, hosted in zip(self.types, self.used, self.per_device, strict=True):
            for _ in range(used):
                taken = min(hosted, left)
                places.append((kind.name, taken))
                left -= taken
        return places


@lru_cache(maxsize=1 << 18)
def best_plan(replicas: int, types: Types, given: tuple[int, ...]) -> Plan | None:
    """The mapping of least overload, hence of most perf; of equals the one with fewer executors, then fewer devices.

    None means that there is no device.
    """
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: use 1 or more")
    if not any(given):
        return None
    choices = [range(1, (kind.max_executors if count else 1) + 1) for kind, count in zip(types, given, strict=True)]
    plans = [_filled(replicas, types, given, executors) for executors in itertools.product(*choices)]
    return min(plans, key=lambda plan: (plan.overload, sum(plan.executors)))


def _filled(replicas: int, types: Types, given: tuple[int, ...], executors: tuple[int, ...]) -> Plan:
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
    return Plan(replicas, types, given, _trimmed(speeds, given, hosted, room - replicas), executors, hosted, overload)


def _trimmed(speeds: list[float], given: tuple[int, ...], hosted: tuple[int, ...], spare: int) -> tuple[int, ...]:
    """Leave out devices that nobody would miss, the slowest first."""
    used = [count if places else 0 for count, places in zip(given, hosted, strict=True)]
    for index in sorted(range(len(speeds)), key=lambda each: speeds[each]):
        if used[index]:
            gone = min(used[index], spare // hosted[index])
            used[index] -= gone
            spare -= gone * hosted[index]
    return tuple(used)


@dataclass(frozen=True, slots=True)
class Proposal:
    """More devices of one type."""

    kind: str
    more: int
    plan: Plan
    """With them."""
    speedup: float
    """Of the job, against the present; against nothing, its perf."""
    per_device: float
    """inc_perf = (speedup - 1)/more + 1: what the scheduler compares between jobs."""


@lru_cache(maxsize=1 << 18)
def proposals(replicas: int, types: Types, held: tuple[int, ...], limits: tuple[int, ...]) -> tuple[Proposal, ...]:
    """The best increment of each type within `limits`, the best per device first; of equals the one with more
    devices, then with less waste.

    Each one is faster than the present, wastes at most 30 %, and at most doubles the devices. Devices that get no
    replica any more are no part of its plan: a faster device may take the place of a slower one.
    A job without devices starts with one: the fastest first, the slowest, the smallest proposal, last.
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
    replicas: int, types: Types, held: tuple[int, ...], index: int, more: int, now: Plan | None
) -> Proposal | None:
    wanted = tuple(count + more * (place == index) for place, count in enumerate(held))
    with_all = best_plan(replicas, types, wanted)
    assert with_all is not None, "a proposal has devices"
    if with_all.used[index] < wanted[index]:
        return None  # some of the new ones would be idle: a smaller proposal says the same
    plan = best_plan(replicas, types, with_all.used)
    assert plan is not None, "trimmed plans keep a device"
    speedup = plan.perf / now.perf if now else plan.perf
    if plan.waste > MAX_WASTE + 1e-12 or (now and speedup <= 1 + 1e-9):
        return None
    return Proposal(types[index].name, more, plan, speedup, (speedup - 1) / more + 1)


def settled(before: Counts, before_speed: float, after: Counts, after_speed: float) -> Counts:
    """The devices to stay on, once the throughput on the new ones is measured: the previous ones where those were faster.

    Whoever falls back releases what is not in `before`, and remembers `after`, so as not to ask for it again.
    """
    return before if after_speed < before_speed else after
