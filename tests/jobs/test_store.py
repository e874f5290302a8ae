"""The job store: which processes and jobs it lists, what it keeps, and which directories it does not believe."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from patience import until

from pliant.child import start_ticks
from pliant.errors import ConfigError, NameTaken
from pliant.fed.config import FedConfig
from pliant.fed.history import Point, Round
from pliant.fed.rounds.modes import client_losses
from pliant.fed.rounds.storage import JobRecorder
from pliant.jobs.status import federated_progress, stored_statuses
from pliant.jobs.store import (
    ForegroundRun,
    JobStore,
    choose_run,
    foreground_job,
    registered,
    running_jobs,
)
from pliant.record import MAX_LINE_BYTES
from pliant.tokens import state_directory

URL = "http://127.0.0.1:9100/config"
COMMAND = ("python", "my train.py", "--lr", "1")


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"PLIANT_HOME": str(tmp_path / "home")}


def test_where_the_state_is() -> None:
    assert state_directory({"HOME": "/h"}) == Path("/h/.local/state/pliant")
    assert state_directory({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/pliant")
    assert state_directory({"HOME": "/h", "XDG_STATE_HOME": "/s", "PLIANT_HOME": "/p"}) == Path("/p")


# --- processes in the foreground ---


def test_a_job_is_listed_while_it_runs(environ: Mapping[str, str], tmp_path: Path) -> None:
    with registered(URL, COMMAND, host="127.0.0.1", token="s3cret", environ=environ) as run:
        assert running_jobs(environ) == [run]
        assert (run.pid, run.command, run.host) == (os.getpid(), "python 'my train.py' --lr 1", "127.0.0.1")
        assert run.name == f"my_train-{os.getpid()}"
        assert "s3cret" not in repr(run) + str(run)
        modes = [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "home", tmp_path / "home" / "jobs.sqlite")]
        assert modes == ["0o700", "0o600"]
    assert running_jobs(environ) == []


def test_a_job_that_fails_is_taken_off_the_list(environ: Mapping[str, str]) -> None:
    with pytest.raises(RuntimeError), registered(URL, COMMAND, environ=environ):
        raise RuntimeError
    assert running_jobs(environ) == []


@pytest.mark.processes
def test_a_forked_child_does_not_take_its_parent_off_the_list(environ: Mapping[str, str]) -> None:
    program = (
        "import os, sys; from pliant.jobs.store import registered, running_jobs\n"
        f"with registered({URL!r}, ('x',)):\n"
        "    child = os.fork()\n"
        "    if child: os.waitpid(child, 0); print(os.getpid() in [job.pid for job in running_jobs()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(environ), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.processes
def test_dead_processes_are_recognised_and_dropped(environ: Mapping[str, str], tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    assert dead.wait(60) == 0
    with registered(URL, COMMAND, environ=environ) as run, JobStore(tmp_path / "home") as store:
        for pid, ticks in ((dead.pid, run.start_ticks), (os.getppid(), (start_ticks(os.getppid()) or 0) + 1)):
            store.add_run(replace(run, pid=pid, start_ticks=ticks))
        assert store.runs() == [run], "another process has got that id"
        store.add_run(run)
        assert store._open.execute("SELECT COUNT(*) FROM runs").fetchone() == (1,)


@pytest.mark.processes
def test_a_zombie_is_not_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert (start_ticks(child.pid) or 0) >= (start_ticks(os.getpid()) or 0) > 0
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None
    assert start_ticks(2**22 + 1) is None


def test_a_directory_that_others_can_write_to_is_not_believed(environ: Mapping[str, str], tmp_path: Path) -> None:
    with registered(URL, COMMAND, environ=environ):
        (tmp_path / "home").chmod(0o777)
        assert running_jobs(environ) == []
        (tmp_path / "home").chmod(0o700)
        assert len(running_jobs(environ)) == 1


def test_a_job_runs_although_it_cannot_be_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with registered(URL, COMMAND, environ={"PLIANT_HOME": str(tmp_path / "file" / "home")}):
        assert "give them --config-server" in caplog.text


def test_a_job_that_cannot_be_listed_at_first_is_listed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setattr("pliant.jobs.store.LISTING_PERIOD_S", 0.01)
    (tmp_path / "file").write_text("")
    environ = {"PLIANT_HOME": str(tmp_path / "file" / "home")}
    with registered(URL, COMMAND, environ=environ):
        assert running_jobs(environ) == []
        (tmp_path / "file").unlink()
        until(lambda: [job.pid for job in running_jobs(environ)] == [os.getpid()], "the listing", 10)
    assert running_jobs(environ) == []


RUNS = [
    ForegroundRun(name=f"train-{pid}", pid=pid, started_s=0, start_ticks=1, config_server=URL, command="train.py")
    for pid in (11, 12)
]


def test_the_only_job_needs_no_name() -> None:
    assert choose_run(RUNS[:1]) is RUNS[0]
    assert choose_run(RUNS, "train-12") is choose_run(RUNS, "12") is RUNS[1]


@pytest.mark.parametrize(
    ("runs", "wanted", "reason"),
    [
        ([], "", "start one with `pliant run -w"),
        ([], "11", "--job 11: no job"),
        (RUNS, "", f"(?s)2 jobs are running: say which with --job ID\n.*train-11  pid 11  {URL}  since .*train-12"),
        (RUNS, "13", "(?s)--job 13 is none of the running jobs.*train-11"),
    ],
)
def test_no_job_and_several_jobs_are_said_clearly(runs: list[ForegroundRun], wanted: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_run(runs, wanted)


# --- jobs ---


SPEC = {
    "kind": "federated",
    "config": {"name": "a", "rounds": 9, "participants": 4},
    "placement": {"workers": ["2"]},
}


def test_a_tenants_job_stays_its_own_when_it_runs_in_the_foreground(environ: Mapping[str, str], tmp_path: Path) -> None:
    row = {
        "spec": SPEC,
        "number": 1,
        "submitted_s": 1.0,
        "state": "stopped",
        "folder": str(tmp_path),
        "tenant": "vision",
    }
    with JobStore(tmp_path / "home") as store:
        store.save([("a", 1, row)], at_s=1.0, scheduled=False)
    with foreground_job(SPEC, "a", tmp_path, tmp_path / "record.jsonl", environ) as job:
        job.update(state="stopped", exit_code=0)
    with JobStore(tmp_path / "home") as store:
        found = store.job("a")
        assert found is not None
        assert found["tenant"] == "vision"


def test_a_foreground_job_is_running_then_ended_or_interrupted(environ: Mapping[str, str], tmp_path: Path) -> None:
    def status() -> tuple[str, int | None, float | None]:
        with JobStore(tmp_path / "home") as store:
            (job,) = stored_statuses(store.jobs(), store.runs(), store.directory)
        assert job.federated is not None
        return job.state, job.step, job.federated.accuracy

    (tmp_path / "aggregator").mkdir()
    record = tmp_path / "aggregator" / "record.jsonl"
    with foreground_job(SPEC, "a", tmp_path, record, environ):
        assert status() == ("running", 0, None)
        with pytest.raises(NameTaken, match="a is running"), foreground_job(SPEC, "a", tmp_path, record, environ):
            pass
        record.write_text(
            '{"kind": "round", "round": 3, "clock_s": 7.5}\n{"kind": "test", "accuracy": 0.5}\n{"kind": "round", "rou'
        )
    assert status() == ("interrupted", 3, 0.5)
    with foreground_job(SPEC, "a", tmp_path, record, environ) as job:
        job.update(state="failed", exit_code=3, why="no luck")
    assert status() == ("failed", 3, 0.5)
    with JobStore(tmp_path / "home") as store:
        store.forget("a")
        assert store.names() == set()


def test_rounds_of_30000_participants_show_their_progress(tmp_path: Path) -> None:
    """The test is three rounds back, and a round is being written."""
    chance = random.Random(0)
    record = tmp_path / "aggregator" / "record.jsonl"
    with contextlib.closing(JobRecorder(record.parent)) as recorder:
        recorder.begin(FedConfig(name="a", rounds=9), None, {})
        for number in range(1, 6):
            invited = sorted(chance.sample(range(10**7), 39_000))
            done, cut = tuple(invited[:30_000]), tuple(invited[30_000:])
            took_s = tuple(chance.uniform(1, 900) for _ in done)
            losses = client_losses(FedConfig(), [chance.uniform(0, 3) for _ in done])
            recorder.round(
                Round(number, 0.0, 60.0 * number, tuple(invited), done, cut, (), {}, 1.0, 0.1, 10**7, 0, {}, took_s,
                      client_loss=losses)
            )  # fmt: skip
            if number == 2:
                recorder.test(Point(2, 120.0, 0.25, 0.5, 1.0))
    lines = record.read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) < 0.8 * MAX_LINE_BYTES
    record.write_bytes(b"".join(lines) + lines[1][:500_000])
    progress = federated_progress(SPEC, str(tmp_path))
    assert progress is not None
    assert (progress.round, progress.clock_s, progress.accuracy) == (5, 300.0, 0.25)


@pytest.mark.parametrize(
    ("code", "ending", "kind", "state"),
    [
        (0, "", "federated", "finished"),
        (0, "put-off", "federated", "finished"),
        (3, "", "federated", "failed"),
        (143, "", "federated", "interrupted"),
        (143, "stopped", "federated", "stopped"),
        (0, "", "train", "finished"),
        (0, "put-off", "train", "interrupted"),
        (-9, "", "train", "interrupted"),
    ],
)
def test_without_a_server_the_keeper_says_how_a_job_has_ended(
    tmp_path: Path, code: int, ending: str, kind: str, state: str
) -> None:
    spec = SPEC if kind == "federated" else {"kind": "train", "replicas": 4}
    job = {"spec": spec, "folder": str(tmp_path), "state": "running", "submitted_s": 1.0, "run": 2, "ending": ending}
    place = tmp_path / "jobs" / "a" / "run-2"
    place.mkdir(parents=True)
    with JobStore(tmp_path) as store:
        store.save([("a", 1, job)], at_s=1.0)
        (before,) = stored_statuses(store.jobs(), store.runs(), tmp_path)
        (place / "exit.json").write_text(json.dumps({"code": code, "at_s": 7.0}))
        (after,) = stored_statuses(store.jobs(), store.runs(), tmp_path)
    assert before.state == "interrupted"
    assert after.state == state
    assert (after.exit_code, after.ended_s) == ((None, None) if state == "interrupted" else (code, 7.0))


def test_jobs_events_and_settings_are_kept_together_or_not_at_all(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        store.save([("b", 2, {"x": 1})], [("b", "made", "why", {"cpu": 1})], at_s=5.0, reserved={"cpu": 1})
        store.save([("a", 1, {"x": 2})], at_s=6.0, scheduled=False)
        with pytest.raises(TypeError):
            store.save([("c", 3, {"x": object()})], [("c", "made", "", {})], at_s=7.0)
    with JobStore(tmp_path) as store:
        assert [(job["name"], job["scheduled"]) for job in store.jobs()] == [("a", False), ("b", True)]
        assert store.events("b") == [{"at": 5.0, "what": "made", "why": "why", "devices": {"cpu": 1}}]
        assert store.events("c") == []
        assert (store.setting("reserved"), store.setting("none"), store.next_number()) == ({"cpu": 1}, {}, 3)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_text("not a database, but long enough to be looked at" * 40)
    with pytest.raises(ConfigError, match="jobs.sqlite"), JobStore(tmp_path):
        pass
