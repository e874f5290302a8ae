"""The model of goodput returns known parameters from noisy steps, and behaves as the papers say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.adapt.goodput_model import Configuration, StepModel, efficiency, fit, fit_bounded
from pliant.adapt.monitors import gain
from pliant.errors import ConfigError

TRUTH = StepModel(0.05, 0.002, 0.08, 0.004, 1.6)


def steps_of(model: StepModel, choices: list[Configuration], noise: float = 0.0) -> dict[Configuration, float]:
    chance = random.Random(0)
    return {each: model.step_s(each) * math.exp(chance.gauss(0, noise)) for each in choices}


def test_a_bounded_fit_stops_at_the_bounds_and_keeps_fixed_parameters() -> None:
    target = np.array([3.0, -1.0, 5.0])
    found = fit_bounded(lambda x: x - target, [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]], [0.0, 0.0, 1.0], [2.0, 2.0, 1.0])
    assert found.tolist() == [2.0, 0.0, 1.0]


def test_known_steps_come_back_within_their_noise() -> None:
    choices = [Configuration(n, b) for n in (1, 2, 4, 8, 16) for b in (8, 32, 128)]
    model = fit(steps_of(TRUTH, choices, noise=0.02))
    assert model.grad_per_sample_s == pytest.approx(TRUTH.grad_per_sample_s, rel=0.1)
    assert model.grad_fixed_s == pytest.approx(TRUTH.grad_fixed_s, rel=0.15)
    for each in (*choices, Configuration(32, 64), Configuration(64, 32)):
        assert model.step_s(each) == pytest.approx(TRUTH.step_s(each), rel=0.1)


def test_steps_without_noise_come_back_exactly() -> None:
    choices = [Configuration(n, b, r) for n in (1, 2, 4, 8) for b in (8, 64) for r in (None, 8)]
    model = fit(steps_of(TRUTH, choices))
    for name in ("grad_fixed_s", "grad_per_sample_s", "sync_fixed_s", "sync_per_worker_s", "overlap"):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    assert all(model.step_s(each) == pytest.approx(TRUTH.step_s(each), rel=1e-3) for each in choices)


def test_one_observation_is_explained_and_more_workers_look_worth_trying() -> None:
    model = fit({Configuration(1, 32): 0.3})
    assert model.step_s(Configuration(1, 32)) == pytest.approx(0.3, rel=1e-6)
    assert model.step_s(Configuration(4, 32)) == pytest.approx(0.3), "four times the samples in the same time"
    assert 0.3 < model.step_s(Configuration(1, 64)) < 0.6
    on_two = fit({Configuration(2, 32): 0.3})
    assert on_two.step_s(Configuration(2, 32)) == pytest.approx(0.3, rel=1e-3)
    assert on_two.step_s(Configuration(1, 32)) <= 0.3


def test_two_sizes_with_one_batch_tell_what_the_sum_costs() -> None:
    model = fit({Configuration(1, 16): 0.2, Configuration(2, 16): 0.25})
    assert model.step_s(Configuration(1, 16)) == pytest.approx(0.2, rel=0.01)
    assert model.step_s(Configuration(2, 16)) == pytest.approx(0.25, rel=0.01)
    assert model.step_s(Configuration(8, 16)) == pytest.approx(0.25, rel=0.01), "no more is known"


def test_fewer_workers_than_replicas_take_turns() -> None:
    model = StepModel(0.01, 0.001, 0.02, 0.0, 1.0)
    alone = model.step_s(Configuration(1, 10, 8))
    assert alone == pytest.approx(8 * 0.02)
    assert model.step_s(Configuration(4, 10, 8)) == pytest.approx(2 * 0.02 + 0.02)
    assert model.step_s(Configuration(3, 10, 8)) == pytest.approx(3 * 0.02 + 0.02), "the worker with the most counts"
    assert Configuration(3, 10, 8).total_batch == 80


times = st.floats(1e-4, 10.0)
models = st.builds(StepModel, times, times, times, times, st.floats(1.0, 10.0))


@settings(max_examples=100, deadline=None)
@given(models, st.integers(1, 64), st.integers(1, 512))
def test_a_step_is_between_perfect_overlap_and_none(model: StepModel, workers: int, batch: int) -> None:
    step_s, grad_s, sync_s = model.step_s(Configuration(workers, batch)), model.grad_s(batch), model.sync_s(workers)
    assert max(grad_s, sync_s) <= step_s * (1 + 1e-9)
    assert step_s <= (grad_s + sync_s) * (1 + 1e-9)
    assert model.step_s(Configuration(workers, batch + 1)) >= step_s
    assert model.step_s(Configuration(workers + 1, batch)) >= step_s * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1e4), st.integers(1, 512), st.integers(1, 4096), st.integers(1, 4096))
def test_a_larger_batch_gains_but_each_sample_less(noise_scale: float, base: int, one: int, other: int) -> None:
    small, large = sorted((one, other))
    worth = [efficiency(batch, base, noise_scale) for batch in (base, small, large)]
    assert worth[0] == pytest.approx(1)
    assert worth[1] >= worth[2] * (1 - 1e-9)
    assert worth[1] * small <= worth[2] * large * (1 + 1e-9)


def test_gain_between_no_noise_and_nothing_else() -> None:
    assert gain(8, var=0, sqr=1) == 1, "the gradient is known already"
    assert gain(8, var=1, sqr=0) == 8, "each sample counts fully"
    assert efficiency(1032, 32, 1000.0) == pytest.approx(1032 / 2032)
    with pytest.raises(ConfigError):
        gain(0, 1, 1)
