"""The list of running jobs: who is on it, who is not, and whom it does not believe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.launch.registry import RunningJob, choose, registered, running_jobs, start_ticks

URL = "http://127.0.0.1:9100/config"
COMMAND = ("python", "my train.py", "--lr", "1")


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    tmp_path.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def mine(environ: Mapping[str, str]) -> list[RunningJob]:
    """What is listed in the test's own directory; the user may have other jobs running."""
    return [job for job in running_jobs(environ) if job.config_server == URL]


def test_a_job_is_listed_while_it_runs(environ: Mapping[str, str], tmp_path: Path) -> None:
    with registered(URL, COMMAND, host="127.0.0.1", token="s3cret", environ=environ) as job:
        assert mine(environ) == [job]
        assert (job.pid, job.command, job.host) == (os.getpid(), "python 'my train.py' --lr 1", "127.0.0.1")
        assert job.id == f"my_train-{os.getpid()}"
        assert "s3cret" not in repr(job) + str(job)
        file = tmp_path / "pliant" / "jobs" / f"{os.getpid()}.json"
        assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)] == ["0o600", "0o700"]
        assert {"id", "pid", "started_s", "config_server", "command", "host"} <= set(json.loads(file.read_text()))
    assert mine(environ) == []
    assert list((tmp_path / "pliant" / "jobs").iterdir()) == []


def test_a_job_that_fails_is_taken_off_the_list(environ: Mapping[str, str]) -> None:
    with pytest.raises(RuntimeError), registered(URL, COMMAND, host="127.0.0.1", environ=environ):
        raise RuntimeError
    assert mine(environ) == []


@pytest.mark.processes
def test_a_forked_child_does_not_take_its_parent_off_the_list(environ: Mapping[str, str]) -> None:
    program = (
        "import os, sys; from pliant.launch.registry import registered, running_jobs\n"
        f"with registered({URL!r}, ('x',), host='h'):\n"
        "    child = os.fork()\n"
        "    if child: os.waitpid(child, 0); print(os.getpid() in [job.pid for job in running_jobs()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(environ), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.processes
def test_the_jobs_of_dead_runners_are_dropped(environ: Mapping[str, str], tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    assert dead.wait(60) == 0
    with registered(URL, COMMAND, host="127.0.0.1", environ=environ) as job:
        folder = tmp_path / "pliant" / "jobs"
        for pid, ticks in ((dead.pid, job.start_ticks), (os.getppid(), (start_ticks(os.getppid()) or 0) + 1)):
            gone = replace(job, pid=pid, start_ticks=ticks)
            (folder / f"{pid}.json").write_text(json.dumps(asdict(gone)))
        (folder / "1.json").write_text("{")
        (folder / "2.json").write_text('{"pid": 1}')
        (folder / "3.json").write_text(json.dumps({**asdict(job), "pid": True}))
        assert mine(environ) == [job]
        assert not (folder / f"{dead.pid}.json").exists()
        assert not (folder / f"{os.getppid()}.json").exists(), "another process has got that id"


@pytest.mark.processes
def test_the_remains_of_a_process_are_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert (start_ticks(child.pid) or 0) >= (start_ticks(os.getpid()) or 0) > 0
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None
    assert start_ticks(2**22 + 1) is None


@pytest.mark.parametrize("where", ["pliant/jobs", "pliant", "."])
def test_a_directory_that_others_can_write_to_is_not_believed(
    environ: Mapping[str, str], tmp_path: Path, where: str
) -> None:
    with registered(URL, COMMAND, host="127.0.0.1", environ=environ):
        assert len(mine(environ)) == 1
        (tmp_path / where).chmod(0o777)
        assert mine(environ) == []
        (tmp_path / where).chmod(0o700)


def test_a_job_runs_although_it_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.launch.registry._folders", lambda environ: [tmp_path / "a file" / "pliant" / "jobs"])
    (tmp_path / "a file").write_text("")
    with registered(URL, COMMAND, host="127.0.0.1"):
        assert "give it --config-server" in caplog.text


def test_without_a_runtime_directory_there_is_another_place() -> None:
    with registered(URL, COMMAND, host="127.0.0.1", environ={}) as job:
        assert job in running_jobs({})
    with registered(URL, COMMAND, host="127.0.0.1", environ={"XDG_RUNTIME_DIR": "/proc/nowhere"}) as job:
        assert job in running_jobs({})
    assert job not in running_jobs({})


JOBS = [
    RunningJob(id=f"train-{pid}", pid=pid, started_s=0, start_ticks=1, config_server=URL, command="train.py", host="h")
    for pid in (11, 12)
]


def test_the_only_job_needs_no_name() -> None:
    assert choose(JOBS[:1]) is JOBS[0]
    assert choose(JOBS, "train-12") is choose(JOBS, "12") is JOBS[1]


@pytest.mark.parametrize(
    ("jobs", "wanted", "reason"),
    [
        ([], "", "start one with `pliant run -w"),
        ([], "11", "--job 11: no job"),
        (JOBS, "", f"(?s)2 jobs are running: say which with --job ID\n.*train-11  pid 11  {URL}  since .*train-12"),
        (JOBS, "13", "(?s)--job 13 is none of the running jobs.*train-11"),
    ],
)
def test_no_job_and_several_jobs_are_said_clearly(jobs: list[RunningJob], wanted: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(jobs, wanted)
