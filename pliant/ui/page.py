"""The pages of `pliant dash`: the list of jobs with the cluster, and one page for each job, redrawn as its timeline grows."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from itertools import islice

from nicegui import run, ui

from pliant.duration import span_text
from pliant.errors import PliantError
from pliant.ui import charts, widgets
from pliant.ui.charts import StepWindow
from pliant.ui.cluster_chart import allocation_chart, allocation_description, device_uses, tenant_in_words
from pliant.ui.controls import JobActions, StepRange
from pliant.ui.jobs import DashboardState, ShownCluster, ShownJob, Watcher
from pliant.ui.timeline import FederatedTimeline, JobTimeline, Series, ViewWorkers, plural
from pliant.ui.topology_chart import topology_chart, topology_description, topology_graph
from pliant.ui.widgets import CSS, ChartCard, HtmlCard

# --- one job ---


DRAW_S = 1.0
LOG_LINES = 400
MOST_OTHERS = 4
"""Most charts for values beside the loss; all further values share the last one."""


class JobPage:
    """The page of one job, made for each visitor."""

    def __init__(self, job: ShownJob, watcher: Watcher, actions: JobActions) -> None:
        self._job, self._watcher, self._actions = job, watcher, actions
        self._drawn: tuple[object, ...] = ()
        self._view_drawn: tuple[object, ...] = ()
        self._log_name, self._log_drawn = "", ("", -1)

    def open(self) -> None:
        with ui.element("section").classes("card"):
            self._facts = ui.html("", sanitize=False).mark("facts")
            self._buttons = ui.row().style("padding: 6px 0; gap: 8px; align-items: center")
            with self._buttons:
                self._resize, self._stop = self._actions.buttons(self._job)
            self._steps = StepRange(self.draw)
        with ui.element("div").classes("grid"):
            self._accuracy = ChartCard("Time to accuracy", wide=True)
            self._values = ChartCard("Loss", wide=True)
            self._others = [ChartCard("Reported by the program") for _ in range(MOST_OTHERS)]
            self._speed = ChartCard("Throughput")
            self._phases = ChartCard("Where the time of a step goes")
            self._noise = ChartCard("Noise scale and batch size")
            self._map = ChartCard("Workers over time")
            self._graph = ChartCard("Topology")
            self._rounds = ChartCard("Rounds")
            self._picked = ChartCard("Who was picked")
            self._fair = ChartCard("How often clients were picked")
            self._took = ChartCard("How long clients take")
            self._figures = HtmlCard("In figures")
            self._events = HtmlCard("Events")
            self._now = HtmlCard("Workers and replicas now")
            with ui.element("section").classes("card wide").mark("logs") as self._log_card:
                ui.html("<h2>Log</h2>", sanitize=False)
                self._log_choice = (
                    ui.select([], label="Of", on_change=self._choose_log)
                    .props("dense options-dense")
                    .style("max-width: 100%; min-width: 160px; align-self: flex-start")
                )
                self._log = ui.html("", sanitize=False).style("width: 100%")
        self._log_card.set_visibility(False)
        self.draw()
        ui.timer(DRAW_S, self.draw)
        ui.timer(DRAW_S, self._draw_log)

    def draw(self) -> None:
        """Redraw what has changed."""
        job, now_s = self._job, time.time()
        state = job.state(now_s)
        version = (*job.version, state, self._steps.chosen)
        if self._drawn == version:
            return
        self._drawn = version
        can_act = job.control is not None and state in ("running", "starting", "put-off", "waiting")
        self._resize.set_visibility(can_act and job.control is not None and job.control.resize is not None)
        self._stop.set_visibility(can_act)
        self._buttons.set_visibility(can_act)
        with self._watcher.lock:
            self._facts.set_content(headline(job, state))
            if job.timeline.federated is None:
                self._draw_training(job.timeline)
            else:
                self._draw_federated(job.timeline.federated)
            facts = job.timeline.facts
            self._figures.show(widgets.figure_table(facts) if facts else "")
            self._draw_view(job)
            self._events.show(widgets.event_list(job.events, job.timeline.unit))

    def _draw_training(self, timeline: JobTimeline) -> None:
        self._steps.follow(timeline.step)
        window = StepWindow.of(timeline, self._job.events, self._steps.chosen)
        key, figures = widgets.event_key(window.events), timeline.figures
        first, *others = grouped(timeline.values) or [{}]
        self._curves(self._values, first, window, title="Loss" if is_loss(*first) else " and ".join(first), key=key)
        for number, card in enumerate(self._others):
            given = others[number] if number < len(others) else {}
            self._curves(card, given, window, title=", ".join(given) if len(given) < 3 else "Also reported")
        speed = {"samples/s": figures["samples_per_s"]} if "samples_per_s" in figures else {}
        self._curves(self._speed, speed, window, unit="samples/s", least=0, key="" if first else key)
        parts = {name: figures[figure] for figure, name in charts.PHASE_NAMES.items() if figure in figures}
        self._phases.show(charts.phases(parts, window) if parts else None, charts.description(parts, window))
        noise = {name: figures[figure] for name, figure in charts.NOISE.items() if figure in figures}
        sizes = noise[charts.BATCH].thinned(50) if charts.BATCH in noise else []
        shown = any(name != charts.BATCH for name in noise) or len({size for _, size in sizes}) > 1
        self._noise.show(charts.noise(noise, window) if shown else None, charts.description(noise, window))
        if not timeline.views:
            self._map.show(None)
            return
        views, rows = charts.worker_map(timeline, window)
        told = f"{plural(len(timeline.views[-1].workers), 'worker')} now; {len(timeline.views)} views so far"
        self._map.show(views, told, height_px=min(340, max(150, 70 + 22 * rows)))

    def _curves(
        self,
        card: ChartCard,
        given: Mapping[str, Series],
        window: StepWindow,
        *,
        title: str = "",
        unit: str = "",
        least: float | None = None,
        key: str = "",
    ) -> None:
        drawn = charts.curves(given, window, unit=unit, least=least) if given else None
        card.show(drawn, charts.description(given, window), title=title, key=key)

    def _draw_view(self, job: ShownJob) -> None:
        """Redraw the workers and the topology if they have changed."""
        timeline = job.timeline
        view = timeline.views[-1] if timeline.views else ViewWorkers(0, job.present, 0) if job.present else None
        now = (view, timeline.links)
        if self._view_drawn == now:
            return
        self._view_drawn = now
        self._now.show(widgets.worker_squares(view) if view is not None else "")
        if view is None or not timeline.views or len(view.workers) < 2:
            self._graph.show(None)
            return
        found = topology_graph(view, timeline.links)
        rates = "" if timeline.links is None else f"rates measured at step {timeline.links.step}"
        roots = "sums end at the orange ones" if any(node.is_root for node in found.nodes) else ""
        note = "; ".join(filter(None, [view.strategy or "AUTO", found.note, roots, rates]))
        self._graph.show(topology_chart(found), topology_description(found), note=note, height_px=300)

    def _draw_federated(self, fed: FederatedTimeline) -> None:
        description = charts.fed_description(fed)
        has_loss = any(len(series) for series in charts.fed_losses(fed).values())
        self._accuracy.show(charts.fed_accuracy(fed) if len(fed.accuracy) else None, description["accuracy"])
        self._values.show(charts.fed_loss(fed) if has_loss else None, description["loss"])
        self._rounds.show(charts.fed_rounds(fed) if fed.rounds else None, description["rounds"])
        self._picked.show(charts.fed_picked(fed) if fed.recent else None, description["picked"])
        self._fair.show(charts.fed_fairness(fed) if fed.clients.picked else None, description["fairness"])
        self._took.show(charts.fed_durations(fed), description["durations"])

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
            await run.io_bound(log.poll)
        except PliantError as error:
            self._log.set_content(widgets.log_text([str(error)]))
            return
        if self._log_drawn != (self._log_name, log.num_lines):
            self._log_drawn = (self._log_name, log.num_lines)
            newest = islice(reversed(log.text), LOG_LINES)
            self._log.set_content(widgets.log_text(list(newest)[::-1]))


def is_loss(*names: str) -> bool:
    return bool(names) and all("loss" in name.lower() for name in names)


def grouped(values: Mapping[str, Series]) -> list[dict[str, Series]]:
    """Return the values of each chart: all losses in the first one, or else the first value."""
    losses = {name: series for name, series in values.items() if is_loss(name)} or dict(islice(values.items(), 1))
    rest = [(name, series) for name, series in values.items() if name not in losses]
    apart = [{name: series} for name, series in rest[: MOST_OTHERS - 1]]
    together = dict(rest[MOST_OTHERS - 1 :])
    return [group for group in (losses, *apart, together) if group]


def headline(job: ShownJob, state: str) -> str:
    """Return name, state and figures of a job as HTML."""
    given = _federated_facts(job.timeline.federated) if job.timeline.federated is not None else _training_facts(job)
    given = [*([("tenant", job.tenant)] if job.tenant else []), *given]
    why = f'<div class="note">{html.escape(told)}</div>' if (told := job.why) else ""
    where = html.escape(job.command or job.where)
    return (
        f'<h2 style="display:flex; gap:10px; align-items:center; min-width:0"><span class="crumb" style="color:inherit">'
        f'{html.escape(job.name)}</span>{widgets.chip(state)}</h2><div class="note crumb">{where}</div>{why}'
        f"{widgets.facts(given)}"
    )


def _federated_facts(fed: FederatedTimeline) -> Sequence[tuple[str, str]]:
    given = [("round", str(fed.rounds)), ("virtual clock", span_text(fed.clock_s))]
    if fed.best is not None:
        given.append(("best accuracy", f"{fed.best:.2f} %"))
    if fed.target is not None:
        hours = fed.time_to(fed.target)
        given.append((f"time to {fed.target:g} %", "not yet" if hours is None else span_text(3600 * hours)))
    if fed.epsilon.last is not None:
        given.append(("epsilon", f"{fed.epsilon.last:.3g}"))
    if fed.workers:
        given.append(("workers", str(len(fed.workers))))
    return given


def _training_facts(job: ShownJob) -> Sequence[tuple[str, str]]:
    timeline = job.timeline
    given: list[tuple[str, str]] = []
    if job.step is not None:
        given += [("step", f"{job.step:,}"), ("replicas", str(timeline.replicas))]
    given.append(("workers", f"{job.num_workers}" + (f" ({job.devices})" if job.devices else "")))
    for name, series in list(timeline.values.items())[:3]:
        if series.last is not None:
            given.append((name, f"{series.last:.4g}"))
    for label, figure in (("samples/s", "samples_per_s"), (charts.BATCH, "batch_size"), ("noise scale", "noise_scale")):
        if figure in timeline.figures and (last := timeline.figures[figure].last) is not None:
            given.append((label, widgets.number(last)))
    return given


# --- all jobs ---


ORDER = ("running", "starting", "put-off", "waiting", "silent", "failed")
"""Order of states in the list."""
MOST_ROWS = 100
"""Most jobs in the list, which is sent again with every change; a link shows all."""


def register_pages(watcher: Watcher, actions: JobActions) -> None:
    """Register the pages with NiceGUI, which a process can do once."""

    @ui.page("/", title="pliant")
    def index() -> None:
        _add_frame("jobs")
        Index(watcher, None if "all" in ui.context.client.request.query_params else MOST_ROWS).open()

    @ui.page("/job/{key}", title="pliant")
    def one(key: str) -> None:
        job = watcher.known.jobs.get(key)
        if job is None:
            _add_frame("no such job")
            ui.html('<p>No such job is known here yet. <a href="/" class="cool">All jobs</a></p>', sanitize=False)
            # After a restart of the server, jobs are found one by one.
            ui.timer(DRAW_S, lambda: ui.navigate.reload() if key in watcher.known.jobs else None)
            return
        ui.page_title(f"{job.name} · pliant")
        _add_frame(job.name)
        JobPage(job, watcher, actions).open()


class Index:
    """The page with all jobs and the cluster."""

    def __init__(self, watcher: Watcher, most: int | None) -> None:
        self._watcher, self._most = watcher, most
        self._drawn: tuple[float, ...] = ()

    def open(self) -> None:
        self._jobs = ui.html("", sanitize=False).style("width: 100%").mark("jobs")
        with ui.element("div").classes("grid"):
            self._cluster = ChartCard("Devices of the cluster by job", wide=True, mark="cluster")
            self._decided = HtmlCard("What the cluster has decided", wide=True)
        self.draw()
        ui.timer(DRAW_S, self.draw)

    def draw(self) -> None:
        known, now_s = self._watcher.known, time.time()
        with self._watcher.lock:
            content = job_list(known, now_s, self._most)
        if self._jobs.content != content:
            self._jobs.set_content(content)
        version = (
            round(now_s, -1),
            len(known.clusters),
            *(len(job.cluster_events) for job in list(known.jobs.values())),
        )
        if version != self._drawn:
            self._drawn = version
            # Only the first cluster is drawn.
            self._draw_cluster(next((each for each in list(known.clusters.values()) if each.status), None), now_s)

    def _draw_cluster(self, cluster: ShownCluster | None, now_s: float) -> None:
        if cluster is None or cluster.status is None:
            self._cluster.show(None)
            self._decided.show("")
            return
        jobs = [self._watcher.known.jobs[key] for key in cluster.jobs if key in self._watcher.known.jobs]
        events = [(job.name, event) for job in jobs for event in job.cluster_events]
        found, status = device_uses(events), cluster.status
        free = ", ".join(f"{status.free.get(kind, 0)} of {count} {kind} free" for kind, count in status.devices.items())
        reserved = ", ".join(f"{count} {kind}" for kind, count in status.reserved.items() if count)
        devices = sum(status.devices.values())
        self._cluster.show(
            allocation_chart(found, devices, now_s),
            allocation_description(found, devices),
            note="; ".join(
                [free, *([f"reserved: {reserved}"] if reserved else []), *map(tenant_in_words, status.tenants)]
            ),
        )
        self._decided.show(widgets.decision_list(events))


def _add_frame(where: str) -> None:
    """Add what all pages have: the style sheet, the header, the switch between dark and light."""
    ui.add_css(CSS)
    # The browser keeps the choice in a cookie; without one, the system's theme is used.
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


def job_list(known: DashboardState, now_s: float, most: int | None = None) -> str:
    """Return all jobs, or the first `most`, as HTML, after the problems of the sources."""

    def place(job: ShownJob) -> tuple[int, float]:
        state = job.state(now_s)
        return (ORDER.index(state) if state in ORDER else len(ORDER), -(job.started_s or 0.0))

    jobs = sorted(known.jobs.values(), key=place)
    rows = "".join(widgets.job_row(job, now_s) for job in jobs[:most])
    told = "".join(f'<p class="warn">{html.escape(text)}</p>' for text in list(known.problems.values()))
    if not rows:
        return (
            f"{told}<p>No jobs yet. <code>pliant run -w --record run.jsonl train.py</code> starts one; "
            "<code>pliant dash FOLDER</code> shows those of before.</p>"
        )
    left = len(jobs) - len(jobs[:most])
    more = f'<p><a class="cool" href="/?all">All {len(jobs)} jobs</a></p>' if left else ""
    return f'{told}<ul class="jobs" aria-label="Jobs">{rows}</ul>{more}'
