"""What all selectors promise: who may be picked, how many, the same again, and going on after a restart."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import CheckpointError, ConfigError, NoClient
from pliant.fed.selection.base import PopulationSelector, greatest, mean_of, sample, statistical_utility
from pliant.fed.selection.selectors import NAMES, PRESETS, Oort, local_steps, make_selector

ALL = [*[name for name in NAMES if name != "oort"], *[f"oort:{name}" for name in PRESETS]]


def selector(name: str, seed: int = 7, **options: Any) -> PopulationSelector:
    kind, _, preset = name.partition(":")
    return make_selector(kind, seed=seed, **({"preset": preset} if preset else {}), **options)


def registered(name: str, num: int, seed: int = 7, **options: Any) -> PopulationSelector:
    """With ids that are no places: 1000, 993, ..."""
    made, draw = selector(name, seed, **options), np.random.default_rng(num)
    made.register(ids(num), duration_s=draw.lognormal(3, 1, num), size=draw.integers(1, 300, num).astype(float))
    return made


def ids(num: int) -> np.ndarray:
    return 1000 - 7 * np.arange(num)


def play(
    made: PopulationSelector, rounds: int, *, num: int = 10, first: int = 0, feasible: bool = True
) -> list[list[int]]:
    """Rounds in which the utility follows from client and round alone, and the slowest of the picked are cut."""
    picks = []
    for number in range(first, first + rounds):
        draw = np.random.default_rng(number)
        online = draw.random(len(made.clients)) < 0.8 if feasible else None
        picked = made.select(num, online, remaining_s=draw.exponential(50, len(made.clients)))
        duration_s = 5 + np.abs(picked) % 17 * draw.random(len(picked))
        made.feedback(
            picked, utility=np.abs(picked) / (number + 1), loss=np.abs(picked) / 1000, duration_s=duration_s,
            finished=duration_s <= np.quantile(duration_s, 0.8),
        )  # fmt: skip
        picks.append(picked.tolist())
    return picks


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_picks_are_feasible_and_as_many_as_can_be_without_repetition(name: str, data: st.DataObject) -> None:
    num_clients = data.draw(st.integers(1, 30))
    made = registered(name, num_clients, seed=data.draw(st.integers(0, 5)))
    for _ in range(data.draw(st.integers(1, 6))):
        online = np.array(data.draw(st.lists(st.booleans(), min_size=num_clients, max_size=num_clients)))
        blocked = made.blacklist() if isinstance(made, Oort) else np.zeros(num_clients, bool)
        may = ids(num_clients)[online & ~blocked]
        num = data.draw(st.integers(1, 35))
        as_mask = data.draw(st.booleans())
        if not len(may):
            with pytest.raises(NoClient):
                made.select(num, online)
            continue
        picked = made.select(num, online if as_mask else ids(num_clients)[online])
        assert len(picked) == min(num, len(may))
        assert len(set(picked.tolist())) == len(picked)
        assert set(picked.tolist()) <= set(may.tolist())
        utility = data.draw(st.lists(st.floats(), min_size=len(picked), max_size=len(picked)))
        duration_s = data.draw(st.lists(st.floats(), min_size=len(picked), max_size=len(picked)))
        finished = data.draw(st.lists(st.booleans(), min_size=len(picked), max_size=len(picked)))
        made.feedback(picked, utility=utility, loss=utility, duration_s=duration_s, finished=finished)


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_picks_the_same_and_another_does_not(name: str) -> None:
    options = {"accuracy": 0.8} if name == "refl" else {}  # what it knows for sure is no matter of chance
    first = play(registered(name, 60, **options), 12)
    assert play(registered(name, 60, **options), 12) == first
    if name != "fastest":
        assert play(registered(name, 60, seed=8, **options), 12) != first


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("through", ["values", "json"])
@pytest.mark.parametrize("heard", [False, True])
def test_a_resumed_selector_goes_on_as_if_it_had_never_stopped(name: str, through: str, heard: bool) -> None:
    """Stopped between a selection and its feedback, or after it."""
    options = {"pacer_step": 3, "noise_factor": 0.3, "blacklist_rounds": 4} if name.startswith("oort") else {}
    undisturbed, stopped = registered(name, 60, **options), registered(name, 60, **options)
    for one in (undisturbed, stopped):
        play(one, 13)
        last = one.select(5)
        if heard:
            one.feedback(last, utility=[1.0] * 5, duration_s=[3.0] * 5)
    state = stopped.state_dict()
    if through == "json":
        state = json.loads(as_json(state))
    resumed = selector(name, seed=99, **options)
    resumed.load_state_dict(state)
    for one in (undisturbed, resumed):
        if not heard:
            one.feedback(last, utility=[1.0] * 5, duration_s=[3.0] * 5)
        play(one, 2, first=13)
    assert as_json(resumed.state_dict()) == as_json(undisturbed.state_dict())
    assert play(resumed, 15, first=15) == play(undisturbed, 15, first=15)


def as_json(state: dict[str, Any]) -> str:
    return json.dumps(state, default=lambda value: value.tolist())


def test_without_the_generator_a_resumed_selector_goes_astray() -> None:
    """The negative control of the test above."""
    one = registered("oort:paper", 60)
    play(one, 10)
    state = one.state_dict()
    other = selector("oort:paper")
    other.load_state_dict(state | {"rng": np.random.PCG64(5).state})
    assert play(other, 10, first=10) != play(one, 10, first=10)


def test_a_state_is_a_copy() -> None:
    made = registered("oort:paper", 60)
    play(made, 5)
    state = made.state_dict()
    play(made, 5, first=5)
    again = selector("oort:paper")
    again.load_state_dict(state)
    assert again.round == 5
    assert play(again, 5, first=5)
    assert state["round"] == 5


def test_a_state_of_another_selector_is_refused() -> None:
    state = registered("oort:paper", 5).state_dict()
    with pytest.raises(CheckpointError, match="selector is 'oort', this one is 'random'"):
        selector("random").load_state_dict(state)
    with pytest.raises(CheckpointError, match="exploration_decay=0.95, but the checkpoint's selector has 0.98"):
        selector("oort:artifact").load_state_dict(state)


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_arrival_does_not_matter(name: str) -> None:
    runs = []
    for step in (1, -1):
        made = registered(name, 40, **({"noise_factor": 0.5} if name.startswith("oort") else {}))
        for _ in range(8):
            picked = made.select(6)
            made.feedback(
                picked[::step], utility=(np.abs(picked) % 11.0)[::step], duration_s=(np.abs(picked) % 5 + 1.0)[::step]
            )
        runs.append(made.select(6).tolist())
    assert runs[0] == runs[1]


def test_the_global_generator_is_neither_used_nor_seeded() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    play(registered("oort:paper", 40), 5)
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]


@pytest.mark.parametrize("name", ALL)
def test_nobody_there_is_one_clear_line_and_changes_nothing(name: str) -> None:
    made = registered(name, 20)
    play(made, 3)
    before = made.state_dict()
    with pytest.raises(NoClient, match="none of the 20 clients can be reached"):
        made.select(5, np.zeros(20, bool))
    with pytest.raises(NoClient, match="none of the 20 clients"):
        made.select(5, [])
    assert repr(made.state_dict()) == repr(before)
    with pytest.raises(NoClient, match="none of the 0 clients"):
        selector(name).select(1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda made: made.select(0), "num=0: pick 1"),
        (lambda made: made.select(1, [5]), "client 5 is unknown: register it"),
        (lambda made: made.select(1, np.ones(3, bool)), "feasible has 3 bools for 4 clients"),
        (lambda made: made.feedback([5], utility=[1.0]), "client 5 is unknown"),
        (lambda made: made.feedback([1000, 1000]), "client 1000 is named twice"),
        (lambda made: made.feedback([1000], utility=[1.0, 2.0]), "utility has 2 values for 1 clients"),
        (lambda made: made.feedback([1000], finished=[True, False]), "finished has 2 values for 1 clients"),
        (lambda made: made.register([3], duration_s=[-1.0]), "duration_s=-1 of client 3: use a number above 0"),
        (lambda made: made.register([3], size=[0]), "size=0 of client 3"),
        (lambda made: made.register([0.5]), "clients of type float64"),
        (lambda made: made.register(np.array([2**63], np.uint64)), "use ids below 2\\^63"),
        (lambda made: make_selector("best"), "selector 'best' is unknown: use one of random, fastest"),
        (lambda made: make_selector("oort", preset="kuiper"), "preset 'kuiper' is unknown: use one of balanced, paper, artifact, fedscale"),
        (lambda made: make_selector("oort", epsilon=1), "selector oort: 'epsilon' is unknown; it has"),
        (lambda made: make_selector("random", epsilon=1), "selector random: 'epsilon' is unknown; it has no options"),
        (lambda made: make_selector("refl", accuracy=2), "accuracy=2: use a probability"),
        (lambda made: make_selector("refl", rest_rounds=-1), "rest_rounds=-1"),
        (lambda made: make_selector("power-of-choice", factor=0.5), "factor=0.5"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(registered("random", 4))


def test_registering_again_says_something_new_and_forgets_nothing() -> None:
    made = make_selector("fastest")
    made.register([5, 3], duration_s=[10.0, 20.0])
    made.feedback([3], utility=[4.0], duration_s=[30.0])
    made.register([3, 9], duration_s=[2.0, 1.0])
    assert made.clients.ids.tolist() == [5, 3, 9]
    assert made.clients.duration_s.tolist() == [10.0, 2.0, 1.0]
    assert made.clients.rounds.tolist() == [0, 1, 0]
    assert made.select(2).tolist() == [3, 9]


def test_who_was_cut_has_not_taken_part_and_took_at_least_so_long() -> None:
    made = make_selector("random")
    made.register([0, 1, 2, 3], duration_s=[10.0, 10.0, 10.0, np.nan])
    made.select(4)
    made.feedback(
        [0, 1, 2, 3], utility=[5.0] * 4, duration_s=[8.0, 8.0, 12.0, 6.0], finished=[True, False, False, False]
    )
    assert made.clients.duration_s.tolist() == [8.0, 10.0, 12.0, 6.0]
    assert made.clients.rounds.tolist() == [1, 0, 0, 0]
    assert made.clients.utility.tolist() == [5.0, 0.0, 0.0, 0.0]


def test_what_broken_clients_say_is_not_believed() -> None:
    made = make_selector("random")
    made.register([0, 1, 2, 3], duration_s=[10.0] * 4)
    made.select(4)
    wrong = [np.nan, np.inf, -1.0, -np.inf]
    made.feedback([0, 1, 2, 3], utility=wrong, loss=wrong, duration_s=wrong)
    assert made.clients.utility.tolist() == [0.0] * 4
    assert np.isnan(made.clients.loss).all()
    assert made.clients.duration_s.tolist() == [10.0] * 4


def test_utility_is_of_every_sample_of_the_first_pass() -> None:
    """The last mini-batch alone, which FedScale takes, says something else."""
    losses = [1.0, 2.0, 3.0, 4.0]
    utility = statistical_utility(losses)
    assert (utility, mean_of(losses)) == (pytest.approx(10.954, abs=5e-4), 2.5)
    last_batch_only = 2 * statistical_utility(losses[2:])
    assert abs(last_batch_only - utility) > 3
    assert statistical_utility([]) == mean_of([]) == 0.0
    assert np.isnan(statistical_utility([1.0, np.nan]))


def test_the_greatest_are_the_first_of_equals() -> None:
    assert greatest(np.array([1.0, 3.0, 2.0, 3.0, 3.0, 0.0]), 2).tolist() == [1, 3]
    assert greatest(np.array([1.0, 3.0, 2.0, 3.0, 3.0, 0.0]), 4).tolist() == [1, 2, 3, 4]
    assert greatest(np.array([-np.inf, 1.0]), 5).tolist() == [0, 1]
    assert greatest(np.array([1.0]), 0).tolist() == []


def test_draws_follow_the_weights_of_successive_drawing() -> None:
    """Against the exact probabilities of drawing one after the other: P(pair) = sum over both orders."""
    weights, draws = np.array([5.0, 3.0, 1.0, 1.0]), 6_000
    rng = np.random.default_rng(0)
    seen = np.zeros((4, 4))
    for _ in range(draws):
        one, two = sample(rng, weights, 2)
        seen[one, two] += 1
    chance = weights / weights.sum()
    chi2 = 0.0
    for one in range(4):
        for two in range(one + 1, 4):
            exact = chance[one] * chance[two] * (1 / (1 - chance[one]) + 1 / (1 - chance[two]))
            chi2 += (seen[one, two] - draws * exact) ** 2 / (draws * exact)
    assert chi2 < 20.5  # 5 degrees of freedom, one in a thousand
    even = draws / 6 * np.triu(np.ones((4, 4)), 1)  # control: equal chances are something else
    assert ((seen - even)[even > 0] ** 2 / even[even > 0]).sum() > 500


def test_zero_weights_still_have_a_chance_and_all_zero_is_even() -> None:
    rng = np.random.default_rng(0)
    drawn = [int(place) for _ in range(1200) for place in sample(rng, np.zeros(3), 1)]
    assert min(np.bincount(drawn)) > 330
    assert sample(rng, np.array([0.0, 1.0, 0.0]), 1).tolist() == [1]
    assert sorted(sample(rng, np.array([0.0, 1.0, 0.0]), 3).tolist()) == [0, 1, 2]


def test_random_picks_everybody_equally_often() -> None:
    made = registered("random", 20)
    times = np.bincount([place for _ in range(1000) for place in made.clients.places(made.select(5)).tolist()])
    assert times.sum() == 5000
    assert ((times - 250) ** 2 / 250).sum() < 45  # 19 degrees of freedom, one in a thousand


def test_fastest_takes_the_fastest_and_the_unknown_last() -> None:
    made = make_selector("fastest")
    made.register([0, 1, 2, 3], duration_s=[9.0, np.nan, 1.0, 5.0])
    assert made.select(2).tolist() == [2, 3]
    assert made.select(3, [0, 1, 2]).tolist() == [0, 1, 2]
    assert made.select(2, [0, 1, 3]).tolist() == [0, 3]


def test_power_of_choice_takes_the_greatest_loss_of_its_candidates() -> None:
    made = make_selector("power-of-choice", factor=100)  # everybody is a candidate
    made.register(range(6), size=[1.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    made.feedback([0, 1, 2, 3], loss=[0.9, 0.1, 0.5, 0.7])
    assert made.select(2).tolist() == [4, 5]  # never heard
    made.feedback([4, 5], loss=[0.2, np.nan], utility=[0.0, 8.0])  # 8 of 10 samples: 0.8 each
    assert made.select(2).tolist() == [0, 5]
    few = make_selector("power-of-choice", factor=1)  # as many candidates as picks: by size alone
    few.register([0, 1], size=[1.0, 9.0])
    times = np.bincount([int(few.select(1)[0]) for _ in range(800)])
    assert abs(times[1] / 800 - 0.9) < 0.04


def test_refl_takes_those_who_leave_soonest_and_can_finish_and_have_rested() -> None:
    made = make_selector("refl", rest_rounds=2)
    made.register(range(5), duration_s=[10.0] * 5)
    stays_s = [100.0, 20.0, 5.0, 50.0, 80.0]
    rounds = []
    for _ in range(5):
        picked = made.select(1, remaining_s=stays_s)
        made.feedback(picked, utility=[1.0])
        rounds.append(int(picked[0]))
    assert rounds == [1, 3, 4, 1, 3]  # 2 would be gone before it is done; 1 is back after two rounds of rest
    assert made.select(5, remaining_s=stays_s).tolist() == [0, 1, 2, 3, 4]
    blind = make_selector("refl", rest_rounds=0, accuracy=0.0)
    blind.register(range(5), duration_s=[10.0] * 5)
    assert len({int(blind.select(1, remaining_s=stays_s)[0]) for _ in range(50)}) > 3


def test_refl_without_predictions_is_random_among_the_rested() -> None:
    made = make_selector("refl", rest_rounds=1)
    made.register(range(4))
    first = made.select(2)
    made.feedback(first, utility=[1.0, 1.0])
    assert not set(made.select(2).tolist()) & set(first.tolist())


def test_pyramidfl_lets_the_early_ones_train_longer() -> None:
    """min(10, floor((T - t)/(t_local/E))/E) + 1 times as long; by hand, with E = 10."""
    duration_s, compute_s = np.array([100.0, 60.0, 12.0, 2.0]), np.array([80.0, 40.0, 10.0, 1.0])
    # spare 0, 40, 88, 98 s; a step takes 8, 4, 1, 0.1 s; so 0, 10, 88, 980 steps more, and 980 is too much
    assert local_steps(10, duration_s, compute_s, round_s=100.0).tolist() == [10, 20, 98, 110]
    assert local_steps(10, duration_s, compute_s, round_s=20.0).tolist() == [10, 10, 18, 110]
