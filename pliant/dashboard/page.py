"""The page: the list of jobs with the cluster, and one page for each job, drawn anew as their stories grow."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from itertools import islice

from nicegui import run, ui

from pliant.dashboard import charts, charts_fed, pieces
from pliant.dashboard.acting import Acting
from pliant.dashboard.allocation import stays
from pliant.dashboard.jobs import Job
from pliant.dashboard.pieces import ChartCard, HtmlCard
from pliant.dashboard.seen import Seen
from pliant.dashboard.story import Crew
from pliant.dashboard.topology import picture
from pliant.dashboard.watch import Watch
from pliant.errors import PliantError
from pliant.launch.duration import span_text

DRAW_S = 1.0
LOG_LINES = 400
ORDER = ("running", "starting", "put-off", "waiting", "silent", "failed")
"""In the list, what needs eyes comes first."""
NO_RECORD = "it writes no record that is known here: start it with --record FILE to see its curves"


def lay_out(watch: Watch, acting: Acting) -> None:
    """Register the pages with NiceGUI, of which there is one in a process."""

    @ui.page("/", title="pliant")
    def index() -> None:
        _dress("jobs")
        jobs = ui.html("", sanitize=False).classes("w-full").style("width: 100%").mark("jobs")
        with ui.element("div").classes("grid"):
            cluster = ChartCard("Devices of the cluster by job", wide=True, mark="cluster")

        def draw() -> None:
            seen, now_s = watch.seen, time.time()
            with watch.lock:
                content = _job_list(seen, now_s)
            if jobs.content != content:
                jobs.set_content(content)
            version = (round(now_s, -1), *(len(job.happenings) for job in list(seen.jobs.values())))
            if version != drawn[0]:
                drawn[0] = version
                _draw_cluster(cluster, seen, now_s)

        drawn: list[tuple[float, ...]] = [()]
        draw()
        ui.timer(DRAW_S, draw)

    @ui.page("/job/{key}", title="pliant")
    def one(key: str) -> None:
        job = watch.seen.jobs.get(key)
        if job is None:
            _dress("no such job")
            ui.html('<p>No such job is known here. <a href="/" class="cool">All jobs</a></p>', sanitize=False)
            return
        ui.page_title(f"{job.name} · pliant")
        _dress(job.name)
        JobPage(job, watch, acting).open()


class JobPage:
    """One job."""

    def __init__(self, job: Job, watch: Watch, acting: Acting) -> None:
        self._job, self._watch, self._acting = job, watch, acting
        self._drawn: tuple[object, ...] = ()
        self._log_name, self._log_drawn = "", ("", -1)

    def open(self) -> None:
        with ui.element("div").classes("card"):
            self._facts = ui.html("", sanitize=False).mark("facts")
            self._buttons = ui.row().style("padding: 6px 0; gap: 8px; align-items: center")
            with self._buttons:
                self._resize, self._stop = self._acting.buttons(self._job)
        with ui.element("div").classes("grid"):
            self._accuracy = ChartCard("Time to accuracy", wide=True)
            self._values = ChartCard("Loss", wide=True)
            self._speed = ChartCard("Throughput")
            self._noise = ChartCard("Noise scale and batch size")
            self._map = ChartCard("Workers over time")
            self._graph = ChartCard("Topology")
            self._rounds = ChartCard("Rounds")
            self._picked = ChartCard("Who was picked")
            self._fair = ChartCard("How often clients were picked")
            self._events = HtmlCard("Events")
            self._now = HtmlCard("Workers and replicas now")
            with ui.element("div").classes("card wide").mark("logs") as self._log_card:
                ui.html("<h2>Log</h2>", sanitize=False)
                self._log_choice = (
                    ui.select([], on_change=self._choose_log).props("dense options-dense").style("max-width: 100%")
                )
                self._log = ui.html("", sanitize=False).style("width: 100%")
        self._log_card.set_visibility(False)
        self.draw()
        ui.timer(DRAW_S, self.draw)
        ui.timer(DRAW_S, self._draw_log)

    def draw(self) -> None:
        """Whatever has changed."""
        job, now_s = self._job, time.time()
        state = job.state(now_s)
        if self._drawn == (*job.version, state):
            return
        self._drawn = (*job.version, state)
        can_act = job.control is not None and state in ("running", "starting", "put-off", "waiting")
        self._resize.set_visibility(can_act and job.control is not None and job.control.can_resize)
        self._stop.set_visibility(can_act)
        self._buttons.set_visibility(can_act)
        with self._watch.lock:
            self._facts.set_content(_headline(job, state))
            self._draw_training(job)
            self._draw_federated(job)
            self._events.show(pieces.event_list(job.events, job.story.unit))

    def _draw_training(self, job: Job) -> None:
        story = job.story
        figures = story.figures
        title = "Loss" if any("loss" in name.lower() for name in story.values) else "Reported by the program"
        self._values.show(charts.curves(story.values, story) if story.values else None, title=title)
        speed = figures.get("samples_per_s")
        self._speed.show(charts.curves({"samples/s": speed}, story, unit="samples/s", least=0) if speed else None)
        measured = any(name in figures for name in ("noise_scale", "variance"))
        changed = "batch_size" in figures and len({size for _, size in figures["batch_size"].thinned(50)}) > 1
        self._noise.show(charts.noise(story) if measured or changed else None)
        if not story.crews:
            for card in (self._map, self._graph):
                card.show(None)
            self._now.show(pieces.squares(Crew(0, job.members, 0)) if job.members else "")
            return
        crews, rows = charts.crew_map(story)
        self._map.show(crews, height_px=min(340, max(150, 70 + 22 * rows)))
        crew = story.crews[-1]
        self._now.show(pieces.squares(crew))
        found = picture(crew, story.links)
        if len(crew.workers) > 1:
            rates = "" if story.links is None else f"; rates measured at step {story.links.step}"
            note = "; ".join(filter(None, [crew.strategy or "AUTO", found.note])) + rates
            self._graph.show(charts.graph(found), note=note, height_px=300)
        else:
            self._graph.show(None)

    def _draw_federated(self, job: Job) -> None:
        told = job.story.federation
        shown: list[tuple[ChartCard, Callable[[], dict[str, object]] | None]] = [
            (self._accuracy, None if told is None or not len(told.accuracy) else lambda: charts_fed.accuracy(told)),
            (self._rounds, None if told is None or not told.rounds else lambda: charts_fed.rounds(told)),
            (self._picked, None if told is None or not told.recent else lambda: charts_fed.picked(told)),
            (self._fair, None if told is None or not told.picks else lambda: charts_fed.fairness(told)),
        ]
        for card, draw in shown:
            card.show(draw() if draw is not None else None)

    # --- logs ---

    def _choose_log(self) -> None:
        self._log_name, self._log_drawn = str(self._log_choice.value or ""), ("", -1)

    async def _draw_log(self) -> None:
        names = list(self._job.logs)
        if names != self._log_choice.options:
            self._log_name = self._log_name or (names[0] if names else "")
            self._log_choice.set_options(names, value=self._log_name or None)
            self._log_choice.set_visibility(len(names) > 1)
            self._log_card.set_visibility(bool(names))
        log = self._job.logs.get(self._log_name)
        if log is None:
            return
        try:
            await run.io_bound(log.look)
        except PliantError as error:
            self._log.set_content(pieces.log_text([str(error)]))
            return
        if self._log_drawn != (self._log_name, log.num_lines):
            self._log_drawn = (self._log_name, log.num_lines)
            newest = islice(reversed(log.text), LOG_LINES)
            self._log.set_content(pieces.log_text(list(newest)[::-1]))


def _dress(where: str) -> None:
    """What all pages have: the look, the head, the switch between dark and light."""
    ui.add_css(pieces.CSS)
    # The choice is kept by the browser; without one, the system's counts.
    request = ui.context.client.request
    chosen = request.query_params.get("theme") or request.cookies.get("pliant_theme")
    dark = ui.dark_mode(True if chosen == "dark" else False if chosen == "light" else None)

    def switch(value: bool | None, name: str) -> None:
        dark.value = value
        ui.run_javascript(f"document.cookie = 'pliant_theme={name}; path=/; max-age=31536000; samesite=strict'")

    with ui.header().style("align-items: center; flex-wrap: nowrap; padding: 6px 16px; gap: 12px"):
        ui.html('<a class="brand" href="/">pliant</a>', sanitize=False)
        ui.label(where).classes("crumb").style("flex: 1")
        with ui.button(icon="contrast").props("flat round dense color=grey aria-label=Theme").mark("theme"), ui.menu():
            ui.menu_item("Dark", lambda: switch(True, "dark"))
            ui.menu_item("Light", lambda: switch(False, "light"))
            ui.menu_item("As the system", lambda: switch(None, "auto"))


def _job_list(seen: Seen, now_s: float) -> str:
    def place(job: Job) -> tuple[int, float]:
        state = job.state(now_s)
        return (ORDER.index(state) if state in ORDER else len(ORDER), -(job.started_s or 0.0))

    rows = "".join(pieces.job_row(job, now_s) for job in sorted(seen.jobs.values(), key=place))
    told = "".join(f'<p class="warn">{html.escape(text)}</p>' for text in list(seen.problems.values()))
    empty = (
        "<p>No jobs yet. <code>pliant run -w --record run.jsonl train.py</code> starts one; "
        "<code>pliant dash FOLDER</code> shows those of before.</p>"
    )
    return told + (f'<div class="jobs">{rows}</div>' if rows else empty)


def _draw_cluster(card: ChartCard, seen: Seen, now_s: float) -> None:
    """Of the first cluster; there is hardly ever a second."""
    cluster = next((each for each in seen.clusters.values() if each.status is not None), None)
    if cluster is None or cluster.status is None:
        card.show(None)
        return
    jobs = [seen.jobs[key] for key in cluster.jobs if key in seen.jobs]
    found = stays([happening for job in jobs for happening in job.happenings])
    status = cluster.status
    free = ", ".join(f"{status.free.get(kind, 0)} of {count} {kind} free" for kind, count in status.devices.items())
    reserved = ", ".join(f"{count} {kind}" for kind, count in status.reserved.items() if count)
    note = free + (f"; reserved: {reserved}" if reserved else "")
    card.show(charts.allocation(found, sum(status.devices.values()), now_s), note=note)


def _headline(job: Job, state: str) -> str:
    story = job.story
    given: list[tuple[str, str]] = []
    if story.federation is not None:
        told = story.federation
        given += [("round", str(told.rounds)), ("virtual clock", span_text(told.clock_s))]
        if told.best is not None:
            given.append(("best accuracy", f"{told.best:.2f} %"))
        if told.target is not None:
            hours = told.time_to(told.target)
            given.append((f"time to {told.target:g} %", "not yet" if hours is None else f"{hours:.2f} h"))
        if told.epsilon.last is not None:
            given.append(("epsilon", f"{told.epsilon.last:.3g}"))
    else:
        if story.num_facts:
            given += [("step", f"{story.step:,}"), ("replicas", str(story.replicas))]
        given.append(("workers", f"{job.num_workers}" + (f" ({job.devices})" if job.devices else "")))
        for name, series in list(story.values.items())[:3]:
            if series.last is not None:
                given.append((name, f"{series.last:.4g}"))
        for label, figure in (
            ("samples/s", "samples_per_s"),
            ("global batch", "batch_size"),
            ("noise scale", "noise_scale"),
        ):
            if figure in story.figures and (last := story.figures[figure].last) is not None:
                given.append((label, pieces.number(last)))
    told_why = job.told_why or ("" if job.record is not None or job.of_cluster else NO_RECORD)
    why = f'<div class="note">{html.escape(told_why)}</div>' if told_why else ""
    where = html.escape(job.command or job.where)
    return (
        f'<h2 style="display:flex; gap:10px; align-items:center; min-width:0"><span class="crumb" style="color:inherit">'
        f'{html.escape(job.name)}</span>{pieces.chip(state)}</h2><div class="note crumb">{where}</div>{why}'
        f"{pieces.facts(given)}"
    )
