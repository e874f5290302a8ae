"""Small pieces of the page: cards with charts, HTML that is made of our own words and escaped others'."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nicegui import ui

from pliant.launch.duration import span_text
from pliant.ui.allocation import Happening
from pliant.ui.charts import EVENT_COLOURS
from pliant.ui.follow import plain
from pliant.ui.frames import Options
from pliant.ui.jobs import SHOWN_AS, Job
from pliant.ui.story import LR, Crew, Event

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
EVENT_WORDS = {
    "resize": "workers changed",
    "lost": "worker lost",
    "decision": "decision",
    "refused": "decision that cannot be done",
    "resumed": "went on from a checkpoint",
}
MOST_SQUARES = 1024
AWAY = "away"
"""Of a chart that is not shown. It keeps a size: in one without, ECharts fails to lay out a graph."""


class ChartCard:
    """A titled card with a chart; out of sight as long as there is nothing to draw."""

    def __init__(self, title: str, *, wide: bool = False, mark: str = "") -> None:
        self._words = title
        with ui.element("section").classes(f"card{' wide' if wide else ''}").mark(mark or title) as self._card:
            self._title = ui.html(_heading(title), sanitize=False)
            # A picture to who hears the page, with what it shows in words.
            self._chart = ui.echart({"series": []}).classes("chart").props("role=img")
            self._note = ui.html("", sanitize=False).classes("note")
        self._card.classes(AWAY)
        self._note.set_visibility(False)

    def show(
        self,
        options: Options | None,
        spoken: str = "",
        *,
        title: str = "",
        note: str = "",
        key: str = "",
        height_px: int | None = None,
    ) -> None:
        """`spoken` says what is drawn; `key` is HTML of ours."""
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
        self._chart.props["aria-label"] = f"{self._words}: {spoken}"
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


class HtmlCard:
    """A titled card with HTML; as `ChartCard`."""

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


def job_row(job: Job, now_s: float) -> str:
    """A job in the list: its name and state first, which on a phone are a line of their own."""
    story, state = job.story, job.state(now_s)
    speed = _last(job, "samples_per_s")
    if story.federation is not None:
        best = story.federation.best
        cells = [
            ("round", str(story.federation.rounds)),
            ("best", "-" if best is None else f"{best:.1f} %"),
            ("virtual clock", span_text(story.federation.clock_s)),
        ]
    else:
        cells = [
            ("step", "-" if job.step is None else f"{job.step:,}"),
            ("workers", job.devices or str(job.num_workers or "-")),
            ("samples/s", "-" if speed is None else number(speed)),
        ]
    age = "-" if job.started_s is None else span_text((now_s if job.control else story.last_s or now_s) - job.started_s)
    told = "".join(f"<span><small>{name}</small>{html.escape(value)}</span>" for name, value in [*cells, ("age", age)])
    return (
        f'<li><a class="job" href="/job/{job.key}"><span><b>{html.escape(job.name)}</b>'
        f"<small>{html.escape(job.told_why or job.command or job.where)}</small></span>{chip(state)}{told}</a></li>"
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
    hosts: dict[str, list[tuple[str, str]]] = {}
    first = 0
    for rank, name in enumerate(crew.workers[:MOST_SQUARES]):
        count = share + (rank < more)
        replicas = f"{first}" if count == 1 else f"{first}-{first + count - 1}" if count else "none"
        first += count
        title = html.escape(f"{name}: rank {rank}" + (f", replicas {replicas}" if crew.replicas else ""))
        label = "" if small else replicas if crew.replicas else str(rank)
        square = f'<span class="square{" small" if small else ""}" title="{title}">{label}</span>'
        hosts.setdefault(name.rpartition(":")[0] or "here", []).append((square, replicas if crew.replicas else ""))
    rows = "".join(
        f'<div class="host"><span>{html.escape(host)}</span><span class="squares" role="img" '
        f'aria-label="{plural(len(found), "worker")}{_replicas(found)}">'
        f"{''.join(square for square, _ in found)}</span></div>"
        for host, found in hosts.items()
    )
    return f'<div class="hosts" tabindex="0">{rows}</div>'


def _replicas(found: Sequence[tuple[str, str]]) -> str:
    """In words, for who cannot see the squares."""
    known = [replicas for _, replicas in found if replicas]
    return f" with replicas {', '.join(known)}" if known else ""


def event_list(events: Iterable[Event], unit: str, most: int = 200) -> str:
    newest = _joined(list(events))[-most:][::-1]
    rows = "".join(
        f'<li class="event {EVENT_SHADES.get(event.kind, "calm")}"><span>{html.escape(event.what)}</span>'
        f"<small>{clock(event.time_s)}{'' if event.step is None else f', {unit} {event.step}'}"
        f"{html.escape(f': {event.why}' if event.why else '')}</small></li>"
        for event in newest
    )
    return f'<ul class="events" tabindex="0" aria-label="Events, the newest first">{rows}</ul>' if rows else ""


def _joined(events: Sequence[Event]) -> list[Event]:
    """Learning rates that follow the batch step by step are one entry, the last of them: they would push all else away."""
    found: list[Event] = []
    first: Event | None = None
    for event in events:
        follows = first is not None and found[-1].what.startswith(LR) and event.what.startswith(LR)
        if follows and first is not None:
            found[-1] = replace(event, why=f"{event.why} (again and again since step {first.step})")
        else:
            first = event
            found.append(event)
    return found


def decision_list(happenings: Iterable[Happening], most: int = 100) -> str:
    """What a cluster has decided about all its jobs, and why."""
    decided = [each for each in happenings if SHOWN_AS.get(each.what, "start") != "start"]
    events = [
        Event(SHOWN_AS[each.what], None, each.at_s, f"{each.job}: {each.what}", each.why)
        for each in sorted(decided, key=lambda each: each.at_s)
    ]
    return event_list(events, "step", most)


def event_key(events: Iterable[Event]) -> str:
    """What the lines across the curves mean, of those kinds that there are."""
    there = {event.kind for event in events}
    keys = "".join(
        f'<span><i style="border-color: {EVENT_COLOURS[kind]}"></i>{words}</span>'
        for kind, words in EVENT_WORDS.items()
        if kind in there
    )
    return f'<div class="key">{keys}</div>' if keys else ""


def log_text(lines: Iterable[str]) -> str:
    text = plain("\n".join(lines))
    return f'<div class="log" tabindex="0" role="region" aria-label="Log"><pre>{html.escape(text)}</pre></div>'


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(at_s: float) -> str:
    """The time of day, with the day where that is another one."""
    at, today = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if at[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", at)


def _last(job: Job, figure: str) -> float | None:
    series = job.story.figures.get(figure)
    return series.last if series is not None else None
