"""The yardsticks, against a simulation of nodes that send slices to each other, and against closed forms."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pliant.adapt.limits import Layer, bounds, tictac_efficiency, transfer_s
from pliant.errors import ConfigError

PARTS = 64
"""Slices of each layer that each node owns."""
STEPS = 3


class Cluster:
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
        period_s = Cluster(layers, num_nodes, bytes_per_s, priority=priority).period_s()
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


def test_measurements_are_shares_of_the_bounds() -> None:
    limits = bounds(EQUAL, 4, 1e9 / 2)
    assert limits.r == pytest.approx(1.0)
    assert limits.fraction_of_bound(limits.p_star_s) == 1.0
    assert limits.fraction_of_bound(2 * limits.p_star_s) == 0.5


def test_tictac_efficiency() -> None:
    assert tictac_efficiency(3.0, 2.0, 3.0) == 1.0
    assert tictac_efficiency(3.0, 2.0, 5.0) == 0.0
    assert tictac_efficiency(3.0, 2.0, 6.0) == -0.5
    assert tictac_efficiency(2.0, 3.0, 4.0) == 0.5
    assert tictac_efficiency(3.0, 0.0, 3.1) == 1.0


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match="no layer"):
        bounds([], 2, 1.0)
    with pytest.raises(ConfigError, match="num_nodes=0"):
        bounds(EQUAL, 0, 1.0)
    with pytest.raises(ConfigError, match="bytes_per_s=0"):
        transfer_s(1, 2, 0)
    with pytest.raises(ConfigError, match="measured_s=nan"):
        bounds(EQUAL, 2, 1.0).fraction_of_bound(math.nan)
    with pytest.raises(ConfigError, match="backward_s=-1"):
        Layer(0.0, -1.0, 1)
    with pytest.raises(ConfigError, match="num_bytes=-1"):
        Layer(0.0, 1.0, -1)
