"""The tuner: what it chooses from what workers measured, when it changes its mind, and what it says about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from pliant.errors import ConfigError
from pliant.train.deferred import DeferredUpdates
from pliant.train.sync import (
    BASELINE_BYTES,
    IN_FLIGHT_SHARE,
    MAX_IN_FLIGHT_BYTES,
    MAX_SLICE_BYTES,
    MIN_IN_FLIGHT_BYTES,
    MIN_SLICE_BYTES,
    PROBE_STEPS,
    SLICE_SHARE,
    SYNC_BYTES,
    SYNC_MODES,
    SYNC_OPTIONS,
    StepMeasurement,
    SyncConfig,
    SyncController,
    SyncTuner,
    check_sync_options,
    pack_sync,
    unpack_sync,
)

MBIT = 1e6 / 8
COMPUTE_S = 0.3


def _step(rate_mbit: float, *, r: float = 1.0, compute_s: float = COMPUTE_S) -> list[StepMeasurement]:
    """What three workers measure of a step with this T/C; the second one has the slowest link."""
    rate = rate_mbit * MBIT
    sent = r * rate * compute_s
    slow = StepMeasurement(compute_s, sent, rate)
    fast = StepMeasurement(0.9 * compute_s, 0.9 * sent, 1.3 * rate if rate else 0.0)
    return [fast, slow, fast]


def _tuner(asked: str = "priority", *fixed: int | None) -> tuple[SyncTuner, list[str]]:
    said: list[str] = []
    slice_bytes, in_flight = (*fixed, None, None)[:2]
    return SyncTuner(asked, slice_bytes, in_flight, said.append), said


def _until_changed(tuner: SyncTuner, steps: list[StepMeasurement], limit: int = 10) -> int:
    """How many such steps it takes until the choice is another one."""
    before = tuner.config
    for count in range(1, limit + 1):
        if tuner.learn(steps) != before:
            return count
    raise AssertionError(f"no change in {limit} steps")


# --- sizes ---


@pytest.mark.parametrize("rate", [100, 200, 400, 800])
def test_slices_and_credit_follow_the_rate(rate: float) -> None:
    tuner, _ = _tuner()
    config = tuner.learn(_step(rate))
    # To one of a few sizes, a factor of the root of 2 apart: at most half of that away, and whole kibibytes.
    assert config.slice_bytes == pytest.approx(rate * MBIT * COMPUTE_S * SLICE_SHARE, rel=0.22)
    assert config.in_flight_bytes == pytest.approx(rate * MBIT * COMPUTE_S * IN_FLIGHT_SHARE, rel=0.22)
    assert config.slice_bytes % 1024 == config.in_flight_bytes % 1024 == 0
    assert tuner.rate == rate * MBIT, "the slowest link counts"
    assert tuner.r == pytest.approx(1.0)


def test_among_lines_alike_one_late_worker_does_not_lower_the_rate() -> None:
    tuner, _ = _tuner()
    tuner.learn([StepMeasurement(COMPUTE_S, 400 * MBIT * COMPUTE_S, rate * MBIT) for rate in (390, 330, 385, 395)])
    assert tuner.rate == pytest.approx(387.5 * MBIT)


@pytest.mark.parametrize(("rate", "compute_s"), [(0.1, 0.01), (100_000, 1.0)])
def test_sizes_stay_within_bounds(rate: float, compute_s: float) -> None:
    tuner, _ = _tuner()
    config = tuner.learn(_step(rate, compute_s=compute_s))
    low = rate < 1
    assert config.slice_bytes == (MIN_SLICE_BYTES if low else MAX_SLICE_BYTES)
    assert config.in_flight_bytes == (MIN_IN_FLIGHT_BYTES if low else MAX_IN_FLIGHT_BYTES)


@pytest.mark.parametrize(
    "rates",
    [(440, 360, 470, 330, 400, 450, 350) * 5, (400, 100, 400, 1600, 400, 100, 400)],
    ids=["within 20 percent", "a single odd step"],
)
def test_little_changes_nothing(rates: Sequence[float]) -> None:
    tuner, said = _tuner()
    config = tuner.learn(_step(400))
    said.clear()
    for rate in rates:
        assert tuner.learn(_step(rate)) == config
    assert not said


@pytest.mark.parametrize(("old", "new"), [(400, 100), (100, 400)])
def test_a_jump_retunes_within_3_steps_and_says_so(old: float, new: float) -> None:
    tuner, said = _tuner()
    for _ in range(20):
        before = tuner.learn(_step(old))
    said.clear()
    assert _until_changed(tuner, _step(new)) <= 3
    [line] = said
    numbers = [int(found) for found in re.findall(r"\d+", line.split("(")[0])]
    after = tuner.config
    assert numbers[:4] == [
        before.slice_bytes >> 10, after.slice_bytes >> 10, before.in_flight_bytes >> 10, after.in_flight_bytes >> 10
    ]  # fmt: skip
    assert numbers[4] == pytest.approx(new, rel=0.02)
    assert after.slice_bytes / before.slice_bytes == pytest.approx(new / old, rel=0.05)
    for _ in range(20):
        assert tuner.learn(_step(new)) == after
    assert len(said) == 1


def test_a_slow_drift_is_followed() -> None:
    tuner, said = _tuner()
    first = tuner.learn(_step(100))
    said.clear()
    rate = 100.0
    for _ in range(100):
        rate *= 1.02
        last = tuner.learn(_step(rate))
    assert last.slice_bytes == pytest.approx(rate * MBIT * COMPUTE_S * SLICE_SHARE, rel=0.35)
    assert last.slice_bytes > 4 * first.slice_bytes
    assert 4 <= len(said) <= 15, "some lines, not one per step"


def test_without_a_rate_nothing_changes() -> None:
    tuner, said = _tuner()
    assert tuner.learn(_step(0)) == SyncConfig("priority")
    assert tuner.learn([StepMeasurement()] * 3) == SyncConfig("priority")
    assert tuner.r == tuner.rate == 0.0
    assert not said


@pytest.mark.parametrize("mode", ["priority", "slicing"])
def test_what_was_given_stays(mode: str) -> None:
    tuner, _ = _tuner(mode, 8192, None)
    assert tuner.config == SyncConfig(mode, 8192)
    for rate in (100, 400, 400, 400, 50, 50, 50):
        config = tuner.learn(_step(rate))
        assert config.slice_bytes == 8192
    assert config.in_flight_bytes != SyncConfig().in_flight_bytes
    tuner, said = _tuner(mode, 8192, 16384)
    for rate in (100, 400, 400, 400, 50, 50, 50):
        assert tuner.learn(_step(rate)) == SyncConfig(mode, 8192, 16384)
    assert not said


@pytest.mark.parametrize("asked", SYNC_OPTIONS)
def test_modes_are_what_was_asked_for(asked: str) -> None:
    tuner, _ = _tuner(asked)
    first = tuner.config.mode
    assert first == ("fifo" if asked == "auto" else asked)
    assert tuner.may_defer == (asked != "fifo")
    for _ in range(10):
        assert tuner.learn(_step(100, r=0.55)).mode == first
    if asked != "auto":
        for r in (0.1, 3.0):
            assert tuner.learn(_step(100, r=r)).mode == first
    if asked == "baseline":
        assert tuner.config.slice_bytes == BASELINE_BYTES, "its bound is not a matter of tuning"


def test_only_the_one_that_decides_speaks() -> None:
    tuner, said = _tuner("auto")
    other, heard = _tuner("auto")
    for r in (0.2, 0.2, 0.2, 0.2, 1.0, 1.0, 1.0, 0.2, 0.2):
        assert tuner.learn(_step(100, r=r)) == other.learn(_step(100, r=r), decides=False)
    assert said
    assert not heard


# --- auto ---


@pytest.mark.parametrize("steps", [_step(400, r=0.3), [StepMeasurement(0.3, 1e6, 0.0)] * 3], ids=["fast", "no limit"])
def test_auto_says_once_that_priority_would_not_help(steps: list[StepMeasurement]) -> None:
    tuner, said = _tuner("auto")
    for step in range(20):
        assert tuner.learn(steps).mode == "fifo"
        assert len(said) == (step + 1 >= PROBE_STEPS)
    assert "priority would not help here" in said[0]


def test_auto_says_once_that_it_takes_to_priorities() -> None:
    tuner, said = _tuner("auto")
    modes = [tuner.learn(_step(100, r=0.9)).mode for _ in range(20)]
    assert modes == ["fifo"] * (PROBE_STEPS - 1) + ["priority"] * (21 - PROBE_STEPS)
    [line] = [line for line in said if "priority" in line]
    assert "0.90" in line
    assert "100 Mbit/s" in line


def test_auto_does_not_waver_between_its_bounds() -> None:
    tuner, _ = _tuner("auto")
    modes = [
        tuner.learn(_step(100, r=r)).mode for r in (0.55, 0.55, 0.55, 0.59, 0.61, 0.55, 0.51, 0.59, 0.49, 0.55, 0.59)
    ]
    assert modes == ["fifo"] * 4 + ["priority"] * 4 + ["fifo"] * 3


def test_auto_does_not_mind_a_quiet_step() -> None:
    """In some steps the network is never the limit, and its rate cannot be measured."""
    tuner, said = _tuner("auto")
    for step in range(30):
        mode = tuner.learn(_step(100, r=0.9) if step % 3 else [StepMeasurement(0.3, 3e6, 0.0)] * 3).mode
        assert mode == ("fifo" if step < 2 else "priority")
    assert len([line for line in said if "priority" in line]) == 1


def test_auto_follows_a_network_that_changes() -> None:
    tuner, said = _tuner("auto")
    sent = 0.3 * 400 * MBIT * COMPUTE_S
    for rate in (400, 50, 400):
        for _ in range(5):
            config = tuner.learn([StepMeasurement(COMPUTE_S, sent, rate * MBIT)] * 3)
        assert config.mode == ("fifo" if rate == 400 else "priority")
    kinds = [line for line in said if "priority" in line]
    assert ["would not help" in line for line in kinds] == [True, False, True]


# --- what is asked for, and what travels ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("p3", None, None), ["'p3'", "'priority'", "'fifo'", "'auto'"]),
        (("priority", 0, None), ["slice_bytes=0", "1024", "None"]),
        (("priority", 1023, None), ["slice_bytes=1023", "1024"]),
        (("priority", None, -1), ["in_flight_bytes=-1", "4096", "None"]),
        (("priority", "64k", None), ["slice_bytes='64k'"]),
        (("priority", 1 << 33, None), [f"slice_bytes={1 << 33}"]),
        (("priority", None, 1 << 32), [f"in_flight_bytes={1 << 32}"]),
        (("priority", True, None), ["slice_bytes=True"]),
        (("priority", 1e6, None), ["slice_bytes=1000000.0"]),
    ],
    ids=str,
)
def test_bad_wishes_are_refused(arguments: tuple[Any, Any, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sync_options(*arguments)
    assert all(each in str(refused.value) for each in says), str(refused.value)


@pytest.mark.parametrize("mode", SYNC_MODES)
def test_a_choice_and_its_reasons_travel(mode: str) -> None:
    config, measured = SyncConfig(mode, 123_456, (1 << 32) - 1), StepMeasurement(1 / 3, 1e12 + 0.5, 1e9 / 7)
    data = pack_sync(config, measured)
    assert len(data) == SYNC_BYTES
    assert unpack_sync(data) == (config, measured)


@pytest.mark.parametrize("asked", ["priority", "fifo"])
def test_a_program_with_several_passes_per_step_waits_for_all_sums(asked: str) -> None:
    """A step that has done one of its passes could not be taken back."""
    said: list[str] = []
    reducer, engine = mock.Mock(), mock.Mock(size=2)
    deferred = DeferredUpdates([], [], can_undo=True, notify=said.append)
    controller = SyncController([reducer], deferred, SyncTuner(asked, None, None, said.append))

    def mode() -> str:
        controller.begin_step(engine)
        return str(reducer.plan_step.call_args.args[0].mode)

    assert mode() == "fifo", "the first step of a view"
    controller.apply_decision(SyncConfig(asked), [StepMeasurement()], rank=0)
    assert mode() == asked
    controller.stop_deferring()
    controller.stop_deferring()
    assert mode() == "fifo"
    controller.apply_decision(SyncConfig(asked), [StepMeasurement()], rank=0)
    assert mode() == "fifo", "for good"
    assert controller.may_defer == (asked == "priority"), "new workers do not know it yet, and act on this"
    assert len(said) == (asked == "priority")
