"""Steps as the program sees them: counters that go on in the middle of an epoch, and turns that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

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
