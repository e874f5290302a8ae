"""Failures of devices and nodes in a simulated cluster: when they come, and when they are repaired. Pure.

Every device and every node fails by itself: the time until it fails is drawn from an exponential distribution, and its
repair takes a fixed time. The draws depend on the seed and the part alone, so all policies meet the same failures.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.duration import parse_duration
from pliant.errors import ConfigError
from pliant.sched.cluster import Cluster

NODE = "node"
"""What stands for nodes in `--mtbf 90d/node`, where device types stand for devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRates:
    """How often parts of a cluster fail, and how long they are away."""

    devices_s: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds between failures of one device, by type; types without an entry do not fail."""
    nodes_s: float = math.inf
    """Mean seconds between failures of one node with all its devices."""
    repair_s: float = 7200.0
    checkpoint_s: float = 1800.0
    """Seconds of computing between two checkpoints of a job; infinite: it has those of its changes of devices only."""

    @classmethod
    def parse(cls, texts: Sequence[str], repair: str, checkpoint_every: str, cluster: Cluster) -> FailureRates:
        """Parse `30d` (devices of every type), `10d/t4`, `90d/node`, which may be in one text with commas between.

        Raises:
            ConfigError: a text has another form, or the cluster has no such part.
        """
        found: dict[str, float] = {}
        for text in (part.strip() for each in texts for part in each.split(",")):
            time, slash, part = text.partition("/")
            seconds = parse_duration(time, "--mtbf")
            if not seconds > 0:
                raise ConfigError(f"--mtbf {text!r:.60}: use a time above 0, such as 30d")
            if slash and part not in (*cluster.counts, NODE):
                kinds = ", ".join(cluster.counts)
                raise ConfigError(f"--mtbf {text!r:.60}: the cluster has {kinds}: name one of these types, or {NODE}")
            if part == NODE and not cluster.nodes:
                raise ConfigError(f"--mtbf {text!r:.60}: the cluster has no nodes: give them, as in --cluster v100=8x4")
            if part in found:
                raise ConfigError(f"--mtbf {text!r:.60}: its mean time is there twice: give it once")
            found[part] = seconds
        means = {kind: found.get(kind, found.get("", math.inf)) for kind in cluster.counts}
        return cls(
            devices_s={kind: mean_s for kind, mean_s in means.items() if mean_s < math.inf},
            nodes_s=found.get(NODE, math.inf),
            repair_s=parse_duration(repair, "--repair"),
            checkpoint_s=parse_duration(checkpoint_every, "--checkpoint-every") or math.inf,
        )


@dataclass(frozen=True, slots=True)
class Outage:
    """The moment at which a device or a node fails, or is repaired."""

    at_s: float
    kind: str
    """Device type; that of the devices of a node."""
    node: int | None
    """The node that fails, or that has the device; None if the cluster does not list its nodes."""
    whole_node: bool
    begins: bool
    """Whether it fails; if not, it is repaired."""
    draw: float
    """Number from 0 to 1 that says which of the equal devices it is."""


class Outages:
    """All failures and repairs of a cluster in the order of time; they never end."""

    def __init__(self, cluster: Cluster, rates: FailureRates, seed: int) -> None:
        self.checkpoint_s = rates.checkpoint_s
        self._seed, self._repair_s = seed, rates.repair_s
        self._parts: list[tuple[str, int | None, bool, float]] = []
        for kind, node, count in _pools(cluster):
            if kind in rates.devices_s:
                self._parts += [(kind, node, False, rates.devices_s[kind])] * count
            if node is not None and rates.nodes_s < math.inf:
                self._parts.append((kind, node, True, rates.nodes_s))
        self._count = [0] * len(self._parts)
        """Failures so far by part."""
        self._coming = [(self._draw(number) * part[3], number, True) for number, part in enumerate(self._parts)]
        heapq.heapify(self._coming)

    @property
    def num_parts(self) -> int:
        """Number of devices and nodes that fail."""
        return len(self._parts)

    @property
    def next_s(self) -> float:
        return self._coming[0][0] if self._coming else math.inf

    def pop(self) -> Outage:
        """Return the next one."""
        at_s, number, begins = self._coming[0]
        kind, node, whole_node, mean_s = self._parts[number]
        if begins:
            self._count[number] += 1
            heapq.heapreplace(self._coming, (at_s + self._repair_s, number, False))
        else:
            heapq.heapreplace(self._coming, (at_s + self._draw(number) * mean_s, number, True))
        return Outage(at_s, kind, node, whole_node, begins, self._chance(number, "device").random())

    def _draw(self, number: int) -> float:
        """Return the time to the next failure of a part in units of its mean."""
        return self._chance(number, "time").expovariate(1.0)

    def _chance(self, number: int, what: str) -> random.Random:
        # Without a generator for each part, a cluster of a million devices needs no gigabytes.
        return random.Random(f"{self._seed} {number} {self._count[number]} {what}")


def _pools(cluster: Cluster) -> Iterator[tuple[str, int | None, int]]:
    """Yield (type, node, devices) of the nodes; of the types, if the cluster does not list its nodes."""
    if cluster.nodes:
        yield from ((node.kind, number, node.devices) for number, node in enumerate(cluster.nodes))
    else:
        yield from ((kind, None, count) for kind, count in cluster.counts.items())


@dataclass(slots=True)
class DevicesDown:
    """Which devices of a cluster are away."""

    cluster: Cluster
    _devices: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """Devices that have failed by themselves, by type and node."""
    _nodes: set[int] = field(default_factory=set)

    def up(self, kind: str, node: int | None) -> int:
        """Return how many devices of a node are there; of a type, if the cluster does not list its nodes."""
        if node in self._nodes:
            return 0
        size = self.cluster.counts[kind] if node is None else self.cluster.nodes[node].devices
        return size - self._devices.get((kind, node), 0)

    def apply(self, outage: Outage) -> int:
        """Take note of a failure or a repair; return by how many the devices that are there have changed."""
        before = self.up(outage.kind, outage.node)
        if outage.whole_node and outage.node is not None:
            (self._nodes.add if outage.begins else self._nodes.discard)(outage.node)
        else:
            place = (outage.kind, outage.node)
            self._devices[place] = self._devices.get(place, 0) + (1 if outage.begins else -1)
        change = self.up(outage.kind, outage.node) - before
        self.cluster.down[outage.kind] = self.cluster.down.get(outage.kind, 0) - change
        return change
