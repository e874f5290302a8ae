"""Workers of a bench that are forked from one warm process: the same answers, and without that process only more time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import forked
import pytest
import torch._inductor.config
from pliant_repro import contest, forked_worker, forking
from pliant_repro.bench.gpu_parts import Clock, GpuOptions, ask_all, started
from pliant_repro.contest import Contender
from pliant_repro.forking import ForkedProcess, WarmSource

from pliant.child import start_ticks

OPTIONS = GpuOptions(part="bits", device="cpu", tiny=True, order="ddp")
DIGESTS = {"do": "digests", "iterations": 2}
TASKS = {
    "free": OPTIONS.task("lstm", "eager", "plain", strict=False, seed=5),
    "ours": OPTIONS.task("lstm", "eager", num_workers=2, replicas=2, seed=5),
    "ddp": OPTIONS.task("lstm", "eager", "ddp", num_workers=2, replicas=2, seed=5),
}


def answers_of(contenders: Mapping[str, Contender]) -> dict[str, object]:
    """Digests and settings of each contender; the settings include what cuBLAS is told by the environment."""
    answers = ask_all([*contenders.values()], DIGESTS, Clock(60.0))
    return {
        name: [[first["settings"], *given.values()] for first, given in zip(each.ready_answers, answers[name], strict=True)]
        for name, each in contenders.items()
    }  # fmt: skip


def processes_of(contenders: Mapping[str, Contender]) -> list[contest.Process]:
    return [process for each in contenders.values() for process in each._processes]


def train(*, is_forked: bool) -> dict[str, object]:
    with started(TASKS, lambda what, fraction: None, Clock(60.0)) as contenders:
        assert [isinstance(each, ForkedProcess) for each in processes_of(contenders)] == [is_forked] * len(TASKS)
        return answers_of(contenders)


@pytest.mark.processes
def test_a_forked_contender_answers_as_one_with_a_python_of_its_own() -> None:
    with forked.forking():
        expected = train(is_forked=False)
        with forking.warm_process(contest.clean_environ()) as cold:
            assert train(is_forked=True) == expected
            with forking.warm_process({}) as inner:
                assert inner is cold
        assert cold.reasons == []
    ours, ddp = (expected[name][0][1] for name in ("ours", "ddp"))  # type: ignore[index]
    assert ours == ddp
    assert len(ours) == 2


@pytest.mark.processes
def test_a_killed_warm_process_only_costs_time() -> None:
    some = {"free": TASKS["free"], "ours": TASKS["ours"]}
    with forked.forking(), forking.warm_process(contest.clean_environ()) as cold:
        with started(some, lambda what, fraction: None, Clock(60.0)) as before:
            pids = [process.pid for process in processes_of(before)]
            os.kill(forking._sources[0].pid, signal.SIGKILL)
            expected = answers_of(before)
        assert [start_ticks(pid) for pid in pids] == [None] * len(pids)  # their new parent may not have reaped them yet
        with started(some, lambda what, fraction: None, Clock(60.0)) as after:
            assert not any(isinstance(each, ForkedProcess) for each in processes_of(after))
            assert answers_of(after) == expected
    assert len(cold.reasons) == 1
    assert "started more slowly: the process that workers are forked from has ended" in cold.reasons[0]


@pytest.mark.processes
def test_a_worker_with_another_environment_is_not_forked() -> None:
    environ = contest.clean_environ()
    with WarmSource(environ, ["pliant_repro.worker"]) as source, tempfile.TemporaryFile() as output:

        def fork(**more: str) -> ForkedProcess | None:
            return source.fork(["/nowhere"], {**environ, **more}, output.fileno(), [])

        late = fork(CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCHINDUCTOR_COMPILE_THREADS="3", PLIANT_X="1")
        assert late is not None
        assert late.wait(30.0) == late.wait() == 1  # nobody has started it as a rank
        assert fork(OMP_NUM_THREADS="2") is None
        environ.pop("PATH")
        assert fork() is None
        endless = source.fork(["--rank", "0"], dict(source._environ), output.fileno(), [])
        assert endless is not None
        endless.kill()
        assert endless.wait(30.0) in (-signal.SIGKILL, 0, 3)
    assert [reason.rpartition(": ")[2] for reason in source.cold.reasons] == [
        "OMP_NUM_THREADS changed since it was started",
        "PATH changed since it was started",
    ]


@pytest.mark.processes
def test_a_warm_process_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "opens_the_gpu.py").write_text("import sys; sys.exit('no GPU here')")
    environ = {**contest.clean_environ(), "PYTHONPATH": str(tmp_path)}
    with WarmSource(environ, ["opens_the_gpu"]) as source:
        assert source.fork([], environ, 2, []) is None
        assert source.cold.reasons[0].endswith("has ended: no GPU here")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with forking.warm_process(environ) as cold:
        assert forking.fork_worker([], environ, 2, []) is None
        assert "No such file" in cold.reasons[0]


def test_a_process_that_runs_on_is_waited_for_within_a_limit() -> None:
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process = ForkedProcess(sleeper.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.terminate()
    assert process.wait(10.0) == -signal.SIGTERM
    process.kill()  # nothing: it is reaped


def test_a_fork_compiles_with_its_own_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 7)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    forked_worker.read_environ_again()
    assert torch._inductor.config.compile_threads == 3
