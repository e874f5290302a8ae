"""The estimators tell the truth where it is known, and the watchdog barks only when something is wrong."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest

from pliant.adapt.monitors import Ema, NoiseScale, StallDetector, Variance, wants_stall_detection
from pliant.errors import ConfigError

DIMENSION, SIGMA, TRUTH = 300, 0.5, 40.0
MU = np.full(DIMENSION, SIGMA * math.sqrt(1 / TRUTH))
"""The mean of one sample's gradient: d * sigma^2 / |mu|^2 is TRUTH."""
STEPS = 500


def _gradients(draw: np.random.Generator, batch: int, replicas: int) -> np.ndarray:
    """Each replica's mean over a batch of mu + xi, with xi normal in every direction."""
    return np.stack([MU + SIGMA * draw.standard_normal((batch, DIMENSION)).mean(0) for _ in range(replicas)])


def _independent(squares: list[tuple[float, float]], batch: float, replicas: int, alpha: float) -> float:
    """The same estimate from another derivation, by NumPy alone: E|g_b|^2 = |G|^2 + S/b for two b is a linear system, and
    the average weighs by alpha^age beyond the plain mean of the first ones."""
    solved = []
    for small, big in squares:
        matrix = np.array([[1.0, 1 / batch], [1.0, 1 / (batch * replicas)]])
        solved.append(np.linalg.solve(matrix, np.array([small, big])))
    weights = np.zeros(len(solved))
    for number in range(len(solved)):
        kept = min(alpha, 1 - 1 / (number + 1))
        weights *= kept
        weights[number] = 1 - kept
    sqr, var = weights @ np.array(solved)
    return float(var / sqr)


def _squares(gradients: np.ndarray) -> tuple[float, float]:
    return float((gradients**2).sum(1).mean()), float((gradients.mean(0) ** 2).sum())


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_the_noise_scale_is_within_a_tenth_of_the_truth(batch: int, seed: int) -> None:
    draw, noise = np.random.default_rng(seed), NoiseScale()
    squares = [_squares(_gradients(draw, batch, 4)) for _ in range(STEPS)]
    for small, big in squares:
        noise.update(small, big, batch, 4)
    assert noise.value == pytest.approx(TRUTH, rel=0.1)
    assert noise.gradient_sqr == pytest.approx((MU**2).sum(), rel=0.1)
    assert noise.gradient_var == pytest.approx(DIMENSION * SIGMA**2, rel=0.05)
    assert noise.value == pytest.approx(_independent(squares, batch, 4, 0.98), rel=1e-9)


def test_the_batch_may_change_on_the_way() -> None:
    draw, noise = np.random.default_rng(1), NoiseScale()
    for step in range(STEPS):
        batch = 8 if step < 450 else 32
        noise.update(*_squares(_gradients(draw, batch, 4)), batch, 4)
    assert noise.value == pytest.approx(TRUTH, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_one_replica_alone_learns_from_two_steps(seed: int) -> None:
    """Within a quarter: two gradients where there were four, and each is used twice."""
    draw, noise = np.random.default_rng(seed), NoiseScale()
    before = _gradients(draw, 8, 1)[0]
    for _ in range(STEPS):
        after = _gradients(draw, 8, 1)[0]
        both = (before + after) / 2
        noise.update(float(before @ before + after @ after) / 2, float(both @ both), 8, 2)
        before = after
        assert noise.value is None or math.isfinite(noise.value)
    assert noise.value == pytest.approx(TRUTH, rel=0.25)


def test_what_says_nothing_is_left_out() -> None:
    noise = NoiseScale()
    assert (noise.value, noise.gradient_sqr, noise.gradient_var) == (None, None, None)
    noise.update(1.0, 1.0, 8, 1)
    noise.update(math.inf, 1.0, 8, 4)
    noise.update(math.nan, math.nan, 8, 4)
    noise.update(1.0, 1.0, 0, 4)
    assert noise.count == 0
    noise.update(0.0, 0.0, 8, 4)
    assert noise.value is None, "gradients of zero have no noise scale"
    noise.update(4.0, 0.5, 8, 4)  # mostly noise: |G|^2 seems negative
    assert noise.value is None
    assert noise.ratio is not None
    assert noise.ratio < 0


def test_states_travel_as_json() -> None:
    noise, variance = NoiseScale(), Variance()
    noise.update(3.0, 2.0, 8, 4)
    variance.update([1.0, 0.5])
    variance.update([math.nan])
    other, another = NoiseScale(), Variance()
    other.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    another.load_state_dict(json.loads(json.dumps(variance.state_dict())))
    for each in (noise, other):
        each.update(5.0, 3.0, 16, 4)
    assert other.value == noise.value
    assert another.value == 1.5


def test_averages() -> None:
    ema = Ema(0.9)
    assert [ema.update(value) for value in (10.0, 20.0)] == [10.0, pytest.approx(11.0)]
    capped = Ema(0.5, cap=2)
    assert [capped.update(value) for value in (10.0, 1000.0, 0.0)] == [10.0, 15.0, pytest.approx(11.25)]
    negative = Ema(0.5, cap=2)
    assert [negative.update(value) for value in (-10.0, -1000.0)] == [-10.0, -15.0]
    warm = Ema(0.9, warm=True)
    assert [warm.update(value) for value in (1.0, 2.0, 6.0)] == [1.0, pytest.approx(1.5), pytest.approx(3.0)]
    assert ema.update(math.nan) == pytest.approx(11.0)


@pytest.mark.parametrize(("alpha", "cap"), [(1.0, None), (-0.1, None), (0.5, 1.0), (math.nan, None)])
def test_bad_averages(alpha: float, cap: float | None) -> None:
    with pytest.raises(ConfigError, match="use"):
        Ema(alpha, cap)


# --- stalls ---


def test_a_stall_is_told_while_it_lasts_and_when_it_ends() -> None:
    said: list[str] = []
    now_s = [0.0]
    detector = StallDetector(said.append, clock=lambda: now_s[0])
    with detector:
        with detector.watch("all-reduce"):
            now_s[0] = 2.9
            detector.look()
            assert said == []
            for now_s[0] in (3.0, 6.5):
                detector.look()
            assert detector.stalled_s == 6.5
        assert said == ["all-reduce stalled for 3.0s", "all-reduce stalled for 6.5s", "all-reduce recovered after 6.5s"]
        assert detector.count == 1
        assert detector.stalled_s == 0.0
        with detector.watch("quick"):
            pass
        detector.look()
        assert len(said) == 3


def test_the_thread_looks_by_itself() -> None:
    told, ended = threading.Event(), threading.Event()
    with StallDetector(lambda text: (ended if "recovered" in text else told).set(), period_s=0.02) as detector:
        with detector.watch("barrier"):
            assert told.wait(10)
        assert ended.wait(10)
    assert not any(thread.name == "stalls" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"PLIANT_STALL_DETECTION": "1"}, True),
        ({"PLIANT_STALL_DETECTION": "0"}, False),
        ({"KUNGFU_CONFIG_ENABLE_STALL_DETECTION": "true"}, True),
        ({"KUNGFU_CONFIG_ENABLE_STALL_DETECTION": ""}, False),
    ],
)
def test_the_environment_asks_for_it(environ: dict[str, str], wanted: bool) -> None:
    assert wants_stall_detection(environ) is wanted
