"""Wrong traces, job files and federated job files: refused at once with file and line, and never with a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoints
from pathlib import Path

import bad_files
import pytest
from bad_files import ARTIFACT, FEDERATED, JOB, SIM, TRACES, BadFile, artifact_text, trace_text, yaml_text

from pliant.errors import MAX_TOLD
from pliant.jobs.schema import read_job

Said = tuple[int, str, str]
LIMIT_S = 2.0
CORPUS = bad_files.all_bad_files()
MAIN = "from pliant.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture(autouse=True)
def _only_our_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make the commands of other packages takes longer than most cases."""
    monkeypatch.setattr("pliant.cli.main.entry_points", lambda group: EntryPoints())


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """In a process of its own a command imports what it needs, which takes longer than to refuse a file."""
    import pliant.fed.aggregation
    import pliant.fed.coordinator
    import pliant.fed.data.build
    import pliant.sched.compare  # noqa: F401


def words_of(case: BadFile, file: Path) -> list[str]:
    return [str(file) if word == "FILE" else word for word in case.command]


def check_refusal(case: BadFile, file: Path, code: int, out: str, err: str) -> None:
    assert (code, out) == (2, ""), err
    assert err.startswith(f"pliant: {file}:"), err
    lines = [int(number) for number in re.findall(rf"^(?:pliant: )?{re.escape(str(file))}:(\d+): ", err, re.M)]
    assert lines, err
    assert not case.line or case.line in lines, err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= MAX_TOLD + 2
    assert len(err) < 10_000


def test_the_corpus_is_large_and_no_case_is_there_twice() -> None:
    assert len(CORPUS) >= 200
    twice = [name for name, count in Counter(case.name for case in CORPUS).items() if count > 1]
    assert not twice
    kinds = Counter(case.name.partition(":")[0] for case in CORPUS)
    assert min(kinds[kind] for kind in ("trace", "job", "federated")) >= 50


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_a_wrong_file_is_refused_with_its_line(pliant: Callable[..., Said], folder: Path, case: BadFile) -> None:
    file = folder / f"wrong{case.suffix}"
    file.write_bytes(case.data)
    begin_s = time.process_time()  # other tests may run beside this one
    said = pliant(*words_of(case, file))
    assert time.process_time() - begin_s < LIMIT_S
    check_refusal(case, file, *said)


@pytest.mark.parametrize("form", TRACES)
def test_the_good_traces_are_accepted(pliant: Callable[..., Said], folder: Path, form: str) -> None:
    (folder / "good.csv").write_text(trace_text(TRACES[form]))
    code, out, err = pliant(*SIM, "--trace", "good.csv", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["trace"]["skipped_rows"] == 0


@pytest.mark.parametrize(
    "text", [yaml_text(JOB), yaml_text(FEDERATED), artifact_text(ARTIFACT)], ids=["job", "federated", "artifact"]
)
def test_the_good_job_files_are_accepted(folder: Path, text: str) -> None:
    (folder / "good.yml").write_text(text)
    assert read_job(folder / "good.yml").name in ("digits", "fed", "art")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "trace: easyscale, batch_size '0'",
        "trace: philly, duration 'nan'",
        "trace: log, nested",
        "job: a bomb",
        "federated: rounds '.nan'",
    ],
)
def test_real_processes_refuse_as_fast(folder: Path, name: str) -> None:
    case = next(case for case in CORPUS if case.name == name)
    file = folder / f"wrong{case.suffix}"
    file.write_bytes(case.data)
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    command = [
        sys.executable,
        "-c",
        f"import resource\ntry:\n    {MAIN}\nfinally:\n    print(resource.getrusage(0).ru_utime)",
    ]
    done = subprocess.run(
        [*command, *words_of(case, file)], capture_output=True, text=True, timeout=60, env=environ, check=False
    )
    check_refusal(case, file, done.returncode, "", done.stderr)
    assert float(done.stdout) < LIMIT_S, "processor time: other tests may run beside this one"


# --- all mistakes at once ---


def test_all_mistakes_of_a_trace_are_told_and_of_many_the_rest_is_counted(
    pliant: Callable[..., Said], folder: Path
) -> None:
    rows = ["timestamp,duration,num_gpus", "nan,-1,x", "5,10,1", "-5,6,1", '7,"8,1']
    (folder / "t.csv").write_text("\n".join(rows) + "\n")
    code, _, err = pliant(*SIM, "--trace", "t.csv")
    assert code == 2
    assert err.splitlines() == [
        "pliant: t.csv:2: timestamp 'nan': use seconds from 0 to 100,000,000,000",
        "t.csv:2: num_gpus 'x': use a whole number from 0 to 65,536",
        "t.csv:2: duration '-1': use seconds from 0 to 31,622,400",
        "t.csv:4: timestamp '-5': use seconds from 0 to 100,000,000,000",
        "t.csv:5: no row of a CSV file: unexpected end of data; is a quote not closed?",
        "3 of 4 rows are wrong: mend them, or add --skip-bad to go on without them",
    ]
    (folder / "t.csv").write_text("timestamp,duration,num_gpus\n5,10,1\n" + "x,y,z\n" * 100)
    _, _, err = pliant(*SIM, "--trace", "t.csv")
    assert err.splitlines()[MAX_TOLD:] == [
        "and 280 more mistakes",
        "100 of 101 rows are wrong: mend them, or add --skip-bad to go on without them",
    ]


def test_wrong_rows_are_skipped_and_counted_if_that_is_asked_for(pliant: Callable[..., Said], folder: Path) -> None:
    lines = [*TRACES["philly"], "x,10,1,1,a", '2017-10-09 00:09:56,"30,1,1,a', "2017-10-09 00:11:56,30,0,1,a"]
    (folder / "t.csv").write_text("\n".join([*lines, "2017-10-09 00:12:56,40,1,1,a"]) + "\n")
    code, out, err = pliant(*SIM, "--trace", "t.csv", "--skip-bad")
    assert (code, err) == (0, "")
    assert "4 jobs of t.csv" in out
    assert "note: 2 wrong rows were skipped: lines 5, 6" in out
    assert "note: 1 of 7 rows have no GPU, or no duration" in out
    code, out, _ = pliant(*SIM, "--trace", "t.csv", "--skip-bad", "--json")
    assert json.loads(out)["trace"] == {"format": "philly", "jobs": 4, "unused_rows": 1, "skipped_rows": 2}
    (folder / "t.csv").write_text("timestamp,duration,num_gpus\nx,y,z\n")
    code, _, err = pliant(*SIM, "--trace", "t.csv", "--skip-bad")
    assert code == 2
    assert err.startswith("pliant: t.csv:1: no job in it that uses a GPU for a time, and 1 wrong row")


def test_a_log_that_is_cut_off_is_used_as_far_as_it_goes_if_that_is_asked_for(
    pliant: Callable[..., Said], folder: Path
) -> None:
    (folder / "t.json").write_text(trace_text(TRACES["log"])[:-20])
    assert pliant(*SIM, "--trace", "t.json")[0] == 2
    code, out, _ = pliant(*SIM, "--trace", "t.json", "--skip-bad", "--json")
    assert code == 0
    assert json.loads(out)["trace"]["skipped_rows"] == 1


def test_mistakes_of_values_and_of_what_does_not_fit_together_are_told_together(
    pliant: Callable[..., Said], folder: Path
) -> None:
    (folder / "j.yml").write_text(
        "program: gone.py\nreplicas: 2\nmin: 3\nmax: 4\nworkers: 9\nmixed: true\norder: up\nnmae: x\n"
    )
    code, _, err = pliant("submit", "j.yml")
    assert code == 2
    assert [line.removeprefix("pliant: ")[:17] for line in err.splitlines()] == [
        "j.yml:1: program ", "j.yml:3: min 3 is", "j.yml:4: max 4: w", "j.yml:5: workers ", "j.yml:6: mixed: u", "j.yml:7: order 'u", "j.yml:8: unknown "
    ]  # fmt: skip


def test_mistakes_of_a_federated_file_are_told_together(pliant: Callable[..., Said], folder: Path) -> None:
    wrong = {
        "participants": "50", "rounds": ".nan", "data": "{kind: digits, clients: 40, alpha: -1, sizes: gone.csv}", "model": "big",
        "local": "{steps: 0, lr: .inf}", "selector": "ort", "aggregator": "fed-best", "devices": "gone.csv", "workers": "-1",
    }  # fmt: skip
    (folder / "f.yml").write_text(yaml_text(wrong))
    code, _, err = pliant("fed", "run", "f.yml")
    assert code == 2
    told = [line.removeprefix("pliant: ").removeprefix("f.yml:").split(":")[0] for line in err.splitlines()]
    assert told == ["1", "2", "3", "3", "4", "5", "5", "6", "7", "8", "9"]
