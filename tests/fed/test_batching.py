"""The choice of how many clients are trained at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pliant.fed import trainer as batching
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.work import training_units


def test_the_smallest_that_is_nearly_the_fastest_is_taken() -> None:
    assert batching.best({1: 10, 4: 19.2, 8: 20, 16: 15}) == 4
    assert batching.best({1: 10, 4: 12, 8: 20, 16: 20.5}) == 8


def test_what_is_no_faster_is_not_taken() -> None:
    assert batching.best({1: 10, 4: 10.5, 8: 9}) == 1
    assert batching.best({1: 10}) == 1


def test_candidates_cut_a_round_into_units_for_four() -> None:
    assert batching.candidates(500, 20, "cpu", 4) == (3, 5)
    assert batching.candidates(500, 100, "cpu", 4) == (3, 5, 9, 13)
    assert all(
        len(training_units(range(100), [1] * 100, round_number=1, lr=1, batching=b)) % 4 == 0 for b in (5, 9, 13)
    )
    assert batching.candidates(500, 4, "cpu", 4) == ()
    assert batching.candidates(500, 20, "cpu", 2) == (2, 5, 10)
    assert batching.candidates(500, 100, "cuda", 4) == (4, 16, 32, 64)


class Looking(nn.Module):
    """Looks at values, which cannot be done for many at once."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.flatten(1)) * (1 if float(inputs.sum()) < torch.inf else 2)


def test_a_measurement_answers_with_a_candidate() -> None:
    given = {"data": {"kind": "digits", "clients": 10}, "participants": 20, "model": "logistic"}
    assert batching.choose_batching(build_task(FedConfig.model_validate(given)), limit_s=0.5) in range(1, 11)
    looking = build_task(FedConfig.model_validate({**given, "model": f"{__name__}:Looking"}))
    assert batching.choose_batching(looking) == 1
    few = build_task(FedConfig.model_validate({**given, "participants": 2}))
    assert batching.choose_batching(few) == 1
