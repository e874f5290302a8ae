"""The same stories for a terminal: what `pliant top` draws, as values of rich."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pliant.dashboard.jobs import Job
from pliant.dashboard.seen import Cluster, Seen
from pliant.dashboard.series import Series
from pliant.launch.duration import span_text

BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "running": "green",
    "starting": "green",
    "put-off": "yellow",
    "interrupted": "yellow",
    "silent": "yellow",
    "failed": "red",
}
EVENT_STYLES = {"lost": "red", "decision": "magenta", "resize": "green", "refused": "yellow", "resumed": "cyan"}
NEWS = 6
MOST_JOBS = 20


def screen(seen: Seen, now_s: float, width: int, wanted: str = "") -> RenderableType:
    """All jobs, the cluster, and more about one: the wanted, or else the first that runs."""
    jobs = sorted(seen.jobs.values(), key=lambda job: (job.state(now_s) != "running", -(job.started_s or 0.0)))
    parts: list[RenderableType] = [_table(jobs, now_s)]
    parts += [_devices(cluster, seen, width) for cluster in list(seen.clusters.values()) if cluster.status is not None]
    parts += [Text(text, "yellow") for text in list(seen.problems.values())]
    chosen = next(
        (job for job in jobs if wanted and wanted in (job.name, job.key)), None if wanted else next(iter(jobs), None)
    )
    if chosen is not None:
        parts.append(_one(chosen, now_s, width))
    if not jobs:
        parts = [Text("no jobs yet; `pliant run -w --record run.jsonl train.py` starts one", "dim"), *parts[1:]]
    return Group(*parts)


def bars(series: Series, width: int) -> str:
    """A curve in one line: the highest bar is the greatest of the means."""
    points = [y for _, y in series.mean(max(1, width))]
    low, high = min(points, default=0.0), max(points, default=0.0)
    reach = (high - low) or 1.0
    return "".join(BARS[min(7, math.floor(8 * (y - low) / reach))] for y in points)


def _table(jobs: Sequence[Job], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("JOB", "STATE", "STEP", "WORKERS", "SPEED", "VALUE", "AGE"):
        right = name in ("STEP", "WORKERS", "SPEED", "VALUE", "AGE")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for job in jobs[:MOST_JOBS]:
        state = job.state(now_s)
        begun_s = job.started_s
        age = "-" if begun_s is None else span_text((now_s if job.control is not None else job.story.last_s) - begun_s)
        table.add_row(
            Text(job.name), Text(state, STATE_STYLES.get(state, "dim")), *(Text(cell) for cell in _figures(job)), age
        )
    if len(jobs) > MOST_JOBS:
        table.add_row(Text(f"and {len(jobs) - MOST_JOBS} more", "dim"))
    return table


def _figures(job: Job) -> tuple[str, str, str, str]:
    story = job.story
    if (told := story.federation) is not None:
        best = "-" if told.best is None else f"{told.best:.2f} %"
        return f"{told.rounds} rounds", "-", f"{told.clock_s / 3600:.2f} h", best
    speed = story.figures["samples_per_s"].last if "samples_per_s" in story.figures else None
    name, series = next(iter(story.values.items()), ("", Series()))
    value = "-" if series.last is None else f"{name} {series.last:.4g}"
    return str(story.step), job.devices or str(job.num_workers or "-"), _speed(speed), value


def _speed(samples_per_s: float | None) -> str:
    return "-" if samples_per_s is None else f"{samples_per_s:,.0f}/s"


def _one(job: Job, now_s: float, width: int) -> Panel:
    story, room = job.story, max(10, width - 34)
    lines = Table.grid(padding=(0, 1))
    lines.add_column(width=14, no_wrap=True, overflow="ellipsis", style="dim")
    lines.add_column(width=room, no_wrap=True)
    lines.add_column(justify="right", no_wrap=True)
    curves = dict(list(story.values.items())[:4])
    curves |= {
        name: story.figures[name] for name in ("samples_per_s", "workers", "noise_scale") if name in story.figures
    }
    if story.federation is not None:
        curves |= {"accuracy in %": story.federation.accuracy, "round in s": story.federation.duration_s}
    for (name, series), style in zip(curves.items(), ("blue", "green", "cyan", "magenta") * 3, strict=False):
        if series.last is not None:
            lines.add_row(Text(name), Text(bars(series, room), style), f"{series.last:,.4g}")
    parts: list[RenderableType] = [lines]
    if story.crews:
        parts.append(_crew(job, width))
    for event in job.events[-NEWS:]:
        told = Text(f"{_clock(event.time_s)} {'' if event.step is None else f'{story.unit} {event.step}':<12} ", "dim")
        told.append(event.what, EVENT_STYLES.get(event.kind, ""))
        told.append(f"  {event.why}" if event.why else "", "dim")
        told.no_wrap, told.overflow = True, "ellipsis"
        parts.append(told)
    return Panel(Group(*parts), title=Text(f"{job.name}: {job.state(now_s)}"), title_align="left", border_style="dim")


def _crew(job: Job, width: int) -> Text:
    """How many workers each host has."""
    crew = job.story.crews[-1]
    hosts: dict[str, int] = {}
    for name in crew.workers:
        host = name.rpartition(":")[0] or "here"
        hosts[host] = hosts.get(host, 0) + 1
    told = "  ".join(f"{host} {'■' * count if count <= 8 else f'■×{count}'}" for host, count in hosts.items())
    text = Text(f"{crew.replicas} replicas on {told}  ({crew.strategy or 'AUTO'})", no_wrap=True, overflow="ellipsis")
    text.truncate(max(20, width - 4), overflow="ellipsis")
    return text


def _devices(cluster: Cluster, seen: Seen, width: int) -> Text:
    """The cluster's devices by who has them."""
    assert cluster.status is not None
    told = Text(no_wrap=True, overflow="ellipsis")
    for kind, count in cluster.status.devices.items():
        told.append(f"{kind} ", "bold")
        for place, (job, devices) in enumerate(cluster.status.jobs.items()):
            if devices.get(kind):
                told.append(f"{'■' * min(devices[kind], 16)} {job} ", ("blue", "green", "magenta", "cyan")[place % 4])
        if cluster.status.reserved.get(kind):
            told.append(f"{cluster.status.reserved[kind]} reserved ", "yellow")
        told.append(f"{cluster.status.free.get(kind, 0)} of {count} free  ", "dim")
    return told


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
