"""Steps as the program sees them: counters that go on in the middle of an epoch, and turns that do not fit together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

import pliant
from pliant import Job
from pliant.errors import TrainError
from pliant.train.gradients import GradientReducer
from pliant.train.step import Outcome, Step, Steps, Turn, TurnRow, complaint_about


def _steps(*indices: int) -> Iterator[Step]:
    for index in indices:
        yield Step(cast(Any, None), 100 + index, 0, index)


@pytest.mark.parametrize(("begin", "start"), [(0, 0), (3, 0), (3, 10), (1000, 1)])
def test_enumerate_counts_on_where_the_steps_begin(begin: int, start: int) -> None:
    """As on a new worker, or in a job that was resumed in the middle of an epoch."""
    found = [(i, step.index) for i, step in enumerate(Steps(_steps(begin, begin + 1, begin + 2)), start)]
    assert found == [(start + index, index) for index in (begin, begin + 1, begin + 2)]


def test_other_iterations_see_the_steps_alone() -> None:
    assert [step.index for step in Steps(_steps(3, 4))] == [3, 4]
    assert [step.index for step, _ in zip(Steps(_steps(3, 4)), "ab", strict=True)] == [3, 4]
    assert list(enumerate(Steps(_steps()))) == []


def _row(**fields: Any) -> TurnRow:
    return TurnRow.from_bytes(Turn(0, 0, True, Outcome.SUMMED, **fields).pack())


def test_all_replicas_add_to_the_gradients_of_earlier_steps_or_none_does() -> None:
    with_both, with_one = _row(models=3, had_gradients=3), _row(models=3, had_gradients=1)
    assert complaint_about([with_both, with_both], 7) == ""
    assert "replicas 0 and 1 differ in step 7" in complaint_about([with_both, with_one], 7)
    # The gradients of a model that this pass does not use do not matter.
    assert complaint_about([_row(models=1, had_gradients=3), _row(models=1, had_gradients=1)], 7) == ""


@contextlib.contextmanager
def a_job(replicas: int) -> Iterator[tuple[Job, torch.nn.Module, torch.optim.Optimizer, Any]]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    with pliant.join(replicas=replicas) as job:
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        yield job, model, optimizer, job.loader(torch.rand(24, 2), batch_size=2)


def train(step: Step, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x in step:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _break_inside(job: Job, step: Step) -> None:
    for _ in step:
        break


def _error_inside(job: Job, step: Step) -> None:
    with contextlib.suppress(MemoryError):
        for _ in step:
            raise MemoryError


AFTERWARDS: dict[str, Callable[[Job, Step, torch.optim.Optimizer], object]] = {
    "continue": lambda job, step, optimizer: None,
    "optimizer.step": lambda job, step, optimizer: optimizer.step(),
    "all_reduce": lambda job, step, optimizer: job.all_reduce(1),
    "evaluate": lambda job, step, optimizer: next(job.evaluate([1])),
    "again": lambda job, step, optimizer: next(iter(step)),
}


@pytest.mark.parametrize("leave", [_break_inside, _error_inside])
@pytest.mark.parametrize("name", [*AFTERWARDS, "break"])
def test_a_loop_over_a_step_that_is_left_early_is_an_error_wherever_it_is_noticed(
    name: str, leave: Callable[[Job, Step], None]
) -> None:
    def program() -> None:
        with a_job(replicas=3) as (job, _, optimizer, loader):
            for _ in job.epochs(2):
                for step in loader:
                    leave(job, step)
                    if name == "break":
                        break
                    AFTERWARDS[name](job, step, optimizer)

    with pytest.raises(TrainError, match=r"left before all replicas had their turn.*step\.skip"):
        program()


def test_an_epoch_has_one_loop_over_its_steps() -> None:
    seen = []

    def program() -> None:
        with a_job(replicas=3) as (job, model, optimizer, loader):
            for epoch in job.epochs(2):
                for _ in range(1 + epoch):
                    for step in loader:
                        seen.append(step.number)
                        train(step, model, optimizer)
                        break

    with pytest.raises(TrainError, match="second loop over the steps of epoch 1"):
        program()
    assert seen == [0, 1]


def test_an_iterator_that_is_kept_does_not_keep_its_step_open() -> None:
    with a_job(replicas=3) as (job, model, optimizer, loader):
        committed: list[int] = []
        job.on_commit(lambda event: committed.append(event.step))
        kept = []
        for _ in job.epochs(3):
            steps = iter(loader)
            kept.append(steps)
            for _ in range(2):
                train(next(steps), model, optimizer)
        assert committed == [1, 2, 3, 4, 5, 6]
        with pytest.raises(TrainError, match="step 1 is over: this loop over the steps was left"):
            next(kept[0])


def test_a_loop_in_the_body_of_a_step_is_an_error() -> None:
    def program() -> None:
        with a_job(replicas=3) as (job, model, optimizer, loader):
            for _ in job.epochs(1):
                for step in loader:
                    train(step, model, optimizer)
                    for inner in loader:
                        train(inner, model, optimizer)

    with pytest.raises(TrainError, match="second loop over the steps of epoch 0"):
        program()


@pytest.mark.parametrize("replicas", [1, 3])
def test_gradients_that_a_step_leaves_are_part_of_the_state_unless_steps_begin_by_clearing_them(replicas: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("weight", weight)], replicas)

    def step(*, clears_first: bool = False, clears_last: bool = False) -> list[torch.Tensor | None] | None:
        if clears_first:
            weight.grad = None
        reducer.begin_pass()
        weight.grad = torch.full((2,), 3.0)
        reducer.end_pass()
        if clears_last:
            weight.grad = None
        reducer.end_step()
        return reducer.carried()

    try:
        assert [step(clears_last=True) for _ in range(3)] == [None] * 3
        assert torch.equal((step() or [None])[0], torch.full((2,), 3.0)), "carried over a step for the first time"  # type: ignore[arg-type]
        step()
        assert step(clears_first=True) is not None, "it has added to some before"
        reducer.close()
        weight.grad, reducer = None, GradientReducer([("weight", weight)], replicas)
        assert step() is not None, "nothing is known yet"
        assert [step(clears_first=True) for _ in range(2)] == [None] * 2
        step()
        assert step() is not None, "it adds to them now"
    finally:
        reducer.close()


@pytest.mark.parametrize("what", ["skip", "no_backward"])
def test_a_turn_that_is_skipped_has_no_backward(what: str) -> None:
    def program() -> None:
        with a_job(replicas=3) as (job, model, _, loader):
            for _ in job.epochs(1):
                for step in loader:
                    for x in step:
                        getattr(step, what)()
                        model(x).sum().backward()

    with pytest.raises(TrainError, match=rf"backward\(\) after step.{what}\(\) in the turn of replica 0 of step 0"):
        program()
