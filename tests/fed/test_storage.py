"""What a federated job leaves: a record that tells everything, the artifact's file, and TensorBoard's events."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from fed_jobs import Crash, config_of, lines_of, loop_of
from full_disk import limited_files

from pliant.errors import CheckpointError, ConfigError
from pliant.fed.history import History, Point, Round
from pliant.fed.rounds.federation import checkpoint_errors
from pliant.fed.rounds.loop import simulate
from pliant.fed.rounds.storage import PERF, RECORD, TENSORBOARD, JobRecorder, training_perf
from pliant.fed.selection.selectors import make_selector
from pliant.fed.tables import read_pickle

POINTS = [Point(5, 60.0, 0.5, 0.9, 1.5), Point(10, 90.0, 0.8, 0.95, 0.7), Point(15, 200.0, 0.8, 1.0, None, 3.0)]


def a_round(number: int, **more: Any) -> Round:
    values: dict[str, Any] = {
        "round": number, "begin_s": 10.0 * number, "clock_s": 10.0 * number + 8, "invited": (1, 2, 3, 4), "aggregated": (1, 2),
        "cut": (3,), "lost": (4,), "left_out": {2: "it holds values that are not finite"}, "loss": 0.25, "lr": 0.1, "there": 9,
        "malicious": 1, "selector": {"round": number, "round_s": None},
    }  # fmt: skip
    return Round(**values | more)


def test_time_to_accuracy_is_that_of_the_first_test_that_reaches_it() -> None:
    history = History(POINTS)
    assert [history.time_to(wanted) for wanted in (0.5, 0.51, 0.8, 0.81)] == [60.0, 90.0, 90.0, None]
    assert history.rounds_to(0.6) == 10
    assert history.best is POINTS[1], "the first of equals"
    assert history.final is POINTS[2]
    assert History().best is None
    assert History().final is None


@pytest.mark.parametrize(
    "value", [*POINTS, a_round(1), a_round(2, loss=None, staleness=(0, 1), asked_s=(1.5, 2.0, 3.0, 4.0))]
)
def test_what_is_written_comes_back(value: Round | Point) -> None:
    assert type(value).from_json(json.loads(json.dumps(value.as_json()))) == value


@pytest.mark.parametrize(
    ("value", "name", "wrong", "why"),
    [
        (POINTS[0], "clock_s", "soon", "clock_s is 'soon'"),
        (POINTS[0], "accuracy", None, "accuracy is None"),
        (POINTS[0], "loss", True, "loss is True"),
        (POINTS[0], "round", 5.0, "round is 5.0"),
        (POINTS[0], "top_5", 10**400, "top_5 is 1000"),
        (a_round(1), "invited", 3, "invited is 3"),
        (a_round(1), "cut", [3, "x"], "cut.1 is 'x'"),
        (a_round(1), "left_out", {"two": "late"}, "left_out.two.*'two'"),
        (a_round(1), "selector", [], "selector is .*"),
        (a_round(1), "begin_s", math.nan, "begin_s is nan"),
    ],
)
def test_what_no_job_has_written_is_named(value: Round | Point, name: str, wrong: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        type(value).from_json(json.loads(json.dumps(value.as_json() | {name: wrong})))


def test_a_state_that_lacks_a_part_is_named_as_damaged() -> None:
    with pytest.raises(CheckpointError, match="lacks a part of the state .*settings.*damaged"), checkpoint_errors():
        make_selector("oort").load_state_dict({"kind": "oort"})


def test_a_record_that_was_changed_is_refused_by_its_line_and_stays_as_it_is(tmp_path: Path) -> None:
    config, record = config_of(), tmp_path / RECORD
    with pytest.raises(Crash):
        loop_of(config, tmp_path, crash_at=8).run()
    lines = record.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if json.loads(line)["kind"] == "test")
    lines[place] = json.dumps(json.loads(lines[place]) | {"clock_s": "soon"})
    record.write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match=rf"jsonl:{place + 1}: this test is not as .*: clock_s is 'soon'.*; put the record"):
        loop_of(config, tmp_path).run()
    assert record.read_text().splitlines() == lines


def test_the_record_is_enough_to_show_the_job(tmp_path: Path) -> None:
    config = config_of(privacy={"clip": 1.0}, selector="random", deadline_s=8.0)
    history = simulate(config, folder=tmp_path)
    facts = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / RECORD).read_text().splitlines()]
    kinds = [fact["kind"] for fact in facts]
    assert kinds == ["start", *(["round", "work", "round", "test", "work"] * 3), "end"]
    assert type(config).model_validate(facts[0]["config"]) == config
    assert facts[0]["clients"] == 60
    assert "synthetic" in facts[0]["devices"]
    rounds = [Round.from_json(fact) for fact in facts if fact["kind"] == "round"]
    points = [Point.from_json(fact) for fact in facts if fact["kind"] == "test"]
    assert (rounds, points) == (history.rounds, history.points)
    for each in rounds:
        assert sorted(each.aggregated + each.cut + each.lost) == list(each.invited)
        assert each.duration_s == pytest.approx(each.clock_s - each.begin_s)
    assert facts[-1]["why"] == "rounds"
    assert facts[-1]["clock_s"] == history.rounds[-1].clock_s


def test_training_perf_is_the_artifacts(tmp_path: Path) -> None:
    config = config_of(selector="random", aggregator="fed-yogi")
    history = simulate(config, folder=tmp_path)
    found = read_pickle(tmp_path / PERF)
    assert isinstance(found, dict)
    perf = found.pop("perf")
    assert found == {
        "data_set": "digits", "model": "logistic", "sample_mode": "random", "gradient_policy": "fed-yogi", "task": "cv",
    }  # fmt: skip
    assert type(perf) is OrderedDict
    assert perf[0] == {"round": 0, "clock": 0.0, "top_1: ": 0.0, "top_5: ": 0.0, "loss": 0.0}
    assert list(perf) == [0, 2, 4, 6]
    last = history.points[-1]
    assert perf[6]["top_1: "] == 100 * last.accuracy
    assert perf[6]["clock"] == last.clock_s
    text = training_perf(config_of(data={"kind": "play"}), History([Point(1, 1.0, 0.1, 0.2, None)]))
    assert text["task"] == "nlp"


def test_a_broken_loss_is_null_in_the_record_and_nan_in_the_pickle(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path)
    config = config_of()
    recorder.begin(config, None, {"note": math.inf})
    recorder.round(a_round(1, loss=math.nan))
    recorder.test(Point(1, 5.0, 0.1, 0.2, math.inf))
    recorder.end("rounds")
    recorder.close()
    facts = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / RECORD).read_text().splitlines()]
    assert (facts[0]["note"], facts[1]["loss"], facts[2]["loss"]) == (None, None, None)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `tensorboard`"
    )
    seen = reader.EventAccumulator(str(folder), size_guidance={"histograms": 0})
    seen.Reload()
    found = {name: [(each.step, each.value) for each in seen.Scalars(name)] for name in seen.Tags()["scalars"]}
    return found | {
        name: [(each.step, each.histogram_value.num) for each in seen.Histograms(name)]
        for name in seen.Tags()["histograms"]
    }


def test_tensorboard_shows_each_round_once_also_after_a_resume(tmp_path: Path) -> None:
    config = config_of()
    with pytest.raises(Crash):
        loop_of(config, tmp_path, crash_at=8).run()  # in round 6, and the checkpoint is of round 4
    history = loop_of(config, tmp_path).run()
    shown = events(tmp_path / TENSORBOARD)
    assert [step for step, _ in shown["Train/round_to_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in shown["Test/round_to_accuracy"]] == [2, 4, 6]
    assert [value for _, value in shown["Test/round_to_accuracy"]] == pytest.approx(
        [each.accuracy for each in history.points]
    )
    assert set(shown) >= {
        "Train/time_to_train_loss (min)", "Train/round_duration (min)", "Train/client_duration (min)",
        "Test/time_to_test_accuracy (min)",
    }  # fmt: skip
    assert shown["Train/client_duration (min)"] == [(each, 6.0) for each in range(1, 7)]
    assert len(lines_of(tmp_path)) == 1 + 6 + 3 + 1


def test_a_journal_tells_and_keeps_what_it_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    seen: list[tuple[str, int]] = []
    history = simulate(config_of(rounds=2), say=said.append)
    assert said == [f"round     2    0 h 00 min {int(history.points[0].clock_s):02} s  accuracy {history.points[0].accuracy:6.2%}  "
                    f"loss {history.points[0].loss:.4f}"]  # fmt: skip
    recorder = JobRecorder(None, watch=lambda kind, data: seen.append((kind, data.get("round", 0))))
    recorder.begin(config_of(), None, {})
    recorder.round(a_round(1))
    recorder.test(POINTS[0])
    recorder.end("stopped")
    recorder.close()
    assert seen == [("start", 0), ("round", 1), ("test", 5), ("end", 0)]
    assert recorder.history.why == "stopped"


def test_two_cannot_work_on_one_job(tmp_path: Path) -> None:
    first = loop_of(config_of(), tmp_path)
    first.step()
    with pytest.raises(ConfigError, match="another process runs this job; stop it first"):
        loop_of(config_of(), tmp_path).run()
    first.run()
    assert loop_of(config_of(), tmp_path).run().rounds == first.recorder.history.rounds


def test_folders_that_will_not_do_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/job: Not a directory; give a folder"):
        simulate(config_of(), folder=tmp_path / "file" / "job")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RECORD).write_text('{"kind": "start", "step": 0, "time_s": 1.0, "program": "train.py"}\n')
    with pytest.raises(CheckpointError, match="not the record of a federated job: use another folder"):
        simulate(config_of(), folder=tmp_path / "other")
    assert "train.py" in (tmp_path / "other" / RECORD).read_text()


def test_a_job_ends_if_its_record_finds_no_room_because_it_is_resumed_with_it(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path)
    recorder.begin(config_of(), None, {})
    with (
        limited_files(0),
        pytest.raises(CheckpointError, match="too large; a federated job is resumed with its record"),
    ):
        recorder.end("rounds")
    recorder.close()
