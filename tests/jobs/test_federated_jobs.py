"""Federated jobs from submission to end, with real processes: started, killed, resumed, stopped, and nothing left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import numpy as np
import pytest
import torch
from patience import until
from typer.testing import CliRunner

from pliant.cli import main
from pliant.errors import CheckpointError, ConfigError, NameTaken, ServerUnavailable, UnknownJob
from pliant.fed.config import FedConfig
from pliant.fed.jobfile import FederatedJob, FedPlacement, make_job_folder
from pliant.fed.rounds.loop import simulate
from pliant.jobs.client import find_server, open_jobs
from pliant.jobs.federated import FederatedFolder
from pliant.jobs.schema import stored_job
from pliant.jobs.store import foreground_job
from pliant.tokens import state_directory
from pliant.train import checkpoint_file

COMMANDS = ("submit", "jobs", "fed", "report")
ARTIFACT = """\
ps_ip: 127.0.0.1
worker_ips:
  - 127.0.0.1:1
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
SLOW_MODEL = """\
import pathlib, time
from torch import nn

class Net(nn.Linear):
    def forward(self, inputs):
        time.sleep(0.02 * pathlib.Path(__file__).with_name("slow").exists())
        return super().forward(inputs.flatten(1))

def model(num_classes):
    return Net(64, num_classes)
"""
"""A user's own model: as long as there is a file `slow` beside it, a round of four clients takes 0.16 s."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user of its own; jobs that are left are killed, the embedded server is ended, and then nothing may run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PLIANT_SERVER", raising=False)
    monkeypatch.delenv("PLIANT_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = [job["name"] for job in jobs() if job["state"] not in ("finished", "failed", "stopped", "interrupted")]
    if left:
        said("stop", "--kill", *left)
    end_server()
    until(lambda: not processes(tmp_path), "nothing of the jobs is left")


@pytest.fixture
def _forks() -> Iterator[None]:
    with forked.forking():
        yield


def end_server(signum: int = signal.SIGTERM) -> None:
    """End the embedded server, if there is one."""
    with contextlib.suppress(ServerUnavailable):
        server = find_server()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signum)
        until(lambda: server.is_gone, "the server has ended")


def processes(home: Path) -> dict[int, str]:
    """Return everything that was started for jobs of this user: it has inherited where the state is."""
    mark, found = f"XDG_STATE_HOME={home / 'state'}".encode(), {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def job_processes(home: Path) -> dict[int, str]:
    """Return the processes of jobs, without the server."""
    return {pid: command for pid, command in processes(home).items() if "--embedded" not in command}


def said(*words: str, code: int = 0) -> Any:
    with mock.patch.object(main, "COMMANDS", COMMANDS):
        answer = CliRunner().invoke(main.build(), words)
    if isinstance(answer.exception, Exception):
        raise answer.exception
    assert answer.exit_code == code, answer.output
    return answer


def jobs() -> list[dict[str, Any]]:
    with open_jobs() as opened:
        return [job.model_dump(mode="json") for job in opened.jobs()]


def listed(name: str) -> dict[str, Any]:
    return next(job for job in jobs() if job["name"] == name)


def rounds_of(name: str) -> int:
    return int(listed(name)["federated"]["round"])


def folder_of(name: str) -> FederatedFolder:
    return FederatedFolder(Path(listed(name)["folder"]))


def started(name: str, what: str = "started") -> dict[str, int]:
    """Return the coordinator's process, as the keeper of the last run has written it down."""
    runs = sorted((state_directory() / "jobs" / name).glob(f"run-*/{what}.json"), key=lambda path: path.stat().st_mtime)
    return dict(json.loads(runs[-1].read_text())) if runs else {}


def keeper_of(name: str, home: Path) -> int:
    return next(pid for pid, command in processes(home).items() if "keeper.py" in command and f"/{name}/" in command)


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


def checkpoint(folder: FederatedFolder) -> tuple[int, str]:
    found = checkpoint_file.read(folder.aggregator / "checkpoint.safetensors")
    return found.step, digest(found.state)


def undisturbed(folder: FederatedFolder, path: Path, **other: object) -> tuple[int, str]:
    """The checkpoint that the same job has in one process, without any trouble."""
    simulate(folder.job().config.model_copy(update=other), folder=path / "aggregator")
    return checkpoint(FederatedFolder(path))


def ended_job(home: Path, name: str, state: str = "stopped") -> FederatedFolder:
    """A job that was in the foreground; `running`: its process was killed."""
    job = FederatedJob(config=FedConfig(name=name), placement=FedPlacement(log_path=str(home)), directory=str(home))
    folder = FederatedFolder(make_job_folder(job))
    with foreground_job(job.model_dump(mode="json"), name, folder.path, folder.record) as stored:
        stored["state"] = state
    return folder


def test_a_folder_holds_its_job_and_is_made_once(tmp_path: Path) -> None:
    job = FederatedJob(config=FedConfig(name="a"), placement=FedPlacement(log_path=str(tmp_path)), directory="/")
    folder = FederatedFolder(make_job_folder(job))
    assert folder.path.parent == tmp_path / "logs" / "a"
    assert folder.job() == job
    assert FederatedFolder(make_job_folder(job)).path != folder.path
    old = job.model_dump(mode="json")
    del old["config"]["selector"]["options"]["preset"]
    (folder.path / "job.json").write_text(json.dumps(old))
    assert stored_job(old) == folder.job()
    assert folder.job().config.selector.options == {"preset": "paper"}, "the default when jobs had no name of it"
    assert job.config.selector.options == {"preset": "balanced"}
    with pytest.raises(ConfigError, match="leave time_stamp out"):
        make_job_folder(job.model_copy(update={"time": folder.path.name}))
    (folder.path / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="its job.json is damaged"):
        folder.job()
    assert folder.start_point == "from its beginning"
    (folder.aggregator / "checkpoint.safetensors").touch()
    assert folder.start_point == "from its checkpoint"


def test_ended_jobs_are_listed_and_forgotten_and_their_files_stay(home: Path) -> None:
    gone, lost = ended_job(home, "gone"), ended_job(home, "lost", "running")
    assert [job["state"] for job in json.loads(said("list", "--json").stdout)["jobs"]] == ["stopped", "interrupted"]
    assert "pliant submit --resume lost" in listed("lost")["why"]
    assert "round 0 of 100" in said("list").stdout
    assert "interrupted" in said("show", "lost").stdout
    with pytest.raises(UnknownJob, match="no job 'nosuch': `pliant list` shows the names"):
        said("forget", "gone", "nosuch")
    job = lost.job()
    with foreground_job(job.model_dump(mode="json"), "lost", lost.path, lost.record) as stored:
        with pytest.raises(ConfigError, match="lost is running: `pliant stop lost` ends it first"):
            said("forget", "gone", "lost")
        assert len(jobs()) == 2
        stored["state"] = "failed"
    assert said("forget", "gone").stdout == ""
    assert said("list", "-q").stdout == "lost\n"
    assert gone.job().name == "gone"


def test_a_job_that_nobody_has_is_unknown(home: Path) -> None:
    ended_job(home, "a")
    for command in ("stop", "show", "logs"):
        with pytest.raises(UnknownJob, match="no job 'nosuch'"):
            said(command, "nosuch")
        with pytest.raises(ServerUnavailable):
            said(command, "nosuch", "--server", "http://127.0.0.1:9")


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


@pytest.mark.parametrize("raised", [MemoryError("no room\nat all"), SystemExit("no room at all")])
def test_a_run_that_raises_has_failed_and_was_not_interrupted(
    home: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    (home / "raising.py").write_text("def data(): return 1\n")
    (home / "bad.yml").write_text("participants: 2\nname: bad\ndata: {kind: 'raising:data'}\nworkers: 0\n")
    # whatever is not foreseen; what a user's function raises is told by `fed.data.task`
    monkeypatch.setattr("pliant.jobs.federated.build_task", mock.Mock(side_effect=raised))
    with contextlib.suppress(MemoryError):
        said("fed", "run", "bad.yml", code=1)
    status = listed("bad")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["why"] == f"{type(raised).__name__}: no room at all"
    assert status["ended_s"] is not None
    assert "Traceback" in folder_of("bad").log.read_text()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_second_coordinator_does_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended_job(home, "a")
    monkeypatch.setattr("pliant.jobs.federated.PREDECESSOR_S", 0.0)
    with (
        folder.locked(),
        pytest.raises(CheckpointError, match="another coordinator of this job runs"),
        folder.locked(),
    ):
        pass


@pytest.mark.processes
@pytest.mark.usefixtures("_forks")
@pytest.mark.timeout(180)
def test_a_job_with_the_artifacts_keys_survives_its_coordinator_and_is_listed_told_and_compared(home: Path) -> None:
    (home / "conf.yml").write_text(ARTIFACT)
    answer = said("submit", "conf.yml")
    assert answer.stdout == "digits\n"
    assert "conf.yml:25: moon_phase is not known, and has no effect" in answer.stderr
    assert "no server was running: started one" in answer.stderr
    folder = folder_of("digits")
    assert folder.path.parent == home / "evals" / "logs" / "digits"
    with pytest.raises(ConfigError, match="the name digits is taken"):
        said("submit", "conf.yml")
    until(lambda: rounds_of("digits") >= 15, "15 rounds are done")
    assert listed("digits")["state"] == "running"
    before = started("digits")
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: started("digits") != before, "there is another coordinator")
    said_log = said("logs", "-f", "digits").stdout
    until(lambda: listed("digits")["state"] == "finished", "the job has ended")
    job = listed("digits")
    assert (job["federated"]["round"], job["exit_code"]) == (40, 0), folder.log.read_text()
    assert checkpoint(folder) == undisturbed(folder, home / "alone")
    assert checkpoint(folder) != undisturbed(folder, home / "other", seed=1)
    assert "its runner was killed by signal 9: goes on from its checkpoint" in said("show", "digits").stdout
    assert "goes on after round" in said_log
    assert said("logs", "-n", "1", "-f", "digits").stdout == said_log.splitlines(keepends=True)[-1]
    assert said("stop", "digits").exit_code == 0
    assert [path.name for path in sorted((folder.path / "worker").iterdir())] == ["log"]
    report = json.loads(
        said("report", "--compare", "digits", str(folder.aggregator / "training_perf"), "--json").stdout
    )
    assert [run["reached"]["round"] for run in report["runs"]] == [report["runs"][0]["reached"]["round"]] * 2
    assert report["target"] > 0.5
    until(lambda: not job_processes(home), "no process of a job is left", timeout_s=10)


@pytest.mark.processes
@pytest.mark.usefixtures("_forks")
@pytest.mark.timeout(180)
def test_a_job_survives_its_server_and_keeper_is_resumed_to_the_same_bits_and_can_be_stopped(home: Path) -> None:
    rounds = 60  # ten seconds if all are slow: it must still run when it is told to stop
    (home / "slow_model.py").write_text(SLOW_MODEL)
    (home / "slow").touch()
    (home / "small.yml").write_text(
        OURS.replace("rounds: 80", f"rounds: {rounds}").replace("model: mlp", "model: slow_model:model")
    )
    said("submit", "small.yml")
    folder = folder_of("small")
    until(lambda: rounds_of("small") >= 5, "5 rounds are done")
    end_server(signal.SIGKILL)
    done = rounds_of("small")
    until(lambda: rounds_of("small") > done, "it goes on without a server")
    os.kill(keeper_of("small", home), signal.SIGKILL)
    os.kill(started("small")["pid"], signal.SIGKILL)
    until(lambda: not processes(home), "nothing of it is left")
    until(lambda: listed("small")["state"] == "interrupted", "its process has died")
    assert "pliant submit --resume small" in listed("small")["why"]
    done = rounds_of("small")
    assert said("submit", "--resume", "small").stdout == "small\n"
    with pytest.raises(NameTaken, match="small is (starting|running): it need not be resumed"):
        said("submit", "--resume", "small")
    until(lambda: rounds_of("small") > done, "it goes on")
    said("stop", "small")
    assert listed("small")["state"] == "stopped"
    assert rounds_of("small") < rounds
    until(lambda: not job_processes(home), "no process of a job is left", timeout_s=10)
    (home / "slow").unlink()
    said("fed", "run", "--resume", "small")
    assert (listed("small")["state"], listed("small")["scheduled"]) == ("finished", False)
    assert checkpoint(folder) == undisturbed(folder, home / "alone")
    with pytest.raises(ConfigError, match="small has finished: there is nothing to go on with"):
        said("submit", "--resume", "small")


@pytest.mark.processes
@pytest.mark.usefixtures("_forks")
@pytest.mark.timeout(180)
def test_what_cannot_run_ends_with_the_reason_and_kill_waits_for_nothing(home: Path) -> None:
    (home / "mine.py").write_text("def data(): raise ValueError('no data today')\n")
    (home / "bad.yml").write_text("participants: 2\nname: bad\ndata: {kind: 'mine:data'}\nworkers: 0\n")
    said("submit", "bad.yml", "--wait", code=2)
    assert "no data today" in listed("bad")["why"]
    (home / "long.yml").write_text(OURS.replace("name: small", "name: long").replace("workers: 0", "workers: 1"))
    said("submit", "long.yml")
    first = until(lambda: started("long"), "there is a coordinator")
    os.kill(first["pid"], signal.SIGKILL)  # before it listens: the next one must have workers all the same
    until(lambda: rounds_of("long") >= 1, "a round is done")
    said("stop", "--kill", "long")
    assert listed("long")["state"] == "stopped"
    until(lambda: not job_processes(home), "no process of a job is left", timeout_s=10)
