"""Time to accuracy: from records, and from the pickles of the artifact; and a selector on its own."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from command import command

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.history import Point
from pliant.fed.report import compare, read_curve
from pliant.fed.rounds.storage import JobRecorder

REPLAY = Path(__file__).parents[2] / "examples" / "federated" / "replay.json"


def journal(folder: Path, *tests: tuple[int, float, float], kind: str = "oort") -> Path:
    """A job's folder with these tests: round, seconds, accuracy."""
    made = JobRecorder(folder / "aggregator")
    made.begin(FedConfig(name="a", selector={"kind": kind}), None, {})  # type: ignore[arg-type]
    for number, clock_s, accuracy in tests:
        made.test(Point(number, clock_s, accuracy, 1.0, 2 - accuracy))
    made.end("rounds")
    made.close()
    return folder


def test_the_published_curves_are_read_as_published(fed_data: Path) -> None:
    """PyramidFL's runs of the artifact: speech, YoGi."""
    files = [fed_data / "training_perf" / f"speech_yogi_{kind}" for kind in ("random", "oort")]
    found = compare([read_curve(file) for file in files])
    random, oort = found.runs
    assert found.target == pytest.approx(0.55303)
    assert (random.best, oort.best) == (pytest.approx(0.55303), pytest.approx(0.581703))
    assert random.hours == pytest.approx(12.23, abs=0.005)
    assert oort.hours == pytest.approx(7.78, abs=0.005)
    assert oort.speedup == pytest.approx(1.573, abs=0.001)
    assert oort.curve.about["sample_mode"] == "oort"
    said = command("report", "--compare", *map(str, files))
    assert said.exit_code == 0
    assert "12.23 h" in said.stdout
    assert "7.78 h" in said.stdout
    assert "55.30%" in said.stdout


def test_record_and_pickle_of_a_job_tell_the_same(tmp_path: Path) -> None:
    folder = journal(tmp_path / "job" / "0101", (5, 60.0, 0.5), (10, 130.5, 0.75))
    by_record = read_curve(folder)
    by_pickle = read_curve(folder / "aggregator" / "training_perf")
    assert by_record.name == by_pickle.name == "job/0101"
    assert [point.clock_s for point in by_record.points] == [60.0, 130.5]
    assert [point.accuracy for point in by_pickle.points] == pytest.approx([0.5, 0.75])
    assert by_record.about["sample_mode"] == by_pickle.about["sample_mode"] == "oort"
    assert read_curve(tmp_path / "job").points == by_record.points


def test_the_target_is_what_all_reached_or_what_is_asked_for(tmp_path: Path) -> None:
    slow = read_curve(journal(tmp_path / "slow", (5, 100.0, 0.5), (10, 200.0, 0.8), (15, 300.0, 0.7)))
    fast = read_curve(journal(tmp_path / "fast", (5, 50.0, 0.79), (10, 100.0, 0.9)))
    found = compare([slow, fast])
    assert (found.target, found.is_asked) == (0.8, False)
    assert [run.point.round for run in found.runs if run.point] == [10, 10]
    assert [run.speedup for run in found.runs] == [1.0, 2.0]
    assert [run.final for run in found.runs] == [0.7, 0.9]
    asked = compare([slow, fast], target=85)
    assert [run.hours for run in asked.runs] == [None, 100 / 3600]
    assert [run.speedup for run in asked.runs] == [None, None]
    by_loss = compare([slow, fast], metric="loss")
    assert by_loss.target == pytest.approx(1.2)
    assert [run.point.clock_s for run in by_loss.runs if run.point] == [200.0, 100.0]


def test_fedscales_names_and_a_missing_loss_will_do(tmp_path: Path) -> None:
    rows = OrderedDict(
        {10: {"top_1": 40.0, "clock": 7.0, "loss": float("nan")}, 5: {"top_1": 20, "clock": 3, "top_5": 50}}
    )
    (tmp_path / "testing_perf").write_bytes(pickle.dumps({"perf": rows, "task": "cv"}))
    curve = read_curve(tmp_path / "testing_perf")
    assert [(point.round, point.accuracy, point.loss) for point in curve.points] == [(5, 0.2, None), (10, 0.4, None)]
    with pytest.raises(ConfigError, match="it does not tell loss; use another --metric"):
        compare([curve], metric="loss")


def test_what_is_no_such_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "evil").write_bytes(pickle.dumps({"perf": pytest.raises}))
    (tmp_path / "list").write_bytes(pickle.dumps([1]))
    (tmp_path / "rows").write_bytes(pickle.dumps({"perf": {3: {"clock": 1.0}}}))
    (tmp_path / "record.jsonl").write_text('{"kind": "start", "step": 0, "time_s": 1.0}\n')
    (tmp_path / "text.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    for name, key, value in (("soon", "clock_s", "soon"), ("endless", "round", float("inf"))):
        facts = (journal(tmp_path / name, (5, 60.0, 0.5)) / "aggregator" / "record.jsonl").read_text().splitlines()
        facts[1] = json.dumps(json.loads(facts[1]) | {key: value})
        (tmp_path / name / "aggregator" / "record.jsonl").write_text("\n".join(facts))
    journal(tmp_path / "untested")
    for name, why in (
        ("evil", "this pickle wants .*raises"), ("list", "no training_perf"), ("rows", "it has no clock and top_1"),
        ("record.jsonl", "not the record of a federated job"), ("empty", "neither record.jsonl nor training_perf is there"),
        ("text.csv", "text.csv: not a training_perf or record: give"),
        ("untested", "the model was not tested yet"), ("nope", "No such file"),
        ("soon", "the test of step 5 is not as .*: clock_s is 'soon': .*number"),
        ("endless", "round is inf: .*integer"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            read_curve(tmp_path / name)
    (tmp_path / "evil").unlink()


def test_the_report_as_json_and_as_a_picture(tmp_path: Path) -> None:
    jobs = [str(journal(tmp_path / name, (5, clock_s, 0.8))) for name, clock_s in (("a", 3600.0), ("b", 1800.0))]
    said = command("report", "--compare", *jobs, "--target", "0.8", "--json", "--plot", str(tmp_path / "p.png"))
    assert said.exit_code == 0, said.exception
    found = json.loads(said.stdout)
    assert [run["reached"]["hours"] for run in found["runs"]] == [1.0, 0.5]
    assert found["runs"][1]["speedup"] == 2.0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    table = command("report", *jobs, "--target", "0.8", "--json", str(tmp_path / "found.json")).stdout
    assert table == command("report", *jobs, "--target", "0.8").stdout != ""
    assert json.loads((tmp_path / "found.json").read_text()) == found
    for words, why in (
        ((jobs[0], "--target", "x"), "--target 'x' is not a number"),
        ((), "which jobs"), ((jobs[0], "--target", "200"), "use a share such as 0.8"), ((jobs[0], "--metric", "x"), "use one of"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            raise command("report", *words).exception


# --- a selector on its own: scenario 2 ---


def picks(seed: int, rounds: int, trace: str, *more: str) -> str:
    said = command(
        "fed",
        "select",
        "--trace",
        trace,
        "--replay",
        str(REPLAY),
        "--seed",
        str(seed),
        "--rounds",
        str(rounds),
        "--json",
        *more,
    )
    assert said.exit_code == 0, said.exception
    return str(said.stdout)


def test_golden_selection(fed_data: Path) -> None:
    trace = str(fed_data / "devices.csv")
    text = picks(7, 60, trace)
    assert picks(7, 60, trace) == text
    assert picks(8, 60, trace) != text
    found: dict[str, Any] = json.loads(text)
    assert len(found["rounds"]) == 60
    for each in found["rounds"]:
        assert len(each["picked"]) == len(set(each["picked"])) == int(10 * 1.3) == found["invited"]
        assert len(each["aggregated"]) == 10
        assert set(each["aggregated"]) <= set(each["picked"])


def test_exploration_decays_to_its_floor_and_t_moves_at_multiples_of_w_only() -> None:
    rounds = json.loads(picks(7, 100, "synthetic", "--selector", "oort:paper"))["rounds"]
    for each in rounds:
        assert each["exploration"] == pytest.approx(max(0.2, 0.9 * 0.98 ** each["rounds_before"]))
    assert rounds[74]["exploration"] > 0.2
    assert rounds[75]["exploration"] == 0.2
    moved = [
        after["rounds_before"] for before, after in itertools.pairwise(rounds) if before["round_s"] != after["round_s"]
    ]
    assert moved
    assert all(number % 20 == 0 for number in moved)


def test_other_selectors_and_what_is_wrong_with_a_replay(tmp_path: Path) -> None:
    assert json.loads(picks(7, 3, "equal", "--selector", "random"))["selector"] == {"kind": "random"}
    assert json.loads(picks(7, 3, "equal", "--selector", "oort:artifact"))["selector"]["preset"] == "artifact"
    own = json.loads(REPLAY.read_text()) | {"selector": {"kind": "oort", "seed": 7}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert (
        json.loads(command("fed", "select", "--replay", str(tmp_path / "own.json"), "--rounds", "1", "--json").stdout)[
            "seed"
        ]
        == 7
    )
    assert json.loads(command("fed", "select", "--replay", "50", "--rounds", "2", "--json").stdout)["clients"] == 50
    (tmp_path / "r.json").write_text('{"clients": [{"size": 0, "losses": [1]}], "partcipants": 3}')
    for words, why in (
        (("--replay", str(tmp_path / "r.json")), "clients.0.size 0: use 1 or more.*did you mean participants"),
        (("--replay", "nope.json"), "nope.json: No such file"),
        (("--replay", str(REPLAY), "--trace", "nope"), "nope: No such file"),
        (("--rounds", "0"), "--rounds 0: use 1 or more"),
        (("--selector", "best"), "selector 'best' is unknown"),
    ):
        with pytest.raises(ConfigError, match=why):
            raise command("fed", "select", *words).exception
