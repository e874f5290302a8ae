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


def test_of_26_invited_the_first_20_count_and_the_20th_ends_the_round() -> None:
    durations = np.random.default_rng(3).permutation(np.arange(1.0, 27.0))
    done = plan(durations.tolist(), wanted=20, begin_s=1000.0)
    assert (len(done.aggregated), len(done.cut), len(done.lost)) == (20, 6, 0)
    assert done.end_s == 1020.0
    assert set(durations[done.aggregated]) == set(range(1, 21))
    assert done.seen_s[done.fate == CUT].tolist() == [20.0] * 6, "of those cut it is known that they take longer"
    assert sorted(done.seen_s[done.counts]) == list(range(1, 21))


def test_of_equally_fast_clients_those_with_the_lower_numbers_count() -> None:
    done = plan_round(np.array([9, 4, 7]), np.full(3, 5.0), np.full(3, ALWAYS), begin_s=0.0, wanted=2)
    assert done.aggregated.tolist() == [4, 7]
    assert done.cut.tolist() == [9]


def test_a_client_whose_window_closes_before_it_is_done_never_counts() -> None:
    done = plan([10.0, 20.0, 30.0], until=[10.0, 20.000001, 25.0], wanted=2)
    assert done.aggregated.tolist() == [1], "at the very moment that its window closes, a client is gone"
    assert done.lost.tolist() == [0, 2]
    assert done.end_s == 25.0, "until the last one has gone, it is waited for"
    assert done.seen_s.tolist() == [10.0, 20.0, 25.0]


def test_who_would_go_away_after_the_round_is_over_was_only_too_slow() -> None:
    done = plan([1.0, 2.0, 30.0], until=[ALWAYS, ALWAYS, 25.0], wanted=2)
    assert done.cut.tolist() == [2]
    assert not len(done.lost)


def test_the_deadline_ends_a_round_with_those_who_are_there() -> None:
    done = plan([5.0, 10.0, 10.5], wanted=3, deadline_s=10.0, begin_s=100.0)
    assert done.aggregated.tolist() == [0, 1], "at the very deadline is in time"
    assert done.cut.tolist() == [2]
    assert done.end_s == 110.0
    early = plan([5.0, 6.0, 10.5], wanted=2, deadline_s=10.0)
    assert early.end_s == 6.0, "a deadline makes nobody wait"
    nobody = plan([50.0], wanted=1, deadline_s=10.0)
    assert (nobody.aggregated.tolist(), nobody.end_s) == ([], 10.0)


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
    assert set(done.fate.tolist()) <= {COUNTS, CUT, LOST}
