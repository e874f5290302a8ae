"""What a trace of torch.profiler says: how busy the device was, what it waited for, and where the host's time went.

A trace is a list of events as chrome://tracing has them: `ph` "X" is a duration, `ts` and `dur` are microseconds, `cat` is
the category. This module does not load torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation", "python_function")
TOP = 15
"""Length of each list."""
LONG_GAP_US = 20.0
IO_LOOP = "pliant/comm/reactor.py("
"""Functions of this file run in pliant's background threads only."""


def summarise(events: Iterable[Event], steps: int) -> dict[str, object]:
    """Return the summary of a trace of `steps` steps; times are seconds per step, counts are per step."""
    spans = [event for event in events if event.get("ph") == "X" and float(event.get("dur", 0)) >= 0]
    device = sorted((each for each in spans if each.get("cat") in ON_DEVICE), key=lambda each: float(each["ts"]))
    host = without_waiting_threads([each for each in spans if each.get("cat") in ON_HOST])
    busy_us, idle = busy_and_idle(device)
    own = self_times(host)
    per_step_s = 1e-6 / steps
    long_gaps = [gap_us for gap_us, _ in idle if gap_us >= LONG_GAP_US]
    summary: dict[str, object] = {
        "device_busy_s": busy_us * per_step_s,
        "device_idle_s": sum(gap_us for gap_us, _ in idle) * per_step_s,
        "long_gaps": len(long_gaps) / steps,
        "long_gaps_s": sum(long_gaps) * per_step_s,
        "kernels": len(device) / steps,
        "copies_s": sum(float(each["dur"]) for each in device if each["cat"] != "kernel") * per_step_s,
        "top_kernels": _top(((str(each["name"]), float(each["dur"])) for each in device), steps),
        "top_waits": _top(((f"before {name}", gap_us) for gap_us, name in idle), steps),
        "top_host": _top(((str(event["name"]), time_us) for event, time_us in own if not _is_python(event)), steps),
    }
    if any(_is_python(each) for each in host):
        ours = [(event, time_us) for event, time_us in own if is_ours(str(event["name"]))]
        summary["pliant_own_s"] = sum(time_us for _, time_us in ours) * per_step_s
        summary["pliant_s"] = outermost_us(host, lambda event: is_ours(str(event["name"]))) * per_step_s
        summary["top_pliant"] = _top(((_short(str(event["name"])), time_us) for event, time_us in ours), steps)
        summary["top_python"] = _top(
            ((_short(str(event["name"])), time_us) for event, time_us in own if _is_python(event)), steps
        )
        inside = (event for event in host if is_ours(str(event["name"])))
        summary["pliant_calls"] = _top(((_short(str(each["name"])), float(each["dur"])) for each in inside), steps)
    return summary


def is_ours(name: str) -> bool:
    """Return whether this is a Python function of the package pliant, as the profiler names functions: PATH(LINE): NAME."""
    path = name.partition("(")[0]
    return path.endswith(".py") and (path.startswith("pliant/") or "/pliant/" in path) and "pliant_repro" not in path


def without_waiting_threads(host: Sequence[Event]) -> list[Event]:
    """Return the events without those of pliant's background threads, which wait for messages nearly all the time."""
    in_loop = (
        each for each in host if IO_LOOP in str(each["name"]) and str(each["name"]).endswith((": _run", ": _poll"))
    )
    waiting = {_thread(each) for each in in_loop}
    return [each for each in host if _thread(each) not in waiting]


def _thread(event: Event) -> tuple[object, object]:
    return event.get("pid"), event.get("tid")


def busy_and_idle(device: Sequence[Event]) -> tuple[float, list[tuple[float, str]]]:
    """Return the microseconds in which the device did anything, and each gap with the name of what ended it.

    The events are in the order of their beginning; they may overlap, because a device has several streams.
    """
    busy_us, idle = 0.0, []
    end_us: float | None = None
    for event in device:
        begin_us, dur_us = float(event["ts"]), float(event["dur"])
        if end_us is not None and begin_us > end_us:
            idle.append((begin_us - end_us, str(event["name"])))
        new_us = begin_us + dur_us - max(begin_us, begin_us if end_us is None else end_us)
        busy_us += max(0.0, new_us)
        end_us = max(begin_us + dur_us, begin_us if end_us is None else end_us)
    return busy_us, idle


def self_times(host: Iterable[Event]) -> list[tuple[Event, float]]:
    """Return the microseconds of each event without those of the events inside of it, thread by thread."""
    found: list[tuple[Event, float]] = []
    for events in _by_thread(host).values():
        open_events: list[tuple[Event, float, list[float]]] = []  # (event, its end, time of its children)
        for event in events:
            begin_us, dur_us = float(event["ts"]), float(event["dur"])
            while open_events and open_events[-1][1] <= begin_us:
                _close(open_events, found)
            if open_events:
                open_events[-1][2][0] += dur_us
            open_events.append((event, begin_us + dur_us, [0.0]))
        while open_events:
            _close(open_events, found)
    return found


def _close(open_events: list[tuple[Event, float, list[float]]], found: list[tuple[Event, float]]) -> None:
    event, _, children = open_events.pop()
    found.append((event, max(0.0, float(event["dur"]) - children[0])))


def outermost_us(host: Iterable[Event], is_wanted: Callable[[Event], bool]) -> float:
    """Return the microseconds of the wanted events that are not inside of another wanted one.

    A generator's frame counts only while it runs, so what a loop's body does is not counted.
    """
    total_us = 0.0
    for events in _by_thread(each for each in host if is_wanted(each)).values():
        end_us = float("-inf")
        for event in events:
            begin_us, dur_us = float(event["ts"]), float(event["dur"])
            if begin_us >= end_us:
                total_us += dur_us
                end_us = begin_us + dur_us
    return total_us


def _by_thread(events: Iterable[Event]) -> dict[object, list[Event]]:
    """Return the events of each thread in the order of their beginning, outer ones before inner ones."""
    found: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        found[_thread(event)].append(event)
    for each in found.values():
        each.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    return found


def _is_python(event: Event) -> bool:
    return event.get("cat") == "python_function"


def _short(name: str) -> str:
    """Cut off what is before the package in the path of a function."""
    for package in ("/pliant/", "/torch/", "/pliant_repro/"):
        before, found, rest = name.rpartition(package)
        if found and ".py(" not in before:
            return package[1:] + rest
    return name


def _top(items: Iterable[tuple[str, float]], steps: int) -> list[dict[str, object]]:
    """Return the names with the most microseconds in all, with seconds and number per step."""
    total_us: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for name, time_us in items:
        total_us[name] += time_us
        count[name] += 1
    names = sorted(total_us, key=lambda name: -total_us[name])[:TOP]
    return [{"name": name[:120], "s": total_us[name] * 1e-6 / steps, "count": count[name] / steps} for name in names]
