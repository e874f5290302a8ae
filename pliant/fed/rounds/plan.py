"""Plans a round: which of the invited clients count, and when the round ends. Pure: times and clients are arguments.

The first `wanted` clients to finish count, ties by their numbers. A client does not count if it becomes unavailable before
it finishes, or finishes after the deadline. The round ends with the last client wanted, at the deadline, or when nobody is
left to wait for. In a simulation all of that is known when a round begins, so only the clients that count are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.errors import ConfigError
from pliant.fed.selection.base import Floats, Ids, Mask

COUNTS, CUT, LOST = 0, 1, 2
"""Fate of an invited client: its update counts, it did not finish in time, or it became unavailable."""
Fates = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of a round. Each array has one entry for each invited client, in ascending order."""

    begin_s: float
    end_s: float
    invited: Ids
    fate: Fates
    seen_s: Floats
    """Seconds that each client took; for those that do not count, how long the round waited for them."""

    @property
    def counts(self) -> Mask:
        return np.equal(self.fate, COUNTS)

    @property
    def aggregated(self) -> Ids:
        return self._those(COUNTS)

    @property
    def cut(self) -> Ids:
        return self._those(CUT)

    @property
    def lost(self) -> Ids:
        return self._those(LOST)

    def _those(self, fate: int) -> Ids:
        found: Ids = self.invited[self.fate == fate]
        return found

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def plan_round(
    invited: Ids, duration_s: Floats, until_s: Floats, *, begin_s: float, wanted: int, deadline_s: float | None = None
) -> RoundPlan:
    """Plan the round that begins at `begin_s` with these clients.

    `duration_s` is how long each takes, `until_s` when it becomes unavailable. `deadline_s` counts from the beginning; a
    client that finishes at that very moment is in time.
    """
    if not len(invited) or wanted < 1:
        raise ConfigError(f"a round of {len(invited)} invited and {wanted} wanted clients: there must be 1 or more")
    order = np.argsort(invited, kind="stable")
    invited, duration_s, until_s = invited[order], duration_s[order], until_s[order]
    done_s = begin_s + duration_s
    limit_s = math.inf if deadline_s is None else begin_s + deadline_s
    stays = done_s < until_s
    in_time = np.flatnonzero(stays & (done_s <= limit_s))
    first = in_time[np.argsort(done_s[in_time], kind="stable")][:wanted]
    if len(first) == wanted:
        end_s = float(done_s[first[-1]])
    else:
        end_s = min(limit_s, float(np.where(stays, done_s, until_s).max()))
    fate = np.where(~stays & (until_s <= end_s), LOST, CUT).astype(np.int8)
    fate[first] = COUNTS
    seen_s = np.where(fate == COUNTS, duration_s, np.minimum(np.minimum(done_s, until_s), end_s) - begin_s)
    return RoundPlan(begin_s, end_s, invited, fate, seen_s)
