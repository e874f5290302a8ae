"""Testing by category as one mixed-integer problem, the way the artifact asks Gurobi: what our choice is held against.

minimise z     z >= s_i transfer_i + per_sample_i * sum_j q_ij,   sum_i q_ij = request_j,   sum_i s_i <= budget
               q_ij whole, at most what client i has of class j, and 0 unless s_i = 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pliant.errors import ConfigError
from pliant.fed.selection.testing import Counts, Holdings

GAP = 0.25
"""The artifact's."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What HiGHS answered."""

    duration_s: float | None
    """None: it has found no choice."""
    why: str
    """`solved`, `limit`, or `impossible`."""


def whole_problem(holdings: Holdings, wanted: Counts, budget: int, *, limit_s: float, gap: float = GAP) -> Whole:
    """The least time to test, within the gap; or what was found by the limit."""
    try:
        from scipy import sparse  # type: ignore[import-untyped]
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("this needs SciPy: pip install 'pliant[fed]'") from None
    has = holdings.samples
    client, kind = np.nonzero(has)
    num, arcs = len(has), len(client)
    total, arc, who = arcs + num + 1, np.arange(arcs), np.arange(num)
    met = sparse.csr_matrix((np.ones(arcs), (kind, arc)), (has.shape[1], total))
    only_if = sparse.csr_matrix(
        (np.r_[np.ones(arcs), -has.sum(1)], (np.r_[client, who], np.r_[arc, arcs + who])), (num, total)
    )
    seconds = np.r_[holdings.sample_s[client], holdings.transfer_s, -np.ones(num)]
    places = (np.r_[client, who, who], np.r_[arc, arcs + who, np.full(num, total - 1)])
    in_time = sparse.csr_matrix((seconds, places), (num, total))
    few = sparse.csr_matrix(np.r_[np.zeros(arcs), np.ones(num), 0.0][None, :])
    found = milp(
        np.r_[np.zeros(total - 1), 1.0],
        constraints=[
            LinearConstraint(met, wanted, wanted),
            LinearConstraint(only_if, -np.inf, 0),
            LinearConstraint(in_time, -np.inf, 0),
            LinearConstraint(few, 0, budget),
        ],
        bounds=Bounds(0, np.r_[has[client, kind], np.ones(num), np.inf]),
        integrality=np.r_[np.ones(total - 1), 0.0],
        options={"time_limit": limit_s, "mip_rel_gap": gap},
    )
    why = {0: "solved", 1: "limit", 2: "impossible"}.get(found.status, f"status {found.status}")
    return Whole(None if found.x is None else float(found.fun), why)
