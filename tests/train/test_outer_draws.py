"""Draws outside of turns: another replica's generators are moved exactly as if it had made the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pliant.train.context import capture_rng, restore_rng, seeded_rng
from pliant.train.outer_draws import SEARCHES, Draws, Twister

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "rand": lambda: torch.rand(7),
    "a block and a bit": lambda: torch.rand(625),
    "a million": lambda: torch.rand(1_000_000),
    "randint": lambda: torch.randint(0, 1000, (33,)),
    "a base seed": lambda: torch.empty((), dtype=torch.int64).random_(),
    "randperm": lambda: torch.randperm(5000),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(100, 10)),
    "large randn": lambda: torch.randn(10_000),
    "one randn": lambda: torch.randn(1),
    "two randn": lambda: (torch.randn(1), torch.randn(1)),
    "randn, then others": lambda: (torch.randn(3), torch.rand(100)),
    "exponential": lambda: torch.empty(9).exponential_(),
    "python": lambda: [random.random() for _ in range(700)],
    "numpy": lambda: np.random.rand(1000),
    "all": lambda: (torch.rand(5), random.random(), np.random.rand(3)),
}


def next_draws() -> list[object]:
    return [torch.rand(3).tolist(), torch.randn(1).item(), torch.randn(20).tolist(), random.random(), np.random.rand()]


@pytest.fixture(autouse=True)
def _keep_generators() -> object:
    present = capture_rng()
    yield
    restore_rng(present)


@pytest.mark.parametrize("warm_up", ["nothing", "rand", "one randn"])
@pytest.mark.parametrize("name", DRAWS)
def test_another_replica_is_moved_as_if_it_had_drawn_too(name: str, warm_up: str) -> None:
    first, second = seeded_rng(1), seeded_rng(2)
    states = []
    for state in (first, second):
        restore_rng(state)
        DRAWS[warm_up]()
        before = capture_rng()
        DRAWS[name]()
        states.append((before, capture_rng()))
    (before, after), (other, expected) = states
    draws = Draws.between(before, after)
    assert (draws is None) == (name == "nothing")
    result = draws.apply(other) if draws is not None else other
    assert result.torch.equal(expected.torch)
    assert (result.python, result.numpy) == (expected.python, expected.numpy)
    restore_rng(result)
    drawn = next_draws()
    restore_rng(expected)
    assert drawn == next_draws()
    if name != "nothing":  # the control: a replica that was not moved draws other numbers
        restore_rng(other)
        assert drawn != next_draws()


@pytest.mark.parametrize("seed", [1, 1337])
def test_a_new_seed_is_every_replicas_seed_even_if_it_is_the_old_one(seed: int) -> None:
    restore_rng(seeded_rng(1))
    torch.rand(100)
    before = capture_rng()
    torch.manual_seed(seed)
    torch.rand(10)
    after = capture_rng()
    assert Draws(before, after).apply(seeded_rng(2)).torch.equal(after.torch)


SEEDS: list[tuple[Callable[[], object], bool]] = [
    *((lambda seed=seed: random.seed(seed), True) for seed in (0, 7, -3, 2**70, "text", "a longer text" * 9)),
    *((lambda seed=seed: np.random.seed(seed), False) for seed in (0, 7, 2**32 - 1, [7], [1, 2, 3])),
]


@pytest.mark.parametrize(("seed", "is_pythons"), SEEDS)
def test_a_new_seed_of_python_or_numpy_is_known_without_a_long_search(
    seed: Callable[[], object], is_pythons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def words_until(self: Twister, later: Twister, limit: int = SEARCHES[-1]) -> None:
        searched.append(limit)

    monkeypatch.setattr(Twister, "words_until", words_until)
    random.getrandbits(32 * 40 * 624), np.random.bytes(4 * 40 * 624)  # far from any seed that another test has set
    before = capture_rng()
    for seeds, long_searches in ((seed, 0), (lambda: None, 1)):  # the negative control has only drawn
        for count in (1, 311, 312, 313, 6000):
            restore_rng(before)
            seeds()
            [random.random() for _ in range(count)] if is_pythons else np.random.rand(count)
            searched.clear()
            assert Draws(before, capture_rng()).counts[0 if is_pythons else 1] is None
            assert searched.count(SEARCHES[-1]) == long_searches, f"{count} draws after it"
