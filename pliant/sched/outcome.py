"""What is said of a simulation: completion times, makespan, device-hours, and how many devices were in use when. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.sched.simulate import Outcome

MAX_POINTS = 500
"""Of the series of devices in use."""


def summary(outcome: Outcome) -> dict[str, float | int]:
    """The numbers of one policy. The clock is the trace's: the makespan is the end of the last job."""
    times = sorted(job.jct_s for job in outcome.jobs)
    makespan_s = max(job.ended_s for job in outcome.jobs)
    first_s = min(job.submitted_s for job in outcome.jobs)
    device_s = math.fsum(job.device_s for job in outcome.jobs)
    return {
        "jobs": len(times),
        "jct_mean_s": math.fsum(times) / len(times),
        "jct_median_s": quantile(times, 0.5),
        "jct_p99_s": quantile(times, 0.99),
        "makespan_s": makespan_s,
        "gpu_hours": device_s / 3600,
        "mean_allocated": device_s / (makespan_s - first_s) if makespan_s > first_s else 0.0,
        "max_allocated": max((count for _, count in outcome.allocated), default=0),
        "changes": sum(job.changes for job in outcome.jobs),
        "paused_hours": math.fsum(job.paused_s for job in outcome.jobs) / 3600,
        "waited_mean_s": math.fsum(job.started_s - job.submitted_s for job in outcome.jobs) / len(times),
        "rounds": outcome.rounds,
    }


def quantile(ordered: Sequence[float], part: float) -> float:
    """Between neighbours, linearly."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_use(outcome: Outcome, step_s: float | None = None) -> list[tuple[float, float]]:
    """(start, mean devices in use) of equal steps; without `step_s`, of so many that they can be drawn."""
    end_s = max(job.ended_s for job in outcome.jobs)
    step_s = step_s or max(end_s / MAX_POINTS, 1.0)
    borders = [number * step_s for number in range(1, math.ceil(end_s / step_s))] + [end_s]
    series, before, found = [*outcome.allocated, (math.inf, 0)], 0.0, []
    place, count = 0, 0
    for border in borders:
        area, at = 0.0, before
        while series[place][0] <= border:
            area += count * (series[place][0] - at)
            at, count = series[place]
            place += 1
        area += count * (border - at)
        found.append((before, area / (border - before) if border > before else float(count)))
        before = border
    return found


def rows(outcome: Outcome) -> list[dict[str, float | int | str]]:
    """A row for each job, in the order of their ends."""
    return [
        {
            "name": job.name,
            "replicas": job.replicas,
            "submitted_s": job.submitted_s,
            "started_s": job.started_s,
            "ended_s": job.ended_s,
            "jct_s": job.jct_s,
            "device_s": job.device_s,
            "changes": job.changes,
            "paused_s": job.paused_s,
        }
        for job in outcome.jobs
    ]
