"""Charts of jobs as options of Apache ECharts: plain dictionaries. Pure.

Text that others have written (reasons, names) is escaped in tooltips and never becomes a key, because the page runs
the values of keys that begin with a colon. Colours are from the middle of the scale, so that one set of options serves
on a dark and on a light page.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pliant.duration import span_text
from pliant.fed.participation import RoundClients
from pliant.ui.timeline import (
    LR,
    OUTCOMES,
    FederatedTimeline,
    JobTimeline,
    Point,
    Series,
    TimelineEvent,
    clients_text,
)

# --- frames and lines ---


Options = dict[str, Any]

COLOURS = ("#4c8dff", "#f59e0b", "#22b07d", "#e5484d", "#8e6cf0", "#12a5b8", "#d6409f", "#8d8d86")
TEXT, LINE = "#79818d", "rgba(128,136,150,.22)"
MOST_POINTS = 800
MOST_DOTS = 4000
"""Most clients in the chart of the newest rounds."""
MOST_MEANS = 240
"""Most points of a curve's outline, and of its means."""
ROUND = "v => v == null ? '' : (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString('en') : String(Number(v.toPrecision(4))))"


def frame(legend: bool, x_name: str, y_name: str) -> Options:
    return {
        "grid": {"left": 8, "right": 20, "top": 34 if legend else 26, "bottom": 22, "containLabel": True},
        "legend": {"show": legend, "top": 0, "right": 8, "textStyle": {"color": TEXT}, "icon": "roundRect", "itemHeight": 4,
                   "type": "scroll"},
        "tooltip": {**tooltip("axis"), ":valueFormatter": ROUND},
        "xAxis": {
            "type": "value",
            "name": x_name,
            "nameLocation": "middle",
            "nameGap": 24,
            "nameTextStyle": {"color": TEXT, "fontSize": 11},
            "axisLabel": {"color": TEXT, "hideOverlap": True, "fontSize": 11, "alignMaxLabel": "right"},
            "axisLine": {"lineStyle": {"color": LINE}},
            "splitLine": {"show": False},
        },
        "yAxis": axis(y_name),
        "series": [],
    }  # fmt: skip


def axis(name: str) -> Options:
    return {
        "type": "value",
        "name": name,
        "scale": True,
        "nameTextStyle": {"color": TEXT, "fontSize": 11, "align": "left"},
        "axisLabel": {"color": TEXT, "fontSize": 11},
        "splitLine": {"lineStyle": {"color": LINE}},
    }


def tooltip(trigger: str) -> Options:
    return {"trigger": trigger, "confine": True, "className": "chart-tip", "transitionDuration": 0,
            "axisPointer": {"type": "line", "lineStyle": {"color": TEXT}}}  # fmt: skip


def line(name: str, points: Sequence[Point], colour: str, *, pale: bool = False) -> Options:
    return {
        "type": "line",
        "name": name,
        "data": [[x, float(f"{y:.6g}")] for x, y in points],
        "showSymbol": False,
        "lineStyle": {"width": 1 if pale else 2, "opacity": 0.3 if pale else 1},
        "itemStyle": {"color": colour},
        "z": 2 if pale else 3,
        "animation": False,
        "silent": pale,
    }


# --- training jobs ---


EVENT_COLOURS = {
    "start": "#8d8d86",
    "resize": "#22b07d",
    "lost": "#e5484d",
    "decision": "#8e6cf0",
    "refused": "#f59e0b",
    "resumed": "#12a5b8",
    "gap": "#f59e0b",
    "stalled": "#f59e0b",
    "end": "#8d8d86",
}
MOST_TOLD = 200
"""Events that the tooltip knows: the newest."""
MOST_APART, FEW_APART = 50, 10
"""Most event lines of one kind across a chart, and most lines of learning rates."""
BATCH = "global batch"
FAR_ABOVE = 20
NOISE = {"noise scale": "noise_scale", "variance": "variance", BATCH: "batch_size"}
"""Figures of a timeline by their name in the chart of the noise scale."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps that are drawn, and the events in them."""

    begin: int
    end: int
    events: tuple[TimelineEvent, ...] = ()

    @classmethod
    def of(
        cls,
        timeline: JobTimeline,
        events: Iterable[TimelineEvent] | None = None,
        chosen: tuple[int, int | None] = (0, None),
    ) -> StepWindow:
        """Return a window of all steps, or of the chosen ones; without an end, up to the newest step."""
        begin, end = max(0, chosen[0]), max(1, timeline.step if chosen[1] is None else chosen[1])
        begin = min(begin, end - 1)
        known = timeline.events if events is None else events
        inside = [event for event in known if event.step is not None and begin <= event.step <= end]
        return cls(begin, end, tuple(event for event in inside if event.kind not in ("start", "end")))


def curves(given: Mapping[str, Series], window: StepWindow, *, unit: str = "", least: float | None = None) -> Options:
    """Return a chart of series by step, with events as vertical lines that the tooltip explains."""
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


PHASE_NAMES = {"compute_s": "turns", "wait_s": "waiting", "other_s": "rest of the program"}


def phases(given: Mapping[str, Series], window: StepWindow) -> Options:
    """Return a chart of how the time of steps divides, one phase above the other."""
    options = curves(given, window, unit="s", least=0)
    options["series"] = [each for each in options["series"] if not each["silent"]]
    for each in options["series"]:
        each |= {"stack": "phases", "areaStyle": {"opacity": 0.4}}
    return options


def description(given: Mapping[str, Series], window: StepWindow) -> str:
    """Describe the curves in words, for screen readers."""
    told = []
    for name, whole in given.items():
        points = whole.part(window.begin, window.end).thinned(40)
        if points:
            heights = [y for _, y in points]
            told.append(f"{name} {points[-1][1]:.4g}, between {min(heights):.4g} and {max(heights):.4g}")
    events = f"; {len(window.events)} events" if window.events else ""
    return f"steps {window.begin} to {window.end}: {'; '.join(told) or 'nothing yet'}{events}"


def apart(window: StepWindow) -> list[TimelineEvent]:
    """Return the events that get a line, none too near to another one of its kind.

    Decisions on the learning rate give way to other decisions; a lost worker always gets a line.
    """
    span = window.end - window.begin
    drawn: list[TimelineEvent] = []
    for event in sorted(window.events, key=lambda event: (event.kind != "lost", event.what.startswith(LR))):
        gap = span / (FEW_APART if event.what.startswith(LR) else MOST_APART)
        near = (each for each in drawn if each.kind == event.kind and abs((each.step or 0) - (event.step or 0)) < gap)
        if event.kind == "lost" or next(near, None) is None:
            drawn.append(event)
    return drawn[::-1]  # what is grave is drawn over the rest


def worker_map(timeline: JobTimeline, window: StepWindow, most_rows: int = 128) -> tuple[Options, int]:
    """Return a chart of when each worker was present and its replicas, and the number of rows; by host if there are many."""
    stays = [
        (name, max(begin, window.begin), min(end, window.end), count)
        for name, begin, end, count in _stays(timeline)
        if end > window.begin and begin < window.end
    ]
    there = {name for name, *_ in stays}
    names = [name for name in dict.fromkeys(name for view in timeline.views for name in view.workers) if name in there]
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


def noise(given: Mapping[str, Series], window: StepWindow) -> Options:
    """Return a chart of the noise scale beside the batch of all replicas, both in samples."""
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


def _stays(timeline: JobTimeline) -> list[tuple[str, int, int, int]]:
    """Return (worker, first step, last step, replicas) for each time that a worker was present."""
    found: list[tuple[str, int, int, int]] = []
    open_: dict[str, tuple[int, int]] = {}
    begins = [0, *(view.step - 1 for view in timeline.views[1:])]
    for view, begin in zip(timeline.views, begins, strict=True):
        share, more = divmod(view.replicas, len(view.workers))
        now = {name: share + (rank < more) for rank, name in enumerate(view.workers)}
        for name, (since, count) in list(open_.items()):
            if now.get(name) != count:
                found.append((name, since, begin, count))
                del open_[name]
        for name, count in now.items():
            open_.setdefault(name, (begin, count))
    found += [(name, since, max(since, timeline.step), count) for name, (since, count) in open_.items()]
    return found


def _by_host(stays: Sequence[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """Join the times of each host's workers that begin and end together, and add up their replicas."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for name, begin, end, count in stays:
        sums[_host(name), begin, end] += count
    return [(*key, count) for key, count in sums.items()]


def _host(worker: str) -> str:
    return worker.rpartition(":")[0] or worker


def _mark_lines(events: Sequence[TimelineEvent]) -> Options:
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


def _formatter(window: StepWindow) -> str:
    """Return the JavaScript of a tooltip: the values at a step, and the events near it."""
    told = [
        [event.step, EVENT_COLOURS.get(event.kind, TEXT), html.escape(event.what), html.escape(event.why)]
        for event in window.events[-MOST_TOLD:]
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


# --- federated jobs ---


OUTCOME_COLOURS = {"aggregated": COLOURS[2], "cut": COLOURS[1], "lost": COLOURS[3]}


def fed_accuracy(fed: FederatedTimeline) -> Options:
    """Return a chart of the accuracy over the virtual clock."""
    given = {"accuracy": fed.accuracy, "top-5": fed.top_5}
    shown = {name: series for name, series in given.items() if len(series)}
    unit, scale = ("hours", 1) if fed.clock_s >= 7200 else ("minutes", 60)
    options = frame(len(shown) > 1, f"{unit} of the virtual clock", "%")
    options["series"] = [
        {**line(name, [(x * scale, y) for x, y in series.thinned(MOST_POINTS)], colour), "showSymbol": len(series) < 40}
        for (name, series), colour in zip(shown.items(), COLOURS, strict=False)
    ]
    if fed.target is not None and options["series"]:
        options["series"][0]["markLine"] = {
            "symbol": "none",
            "silent": True,
            "label": {"formatter": "target", "position": "insideStartBottom", "color": TEXT},
            "data": [{"yAxis": fed.target, "lineStyle": {"color": COLOURS[2], "type": "dashed"}}],
        }
    return options


def fed_loss(fed: FederatedTimeline) -> Options:
    """Return a chart of the training loss of aggregated clients, and of the test loss."""
    shown = {name: series for name, series in fed_losses(fed).items() if len(series)}
    options = frame(True, "round", "")
    options["series"] = [
        line(name, series.mean(MOST_MEANS), colour)
        for (name, series), colour in zip(shown.items(), COLOURS, strict=False)
    ]
    return options


def fed_losses(fed: FederatedTimeline) -> dict[str, Series]:
    return {"training": fed.loss, "test": fed.test_loss}


def fed_rounds(fed: FederatedTimeline) -> Options:
    """Return a chart of aggregated, cut and lost clients by round, and of the rounds' duration."""
    options = frame(True, "round", "")
    options["yAxis"] = [{**options["yAxis"], "min": 0}, {**axis(""), "min": 0, "splitLine": {"show": False}}]
    options["series"] = [
        {
            **line(name, fed.outcomes[name].mean(MOST_MEANS), colour),
            "stack": "clients",
            "areaStyle": {"opacity": 0.4},
        }
        for name, colour in OUTCOME_COLOURS.items()
        if name in fed.outcomes
    ]
    options["series"].append({**line("duration in s", fed.duration_s.mean(MOST_MEANS), COLOURS[4]), "yAxisIndex": 1})
    return options


def fed_picked(fed: FederatedTimeline) -> Options:
    """Return a chart of the clients in the newest rounds, with a dot for each."""
    shown = _dots(fed)
    options = frame(False, "round", "client")
    options["xAxis"] |= {"min": "dataMin", "max": "dataMax"}
    options["tooltip"] = {**tooltip("item"), ":formatter": "p => `round ${p.value[0]}, client ${p.value[1]}`"}
    options["legend"]["show"], options["grid"]["top"] = True, 34
    options["series"] = [
        {
            "type": "scatter",
            "name": outcome,
            "symbolSize": 5,
            "itemStyle": {"color": colour, "opacity": 0.8},
            "data": [[number, client] for number, clients in shown.items() for client in clients[outcome]],
            "animation": False,
        }
        for outcome, colour in OUTCOME_COLOURS.items()
    ]
    return options


def _dots(fed: FederatedTimeline) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return clients by round and outcome, of as many of the newest rounds as can be drawn; of a larger round, every so many."""
    shown: dict[int, dict[str, tuple[int, ...]]] = {}
    room = MOST_DOTS
    for number in sorted(fed.recent, reverse=True):
        clients = {outcome: getattr(fed.recent[number], outcome) for outcome in OUTCOME_COLOURS}
        count = sum(map(len, clients.values()))
        if shown and (not room or count > room):
            break
        every = max(1, -(-count // room))
        shown[number] = {outcome: ids[::every] for outcome, ids in clients.items()}
        room -= count
    return dict(sorted(shown.items()))


def fed_fairness(fed: FederatedTimeline) -> Options:
    """Return a histogram of how often clients were picked, with those that never were."""
    picked = fed.clients.figures().picked
    labels = [f"{low:g}" if high - low == 1 else f"{low:g}-{high - 1:g}" for low, high in pairwise(picked.bars.edges)]
    never = {"0": picked.never} if picked.never else {}
    return _histogram([*never, *labels], [*never.values(), *picked.bars.counts], "times picked")


def fed_durations(fed: FederatedTimeline) -> Options | None:
    """Return a histogram of how long clients take for an update; None if the record does not tell."""
    took = fed.clients.figures().duration_s
    if took is None:
        return None
    labels = [f"{low:.3g}-{high:.3g}" for low, high in pairwise(took.bars.edges)]
    return _histogram(labels, took.bars.counts, "seconds of an update")


def _histogram(labels: Sequence[str], heights: Sequence[int], name: str) -> Options:
    options = frame(False, name, "clients")
    options["xAxis"] |= {"type": "category", "data": labels}
    options["series"] = [
        {
            "type": "bar",
            "name": "clients",
            "data": list(heights),
            "itemStyle": {"color": COLOURS[0], "borderRadius": [3, 3, 0, 0]},
            "animation": False,
        }
    ]
    return options


def fed_description(fed: FederatedTimeline) -> dict[str, str]:
    """Describe the charts in words, for screen readers."""
    target = "" if fed.target is None else f", target {fed.target:g} %"
    newest = fed.recent[max(fed.recent)] if fed.recent else RoundClients()
    counts = ", ".join(f"{len(getattr(newest, outcome))} {outcome}" for outcome in OUTCOMES)
    told = dict(fed.clients.figures().facts())
    best = "none yet" if fed.best is None else f"{fed.best:.2f} % at best"
    last = {name: series.last for name, series in fed_losses(fed).items()}
    said = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if value is not None)
    return {
        "accuracy": f"accuracy over the virtual clock: {best} after {span_text(fed.clock_s)}{target}",
        "loss": f"loss by round: {said or 'none yet'}",
        "rounds": f"{fed.rounds} rounds; the newest: {counts}",
        "picked": f"who was picked in the newest rounds; round {fed.rounds}: {clients_text(newest.invited)}",
        "fairness": f"clients picked: {told['clients picked']}; per client: {told['picked per client']}",
        "durations": f"an update takes {told.get('an update takes', 'an unknown time')}",
    }
