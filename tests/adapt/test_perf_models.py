"""The models against truths that are known: parameters come back from noisy steps, and what must grow, grows."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.adapt import goodput_model as goodput
from pliant.adapt import scaling_model as scaling
from pliant.adapt.fitting import damped, nonnegative
from pliant.adapt.goodput_model import Choice, Goodput, Noise, StepModel, StepTime
from pliant.adapt.limits import Layer, bounds
from pliant.adapt.scaling_model import Load, Measurement, Prices, ScalingModel
from pliant.errors import ConfigError

TRUTH = StepModel(0.05, 0.002, 0.08, 0.004, 1.6)
LAYERS = tuple(Layer(0.01, 0.02, size) for size in (1_000, 4_000, 20_000, 200_000, 400_000))
LOAD = Load(layers=LAYERS, pattern="multi-star", buckets=4)
SIZES = (1, 2, 4, 8, 16, 32)


def steps_of(model: StepModel, choices: list[Choice], noise: float = 0.0, seed: int = 0) -> list[StepTime]:
    chance = random.Random(seed)
    return [StepTime(each, model.step_s(each) * math.exp(chance.gauss(0, noise))) for each in choices]


# --- least squares ---


def test_nonnegative_weights_are_the_best_there_are() -> None:
    matrix = np.array([[1.0, 0.0, 1e9], [1.0, 1.0, 2e9], [1.0, 2.0, 5e9], [1.0, 3.0, 1e9]])
    assert nonnegative(matrix, matrix @ [2.0, 0.5, 3e-9]) == pytest.approx([2.0, 0.5, 3e-9])
    falling = nonnegative(matrix, np.array([4.0, 3.0, 2.0, 1.0]))  # would like a negative slope
    assert falling[1] == 0
    assert min(falling) >= 0
    assert nonnegative(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_no_single_change_of_a_nonnegative_weight_is_better(seed: int) -> None:
    chance = np.random.default_rng(seed)
    matrix, target = chance.normal(size=(6, 3)), chance.normal(size=6)
    found = nonnegative(matrix, target)
    least = float(np.sum((matrix @ found - target) ** 2))
    for number in range(3):
        for change in (-1e-3, 1e-3):
            other = found.copy()
            other[number] = max(0.0, other[number] + change)
            assert float(np.sum((matrix @ other - target) ** 2)) >= least - 1e-12


def test_damped_stops_at_the_bounds() -> None:
    found, cost = damped(lambda x: x - np.array([3.0, -1.0]), [0.5, 0.5], [0.0, 0.0], [2.0, 2.0])
    assert found.tolist() == [2.0, 0.0]
    assert cost == pytest.approx(2.0)


# --- goodput ---


def test_known_steps_come_back_within_their_noise() -> None:
    choices = [Choice(n, b) for n in (1, 2, 4, 8, 16) for b in (8, 32, 128)]
    fit = goodput.fit(steps_of(TRUTH, choices, noise=0.02))
    assert fit.num_parameters == 5
    assert fit.worst < 0.06
    assert fit.model.grad_per_sample_s == pytest.approx(TRUTH.grad_per_sample_s, rel=0.1)
    assert fit.model.grad_fixed_s == pytest.approx(TRUTH.grad_fixed_s, rel=0.15)
    for far in (Choice(32, 64), Choice(64, 32)):
        assert fit.model.step_s(far) == pytest.approx(TRUTH.step_s(far), rel=0.1)


def test_steps_without_noise_come_back_exactly() -> None:
    choices = [Choice(n, b, r) for n in (1, 2, 4, 8) for b in (8, 64) for r in (None, 8)]
    fit = goodput.fit(steps_of(TRUTH, choices))
    for name in ("grad_fixed_s", "grad_per_sample_s", "sync_fixed_s", "sync_per_worker_s", "overlap"):
        assert getattr(fit.model, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    assert fit.worst < 1e-3


def test_one_observation_is_explained_and_more_workers_look_worth_trying() -> None:
    seen = StepTime(Choice(1, 32), 0.3)
    fit = goodput.fit([seen])
    assert fit.num_parameters == 1
    assert fit.worst < 1e-6
    assert fit.model.throughput(Choice(4, 32)) == pytest.approx(4 * fit.model.throughput(Choice(1, 32)))
    assert 0.3 < fit.model.step_s(Choice(1, 64)) < 0.6
    on_two = goodput.fit([StepTime(Choice(2, 32), 0.3)]).model
    assert on_two.step_s(Choice(2, 32)) == pytest.approx(0.3, rel=1e-3)
    assert on_two.step_s(Choice(1, 32)) <= 0.3


def test_two_sizes_with_one_batch_tell_what_the_sum_costs() -> None:
    model = goodput.fit([StepTime(Choice(1, 16), 0.2), StepTime(Choice(2, 16), 0.25)]).model
    assert model.step_s(Choice(1, 16)) == pytest.approx(0.2, rel=0.01)
    assert model.step_s(Choice(2, 16)) == pytest.approx(0.25, rel=0.01)
    assert model.step_s(Choice(8, 16)) == pytest.approx(0.25, rel=0.01), "no more is known"


def test_fewer_workers_than_replicas_take_turns() -> None:
    model = StepModel(0.01, 0.001, 0.02, 0.0, 1.0)
    alone = model.step_s(Choice(1, 10, 8))
    assert alone == pytest.approx(8 * 0.02)
    assert model.step_s(Choice(4, 10, 8)) == pytest.approx(2 * 0.02 + 0.02)
    assert model.step_s(Choice(3, 10, 8)) == pytest.approx(3 * 0.02 + 0.02), "the worker with the most counts"
    assert Choice(3, 10, 8).total_batch == 80


times = st.floats(1e-4, 10.0)
models = st.builds(StepModel, times, times, times, times, st.floats(1.0, 10.0))


@settings(max_examples=100, deadline=None)
@given(models, st.integers(1, 64), st.integers(1, 512))
def test_a_step_is_between_perfect_overlap_and_none(model: StepModel, workers: int, batch: int) -> None:
    step_s, grad_s, sync_s = model.step_s(Choice(workers, batch)), model.grad_s(batch), model.sync_s(workers)
    assert max(grad_s, sync_s) <= step_s * (1 + 1e-9)
    assert step_s <= (grad_s + sync_s) * (1 + 1e-9)
    assert model.step_s(Choice(workers, batch + 1)) >= step_s
    assert model.step_s(Choice(workers + 1, batch)) >= step_s * (1 - 1e-9)


noises = st.builds(Noise, st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.integers(1, 512))


@settings(max_examples=100, deadline=None)
@given(noises, st.integers(1, 4096), st.integers(1, 4096))
def test_a_larger_batch_gains_but_each_sample_less(noise: Noise, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert noise.gain(noise.base_batch) == pytest.approx(1)
    assert noise.gain(small) <= noise.gain(large) * (1 + 1e-9)
    assert noise.efficiency(small) >= noise.efficiency(large) * (1 - 1e-9)
    if small >= noise.base_batch:
        assert 1 - 1e-9 <= noise.gain(small) <= small / noise.base_batch * (1 + 1e-9)


def test_gain_between_no_noise_and_nothing_else() -> None:
    assert goodput.gain(8, var=0, sqr=1) == 1, "the gradient is known already"
    assert goodput.gain(8, var=1, sqr=0) == 8, "each sample counts fully"
    assert Noise.of_scale(math.inf, 32).efficiency(4096) == pytest.approx(1)
    assert Noise.of_scale(-3.0, 32).gain(64) == 1
    assert Noise.of_scale(1000.0, 32).efficiency(1032) == pytest.approx(1032 / 2032)


def test_the_best_choice_follows_the_noise_and_prefers_less() -> None:
    quiet, loud = (Goodput(TRUTH, Noise.of_scale(scale, 32)) for scale in (10.0, 1e5))
    choices = [Choice(n, b) for n in (1, 2, 4, 8, 16) for b in (8, 32, 128)]
    best = loud.best(choices)
    assert best == max(choices, key=loud.value) == Choice(16, 128)
    assert quiet.best(choices).total_batch < best.total_batch
    free = Goodput(StepModel(0.1, 0.0, 0.0, 0.0), Noise(0.0, 1.0, 1))
    same = [Choice(4, 2, 8), Choice(8, 1, 8)]
    assert free.best(same * 2) in same


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: goodput.fit([]),
        lambda: Choice(0, 1),
        lambda: Choice(4, 1, 2),
        lambda: StepTime(Choice(1, 1), 0.0),
        lambda: Noise(-1.0, 1.0, 1),
        lambda: Noise.of_scale(math.nan, 32),
        lambda: goodput.gain(0, 1, 1),
        lambda: Goodput(TRUTH, Noise(1, 1, 1)).best([]),
        lambda: scaling.fit(LOAD, []),
        lambda: scaling.pattern("circle"),
        lambda: Measurement(0, 1.0),
        lambda: scaling.bucketed(LAYERS, 0),
    ],
)
def test_what_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]


# --- scaling ---


@pytest.mark.parametrize("name", list(scaling.PATTERNS))
def test_what_a_pattern_costs_grows_with_the_nodes_and_is_nothing_alone(name: str) -> None:
    costs = scaling.pattern(name)
    assert costs(1) == scaling.Costs(0, 0, 0, 0)
    for n in range(1, 70):
        one, next_ = costs(n), costs(n + 1)
        assert next_.hops >= one.hops
        assert next_.sent >= one.sent - 1e-12
        assert next_.messages >= one.messages


def test_patterns_in_numbers() -> None:
    assert scaling.ring(4) == scaling.Costs(6, 1.5, 0.75, 6)
    assert scaling.star(4) == scaling.Costs(2, 3, 3, 3)
    assert scaling.tree(7) == scaling.Costs(4, 3, 2, 3)
    assert scaling.multi_tree(32).hops == 10
    assert scaling.carrying_multi_tree(2).sent == scaling.multi_tree(2).sent == 1, "nothing to carry"
    # 0, 1, 1, 2 hops to the root, and three quarters back.
    assert scaling.carrying_multi_tree(4).sent == pytest.approx(4 / 4 + 3 / 4)


def test_the_traffic_goes_through_the_bounds() -> None:
    num_bytes, rate = LOAD.num_bytes, 1e7
    found = bounds(LAYERS, 8, rate)
    assert LOAD.step_s(scaling.multi_star(8).sent * num_bytes / rate) == pytest.approx(found.p_fifo_s)
    first = Load(layers=LAYERS, pattern="ring", buckets=1, order="priority")
    assert first.step_s(found.traffic_s) == pytest.approx(found.p_star_s)
    assert LOAD.step_s(0.0) == pytest.approx(found.compute_s)


@pytest.mark.parametrize("name", ["multi-star", "ring", "carrying-multi-tree"])
@pytest.mark.parametrize("known_rate", [True, False])
def test_a_fit_to_32_nodes_predicts_1024(name: str, known_rate: bool) -> None:
    load = Load(layers=LAYERS, pattern=name, buckets=4)
    truth = ScalingModel(load, Prices(0.004, 2e-4, 2.5e-7, 0.003, 2e-6, 4e-9, 0.8))
    chance = random.Random(1)

    def noisy(value: float) -> float:
        return value * math.exp(chance.gauss(0, 0.01))

    seen = [Measurement(n, noisy(truth.predict(n, 2)), noisy(truth.cpu_s(n)), 2) for n in SIZES]
    fit = scaling.fit(load, seen, bytes_per_s=4e6 if known_rate else None)
    assert fit.worst < 0.05
    assert max(map(abs, fit.cpu_residuals)) < 0.05
    for nodes in (64, 256, 1024):
        assert fit.model.predict(nodes) == pytest.approx(truth.predict(nodes), rel=0.2 if known_rate else 0.35), nodes


def test_machines_of_their_own_are_never_slower_than_shared_ones() -> None:
    model = ScalingModel(LOAD, Prices(0.004, 2e-4, 2.5e-7, 0.003, 2e-6, 4e-9, 0.8))
    for nodes in (1, 2, 8, 64, 1024):
        assert model.predict(nodes) <= model.predict(nodes, cores=2)
    assert model.predict(1024, cores=2) >= 1024 * model.cpu_s(1024) / 2


def test_a_scale_that_is_undone_changes_nothing_but_folds() -> None:
    small = ScalingModel(LOAD, Prices(0.0, 1e-4, 2.5e-7, 0.0, 1e-6, 0.0, 1.0))
    assert small.enlarged(100).predict(32) == pytest.approx(small.predict(32))
    folding = ScalingModel(LOAD, Prices(0.0, 1e-4, 2.5e-7, 0.0, 1e-6, 1e-9, 1.0))
    assert folding.enlarged(100).predict(32) > folding.predict(32)


def test_rows_for_everybody_grow_with_the_nodes_and_not_with_the_model() -> None:
    load = Load(layers=LAYERS, pattern="multi-star", buckets=4, row_bytes=100)
    assert load.costs(5).sent == pytest.approx(LOAD.costs(5).sent + 400)
    assert load.costs(5).messages == LOAD.costs(5).messages + 4
    prices = Prices(0.0, 0.0, 2.5e-7, 0.0, 0.0, 0.0, 1.0)
    small, large = ScalingModel(load, prices), ScalingModel(load, prices).enlarged(100)
    assert large.traffic_s(1024) < small.traffic_s(1024)


def test_one_measurement_is_explained() -> None:
    fit = scaling.fit(LOAD, [Measurement(4, 0.5)])
    assert fit.worst < 0.05
    assert fit.cpu_residuals == ()


def test_buckets_hold_back_until_they_are_full() -> None:
    found = scaling.bucketed(LAYERS, 300_000)
    assert [layer.num_bytes for layer in found] == [225_000, 0, 0, 0, 400_000]
    assert sum(layer.num_bytes for layer in found) == LOAD.num_bytes
    rate = 5e6
    assert bounds(found, 4, rate).p_fifo_s >= bounds(LAYERS, 4, rate).p_fifo_s
    assert scaling.bucketed(LAYERS, 1) == list(LAYERS)


def test_the_bounds_alone_load_no_numpy_and_the_models_no_torch() -> None:
    check = (
        "import sys, pliant.perf; first = 'numpy' in sys.modules; "
        "import pliant.adapt.scaling_model, pliant.adapt.goodput_model; sys.exit(first or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0
