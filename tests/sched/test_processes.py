"""Calls in other processes: they end at once with whoever waits for them, and what they raise is raised there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

from pliant.child import process_state
from pliant.errors import PliantError
from pliant.sched.processes import call_in_processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

WAITING = """
import os, signal
from pathlib import Path
from pliant.sched.cluster import SchedulingPolicy

class Waiting(SchedulingPolicy):
    about = "waits for its end"

    def allocate(self, jobs, cluster, now):
        Path(f"{os.getpid()}.draft").touch()
        os.rename(f"{os.getpid()}.draft", f"{os.getpid()}.pid")
        while True:
            signal.pause()
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGINT to the parent", "SIGTERM to the parent", "kill -9 of the parent"])
def test_processes_of_a_simulation_end_with_it_at_once(tmp_path: Path, how: str) -> None:
    (tmp_path / "own.py").write_text(WAITING)
    program = [sys.executable, "-c", "from pliant.cli.main import main; main()"]
    words = ["sim", "--trace", "synthetic:9", "--policy", "own.py:Waiting", "--seeds", "2", "--processes", "2"]
    sim = subprocess.Popen(
        [*program, *words], cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "two simulations")
        workers = [int(each.stem) for each in tmp_path.glob("*.pid")]
        assert sim.pid not in workers
        if how == "Ctrl-C":
            os.killpg(sim.pid, signal.SIGINT)
        else:
            sim.send_signal({"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(how.split()[0], signal.SIGKILL))
        out, err = sim.communicate(timeout=30)  # at their end, too, as they have the same stderr
        assert (out, err) == (b"", b"")
        assert sim.returncode == {"SIGTERM": 143, "kill": -9}.get(how.split()[0], 130)
        until(lambda: not any(map(process_state, workers)), "the end of the processes", timeout_s=5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(sim.pid, signal.SIGKILL)
        sim.wait()


def test_what_a_call_raises_is_raised_here_with_where_it_was() -> None:
    with pytest.raises(ZeroDivisionError) as raised, contextlib.closing(call_in_processes(_divide, [1, 0], 2)) as calls:
        list(calls)
    assert "in _divide" in raised.value.__notes__[0]


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(PliantError, match=r"has died \(SIGKILL\).*--processes 1"):
        list(call_in_processes(_kill_itself, [signal.SIGKILL], 1))


def _divide(by: int) -> float:
    return 1 / by


def _kill_itself(number: int) -> None:
    os.kill(os.getpid(), number)
