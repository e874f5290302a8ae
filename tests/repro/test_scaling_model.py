"""Bounds of a step against a simulation of nodes and closed forms; the scaling model against known parameters."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from pliant_repro import scaling_model as scaling
from pliant_repro.scaling_model import (
    Layer,
    Measurement,
    Prices,
    ScalingModel,
    StepLoad,
    bounds,
    fit_nonnegative,
)

LAYERS = tuple(Layer(0.01, 0.02, size) for size in (1_000, 4_000, 20_000, 200_000, 400_000))
LOAD = StepLoad(layers=LAYERS, pattern="multi-star", buckets=4)
SIZES = (1, 2, 4, 8, 16, 32)
PARTS = 64
"""Slices of each layer that each node owns."""
STEPS = 3


class SimulatedNodes:
    """Nodes that compute layer by layer and send one message at a time; each owns an equal part of every layer's slices.

    Knows nothing of windows or formulas: events happen, and the time between two steps is read off a clock.
    """

    def __init__(self, layers: Sequence[Layer], num_nodes: int, bytes_per_s: float, *, priority: bool) -> None:
        self.layers, self.num_nodes, self.priority = layers, num_nodes, priority
        self.slice_s = [layer.num_bytes / (num_nodes * PARTS) / bytes_per_s for layer in layers]
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.seq = itertools.count()
        self.queues: list[list[tuple[int, int, float, Callable[[], None]]]] = [[] for _ in range(num_nodes)]
        self.sending = [False] * num_nodes
        self.pushed: Counter[tuple[int, int, int, int]] = Counter()  # (step, layer, owner, part): contributions
        self.back: Counter[tuple[int, int, int]] = Counter()  # (node, step, layer): slices
        self.waiting: list[Callable[[], bool] | None] = [None] * num_nodes
        self.begun_s: list[float] = []  # of the last layer's forward on node 0, in each step

    def period_s(self) -> float:
        for node in range(self.num_nodes):
            self.forward(node, 0, 0)
        while self.events:
            self.now_s, _, happen = heapq.heappop(self.events)
            happen()
        return self.begun_s[-1] - self.begun_s[-2]

    def at(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.seq), happen))

    def forward(self, node: int, step: int, layer: int) -> None:
        if layer == len(self.layers):
            return self.backward(node, step, layer - 1)

        def try_to_begin() -> bool:
            needed = [layer] if self.priority else range(len(self.layers))
            slices = self.num_nodes * PARTS
            if step > 0 and any(self.back[node, step - 1, other] < slices for other in needed):
                return False
            if node == 0 and layer == len(self.layers) - 1:
                self.begun_s.append(self.now_s)
            self.at(self.layers[layer].forward_s, lambda: self.forward(node, step, layer + 1))
            return True

        self.waiting[node] = None if try_to_begin() else try_to_begin
        return None

    def backward(self, node: int, step: int, layer: int) -> None:
        if layer >= 0:
            self.at(self.layers[layer].backward_s, lambda: self.gradient(node, step, layer))
        elif step + 1 < STEPS:
            self.forward(node, step + 1, 0)

    def gradient(self, node: int, step: int, layer: int) -> None:
        for part in range(PARTS):
            for hop in range(self.num_nodes):  # each node starts with another owner, as no owner can take all at once
                owner = (node + hop) % self.num_nodes
                self.send(node, owner, layer, partial(self.push, step, layer, owner, part))
        self.backward(node, step, layer - 1)

    def push(self, step: int, layer: int, owner: int, part: int) -> None:
        self.pushed[step, layer, owner, part] += 1
        if self.pushed[step, layer, owner, part] == self.num_nodes:
            for node in range(self.num_nodes):
                self.send(owner, node, layer, partial(self.answer, node, step, layer))

    def answer(self, node: int, step: int, layer: int) -> None:
        self.back[node, step, layer] += 1
        begin = self.waiting[node]
        if begin is not None and begin():
            self.waiting[node] = None

    def send(self, source: int, target: int, layer: int, arrive: Callable[[], None]) -> None:
        if source == target:
            return arrive()
        urgency = layer if self.priority else 0
        heapq.heappush(self.queues[source], (urgency, next(self.seq), self.slice_s[layer], arrive))
        self.send_next(source)
        return None

    def send_next(self, node: int) -> None:
        if self.sending[node] or not self.queues[node]:
            return
        self.sending[node] = True
        _, _, slice_s, arrive = heapq.heappop(self.queues[node])

        def sent() -> None:
            self.sending[node] = False
            arrive()
            self.send_next(node)

        self.at(slice_s, sent)


def random_layers(rng: random.Random) -> list[Layer]:
    return [
        Layer(rng.uniform(0.001, 0.05), rng.uniform(0.001, 0.1), round(10 ** rng.uniform(4, 7)))
        for _ in range(rng.randint(1, 7))
    ]


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_what_a_simulation_of_the_nodes_reaches(seed: int, num_nodes: int) -> None:
    rng = random.Random(seed)
    layers = random_layers(rng)
    wanted_r = rng.choice([0.3, 0.8, 1.0, 1.5, 4.0])
    bytes_per_s = bounds(layers, num_nodes, 1.0).r / wanted_r
    limits = bounds(layers, num_nodes, bytes_per_s)
    assert limits.r == pytest.approx(wanted_r)
    # The bounds know neither slices nor answers: those cost a few messages more.
    slack_s = 2 * max(layer.num_bytes for layer in layers) / PARTS / bytes_per_s
    for priority, bound_s in ((True, limits.p_star_s), (False, limits.p_fifo_s)):
        period_s = SimulatedNodes(layers, num_nodes, bytes_per_s, priority=priority).period_s()
        assert bound_s - 1e-9 <= period_s <= bound_s + slack_s, f"priority {priority}"


EQUAL = [Layer(0.001, 0.002, 1_000_000) for _ in range(100)]


@pytest.mark.parametrize("r", [0.3, 0.66, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 20.0])
def test_many_equal_layers_come_close_to_the_continuum(r: float) -> None:
    """Infinitely many equal layers overlap all but the forward pass with a barrier, and everything without."""
    limits = bounds(EQUAL, 4, bounds(EQUAL, 4, 1.0).r / r)
    assert limits.p_star_s / limits.compute_s == pytest.approx(max(1, r), abs=0.011)
    assert limits.p_fifo_s / limits.compute_s == pytest.approx(1 / 3 + max(2 / 3, r), abs=0.011)
    assert limits.gain_cap == pytest.approx((1 / 3 + max(2 / 3, r)) / max(1, r) - 1, abs=0.015)


def test_no_gain_exceeds_the_share_of_forward() -> None:
    rng = random.Random(7)
    for _ in range(300):
        layers = [Layer(time_s, 2 * time_s, rng.randint(1, 10**7)) for time_s in (rng.random() for _ in range(20))]
        assert 0 <= bounds(layers, 4, 10 ** rng.uniform(5, 9)).gain_cap <= 1 / 3 + 1e-12


def test_one_layer_can_overlap_nothing() -> None:
    limits = bounds([Layer(1.0, 2.0, 300)], 4, 150.0)
    assert limits.traffic_s == 3.0
    assert limits.p_star_s == limits.p_fifo_s == 6.0
    assert (limits.r, limits.gain_cap) == (1.0, 0.0)


def test_a_heavy_last_layer_hides_behind_all_before_it() -> None:
    layers = [Layer(1.0, 2.0, 0), Layer(0.0, 0.0, 100)]
    limits = bounds(layers, 2, 100.0)
    assert (limits.p_star_s, limits.p_fifo_s) == (3.0, 3.0)
    limits = bounds(layers, 2, 100.0 / 3)
    assert limits.p_star_s == pytest.approx(3.0)
    assert limits.p_fifo_s == pytest.approx(4.0)
    assert limits.gain_cap == pytest.approx(1 / 3)


def test_one_node_sends_nothing() -> None:
    limits = bounds(EQUAL, 1, 1.0)
    assert limits.traffic_s == limits.r == limits.gain_cap == 0.0
    assert limits.p_star_s == pytest.approx(0.3)


def test_layers_without_compute_take_as_long_as_their_bytes() -> None:
    limits = bounds([Layer(0.0, 0.0, 50)] * 4, 2, 100.0)
    assert (limits.p_star_s, limits.p_fifo_s, limits.r) == (2.0, 2.0, math.inf)
    assert bounds([Layer(0.0, 0.0, 0)], 2, 100.0).gain_cap == 0.0


# --- scaling ---


@pytest.mark.parametrize("name", list(scaling.PATTERNS))
def test_what_a_pattern_costs_grows_with_the_nodes_and_is_nothing_alone(name: str) -> None:
    costs = scaling.PATTERNS[name]
    assert costs(1) == scaling.Costs(0, 0, 0, 0)
    for n in range(1, 70):
        one, next_ = costs(n), costs(n + 1)
        assert next_.hops >= one.hops
        assert next_.sent >= one.sent - 1e-12
        assert next_.messages >= one.messages


def test_patterns_in_numbers() -> None:
    assert scaling.ring(4) == scaling.Costs(6, 1.5, 0.75, 6)
    assert scaling.multi_star(4) == scaling.Costs(2, 1.5, 0.75, 6)
    assert scaling.carrying_multi_tree(32).hops == 10
    assert scaling.carrying_multi_tree(2).sent == 1, "nothing to carry"
    # 0, 1, 1, 2 hops to the root, and three quarters back.
    assert scaling.carrying_multi_tree(4).sent == pytest.approx(4 / 4 + 3 / 4)


def test_the_traffic_goes_through_the_bounds() -> None:
    num_bytes, rate = LOAD.num_bytes, 1e7
    found = bounds(LAYERS, 8, rate)
    assert LOAD.step_s(scaling.multi_star(8).sent * num_bytes / rate) == pytest.approx(found.p_fifo_s)
    first = StepLoad(layers=LAYERS, pattern="ring", buckets=1, order="priority")
    assert first.step_s(found.traffic_s) == pytest.approx(found.p_star_s)
    assert LOAD.step_s(0.0) == pytest.approx(found.compute_s)


@pytest.mark.parametrize("name", ["multi-star", "ring", "carrying-multi-tree"])
@pytest.mark.parametrize("known_rate", [True, False])
def test_a_fit_to_32_nodes_predicts_1024(name: str, known_rate: bool) -> None:
    load = StepLoad(layers=LAYERS, pattern=name, buckets=4)
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
    load = StepLoad(layers=LAYERS, pattern="multi-star", buckets=4, row_bytes=100)
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


def test_nonnegative_weights_are_the_best_there_are() -> None:
    matrix = np.array([[1.0, 0.0, 1e9], [1.0, 1.0, 2e9], [1.0, 2.0, 5e9], [1.0, 3.0, 1e9]])
    assert fit_nonnegative(matrix, matrix @ [2.0, 0.5, 3e-9]) == pytest.approx([2.0, 0.5, 3e-9])
    falling = fit_nonnegative(matrix, np.array([4.0, 3.0, 2.0, 1.0]))  # would like a negative slope
    assert falling[1] == 0
    assert min(falling) >= 0
    assert fit_nonnegative(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]
