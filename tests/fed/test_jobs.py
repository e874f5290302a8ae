"""Federated jobs from submission to end, with real processes: kept, killed, resumed, stopped, and nothing left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from patience import until
from typer.testing import CliRunner

from pliant.cli import main
from pliant.errors import ConfigError, NameTaken, ServerUnavailable, UnknownJob
from pliant.fed.config import FedConfig
from pliant.fed.jobs import detached
from pliant.fed.jobs.folders import JobFolder, Jobs
from pliant.fed.jobs.job import FedJob, Ground, rounds_text
from pliant.fed.jobs.keeper import Restarts
from pliant.fed.rounds.loop import simulate
from pliant.train import checkpoint_file

DEADLINE_S = 90.0
COMMANDS = ("submit", "list_jobs", "logs", "stop", "forget", "show", "fed", "report")
ARTIFACT = """\
ps_ip: 127.0.0.1
worker_ips:
  - 127.0.0.1:2
exp_path: $HOME/pliant
auth: {ssh_user: "", ssh_private_key: none}
job_conf:
  - job_name: digits
  - log_path: ./evals
  - total_worker: 4
  - num_clients: 30
  - data_set: digits
  - model: mlp
  - task: cv
  - filter_less: 1
  - sample_mode: oort
  - gradient_policy: yogi
  - epochs: 40
  - upload_epoch: 2
  - batch_size: 5
  - learning_rate: 0.05
  - eval_interval: 10
  - overcommit: 1.3
  - skip_partition: False
  - batching: 2
  - moon_phase: full
"""
OURS = """\
name: small
participants: 4
rounds: 80
data: {kind: digits, clients: 30}
model: mlp
local: {steps: 2, batch_size: 5, lr: 0.1}
evaluate_every: 20
checkpoint_every: 5
batching: 0
workers: 0
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user of its own; whatever jobs are left are ended, and then nothing of theirs may run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PLIANT_SERVER", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for folder in Jobs.of_user().all():
        detached.stop(folder, kill=True)
    until(lambda: not processes(tmp_path), "nothing of the jobs is left")


def processes(home: Path) -> dict[int, str]:
    """Everything that was started for jobs of this user: it has inherited where the state is."""
    mark, found = f"XDG_STATE_HOME={home / 'state'}".encode(), {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def said(*words: str, code: int = 0) -> Any:
    with mock.patch.object(main, "COMMANDS", COMMANDS):
        answer = CliRunner().invoke(main.build(), words)
    if isinstance(answer.exception, Exception):
        raise answer.exception
    assert answer.exit_code == code, answer.output
    return answer


def listed(name: str) -> dict[str, Any]:
    return next(job for job in json.loads(said("list", "--json").stdout)["federated"] if job["name"] == name)


def digest(value: object) -> str:
    """Of all that a job goes on from: model, aggregator, selector, clock."""
    if isinstance(value, dict):
        parts = [f"{key}={digest(each)}" for key, each in sorted(value.items())]
    elif isinstance(value, list | tuple):
        parts = [digest(each) for each in value]
    elif isinstance(value, torch.Tensor | np.ndarray):
        parts = [str(value.shape), str(value.dtype), hashlib.sha256(np.asarray(value).tobytes()).hexdigest()]
    else:
        parts = [repr(value)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def checkpoint(folder: JobFolder) -> tuple[int, str]:
    found = checkpoint_file.read(folder.aggregator / "checkpoint.safetensors")
    return found.step, digest(found.state)


def undisturbed(folder: JobFolder, path: Path, **other: object) -> tuple[int, str]:
    """The checkpoint that the same job has in one process, without any trouble."""
    simulate(folder.job().config.model_copy(update=other), folder=path / "aggregator")
    return checkpoint(JobFolder(path))


def test_where_jobs_are_and_how_they_are(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "home")
    job = FedJob(config=FedConfig(name="a", rounds=9), ground=Ground(log_path=str(tmp_path / "x")), directory="/")
    folder = jobs.create(job)
    assert folder.path.parent == tmp_path / "x" / "logs" / "a"
    assert jobs.find("a") == folder
    assert folder.job() == job
    assert (folder.status().state, folder.status().is_over) == ("interrupted", True)
    with folder.minded():
        assert folder.status().state == "running"
        with pytest.raises(NameTaken, match="the name a is taken by a job that runs"):
            jobs.create(job)
        with pytest.raises(NameTaken), folder.minded():
            pass
    (folder.aggregator / "record.jsonl").write_text(
        '{"kind": "round", "round": 3, "clock_s": 7.5}\n{"kind": "test", "accuracy": 0.5}\n{"kind": "round", "rou'
    )
    folder.end("failed", 3, "no luck")
    status = folder.status()
    assert (status.state, status.why, status.exit_code, status.round, status.accuracy) == (
        "failed",
        "no luck",
        3,
        3,
        0.5,
    )
    again = jobs.create(job)
    assert again.path != folder.path
    assert jobs.find("a") == again
    assert [each.path for each in jobs.all()] == [again.path]
    with pytest.raises(ConfigError, match="leave time_stamp out"):
        jobs.create(job.model_copy(update={"time": again.path.name}))
    with pytest.raises(UnknownJob, match="no federated job is called 'b': there are a"):
        jobs.find("b")


def test_a_server_that_gets_no_further_is_not_started_for_ever() -> None:
    restarts = Restarts()
    assert [restarts.after(checkpoint_s) for checkpoint_s in (5.0, 6.0, 6.0, 7.0)] == [0.0, 0.0, 0.8, 0.0]
    assert [restarts.after(7.0) for _ in range(4)] == [0.8, 1.6, 3.0, None]


def test_a_damaged_job_does_not_hide_the_others(home: Path) -> None:
    for name in ("a", "b"):
        Jobs.of_user().create(
            FedJob(config=FedConfig(name=name), ground=Ground(log_path=str(home)), directory=str(home))
        )
    (Jobs.of_user().find("a").path / "job.json").write_text("{")
    answer = said("list", "-q")
    assert answer.stdout == "b\n"
    assert "its job.json is damaged" in answer.stderr
    assert "round 0 of 100" in said("list").stdout
    assert "interrupted" in said("show", "b").stdout


def named(home: Path, name: str) -> JobFolder:
    """A job that nobody has begun."""
    job = FedJob(config=FedConfig(name=name), ground=Ground(log_path=str(home)), directory=str(home))
    return Jobs.of_user().create(job)


def test_ended_jobs_are_forgotten_and_their_files_stay(home: Path) -> None:
    gone, runs = named(home, "gone"), named(home, "runs")
    with runs.minded():
        with pytest.raises(ConfigError, match="runs: still running; `pliant stop` ends a job"):
            said("forget", "gone", "runs")
        with pytest.raises(UnknownJob, match="no federated job is called 'nosuch': there are gone, runs"):
            said("forget", "gone", "nosuch")
        assert Jobs.of_user().names() == {"gone", "runs"}
        assert said("forget", "gone").stdout == ""
    assert said("list", "-q").stdout == "runs\n"
    assert gone.status().name == "gone"


def test_a_job_that_nobody_has_is_unknown(home: Path) -> None:
    named(home, "a")
    for command in ("stop", "show", "logs"):
        with pytest.raises(UnknownJob, match="no job is called nosuch: there are a, and no server of a cluster"):
            said(command, "nosuch")
        with pytest.raises(ServerUnavailable):
            said(command, "nosuch", "--server", "http://127.0.0.1:9")


def test_a_job_goes_on_from_its_checkpoint_or_its_beginning(home: Path) -> None:
    folder = named(home, "a")
    assert folder.status().why.endswith("`pliant submit --resume a` goes on from its beginning")
    folder.checkpoint.touch()
    assert folder.status().why.endswith("goes on from its checkpoint")


def test_a_log_path_that_cannot_be_is_told_with_its_line(home: Path) -> None:
    (home / "file").touch()
    (home / "ours.yml").write_text("participants: 2\nlog_path: file/below\n")
    (home / "theirs.yml").write_text(ARTIFACT.replace("./evals", "file/below"))
    for name, line in (("ours", 2), ("theirs", 8)):
        with pytest.raises(ConfigError) as refused:
            said("submit", f"{name}.yml")
        assert str(refused.value) == (
            f"{name}.yml:{line}: log_path {home}/file/below: Not a directory; give a folder that can be written to"
        )


def test_why_there_are_no_more_rounds() -> None:
    config = FedConfig(target=0.57)
    told = [rounds_text(2, why, config) for why in ("rounds", "target", "stopped")]
    assert told == [
        "2 rounds, all that were asked for", "2 rounds until the target of 57% was reached", "2 rounds until it was told to stop",
    ]  # fmt: skip


@pytest.mark.parametrize("raised", [MemoryError("no room\nat all"), SystemExit("no room at all")])
def test_a_run_that_raises_has_failed_and_was_not_interrupted(
    home: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    (home / "raising.py").write_text("def data(): return 1\n")
    (home / "bad.yml").write_text("participants: 2\nname: bad\ndata: {kind: 'raising:data'}\nworkers: 0\n")
    # whatever is not foreseen; what a user's function raises is told by `fed.data.task`
    monkeypatch.setattr("pliant.fed.jobs.server.build_task", mock.Mock(side_effect=raised))
    with contextlib.suppress(MemoryError):
        said("fed", "run", "bad.yml", code=1)
    folder = Jobs.of_user().find("bad")
    status = folder.status()
    assert (status.state, status.exit_code) == ("failed", 1)
    assert status.why == f"{type(raised).__name__}: no room at all"
    assert status.ended_s is not None
    assert "Traceback" in folder.log.read_text()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_second_keeper_writes_nothing(home: Path) -> None:
    folder = named(home, "a")
    other = named(home, "b")
    before = sorted(folder.path.iterdir())

    def kept(*lock: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-P", "-m", "pliant.fed.jobs.keeper", str(folder.path), *map(str, lock)]
        return subprocess.run(words, pass_fds=lock, capture_output=True, text=True, timeout=50, check=False)

    with folder.minded(), other.minded() as strange:
        answer = kept()
        assert (answer.returncode, answer.stderr) == (
            2,
            "pliant: a is running: stop it first, or give another --name\n",
        )
        answer = kept(strange)
        assert answer.returncode == 2
        assert f"descriptor {strange} does not hold this job's lock" in answer.stderr
        assert sorted(folder.path.iterdir()) == sorted([*before, folder.path / "lock"])


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_job_with_the_artifacts_keys_survives_its_server_and_is_listed_told_and_compared(home: Path) -> None:
    (home / "conf.yml").write_text(ARTIFACT)
    answer = said("submit", "conf.yml")
    assert answer.stdout == "digits\n"
    assert "conf.yml:25: moon_phase is not known, and has no effect" in answer.stderr
    folder = Jobs.of_user().find("digits")
    assert folder.path.parent == home / "evals" / "logs" / "digits"
    with pytest.raises(NameTaken, match="the name digits is taken"):
        said("submit", "conf.yml")
    until(lambda: folder.progress()[0] >= 15, "15 rounds are done")
    assert listed("digits")["state"] == "running"
    before = folder.read("server.json")
    assert before is not None
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: folder.read("server.json") != before, "there is another server")
    until(lambda: not folder.is_minded(), "the job has ended")
    job = listed("digits")
    assert (job["state"], job["round"], job["exit_code"]) == ("finished", 40, 0), folder.log.read_text()
    assert checkpoint(folder) == undisturbed(folder, home / "alone")
    assert checkpoint(folder) != undisturbed(folder, home / "other", seed=1)
    log = said("logs", "digits").stdout
    assert "the server was killed (signal 9); it goes on from its checkpoint" in log
    assert "goes on after round" in log
    assert said("logs", "-n", "1", "-f", "digits").stdout == log.splitlines(keepends=True)[-1]
    assert said("stop", "digits").exit_code == 0
    assert [path.name for path in sorted((folder.path / "worker").iterdir())] == ["log_0", "log_1"]
    report = json.loads(
        said("report", "--compare", "digits", str(folder.aggregator / "training_perf"), "--json").stdout
    )
    assert [run["reached"]["round"] for run in report["runs"]] == [report["runs"][0]["reached"]["round"]] * 2
    assert report["target"] > 0.5
    assert not processes(home)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_job_whose_keeper_was_killed_is_resumed_to_the_same_bits_and_can_be_stopped(home: Path) -> None:
    rounds = 110  # some seconds: it must still run when it is told to stop
    (home / "small.yml").write_text(OURS.replace("rounds: 80", f"rounds: {rounds}"))
    said("submit", "small.yml")
    folder = Jobs.of_user().find("small")
    until(lambda: folder.progress()[0] >= 12, "12 rounds are done")
    keeper = folder.keeper()
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not processes(home), "the server ends with its keeper")
    assert listed("small")["state"] == "interrupted"
    assert "pliant submit --resume small" in listed("small")["why"]
    done = folder.progress()[0]
    assert said("submit", "--resume", "small").stdout == "small\n"
    with pytest.raises(NameTaken, match="small is running"):
        said("submit", "--resume", "small")
    until(lambda: folder.progress()[0] > done, "it goes on")
    said("stop", "small")
    job = listed("small")
    assert (job["state"], job["why"]) == ("stopped", "after its round")
    assert job["round"] < rounds
    assert not processes(home)
    said("fed", "run", "--resume", "small")
    assert listed("small")["state"] == "finished"
    assert checkpoint(folder) == undisturbed(folder, home / "alone")
    with pytest.raises(ConfigError, match="small has finished: there is nothing to go on with"):
        said("submit", "--resume", "small")


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_what_cannot_run_ends_with_the_reason_and_kill_waits_for_nothing(home: Path) -> None:
    (home / "mine.py").write_text("def data(): raise ValueError('no data today')\n")
    (home / "bad.yml").write_text("participants: 2\nname: bad\ndata: {kind: 'mine:data'}\nworkers: 0\n")
    said("submit", "bad.yml", "--wait", code=2)
    assert "no data today" in listed("bad")["why"]
    (home / "long.yml").write_text(OURS.replace("name: small", "name: long").replace("workers: 0", "workers: 1"))
    said("submit", "long.yml")
    folder = Jobs.of_user().find("long")
    until(lambda: folder.read("server.json"), "there is a server")
    first = folder.read("server.json")
    assert first is not None
    os.kill(first["pid"], signal.SIGKILL)  # before it listens: the next one must have executors all the same
    assert not (folder.path / "port").exists()
    until(lambda: folder.progress()[0] >= 1, "a round is done")
    said("stop", "--kill", "long")
    assert listed("long")["state"] == "stopped"
    assert not processes(home)
