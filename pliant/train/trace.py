"""A Chrome trace of one worker: what it computed, what it sent, what it waited for.

With `PLIANT_TRACE=/some/prefix` each worker writes `/some/prefix.{rank}.json` when it ends, for chrome://tracing or
Perfetto. A program may add events of its own. Without the variable nothing happens.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)
VARIABLE = "PLIANT_TRACE"
_TRACKS = {"step": 0, "forward": 1, "backward": 1, "wait": 2, "apply": 3, "push": 4, "reply": 5, "back": 6}
"""The line of the picture on which each category is drawn; others come below."""
_events: list[tuple[str, str, float, float]] = []
_written_to: Path | None = None


def enabled() -> bool:
    """Return whether this process writes a trace."""
    return _written_to is not None


def begin(rank: int) -> None:
    """Start to collect events if the environment asks for it; they are written when the process ends."""
    global _written_to
    prefix = os.environ.get(VARIABLE)
    if prefix and _written_to is None:
        _written_to = Path(f"{prefix}.{rank}.json")
        atexit.register(write, rank)


def event(category: str, name: str, begin_s: float, end_s: float | None = None) -> None:
    """Add an event from `begin_s` to `end_s` (now by default) of time.monotonic(). Any thread may call this."""
    if _written_to is not None:
        _events.append((category, name, begin_s, time.monotonic() if end_s is None else end_s))


def write(rank: int) -> None:
    """Write the events so far."""
    if _written_to is None:
        return
    lines = dict(_TRACKS)
    found = [
        {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": rank,
            "tid": lines.setdefault(category, len(lines)),
            "ts": begin_s * 1e6,
            "dur": max(0.0, end_s - begin_s) * 1e6,
        }
        for category, name, begin_s, end_s in list(_events)
    ]
    names = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": line, "args": {"name": category}}
        for category, line in lines.items()
        if category != "backward"
    ]
    names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}})
    try:
        _written_to.write_text(json.dumps({"traceEvents": names + found}))
    except OSError as error:
        log.warning("the trace %s is not written: %s", _written_to, error.strerror)
