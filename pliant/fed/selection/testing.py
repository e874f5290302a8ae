"""Selects the clients that test a model (Oort, OSDI'21): by the deviation of their mean, or by a number of samples of each class. Pure.

Given how many samples each client has time for, samples go from clients to classes like a flow with whole-numbered limits,
so a flow in whole numbers exists where any exists. HiGHS only decides which clients take part. It is limited by the nodes
of its search and not by time, so that the answer does not depend on the machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pliant.errors import CapacityError, ConfigError
from pliant.fed.selection.base import Floats, Numbers, Places

Counts = npt.NDArray[np.int64]

NODES = 20
"""Nodes of HiGHS' search for one question."""
NEAR = 0.1
"""Relative gap to the fewest clients at which HiGHS stops."""
TIGHT = 6000
"""Up to this many pairs of client and class, each pair has its own limit: far better bounds, which take far longer."""
POOL = 1.5
"""HiGHS searches among this many times the clients that may be chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """Clients that can meet a request, as found by HiGHS."""

    clients: Places | None
    """None if no choice was found."""
    at_least: int
    """No choice has fewer clients than this."""


def flow(samples: Counts, room: Counts, wanted: Counts) -> Counts | None:
    """Return a matrix of samples (clients x classes) within each client's samples and room that sums up to `wanted`; None if there is none."""
    from scipy import sparse  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import maximum_flow  # type: ignore[import-untyped]

    there = np.flatnonzero(room > 0)
    num, classes = len(there), len(wanted)
    if not num:
        return None if wanted.any() else np.zeros_like(samples)
    has = np.minimum(samples[there], wanted)
    client, kind = np.nonzero(has)
    source, sink = num + classes, num + classes + 1
    begins = np.concatenate([np.full(num, source), client, num + np.arange(classes)])
    ends = np.concatenate([np.arange(num), num + kind, np.full(classes, sink)])
    limits = np.concatenate([room[there], has[client, kind], wanted]).astype(np.int32)
    graph = sparse.csr_matrix((limits, (begins, ends)), (sink + 1, sink + 1))
    found = maximum_flow(graph, source, sink)
    if found.flow_value < wanted.sum():
        return None
    sent = np.zeros_like(samples)
    sent[there] = found.flow[:num, num:source].toarray()
    return sent


def few_clients(samples: Counts, room: Counts, wanted: Counts, most: int) -> Cover:
    """Choose at most `most` clients that meet `wanted` within their room.

    First HiGHS may take fractions of clients: the sum is a lower bound, and the clients with the largest fractions are tried.
    Then it searches among the clients that had a fraction, and a few more.
    """
    there = np.flatnonzero(np.minimum(room, np.minimum(samples, wanted).sum(1)))
    parts = _shares(samples[there], room[there], wanted)
    if parts is None:
        return Cover(None, len(samples) + 1)
    at_least = math.ceil(parts.sum() - 1e-6)
    if at_least > most:
        return Cover(None, at_least)
    brings = np.minimum(room[there], np.minimum(samples[there], wanted).sum(1))
    order = np.lexsort((np.arange(len(there)), -brings, -parts.round(9)))
    first = np.sort(there[order[:most]])
    if flow(samples[first], room[first], wanted) is not None:
        return Cover(first, at_least)
    pool = np.sort(there[order[: max(int(POOL * most), np.count_nonzero(parts > 1e-9))]])
    chosen = _shares(samples[pool], room[pool], wanted, most=most)
    if chosen is not None:
        return Cover(pool[chosen > 0.5], at_least)
    return Cover(None, at_least)


def _shares(samples: Counts, room: Counts, wanted: Counts, most: int | None = None) -> Floats | None:
    """Return the least fraction of each client that is needed; with `most`, each is 0 or 1. None if not found."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

    has = np.minimum(samples, wanted)
    client, kind = np.nonzero(has)
    num, arcs = len(samples), len(client)
    total, numbers = arcs + num, np.arange(num)
    met = sparse.csr_matrix((np.ones(arcs), (kind, np.arange(arcs))), (len(wanted), total))
    # a client with fraction 0 brings nothing; the least such limit makes the relaxation tight
    brings = np.minimum(room, has.sum(1))
    within = sparse.csr_matrix(
        (np.concatenate([np.ones(arcs), -brings]), (np.concatenate([client, numbers]), np.arange(total))), (num, total)
    )
    takes_part = np.concatenate([np.zeros(arcs), np.ones(num)])
    rules = [LinearConstraint(met, wanted, wanted), LinearConstraint(within, -np.inf, 0)]
    if arcs <= TIGHT:
        each = np.arange(arcs)
        limit = np.minimum(has[client, kind], room[client])
        tight = sparse.csr_matrix(
            (
                np.concatenate([np.ones(arcs), -limit]),
                (np.concatenate([each, each]), np.concatenate([each, arcs + client])),
            ),
            (arcs, total),
        )
        rules.append(LinearConstraint(tight, -np.inf, 0))
    bounds = Bounds(0, np.concatenate([has[client, kind], np.ones(num)]))
    if most is None:
        found = milp(takes_part, constraints=rules, bounds=bounds)
    else:
        found = milp(
            takes_part,
            constraints=[*rules, LinearConstraint(takes_part[None, :], 0, most)],
            bounds=bounds,
            integrality=takes_part,
            options={"node_limit": NODES, "mip_rel_gap": NEAR},
        )
    return None if found.x is None else found.x[arcs:]


GAP = 0.05
"""Relative distance from the best reachable time that is good enough."""
SOLVES = 8
"""How often HiGHS is asked, at most."""
METHODS = ("greedy", "solve")


def clients_for_deviation(
    deviation: float, *, value_range: float, num_clients: int, confidence: float = 0.95, overcommit: float = 1.0
) -> int:
    """Return how many clients must be drawn so that their mean deviates by at most `deviation` with this confidence.

    n = (N + 1) / (1 - 2N/ln(1 - confidence) * (deviation/range)^2), by the bound of Hoeffding and Serfling for draws without
    replacement. `value_range` is the greatest difference between two clients' values; `overcommit` compensates for clients
    that will not answer.
    """
    for name, value in (("deviation", deviation), ("value_range", value_range)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}: use a number above 0")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: use a probability between 0 and 1; certainty needs every client")
    if num_clients < 1:
        raise ConfigError(f"num_clients={num_clients}: use 1 or more")
    if not 1 <= overcommit < math.inf:
        raise ConfigError(f"overcommit={overcommit}: use 1 or more")
    wanted = (num_clients + 1) / (1 - 2 * num_clients / math.log1p(-confidence) * (deviation / value_range) ** 2)
    return min(num_clients, math.ceil(overcommit * math.ceil(wanted - 1e-9)))


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """The samples of clients by class, and how fast the clients are."""

    samples: Counts
    """Number of samples, clients x classes."""
    sample_s: Floats
    """Seconds per sample of each client."""
    transfer_s: Floats
    """Seconds until each client has the model."""

    @classmethod
    def of(cls, samples: npt.ArrayLike, *, sample_ms: Numbers, kbit_s: Numbers, model_kbit: float) -> Holdings:
        """Use the speeds of a device table."""
        rates = np.asarray(kbit_s, np.float64)
        return cls(np.asarray(samples), np.asarray(sample_ms, np.float64) / 1e3, model_kbit / rates)

    def room(self, within_s: float) -> Counts:
        """Return how many samples each client can test in `within_s` seconds."""
        room = np.floor(np.maximum((within_s - self.transfer_s) / self.sample_s, 0.0) + 1e-9)
        found: Counts = np.minimum(room, self.samples.sum(1)).astype(np.int64)
        return found

    def part(self, places: Places) -> Holdings:
        return Holdings(self.samples[places], self.sample_s[places], self.transfer_s[places])


@dataclass(frozen=True, slots=True, eq=False)
class TesterSelection:
    """The chosen clients, and how many samples of each class each of them tests."""

    __test__ = False  # the name looks like a test to pytest

    clients: Places
    """Indices in the holdings, ascending."""
    samples: Counts
    """Chosen clients x classes; the sums over clients are the request."""
    duration_s: float
    """Seconds until the last client finishes."""
    bound_s: float
    """No choice within the budget is faster than this."""


def by_category(
    holdings: Holdings, request: Numbers, *, budget: int | None = None, method: str = "solve"
) -> TesterSelection:
    """Choose at most `budget` clients that test exactly the requested number of samples of each class, in about the least time.

    `greedy` is quicker; `solve` ends within 5 % of the least time, or after a fixed number of tries. The result depends on
    the arguments alone, and not on how fast this machine is.

    Raises CapacityError if the request cannot be met; the message says what is short.
    """
    wanted = _check_request(holdings, request)
    most = len(holdings.samples) if budget is None else min(budget, len(holdings.samples))
    slowest_s = float((holdings.transfer_s + holdings.sample_s * holdings.samples.sum(1)).max(initial=0.0))
    if not wanted.any():
        return TesterSelection(np.empty(0, np.intp), np.empty((0, len(wanted)), np.int64), 0.0, 0.0)
    least_s = float((holdings.transfer_s + holdings.sample_s).min())

    def enough(within_s: float) -> bool:
        room = holdings.room(within_s)
        return _could_suffice(holdings.samples, room, wanted, most) and flow(holdings.samples, room, wanted) is not None

    bound_s, possible_s = _bisect(enough, least_s, slowest_s)
    chosen = _greedy_choice(holdings, wanted, most, bound_s, slowest_s)
    if chosen is None:
        chosen = _any_cover(holdings, wanted, most, slowest_s)
    best = _spread(holdings, wanted, chosen, bound_s)
    if method == "solve" and best.duration_s > bound_s * (1 + GAP):
        best = _improve(holdings, wanted, most, best, possible_s)
    return best


def _check_request(holdings: Holdings, request: Numbers) -> Counts:
    given = np.asarray(request)
    classes = holdings.samples.shape[1]
    if given.shape != (classes,):
        raise ConfigError(f"request has {given.size} numbers for {classes} classes: give one for each")
    if not np.isfinite(given).all() or (given < 0).any() or (given != np.floor(given)).any():
        raise ConfigError("request: give whole numbers of samples, from 0 on")
    there = holdings.samples.sum(0)
    if (short := given > there).any():
        number = int(np.argmax(short))
        raise CapacityError(
            f"class {number}: {given[number]:g} samples are asked for, but all {len(holdings.samples)} clients together "
            f"have {there[number]}; ask for fewer"
        )
    return given.astype(np.int64)


def _bisect(good: Callable[[float], bool], low_s: float, high_s: float, steps: int = 60) -> tuple[float, float]:
    """Return a time that is too short (or the least possible) and one that is good, close together; `high_s` must be good."""
    for _ in range(steps):
        if high_s <= low_s * (1 + 1e-4):
            break
        middle_s = math.sqrt(low_s * high_s)
        low_s, high_s = (low_s, middle_s) if good(middle_s) else (middle_s, high_s)
    return low_s, high_s


def _could_suffice(samples: Counts, room: Counts, wanted: Counts, most: int) -> bool:
    """Return whether the `most` largest contributions suffice, in all and in each class; if not, no choice does."""
    in_all = np.minimum(room, np.minimum(samples, wanted).sum(1))
    by_class = np.minimum(samples, room[:, None])
    first = max(len(samples) - most, 0)
    if np.partition(in_all, min(first, len(in_all) - 1))[first:].sum() < wanted.sum():
        return False
    return bool((np.partition(by_class, min(first, len(in_all) - 1), axis=0)[first:].sum(0) >= wanted).all())


def _greedy_choice(holdings: Holdings, wanted: Counts, most: int, low_s: float, high_s: float) -> Places | None:
    """Return the clients of the least time in which the greedy rule meets the request; None if it never does."""
    found = greedy(holdings.samples, holdings.room(high_s), wanted, most)
    if found is None:
        return None
    _, within_s = _bisect(
        lambda each: greedy(holdings.samples, holdings.room(each), wanted, most) is not None, low_s, high_s
    )
    return greedy(holdings.samples, holdings.room(within_s), wanted, most)


def greedy(samples: Counts, room: Counts, wanted: Counts, most: int) -> Places | None:
    """Repeatedly choose the client that brings most of what is still wanted; None if `most` clients do not suffice.

    A client's contribution only shrinks, so an old value is a bound: only the client on top is evaluated again.
    """
    left = wanted.copy()
    # a client with little room gives scarce classes first
    scarce = np.argsort(-wanted / np.maximum(np.minimum(samples, room[:, None]).sum(0), 1), kind="stable")
    brings = np.minimum(room, np.minimum(samples, left).sum(1)).tolist()
    heap = [(-amount, place) for place, amount in enumerate(brings) if amount]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and left.any() and len(chosen) < most:
        before, place = heapq.heappop(heap)
        useful = np.minimum(samples[place], left)
        now = min(int(room[place]), int(useful.sum()))
        if now < -before:
            if now:
                heapq.heappush(heap, (-now, place))
            continue
        left[scarce] -= np.diff(np.minimum(np.cumsum(useful[scarce]), now), prepend=0)
        chosen.append(place)
    return None if left.any() else np.sort(np.array(chosen, np.intp))


def _any_cover(holdings: Holdings, wanted: Counts, most: int, within_s: float) -> Places:
    """Return any clients that meet the request, if the greedy rule found none."""
    cover = few_clients(holdings.samples, holdings.room(within_s), wanted, most)
    if cover.clients is None:
        needs = (
            f"needs at least {cover.at_least} clients"
            if cover.at_least > most
            else "was met by no choice that was tried"
        )
        raise CapacityError(f"budget={most}: this request {needs}; raise the budget or ask for fewer samples")
    return cover.clients


def _spread(holdings: Holdings, wanted: Counts, clients: Places, bound_s: float) -> TesterSelection:
    """Distribute the samples over these clients so that the last one finishes as early as possible."""
    part = holdings.part(clients)
    slowest_s = float((part.transfer_s + part.sample_s * part.samples.sum(1)).max())
    _, within_s = _bisect(lambda each: flow(part.samples, part.room(each), wanted) is not None, bound_s, slowest_s)
    samples = flow(part.samples, part.room(within_s), wanted)
    assert samples is not None, "a choice that meets the request in any time"
    used = samples.any(1)
    part_s = part.transfer_s[used] + part.sample_s[used] * samples[used].sum(1)
    return TesterSelection(clients[used], samples[used], float(part_s.max()), min(bound_s, float(part_s.max())))


def _improve(
    holdings: Holdings, wanted: Counts, most: int, best: TesterSelection, possible_s: float
) -> TesterSelection:
    """Improve the choice with HiGHS: try times between the bound and the best time so far."""
    bound_s, tried_s = best.bound_s, possible_s
    for _ in range(SOLVES):
        if best.duration_s <= tried_s * (1 + GAP):
            break
        cover: Cover = few_clients(holdings.samples, holdings.room(tried_s), wanted, most)
        if cover.clients is not None:
            found = _spread(holdings, wanted, cover.clients, bound_s)
            best = min(best, found, key=lambda each: each.duration_s)
            low_s = bound_s
        else:
            low_s = tried_s
            bound_s = max(bound_s, tried_s) if cover.at_least > most else bound_s
        tried_s = math.sqrt(max(low_s, bound_s) * best.duration_s)
    return TesterSelection(best.clients, best.samples, best.duration_s, min(bound_s, best.duration_s))
