"""Charts of training jobs by step, as options of Apache ECharts: plain dictionaries. Pure.

Text that others have written (reasons, names) goes into tooltips escaped, and never becomes a key: the page runs keys
that begin with a colon.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pliant.ui.frames import COLOURS, MOST_MEANS, MOST_POINTS, ROUND, TEXT, Options, frame, line, tooltip
from pliant.ui.series import Series
from pliant.ui.story import LR, Event, Story

EVENT_COLOURS = {
    "start": "#8d8d86",
    "resize": "#22b07d",
    "lost": "#e5484d",
    "decision": "#8e6cf0",
    "refused": "#f59e0b",
    "resumed": "#12a5b8",
    "end": "#8d8d86",
}
MOST_MARKS = 120
MOST_APART, FEW_APART = 50, 10
"""Lines of one kind across a chart; of learning rates."""
BATCH = "global batch"
FAR_ABOVE = 20
NOISE = {"noise scale": "noise_scale", "variance": "variance", BATCH: "batch_size"}
"""What the noise's chart calls the figures of a story."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are drawn, and what happened in them."""

    begin: int
    end: int
    events: tuple[Event, ...] = ()

    @classmethod
    def of(
        cls, story: Story, events: Iterable[Event] | None = None, chosen: tuple[int, int | None] = (0, None)
    ) -> Window:
        """All steps, or those that were chosen; to the newest, where there is no end. The events default to the story's."""
        begin, end = max(0, chosen[0]), max(1, story.step if chosen[1] is None else chosen[1])
        begin = min(begin, end - 1)
        known = story.events if events is None else events
        inside = [event for event in known if event.step is not None and begin <= event.step <= end]
        return cls(begin, end, tuple(marks(inside)))


def curves(given: Mapping[str, Series], window: Window, *, unit: str = "", least: float | None = None) -> Options:
    """Series by step, with what happened as vertical lines; near one of those, the tooltip tells what and why."""
    lines: list[Options] = []
    for (name, whole), colour in zip(given.items(), COLOURS, strict=False):
        series = whole.part(window.begin, window.end)
        if len(series) > MOST_MEANS:  # the outline in pale, so that no spike is lost, and the means over it
            lines.append(line(name, series.thinned(MOST_POINTS), colour, pale=True))
        lines.append(line(name, series.mean(MOST_MEANS), colour))
    if lines:
        lines[-1]["markLine"] = _mark_lines(apart(window))
    options = frame(len(given) > 1, "step", unit)
    options["xAxis"] |= {"min": window.begin, "max": window.end}
    if least is not None:
        options["yAxis"]["min"] = least
    options["tooltip"][":formatter"] = _formatter(window)
    options["series"] = lines
    return options


def spoken(given: Mapping[str, Series], window: Window) -> str:
    """The same in words, for who cannot see it."""
    told = []
    for name, whole in given.items():
        points = whole.part(window.begin, window.end).thinned(40)
        if points:
            heights = [y for _, y in points]
            told.append(f"{name} {points[-1][1]:.4g}, between {min(heights):.4g} and {max(heights):.4g}")
    events = f"; {len(window.events)} events" if window.events else ""
    return f"steps {window.begin} to {window.end}: {'; '.join(told) or 'nothing yet'}{events}"


def marks(events: Iterable[Event], most: int = MOST_MARKS) -> list[Event]:
    """The events that are drawn: where there are too many, losses and decisions first, and the newest of all."""
    drawn = [event for event in events if event.kind not in ("start", "end")]
    if len(drawn) <= most:
        return drawn
    grave = [event for event in drawn if event.kind == "lost"][-most // 2 :]
    rest = [event for event in drawn if event.kind != "lost"][-(most - len(grave)) :]
    return sorted(grave + rest, key=lambda event: event.time_s)


def apart(window: Window) -> list[Event]:
    """Those that get a line: of a kind, none nearer to another than can be told apart. Learning rates, which may follow the batch
    in every step, give way to what else was decided; a lost worker to nothing."""
    span = window.end - window.begin
    drawn: list[Event] = []
    for event in sorted(window.events, key=lambda event: (event.kind != "lost", event.what.startswith(LR))):
        gap = span / (FEW_APART if event.what.startswith(LR) else MOST_APART)
        near = (each for each in drawn if each.kind == event.kind and abs((each.step or 0) - (event.step or 0)) < gap)
        if event.kind == "lost" or next(near, None) is None:
            drawn.append(event)
    return drawn[::-1]  # what is grave is drawn over the rest


def crew_map(story: Story, window: Window, most_rows: int = 128) -> tuple[Options, int]:
    """Who was there from which step to which, and with how many replicas; and the number of rows. Hosts, if workers are many."""
    stays = [
        (name, max(begin, window.begin), min(end, window.end), count)
        for name, begin, end, count in _stays(story)
        if end > window.begin and begin < window.end
    ]
    there = {name for name, *_ in stays}
    names = [name for name in dict.fromkeys(name for crew in story.crews for name in crew.workers) if name in there]
    if len(names) > most_rows:
        stays = _by_host(stays)
        names = list(dict.fromkeys(_host(name) for name in names))[:most_rows]
    row = {name: number for number, name in enumerate(names)}
    most = max((count for *_, count in stays), default=1)
    data = [
        {
            "value": [row[name], begin, end, count],
            "itemStyle": {"color": COLOURS[0], "opacity": round(0.3 + 0.7 * count / max(1, most), 3)},
        }
        for name, begin, end, count in stays
        if name in row
    ]
    options = frame(False, "step", "")
    options["grid"]["left"] = 8
    options["xAxis"] |= {"min": window.begin, "max": window.end}
    options["yAxis"] = {
        "type": "category",
        "data": names,
        "inverse": True,
        "axisLabel": {
            "color": TEXT,
            "fontSize": 10,
            "width": 110,
            "overflow": "truncate",
            "interval": len(names) // 16,
        },
        "axisLine": {"show": False},
        "axisTick": {"show": False},
    }
    options["tooltip"] = {
        **tooltip("item"),
        ":formatter": "p => `steps ${p.value[1]} to ${p.value[2]}<br>${p.value[3]} replica${p.value[3] === 1 ? '' : 's'}`",
    }
    options["series"] = [
        {
            "type": "custom",
            ":renderItem": (
                "(p, api) => { const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]);"
                " const h = Math.max(1, Math.min(20, api.size([0, 1])[1] * .7));"
                " return {type: 'rect', shape: {x: a[0], y: a[1] - h / 2, width: Math.max(1.5, b[0] - a[0]), height: h, r: Math.min(3, h / 4)},"
                " style: api.style()}; }"
            ),
            "encode": {"x": [1, 2], "y": 0},
            "data": data,
            "animation": False,
        }
    ]
    return options, len(names)


def noise(given: Mapping[str, Series], window: Window) -> Options:
    """The gradients' noise scale beside the batch of all replicas: both in samples."""
    options = curves(given, window, unit="samples")
    highest = {name: max((y for _, y in series.thinned(MOST_POINTS)), default=0) for name, series in given.items()}
    if BATCH in highest and max(highest.values()) > FAR_ABOVE * highest[BATCH] > 0:
        # Estimates scatter over powers of ten, and would hide the batch below them.
        options["yAxis"]["type"] = "log"
        for each in options["series"]:
            each["data"] = [point for point in each["data"] if point[1] > 0]
    for each in options["series"]:
        if each["name"] == BATCH:  # it changes at once, and a mean of two sizes is none
            each["step"] = "end"
            each["data"] = [[*point] for point in given[BATCH].part(window.begin, window.end).thinned(MOST_POINTS)]
    return options


def _stays(story: Story) -> list[tuple[str, int, int, int]]:
    """(worker, first step, last step, replicas), neighbours that are alike as one."""
    found: list[tuple[str, int, int, int]] = []
    open_: dict[str, tuple[int, int]] = {}
    begins = [0, *(crew.step - 1 for crew in story.crews[1:])]
    for crew, begin in zip(story.crews, begins, strict=True):
        share, more = divmod(crew.replicas, len(crew.workers))
        now = {name: share + (rank < more) for rank, name in enumerate(crew.workers)}
        for name, (since, count) in list(open_.items()):
            if now.get(name) != count:
                found.append((name, since, begin, count))
                del open_[name]
        for name, count in now.items():
            open_.setdefault(name, (begin, count))
    found += [(name, since, max(since, story.step), count) for name, (since, count) in open_.items()]
    return found


def _by_host(stays: Sequence[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """The stays of each host's workers, with their replicas added up where they begin and end together."""
    sums: dict[tuple[str, int, int], int] = {}
    for name, begin, end, count in stays:
        key = (_host(name), begin, end)
        sums[key] = sums.get(key, 0) + count
    return [(*key, count) for key, count in sums.items()]


def _host(worker: str) -> str:
    return worker.rpartition(":")[0] or worker


def _mark_lines(events: Sequence[Event]) -> Options:
    return {
        "symbol": "none",
        "silent": True,
        "label": {"show": False},
        "animation": False,
        "data": [
            {
                "xAxis": event.step,
                "lineStyle": {
                    "color": EVENT_COLOURS.get(event.kind, TEXT),
                    "type": "solid" if event.kind == "lost" else "dashed",
                    "width": 1.5,
                    "opacity": 0.8,
                },
            }
            for event in events
        ],
    }


def _formatter(window: Window) -> str:
    """The tooltip of a curve: the values here, and what happened near here."""
    told = [
        [event.step, EVENT_COLOURS.get(event.kind, TEXT), html.escape(event.what), html.escape(event.why)]
        for event in window.events
    ]
    near = max(1, (window.end - window.begin) / 80)
    return (
        "params => { const fmt = " + ROUND + ", seen = new Set(), x = params[0].axisValue;"
        " const safe = text => String(text).replace(/[&<>\"']/g, sign => `&#${sign.charCodeAt(0)};`);"
        " let out = `step ${fmt(x)}`;"
        " for (const p of [...params].reverse()) { if (seen.has(p.seriesName)) continue; seen.add(p.seriesName);"
        " out += `<br>${p.marker}${safe(p.seriesName)}: <b>${fmt(p.value[1])}</b>`; }"
        f" for (const [step, colour, what, why] of {json.dumps(told)}.filter(one => Math.abs(one[0] - x) <= {near:g}).slice(-4))"
        " out += `<div class='event-tip' style='border-color:${colour}'><b>${what}</b> at step ${step}<br>${why}</div>`;"
        " return out; }"
    )
