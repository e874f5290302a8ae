"""This machine as a backend: processes that outlive whoever started them, and devices that no two jobs share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paper_backend import train_job
from patience import until

from pliant.child import marked_processes
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.fed.config import FedConfig
from pliant.fed.jobfile import FederatedJob
from pliant.jobs import scheduler
from pliant.jobs.backends import FederatedRun, LocalBackend, TrainRun
from pliant.jobs.scheduler import JobRun, Scheduler
from pliant.jobs.schema import job_from_json
from pliant.jobs.store import JobStore
from pliant.launch import processes
from pliant.launch.plan import device_of_slot
from pliant.sched import policies

SLEEPS = "import time; time.sleep(60)"


def a_run(folder: Path, number: int = 1, **said: Any) -> JobRun:
    given = train_job("a", **{"directory": str(folder), **said})
    directory = folder / "jobs" / "a"
    directory.mkdir(parents=True, exist_ok=True)
    return JobRun(spec=job_from_json(given), number=number, directory=directory, folder=directory)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what is run in the place of a runner; what is left of it is killed."""
    started: list[int] = []

    def use(code: str) -> None:
        monkeypatch.setattr(TrainRun, "command", lambda self, devices: [sys.executable, "-c", code])

    begin = TrainRun.begin

    def noted(running: TrainRun, *arguments: Any) -> None:
        begin(running, *arguments)
        assert running._keeper is not None
        started.append(running._keeper.pid)

    monkeypatch.setattr(TrainRun, "begin", noted)
    yield use
    for session in started:
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
            try:
                if os.getsid(pid) == session:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def runner_of(running: TrainRun) -> int:
    return int(until(running._process))


# --- processes ---


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_exit_code_is_kept_for_whoever_asks_later(
    tmp_path: Path, program: Callable[[str], None], code: str, expected: int
) -> None:
    program(code)
    run = a_run(tmp_path)
    first = LocalBackend({"cpu": 1}).start(run, {"cpu": 1})
    seen = until(first.ended)
    assert seen.code == expected
    later = LocalBackend({"cpu": 1}).adopt(run)
    assert later is not None
    assert later.ended() == seen


@pytest.mark.parametrize("kill", [False, True])
def test_a_run_that_has_ended_just_when_it_is_told_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kill: bool
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(20)
    ending = TrainRun(a_run(tmp_path), LocalBackend({"cpu": 1}))
    monkeypatch.setattr(ending, "_process", lambda: gone.pid)  # a moment ago
    ending.end(kill=kill)


@pytest.mark.parametrize("is_adopted", [False, True])
def test_the_end_of_a_run_is_an_event_for_whoever_waits(
    tmp_path: Path, program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, no_leaks: None, *, is_adopted: bool
) -> None:
    gate = tmp_path / "gate"
    program(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nraise SystemExit(7)")
    spec = job_from_json(train_job("a", directory=str(tmp_path), max=1))
    with JobStore(tmp_path) as store:
        policy = policies.make_policy("easyscale-heter")
        first = Scheduler(LocalBackend({"cpu": 1}), policy, store)
        with contextlib.ExitStack() as stack:
            if not is_adopted:
                monkeypatch.setattr(scheduler, "LOOK_S", 3600.0)
            stack.enter_context(first.running())
            first.submit(spec)
            until(lambda: (tmp_path / "jobs/a/run-1/started.json").exists(), "the keeper")
            if is_adopted:
                stack.close()
                monkeypatch.setattr(scheduler, "LOOK_S", 3600.0)
                first = Scheduler(LocalBackend({"cpu": 1}), policy, store)
                stack.enter_context(first.running())
            gate.touch()
            ended = until(lambda: (job := first.status("a")).is_over and job, "the end to be seen", 20)
            assert (ended.state, ended.exit_code) == ("failed", 7)


def test_a_run_is_adopted_as_it_is(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(f"import os; print(os.environ['COLOUR'], os.getcwd(), flush=True); {SLEEPS}")
    run = a_run(tmp_path, env={"COLOUR": "blue"})
    first = LocalBackend({"cpu": 2}).start(run, {"cpu": 2})
    runner = runner_of(first)
    second = LocalBackend({"cpu": 2}).adopt(run)
    assert second is not None
    assert runner_of(second) == runner
    assert second.ended() is None
    assert os.getsid(runner) not in (0, os.getsid(0)), "it has a session of its own"
    until(lambda: run.log.read_text() == f"blue {tmp_path}\n")
    second.end(kill=True)
    assert until(second.ended).code == -9


def test_a_runner_that_is_not_up_yet_cannot_be_told_but_ended(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(SLEEPS)
    running = LocalBackend({"cpu": 2}).start(a_run(tmp_path), {"cpu": 2})
    assert running.occupied() == {"cpu": 2}, "it may start workers at any moment"
    with pytest.raises(ServerUnavailable, match="not up"):
        running.resize({"cpu": 1})
    runner_of(running)
    running.end()
    assert until(running.ended).code == -signal.SIGTERM
    assert running.occupied() == {}


def test_a_runner_whose_keeper_was_killed_is_still_looked_after(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(SLEEPS)
    running = LocalBackend({"cpu": 1}).start(a_run(tmp_path), {"cpu": 1})
    runner = runner_of(running)
    assert running._keeper is not None
    os.kill(running._keeper.pid, signal.SIGKILL)
    running._keeper.wait()
    assert running.ended() is None
    os.kill(runner, signal.SIGKILL)
    assert until(running.ended).code is None, "nobody has seen how"


def test_what_was_never_started_is_not_adopted(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert LocalBackend({"cpu": 1}).adopt(run) is None
    run.place.mkdir()
    (run.place / "lock").touch()  # as far as it came
    assert LocalBackend({"cpu": 1}).adopt(run) is None


def test_a_runner_has_the_usual_signals_and_no_input(tmp_path: Path, program: Callable[[str], None]) -> None:
    program("import signal, sys; sys.exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or input() and 0)")
    running = LocalBackend({"cpu": 1}).start(a_run(tmp_path), {"cpu": 1})
    assert until(running.ended).code == 1  # EOFError: its input is empty
    assert "EOFError" in running._run.log.read_text()


def test_a_directory_that_is_gone_is_told(tmp_path: Path, program: Callable[[str], None]) -> None:
    program(SLEEPS)
    run = a_run(tmp_path, directory=str(tmp_path / "gone"))
    with pytest.raises(LaunchError, match="No such file"):
        LocalBackend({"cpu": 1}).start(run, {"cpu": 1})


def test_the_command_says_all_that_the_job_does(tmp_path: Path) -> None:
    run = a_run(tmp_path, number=7, max=3, args=["--lr", "1"], determinism="D2", checkpoint_every=9)
    command = TrainRun(run, LocalBackend({"cpu": 2})).command({"cpu": 2})
    at = command.index("run")
    flags = dict(zip(command[at + 3 : -3 : 2], command[at + 4 : -3 : 2], strict=True))
    assert command[at + 1 : at + 3] == ["-q", "-w"]
    assert command[-3:] == ["/train.py", "--lr", "1"]
    assert (flags["-np"], flags["-H"], flags["-port-range"]) == ("2", "127.0.0.1:3", "11400-11599")
    assert (flags["--checkpoint-every"], flags["--determinism"], flags["--resume"]) == ("9", "D2", "auto")


# --- devices ---


class Bench:
    """A backend with CUDA devices, and runs without processes, which the test says are on some slots."""

    def __init__(self, folder: Path, **devices: int) -> None:
        self.folder = folder
        self.backend = LocalBackend(devices, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})

    def run(self, number: int, **devices: int) -> TrainRun:
        run = a_run(self.folder, number)
        run.place.mkdir(parents=True)
        running = self.backend._runs[number] = TrainRun(run, self.backend)
        running.assign(devices)
        return running

    def live_on(self, running: TrainRun, *slots: int) -> None:
        """This process plays the workers of these slots."""
        workers = {f"127.0.0.1:{slot}": (os.getpid(), slot) for slot in slots}
        processes.write_runner_state(running._place / "state.json", "http://127.0.0.1:1", 1, workers)

    @staticmethod
    def devices(running: TrainRun) -> list[str | None]:
        return list(json.loads((running._place / "devices.json").read_text()))


def test_no_two_jobs_have_the_same_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, v100=3, t4=1)
    a, b = bench.run(1, v100=2), bench.run(2, v100=1, t4=1)
    assert bench.devices(a) == ["0", "1"]
    assert bench.devices(b) == ["2", "3"]
    assert [device_of_slot(str(b._place / "devices.json"), slot) for slot in (0, 1, 2)] == ["2", "3", None]


def test_a_device_goes_on_when_nobody_is_on_it_any_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, v100=4)
    a = bench.run(1, v100=4)
    bench.live_on(a, 0, 1, 2, 3)
    a.assign({"v100": 2})
    assert bench.devices(a) == ["0", "1", "2", "3"], "workers are still there"
    bench.live_on(a, 0, 2)  # the last but one had crashed and been replaced: the order is not the slots'
    assert a.occupied() == {"v100": 2}
    assert bench.devices(a) == ["0", None, "2", None]
    b = bench.run(2, v100=1)
    assert bench.devices(b) == ["1"]
    a.assign({"v100": 3})
    assert bench.devices(a) == ["0", "3", "2", None], "the runner starts on the lowest free slot"


def test_of_several_types_the_one_with_too_many_loses_its_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path, v100=2, t4=2)
    a = bench.run(1, v100=2, t4=2)
    bench.live_on(a, 0, 1, 2, 3)
    workers = [f"127.0.0.1:{slot}" for slot in range(4)]
    assert a._leaving({"v100": 1, "t4": 2}, workers) == {"127.0.0.1:1"}
    assert a._leaving({"t4": 1}, workers) == {"127.0.0.1:0", "127.0.0.1:1", "127.0.0.1:3"}
    assert a._leaving({"v100": 2, "t4": 2}, workers) == set()


def test_processors_see_no_cuda_device_and_machines_without_leave_it_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, cpu=2, v100=1)
    assert bench.devices(bench.run(1, cpu=2)) == ["", ""]
    bench.backend = LocalBackend({"cpu": 2}, {"CUDA_VISIBLE_DEVICES": ""})
    assert bench.devices(bench.run(2, cpu=2)) == [None, None]


def test_more_types_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="t4=1: this machine has 2 CUDA devices"):
        LocalBackend({"v100": 2, "t4": 1}, {"CUDA_VISIBLE_DEVICES": "0,1"})


# --- federated runs ---


@pytest.fixture
def federated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FederatedRun]:
    """Starts a federated run whose coordinator is this Python code."""

    def start(code: str) -> FederatedRun:
        monkeypatch.setattr(FederatedRun, "command", lambda self, devices: [sys.executable, "-c", code])
        spec = FederatedJob(config=FedConfig(name="a"), directory=str(tmp_path))
        (tmp_path / "aggregator").mkdir()
        run = JobRun(spec=spec, number=1, directory=tmp_path / "jobs" / "a", folder=tmp_path)
        handle = LocalBackend({"cpu": 2}).start(run, {"cpu": 2})
        assert isinstance(handle, FederatedRun)
        assert handle.occupied() == {"cpu": 2}
        return handle

    return start


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, (0, True, "")), (143, (143, False, "")), (2, (2, False, "no data")), (-9, (-9, False, ""))],
)
def test_how_a_coordinator_ends_says_what_becomes_of_the_job(
    federated: Callable[[str], FederatedRun], code: int, expected: tuple[int, bool, str]
) -> None:
    ends = "import os; os.kill(os.getpid(), 9)" if code < 0 else f"raise SystemExit({code})"
    prints = "print('pliant: no data', flush=True); " if code == 2 else ""
    end = until(federated(prints + ends).ended)
    assert (end.code, end.finished, end.why) == expected


def test_workers_that_a_coordinator_leaves_behind_are_killed_before_its_end_is_seen(
    federated: Callable[[str], FederatedRun],
) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}], start_new_session=True)"
    handle = federated(f"import subprocess, sys; {child}; {SLEEPS}")
    mark = str(handle._place)
    until(lambda: len(marked_processes(mark)) == 3, "keeper, coordinator and worker")
    coordinator = handle._process()
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)
    assert until(handle.ended).code == -9
    assert not marked_processes(mark)
