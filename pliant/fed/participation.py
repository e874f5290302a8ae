"""How the clients of a federated job take part: who is picked how often, how long each takes, and how even that is.

The report, the page and `pliant top` show the figures of this module, which follow from the record alone. The work and the
memory per round grow with the clients of the round, and the figures have the same size for ten clients and for 100,000.
Starts without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pliant.duration import duration_text

MOST_NAMED = 5
"""Number of clients that are named at each end of a distribution."""
MOST_BARS = 40
LARGEST = 1e30
"""Numbers beyond it, and clients beyond 64 bits, are damage."""
Floats = NDArray[np.float64]
Named = tuple[tuple[int, float], ...]
"""Clients, each with its number."""


@dataclass(frozen=True, slots=True)
class RoundClients:
    """The clients of one round by outcome, as the record has them."""

    invited: tuple[int, ...] = ()
    aggregated: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    client_s: tuple[float, ...] = ()
    """Seconds that each aggregated client took; empty if unknown."""
    client_loss: tuple[float, ...] = ()
    """Loss of the round's model on the samples of each aggregated client; NaN or empty if unknown."""
    known: int = 0
    """Number of clients that are known so far; 0 if the record does not say so in each round."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundClients:
        """Read a `round` of a record. What is damaged counts as not there: a newer pliant may write it otherwise."""
        aggregated = _clients(data.get("aggregated"))
        return cls(
            _clients(data.get("invited")),
            aggregated,
            _clients(data.get("cut")),
            _clients(data.get("lost")),
            _numbers(data.get("client_s"), len(aggregated)),
            _numbers(data.get("client_loss"), len(aggregated)),
            known if _is_whole(known := data.get("known")) and 0 < known < 2**31 else 0,
        )


def _clients(value: object) -> tuple[int, ...]:
    items: Iterable[object] = value if isinstance(value, list | tuple) else ()
    return tuple(item for item in items if _is_whole(item) and -(2**63) <= item < 2**63)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: object, count: int) -> tuple[float, ...]:
    """Return numbers that belong to `count` clients, NaN for those that are missing; empty if they do not fit."""
    items: list[object] = list(value) if isinstance(value, list | tuple) else []
    if len(items) != count:
        return ()
    return tuple(float(item) if isinstance(item, int | float) and abs(item) <= LARGEST else math.nan for item in items)


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something happened to clients, over all clients that there are."""

    total: int
    clients: int
    """Clients to which it happened at least once."""
    never: int | None
    """Clients to which it never happened; None if it is not known how many clients there are."""
    least: int
    median: float
    mean: float
    most: int
    jain: float | None
    """Jain's index: 1 if it happened to all clients equally often, 1/n if only to one of n. None if it never happened."""
    most_often: tuple[tuple[int, int], ...]
    """(client, times) of those to which it happened most often."""
    least_often: tuple[tuple[int, int], ...]
    """(client, times) of those to which it happened least often, but at least once."""
    bars: Bars
    """Number of clients by how often it happened to them, from once on."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of each client, over the clients that have one."""

    clients: int
    least: float
    median: float
    mean: float
    p90: float
    """Nine of ten clients have at most this."""
    most: float
    lowest: Named
    """(client, number) of those with the lowest numbers."""
    highest: Named
    bars: Bars


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: bar i counts the clients from `edges[i]` up to, but without, `edges[i + 1]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """How the clients of a job took part in its rounds so far."""

    rounds: int
    clients: int | None
    """Clients that there are; on Flower, those that are known so far. None if the record does not tell."""
    picked: Tally
    aggregated: Tally
    """How often the updates of clients counted."""
    cut: Tally
    lost: Tally
    duration_s: Spread | None
    """Mean seconds that each client took for an update that counted; None if the record does not tell."""
    loss: Spread | None
    """Loss of the model that each client was last given on its own samples; None if the record does not tell."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def facts(self) -> list[tuple[str, str]]:
        """Return the figures in words, as (name, text)."""
        picked = self.picked
        of = "" if self.clients is None else f" of {self.clients:,}"
        never = f"; {picked.never:,} never" if picked.never is not None else ""
        facts = [
            ("clients picked", f"{picked.clients:,}{of}{never}"),
            ("picked per client", f"{picked.least} to {picked.most} times, median {picked.median:g}"),
            (
                "fairness (Jain)",
                f"{_index(picked.jain)} of picks, {_index(self.aggregated.jain)} of updates that count",
            ),
        ]
        for name, tally in (("cut", self.cut), ("lost", self.lost)):
            share = tally.total / picked.total if picked.total else 0.0
            worst = (
                f", client {tally.most_often[0][0]} most often: {tally.most_often[0][1]} times" if tally.total else ""
            )
            facts.append((name, f"{tally.total:,} times ({share:.1%}){worst}"))
        if (took := self.duration_s) is not None:
            slowest, slowest_s = took.highest[0]
            facts.append(
                (
                    "an update takes",
                    f"{duration_text(took.median)} (median), {duration_text(took.p90)} (90 % of clients), {duration_text(slowest_s)} "
                    f"(client {slowest}, the slowest)",
                )
            )
        if (loss := self.loss) is not None:
            facts.append(("loss of a client", f"{loss.least:.4g} to {loss.most:.4g}, median {loss.median:.4g}"))
        if picked.total:
            facts.append(("picked most often", _named(picked.most_often)))
            facts.append(("picked least often", _named(picked.least_often)))
        return facts


def _index(jain: float | None) -> str:
    return "-" if jain is None else f"{jain:.2f}"


def _named(clients: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"client {client} ({times})" for client, times in clients)


@dataclass(slots=True)
class Participation:
    """Counts what happens to clients, one round after the other; `figures` has the result so far."""

    clients: int = 0
    """Number of clients that there are; 0 if it is not known."""
    rounds: int = 0
    picked: Counter[int] = field(default_factory=Counter)
    aggregated: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    _took_s: dict[int, float] = field(default_factory=dict)
    """Seconds of all timed updates of a client together."""
    _timed: Counter[int] = field(default_factory=Counter)
    _loss: dict[int, float] = field(default_factory=dict)
    """The last known loss of each client."""
    _figures: ClientFigures | None = None
    """The figures of what was added so far, once they were asked for."""

    @classmethod
    def of_start(cls, data: Mapping[str, Any]) -> Participation:
        """Return the counts before the first round, from the `start` of a record."""
        clients = data.get("clients")
        return cls(clients if _is_whole(clients) and 0 < clients < 2**31 else 0)

    def add(self, done: RoundClients) -> None:
        self._figures = None
        self.rounds += 1
        self.clients = max(self.clients, done.known)
        for counter, clients in self._counters(done):
            counter.update(clients)
        for client, took_s in zip(done.aggregated, done.client_s, strict=False):
            if math.isfinite(took_s):
                self._took_s[client] = self._took_s.get(client, 0.0) + took_s
                self._timed[client] += 1
        for client, loss in zip(done.aggregated, done.client_loss, strict=False):
            if math.isfinite(loss):
                self._loss[client] = loss

    def remove(self, undone: RoundClients) -> None:
        """Take back a round that was added, because a resumed job does it again."""
        self._figures = None
        self.rounds -= 1
        for counter, clients in self._counters(undone):
            counter.subtract(clients)
            for client in clients:
                if not counter[client]:
                    del counter[client]
        for client, took_s in zip(undone.aggregated, undone.client_s, strict=False):
            if math.isfinite(took_s):
                self._took_s[client] -= took_s
                self._timed[client] -= 1
                if not self._timed[client]:
                    del self._timed[client], self._took_s[client]

    def _counters(self, done: RoundClients) -> tuple[tuple[Counter[int], tuple[int, ...]], ...]:
        return (
            (self.picked, done.invited),
            (self.aggregated, done.aggregated),
            (self.cut, done.cut),
            (self.lost, done.lost),
        )

    def figures(self) -> ClientFigures:
        if self._figures is None:
            self._figures = self._compute()
        return self._figures

    def _compute(self) -> ClientFigures:
        # a record may name clients beyond the number that it gives
        there = max(self.clients, len(self.picked)) if self.clients else None
        means = {client: took_s / self._timed[client] for client, took_s in self._took_s.items()}
        return ClientFigures(
            self.rounds,
            there,
            picked=_tally(self.picked, there),
            aggregated=_tally(self.aggregated, there),
            cut=_tally(self.cut, there),
            lost=_tally(self.lost, there),
            duration_s=_spread(means),
            loss=_spread(self._loss),
        )


def client_figures(rounds: Iterable[RoundClients], clients: int = 0) -> ClientFigures:
    """Return how clients took part in these rounds. `clients`: how many there are; 0 if that is not known."""
    counted = Participation(clients)
    for each in rounds:
        counted.add(each)
    return counted.figures()


def _tally(counter: Mapping[int, int], there: int | None) -> Tally:
    ids, times = _sorted(counter)
    num = max(there or 0, len(times))
    padded = np.concatenate([np.zeros(num - len(times)), times])
    total, squares = int(times.sum()), float((times**2).sum())
    low, high = _ends(ids, times)
    return Tally(
        total=total,
        clients=len(times),
        never=None if there is None else num - len(times),
        least=int(padded[0]) if num else 0,
        median=float(np.median(padded)) if num else 0.0,
        mean=total / num if num else 0.0,
        most=int(padded[-1]) if num else 0,
        jain=total**2 / (num * squares) if squares else None,
        most_often=tuple((client, int(times)) for client, times in high),
        least_often=tuple((client, int(times)) for client, times in low),
        bars=_whole_bars(times),
    )


def _spread(given: Mapping[int, float]) -> Spread | None:
    if not given:
        return None
    ids, values = _sorted(given)
    low, high = _ends(ids, values)
    is_flat = values[-1] - values[0] <= 1e-9 * abs(values[-1])  # equal but for rounding
    counts, edges = np.histogram(values, bins=1 if is_flat else min(MOST_BARS, max(1, len(values) // 2)))
    return Spread(
        clients=len(values),
        least=float(values[0]),
        median=float(np.median(values)),
        mean=float(values.mean()),
        p90=float(values[math.ceil(0.9 * len(values)) - 1]),
        most=float(values[-1]),
        lowest=low,
        highest=high,
        bars=Bars(tuple(edges.tolist()), tuple(counts.tolist())),
    )


def _sorted(given: Mapping[int, float]) -> tuple[NDArray[np.int64], Floats]:
    """Return clients and their numbers, the lowest number first; of equals, the lowest client first."""
    ids = np.fromiter(given.keys(), np.int64, len(given))
    values = np.fromiter(given.values(), np.float64, len(given))
    order = np.lexsort((ids, values))
    return ids[order], values[order]


def _ends(ids: NDArray[np.int64], values: Floats) -> tuple[Named, Named]:
    """Return the clients with the lowest numbers, and those with the highest, the highest first."""
    low = tuple(zip(ids[:MOST_NAMED].tolist(), values[:MOST_NAMED].tolist(), strict=True))
    # of equals, the lowest client comes first here, too
    bound = values[-MOST_NAMED:][:1]
    near = np.flatnonzero(values >= bound) if len(bound) else np.array([], np.int64)
    order = near[np.lexsort((ids[near], -values[near]))][:MOST_NAMED]
    return low, tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))


def _whole_bars(times: Floats) -> Bars:
    """Return how many clients have each number of times, or each of at most MOST_BARS ranges of it."""
    most = int(times[-1]) if len(times) else 0
    width = max(1, math.ceil(most / MOST_BARS))
    edges = range(1, most + width + 1, width) if most else range(1, 2)
    counts = np.bincount(((times - 1) // width).astype(np.int64), minlength=len(edges) - 1)
    return Bars(tuple(map(float, edges)), tuple(counts.tolist()))
