"""The runner's watch over its workers: what it says of one that is stuck, stopped or only slow, whatever that one does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import until

from pliant.child import process_state
from pliant.cluster import Worker
from pliant.launch import worker_watch
from pliant.launch.events import Event, Idle, Stopped
from pliant.launch.worker_watch import WorkerWatch
from pliant.progress_board import Activity, Board
from pliant.record import Recorder, read
from pliant.stall_rule import StallRule

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_leaks")]
ME = Worker("127.0.0.1", 10001)
PROGRAM = """
import ctypes, sys, time
from pliant.cluster import View, Worker
from pliant.identity import WorkerSpec
from pliant.progress_board import ProgressBoard

me = Worker("127.0.0.1", 10001)
board = ProgressBoard.open(WorkerSpec(
    worker=me, view=View(0, (me,), (Worker("127.0.0.1", 1),)), secret=b"for tests", board_fd=int(sys.argv[1]), board_slot=5))

def hold_lock():
    ctypes.PyDLL(None).sleep(1000)

def first():
    sys.stdin.readline()

def second():
    sys.stdin.readline()

for step in range(9):
    board.begin_turn(step, time.monotonic(), begins_step=True)
if sys.argv[2] == "program":
    board.run_program(time.monotonic())
print("up", flush=True)
hold_lock() if sys.argv[2] == "lock" else first()
print("up", flush=True)
second()
"""


class Watching:
    """A board, a process that shows on it what it does, and the watch over it."""

    def __init__(self, how: str, record: str = "") -> None:
        self.board, self.posted = Board.make(), list[Event]()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.board.descriptor), how],
            pass_fds=[self.board.descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.watch = WorkerWatch(
            self.board, StallRule(), self.posted.append, stopped_limit_s=10, replaces=True, record=record
        )
        self.watch.add(ME, self.process.pid, 5)
        self.hear()
        self.began_s = time.monotonic()

    def hear(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        until(lambda: process_state(self.process.pid) == "S", "the program to do nothing more")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.board.close()


@pytest.fixture
def watching() -> Iterator[Callable[..., Watching]]:
    made: list[Watching] = []

    def make(*words: str) -> Watching:
        made.append(Watching(*words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_that_is_stuck_is_told_once_with_its_stack_even_if_it_holds_the_lock(
    watching: Callable[..., Watching], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = tmp_path / "run.jsonl"
    Recorder(record).close()
    stuck = watching("lock", str(record))
    logging.getLogger("pliant").propagate = True
    stuck.watch.look(stuck.began_s + 4)
    assert caplog.text == ""
    for later_s in (6, 7):
        stuck.watch.look(stuck.began_s + later_s)
    assert caplog.text.count("worker 127.0.0.1:10001 (rank 0) has been in step 8 for 6s") == 1
    assert "keeps others waiting for 1m0s here is replaced" in caplog.text
    [fact] = read(record)
    assert (fact.kind, fact.step, fact.data["worker"], fact.data["rank"]) == ("stall", 8, str(ME), 0)
    assert fact.data["stack"][0].endswith("in hold_lock")
    assert stuck.process.poll() is None, "looking does no harm"


def test_a_process_of_a_loader_that_ends_just_when_it_is_asked_spoils_nothing(
    watching: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = watching("lock")
    gone = subprocess.Popen(["true"])
    gone.wait(20)
    monkeypatch.setattr(worker_watch, "_children", lambda pid: [gone.pid])
    catches = worker_watch._catches
    monkeypatch.setattr(worker_watch, "_catches", lambda pid: pid == gone.pid or catches(pid))  # a moment ago
    logging.getLogger("pliant").propagate = True
    stuck.watch.look(stuck.began_s + 6)
    assert "in hold_lock" in caplog.text
    assert f"its process {gone.pid} (gone, state )" in caplog.text


def test_one_that_is_stopped_is_reported_when_its_time_is_over(watching: Callable[..., Watching]) -> None:
    stopped = watching("turn")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    until(lambda: process_state(stopped.process.pid) == "T", "stopped")
    for later_s in (1, 5, 10.9, 11.5, 13):
        stopped.watch.look(stopped.began_s + later_s)
        assert bool(stopped.posted) == (later_s > 11)
    assert stopped.posted == [Stopped(ME, pytest.approx(10.5), others_run=False)]
    stopped.watch.look(stopped.began_s + 22)
    assert len(stopped.posted) == 2, "again, as others may run by now"


def test_outside_of_turns_one_whose_stack_changes_is_only_slow(
    watching: Callable[..., Watching], caplog: pytest.LogCaptureFixture
) -> None:
    slow = watching("program")
    logging.getLogger("pliant").propagate = True
    slow.watch.look(slow.began_s + 100)
    slow.watch.look(slow.began_s + 200)
    reading = slow.board.read(5)
    assert reading is not None
    assert (reading.activity, reading.moved_s) == (Activity.PROGRAM, 0)
    slow.go_on()
    slow.watch.look(slow.began_s + 290)
    reading = slow.board.read(5)
    assert reading is not None
    assert reading.moved_s == pytest.approx(slow.began_s + 290)
    slow.watch.look(slow.began_s + 400)
    assert caplog.text == ""
    slow.watch.look(slow.began_s + 600)
    assert "has been in the program's code after step 8 for 5m10s" in caplog.text


@pytest.mark.parametrize(
    "program", ["import time; print('up', flush=True); time.sleep(1000)", "print('up', flush=True)\nwhile True: pass"]
)
def test_before_it_joins_one_that_does_nothing_is_told_and_one_that_works_is_not(
    program: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("pliant").propagate = True
    board, posted = Board.make(), list[Event]()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        watch = WorkerWatch(board, StallRule(0.05), posted.append, stopped_limit_s=10, replaces=True)
        watch.add(ME, process.pid, 5)
        begun_s = time.monotonic()
        while (now_s := time.monotonic()) < begun_s + (20 if "sleep" in program and not posted else 1.2):
            watch.look(now_s)
            time.sleep(0.02)  # the time in which it does nothing, or works
        process.kill()
    board.close()
    if "sleep" in program:
        assert caplog.text.count("has done nothing for ") == 1
        assert "which has not called pliant.join() yet" in caplog.text
        first = posted[0]
        assert isinstance(first, Idle)
        assert (first.worker, first.limit_s) == (ME, 0.5)
        assert first.for_s > 0.5
    else:
        assert (caplog.text, posted) == ("", [])
