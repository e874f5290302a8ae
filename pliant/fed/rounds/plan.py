"""Who of the invited makes a round, and when it is over. Pure: times and clients are arguments.

The first `wanted` to finish count, ties by their numbers. Nobody counts whose window closes before it is done, or who is
later than the deadline. The round is over with the last one wanted, or at the deadline, or when nobody is left to wait for:
all others have come, or gone. In a simulation all of that is known when a round begins, so only those train who will count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.errors import ConfigError
from pliant.fed.selection.base import Floats, Ids, Mask

COUNTS, CUT, LOST = 0, 1, 2
"""What becomes of an invited client: its update counts; it was not done in time; it went away before."""
Fates = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One entry in each array for each of the invited, who are in ascending order."""

    begin_s: float
    end_s: float
    invited: Ids
    fate: Fates
    seen_s: Floats
    """How long each took; of those who do not count, how long they were waited for."""

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
    """The round that begins at `begin_s` with these clients.

    `duration_s` is how long each takes, `until_s` when its window closes (at that moment it is gone); `deadline_s` counts
    from the beginning, and who is done at that very moment is in time.
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
