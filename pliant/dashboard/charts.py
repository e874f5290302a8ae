"""Charts of training jobs and of a cluster, as options of Apache ECharts: plain dictionaries. Pure.

Text that others have written (reasons, names) goes into tooltips escaped, and never becomes a key: the page runs keys
that begin with a colon.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence

from pliant.dashboard.allocation import Stay, used
from pliant.dashboard.frames import COLOURS, MOST_MEANS, MOST_POINTS, ROUND, TEXT, Options, frame, line, tooltip
from pliant.dashboard.series import Series
from pliant.dashboard.story import Event, Story
from pliant.dashboard.topology import Link, Picture

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


def curves(given: Mapping[str, Series], story: Story, *, unit: str = "", least: float | None = None) -> Options:
    """Series by step, with what happened as vertical lines; near one of those, the tooltip tells what and why."""
    lines: list[Options] = []
    for (name, series), colour in zip(given.items(), COLOURS, strict=False):
        if len(series) > MOST_MEANS:  # the outline in pale, so that no spike is lost, and the means over it
            lines.append(line(name, series.thinned(MOST_POINTS), colour, pale=True))
        lines.append(line(name, series.mean(MOST_MEANS), colour))
    events = marks(story.events)
    if lines:
        lines[-1]["markLine"] = _mark_lines(events)
    options = frame(len(given) > 1, "step", unit)
    options["xAxis"]["max"] = max(1, story.step)
    if least is not None:
        options["yAxis"]["min"] = least
    options["tooltip"][":formatter"] = _formatter(events, story.step)
    options["series"] = lines
    return options


def marks(events: Iterable[Event], most: int = MOST_MARKS) -> list[Event]:
    """The events that are drawn: where there are too many, losses and decisions first, and the newest of all."""
    drawn = [event for event in events if event.kind not in ("start", "end")]
    if len(drawn) <= most:
        return drawn
    grave = [event for event in drawn if event.kind == "lost"][-most // 2 :]
    rest = [event for event in drawn if event.kind != "lost"][-(most - len(grave)) :]
    return sorted(grave + rest, key=lambda event: event.time_s)


def crew_map(story: Story, most_rows: int = 128) -> tuple[Options, int]:
    """Who was there from which step to which, and with how many replicas; and the number of rows. Hosts, if workers are many."""
    stays = _stays(story)
    names = list(dict.fromkeys(name for name, *_ in stays))
    if len(names) > most_rows:
        stays = _by_host(stays)
        names = list(dict.fromkeys(name for name, *_ in stays))[:most_rows]
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
    options["xAxis"]["max"] = max(1, story.step)
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


def graph(picture: Picture) -> Options:
    """A topology on a circle: roots in another colour, faster links wider. Both ways of a link are one line."""
    fastest = max((link.bytes_per_s or 0.0 for link in picture.links), default=0.0)
    lines: dict[tuple[int, int], list[Link]] = {}
    for link in picture.links:
        lines.setdefault((min(link.source, link.target), max(link.source, link.target)), []).append(link)
    few = len(picture.nodes) <= 24
    return {
        "tooltip": {**tooltip("item"), ":formatter": "p => p.data.told || p.name"},
        "series": [
            {
                "type": "graph",
                "layout": "circular",
                "roam": False,
                "animation": False,
                "edgeSymbolSize": 7 if few else 4,
                "top": 36,
                "bottom": 36,
                "lineStyle": {"color": TEXT, "curveness": 0 if len(lines) <= 60 else 0.2},
                "label": {"show": few, "color": TEXT, "fontSize": 11, "position": "top", "distance": 6},
                "emphasis": {"focus": "adjacency"},
                "data": [
                    {
                        "name": node.name,
                        "symbolSize": 24 if few else 11,
                        "itemStyle": {"color": COLOURS[1] if node.is_root else COLOURS[0]},
                        "told": html.escape(node.name)
                        + (f": {node.workers} workers" if node.workers > 1 else "")
                        + ("<br>owns sums" if node.is_root else ""),
                    }
                    for node in picture.nodes
                ],
                "links": [_drawn(picture, links, fastest, len(lines)) for links in lines.values()],
            }
        ],
    }


def _drawn(picture: Picture, links: Sequence[Link], fastest: float, count: int) -> Options:
    """A link, or both its ways."""
    rates = [link.bytes_per_s for link in links if link.bytes_per_s]
    return {
        "source": links[0].source,
        "target": links[0].target,
        "symbol": ["arrow" if len(links) > 1 else "none", "arrow"],
        "lineStyle": {
            "width": 1 + 4 * min(rates) / fastest if rates else 1.2,
            "opacity": 0.8 if count <= 60 else 0.25,
        },
        "label": {
            "show": bool(rates) and count <= 20,
            "formatter": " | ".join(dict.fromkeys(map(rate_text, rates))),
            "fontSize": 10,
            "color": TEXT,
        },
        "told": "<br>".join(_told(picture, link) for link in links),
    }


def _told(picture: Picture, link: Link) -> str:
    ends = (html.escape(picture.nodes[place].name) for place in (link.source, link.target))
    rate = f": {rate_text(link.bytes_per_s)}" if link.bytes_per_s else ""
    return " → ".join(ends) + rate + (f", {link.lanes} lanes" if link.lanes > 1 else "")


def noise(story: Story) -> Options:
    """The gradients' noise scale beside the batch of all replicas: both in samples."""
    names = {"noise scale": "noise_scale", "variance": "variance", "global batch": "batch_size"}
    given = {name: story.figures[figure] for name, figure in names.items() if figure in story.figures}
    options = curves(given, story, unit="samples")
    for each in options["series"]:
        if each["name"] == "global batch":  # it changes at once, and a mean of two sizes is none
            each["step"] = "end"
            each["data"] = [[*point] for point in story.figures["batch_size"].thinned(MOST_POINTS)]
    return options


def allocation(stays: Sequence[Stay], devices: int, now_s: float) -> Options:
    """The devices of each job over time, on top of each other."""
    options = frame(True, "", "devices")
    options["xAxis"] = {**options["xAxis"], "type": "time", "minInterval": 1000}
    options["yAxis"] |= {"min": 0, "max": max(1, devices), "minInterval": 1}
    options["series"] = [
        {
            **line(job, [(moment * 1000, count) for moment, count in points], COLOURS[number % len(COLOURS)]),
            "step": "end",
            "stack": "devices",
            "areaStyle": {"opacity": 0.45},
        }
        for number, (job, points) in enumerate(used(stays, now_s).items())
    ]
    return options


def rate_text(bytes_per_s: float | None) -> str:
    """Such as `94 Mbit/s`."""
    if bytes_per_s is None:
        return ""
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


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
        key = (name.rpartition(":")[0] or name, begin, end)
        sums[key] = sums.get(key, 0) + count
    return [(*key, count) for key, count in sums.items()]


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


def _formatter(events: Sequence[Event], last_step: int) -> str:
    """The tooltip of a curve: the values here, and what happened near here."""
    told = [
        [event.step, EVENT_COLOURS.get(event.kind, TEXT), html.escape(event.what), html.escape(event.why)]
        for event in events
    ]
    near = max(1, last_step / 80)
    return (
        "params => { const fmt = " + ROUND + ", seen = new Set(), x = params[0].axisValue;"
        " const safe = text => String(text).replace(/[&<>\"']/g, sign => `&#${sign.charCodeAt(0)};`);"
        " let out = `step ${fmt(x)}`;"
        " for (const p of [...params].reverse()) { if (seen.has(p.seriesName)) continue; seen.add(p.seriesName);"
        " out += `<br>${p.marker}${safe(p.seriesName)}: <b>${fmt(p.value[1])}</b>`; }"
        f" for (const [step, colour, what, why] of {json.dumps(told)}) if (Math.abs(step - x) <= {near:g})"
        " out += `<div class='event-tip' style='border-color:${colour}'><b>${what}</b> at step ${step}<br>${why}</div>`;"
        " return out; }"
    )
