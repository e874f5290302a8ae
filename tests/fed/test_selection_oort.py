"""Oort: its formulas by hand, its pacer and blacklist, its presets, and sixty rounds on real devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import ConfigError, NoClient
from pliant.fed.selection.selectors import (
    ARTIFACT,
    FEDSCALE,
    PAPER,
    PRESETS,
    Oort,
    clip_utilities,
    make_selector,
    penalty,
    staleness,
)

INF = float("inf")


def oort(num: int = 0, *, preset: str = "paper", seed: int = 7, durations: Any = None, **options: Any) -> Oort:
    made = make_selector("oort", seed=seed, preset=preset, **options)
    assert isinstance(made, Oort)
    if num:
        made.register(
            np.arange(num), duration_s=np.full(num, 10.0) if durations is None else durations, size=np.full(num, 30.0)
        )
    return made


def explored(num: int, utility: Any, **options: Any) -> Oort:
    """Everybody has taken part in round 1."""
    made = oort(num, **options)
    made.select(1)
    made.feedback(np.arange(num), utility=np.broadcast_to(utility, num), duration_s=made.clients.duration_s)
    return made


def test_the_formulas_on_numbers_worked_out_by_hand() -> None:
    """The penalty of slow clients, and what staleness adds (OSDI'21, algorithm 1)."""
    assert penalty(np.array([20.0]), 10.0, 2.0).tolist() == [0.25]
    assert penalty(np.array([20.0]), 10.0, 0.0).tolist() == [1.0]
    assert penalty(np.array([10.0, 5.0, np.nan]), 10.0, 2.0).tolist() == [1.0, 1.0, 1.0]
    assert penalty(np.array([20.0]), INF, 2.0).tolist() == [1.0]
    assert staleness(100, np.array([4]))[0] == pytest.approx(0.3393, abs=5e-5)
    assert staleness(1, np.array([1]))[0] == 0.0


def test_a_score_by_hand() -> None:
    """R = 100, T = 10: clip, then the uncertainty, then the penalty on both, then fairness."""
    made = oort(4, durations=[20.0, 5.0, 10.0, 40.0], clip_bound=0.5, round_s=10.0, fairness=0.25)
    made.round = 100
    made.clients.utility[:] = [8.0, 2.0, 4.0, 1.0]  # of 1, 2, 4, 8 the one at 4 * 0.5 is 4
    made.clients.last_round[:] = [4, 4, 25, 100]
    made.clients.rounds[:] = [5, 1, 1, 2]
    ln = 0.1 * math.log(100)
    plain = [(4 + math.sqrt(ln / 4)) / 4, 2 + math.sqrt(ln / 4), 4 + math.sqrt(ln / 25), (1 + math.sqrt(ln / 100)) / 16]
    mixed = [0.75 * score + 0.25 * (5 - rounds) for score, rounds in zip(plain, [5, 1, 1, 2], strict=True)]
    assert made.scores(np.arange(4), 10.0) == pytest.approx(mixed)


def test_clipping_takes_an_outlier_to_the_quantile_and_its_scale_with_it() -> None:
    utility = np.array([*np.arange(1.0, 100.0), 1e9])
    assert clip_utilities(utility, 0.95).max() == 96.0  # the one at 100 * 0.95 of those in order
    scaled = clip_utilities(utility, 0.95, normalise=True)
    assert scaled[49] == pytest.approx((50 - 0.999) / (96 - 0.999))
    # the artifact's scale ends at the outlier: everybody else is 0 on it
    assert (50 - 0.999) / (1e9 - 0.999) < 1e-6
    assert clip_utilities(np.zeros(3), 0.95).tolist() == [0.0] * 3
    assert clip_utilities(np.array([5.0]), 0.95, normalise=True).tolist() == pytest.approx([1.0])
    assert clip_utilities(np.array([0.0, 5.0, 9.0]), 1.0, normalise=True)[0] == 0.0


def test_the_presets_are_the_published_ones_and_a_default_of_our_own() -> None:
    shown = ("exploration_factor", "exploration_decay", "exploration_min", "round_penalty", "round_threshold", "pacer_delta",
             "pacer_step", "clip_bound", "cut_off_util", "sample_window", "blacklist_rounds", "blacklist_max_len")  # fmt: skip
    values = {name: [getattr(each, key) for key in shown] for name, each in PRESETS.items()}
    assert values == {
        "balanced": [0.9, 0.98, 0.5, 2.0, 30.0, 5.0, 20, 0.9, 0.05, 5.0, -1, 0.3],
        "paper": [0.9, 0.98, 0.2, 2.0, 10.0, None, 20, 0.95, 0.95, 5.0, 10, 0.3],
        "artifact": [0.9, 0.95, 0.2, 2.0, 10.0, 5.0, 20, 0.98, 0.7, 5.0, -1, 0.3],
        "fedscale": [0.9, 0.98, 0.3, 2.0, 30.0, 5.0, 20, 0.9, 0.05, 5.0, -1, 0.3],
    }
    assert (PAPER.pacer, ARTIFACT.pacer, FEDSCALE.pool) == ("falling", "flat", 10.0)
    default = make_selector("oort")
    assert isinstance(default, Oort)
    assert default.config == PRESETS["balanced"]
    assert default.config != PAPER


def test_the_default_hears_more_clients_than_the_paper_in_shorter_rounds_than_chance() -> None:
    """A thousand clients whose durations and utilities have nothing to do with each other."""
    chance = np.random.default_rng(5)
    durations, utilities = chance.lognormal(3, 1, 1000), chance.lognormal(2, 1, 1000)

    def picks(kind: str, seed: int = 7, **options: Any) -> list[list[int]]:
        made, found = make_selector(kind, seed=seed, **options), []
        made.register(np.arange(1000), duration_s=durations, size=np.full(1000, 30.0))
        for _ in range(100):
            picked = made.select(10)
            made.feedback(picked, utility=utilities[picked], duration_s=durations[picked])
            found.append(picked.tolist())
        return found

    balanced, paper, alone = picks("oort"), picks("oort", preset="paper"), picks("random")
    assert balanced == picks("oort", preset="balanced")
    assert balanced != picks("oort", seed=8)

    def heard(found: list[list[int]]) -> int:
        return len({each for picked in found for each in picked})

    def mean_round_s(found: list[list[int]]) -> float:
        return float(np.mean([durations[picked].max() for picked in found]))

    assert heard(balanced) > 1.2 * heard(paper)
    assert mean_round_s(balanced) < mean_round_s(alone) / 1.5


def test_half_of_the_places_of_the_default_stay_with_new_clients() -> None:
    for preset, new in (("balanced", 5), ("fedscale", 3), ("paper", 2)):
        made = oort(5000, preset=preset, blacklist_rounds=-1)
        for _ in range(90):
            fresh = ~made.clients.explored
            picked = made.select(10)
            made.feedback(picked, utility=np.ones(10))
        assert int(fresh[picked].sum()) == new, preset


def test_exploration_decays_to_its_floor_at_round_75() -> None:
    made = oort(1)
    shares = [made.exploration(number) for number in range(90)]
    assert shares[:2] == [0.9, 0.9 * 0.98]
    assert shares[74] > 0.2
    assert shares[75:] == [0.2] * 15


def test_a_round_is_split_between_the_explored_and_the_new() -> None:
    made = oort(1000, blacklist_rounds=-1)
    for number in range(80):
        fresh = ~made.clients.explored
        picked = made.select(10)
        known = 0 if number == 0 else int(10 * (1 - made.exploration(number)) + 1e-9)
        assert int(fresh[picked].sum()) == 10 - known
        made.feedback(picked, utility=np.ones(10))
    assert made.figures["exploited"] == 8


def test_candidates_are_those_above_the_cut_off_by_score() -> None:
    """20 clients of utility 1..20; (1 - e)K = 5: the fifth has 16, 95 % of it are 15.2; 15 may never be picked."""
    options: dict[str, Any] = {"exploration_factor": 0.0, "clip_bound": 1.0, "round_penalty": 0.0}
    made = explored(20, np.arange(1.0, 21.0), **options)
    made.round = 0  # nothing for having been silent
    counts = np.zeros(20)
    for _ in range(300):
        made.round = 0
        counts[made.select(5)] += 1
    assert (counts > 0).tolist() == [False] * 15 + [True] * 5
    wide = explored(20, np.arange(1.0, 21.0), cut_off_util=0.7, **options)  # 0.7 * 16 = 11.2: from 12 on
    counts = np.zeros(20)
    for _ in range(600):
        wide.round = 0
        counts[wide.select(5)] += 1
    assert (counts > 0).tolist() == [False] * 11 + [True] * 9
    assert counts[-1] > counts[11]  # by score
    pool = explored(20, np.arange(1.0, 21.0), cut_off_util=1.0, pool=2.0, **options)  # the tenth best: from 11 on
    counts = np.zeros(20)
    for _ in range(300):
        pool.round = 0
        counts[pool.select(5)] += 1
    assert (counts > 0).tolist() == [False] * 10 + [True] * 10


def test_fast_clients_are_explored_first() -> None:
    durations = np.arange(1.0, 101.0)
    made = oort(100, durations=durations)
    assert made.select(4).max() < 20  # 5 * 4 are in the window
    times = np.bincount(
        [int(each) for seed in range(200) for each in oort(100, durations=durations, seed=seed).select(4)]
    )
    assert len(times) <= 20
    assert times[0] > times[10:].mean() * 3  # by 1/duration in it
    unknown = oort(100, durations=np.full(100, np.nan))
    assert len(unknown.select(4)) == 4


def test_the_artifact_explores_by_size_less_where_slow() -> None:
    made = oort(preset="artifact", round_s=10.0, sample_window=1.0)
    made.register(range(4), duration_s=[10.0, 20.0, 5.0, 40.0], size=[20.0, 100.0, 24.0, 200.0])
    # 20, 100/4, 24, 200/16
    assert made.select(2).tolist() == [1, 2]


def test_system_penalty_prefers_the_fast_and_zero_does_not_look() -> None:
    durations = np.where(np.arange(100) < 50, 10.0, 100.0)
    picked: dict[float, list[int]] = {}
    for alpha in (2.0, 0.0):
        made = explored(100, 5.0, durations=durations, round_penalty=alpha, exploration_factor=0.0, pacer_delta=0.0)
        picked[alpha] = [int(each) for _ in range(40) for each in made.select(10)]
    assert max(picked[2.0]) < 50
    assert 0.35 < np.mean(np.array(picked[0.0]) < 50) < 0.65


def paced(series: list[float], num: int = 200, **options: Any) -> list[float]:
    """T (paper) or its percentile (artifact) in each round, where everybody's utility is as in the series."""
    durations = np.arange(1.0, num + 1.0)
    made = oort(num, durations=durations, pacer_step=3, blacklist_rounds=-1, **options)
    seen = []
    for value in series:
        picked = made.select(10)
        seen.append(made.figures["round_s"] if made.config.pacer == "falling" else made.percentile)
        made.feedback(picked, utility=np.full(10, value), duration_s=durations[picked])
    return seen


@settings(max_examples=20, deadline=None)
@given(slope=st.floats(0.0, 2.0), start=st.floats(0.5, 100.0))
def test_the_papers_pacer_holds_t_while_rounds_teach_as_much_or_more(slope: float, start: float) -> None:
    seen = paced([start * (1 + slope * number) for number in range(13)])
    assert set(seen) == {21.0}  # the duration at 10 % of 1..200


def test_the_papers_pacer_raises_t_when_rounds_teach_less() -> None:
    seen = paced([10.0] * 6 + [9.0] * 3 + [8.0] * 6)
    # after 6 rounds flat; after 9 less: 10 % of the clients more; after 12 less again; after 15 nothing new
    assert seen == [21.0] * 9 + [41.0] * 3 + [61.0] * 3
    many = paced([10.0] * 6 + [9.0] * 9, num=1000)
    assert many[8:10] == [101.0, 131.0]  # W * K = 3 * 10 clients more, where that is less than 10 %
    assert set(paced([10.0] * 6 + [9.0] * 9, pacer_delta=0.0)) == {21.0}
    assert paced([10.0] * 6 + [9.0] * 9, pacer_delta=5.0)[-1] == 31.0
    assert paced([10.0] * 6 + [9.0] * 9, round_s=50.0)[8:10] == [50.0, 70.0]
    assert paced([10.0] * 6 + [1.0] * 9, pacer_delta=99.0)[-1] == 200.0  # never beyond the slowest


def test_the_artifacts_pacer_relaxes_when_flat_and_tightens_on_a_jump() -> None:
    options: dict[str, Any] = {"preset": "artifact", "exploration_factor": 0.0}
    # nobody is explored before the first round, so it has no exploited ones: it counts as 0
    assert paced([10.0] * 15, **options)[6:] == [10.0] * 3 + [15.0] * 3 + [20.0] * 3
    assert paced([10.0] * 6 + [20.0] * 3 + [40.0] * 6, **options)[-1] == 10.0  # neither flat nor a jump
    jump = paced([10.0] * 9 + [100.0] * 5, **options)
    assert jump[9:] == [15.0] * 3 + [10.0] * 2
    assert paced([10.0] * 9 + [100.0] * 5, **options, pacer_delta=12.0)[-1] == 12.0  # not below one step


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.integers(0, 15), min_size=1, max_size=40), after=st.integers(1, 12), cap=st.floats(0, 1))
def test_the_blacklist_holds_those_who_took_part_most_up_to_its_cap(rounds: list[int], after: int, cap: float) -> None:
    made = oort(len(rounds), blacklist_rounds=after, blacklist_max_len=cap)
    made.clients.rounds[:] = rounds
    left_out = made.blacklist()
    over = [number for number in rounds if number >= after]
    assert left_out.sum() == min(len(over), int(cap * len(rounds)))
    assert all(rounds[place] >= after for place in np.flatnonzero(left_out))
    if left_out.any():
        still_over = [rounds[place] for place in np.flatnonzero(~left_out) if rounds[place] >= after]
        assert max(still_over, default=0) <= min(rounds[place] for place in np.flatnonzero(left_out))


def test_nobody_is_picked_after_the_blacklist_holds_them() -> None:
    made = oort(30, blacklist_rounds=3, blacklist_max_len=1.0)
    while made.blacklist().sum() < 30:
        blocked = made.blacklist()
        picked = made.select(10)
        assert not blocked[picked].any()
        made.feedback(picked, utility=np.full(len(picked), 5.0))
    with pytest.raises(NoClient, match="the 30 clients that can be reached have all taken part 3 times"):
        made.select(10)
    assert made.clients.rounds.tolist() == [3] * 30
    endless = oort(30, blacklist_rounds=-1)
    for _ in range(12):
        endless.feedback(endless.select(10), utility=np.ones(10) * 5)
    assert endless.clients.rounds.max() > 3


def test_the_unexplored_on_the_blacklist_are_not_explored_either() -> None:
    """Unlike in the artifact: who was counted without being heard is not drawn from the unexplored."""
    made = oort(10, blacklist_rounds=2, blacklist_max_len=0.5)
    made.clients.rounds[:5] = 2
    assert made.select(10).tolist() == [5, 6, 7, 8, 9]


def test_fairness_one_is_a_round_robin_and_zero_is_not() -> None:
    spread = {}
    for fairness in (0.0, 1.0):
        utility = np.arange(1.0, 41.0) ** 2
        made = explored(40, utility, fairness=fairness, exploration_factor=0.0, blacklist_rounds=-1, cut_off_util=1.0)
        for _ in range(40):
            picked = made.select(4)
            made.feedback(picked, utility=utility[picked])
        spread[fairness] = int(np.ptp(made.clients.rounds))
    assert spread[1.0] <= 1
    assert spread[0.0] >= 20


def test_noise_has_the_scale_asked_for_and_leaves_utilities_positive() -> None:
    made = oort(4000, noise_factor=0.5)
    made.select(1)
    made.feedback(np.arange(4000), utility=np.full(4000, 100.0))
    assert made.clients.utility.mean() == pytest.approx(100, abs=3)
    assert made.clients.utility.std() == pytest.approx(50, rel=0.08)  # a little is lost at the floor
    assert made.clients.utility.min() == 0.01
    silent = oort(4, noise_factor=0.0)
    silent.feedback(range(4), utility=[0.0, 1.0, 2.0, 3.0])
    assert silent.clients.utility.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_hints_and_measurements_have_one_unit() -> None:
    """Another unit for *all* durations changes nothing; for the measured ones alone it would."""

    def run(hint: float, measured: float) -> list[list[int]]:
        durations = np.random.default_rng(1).lognormal(3, 1, 80)
        made, picks = oort(80, durations=hint * durations, preset="artifact"), []
        for _ in range(15):
            picked = made.select(10)
            made.feedback(picked, utility=1.0 + picked % 7, duration_s=measured * durations[picked])
            picks.append(picked.tolist())
        return picks

    assert run(1.0, 1.0) == run(4.0, 4.0)
    assert run(1.0, 4.0) != run(1.0, 1.0)  # control: what the artifact does


def test_who_was_cut_is_not_explored_again_and_counts_as_an_average_teacher() -> None:
    """Else the slowest, who are always cut, would be all that is left to explore, and be invited to every round."""
    made = oort(20, durations=np.arange(1.0, 21.0), round_s=10.0)
    made.select(20)
    made.feedback(
        range(20), utility=np.r_[np.full(5, 2.0), np.full(5, 4.0), np.full(10, 9.0)], finished=np.arange(20) < 10
    )
    made.select(4)
    assert made.figures["explored"] == 0
    bonus = math.sqrt(0.1 * math.log(2))
    assert made.scores(np.arange(20), 10.0)[[0, 9, 19]] == pytest.approx([2 + bonus, 4 + bonus, (3 + bonus) / 4])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("utility", [0.0, float("nan"), 1e-300, 1e300], ids=str)
@pytest.mark.parametrize("num", [1, 2, 5, 40])
def test_hostile_inputs_make_no_trouble(preset: str, utility: float, num: int) -> None:
    """Where the artifact fails or never ends: few clients, more wanted than there are, nobody or everybody explored."""
    with np.errstate(all="raise"):
        made = oort(5, preset=preset, pacer_step=2, blacklist_rounds=-1)
        for _ in range(12):
            picked = made.select(num)
            assert len(picked) == min(num, 5)
            made.feedback(picked, utility=np.full(len(picked), utility), duration_s=np.full(len(picked), utility))
        assert made.select(num, [3]).tolist() == [3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exploration_factor": 1.5}, "exploration_factor 1.5: use 1.0 or less"),
        ({"clip_bound": float("nan")}, "clip_bound nan: use"),
        ({"round_penalty": -1}, "round_penalty -1: use 0.0 or more"),
        ({"pacer_delta": INF}, "pacer_delta inf"),
        ({"pacer_step": 0}, "pacer_step 0: use 1 or more"),
        ({"round_s": 0.0}, "round_s 0.0: use more than 0"),
        ({"blacklist_rounds": 0}, "blacklist_rounds 0: use 1 or more, or -1"),
        ({"pacer": "slow"}, "pacer 'slow' is not known: use 'falling' or 'flat'"),
        ({"normalise": "False"}, "normalise 'False': use true or false"),
        ({"round_penalty": "2"}, "round_penalty '2': use a number"),
        ({"pacer_step": 2.5}, "pacer_step 2.5: use a whole number"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], says: str) -> None:
    """Among them: the word "False" is not taken for true."""
    with pytest.raises(ConfigError, match=says):
        make_selector("oort", **options)
