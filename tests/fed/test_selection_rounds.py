"""Sixty rounds on real devices, without training: clients teach less each time they take part. Ablations point where they should."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pliant.fed.selection.base import PopulationSelector
from pliant.fed.selection.selectors import make_selector

CLIENTS, WAITED_FOR, INVITED, ROUNDS = 500, 20, 26, 60


@pytest.fixture(scope="module")
def devices(fed_data: Path) -> np.ndarray:
    """Seconds of one round: 200 samples thrice, and 1,600 kbit each way."""
    with (fed_data / "devices.csv").open() as file:
        rows = [next(csv.reader(file)) for _ in range(CLIENTS + 1)][1:]
    table = np.array(rows, np.float64)
    return 3 * 200 * table[:, 0] / 1e3 + 2 * 1600 / table[:, 1]


def rounds(made: PopulationSelector, duration_s: np.ndarray) -> list[dict[str, Any]]:
    """26 are invited, the 20 first are waited for; a client's losses shrink by a third with each round that it takes part in."""
    draw = np.random.default_rng(3)
    size, loss = draw.integers(20, 300, CLIENTS).astype(float), draw.uniform(0.5, 3.0, CLIENTS)
    made.register(np.arange(CLIENTS), duration_s=duration_s, size=size)
    told = []
    for _ in range(ROUNDS):
        picked = made.select(INVITED)
        in_time = np.zeros(len(picked), bool)
        in_time[np.argsort(duration_s[picked], kind="stable")[:WAITED_FOR]] = True
        taught = size[picked] * loss[picked]
        made.feedback(picked, utility=taught, duration_s=duration_s[picked], finished=in_time)
        loss[picked[in_time]] *= 0.67
        told.append(
            {**made.figures, "picked": picked.tolist(), "took_s": float(duration_s[picked[in_time]].max()),
             "taught": float(taught[in_time].sum())}
        )  # fmt: skip
    return told


def mean(told: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([each[key] for each in told]))


def seen(told: list[dict[str, Any]]) -> int:
    return len({client for each in told for client in each["picked"]})


def test_a_replay_is_the_same_to_the_byte_and_another_seed_is_not(devices: np.ndarray) -> None:
    first, again, other = (json.dumps(rounds(make_selector("oort", seed=seed), devices)) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    told = json.loads(first)
    assert all(len(set(each["picked"])) == INVITED for each in told)
    assert [each["exploration"] for each in told] == [max(0.9 * 0.98**number, 0.2) for number in range(ROUNDS)]
    steps = [number for number in range(1, ROUNDS) if told[number]["round_s"] != told[number - 1]["round_s"]]
    assert steps == [40]  # multiples of W, from 2W on: clients teach less and less here


def test_oort_is_faster_than_random_and_each_part_of_it_does_its_own(devices: np.ndarray) -> None:
    random, oort = rounds(make_selector("random", seed=7), devices), rounds(make_selector("oort", seed=7), devices)
    assert mean(oort, "took_s") < 0.6 * mean(random, "took_s")
    blind = rounds(make_selector("oort", seed=7, round_penalty=0.0, sample_window=1e9), devices)  # "Oort without Sys"
    assert mean(blind, "took_s") > 1.3 * mean(oort, "took_s")
    stuck = rounds(
        make_selector("oort", seed=7, exploration_factor=0.1, exploration_min=0.0, blacklist_rounds=-1), devices
    )
    assert seen(stuck) < 0.8 * seen(oort)
    hasty = rounds(make_selector("oort", seed=7, pacer_delta=0.0), devices)
    assert hasty[-1]["round_s"] < oort[-1]["round_s"]


@pytest.mark.parametrize("seed", range(3))
def test_guided_picks_teach_earlier_than_random_ones(seed: int) -> None:
    """On equal devices only what clients teach can make a difference; and since they have only so much to teach, it is one of when."""
    equal = np.full(CLIENTS, 30.0)
    random, oort = rounds(make_selector("random", seed=seed), equal), rounds(make_selector("oort", seed=seed), equal)
    assert mean(oort, "took_s") == mean(random, "took_s")
    assert mean(oort[:30], "taught") > 1.1 * mean(random[:30], "taught")
