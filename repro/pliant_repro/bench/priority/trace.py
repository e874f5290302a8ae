"""One Chrome trace out of those that the workers of `pliant bench priority` wrote. Open it in ui.perfetto.dev."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pliant.machine import Json

_FILE = re.compile(r"trace-(.+)\.(\d+)\.json")
RANKS = 1000
"""Process numbers of one side: side * RANKS + rank."""


def merged(traces: Mapping[str, Mapping[int, Sequence[Json]]]) -> Json:
    """The events of all sides and ranks; each rank of a side is a process of its own, and time begins at 0."""
    everything = [event for ranks in traces.values() for events in ranks.values() for event in events]
    begin_us = min((float(str(event["ts"])) for event in everything if "ts" in event), default=0.0)
    found: list[Json] = []
    for number, (side, ranks) in enumerate(traces.items()):
        for rank, events in sorted(ranks.items()):
            pid = number * RANKS + rank
            found.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{side} rank {rank}"}})
            found.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
            for event in events:
                moved = {"ts": float(str(event["ts"])) - begin_us} if "ts" in event else {}
                found.append({**event, **moved, "pid": pid})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def collect(folder: Path) -> dict[str, dict[int, list[Json]]]:
    """What the workers have left in `folder`, by side and rank. A file that is cut short is left out."""
    traces: dict[str, dict[int, list[Json]]] = {}
    for path in sorted(folder.glob("trace-*.json")):
        named = _FILE.fullmatch(path.name)
        if named is None:
            continue
        try:
            values = json.loads(path.read_text())
        except ValueError:
            continue
        events = values["traceEvents"] if isinstance(values, dict) else values
        traces.setdefault(named[1], {})[int(named[2])] = list(events)
    return traces
