"""The trace of a job, and what it proves: with priority sync a forward begins before all sums of the last step are there."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from golden import golden
from stage import run_fixed
from subject import Task, compare

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
CATEGORIES = {"step", "wait", "apply", "push", "reply", "back"}
STEPS, PER_EPOCH = 12, 6
FIRST = "3.bias"
"""What the unit of the first layers is called after: its first member, in the order of its bucket."""

Event = dict[str, Any]


def _events(path: Path, rank: int) -> list[Event]:
    """What Chrome would draw; fails if it could not."""
    found = json.loads(path.read_text())["traceEvents"]
    named = {each["tid"]: each["args"]["name"] for each in found if each["ph"] == "M" and each["name"] == "thread_name"}
    assert any(each["ph"] == "M" and each["name"] == "process_name" for each in found)
    drawn = [each for each in found if each["ph"] == "X"]
    assert len(drawn) + len(named) + 1 == len(found)
    for each in drawn:
        assert each["pid"] == rank
        assert each["cat"] in CATEGORIES
        assert each["name"]
        assert each["ts"] > 0
        assert each["dur"] >= 0
        assert named[each["tid"]] == each["cat"]
    return sorted(drawn, key=lambda each: float(each["ts"]))


def _of(events: list[Event], category: str) -> list[Event]:
    return [each for each in events if each["cat"] == category]


def _arrivals(events: list[Event], colons: int) -> dict[int, float]:
    """When the last slice of each step came back. Every slice comes once in each step but the first, where the layout is
    another one. Units are called grad:2:bucket:place, whole buckets grad:2:bucket."""
    by_slice: defaultdict[str, list[float]] = defaultdict(list)
    for each in _of(events, "back"):
        if each["name"].startswith("grad:2:") and each["name"].count(":") == colons:
            by_slice[each["name"]].append(each["ts"])
    assert {len(times) for times in by_slice.values()} == {STEPS - 1}, "not every slice came in every step"
    return {step: max(times) for step, times in enumerate(zip(*by_slice.values(), strict=True), 1)}


def _late(events: list[Event], arrivals: dict[int, float]) -> set[int]:
    """Steps whose last slice came when the program was already in the next one."""
    ends = {each["name"]: each["ts"] + each["dur"] for each in _of(events, "step")}
    return {step for step, last_us in arrivals.items() if last_us > ends.get(f"step {step}", float("inf"))}


def test_the_forward_begins_before_all_sums_are_there(tmp_path: Path) -> None:
    """Where the network is slow, in every step but those at the end of an epoch; and with fifo never."""
    tasks = [
        Task(
            program="conv",
            replicas=3,
            epochs=2,
            journal=str(tmp_path / sync),
            sync=sync,
            slice_bytes=4096,
            trace=str(tmp_path / f"trace-{sync}"),
            tampering="slow_rest",
            adapting={"verify": 0},  # a comparison waits for all sums
        )
        for sync in ("priority", "fifo")
    ]
    for task in tasks:  # each in processes of its own, as a trace is that of a process
        [found] = run_fixed([task], 3, hosts=HOSTS)
        compare(found, golden("conv", 3, 2))
    for rank in range(3):
        _check_priority(_events(tmp_path / f"trace-priority.{rank}.json", rank))
        _check_fifo(_events(tmp_path / f"trace-fifo.{rank}.json", rank))


def _check_priority(events: list[Event]) -> None:
    arrivals = _arrivals(events, 3)
    ends = set(range(PER_EPOCH - 1, STEPS, PER_EPOCH))
    steady = set(range(1, STEPS)) - ends
    late = _late(events, arrivals)
    assert len(late & steady) >= 0.9 * len(steady), f"the next forward was early after steps {sorted(late)} only"
    assert not late & ends, "an epoch was over before its last step"
    # And it was not only begun: its first layer had been updated.
    first = [each for each in _of(events, "apply") if each["name"].startswith(FIRST)]
    assert len(first) == STEPS - 1
    updated = {step for step, each in enumerate(first, 1) if each["ts"] + each["dur"] < arrivals[step]}
    assert len(updated & steady) >= 0.9 * len(steady)
    assert any(not each["name"].startswith(FIRST) for each in _of(events, "wait")), "no later layer was waited for"


def _check_fifo(events: list[Event]) -> None:
    assert not _late(events, _arrivals(events, 2)), "something of a step came after its end"
    assert not _of(events, "apply"), "something was updated by itself"


def test_without_the_variable_nothing_is_written(tmp_path: Path) -> None:
    task = Task(program="conv", replicas=2, epochs=1, journal=str(tmp_path / "journal"), sync="priority")
    run_fixed([task], 2)
    assert not list(tmp_path.glob("*.json"))
