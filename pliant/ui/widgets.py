"""Parts of the page: its style sheet, cards with charts, and HTML made of our own words and escaped text of others."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nicegui import ui

from pliant.duration import span_text
from pliant.jobs.status import JobEvent
from pliant.ui.charts import EVENT_COLOURS, Options
from pliant.ui.jobs import EVENT_KINDS, ShownJob, strip_controls
from pliant.ui.timeline import LR, TimelineEvent, ViewWorkers, plural

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2f6fe0"/>'
    '<path d="M6 23 C12 23 11 9 16 9 S20 23 26 23" fill="none" stroke="#fff" stroke-width="3.4" stroke-linecap="round"/></svg>'
)

# Words have the darker shades on light ground and the brighter ones on dark, so that small text can be read on both.
CSS = """
:root { --good: #0d7a54; --bad: #c62a2f; --warn: #8f5d00; --deep: #6a45d1; --cool: #0b7285; --calm: #5d6673; --main: #2f6fe0;
        --page: #f4f6f9; --card: #fff; --ink: #1c2530; --soft: #5d6673; --edge: #dfe4ea; }
.body--dark { --good: #3ecf96; --bad: #ff7a7e; --warn: #f0ad3c; --deep: #ab92ff; --cool: #45c4d4; --calm: #97a1af; --main: #4c8dff;
              --page: #10141a; --card: #181e26; --ink: #e3e8ef; --soft: #9aa4b2; --edge: #29323d; }
body { background: var(--page); color: var(--ink); font-family: system-ui, "Roboto", sans-serif; }
.nicegui-content { padding: 12px; gap: 12px; max-width: 1320px; margin: 0 auto; align-items: stretch; }
.q-header { background: var(--card) !important; color: var(--ink) !important; border-bottom: 1px solid var(--edge); }
.brand { font-weight: 700; letter-spacing: .02em; color: var(--ink); text-decoration: none; font-size: 1.1rem; }
.crumb { color: var(--soft); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0; }
h1.crumb { font-size: 1rem; font-weight: 400; margin: 0; line-height: 1.6; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; width: 100%; }
.wide { grid-column: 1 / -1; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 12px 6px; min-width: 0; width: 100%;
        gap: 2px; display: flex; flex-direction: column; }
.card h2 { font-size: .95rem; font-weight: 600; margin: 0; line-height: 1.5; }
.card .note { color: var(--soft); font-size: .8rem; }
.away { position: absolute; left: 0; top: 0; width: 320px; visibility: hidden; pointer-events: none; }
.chart { width: 100%; height: auto; min-height: 260px; flex: 1 1 auto; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; }
.key i { display: inline-block; height: .8em; border-left: 2px solid; margin-right: 6px; }
.zoom { display: grid; grid-template-columns: minmax(0, 190px) minmax(60px, 1fr) auto; gap: 4px 18px; align-items: center; width: 100%; }
.jobs { display: grid; gap: 8px; list-style: none; margin: 0; padding: 0; }
.job { display: grid; grid-template-columns: minmax(0, 2.2fr) 92px repeat(4, minmax(0, 1fr)); gap: 6px 10px; align-items: center;
       background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 14px; color: var(--ink);
       text-decoration: none; font-variant-numeric: tabular-nums; }
.job:hover { border-color: var(--main); }
:is(.job, .brand, .events, .hosts, .log):focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
.job b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; display: block; }
.job small, .fact small { color: var(--soft); display: block; font-size: .75rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.chip { border-radius: 999px; padding: 1px 10px; font-size: .78rem; border: 1px solid currentColor; text-align: center; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .deep { color: var(--deep); }
.cool { color: var(--cool); } .calm { color: var(--calm); }
.facts { display: flex; flex-wrap: wrap; gap: 8px 26px; }
.fact { font-variant-numeric: tabular-nums; font-size: 1.05rem; font-weight: 600; max-width: 100%; }
.fact small { font-weight: 400; }
.figures { font-size: .84rem; font-variant-numeric: tabular-nums; border-spacing: 0 4px; }
.figures th { font-weight: 400; color: var(--soft); text-align: left; vertical-align: top; padding-right: 14px; white-space: nowrap; }
.hosts { display: grid; gap: 6px; max-height: 300px; overflow-y: auto; align-content: start; }
.host { display: grid; grid-template-columns: minmax(70px, 130px) minmax(0, 1fr); gap: 8px; align-items: center; font-size: .78rem; color: var(--soft); }
.squares { display: flex; flex-wrap: wrap; gap: 3px; }
.square { min-width: 13px; height: 20px; padding: 0 4px; border-radius: 4px; background: #2f6fe0; color: #fff; font-size: .7rem;
          line-height: 20px; text-align: center; }
.square.small { min-width: 9px; height: 9px; padding: 0; }
.events { max-height: 300px; overflow-y: auto; font-size: .84rem; list-style: none; margin: 0; padding: 0; }
.event { border-left: 3px solid currentColor; padding: 2px 10px; margin: 5px 0; }
.event span { color: var(--ink); } .event small { color: var(--soft); display: block; overflow-wrap: anywhere; }
.log { display: flex; flex-direction: column-reverse; max-height: 340px; overflow: auto; width: 100%; }
.log pre { margin: 0; font-size: .76rem; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
.chart-tip { background: var(--card) !important; border-color: var(--edge) !important; color: var(--ink) !important;
             max-width: 300px; white-space: normal !important; }
.event-tip { border-left: 3px solid; padding-left: 8px; margin-top: 6px; overflow-wrap: anywhere; }
.q-card, .q-dialog .q-card { background: var(--card); color: var(--ink); }
@media (max-width: 760px) {
  .grid { grid-template-columns: minmax(0, 1fr); }
  .job { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  .job > :first-child { grid-column: 1 / 4; }
  .zoom { grid-template-columns: minmax(0, 1fr) auto; } .zoom > :nth-child(2) { grid-row: 2; grid-column: 1 / -1; }
  .nicegui-content { padding: 8px; }
  .chart { min-height: 220px; }
}
"""


STATE_COLOURS = {
    "running": "good",
    "starting": "good",
    "waiting": "calm",
    "silent": "warn",
    "put-off": "warn",
    "interrupted": "warn",
    "failed": "bad",
}
EVENT_SHADES = {
    "lost": "bad",
    "decision": "deep",
    "resize": "good",
    "refused": "warn",
    "resumed": "cool",
    "gap": "warn",
    "stalled": "warn",
}
EVENT_WORDS = {
    "resize": "workers changed",
    "lost": "worker lost",
    "decision": "decision",
    "refused": "decision that cannot be done",
    "resumed": "went on from a checkpoint",
    "gap": "facts missing",
    "stalled": "worker stalled",
}
MOST_SQUARES = 1024
AWAY = "away"
"""CSS class of a chart that is not shown. It keeps a size, without which ECharts cannot lay out a graph."""


class ChartCard:
    """A titled card with a chart, hidden while there is nothing to draw."""

    def __init__(self, title: str, *, wide: bool = False, mark: str = "") -> None:
        self._words = title
        with ui.element("section").classes(f"card{' wide' if wide else ''}").mark(mark or title) as self._card:
            self._title = ui.html(_heading(title), sanitize=False)
            self._chart = ui.echart({"series": []}).classes("chart").props("role=img")
            self._note = ui.html("", sanitize=False).classes("note")
        self._card.classes(AWAY)
        self._note.set_visibility(False)

    def show(
        self,
        options: Options | None,
        description: str = "",
        *,
        title: str = "",
        note: str = "",
        key: str = "",
        height_px: int | None = None,
    ) -> None:
        """Show a chart, or hide the card if there are no options. `key` is trusted HTML."""
        if options is None:
            self._card.classes(AWAY)
            return
        self._card.classes(remove=AWAY)
        if title and title != self._words:
            self._words = title
            self._title.set_content(_heading(title))
        below = key + html.escape(note)
        if self._note.content != below:
            self._note.set_content(below)
            self._note.set_visibility(bool(below))
        if height_px is not None:
            self._chart.style(f"min-height: {height_px}px")
        self._chart.props["aria-label"] = f"{self._words}: {description}"
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


class HtmlCard:
    """A titled card with HTML, hidden while it is empty."""

    def __init__(self, title: str, *, wide: bool = False) -> None:
        with ui.element("section").classes(f"card{' wide' if wide else ''}") as self._card:
            ui.html(_heading(title), sanitize=False)
            self._html = ui.html("", sanitize=False)
        self._card.set_visibility(False)

    def show(self, content: str) -> None:
        self._card.set_visibility(bool(content))
        if self._html.content != content:
            self._html.set_content(content)


def _heading(title: str) -> str:
    return f"<h2>{html.escape(title)}</h2>"


def job_row(job: ShownJob, now_s: float) -> str:
    """Return a job of the list as HTML."""
    timeline, state = job.timeline, job.state(now_s)
    if timeline.federated is not None:
        best = timeline.federated.best
        cells = [
            ("round", str(timeline.federated.rounds)),
            ("best", "-" if best is None else f"{best:.1f} %"),
            ("virtual clock", span_text(timeline.federated.clock_s)),
        ]
    else:
        cells = [
            ("step", "-" if job.step is None else f"{job.step:,}"),
            ("workers", job.devices or str(job.num_workers or "-")),
            ("samples/s", "-" if timeline.speed is None else number(timeline.speed)),
        ]
    cells.append(("age", job.age(now_s)))
    told = "".join(f"<span><small>{name}</small>{html.escape(value)}</span>" for name, value in cells)
    about = (f"{job.tenant}: " if job.tenant else "") + (job.reported_why or job.command or job.where)
    return (
        f'<li><a class="job" href="/job/{job.key}"><span><b>{html.escape(job.name)}</b>'
        f"<small>{html.escape(about)}</small></span>{chip(state)}{told}</a></li>"
    )


def chip(state: str) -> str:
    return f'<span class="chip {STATE_COLOURS.get(state, "calm")}">{html.escape(state)}</span>'


def facts(given: Sequence[tuple[str, str]]) -> str:
    """Return figures with their names as HTML."""
    cells = "".join(
        f'<div class="fact"><small>{html.escape(name)}</small>{html.escape(value)}</div>' for name, value in given
    )
    return f'<div class="facts">{cells}</div>'


def figure_table(given: Sequence[tuple[str, str]]) -> str:
    """Return figures that are sentences, with their names, as HTML."""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(text)}</td></tr>' for name, text in given
    )
    return f'<table class="figures">{rows}</table>'


def worker_squares(view: ViewWorkers) -> str:
    """Return a square for each worker as HTML, by host, with its replicas, or with its rank if those are unknown (0)."""
    share, more = divmod(view.replicas, len(view.workers))
    small = len(view.workers) > 64
    hosts: dict[str, list[tuple[str, str]]] = {}
    first = 0
    for rank, name in enumerate(view.workers[:MOST_SQUARES]):
        count = share + (rank < more)
        replicas = f"{first}" if count == 1 else f"{first}-{first + count - 1}" if count else "none"
        first += count
        title = html.escape(f"{name}: rank {rank}" + (f", replicas {replicas}" if view.replicas else ""))
        label = "" if small else replicas if view.replicas else str(rank)
        square = f'<span class="square{" small" if small else ""}" title="{title}">{label}</span>'
        hosts.setdefault(name.rpartition(":")[0] or "here", []).append((square, replicas if view.replicas else ""))
    rows = "".join(
        f'<div class="host"><span>{html.escape(host)}</span><span class="squares" role="img" '
        f'aria-label="{plural(len(found), "worker")}{_replicas(found)}">'
        f"{''.join(square for square, _ in found)}</span></div>"
        for host, found in hosts.items()
    )
    return f'<div class="hosts" tabindex="0">{rows}</div>'


def _replicas(found: Sequence[tuple[str, str]]) -> str:
    """Describe the replicas in words, for screen readers."""
    known = [replicas for _, replicas in found if replicas]
    return f" with replicas {', '.join(known)}" if known else ""


def event_list(events: Iterable[TimelineEvent], unit: str, most: int = 200) -> str:
    newest = _joined(list(events))[-most:][::-1]
    rows = "".join(
        f'<li class="event {EVENT_SHADES.get(event.kind, "calm")}"><span>{html.escape(event.what)}</span>'
        f"<small>{clock(event.time_s)}{'' if event.step is None else f', {unit} {event.step}'}"
        f"{html.escape(f': {event.why}' if event.why else '')}</small></li>"
        for event in newest
    )
    return f'<ul class="events" tabindex="0" aria-label="Events, the newest first">{rows}</ul>' if rows else ""


def _joined(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Join consecutive decisions on the learning rate into one entry."""
    found: list[TimelineEvent] = []
    first: TimelineEvent | None = None
    for event in events:
        follows = first is not None and found[-1].what.startswith(LR) and event.what.startswith(LR)
        if follows and first is not None:
            found[-1] = replace(event, why=f"{event.why} (again and again since step {first.step})")
        else:
            first = event
            found.append(event)
    return found


def decision_list(events: Iterable[tuple[str, JobEvent]], most: int = 100) -> str:
    """Return the decisions of a scheduler about all its jobs as HTML, from (job, event) pairs."""
    shown = [
        TimelineEvent(EVENT_KINDS[event.what], None, event.at, f"{job}: {event.what}", event.why)
        for job, event in events
        if event.what in EVENT_KINDS
    ]
    return event_list(sorted(shown, key=lambda each: each.time_s), "step", most)


def event_key(events: Iterable[TimelineEvent]) -> str:
    """Return the legend of the event lines as HTML."""
    there = {event.kind for event in events}
    keys = "".join(
        f'<span><i style="border-color: {EVENT_COLOURS[kind]}"></i>{words}</span>'
        for kind, words in EVENT_WORDS.items()
        if kind in there
    )
    return f'<div class="key">{keys}</div>' if keys else ""


def log_text(lines: Iterable[str]) -> str:
    text = strip_controls("\n".join(lines))
    return f'<div class="log" tabindex="0" role="region" aria-label="Log"><pre>{html.escape(text)}</pre></div>'


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(at_s: float) -> str:
    """Return the time of day, with the date if it is not today."""
    at, today = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if at[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", at)
