"""The devices of a cluster over time: which job had which, from the events of its jobs, and as a chart. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pliant.jobs.status import JobEvent, TenantStatus
from pliant.ui.charts import COLOURS, Options, frame, line

ENDS = frozenset({"finished", "failed", "stopped", "put-off"})
"""Events after which a job has no devices."""
GIVES = frozenset({"running", "starting"})
"""Events that carry the present devices of a job."""
CHANGES = frozenset({"decision", "fallback"})
"""Events that carry the devices that a running job has from now on."""
MOST_JOBS = 12
"""The chart shows the jobs with the most devices; all others are drawn as one."""
MOST_MOMENTS = 600
OTHERS = "all other jobs"


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Number of devices that a job had for a time."""

    job: str
    begin_s: float
    end_s: float | None
    """End of the time; None means until now."""
    devices: int
    """Devices of all types together."""
    text: str
    """The devices by type, such as `cpu=2,t4=1`."""


def device_uses(events: Iterable[tuple[str, JobEvent]]) -> list[DeviceUse]:
    """Return the use of devices by all jobs, in the order of the beginnings, from (job, event) pairs."""
    found: list[DeviceUse] = []
    now: dict[str, tuple[float, dict[str, int]]] = {}

    def end_use(job: str, end_s: float | None) -> None:
        begin_s, devices = now.pop(job)
        text = ",".join(f"{kind}={count}" for kind, count in sorted(devices.items()))
        found.append(DeviceUse(job, begin_s, end_s, sum(devices.values()), text))

    for job, event in sorted(events, key=lambda pair: pair[1].at):
        if event.what in ENDS:
            has: dict[str, int] = {}
        elif event.what in GIVES or (event.what in CHANGES and job in now):
            has = {kind: count for kind, count in event.devices.items() if count}
        else:
            continue
        if job in now and now[job][1] != has:
            end_use(job, event.at)
        if has and job not in now:
            now[job] = (event.at, has)
    for job in list(now):
        end_use(job, None)
    return sorted(found, key=lambda use: (use.begin_s, use.job))


def devices_by_job(uses: Iterable[DeviceUse], now_s: float) -> dict[str, list[tuple[float, int]]]:
    """Return each job's number of devices at every moment of a change. All jobs have the same moments, for stacking."""
    changes: dict[str, Counter[float]] = {}
    for use in uses:
        steps = changes.setdefault(use.job, Counter())
        steps[use.begin_s] += use.devices
        if use.end_s is not None:
            steps[use.end_s] -= use.devices
    moments = sorted({moment for steps in changes.values() for moment in steps} | {now_s})
    return {
        job: list(zip(moments, accumulate(steps[moment] for moment in moments), strict=True))
        for job, steps in changes.items()
    }


def devices_in_use(uses: Sequence[DeviceUse], now_s: float, parts: int) -> list[tuple[float, int]]:
    """Return (time, devices of all jobs) at `parts` moments from the first beginning until now."""
    if not uses or parts < 1:
        return []
    begin_s = uses[0].begin_s
    moments = [begin_s + (now_s - begin_s) * (part + 1) / parts for part in range(parts)]
    return [
        (at_s, sum(use.devices for use in uses if use.begin_s <= at_s and (use.end_s is None or at_s < use.end_s)))
        for at_s in moments
    ]


def allocation_chart(uses: Sequence[DeviceUse], devices: int, now_s: float) -> Options:
    """Return a chart of each job's devices over time, stacked."""
    options = frame(True, "", "devices")
    options["xAxis"] = {**options["xAxis"], "type": "time", "minInterval": 1000}
    options["yAxis"] |= {"min": 0, "max": max(1, devices), "minInterval": 1}
    options["series"] = [
        {
            **line(job, [(moment * 1000, count) for moment, count in _thin(points)], COLOURS[number % len(COLOURS)]),
            "step": "end",
            "stack": "devices",
            "areaStyle": {"opacity": 0.45},
        }
        for number, (job, points) in enumerate(devices_by_job(join_small_jobs(uses), now_s).items())
    ]
    return options


def allocation_description(uses: Sequence[DeviceUse], devices: int) -> str:
    """Describe the present use in words, for screen readers."""
    present = ", ".join(f"{use.job} has {use.text}" for use in uses if use.end_s is None)
    return f"{devices} devices; {present or 'no job has any'}"


def tenant_in_words(tenant: TenantStatus) -> str:
    """Return such as `vision: 3 of 2 cpu, 1 borrowed`."""
    parts = []
    for kind in {**tenant.share, **tenant.has}:
        has, share, borrowed = tenant.has.get(kind, 0), tenant.share.get(kind, 0.0), tenant.borrowed.get(kind, 0)
        if has or share:
            parts.append(f"{has} of {share:.3g} {kind}" + (f", {borrowed} borrowed" if borrowed else ""))
    return f"{tenant.name}: {', '.join(parts) or 'nothing'}"


def join_small_jobs(uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Return the uses with all jobs but the largest joined into one."""
    totals: Counter[str] = Counter()
    for use in uses:
        totals[use.job] += use.devices
    kept = {job for job, _ in totals.most_common(MOST_JOBS)}
    return [use if use.job in kept else replace(use, job=OTHERS) for use in uses]


def _thin(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return evenly chosen points if there are more than a screen can show."""
    return [*points[: -1 : -(-len(points) // MOST_MOMENTS)], points[-1]]
