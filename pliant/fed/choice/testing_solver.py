"""SciPy's part in choosing who tests: flows from clients to classes, and HiGHS for the fewest clients. Pure.

With a client's room given, samples go from clients to classes like a flow with whole-numbered limits, so a flow exists in whole
numbers where one exists at all: HiGHS only has to decide who takes part. It is limited by nodes of its search and not
by time, so that the answer does not depend on the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pliant.errors import ConfigError
from pliant.fed.choice.population import Floats, Places

Counts = npt.NDArray[np.int64]

NODES = 20
"""Of HiGHS' search, for one question."""
NEAR = 0.1
"""How close to the fewest clients is close enough, once it has found a choice."""
TIGHT = 6000
"""Up to so many pairs of client and class, each pair gets a limit of its own: bounds are far better, and take far longer."""
POOL = 1.5
"""It searches among so many times the clients that may be chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """What HiGHS found."""

    clients: Places | None
    """Who can meet the request; None if no choice was found."""
    at_least: int
    """No choice has fewer clients."""


def flow(samples: Counts, room: Counts, wanted: Counts) -> Counts | None:
    """Samples, clients by classes, within what each has and has room for, that sum up to what is wanted; None if there are none."""
    try:
        from scipy import sparse  # type: ignore[import-untyped]
        from scipy.sparse.csgraph import maximum_flow  # type: ignore[import-untyped]
    except ImportError:
        raise _no_scipy() from None
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
    """At most `most` clients that meet what is wanted within their room.

    First HiGHS takes part of clients, too: what it needs then is a bound, and the clients it takes most of are tried.
    Then it searches among those that had a part, and a few more.
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
    """How much of each client takes part: least in all, and with `most` either all of it or nothing. None: not found."""
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    except ImportError:
        raise _no_scipy() from None
    has = np.minimum(samples, wanted)
    client, kind = np.nonzero(has)
    num, arcs = len(samples), len(client)
    total, numbers = arcs + num, np.arange(num)
    met = sparse.csr_matrix((np.ones(arcs), (kind, np.arange(arcs))), (len(wanted), total))
    # who takes no part brings nothing; the least such limit makes the relaxation tight
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


def _no_scipy() -> ConfigError:
    return ConfigError("choosing testers by category needs SciPy: pip install 'pliant[fed]'")
