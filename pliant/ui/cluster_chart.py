"""The devices of a cluster over time: which job had which, from the events of its jobs, and as a chart. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pliant.ui.charts import COLOURS, Options, frame, line
from pliant.ui.jobs import ClusterEvent

ENDS = frozenset({"finished", "failed", "stopped", "put-off"})
"""Events after which a job has no devices."""
GIVES = frozenset({"running", "starting"})
"""Events that say what it has."""
CHANGES = frozenset({"decision", "fallback"})
"""Events that say what a job that runs is to have from now on."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A job had so many devices, all types together, for a time."""

    job: str
    begin_s: float
    end_s: float | None
    """None: until now."""
    devices: int
    what: str
    """Such as `cpu=2,t4=1`."""


def device_uses(cluster_events: Iterable[ClusterEvent]) -> list[DeviceUse]:
    """The device_uses of all jobs, by their beginning."""
    found: list[DeviceUse] = []
    now: dict[str, tuple[float, dict[str, int]]] = {}
    for each in sorted(cluster_events, key=lambda each: each.at_s):
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
            found.append(_device_use(each.job, had[0], each.at_s, had[1]))
            del now[each.job]
        if has:
            now[each.job] = (each.at_s, has)
    found += [_device_use(job, begin_s, None, devices) for job, (begin_s, devices) in now.items()]
    return sorted(found, key=lambda stay: (stay.begin_s, stay.job))


def devices_by_job(found: Iterable[DeviceUse], now_s: float) -> dict[str, list[tuple[float, int]]]:
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


def in_use(found: Sequence[DeviceUse], now_s: float, parts: int) -> list[tuple[float, int]]:
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


def _device_use(job: str, begin_s: float, end_s: float | None, devices: Mapping[str, int]) -> DeviceUse:
    told = ",".join(f"{kind}={count}" for kind, count in sorted(devices.items()))
    return DeviceUse(job, begin_s, end_s, sum(devices.values()), told)


# --- chart ---


MOST_JOBS = 12
"""Those that had the most; all others are drawn as one."""
MOST_MOMENTS = 600
OTHERS = "all other jobs"


def allocation_chart(device_uses: Sequence[DeviceUse], devices: int, now_s: float) -> Options:
    """The devices of each job over time, on top of each other."""
    options = frame(True, "", "devices")
    options["xAxis"] = {**options["xAxis"], "type": "time", "minInterval": 1000}
    options["yAxis"] |= {"min": 0, "max": max(1, devices), "minInterval": 1}
    options["series"] = [
        {
            **line(job, [(moment * 1000, count) for moment, count in _thinned(points)], COLOURS[number % len(COLOURS)]),
            "step": "end",
            "stack": "devices",
            "areaStyle": {"opacity": 0.45},
        }
        for number, (job, points) in enumerate(devices_by_job(bounded(device_uses), now_s).items())
    ]
    return options


def allocation_description(device_uses: Sequence[DeviceUse], devices: int) -> str:
    """The same in words, for who cannot see it: what is so now."""
    told = ", ".join(f"{stay.job} has {stay.what}" for stay in device_uses if stay.end_s is None)
    return f"{devices} devices; {told or 'no job has any'}"


def bounded(device_uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Those of the jobs that had most, the others as one."""
    had: Counter[str] = Counter()
    for stay in device_uses:
        had[stay.job] += stay.devices
    kept = {job for job, _ in had.most_common(MOST_JOBS)}
    return [stay if stay.job in kept else replace(stay, job=OTHERS) for stay in device_uses]


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Evenly, where they are more than a screen can show: a cluster may run for months."""
    return [*points[: -1 : -(-len(points) // MOST_MOMENTS)], points[-1]]
