"""Who makes a round, and when it is over: values, laws against a slow oracle, and the windows of a simulated week."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import ConfigError
from pliant.fed.rounds.plan import COUNTS, CUT, LOST, RoundPlan, plan_round

ALWAYS = math.inf


def plan(
    durations: list[float],
    *,
    until: list[float] | None = None,
    wanted: int,
    begin_s: float = 0.0,
    deadline_s: float | None = None,
) -> RoundPlan:
    """Clients are numbered from 0."""
    windows = np.array(until if until is not None else [ALWAYS] * len(durations), np.float64)
    ids = np.arange(len(durations))
    return plan_round(ids, np.array(durations), windows, begin_s=begin_s, wanted=wanted, deadline_s=deadline_s)


def test_of_equally_fast_clients_those_with_the_lower_numbers_count() -> None:
    done = plan_round(np.array([9, 4, 7]), np.full(3, 5.0), np.full(3, ALWAYS), begin_s=0.0, wanted=2)
    assert done.aggregated.tolist() == [4, 7]
    assert done.cut.tolist() == [9]


def test_a_round_needs_somebody() -> None:
    with pytest.raises(ConfigError, match="0 invited"):
        plan([], wanted=1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25) | st.none()), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 22) | st.none(),
    st.integers(0, 3),
)
def test_the_plan_is_what_a_server_would_see_second_by_second(
    clients: list[tuple[int, int | None]], wanted: int, deadline: int | None, begin: int
) -> None:
    """The oracle lives through the round: every second some leave, some are done, and it stops when it may."""
    done = plan(
        [float(duration) for duration, _ in clients],
        until=[ALWAYS if stay is None else float(begin + stay) for _, stay in clients],
        wanted=wanted,
        begin_s=float(begin),
        deadline_s=deadline,
    )
    came: list[int] = []
    gone: list[int] = []
    second = 0
    while True:
        second += 1
        for client, (duration, stay) in enumerate(clients):
            if stay == second and client not in came:
                gone.append(client)
            elif duration == second and client not in gone and len(came) < wanted:
                came.append(client)
        waits = len(came) + len(gone) < len(clients)
        if len(came) == wanted or second == deadline or not waits:
            break
    assert done.end_s == begin + second
    assert done.aggregated.tolist() == sorted(came)
    assert done.lost.tolist() == sorted(gone)
    for client, (duration, stay) in enumerate(clients):
        waited = min(duration, second, second if stay is None else stay)
        assert done.seen_s[client] == (duration if client in came else waited)
    assert set(done.fate.tolist()) <= {COUNTS, CUT, LOST}
