"""A chart of a cluster: who had its devices when, as options of Apache ECharts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pliant.ui.allocation import Stay, used
from pliant.ui.frames import COLOURS, Options, frame, line

MOST_JOBS = 12
"""Those that had the most; all others are drawn as one."""
MOST_MOMENTS = 600
OTHERS = "all other jobs"


def allocation(stays: Sequence[Stay], devices: int, now_s: float) -> Options:
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
        for number, (job, points) in enumerate(used(bounded(stays), now_s).items())
    ]
    return options


def spoken(stays: Sequence[Stay], devices: int) -> str:
    """The same in words, for who cannot see it: what is so now."""
    told = ", ".join(f"{stay.job} has {stay.what}" for stay in stays if stay.end_s is None)
    return f"{devices} devices; {told or 'no job has any'}"


def bounded(stays: Sequence[Stay]) -> list[Stay]:
    """Those of the jobs that had most, the others as one."""
    had: Counter[str] = Counter()
    for stay in stays:
        had[stay.job] += stay.devices
    kept = {job for job, _ in had.most_common(MOST_JOBS)}
    return [stay if stay.job in kept else replace(stay, job=OTHERS) for stay in stays]


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Evenly, where they are more than a screen can show: a cluster may run for months."""
    return [*points[: -1 : -(-len(points) // MOST_MOMENTS)], points[-1]]
