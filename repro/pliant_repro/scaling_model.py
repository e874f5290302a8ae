"""Models of a training step: its bounds on a network, and how long it takes on n nodes. Pure arithmetic.

Bounds: the times and sizes of the layers determine the shortest step that any order of sending allows, and the shortest step
that a barrier at the end of backward allows. The network is taken to be usable to the last byte, without latency, and with
preemption at any byte; a measured step can only be slower.

Scaling: an alpha-beta model that is fitted to runs on few nodes and predicts runs on many. The costs of an all-reduce for one
node are counted; the prices are fitted: seconds per hop (alpha), seconds per byte (beta), processor time per message and per
folded byte. The bounds say how much of the traffic a step shows, so overlap has no parameter. In a lab all nodes share the
`cores` of one machine; in a cluster each node has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pliant.adapt.goodput_model import Vector

Order = Literal["fifo", "priority"]


# --- bounds of a step ---


@dataclass(frozen=True, slots=True)
class Layer:
    """Cost of one layer in each step. Layers are listed in the order of the forward pass."""

    forward_s: float
    backward_s: float
    """Time of the backward pass, with the layer's share of the optimizer."""
    num_bytes: int
    """Size of the gradient, which is summed over all nodes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one model on one network."""

    compute_s: float
    """C: the time of all layers forward and backward without waiting."""
    traffic_s: float
    """T: how long each node has to send in every step."""
    r: float
    """T/C. Where it is small, no order of sending can matter."""
    p_star_s: float
    """P*: no step can be shorter. It is reached if what the next forward pass needs first is always sent first."""
    p_fifo_s: float
    """The shortest step if gradients are sent as they come, with a barrier at the end of backward."""
    gain_cap: float
    """The most that priorities can gain over the best barrier: P_fifo/P* - 1."""


def bounds(layers: Sequence[Layer], num_nodes: int, bytes_per_s: float) -> Bounds:
    """Return the limits of `layers`, of which there is at least one, on `num_nodes` nodes that can each send `bytes_per_s`."""
    sent_s = [transfer_s(layer.num_bytes, num_nodes, bytes_per_s) for layer in layers]
    sent_to_s = list(accumulate(sent_s))  # for layer m: the traffic of layers 1 to m
    computed_from_s = _sums_to_the_end([layer.forward_s + layer.backward_s for layer in layers])
    backward_from_s = _sums_to_the_end([layer.backward_s for layer in layers])
    compute_s, traffic_s = computed_from_s[0], sent_to_s[-1]

    # A layer may be summed from the end of its backward to the start of its next forward. The step computes that
    # layer and all after it outside of that window. The windows of the layers before lie inside it, so their traffic
    # has to fit in as well. Sending the lowest layer first is earliest deadline first, which reaches this bound.
    p_star_s = max(compute_s, *map(sum, zip(sent_to_s, computed_from_s, strict=True)))

    # With a barrier the links are busy from some layer's gradient on until the last one has been sent, and the next
    # forward starts only then.
    p_fifo_s = sum(layer.forward_s for layer in layers)
    p_fifo_s += max(map(sum, zip(sent_to_s, backward_from_s, strict=True)))

    r = traffic_s / compute_s if compute_s > 0 else math.inf
    # Both are sums of the same terms in another order, so the last bits may differ where the true values are equal.
    p_fifo_s = max(p_fifo_s, p_star_s)
    gain_cap = p_fifo_s / p_star_s - 1 if p_star_s > 0 else 0.0
    return Bounds(compute_s, traffic_s, r, p_star_s, p_fifo_s, gain_cap)


def transfer_s(num_bytes: int, num_nodes: int, bytes_per_s: float) -> float:
    """Return 2(N-1)/N * S/B: how long each node sends to sum `num_bytes` over all nodes.

    This holds for a ring and for an owner per slice.
    """
    return 2 * (num_nodes - 1) / num_nodes * num_bytes / bytes_per_s


def _sums_to_the_end(times_s: Sequence[float]) -> list[float]:
    """Return the sum of each value and all after it."""
    return list(accumulate(reversed(times_s)))[::-1]


# --- costs of an all-reduce on n nodes ---


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of summing one byte, or one bucket, over n nodes for the busiest of them."""

    hops: float
    """Messages of a bucket that wait for each other."""
    sent: float
    """Bytes sent per byte of the tensor."""
    folded: float
    """Bytes added up per byte of the tensor."""
    messages: float
    """Messages of a bucket that this node sends."""


def ring(n: int) -> Costs:
    """Each node sends one n-th to the next node, 2(n-1) times."""
    return Costs(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def multi_star(n: int) -> Costs:
    """Every node is the centre of a star for its n-th of the tensor."""
    return Costs(2 * min(1, n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def carrying_multi_tree(n: int) -> Costs:
    """n binary trees, each rotated by one, for an n-th of the tensor each; the root folds all operands in a fixed order."""
    carried = sum(_heap_depth(node) for node in range(n)) / n
    return Costs(2 * _heap_depth(n - 1), carried + (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def _heap_depth(node: int) -> int:
    """Return the distance of a node of a heap from its root."""
    return (node + 1).bit_length() - 1


PATTERNS: Mapping[str, Callable[[int], Costs]] = {
    "ring": ring,
    "multi-star": multi_star,
    "carrying-multi-tree": carrying_multi_tree,
}


def bucketed(layers: Sequence[Layer], cap_bytes: float) -> list[Layer]:
    """Return the layers as buckets send them: a bucket is sent when backward has filled it, as in DDP."""
    found: list[Layer] = []
    held = 0
    for place in reversed(range(len(layers))):
        held += layers[place].num_bytes
        full = held >= cap_bytes or place == 0
        found.append(replace(layers[place], num_bytes=held if full else 0))
        held = 0 if full else held
    return found[::-1]


# --- steps on n nodes ---


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured step on n nodes."""

    nodes: int
    step_s: float
    cpu_s: float = math.nan
    """Processor time of one node and step; NaN if unknown."""
    cores: float | None = None
    """Cores that all nodes shared; None if each node had its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoad:
    """Computation and communication of a step."""

    layers: tuple[Layer, ...]
    pattern: str
    buckets: int
    """Number of buckets into which the gradients are cut; it determines hops and messages."""
    order: Order = "fifo"
    row_bytes: int = 0
    """Bytes that each node also sends directly to every other node in each step."""

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def costs(self, nodes: int) -> Costs:
        """Return the costs of the whole step."""
        one = PATTERNS[self.pattern](nodes)
        size, others = self.num_bytes, nodes - 1
        rows = others if self.row_bytes else 0
        sent = one.sent * size + self.row_bytes * others
        return Costs(one.hops * self.buckets, sent, one.folded * size, one.messages * self.buckets + rows)

    def step_s(self, traffic_s: float) -> float:
        """Return the duration of a step that keeps the network of each node busy for `traffic_s`."""
        if traffic_s <= 0 or self.num_bytes == 0:
            return sum(layer.forward_s + layer.backward_s for layer in self.layers)
        # On two nodes each byte is sent once, so at this rate the traffic lasts `traffic_s`.
        found = bounds(self.layers, 2, self.num_bytes / traffic_s)
        return found.p_star_s if self.order == "priority" else found.p_fifo_s


@dataclass(frozen=True, slots=True)
class Prices:
    """Time that each counted cost takes."""

    fixed_s: float
    """Time of each step that does not depend on the number of nodes."""
    alpha_s: float
    """Time of a hop."""
    beta_s: float
    """Time of a sent byte."""
    cpu_fixed_s: float
    """Processor time of each node and step without any message."""
    cpu_message_s: float
    cpu_byte_s: float
    """Processor time of a folded byte."""
    cpu_weight: float
    """Share of the processor time for messages and folds that delays the traffic: 0 to 1."""


@dataclass(frozen=True, slots=True)
class ScalingModel:
    """A load with its prices: predicts how long a step takes on any number of nodes."""

    load: StepLoad
    prices: Prices

    def cpu_s(self, nodes: int) -> float:
        """Return the processor time of one node in a step."""
        return self.prices.cpu_fixed_s + self._handling_s(nodes)

    def traffic_s(self, nodes: int, cores: float | None = None) -> float:
        """Return how long the network of a node is busy in a step.

        Args:
            cores: the cores that all nodes share; None if each node has its own.
        """
        costs, prices = self.load.costs(nodes), self.prices
        handling_s = prices.cpu_weight * _nodes_per_core(nodes, cores) * self._handling_s(nodes)
        return prices.alpha_s * costs.hops + prices.beta_s * costs.sent + handling_s

    def predict(self, nodes: int, cores: float | None = None) -> float:
        """Return the seconds of a step; with shared cores at least what they need for all nodes together."""
        step_s = self.load.step_s(self.traffic_s(nodes, cores)) + self.prices.fixed_s
        return max(step_s, nodes * self.cpu_s(nodes) / cores) if cores is not None else step_s

    def enlarged(self, factor: float) -> ScalingModel:
        """Return the model with `factor` times the bytes on links that are as many times faster.

        This undoes the scale of a lab.
        """
        layers = tuple(replace(layer, num_bytes=round(layer.num_bytes * factor)) for layer in self.load.layers)
        prices = replace(self.prices, beta_s=self.prices.beta_s / factor)
        return ScalingModel(replace(self.load, layers=layers), prices)

    def _handling_s(self, nodes: int) -> float:
        costs = self.load.costs(nodes)
        return self.prices.cpu_message_s * costs.messages + self.prices.cpu_byte_s * costs.folded


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """A fitted model of scaling, and how well it agrees with the measurements."""

    model: ScalingModel
    residuals: tuple[float, ...]
    """For each measurement: predicted over measured step, minus 1."""
    cpu_residuals: tuple[float, ...]
    """The same for processor times, where they are known."""

    @property
    def worst(self) -> float:
        """The largest residual of a step, without its sign."""
        return max(map(abs, self.residuals))


def fit(load: StepLoad, measurements: Sequence[Measurement], *, bytes_per_s: float | None = None) -> ScalingFit:
    """Fit the prices, none below 0, to what was measured.

    Processor times are fitted first, by linear least squares. Then the visible time of a step, whose overlap is not
    linear.

    Args:
        measurements: at least one.
        bytes_per_s: the rate at which a node can send, if it is known; then beta is not fitted.
    """
    timed = [each for each in measurements if math.isfinite(each.cpu_s)]
    cpu = _fit_cpu_prices(load, timed)
    plain = ScalingModel(load, Prices(0.0, 0.0, 1 / bytes_per_s if bytes_per_s else 0.0, *cpu, 0.0))
    unit_s = load.step_s(0.0) or float(np.median([each.step_s for each in measurements]))
    largest = max(measurements, key=lambda each: each.nodes)
    most = load.costs(largest.nodes)
    # Parameters are in units of a step's computation: what the largest run would spend on each.
    handled_s = _nodes_per_core(largest.nodes, largest.cores) * (plain.cpu_s(largest.nodes) - cpu[0])
    sizes = np.array([1.0, most.hops, 0.0 if bytes_per_s else most.sent, handled_s / unit_s])
    known = sizes > 0

    def model_of(values: Vector) -> ScalingModel:
        scaled = np.where(known, values / np.where(known, sizes, 1.0), 0.0)
        fixed_s, alpha_s, beta_s = (float(value) * unit_s for value in scaled[:3])
        beta_s = 1 / bytes_per_s if bytes_per_s else beta_s
        return ScalingModel(load, Prices(fixed_s, alpha_s, beta_s, *cpu, float(scaled[3])))

    def errors(values: Vector) -> Vector:
        model = model_of(values)
        apart = [math.log(model.predict(each.nodes, each.cores) / each.step_s) for each in measurements]
        return np.array([*apart, *(1e-4 * values)])  # a parameter that nothing depends on goes to 0

    # The processors cannot delay the traffic for longer than they work: the last weight is at most 1.
    upper = np.where(known, [1e3, 1e3, 1e3, float(sizes[3])], 0.0)
    starts = ([0.01, 0.1, 0.5, 0.1], [0.01, 1.0, 0.1, 0.1], [0.01, 0.1, 1.0, 1.0])
    from pliant.adapt.goodput_model import fit_bounded  # here, so that networks can be built with version 0.1

    model = model_of(fit_bounded(errors, starts, [0.0] * 4, upper))
    return ScalingFit(
        model,
        tuple(model.predict(each.nodes, each.cores) / each.step_s - 1 for each in measurements),
        tuple(model.cpu_s(each.nodes) / each.cpu_s - 1 for each in timed),
    )


def _nodes_per_core(nodes: int, cores: float | None) -> float:
    """Return how many nodes wait for each core."""
    return max(1.0, nodes / cores) if cores is not None else 1.0


def _fit_cpu_prices(load: StepLoad, measurements: Sequence[Measurement]) -> tuple[float, float, float]:
    """Fit a node's processor time: fixed, per message, per folded byte. Relative errors count."""
    if not measurements:
        return 0.0, 0.0, 0.0
    rows = []
    for each in measurements:
        costs = load.costs(each.nodes)
        rows.append([1 / each.cpu_s, costs.messages / each.cpu_s, costs.folded / each.cpu_s])
    fixed_s, message_s, byte_s = fit_nonnegative(np.array(rows), np.ones(len(rows)))
    return float(fixed_s), float(message_s), float(byte_s)


def fit_nonnegative(features: NDArray[Any], values: NDArray[Any]) -> Vector:
    """Return weights of the columns, none below 0, with the least squared error.

    A column without information (all zeros, or a multiple of another one) gets what is left for it, at least 0.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # imported late: it loads slowly

    sizes = np.linalg.norm(features, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    weights = nnls(features / sizes, values)[0]  # seconds per byte and seconds per hop are ten powers apart
    return np.asarray(weights / sizes, np.float64)
