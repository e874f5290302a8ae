"""One job on the page: its figures, curves, workers, topology, events and logs, drawn anew as its story grows."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from itertools import islice

from nicegui import run, ui

from pliant.errors import PliantError
from pliant.launch.duration import span_text
from pliant.ui import charts, charts_fed, charts_topology, pieces
from pliant.ui.acting import Acting
from pliant.ui.charts import Window
from pliant.ui.federation import Federation
from pliant.ui.jobs import Job
from pliant.ui.pieces import ChartCard, HtmlCard
from pliant.ui.series import Series
from pliant.ui.story import Crew, Story
from pliant.ui.topology import picture
from pliant.ui.watch import Watch
from pliant.ui.zoom import StepRange

DRAW_S = 1.0
LOG_LINES = 400
MOST_OTHERS = 4
"""Charts for what a program reports beside its loss; what is more comes together in the last one."""


class JobPage:
    """Made anew for each visitor."""

    def __init__(self, job: Job, watch: Watch, acting: Acting) -> None:
        self._job, self._watch, self._acting = job, watch, acting
        self._drawn: tuple[object, ...] = ()
        self._crew_drawn: tuple[object, ...] = ()
        self._log_name, self._log_drawn = "", ("", -1)

    def open(self) -> None:
        with ui.element("section").classes("card"):
            self._facts = ui.html("", sanitize=False).mark("facts")
            self._buttons = ui.row().style("padding: 6px 0; gap: 8px; align-items: center")
            with self._buttons:
                self._resize, self._stop = self._acting.buttons(self._job)
            self._steps = StepRange(self.draw)
        with ui.element("div").classes("grid"):
            self._accuracy = ChartCard("Time to accuracy", wide=True)
            self._values = ChartCard("Loss", wide=True)
            self._others = [ChartCard("Reported by the program") for _ in range(MOST_OTHERS)]
            self._speed = ChartCard("Throughput")
            self._noise = ChartCard("Noise scale and batch size")
            self._map = ChartCard("Workers over time")
            self._graph = ChartCard("Topology")
            self._rounds = ChartCard("Rounds")
            self._picked = ChartCard("Who was picked")
            self._fair = ChartCard("How often clients were picked")
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
        """Whatever has changed."""
        job, now_s = self._job, time.time()
        state = job.state(now_s)
        version = (*job.version, state, self._steps.chosen)
        if self._drawn == version:
            return
        self._drawn = version
        can_act = job.control is not None and state in ("running", "starting", "put-off", "waiting")
        self._resize.set_visibility(can_act and job.control is not None and job.control.can_resize)
        self._stop.set_visibility(can_act)
        self._buttons.set_visibility(can_act)
        with self._watch.lock:
            self._facts.set_content(headline(job, state))
            if job.story.federation is None:
                self._draw_training(job.story)
            else:
                self._draw_federated(job.story.federation)
            self._draw_crew(job)
            self._events.show(pieces.event_list(job.events, job.story.unit))

    def _draw_training(self, story: Story) -> None:
        self._steps.follow(story.step)
        window = Window.of(story, self._job.events, self._steps.chosen)
        key, figures = pieces.event_key(window.events), story.figures
        first, *others = grouped(story.values) or [{}]
        self._curves(self._values, first, window, title="Loss" if is_loss(*first) else " and ".join(first), key=key)
        for number, card in enumerate(self._others):
            given = others[number] if number < len(others) else {}
            self._curves(card, given, window, title=", ".join(given) if len(given) < 3 else "Also reported")
        speed = {"samples/s": figures["samples_per_s"]} if "samples_per_s" in figures else {}
        self._curves(self._speed, speed, window, unit="samples/s", least=0, key="" if first else key)
        noise = {name: figures[figure] for name, figure in charts.NOISE.items() if figure in figures}
        sizes = noise[charts.BATCH].thinned(50) if charts.BATCH in noise else []
        shown = any(name != charts.BATCH for name in noise) or len({size for _, size in sizes}) > 1
        self._noise.show(charts.noise(noise, window) if shown else None, charts.spoken(noise, window))
        if not story.crews:
            self._map.show(None)
            return
        crews, rows = charts.crew_map(story, window)
        told = f"{pieces.plural(len(story.crews[-1].workers), 'worker')} now; {len(story.crews)} views so far"
        self._map.show(crews, told, height_px=min(340, max(150, 70 + 22 * rows)))

    def _curves(
        self,
        card: ChartCard,
        given: Mapping[str, Series],
        window: Window,
        *,
        title: str = "",
        unit: str = "",
        least: float | None = None,
        key: str = "",
    ) -> None:
        drawn = charts.curves(given, window, unit=unit, least=least) if given else None
        card.show(drawn, charts.spoken(given, window), title=title, key=key)

    def _draw_crew(self, job: Job) -> None:
        """Who trains now, and who sends to whom; only where that has changed: a thousand workers are much to draw."""
        story = job.story
        crew = story.crews[-1] if story.crews else Crew(0, job.members, 0) if job.members else None
        now = (crew, story.links)
        if self._crew_drawn == now:
            return
        self._crew_drawn = now
        self._now.show(pieces.squares(crew) if crew is not None else "")
        if crew is None or not story.crews or len(crew.workers) < 2:
            self._graph.show(None)
            return
        found = picture(crew, story.links)
        rates = "" if story.links is None else f"rates measured at step {story.links.step}"
        roots = "sums end at the orange ones" if any(node.is_root for node in found.nodes) else ""
        note = "; ".join(filter(None, [crew.strategy or "AUTO", found.note, roots, rates]))
        self._graph.show(charts_topology.graph(found), charts_topology.spoken(found), note=note, height_px=300)

    def _draw_federated(self, told: Federation) -> None:
        spoken = charts_fed.spoken(told)
        has_loss = any(len(series) for series in charts_fed.losses(told).values())
        self._accuracy.show(charts_fed.accuracy(told) if len(told.accuracy) else None, spoken["accuracy"])
        self._values.show(charts_fed.loss(told) if has_loss else None, spoken["loss"])
        self._rounds.show(charts_fed.rounds(told) if told.rounds else None, spoken["rounds"])
        self._picked.show(charts_fed.picked(told) if told.recent else None, spoken["picked"])
        self._fair.show(charts_fed.fairness(told) if told.picks else None, spoken["fairness"])

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


def is_loss(*names: str) -> bool:
    return bool(names) and all("loss" in name.lower() for name in names)


def grouped(values: Mapping[str, Series]) -> list[dict[str, Series]]:
    """Which values share a chart: all losses in the first one, else the first value; each other has its own scale."""
    losses = {name: series for name, series in values.items() if is_loss(name)} or dict(islice(values.items(), 1))
    rest = [(name, series) for name, series in values.items() if name not in losses]
    apart = [{name: series} for name, series in rest[: MOST_OTHERS - 1]]
    together = dict(rest[MOST_OTHERS - 1 :])
    return [group for group in (losses, *apart, together) if group]


def headline(job: Job, state: str) -> str:
    """Name, state and figures, as HTML."""
    given = _federated_facts(job.story.federation) if job.story.federation is not None else _training_facts(job)
    why = f'<div class="note">{html.escape(told)}</div>' if (told := job.why) else ""
    where = html.escape(job.command or job.where)
    return (
        f'<h2 style="display:flex; gap:10px; align-items:center; min-width:0"><span class="crumb" style="color:inherit">'
        f'{html.escape(job.name)}</span>{pieces.chip(state)}</h2><div class="note crumb">{where}</div>{why}'
        f"{pieces.facts(given)}"
    )


def _federated_facts(told: Federation) -> Sequence[tuple[str, str]]:
    given = [("round", str(told.rounds)), ("virtual clock", span_text(told.clock_s))]
    if told.best is not None:
        given.append(("best accuracy", f"{told.best:.2f} %"))
    if told.target is not None:
        hours = told.time_to(told.target)
        given.append((f"time to {told.target:g} %", "not yet" if hours is None else span_text(3600 * hours)))
    if told.epsilon.last is not None:
        given.append(("epsilon", f"{told.epsilon.last:.3g}"))
    return given


def _training_facts(job: Job) -> Sequence[tuple[str, str]]:
    story = job.story
    given: list[tuple[str, str]] = []
    if job.step is not None:
        given += [("step", f"{job.step:,}"), ("replicas", str(story.replicas))]
    given.append(("workers", f"{job.num_workers}" + (f" ({job.devices})" if job.devices else "")))
    for name, series in list(story.values.items())[:3]:
        if series.last is not None:
            given.append((name, f"{series.last:.4g}"))
    for label, figure in (("samples/s", "samples_per_s"), (charts.BATCH, "batch_size"), ("noise scale", "noise_scale")):
        if figure in story.figures and (last := story.figures[figure].last) is not None:
            given.append((label, pieces.number(last)))
    return given
