"""Where replicas go: EasyScale's worked example, brute force, and the limits of proposals."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pliant.cli.main import build
from pliant.errors import ConfigError
from pliant.sched.planner import MAX_WASTE, DeviceType, best_plan, devices_to_keep, proposals

V, P, T = DeviceType("v100", 3.1), DeviceType("p100", 2.4), DeviceType("t4", 1.0)


def least_overload(replicas: int, speeds: list[float]) -> float:
    """Over all assignments of whole replicas to single devices, equal or not within a type."""
    best = math.inf

    def place(device: int, left: int, worst: float) -> None:
        nonlocal best
        if worst >= best:
            return
        if device == len(speeds):
            best = worst if left == 0 else best
            return
        for here in range(left + 1):
            place(device + 1, left - here, max(worst, here / speeds[device]))

    place(0, replicas, 0.0)
    return best


def test_the_worked_example() -> None:
    plan = best_plan(16, (V, P, T), (2, 2, 0))
    assert plan is not None
    assert plan.per_device[:2] == (5, 3)
    assert plan.overload == pytest.approx(1.6129, abs=1e-4)
    assert plan.waste == pytest.approx(0.0982, abs=1e-4)
    assert plan.waste * plan.capability == pytest.approx(1.08)
    assert plan.perf == pytest.approx(9.92)
    assert plan.assignment() == [("v100", 5), ("v100", 5), ("p100", 3), ("p100", 3)]


def test_brute_force_over_single_devices_finds_nothing_better() -> None:
    chance = random.Random(7)
    for _ in range(1000):
        replicas = chance.randint(1, 16)
        counts = tuple(chance.randint(0, 2) for _ in range(3))
        if not any(counts):
            counts = (1, 0, 0)
        types = tuple(DeviceType(name, round(chance.uniform(0.2, 5), 2)) for name in ("a", "b", "c"))
        plan = best_plan(replicas, types, counts)
        assert plan is not None
        speeds = [kind.speed for kind, count in zip(types, counts, strict=True) for _ in range(count)]
        assert plan.overload == pytest.approx(least_overload(replicas, speeds), rel=1e-12), (replicas, types, counts)


numbers = st.tuples(*[st.integers(0, 6)] * 3).filter(any)
speeds = st.tuples(*[st.floats(0.1, 10)] * 3)


@given(st.integers(1, 64), speeds, numbers)
@settings(max_examples=200, deadline=None)
def test_perf_is_what_waste_leaves_and_every_replica_has_a_place(
    replicas: int, values: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    types = tuple(DeviceType(name, value) for name, value in zip("abc", values, strict=True))
    plan = best_plan(replicas, types, counts)
    assert plan is not None
    assert plan.perf == pytest.approx(plan.capability * (1 - plan.waste), rel=1e-9)
    assert -1e-9 <= plan.waste < 1
    placed = plan.assignment()
    assert sum(count for _, count in placed) == replicas
    worst = max(count / next(kind.speed for kind in types if kind.name == name) for name, count in placed)
    assert worst == pytest.approx(plan.overload)
    assert all(used <= there for used, there in zip(plan.used, counts, strict=True))


@given(st.integers(1, 32), speeds, numbers, st.tuples(*[st.integers(0, 8)] * 3))
@settings(max_examples=200, deadline=None)
def test_proposals_are_faster_waste_little_and_at_most_double(
    replicas: int, values: tuple[float, ...], held: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    types = tuple(DeviceType(name, value) for name, value in zip("abc", values, strict=True))
    now = best_plan(replicas, types, held)
    assert now is not None
    found = proposals(replicas, types, held, limits)
    assert len({each.kind for each in found}) == len(found)
    for each in found:
        index = "abc".index(each.kind)
        assert each.plan.waste <= MAX_WASTE + 1e-9
        assert sum(each.plan.used) <= 2 * sum(held)
        assert 1 <= each.more <= limits[index]
        assert each.plan.used[index] == held[index] + each.more
        assert each.plan.perf > now.perf
        assert each.per_device == pytest.approx((each.plan.perf / now.perf - 1) / each.more + 1)
    ranks = [round(each.per_device, 9) for each in found]
    assert ranks == sorted(ranks, reverse=True)


def test_a_job_without_devices_starts_with_one() -> None:
    assert [(each.kind, each.more) for each in proposals(8, (V, P, T), (0, 0, 0), (4, 4, 4))] == [
        ("v100", 1), ("p100", 1), ("t4", 1),
    ]  # fmt: skip


def test_a_faster_device_takes_the_place_of_a_slower_one() -> None:
    [best, *_] = proposals(1, (V, P, T), (0, 0, 1), (1, 1, 1))
    assert best.plan.devices == {"v100": 1}
    assert best.plan.waste == pytest.approx(0)


def test_several_executors_help_only_as_much_as_they_leave_each_other() -> None:
    for interference, executors, perf in ((1.0, 2, 2 * 3.1), (0.8, 2, 1.6 * 3.1), (0.4, 1, 3.1)):
        plan = best_plan(16, (DeviceType("v100", 3.1, 2, interference),), (1,))
        assert plan is not None
        assert plan.executors == (executors,)
        assert plan.perf == pytest.approx(perf)
        assert plan.waste == pytest.approx(0)


def test_devices_that_nobody_would_miss_are_idle() -> None:
    plan = best_plan(16, (V,), (12,))
    assert plan is not None
    assert (plan.per_device, plan.devices, plan.idle) == ((2,), {"v100": 8}, {"v100": 4})


def test_a_device_that_made_it_slower_is_given_back() -> None:
    before, after = {"v100": 2}, {"v100": 2, "t4": 1}
    assert devices_to_keep(before, 6.2, after, 5.9) == before
    assert devices_to_keep(before, 6.2, after, 6.9) == after


@pytest.mark.parametrize(("speed", "executors", "interference"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1.5)])
def test_impossible_devices_are_refused(speed: float, executors: int, interference: float) -> None:
    with pytest.raises(ConfigError, match="use"):
        DeviceType("x", speed, executors, interference)


def test_the_command_says_the_worked_example(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["plan", "--replicas", "16", "--speed", "v100=3.1,p100=2.4,t4=1", "--have", "v100=2,p100=2", "--json"]
    answer = CliRunner().invoke(build(), [*words, str(out)])
    assert answer.exit_code == 0, answer.output
    for text in ("A=(5,3)", "waste 9.8%", "perf 9.92", "next: +"):
        assert text in answer.output
    result = json.loads(out.read_text())
    assert result["replicas_per_device"] == {"v100": 5, "p100": 3}
    assert result["perf"] == pytest.approx(9.92)
    assert result["waste"] == pytest.approx(0.0982, abs=1e-4)
    assert all(each["waste"] <= 0.3 and sum(each["devices"].values()) <= 8 for each in result["proposals"])


def test_brute_force_itself_sees_the_example() -> None:
    assert least_overload(16, [3.1, 3.1, 2.4, 2.4]) == pytest.approx(5 / 3.1)
