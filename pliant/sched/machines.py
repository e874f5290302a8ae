"""The devices of a cluster: how many of each type, on which nodes, and which of them somebody else has reserved. Pure."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.errors import ConfigError
from pliant.sched.job import Jobs, Placement


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with devices of one type."""

    kind: str
    devices: int


@dataclass(slots=True)
class Cluster:
    """What there is to give."""

    counts: dict[str, int]
    """Devices of each type."""
    nodes: tuple[Node, ...] = ()
    """Where they are; empty: it makes no difference."""
    reserved: dict[str, int] = field(default_factory=dict)
    """Those that their owner uses now; jobs give them back."""

    def __post_init__(self) -> None:
        if not self.counts or any(count < 0 for count in self.counts.values()) or not any(self.counts.values()):
            raise ConfigError(f"cluster {self.counts}: give at least one device, as in v100=32,p100=16")

    @property
    def num_devices(self) -> int:
        return sum(self.counts.values())

    def available(self, kind: str) -> int:
        """Devices of a type that jobs may have now."""
        return max(0, self.counts.get(kind, 0) - self.reserved.get(kind, 0))

    def free(self, jobs: Jobs) -> dict[str, int]:
        """Available and not in use; below 0 where some must be given back."""
        return {kind: self.available(kind) - jobs.used[kind] for kind in self.counts}

    @classmethod
    def of_nodes(cls, nodes: Iterable[Node]) -> Cluster:
        listed = tuple(nodes)
        counts: Counter[str] = Counter()
        for node in listed:
            counts[node.kind] += node.devices
        return cls(dict(counts), listed)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """From `v100=32,t4=16` (devices), `gpu=16x4` (nodes of 4), or a file of nodes as Alibaba publishes them.

        Raises:
            ConfigError: something else.
        """
        if Path(text).suffix == ".csv":
            return _from_openb(Path(text))
        counts: dict[str, int] = {}
        nodes: list[Node] = []
        for part in text.split(","):
            kind, _, amount = part.strip().partition("=")
            number, by, each = amount.partition("x")
            if not kind or not number.isdecimal() or (by and not each.isdecimal()) or kind in counts:
                raise ConfigError(f"--cluster {part!r}: use TYPE=DEVICES or TYPE=NODESxDEVICES, each type once")
            counts[kind] = int(number) * int(each or 1)
            nodes += [Node(kind, int(each))] * int(number) if by else []
        if nodes and sum(node.devices for node in nodes) != sum(counts.values()):
            raise ConfigError(f"--cluster {text!r}: give nodes for all types or for none, as in v100=8x4,t4=4x4")
        return cls(counts, tuple(nodes))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices that their owner uses for a while, and jobs meanwhile cannot."""

    kind: str
    devices: int
    begin_s: float
    end_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> tuple[Reservation, ...]:
        """From `v100=4@3600-7200`, `v100=4,t4=2@3600-7200`, or `v100=4@3600-` for one that never ends.

        Raises:
            ConfigError: something else.
        """
        listed, _, span = text.partition("@")
        begin, dash, end = span.partition("-")
        try:
            begin_s, end_s = float(begin), float(end) if end else math.inf
            amounts = [
                (kind.strip(), int(count)) for kind, _, count in (part.partition("=") for part in listed.split(","))
            ]
        except ValueError:
            amounts = []
        if not amounts or not dash or any(not kind or count < 1 for kind, count in amounts):
            raise ConfigError(f"--reserve {text!r}: use TYPE=N@BEGIN-END with seconds, as in v100=4@3600-7200")
        if not 0 <= begin_s < end_s:
            raise ConfigError(f"--reserve {text!r}: it must begin at 0 s or later, and end after that")
        return tuple(cls(kind, count, begin_s, end_s) for kind, count in amounts)


def reserved_over_time(reservations: Sequence[Reservation]) -> list[tuple[float, dict[str, int]]]:
    """(time, what is reserved from then on), at every time when that changes. Those of one type add up."""
    times = sorted({time for each in reservations for time in (each.begin_s, each.end_s) if time < math.inf})
    found = []
    for time in times:
        now: Counter[str] = Counter()
        for each in reservations:
            if each.begin_s <= time < each.end_s:
                now[each.kind] += each.devices
        found.append((time, dict(now)))
    return found


def _from_openb(path: Path) -> Cluster:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return Cluster.of_nodes(Node(row["model"].lower(), int(row["gpu"])) for row in rows if int(row["gpu"]) > 0)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise ConfigError(f"--cluster {path}: {error!r}; give a CSV with the columns sn, gpu and model") from None


class Places:
    """Which nodes a job's devices are on: the nodes with the most free ones first, in the order of asking."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._free = [node.devices for node in self._nodes]

    def give_back(self, placement: Placement) -> None:
        for node, count in placement:
            self._free[node] += count

    def take(self, wanted: Mapping[str, int]) -> Placement:
        """Devices of each type; the caller has made sure that there are enough."""
        taken: list[tuple[int, int]] = []
        for kind, needed in wanted.items() if self._nodes else ():
            while needed:
                node = max(
                    (index for index, each in enumerate(self._nodes) if each.kind == kind), key=self._free.__getitem__
                )
                count = min(needed, self._free[node])
                assert count > 0, f"{kind}: {needed} devices more than the nodes have"
                self._free[node] -= count
                taken.append((node, count))
                needed -= count
        return tuple(taken)
