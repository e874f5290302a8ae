"""The record of a run: facts in, the same facts out, whatever crashes leave in the file."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from pliant.adapt import ProbeLinks, Resize, SetBatchSize, SetLearningRate, SetTopology
from pliant.adapt.policy import KINDS, Decision, decision_from_json
from pliant.errors import ConfigError
from pliant.record import Recorder, read

DECISIONS: list[Decision] = [
    SetBatchSize(size=64, reason="noise"),
    SetLearningRate(factor=1.0 / 3, reason='half as much, ‘said’ the "rule"\n'),
    Resize(workers=0, reason="the end"),
    SetTopology(strategy="RING", reason="slow"),
    SetTopology(strategy=(1, 1, 1), reason="slow"),
    ProbeLinks(reason="slow", num_bytes=1024),
]


def test_facts_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.jsonl"
    with Recorder(path) as recorder:
        recorder.write("start", 0, replicas=4)
        recorder.write("step", 1, loss=0.1, name="ä")
    with Recorder(path) as recorder:  # resumed
        recorder.write("end", 1)
    facts = read(path)
    assert [(fact.kind, fact.step, dict(fact.data)) for fact in facts] == [
        ("start", 0, {"replicas": 4}),
        ("step", 1, {"loss": 0.1, "name": "ä"}),
        ("end", 1, {}),
    ]
    assert facts[0].time_s <= facts[-1].time_s
    assert all(json.loads(line) for line in path.read_text().splitlines()), "one object per line"


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda each: type(each).__name__)
def test_decisions_come_back_to_the_last_bit(decision: Decision, tmp_path: Path) -> None:
    with Recorder(tmp_path / "record.jsonl") as recorder:
        recorder.write("decision", 7, policy="P", decision=decision.to_json())
    [fact] = read(tmp_path / "record.jsonl")
    assert decision_from_json(fact.data["decision"]) == decision
    assert {each.kind for each in DECISIONS} == set(KINDS)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_a_crash_has_cut_short_costs_no_other(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with Recorder(path) as recorder:
        recorder.write("step", 1)
        recorder.write("step", 2)
    path.write_bytes(path.read_bytes()[:-cut])
    with Recorder(path) as recorder:
        recorder.write("step", 3)
    steps = [fact.step for fact in read(path)]
    assert steps in ([1, 3], [1, 2, 3])
    assert steps == [1, 2, 3] or cut > 1


def write_many(path: Path, number: int) -> None:
    with Recorder(path) as recorder:
        for step in range(200):
            recorder.write("step", step, writer=number, filler="x" * 300)


def test_several_processes_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    facts = read(path)
    for number in range(3):
        assert [fact.step for fact in facts if fact.data["writer"] == number] == list(range(200))


def test_what_is_no_record_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file.*give a record.jsonl"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "text").write_text("dear diary\nit rains\n")
    with pytest.raises(ConfigError, match="not one of its 2 lines"):
        read(tmp_path / "text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read(tmp_path / "bytes")
    (tmp_path / "empty").touch()
    assert read(tmp_path / "empty") == []
    with pytest.raises(ConfigError, match="give a file that can be written"):
        Recorder(tmp_path)


@pytest.mark.parametrize(
    "value",
    [{"kind": "explode", "reason": ""}, {}, {"kind": "resize", "reason": ""}, {"kind": "resize", "workers": 1, "x": 2}],
    ids=str,
)
def test_decisions_that_are_none_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        decision_from_json(value)
