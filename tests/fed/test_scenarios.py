"""What guided selection is for, in jobs of seconds: time to accuracy, what its parts do, liars, and noise.

150 clients of digits with unequal labels, 20 of 26 invited in a round; times are on the virtual clock. The real sizes are in
`pliant reproduce oort-time-to-accuracy | oort-ablation`. Jobs that several tests look at are run once.
"""

from __future__ import annotations

import functools
import math
import os
from statistics import median
from typing import Any

import pytest
from pliant_repro.figures.oort_jobs import FedCourse, FedRun

from pliant.fed.config import DataConfig, FedConfig, LocalConfig, NamedOptions
from pliant.fed.rounds.loop import simulate

pytestmark = pytest.mark.timeout(120)
SEEDS = (0, 1, 2, 3, 4) if os.environ.get("PLIANT_FULL") else (0, 1)
TARGET = 0.9
OORT: dict[str, Any] = {"preset": "paper", "exploration_decay": 0.9}
"""150 clients are explored sooner than thousands."""


def config(seed: int = 0, *, kind: str = "oort", options: dict[str, Any] | None = None, **more: Any) -> FedConfig:
    chosen = {**(OORT if kind == "oort" else {}), **(options or {})}
    usual: dict[str, Any] = {
        "data": DataConfig(kind="digits", partition="dirichlet", clients=150, alpha=1.0),
        "model": "mlp",
        "local": LocalConfig(steps=5, batch_size=10, lr=0.05),
        "rounds": 60,
        "evaluate_every": 2,
        "batching": 20,
    }
    return FedConfig(seed=seed, selector=NamedOptions(kind=kind, options=chosen), **{**usual, **more})


def course(*args: Any, **more: Any) -> FedCourse:
    return _course(config(*args, **more).model_dump_json())


@functools.lru_cache
def _course(text: str) -> FedCourse:
    asked = FedConfig.model_validate_json(text)
    return FedCourse.of(FedRun("", asked.selector.kind, asked), simulate(asked), 0.0)


def ratios(**more: Any) -> list[float]:
    """Random's time to the accuracy over Oort's, seed by seed."""
    found = []
    for seed in SEEDS:
        other_s, own_s = (course(seed, kind=kind, **more).time_to(TARGET) for kind in ("random", "oort"))
        assert other_s is not None
        assert own_s is not None
        found.append(other_s / own_s)
    return found


def end(one: FedCourse) -> float:
    """The mean of the last tests."""
    return sum(one.accuracies[-8:]) / 8


def test_the_accuracy_is_reached_in_less_time_and_the_end_is_as_good() -> None:
    found = ratios()
    assert median(found) >= 1.5
    assert min(found) >= 1.0
    lost = [end(course(seed, kind="random")) - end(course(seed)) for seed in SEEDS]
    assert median(lost) <= 0.005


def test_where_all_are_alike_it_makes_no_difference() -> None:
    """The control of the test before: here there is nothing to choose."""
    data = DataConfig(kind="digits", partition="iid", clients=150)
    found = ratios(data=data, devices="equal", evaluate_every=1, target=TARGET)
    assert 0.8 <= median(found) <= 1.25  # whole rounds of about 15


def test_each_part_does_what_it_is_for() -> None:
    full, random = course(), course(kind="random")
    no_penalty = course(options={"round_penalty": 0.0})
    assert full.mean_round_s < no_penalty.mean_round_s
    assert abs(no_penalty.mean_round_s - random.mean_round_s) < abs(no_penalty.mean_round_s - full.mean_round_s)
    paced, no_pacer = (course(options={"pacer_step": 5, **more}) for more in ({}, {"pacer_delta": 0.0}))
    assert no_pacer.mean_round_s < paced.mean_round_s  # the pacer lets slower clients in
    fewer = (no_pacer.rounds_to(TARGET) or math.inf) < (paced.rounds_to(TARGET) or math.inf)
    assert end(no_pacer) <= end(paced) + 0.002 or not fewer
    alone = course(options={"exploration_factor": 0.0, "exploration_min": 0.0})
    assert alone.coverage < full.coverage


@pytest.mark.parametrize("aggregator", ["fed-avg", "trimmed-mean"])
def test_a_tenth_of_liars_costs_little(aggregator: str) -> None:
    """Clipped utilities and a blacklist keep liars, whose losses are the greatest, from being picked for ever."""
    clean = course(1, aggregator=aggregator)
    lied = course(1, aggregator=aggregator, malicious=0.1)
    assert clean.malicious == 0
    assert 0 < lied.malicious < 0.2 * lied.updates
    assert end(lied) >= end(clean) - 0.02


def test_noise_on_utilities_leaves_it_faster_than_random() -> None:
    noisy, random = course(options={"noise_factor": 1.0}), course(kind="random")
    assert noisy.times_s != course().times_s
    reached_s, other_s = noisy.time_to(TARGET), random.time_to(TARGET)
    assert reached_s is not None
    assert other_s is not None
    assert reached_s < other_s
