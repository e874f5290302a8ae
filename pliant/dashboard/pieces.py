"""Small pieces of the page: the look, cards with charts, HTML that is made of our own words and escaped others'."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Sequence

from nicegui import ui

from pliant.dashboard.frames import Options
from pliant.dashboard.jobs import Job
from pliant.dashboard.story import Crew, Event
from pliant.launch.duration import span_text

STATE_COLOURS = {
    "running": "good",
    "starting": "good",
    "waiting": "calm",
    "silent": "warn",
    "put-off": "warn",
    "interrupted": "warn",
    "failed": "bad",
}
EVENT_SHADES = {"lost": "bad", "decision": "deep", "resize": "good", "refused": "warn", "resumed": "cool"}
MOST_SQUARES = 1024
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

CSS = """
:root { --good: #22b07d; --bad: #e5484d; --warn: #d98e04; --deep: #8e6cf0; --cool: #12a5b8; --calm: #8a919c; --main: #4c8dff;
        --page: #f4f6f9; --card: #fff; --ink: #1c2530; --soft: #66707f; --edge: #dfe4ea; }
.body--dark { --page: #10141a; --card: #181e26; --ink: #e3e8ef; --soft: #97a1af; --edge: #29323d; }
body { background: var(--page); color: var(--ink); font-family: system-ui, "Roboto", sans-serif; }
.nicegui-content { padding: 12px; gap: 12px; max-width: 1320px; margin: 0 auto; align-items: stretch; }
.q-header { background: var(--card) !important; color: var(--ink) !important; border-bottom: 1px solid var(--edge); }
.brand { font-weight: 700; letter-spacing: .02em; color: var(--ink); text-decoration: none; font-size: 1.1rem; }
.crumb { color: var(--soft); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; width: 100%; }
.wide { grid-column: 1 / -1; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 12px 6px; min-width: 0; width: 100%;
        gap: 2px; display: flex; flex-direction: column; }
.card h2 { font-size: .95rem; font-weight: 600; margin: 0; line-height: 1.5; }
.card .note { color: var(--soft); font-size: .8rem; }
.chart { width: 100%; height: auto; min-height: 260px; flex: 1 1 auto; }
.jobs { display: grid; gap: 8px; }
.job { display: grid; grid-template-columns: minmax(0, 2.2fr) 92px repeat(4, minmax(0, 1fr)); gap: 10px; align-items: center;
       background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 14px; color: var(--ink);
       text-decoration: none; }
.job:hover { border-color: var(--main); }
.job b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; display: block; }
.job small, .fact small { color: var(--soft); display: block; font-size: .75rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.chip { border-radius: 999px; padding: 1px 10px; font-size: .78rem; border: 1px solid currentColor; text-align: center; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .deep { color: var(--deep); }
.cool { color: var(--cool); } .calm { color: var(--calm); }
.facts { display: flex; flex-wrap: wrap; gap: 8px 26px; }
.fact { font-variant-numeric: tabular-nums; font-size: 1.05rem; font-weight: 600; max-width: 100%; }
.fact small { font-weight: 400; }
.hosts { display: grid; gap: 6px; max-height: 300px; overflow-y: auto; }
.host { display: grid; grid-template-columns: minmax(70px, 130px) minmax(0, 1fr); gap: 8px; align-items: center; font-size: .78rem; color: var(--soft); }
.squares { display: flex; flex-wrap: wrap; gap: 3px; }
.square { min-width: 13px; height: 20px; padding: 0 4px; border-radius: 4px; background: var(--main); color: #fff; font-size: .7rem;
          line-height: 20px; text-align: center; }
.square.small { min-width: 9px; height: 9px; padding: 0; }
.events { max-height: 300px; overflow-y: auto; font-size: .84rem; }
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
  .job { grid-template-columns: minmax(0, 1fr) 92px; }
  .job > :nth-child(n+3) { display: none; }
  .nicegui-content { padding: 8px; }
  .chart { min-height: 220px; }
}
"""


class ChartCard:
    """A titled card with a chart; out of sight as long as there is nothing to draw."""

    def __init__(self, title: str, *, wide: bool = False, mark: str = "") -> None:
        with ui.element("div").classes(f"card{' wide' if wide else ''}").mark(mark or title) as self._card:
            self._title = ui.html(f"<h2>{html.escape(title)}</h2>", sanitize=False)
            self._chart = ui.echart({"series": []}).classes("chart")
            self._note = ui.label("").classes("note")
        self._card.set_visibility(False)
        self._note.set_visibility(False)

    def show(self, options: Options | None, *, title: str = "", note: str = "", height_px: int | None = None) -> None:
        self._card.set_visibility(options is not None)
        if options is None:
            return
        if title:
            self._title.set_content(f"<h2>{html.escape(title)}</h2>")
        self._note.set_text(note)
        self._note.set_visibility(bool(note))
        if height_px is not None:
            self._chart.style(f"min-height: {height_px}px")
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


class HtmlCard:
    """A titled card with HTML; as `ChartCard`."""

    def __init__(self, title: str, *, wide: bool = False) -> None:
        with ui.element("div").classes(f"card{' wide' if wide else ''}") as self._card:
            self._title = ui.html(f"<h2>{html.escape(title)}</h2>", sanitize=False)
            self._html = ui.html("", sanitize=False)
        self._card.set_visibility(False)

    def show(self, content: str) -> None:
        self._card.set_visibility(bool(content))
        if self._html.content != content:
            self._html.set_content(content)


def job_row(job: Job, now_s: float) -> str:
    """A job in the list: its name and state first, which is all that a phone shows."""
    story, state = job.story, job.state(now_s)
    speed = _last(job, "samples_per_s")
    if story.federation is not None:
        best = story.federation.best
        cells = [
            ("round", str(story.federation.rounds)),
            ("best accuracy", "-" if best is None else f"{best:.1f} %"),
            ("virtual clock", span_text(story.federation.clock_s)),
        ]
    else:
        cells = [
            ("step", str(story.step)),
            ("workers", job.devices or str(job.num_workers or "-")),
            ("samples/s", "-" if speed is None else number(speed)),
        ]
    age = "-" if job.started_s is None else span_text((now_s if job.control else story.last_s or now_s) - job.started_s)
    told = "".join(f"<span><small>{name}</small>{html.escape(value)}</span>" for name, value in [*cells, ("age", age)])
    return (
        f'<a class="job" href="/job/{job.key}"><span><b>{html.escape(job.name)}</b>'
        f"<small>{html.escape(job.told_why or job.command or job.where)}</small></span>{chip(state)}{told}</a>"
    )


def chip(state: str) -> str:
    return f'<span class="chip {STATE_COLOURS.get(state, "calm")}">{html.escape(state)}</span>'


def facts(given: Sequence[tuple[str, str]]) -> str:
    """Figures with their names below each other."""
    cells = "".join(
        f'<div class="fact"><small>{html.escape(name)}</small>{html.escape(value)}</div>' for name, value in given
    )
    return f'<div class="facts">{cells}</div>'


def squares(crew: Crew) -> str:
    """Each worker a square on its host, with its replicas; where those are not known (0), with its rank."""
    share, more = divmod(crew.replicas, len(crew.workers))
    small = len(crew.workers) > 64
    hosts: dict[str, list[str]] = {}
    first = 0
    for rank, name in enumerate(crew.workers[:MOST_SQUARES]):
        count = share + (rank < more)
        replicas = f"{first}" if count == 1 else f"{first}-{first + count - 1}" if count else "none"
        first += count
        title = html.escape(f"{name}: rank {rank}" + (f", replicas {replicas}" if crew.replicas else ""))
        label = "" if small else replicas if crew.replicas else str(rank)
        square = f'<span class="square{" small" if small else ""}" title="{title}">{label}</span>'
        hosts.setdefault(name.rpartition(":")[0] or "here", []).append(square)
    rows = "".join(
        f'<div class="host"><span>{html.escape(host)}</span><span class="squares">{"".join(found)}</span></div>'
        for host, found in hosts.items()
    )
    return f'<div class="hosts">{rows}</div>'


def event_list(events: Iterable[Event], unit: str, most: int = 200) -> str:
    newest = list(events)[-most:][::-1]
    rows = "".join(
        f'<div class="event {EVENT_SHADES.get(event.kind, "calm")}"><span>{html.escape(event.what)}</span>'
        f"<small>{clock(event.time_s)}{'' if event.step is None else f', {unit} {event.step}'}"
        f"{html.escape(f': {event.why}' if event.why else '')}</small></div>"
        for event in newest
    )
    return f'<div class="events">{rows}</div>' if rows else ""


def log_text(lines: Iterable[str]) -> str:
    text = _ANSI.sub("", "\n".join(lines))
    return f'<div class="log"><pre>{html.escape(text)}</pre></div>'


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _last(job: Job, figure: str) -> float | None:
    series = job.story.figures.get(figure)
    return series.last if series is not None else None
