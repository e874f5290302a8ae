"""A change of strategy: every collective takes the same one on all ranks, however far each rank had come."""

from __future__ import annotations

import random

import pytest

from pliant.comm.frames import channel_tag
from pliant.comm.plan import Spec, StrategyHistory, highest_counts, pack_counts
from pliant.comm.topology import Strategy, check_strategy
from pliant.errors import ConfigError

SPECS = [Spec("all_reduce", name, (0, 1, 2), "float32", 10, "sum", True, -1) for name in ("a", "b", "c")]


def change_on_all(ranks: list[StrategyHistory], submitted: list[dict[str, int]], wanted: str) -> None:
    """As `Engine.set_strategy` does it, with what each rank had submitted under each name."""
    counts = [{channel_tag(spec.channel): each[spec.name] for spec in SPECS if spec.name in each} for each in submitted]
    most = highest_counts([pack_counts(mine) for mine in counts])
    for rank, mine in zip(ranks, counts, strict=True):
        rank.change(Strategy(wanted), mine, most)


def test_who_lags_behind_goes_on_with_the_old_one_until_it_has_caught_up() -> None:
    ranks = [StrategyHistory(Strategy("STAR")) for _ in range(2)]
    change_on_all(ranks, [{"a": 5}, {"a": 3, "b": 1}], "RING")
    ahead, behind = ranks
    assert [behind[behind.number_for(SPECS[0], seq)].name for seq in (3, 4, 5)] == ["STAR", "STAR", "RING"]
    assert ahead[ahead.number_for(SPECS[0], 5)].name == "RING"
    assert ahead[ahead.number_for(SPECS[1], 0)].name == "STAR", "the other rank had submitted it before the change"
    assert ahead[ahead.number_for(SPECS[2], 0)].name == "RING"


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_take_the_same_whatever_they_had_submitted(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [StrategyHistory(Strategy("STAR")) for _ in range(3)]
    taken: list[dict[tuple[str, int], int]] = [{} for _ in ranks]
    done: list[dict[str, int]] = [{} for _ in ranks]

    def submit(rank: int, spec: Spec) -> None:
        seq = done[rank].get(spec.name, 0)
        done[rank][spec.name] = seq + 1
        taken[rank][spec.name, seq] = ranks[rank].number_for(spec, seq)

    for wanted in ("RING", "TREE", "CLIQUE", "STAR"):
        for _ in range(30):
            submit(chance.randrange(3), chance.choice(SPECS))
        change_on_all(ranks, done, wanted)
    for rank in range(3):
        for spec in SPECS:
            while done[rank].get(spec.name, 0) < 60:
                submit(rank, spec)
    assert taken[0] == taken[1] == taken[2]
    assert set(taken[0].values()) == {0, 1, 2, 3, 4}


def test_what_is_no_strategy_is_told() -> None:
    assert check_strategy("ring", ["A", "A"]) == Strategy("RING")
    assert check_strategy([0, 0, 1], ["A", "A", "B"]) == check_strategy("0,0,1", ["A", "A", "B"]) == Strategy("FOREST", (0, 0, 1))
    with pytest.raises(ConfigError, match="has 2 entries, but there are 3 ranks"):
        check_strategy([0, 0], ["A", "A", "B"])
    for nonsense in ("no such", "0,x", ["x"]):
        with pytest.raises(ConfigError):
            check_strategy(nonsense, ["A", "A"])
