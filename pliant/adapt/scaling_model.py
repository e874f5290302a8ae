"""How long a step takes on n nodes: an alpha-beta model, fitted to runs on few nodes, that predicts runs on many.

What a way of summing costs one node is counted, not fitted: messages one after the other (`hops`), bytes sent by the
busiest node, bytes folded, messages handled. The prices are fitted: seconds per hop (alpha), seconds per byte (beta), and
what the processor needs per message and per folded byte. How much of all this a step shows follows from its layers: the
traffic goes through the same bounds (`limits`) as the yardsticks do, so overlap is nobody's parameter.

In a lab all nodes share the cores of one machine, and in a cluster each has its own: `cores` says which. So a model
fitted in a lab can be asked about a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pliant.adapt.fitting import Vector, damped, nonnegative
from pliant.adapt.limits import Layer, bounds
from pliant.errors import ConfigError

Order = Literal["fifo", "priority"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What summing one byte, or one bucket, over n nodes costs the busiest of them."""

    hops: float
    """Messages of a bucket that wait for each other."""
    sent: float
    """Bytes sent per byte of the tensor."""
    folded: float
    """Bytes added up per byte of the tensor."""
    messages: float
    """Of a bucket, sent by this node."""


def ring(n: int) -> Costs:
    """Each node sends to the next, 2(n-1) times, a part of n."""
    return Costs(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def star(n: int) -> Costs:
    """One node adds everything up and tells everybody."""
    return Costs(2 * min(1, n - 1), n - 1, n - 1, n - 1)


def multi_star(n: int) -> Costs:
    """Every node is the centre of a star for its part of n."""
    return Costs(2 * min(1, n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def tree(n: int) -> Costs:
    """A binary tree in the order of a heap: 2i+1 and 2i+2 are the children of i."""
    children = [(2 * node + 1 < n) + (2 * node + 2 < n) for node in range(n)]
    busiest = max((count + (node > 0) for node, count in enumerate(children)), default=0)
    return Costs(2 * _depth(n - 1), busiest, max(children), busiest)


def multi_tree(n: int) -> Costs:
    """n such trees, each rotated by one, for a part of n each: in the end all nodes have equally much to do."""
    return Costs(2 * _depth(n - 1), 2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def carrying_multi_tree(n: int) -> Costs:
    """The same where the order of summation is given: operands travel to the root one by one, which folds them all."""
    carried = sum(_depth(node) for node in range(n)) / n
    return Costs(2 * _depth(n - 1), carried + (n - 1) / n, (n - 1) / n, 2 * (n - 1))


def _depth(node: int) -> int:
    """How far a node of a heap is from its root."""
    return (node + 1).bit_length() - 1


PATTERNS: Mapping[str, Callable[[int], Costs]] = {
    "ring": ring,
    "star": star,
    "multi-star": multi_star,
    "tree": tree,
    "multi-tree": multi_tree,
    "carrying-multi-tree": carrying_multi_tree,
}


def pattern(name: str) -> Callable[[int], Costs]:
    """The way of summing with this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PATTERNS:
        raise ConfigError(f"pattern {name!r}: use one of {', '.join(PATTERNS)}")
    return PATTERNS[name]


def bucketed(layers: Sequence[Layer], cap_bytes: float) -> list[Layer]:
    """The layers as buckets let them be sent: a bucket's bytes are there when backward has filled it, as in DDP.

    Raises:
        ConfigError: a cap that is not above 0.
    """
    if not cap_bytes > 0:
        raise ConfigError(f"cap_bytes={cap_bytes}: use a number above 0")
    found: list[Layer] = []
    held = 0
    for place in reversed(range(len(layers))):
        held += layers[place].num_bytes
        full = held >= cap_bytes or place == 0
        found.append(replace(layers[place], num_bytes=held if full else 0))
        held = 0 if full else held
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was seen on n nodes."""

    nodes: int
    step_s: float
    cpu_s: float = math.nan
    """Of one node and step; not a number: unknown."""
    cores: float | None = None
    """Those that all nodes shared; None: each had its own."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or not (self.step_s > 0 and math.isfinite(self.step_s)):
            raise ConfigError(f"{self}: use 1 node or more and a time above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a step computes and sums, and how."""

    layers: tuple[Layer, ...]
    pattern: str
    buckets: int
    """Into how many messages' worth the gradients are cut; only their number matters for hops and messages."""
    order: Order = "fifo"
    row_bytes: int = 0
    """What each node also tells every other one in each step, directly."""

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def costs(self, nodes: int) -> Costs:
        """Of the whole step."""
        one = pattern(self.pattern)(nodes)
        size, others = self.num_bytes, nodes - 1
        rows = others if self.row_bytes else 0
        sent = one.sent * size + self.row_bytes * others
        return Costs(one.hops * self.buckets, sent, one.folded * size, one.messages * self.buckets + rows)

    def step_s(self, traffic_s: float) -> float:
        """How long a step lasts that keeps the network of each node busy for `traffic_s`."""
        if traffic_s <= 0 or self.num_bytes == 0:
            return sum(layer.forward_s + layer.backward_s for layer in self.layers)
        # On two nodes each byte is sent once, so this rate makes the traffic last as long as asked for.
        found = bounds(self.layers, 2, self.num_bytes / traffic_s)
        return found.p_star_s if self.order == "priority" else found.p_fifo_s


@dataclass(frozen=True, slots=True)
class Prices:
    """What the counted things cost."""

    fixed_s: float
    """Of each step, whatever the number of nodes."""
    alpha_s: float
    """Of a hop."""
    beta_s: float
    """Of a byte sent."""
    cpu_fixed_s: float
    """Processor time of each node and step, without any message."""
    cpu_message_s: float
    cpu_byte_s: float
    """Of a byte folded."""
    cpu_weight: float
    """How much of the processor time for messages and folds is in the way of the traffic: 0 to 1."""


@dataclass(frozen=True, slots=True)
class ScalingModel:
    """A load with its prices: knows how long a step takes on any number of nodes."""

    load: Load
    prices: Prices

    def cpu_s(self, nodes: int) -> float:
        """Processor time of one node in a step."""
        return self.prices.cpu_fixed_s + self._handling_s(nodes)

    def traffic_s(self, nodes: int, cores: float | None = None) -> float:
        """How long the network of a node is busy in a step. `cores`: those that all nodes share; None: each has its own."""
        costs, prices = self.load.costs(nodes), self.prices
        handling_s = prices.cpu_weight * _sharing(nodes, cores) * self._handling_s(nodes)
        return prices.alpha_s * costs.hops + prices.beta_s * costs.sent + handling_s

    def predict(self, nodes: int, cores: float | None = None) -> float:
        """Seconds of a step. With shared cores never less than those need for all nodes together."""
        step_s = self.load.step_s(self.traffic_s(nodes, cores)) + self.prices.fixed_s
        return max(step_s, nodes * self.cpu_s(nodes) / cores) if cores is not None else step_s

    def enlarged(self, factor: float) -> ScalingModel:
        """The same with `factor` times the bytes on links that are as many times faster: undoes the scale of a lab."""
        layers = tuple(replace(layer, num_bytes=round(layer.num_bytes * factor)) for layer in self.load.layers)
        prices = replace(self.prices, beta_s=self.prices.beta_s / factor)
        return ScalingModel(replace(self.load, layers=layers), prices)

    def _handling_s(self, nodes: int) -> float:
        costs = self.load.costs(nodes)
        return self.prices.cpu_message_s * costs.messages + self.prices.cpu_byte_s * costs.folded


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and how well it says what was seen."""

    model: ScalingModel
    residuals: tuple[float, ...]
    """Of each measurement: predicted over measured step, minus 1."""
    cpu_residuals: tuple[float, ...]
    """The same of processor times, where they are known."""

    @property
    def worst(self) -> float:
        """The largest residual of a step, without its sign."""
        return max(map(abs, self.residuals))


def fit(
    load: Load,
    measurements: Sequence[Measurement],
    *,
    bytes_per_s: float | None = None,
) -> Fit:
    """The prices, none below 0, that say best what was measured.

    Processor times come first, by linear least squares. Then what a step shows, whose overlap is not linear.

    Args:
        bytes_per_s: what a node can send, where that is known; beta is not fitted then.

    Raises:
        ConfigError: no measurement.
    """
    if not measurements:
        raise ConfigError("a fit to no measurement: give at least one")
    timed = [each for each in measurements if math.isfinite(each.cpu_s)]
    cpu = _cpu_prices(load, timed)
    plain = ScalingModel(load, Prices(0.0, 0.0, 1 / bytes_per_s if bytes_per_s else 0.0, *cpu, 0.0))
    unit_s = load.step_s(0.0) or float(np.median([each.step_s for each in measurements]))
    largest = max(measurements, key=lambda each: each.nodes)
    most = load.costs(largest.nodes)
    # Parameters in units of a step's compute, each as what the largest run would spend on it.
    handled_s = _sharing(largest.nodes, largest.cores) * (plain.cpu_s(largest.nodes) - cpu[0])
    sizes = np.array([1.0, most.hops, 0.0 if bytes_per_s else most.sent, handled_s / unit_s])
    told = sizes > 0

    def model_of(values: Vector) -> ScalingModel:
        scaled = np.where(told, values / np.where(told, sizes, 1.0), 0.0)
        fixed_s, alpha_s, beta_s = (float(value) * unit_s for value in scaled[:3])
        beta_s = 1 / bytes_per_s if bytes_per_s else beta_s
        return ScalingModel(load, Prices(fixed_s, alpha_s, beta_s, *cpu, float(scaled[3])))

    def errors(values: Vector) -> Vector:
        model = model_of(values)
        apart = [math.log(model.predict(each.nodes, each.cores) / each.step_s) for each in measurements]
        return np.array([*apart, *(1e-4 * values)])  # what nothing depends on goes to 0

    # The processors cannot be in the way for longer than they work: the last weight is at most 1.
    upper = np.where(told, [1e3, 1e3, 1e3, float(sizes[3])], 0.0)
    starts = ([0.01, 0.1, 0.5, 0.1], [0.01, 1.0, 0.1, 0.1], [0.01, 0.1, 1.0, 1.0])
    trials = [damped(errors, start, [0.0] * 4, upper.tolist()) for start in starts]
    model = model_of(min(trials, key=lambda trial: trial[1])[0])
    return Fit(
        model,
        tuple(model.predict(each.nodes, each.cores) / each.step_s - 1 for each in measurements),
        tuple(model.cpu_s(each.nodes) / each.cpu_s - 1 for each in timed),
    )


def _sharing(nodes: int, cores: float | None) -> float:
    """How many nodes wait for each core."""
    return max(1.0, nodes / cores) if cores is not None else 1.0


def _cpu_prices(load: Load, measurements: Sequence[Measurement]) -> tuple[float, float, float]:
    """Fixed, per message, per folded byte: of one node's processor time. Relative errors count."""
    if not measurements:
        return 0.0, 0.0, 0.0
    rows = []
    for each in measurements:
        costs = load.costs(each.nodes)
        rows.append([1 / each.cpu_s, costs.messages / each.cpu_s, costs.folded / each.cpu_s])
    fixed_s, message_s, byte_s = nonnegative(np.array(rows), np.ones(len(rows)))
    return float(fixed_s), float(message_s), float(byte_s)
