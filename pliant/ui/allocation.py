"""Who had which devices of a cluster, and when: from what its server tells of its jobs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

ENDS = frozenset({"finished", "failed", "stopped", "put-off"})
"""Events after which a job has no devices."""
GIVES = frozenset({"running", "starting"})
"""Events that say what it has."""
CHANGES = frozenset({"decision", "fallback"})
"""Events that say what a job that runs is to have from now on."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A job had so many devices, all types together, for a time."""

    job: str
    begin_s: float
    end_s: float | None
    """None: until now."""
    devices: int
    what: str
    """Such as `cpu=2,t4=1`."""


@dataclass(frozen=True, slots=True)
class Happening:
    """What was decided about a job, and why."""

    job: str
    at_s: float
    what: str
    why: str
    devices: Mapping[str, int]


def stays(happenings: Iterable[Happening]) -> list[Stay]:
    """The stays of all jobs, by their beginning."""
    found: list[Stay] = []
    now: dict[str, tuple[float, dict[str, int]]] = {}
    for each in sorted(happenings, key=lambda each: each.at_s):
        had = now.get(each.job)
        if each.what in ENDS:
            has: dict[str, int] = {}
        elif each.what in GIVES or (each.what in CHANGES and had is not None):
            has = {kind: count for kind, count in each.devices.items() if count}
        else:
            continue
        if had is not None and had[1] == has:
            continue
        if had is not None:
            found.append(_stay(each.job, had[0], each.at_s, had[1]))
            del now[each.job]
        if has:
            now[each.job] = (each.at_s, has)
    found += [_stay(job, begin_s, None, devices) for job, (begin_s, devices) in now.items()]
    return sorted(found, key=lambda stay: (stay.begin_s, stay.job))


def used(found: Iterable[Stay], now_s: float) -> dict[str, list[tuple[float, int]]]:
    """For each job, its number of devices from each moment on at which anybody's changed. All have the same moments, so
    that they can be drawn on top of each other."""
    changes: dict[str, Counter[float]] = {}
    for stay in found:
        steps = changes.setdefault(stay.job, Counter())
        steps[stay.begin_s] += stay.devices
        if stay.end_s is not None:
            steps[stay.end_s] -= stay.devices
    moments = sorted({moment for steps in changes.values() for moment in steps} | {now_s})
    return {
        job: list(zip(moments, accumulate(steps[moment] for moment in moments), strict=True))
        for job, steps in changes.items()
    }


def in_use(found: Sequence[Stay], now_s: float, parts: int) -> list[tuple[float, int]]:
    """How many devices all jobs together had, at so many moments from the first one's beginning until now."""
    if not found or parts < 1:
        return []
    begin_s = found[0].begin_s
    moments = [begin_s + (now_s - begin_s) * (part + 1) / parts for part in range(parts)]
    return [
        (
            moment,
            sum(
                stay.devices for stay in found if stay.begin_s <= moment and (stay.end_s is None or moment < stay.end_s)
            ),
        )
        for moment in moments
    ]


def _stay(job: str, begin_s: float, end_s: float | None, devices: Mapping[str, int]) -> Stay:
    told = ",".join(f"{kind}={count}" for kind, count in sorted(devices.items()))
    return Stay(job, begin_s, end_s, sum(devices.values()), told)
