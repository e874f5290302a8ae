"""A chart of a topology: who sends to whom, and how fast, as options of Apache ECharts. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from pliant.ui.frames import COLOURS, TEXT, Options, tooltip
from pliant.ui.topology import Link, Picture

MOST_NAMED = 24
SIDES = (-200, 200)
SLOW = 0.25
"""A link with less than this share of the fastest one's rate stands out."""


def graph(picture: Picture) -> Options:
    """A topology on a circle: roots in another colour, faster links wider, slow ones red. Both ways of a link are one line."""
    fastest = max((link.bytes_per_s or 0.0 for link in picture.links), default=0.0)
    lines: dict[tuple[int, int], list[Link]] = {}
    for link in picture.links:
        lines.setdefault((min(link.source, link.target), max(link.source, link.target)), []).append(link)
    few = len(picture.nodes) <= MOST_NAMED
    return {
        "tooltip": {**tooltip("item"), ":formatter": "p => p.data.told || p.name"},
        "series": [
            {
                "type": "graph",
                "layout": "none",
                "roam": False,
                "animation": False,
                "edgeSymbolSize": 7 if few else 4,
                "lineStyle": {"color": TEXT, "curveness": 0 if len(lines) <= 60 else 0.2},
                "label": {
                    "show": few,
                    "color": TEXT,
                    "fontSize": 11,
                    "distance": 6,
                    "width": 96,
                    "overflow": "truncate",
                },
                "emphasis": {"focus": "adjacency"},
                "data": [
                    {
                        "name": node.name,
                        **_place(number, len(picture.nodes)),
                        "symbolSize": 24 if few else 11,
                        "itemStyle": {"color": COLOURS[1] if node.is_root else COLOURS[0]},
                        "told": html.escape(node.name)
                        + (f": {node.workers} workers" if node.workers > 1 else "")
                        + ("<br>owns sums" if node.is_root else ""),
                    }
                    for number, node in enumerate(picture.nodes)
                ]
                # Names stand outside the circle: what nobody sees makes room for them on both sides.
                + [
                    {"name": f"side {x}", "x": x, "y": 0, "symbolSize": 0, "label": {"show": False}}
                    for x in SIDES
                    if few
                ],
                "links": [_drawn(picture, links, fastest, len(lines)) for links in lines.values()],
            }
        ],
    }


def spoken(picture: Picture) -> str:
    """The same in words, for who cannot see it."""
    told = [_ends(picture, link) + f" {rate_text(link.bytes_per_s)}" for link in picture.links if link.bytes_per_s]
    rates = f"; {', '.join(told[:MOST_NAMED])}" if told else ""
    return f"{len(picture.nodes)} nodes, {len(picture.links)} links{rates}"


def _place(number: int, count: int) -> Options:
    """On the circle, from the top on; the name on the outer side."""
    angle = 2 * math.pi * number / max(1, count)
    x, y = math.sin(angle), -math.cos(angle)
    side = "right" if x > 0.35 else "left" if x < -0.35 else "top" if y < 0 else "bottom"
    return {"x": round(100 * x, 2), "y": round(100 * y, 2), "label": {"position": side}}


def _drawn(picture: Picture, links: Sequence[Link], fastest: float, count: int) -> Options:
    """A link, or both its ways."""
    rates = [link.bytes_per_s for link in links if link.bytes_per_s]
    is_slow = bool(rates) and min(rates) < SLOW * fastest
    return {
        "source": links[0].source,
        "target": links[0].target,
        "symbol": ["arrow" if len(links) > 1 else "none", "arrow"],
        "lineStyle": {
            "color": COLOURS[3] if is_slow else TEXT,
            "width": 1.2 + 4 * min(rates) / fastest if rates else 1.2,
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
    rate = f": {rate_text(link.bytes_per_s)}" if link.bytes_per_s else ""
    return html.escape(_ends(picture, link)) + rate + (f", {link.lanes} lanes" if link.lanes > 1 else "")


def _ends(picture: Picture, link: Link) -> str:
    return " → ".join(picture.nodes[place].name for place in (link.source, link.target))


def rate_text(bytes_per_s: float | None) -> str:
    """Such as `94 Mbit/s`."""
    if bytes_per_s is None:
        return ""
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
