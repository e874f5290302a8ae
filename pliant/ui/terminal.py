"""The screen of `pliant top`: jobs, cluster and one job's timeline, as renderables of rich."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pliant.errors import PliantError
from pliant.jobs.status import ClusterStatus
from pliant.ui.cluster_chart import device_uses, devices_in_use, tenant_in_words
from pliant.ui.jobs import DashboardState, ShownCluster, ShownJob, strip_controls
from pliant.ui.timeline import (
    FederatedTimeline,
    MeasuredLinks,
    Series,
    TimelineEvent,
    ViewWorkers,
    clients_text,
)
from pliant.ui.topology_chart import rate_text

BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "running": "green",
    "starting": "green",
    "put-off": "yellow",
    "interrupted": "yellow",
    "silent": "yellow",
    "failed": "red",
}
EVENT_STYLES = {
    "lost": "red",
    "decision": "magenta",
    "resize": "green",
    "refused": "yellow",
    "stalled": "yellow",
    "resumed": "cyan",
}
FIGURES = {
    "samples/s": "samples_per_s",
    "workers": "workers",
    "global batch": "batch_size",
    "noise scale": "noise_scale",
}
"""Figures of a timeline that are shown, by name."""
NEWS = 6
LOG_LINES = 5
MOST_JOBS = 20


def screen(known: DashboardState, now_s: float, width: int, wanted: str = "", height: int = 0) -> RenderableType:
    """Return a screen with all jobs, the cluster, and details of the wanted or first job. Height 0 means any."""
    jobs = sorted_jobs(known, now_s)
    chosen = next(
        (job for job in jobs if wanted and wanted in (job.name, job.key)), None if wanted else next(iter(jobs), None)
    )
    most = MOST_JOBS if not height else max(3, min(MOST_JOBS, height // 3))
    parts: list[RenderableType] = [_table(jobs, now_s, most, chosen)]
    for cluster in list(known.clusters.values()):
        if cluster.status is not None:
            parts += _devices(cluster, cluster.status, known, now_s, width)
    parts += [Text(text, "yellow") for text in list(known.problems.values())]
    if chosen is not None:
        parts.append(_job_panel(chosen, now_s, width, logged=LOG_LINES if not height or height >= 30 else 0))
    elif wanted:
        parts.append(Text(f"no job is called {wanted} yet", "yellow"))
    if not jobs:
        parts = [Text("no jobs yet; `pliant run -w --record run.jsonl train.py` starts one", "dim"), *parts[1:]]
    return Group(*parts)


def sorted_jobs(known: DashboardState, now_s: float) -> list[ShownJob]:
    """Return all jobs in the order of the table: running ones first, then the newest."""
    return sorted(known.jobs.values(), key=lambda job: (job.state(now_s) != "running", -(job.started_s or 0.0)))


def neighbour(known: DashboardState, now_s: float, wanted: str, step: int) -> str:
    """Return the key of the job `step` lines below the wanted one, or at the end of the table."""
    jobs = sorted_jobs(known, now_s)
    place = next((number for number, job in enumerate(jobs) if wanted in (job.name, job.key)), 0)
    return jobs[min(max(place + step, 0), len(jobs) - 1)].key if jobs else ""


def bars(series: Series, width: int) -> str:
    """Return a curve as a line of bars."""
    points = [y for _, y in series.mean(max(1, width))]
    low, high = min(points, default=0.0), max(points, default=0.0)
    reach = (high - low) or 1.0
    return "".join(BARS[min(7, math.floor(8 * (y - low) / reach))] for y in points)


def _table(jobs: Sequence[ShownJob], now_s: float, most: int, chosen: ShownJob | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("JOB", "STATE", "STEP", "WORKERS", "SPEED", "VALUE", "AGE"):
        right = name in ("STEP", "WORKERS", "SPEED", "VALUE", "AGE")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    # The chosen job stays visible.
    first = max(0, jobs.index(chosen) - most + 1) if chosen is not None else 0
    for job in jobs[first : first + most]:
        state = job.state(now_s)
        table.add_row(
            Text(strip_controls(job.name), "reverse" if job is chosen and len(jobs) > 1 else ""),
            Text(state, STATE_STYLES.get(state, "dim")),
            *(Text(cell) for cell in _figures(job)),
            job.age(now_s),
        )
    if len(jobs) > most:
        table.add_row(Text(f"and {len(jobs) - most} more", "dim"))
    return table


def _figures(job: ShownJob) -> tuple[str, str, str, str]:
    timeline = job.timeline
    if (fed := timeline.federated) is not None:
        best = "-" if fed.best is None else f"{fed.best:.2f} %"
        return f"{fed.rounds} rounds", "-", f"{fed.clock_s / 3600:.2f} h", best
    name, series = next(iter(timeline.values.items()), ("", Series()))
    value = "-" if series.last is None else strip_controls(f"{name} {series.last:.4g}")
    step = "-" if job.step is None else str(job.step)
    speed = "-" if timeline.speed is None else f"{timeline.speed:,.0f}/s"
    return step, job.devices or str(job.num_workers or "-"), speed, value


def _job_panel(job: ShownJob, now_s: float, width: int, logged: int) -> Panel:
    timeline, room = job.timeline, max(10, width - 34)
    lines = Table.grid(padding=(0, 1))
    lines.add_column(width=14, no_wrap=True, overflow="ellipsis", style="dim")
    lines.add_column(width=room, no_wrap=True)
    lines.add_column(justify="right", no_wrap=True)
    curves = dict(list(timeline.values.items())[:4])
    curves |= {name: timeline.figures[figure] for name, figure in FIGURES.items() if figure in timeline.figures}
    if timeline.federated is not None:
        told = timeline.federated
        curves |= {"accuracy in %": told.accuracy, "loss": told.loss, "round in s": told.duration_s}
    for (name, series), style in zip(curves.items(), ("blue", "green", "cyan", "magenta") * 3, strict=False):
        if series.last is not None:
            lines.add_row(Text(strip_controls(name)), Text(bars(series, room), style), f"{series.last:,.4g}")
    parts: list[RenderableType] = [lines]
    if job.why:
        parts.append(Text(strip_controls(job.why), "dim"))
    if timeline.views:
        parts.append(_view_line(timeline.views[-1], width))
    elif job.members:
        parts.append(_view_line(ViewWorkers(0, job.members, 0), width))
    if timeline.links is not None:
        parts.append(_links(timeline.links))
    if facts := timeline.facts:
        parts.append(_figure_table(facts))
    if timeline.federated is not None and timeline.federated.recent:
        parts.append(_picked(timeline.federated))
    parts += [_event(event, timeline.unit) for event in job.events[-NEWS:]]
    parts += [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in _log(job, logged)]
    return Panel(
        Group(*parts),
        title=Text(strip_controls(f"{job.name}: {job.state(now_s)}")),
        title_align="left",
        border_style="dim",
    )


def _view_line(view: ViewWorkers, width: int) -> Text:
    """Return the number of workers of each host."""
    hosts: dict[str, int] = {}
    for name in view.workers:
        host = name.rpartition(":")[0] or "here"
        hosts[host] = hosts.get(host, 0) + 1
    told = "  ".join(f"{host} {'■' * count if count <= 8 else f'■×{count}'}" for host, count in hosts.items())
    replicas = f"{view.replicas} replicas on " if view.replicas else ""
    shown = strip_controls(f"{replicas}{told}  ({view.strategy or 'AUTO'})" if replicas else told)
    text = Text(shown, no_wrap=True, overflow="ellipsis")
    text.truncate(max(20, width - 4), overflow="ellipsis")
    return text


def _event(event: TimelineEvent, unit: str) -> Text:
    told = Text(f"{_clock(event.time_s)} {'' if event.step is None else f'{unit} {event.step}':<12} ", "dim")
    told.append(strip_controls(event.what), EVENT_STYLES.get(event.kind, ""))
    told.append(strip_controls(f"  {event.why}") if event.why else "", "dim")
    if event.kind != "stalled":  # its stack says what to repair
        told.no_wrap, told.overflow = True, "ellipsis"
    return told


def _links(links: MeasuredLinks) -> Text:
    """Return the slowest and the fastest link between hosts."""
    rates = [
        (rate, f"{links.hosts[source]} → {links.hosts[target]}")
        for source, row in enumerate(links.bytes_per_s)
        for target, rate in enumerate(row)
        if source != target and rate
    ]
    if not rates:
        return Text("links: none measured", "dim")
    (slow, slowest), (fast, fastest) = min(rates), max(rates)
    told = f"links at step {links.step}: slowest {rate_text(slow)} ({slowest}), fastest {rate_text(fast)} ({fastest})"
    return Text(strip_controls(told), no_wrap=True, overflow="ellipsis")


def _picked(fed: FederatedTimeline) -> Text:
    """Return the clients of the newest round."""
    number = max(fed.recent)
    newest = fed.recent[number]
    counts = f"{len(newest.aggregated)} aggregated, {len(newest.cut)} cut, {len(newest.lost)} lost"
    text = f"round {number}: {counts}: {clients_text(newest.invited)}"
    return Text(text, no_wrap=True, overflow="ellipsis")


def _figure_table(facts: Sequence[tuple[str, str]]) -> Table:
    """Return figures that are sentences, with their names."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in facts:
        table.add_row(Text(name), Text(strip_controls(text)))
    return table


def _log(job: ShownJob, most: int) -> list[str]:
    """Read and return the newest lines of the first log."""
    log = next(iter(job.logs.values()), None)
    if log is None or not most:
        return []
    try:
        log.poll()
    except PliantError as error:
        return [str(error)]
    return [strip_controls(line).expandtabs() for line in islice(reversed(log.text), most)][::-1]


def _devices(
    cluster: ShownCluster, status: ClusterStatus, known: DashboardState, now_s: float, width: int
) -> list[RenderableType]:
    """Return the devices of a cluster by job, and how many were in use until now."""
    told = Text(no_wrap=True, overflow="ellipsis")
    for kind, count in status.devices.items():
        told.append(f"{kind} ", "bold")
        for place, (job, devices) in enumerate(status.jobs.items()):
            if devices.get(kind):
                told.append(f"{'■' * min(devices[kind], 16)} {job} ", ("blue", "green", "magenta", "cyan")[place % 4])
        if status.reserved.get(kind):
            told.append(f"{status.reserved[kind]} reserved ", "yellow")
        told.append(f"{status.free.get(kind, 0)} of {count} free  ", "dim")
    lines = [told]
    if status.tenants:
        shares = strip_controls("; ".join(map(tenant_in_words, status.tenants)))
        lines.append(Text(shares, "dim", no_wrap=True, overflow="ellipsis"))
    jobs = [known.jobs[key] for key in cluster.jobs if key in known.jobs]
    events = [(job.name, event) for job in jobs for event in job.cluster_events]
    busy = devices_in_use(device_uses(events), now_s, max(10, width - 40))
    if not busy:
        return [*lines]
    total = max(1, sum(status.devices.values()))
    shown = "".join(BARS[min(7, math.floor(8 * count / total))] for _, count in busy)
    since = _clock(busy[0][0])
    return [*lines, Text(f"devices in use since {since} ", "dim", no_wrap=True).append(shown, "blue")]


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
