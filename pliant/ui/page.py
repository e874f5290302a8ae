"""The page: the list of jobs with the cluster, the head that all pages have, and the way to each job."""

from __future__ import annotations

import html
import time

from nicegui import ui

from pliant.ui import charts_cluster, pieces
from pliant.ui.acting import Acting
from pliant.ui.allocation import stays
from pliant.ui.job_page import DRAW_S, JobPage
from pliant.ui.jobs import Job
from pliant.ui.look import CSS
from pliant.ui.pieces import ChartCard, HtmlCard
from pliant.ui.seen import Cluster, Seen
from pliant.ui.watch import Watch

ORDER = ("running", "starting", "put-off", "waiting", "silent", "failed")
"""In the list, what needs eyes comes first."""
MOST_ROWS = 100
"""Each is sent again when any of them changes: the others are a click away."""


def lay_out(watch: Watch, acting: Acting) -> None:
    """Register the pages with NiceGUI, of which there is one in a process."""

    @ui.page("/", title="pliant")
    def index() -> None:
        _dress("jobs")
        Index(watch, None if "all" in ui.context.client.request.query_params else MOST_ROWS).open()

    @ui.page("/job/{key}", title="pliant")
    def one(key: str) -> None:
        job = watch.seen.jobs.get(key)
        if job is None:
            _dress("no such job")
            ui.html('<p>No such job is known here yet. <a href="/" class="cool">All jobs</a></p>', sanitize=False)
            # After a restart of the page, jobs are found one by one.
            ui.timer(DRAW_S, lambda: ui.navigate.reload() if key in watch.seen.jobs else None)
            return
        ui.page_title(f"{job.name} · pliant")
        _dress(job.name)
        JobPage(job, watch, acting).open()


class Index:
    """All jobs, and the cluster."""

    def __init__(self, watch: Watch, most: int | None) -> None:
        self._watch, self._most = watch, most
        self._drawn: tuple[float, ...] = ()

    def open(self) -> None:
        self._jobs = ui.html("", sanitize=False).style("width: 100%").mark("jobs")
        with ui.element("div").classes("grid"):
            self._cluster = ChartCard("Devices of the cluster by job", wide=True, mark="cluster")
            self._decided = HtmlCard("What the cluster has decided", wide=True)
        self.draw()
        ui.timer(DRAW_S, self.draw)

    def draw(self) -> None:
        seen, now_s = self._watch.seen, time.time()
        with self._watch.lock:
            content = job_list(seen, now_s, self._most)
        if self._jobs.content != content:
            self._jobs.set_content(content)
        version = (round(now_s, -1), len(seen.clusters), *(len(job.happenings) for job in list(seen.jobs.values())))
        if version != self._drawn:
            self._drawn = version
            # Of the first cluster; there is hardly ever a second.
            self._draw_cluster(next((each for each in list(seen.clusters.values()) if each.status), None), now_s)

    def _draw_cluster(self, cluster: Cluster | None, now_s: float) -> None:
        if cluster is None or cluster.status is None:
            self._cluster.show(None)
            self._decided.show("")
            return
        jobs = [self._watch.seen.jobs[key] for key in cluster.jobs if key in self._watch.seen.jobs]
        happenings = [happening for job in jobs for happening in job.happenings]
        found, status = stays(happenings), cluster.status
        free = ", ".join(f"{status.free.get(kind, 0)} of {count} {kind} free" for kind, count in status.devices.items())
        reserved = ", ".join(f"{count} {kind}" for kind, count in status.reserved.items() if count)
        devices = sum(status.devices.values())
        self._cluster.show(
            charts_cluster.allocation(found, devices, now_s),
            charts_cluster.spoken(found, devices),
            note=free + (f"; reserved: {reserved}" if reserved else ""),
        )
        self._decided.show(pieces.decision_list(happenings))


def _dress(where: str) -> None:
    """What all pages have: the look, the head, the switch between dark and light."""
    ui.add_css(CSS)
    # The choice is kept by the browser; without one, the system's counts.
    request = ui.context.client.request
    chosen = request.query_params.get("theme") or request.cookies.get("pliant_theme")
    dark = ui.dark_mode(True if chosen == "dark" else False if chosen == "light" else None)

    def switch(value: bool | None, name: str) -> None:
        dark.value = value
        ui.run_javascript(f"document.cookie = 'pliant_theme={name}; path=/; max-age=31536000; samesite=strict'")

    with ui.header().style("align-items: center; flex-wrap: nowrap; padding: 6px 16px; gap: 12px"):
        ui.html('<a class="brand" href="/" aria-label="pliant: all jobs">pliant</a>', sanitize=False)
        ui.html(f'<h1 class="crumb">{html.escape(where)}</h1>', sanitize=False).style("flex: 1; min-width: 0")
        with ui.button(icon="contrast").props("flat round dense color=grey aria-label=Theme").mark("theme"), ui.menu():
            ui.menu_item("Dark", lambda: switch(True, "dark"))
            ui.menu_item("Light", lambda: switch(False, "light"))
            ui.menu_item("As the system", lambda: switch(None, "auto"))


def job_list(seen: Seen, now_s: float, most: int | None = None) -> str:
    """All jobs, or the first so many, as HTML; before them, what cannot be looked at."""

    def place(job: Job) -> tuple[int, float]:
        state = job.state(now_s)
        return (ORDER.index(state) if state in ORDER else len(ORDER), -(job.started_s or 0.0))

    jobs = sorted(seen.jobs.values(), key=place)
    rows = "".join(pieces.job_row(job, now_s) for job in jobs[:most])
    told = "".join(f'<p class="warn">{html.escape(text)}</p>' for text in list(seen.problems.values()))
    if not rows:
        return (
            f"{told}<p>No jobs yet. <code>pliant run -w --record run.jsonl train.py</code> starts one; "
            "<code>pliant dash FOLDER</code> shows those of before.</p>"
        )
    left = len(jobs) - len(jobs[:most])
    more = f'<p><a class="cool" href="/?all">All {len(jobs)} jobs</a></p>' if left else ""
    return f'{told}<ul class="jobs" aria-label="Jobs">{rows}</ul>{more}'
