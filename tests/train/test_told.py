"""What adaptation adds to a row, and decisions, come out as they went in; the facts of a step are those that are seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pliant import record
from pliant.adapt import Observation, Resize, SetBatchSize, WorkerFigures
from pliant.train.adapting import facts, told

pytestmark = pytest.mark.timeout(30)
FIGURES = WorkerFigures(name="a:1", step_s=0.5, compute_s=0.25, comm_bytes=3e6, comm_s=0.125, egress_bytes=1e6)
DECIDED = [("one", SetBatchSize(size=64, reason="more")), ("other", Resize(workers=2, reason="fewer"))]


def test_a_row_says_what_it_was_given() -> None:
    row = told.pack(FIGURES, 12.5, DECIDED, b"probed")
    assert len(row) == told.HEAD_BYTES + len(b"probed")
    said = told.unpack("a:1", row)
    assert said == told.Told(len(told.to_bytes(DECIDED)), 12.5, FIGURES, b"probed")
    assert told.unpack("a:1", told.pack(FIGURES, 12.5, [], b"")).num_bytes == 0


def test_decisions_travel() -> None:
    assert told.from_bytes(told.to_bytes(DECIDED)) == DECIDED
    assert told.from_bytes(told.to_bytes([])) == []


def _seen(**more: float) -> Observation:
    return Observation(step=3, epoch=1, view=5, replicas=4, batch_size=8, strategy="RING", workers=(FIGURES,), **more)


def test_what_is_not_known_is_no_fact() -> None:
    assert "noise_scale" not in facts.of_step(_seen(), {})
    assert "values" not in facts.of_step(_seen(), {})
    found = facts.of_step(_seen(noise_scale=2.0), {"loss": 0.5})
    assert (found["noise_scale"], found["values"], found["workers"]) == (2.0, {"loss": 0.5}, 1)


def test_links_are_those_between_hosts() -> None:
    rates = ((0.0, 9.0, 1.4), (9.0, 0.0, 9.0), (2.6, 9.0, 0.0))
    found = facts.of_links(["a", "a", "b"], rates)
    assert found == {"hosts": ["a", "b"], "bytes_per_s": [[0, 1], [3, 0]]}


def test_a_record_begins_with_the_first_fact(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    book = facts.Facts(str(path))
    assert not path.exists()
    book.write("step", 3, **facts.of_step(_seen(), {}))
    book.close()
    [fact] = record.read(path)
    assert (fact.kind, fact.step, fact.data["batch_size"]) == ("step", 3, 8)
    assert json.loads(path.read_text())["kind"] == "step"
    without = facts.Facts("")
    without.write("step", 3)
    without.close()
