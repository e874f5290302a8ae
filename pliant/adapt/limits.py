"""How long a training step must take: the yardsticks that measurements are held against.

A step computes its layers forward, then backward, and sums each layer's gradient over all nodes while it goes on
computing. From the times and sizes of the layers follow the shortest step that any order of sending allows, the
shortest that a barrier at the end of backward allows, and so what priorities can gain at most. Pure arithmetic: no
sockets, no clocks, no tensors. The model is a network that can be used to the last byte, without latency, and with
preemption at any byte; what is measured can only be slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pliant.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer costs in each step. Layers are listed in the order of the forward pass."""

    forward_s: float
    backward_s: float
    """With the layer's share of the optimizer."""
    num_bytes: int
    """Of its gradient, which is summed over all nodes."""

    def __post_init__(self) -> None:
        times_s = (self.forward_s, self.backward_s)
        if not all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s) or self.num_bytes < 0:
            raise ConfigError(f"{self}: use times in seconds and a number of bytes that are not negative")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one model on one network."""

    compute_s: float
    """C: all layers forward and backward, with nothing to wait for."""
    traffic_s: float
    """T: how long each node has to send in every step."""
    r: float
    """T/C. Where it is small, no order of sending can matter."""
    p_star_s: float
    """P*: no step can be shorter; reached where what the next forward needs first is always sent first."""
    p_fifo_s: float
    """The shortest step with gradients sent as they come and a barrier at the end of backward."""
    gain_cap: float
    """What priorities can gain over the best barrier: P_fifo/P* - 1."""

    def fraction_of_bound(self, measured_s: float) -> float:
        """P* as a share of a measured step: 1 is perfect."""
        return self.p_star_s / _positive("measured_s", measured_s)


def bounds(layers: Sequence[Layer], num_nodes: int, bytes_per_s: float) -> Bounds:
    """The limits of `layers` on `num_nodes` nodes that can each send `bytes_per_s`.

    Raises:
        ConfigError: no layer, no node, or no bandwidth.
    """
    if not layers:
        raise ConfigError("bounds of no layer: give at least one")
    sent_s = [transfer_s(layer.num_bytes, num_nodes, bytes_per_s) for layer in layers]
    sent_to_s = list(accumulate(sent_s))  # of layer m: the traffic of layers 1 to m
    computed_from_s = _from_the_end([layer.forward_s + layer.backward_s for layer in layers])
    backward_from_s = _from_the_end([layer.backward_s for layer in layers])
    compute_s, traffic_s = computed_from_s[0], sent_to_s[-1]

    # A layer may be summed from the end of its backward to the start of its next forward. The step computes that
    # layer and all after it outside of that window; and the windows of the layers before lie inside it, so that
    # their traffic has to fit in as well. Sending the lowest layer first is earliest deadline first: it reaches this.
    p_star_s = max(compute_s, *map(sum, zip(sent_to_s, computed_from_s, strict=True)))

    # With a barrier the links are busy from some layer's gradient on until the last one has been sent, and the next
    # forward starts only then.
    p_fifo_s = sum(layer.forward_s for layer in layers)
    p_fifo_s += max(map(sum, zip(sent_to_s, backward_from_s, strict=True)))

    r = traffic_s / compute_s if compute_s > 0 else math.inf
    # Both are sums of the same terms in another order, so the last bits may differ where the truth is equality.
    p_fifo_s = max(p_fifo_s, p_star_s)
    gain_cap = p_fifo_s / p_star_s - 1 if p_star_s > 0 else 0.0
    return Bounds(compute_s, traffic_s, r, p_star_s, p_fifo_s, gain_cap)


def transfer_s(num_bytes: int, num_nodes: int, bytes_per_s: float) -> float:
    """2(N-1)/N * S/B: how long each node sends to sum `num_bytes` over all, by a ring or with an owner per slice.

    Raises:
        ConfigError: no node, or no bandwidth.
    """
    if num_nodes < 1:
        raise ConfigError(f"num_nodes={num_nodes}: use 1 or more")
    return 2 * (num_nodes - 1) / num_nodes * num_bytes / _positive("bytes_per_s", bytes_per_s)


def tictac_efficiency(compute_s: float, traffic_s: float, measured_s: float) -> float:
    """How much of what can overlap did overlap: 1 for all of it, 0 for one after the other, less if slower still.

    E = (C+T-m) / (C+T-max(C,T)), Hashemi et al. 2019. Where there is nothing to overlap every order is perfect: 1.
    """
    overlap_s = min(compute_s, traffic_s)
    return (compute_s + traffic_s - measured_s) / overlap_s if overlap_s > 0 else 1.0


def _from_the_end(times_s: Sequence[float]) -> list[float]:
    """The sum of each value and all after it."""
    return list(accumulate(reversed(times_s)))[::-1]


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{name}={value}: use a number above 0")
    return value
