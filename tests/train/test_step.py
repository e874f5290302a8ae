"""What all workers learn of a turn, what they complain about, and the means of what was logged."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pliant
from pliant.errors import TrainError
from pliant.train.current_step import CurrentStep
from pliant.train.events import Progress
from pliant.train.step import MAX_FIGURES, TURN_BYTES, Outcome, Step, Turn, TurnRow, complaint_about, means_of


def row(outcome: Outcome = Outcome.SUMMED, models: int = 1, had_gradients: int = 0, **figures: float) -> TurnRow:
    return TurnRow(outcome, models if outcome is Outcome.SUMMED else 0, had_gradients, False, figures)


NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
VALUES = st.floats(allow_nan=False) | st.just(math.inf)


@given(st.sampled_from(Outcome), st.integers(0, 2**32 - 1), st.dictionaries(NAMES, VALUES, max_size=MAX_FIGURES))
def test_a_turn_travels_in_a_fixed_room(outcome: Outcome, models: int, figures: dict[str, float]) -> None:
    turn = Turn(3, 1, False, outcome, models, models // 2)
    turn.log(figures)
    assert len(turn.pack()) == TURN_BYTES
    assert TurnRow.from_bytes(turn.pack()) == TurnRow(outcome, models, models // 2, False, figures)


def test_figures_are_numbers_or_tensors_with_one_element() -> None:
    turn = Turn(0, 0, True, kept={"noise": 1})
    weight = torch.ones(1, requires_grad=True)
    turn.log({"loss": (weight * 2).sum(), "seen": 7, "ok": True, "half": torch.tensor([0.5], dtype=torch.bfloat16)})
    assert isinstance(turn.figures["loss"], float), "a tensor would keep its graph"
    found = TurnRow.from_bytes(turn.pack())
    assert (found.figures, found.keeps) == ({"loss": 2.0, "seen": 7.0, "ok": 1.0, "half": 0.5}, True)
    for value in ("much", torch.ones(2), None):
        with pytest.raises(TrainError, match=r"step\.log\(bad=.*a number, or a tensor with one element"):
            Turn(0, 0, True).log({"bad": value})


def test_a_figure_has_the_value_that_it_had_when_it_was_logged() -> None:
    turn, running = Turn(0, 0, True), torch.ones(())
    turn.log({"loss": running})
    running += 1
    assert turn.row == TurnRow.from_bytes(turn.pack()) == TurnRow(Outcome.NOTHING, 0, 0, False, {"loss": 1.0})


class Distant:
    """A figure on a device: reading it would take time."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_worker_alone_waits_for_figures_only_where_they_are_read(
    replicas: int, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Distant] = []

    def distant(name: str, value: float) -> Distant:
        logged.append(Distant(value))
        return logged[-1]

    monkeypatch.setattr("pliant.train.step.figure_of", distant)
    net = torch.nn.Linear(2, 1)
    with pliant.join(replicas=replicas) as job:
        model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in job.steps(4):
            for replica in step:
                model(torch.ones(2)).sum().backward()
                step.log(number=10.0 * step.number + replica)
            optimizer.step()
            optimizer.zero_grad()
            if step.number % 2:
                assert step["number"] == step["number"] == 10 * step.number + (replicas - 1) / 2
    reads = [each.reads for each in logged]
    assert reads == [0] * replicas + [1] * replicas + [0] * replicas + [1] * replicas


def test_what_has_no_room_is_refused_where_it_is_logged() -> None:
    with pytest.raises(TrainError, match=f"9 figures .* but {MAX_FIGURES} travel"):
        Turn(0, 0, True).log({f"f{number}": 1.0 for number in range(9)})
    with pytest.raises(TrainError, match="more than 96 bytes"):
        Turn(0, 0, True).log({"x" * 97: 1.0})


SUMMED, SKIPPED, NOTHING = row(), row(Outcome.SKIPPED), row(Outcome.NOTHING)
OVER, EMPTY = row(Outcome.PASSED_OVER), row(Outcome.NO_DATA)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([SUMMED, SUMMED], ""),
        ([SUMMED, SKIPPED], ""),
        ([SKIPPED, SKIPPED], ""),
        ([OVER, OVER], ""),
        ([EMPTY, EMPTY], ""),
        ([row(Outcome.LOGGED, items=1.0), row(Outcome.LOGGED, items=2.0)], ""),
        ([row(loss=1.0), SKIPPED, row(loss=2.0)], ""),
        ([SUMMED, NOTHING], "replica 1 ended its turn of step 7 without a backward()"),
        (
            [OVER, SUMMED],
            "the worker of replica 0 left step 7 without a loop over it (continue or break), but that of replica 1",
        ),
        ([SUMMED, EMPTY], "the data of replica 1 ended before step 7, but those of replica 0 did not"),
        (
            [SUMMED, row(Outcome.LOGGED)],
            "replica 1 called step.no_backward() in a loop over step 7, but replica 0 did not",
        ),
        ([row(models=1), SKIPPED, row(models=2)], "the backward of replica 2 in step 7 reached other models"),
        ([row(had_gradients=1), SKIPPED, row(had_gradients=3)], ""),
        ([row(had_gradients=1), row()], "the replicas 0 and 1 differ in step 7 in whether they add to gradients"),
        ([row(loss=1.0), row(lose=1.0)], "replicas 0 and 1 logged different figures in step 7"),
        ([row(loss=1.0), row()], "replicas 0 and 1 logged different figures in step 7 (loss; none)"),
    ],
)
def test_complaints_name_the_replica_and_the_step(rows: list[TurnRow], says: str) -> None:
    found = complaint_about(rows, 7)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_means_are_added_in_the_order_of_replicas() -> None:
    assert means_of([row(loss=1.0, seen=2.0), row(Outcome.SKIPPED), row(loss=2.0, seen=4.0)]) == {
        "loss": 1.5,
        "seen": 3.0,
    }
    assert means_of([SKIPPED, SUMMED]) == {}
    values = [1.0, 1e16, -1e16]
    assert means_of([row(loss=value) for value in values]) == {"loss": 0.0}
    assert means_of([row(loss=value) for value in reversed(values)]) == {"loss": 1 / 3}, "the order matters"


def test_a_figure_that_was_not_logged_is_named_with_those_that_were() -> None:
    trainer = SimpleNamespace(is_taken_back=False)
    step = Step(trainer, 3, 0, 3)  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=r"step\['loss'\]: .* nothing \(figures are known after the loop"):
        step["loss"]
    step.add_figures([row(lose=1.0, seen=1.0), row(lose=1.0, seen=3.0)])
    assert step["seen"] == 2.0
    with pytest.raises(TrainError, match="have logged lose, seen"):
        step["loss"]
    trainer.is_taken_back = True
    assert math.isnan(step["loss"])


def test_what_a_turn_keeps_is_a_copy_without_a_graph() -> None:
    turn = Turn(0, 0, True)
    current = CurrentStep(Progress())
    current.turn, current.kept = turn, {0: turn.kept}
    step = Step(SimpleNamespace(current=current), 3, 0, 3)  # type: ignore[arg-type]
    weight = torch.ones(2, requires_grad=True)
    image = weight * 2
    step.keep(fake=image, more=[image, 1.5], name="a")
    with torch.no_grad():
        image.zero_()
    found = step.kept
    assert torch.equal(found["fake"], torch.full((2,), 2.0))
    assert not found["fake"].requires_grad
    found["more"][0].zero_()
    assert torch.equal(step.kept["more"][0], torch.full((2,), 2.0)), "the turn may be taken again"
    with pytest.raises(TrainError, match=r"step\.keep\['what'\] is .*cannot be kept without pickle"):
        step.keep(what=object())
