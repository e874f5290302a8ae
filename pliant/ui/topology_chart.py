"""The topology of a job as a chart: which worker (or host, if there are many) sends to which, and how fast. Pure."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.comm.topology import Topology, topologies, tree
from pliant.errors import ConfigError
from pliant.ui.charts import COLOURS, TEXT, Options, tooltip
from pliant.ui.timeline import MeasuredLinks, ViewWorkers

# --- graph ---


MOST_NODES = 64
MOST_EDGES = 600


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A worker, or a host with several workers."""

    name: str
    workers: int
    is_root: bool
    """Whether sums, or shares of them, are completed here."""


@dataclass(frozen=True, slots=True)
class GraphLink:
    """A connection on which partial sums go from one node to another."""

    source: int
    target: int
    lanes: int
    """Number of the strategy's topologies that use it."""
    bytes_per_s: float | None
    """Measured rate; None if it was not measured, or within one host."""


@dataclass(frozen=True, slots=True)
class TopologyGraph:
    """Nodes and links of a topology, and a note on what was left out."""

    nodes: tuple[GraphNode, ...] = ()
    links: tuple[GraphLink, ...] = ()
    note: str = ""


def topology_graph(view: ViewWorkers, measured: MeasuredLinks | None) -> TopologyGraph:
    """Return the topology of a view as a graph."""
    hosts = [name.rpartition(":")[0] or name for name in view.workers]
    try:
        lanes = lanes_of(view.strategy or "AUTO", hosts)
    except (ConfigError, ValueError) as error:
        return TopologyGraph(note=f"topology {view.strategy!r} cannot be drawn: {error}")
    by_host = len(view.workers) > MOST_NODES
    labels = hosts if by_host else list(view.workers)
    names = list(dict.fromkeys(labels))
    place = {name: number for number, name in enumerate(names)}
    roots = {place[labels[lane.root]] for lane in lanes}
    used: Counter[tuple[int, int]] = Counter()
    for lane in lanes:
        for rank, parent in lane.reduce_edges:
            pair = place[labels[rank]], place[labels[parent]]
            if pair[0] != pair[1]:
                used[pair] += 1
    sizes = Counter(labels)
    rates = (
        {
            (source, target): rate
            for source, row in zip(measured.hosts, measured.bytes_per_s, strict=True)
            for target, rate in zip(measured.hosts, row, strict=True)
            if source != target and rate
        }
        if measured
        else {}
    )
    shown = [pair for pair in used if max(pair) < MOST_NODES]
    kept = shown[:: -(-len(shown) // MOST_EDGES) or 1]  # evenly chosen if there are too many
    host_of = dict(zip(labels, hosts, strict=True))
    return TopologyGraph(
        tuple(GraphNode(name, sizes[name], place[name] in roots) for name in names[:MOST_NODES]),
        tuple(
            GraphLink(source, target, used[source, target], rates.get((host_of[names[source]], host_of[names[target]])))
            for source, target in kept
        ),
        _left_out(by_host, len(names), len(used) - len(kept)),
    )


def lanes_of(strategy: str, hosts: list[str]) -> tuple[Topology, ...]:
    """Return the topologies of a strategy, or of a list with each rank's parent, such as `0,0,1`.

    Raises:
        ConfigError: there is no such strategy, or it is no tree of these workers.
    """
    if len(hosts) == 1:
        return (tree([0]),)
    if strategy.replace(",", "").isdecimal():
        parents = [int(parent) for parent in strategy.split(",")]
        if len(parents) != len(hosts):
            raise ConfigError(f"{len(parents)} parents for {len(hosts)} workers")
        return (tree(parents),)
    if len(hosts) > MOST_NODES:  # a star for each of 1000 ranks would be a million edges
        name = {"CLIQUE": "STAR", "RING": "RING", "AUTO": "MULTI_STAR"}.get(strategy.upper(), strategy)
        return topologies(name, hosts)[:MOST_NODES]
    return topologies(strategy, hosts)


def _left_out(by_host: bool, num_nodes: int, num_links: int) -> str:
    parts = ["hosts, not workers: there are many"] if by_host else []
    if num_nodes > MOST_NODES:
        parts.append(f"the first {MOST_NODES} of {num_nodes} hosts")
    elif num_links > 0:
        parts.append(f"without {num_links} more links")
    return "; ".join(parts)


# --- chart ---


MOST_NAMED = 24
SIDES = (-200, 200)
SLOW = 0.25
"""A link with less than this share of the fastest link's rate is drawn in red."""


def topology_chart(graph: TopologyGraph) -> Options:
    """Return a chart with the nodes on a circle. Roots have another colour; faster links are wider."""
    fastest = max((link.bytes_per_s or 0.0 for link in graph.links), default=0.0)
    lines: dict[tuple[int, int], list[GraphLink]] = {}
    for link in graph.links:
        lines.setdefault((min(link.source, link.target), max(link.source, link.target)), []).append(link)
    few = len(graph.nodes) <= MOST_NAMED
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
                        **_place(number, len(graph.nodes)),
                        "symbolSize": 24 if few else 11,
                        "itemStyle": {"color": COLOURS[1] if node.is_root else COLOURS[0]},
                        "told": html.escape(node.name)
                        + (f": {node.workers} workers" if node.workers > 1 else "")
                        + ("<br>owns sums" if node.is_root else ""),
                    }
                    for number, node in enumerate(graph.nodes)
                ]
                # Names stand outside the circle: invisible nodes make room for them on both sides.
                + [
                    {"name": f"side {x}", "x": x, "y": 0, "symbolSize": 0, "label": {"show": False}}
                    for x in SIDES
                    if few
                ],
                "links": [_drawn(graph, links, fastest, len(lines)) for links in lines.values()],
            }
        ],
    }


def topology_description(graph: TopologyGraph) -> str:
    """Describe the topology in words, for screen readers."""
    told = [_ends(graph, link) + f" {rate_text(link.bytes_per_s)}" for link in graph.links if link.bytes_per_s]
    rates = f"; {', '.join(told[:MOST_NAMED])}" if told else ""
    return f"{len(graph.nodes)} nodes, {len(graph.links)} links{rates}"


def _place(number: int, count: int) -> Options:
    """Return the position on the circle, clockwise from the top, with the name on the outer side."""
    angle = 2 * math.pi * number / max(1, count)
    x, y = math.sin(angle), -math.cos(angle)
    side = "right" if x > 0.35 else "left" if x < -0.35 else "top" if y < 0 else "bottom"
    return {"x": round(100 * x, 2), "y": round(100 * y, 2), "label": {"position": side}}


def _drawn(graph: TopologyGraph, links: Sequence[GraphLink], fastest: float, count: int) -> Options:
    """Return the line of a link, or of both directions of a link."""
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
        "told": "<br>".join(_tooltip_text(graph, link) for link in links),
    }


def _tooltip_text(graph: TopologyGraph, link: GraphLink) -> str:
    rate = f": {rate_text(link.bytes_per_s)}" if link.bytes_per_s else ""
    return html.escape(_ends(graph, link)) + rate + (f", {link.lanes} lanes" if link.lanes > 1 else "")


def _ends(graph: TopologyGraph, link: GraphLink) -> str:
    return " → ".join(graph.nodes[place].name for place in (link.source, link.target))


def rate_text(bytes_per_s: float | None) -> str:
    """Return a rate such as `94 Mbit/s`."""
    if bytes_per_s is None:
        return ""
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
