"""The progress board, and the rule that says who is stalled, on values."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pliant.cluster import View, Worker
from pliant.errors import ConfigError
from pliant.identity import WorkerSpec
from pliant.progress_board import STACK_SIGNAL, Activity, Board, ProgressBoard, Reading
from pliant.stall_rule import (
    FIRST_STEPS,
    StallRule,
    complaint,
    describe,
    format_stall_timeout,
    idle_s,
    parse_stall_timeout,
)

ME = Worker("127.0.0.1", 10001)
VIEW = View(0, (ME,), (Worker("127.0.0.1", 38080),))


def spec_of(descriptor: int) -> WorkerSpec:
    return WorkerSpec(worker=ME, view=VIEW, secret=b"for tests", board_fd=descriptor, board_slot=3)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.make()
    yield made
    made.close()


def test_who_holds_the_memory_reads_what_a_worker_does(board: Board) -> None:
    mine = ProgressBoard(board, 3)
    mine.take_signals_on(0)
    assert board.read(3) is None
    assert not board.has_joined(3)
    for step in range(40):
        mine.begin_turn(step, 100.0 + step, begins_step=True)
        mine.begin_turn(step, 100.5 + step)  # the next replica's
    reading = board.read(3)
    assert reading is not None
    assert (reading.activity, reading.step, reading.num_begun) == (Activity.TURN, 39, 40)
    assert (reading.since_s, reading.median_s) == (139.5, 1.0)
    mine.begin_wait(2, 7, "the loop over step 39", 141.0)
    mine.enter_view(1)
    reading = board.read(3)
    assert reading is not None
    assert (reading.activity, reading.view, reading.number, reading.rank) == (Activity.WAITING, 2, 7, 1)
    assert reading.place == "the loop over step 39"
    assert mine.read() == reading
    board.clear(3)
    assert board.read(3) is None
    mine.close()


def test_a_slot_is_found_by_the_name_of_its_worker(board: Board) -> None:
    spec = spec_of(board.descriptor)
    opened = ProgressBoard.open(spec)
    found = board.read_all()
    assert list(found) == ["127.0.0.1:10001"]
    assert found["127.0.0.1:10001"].activity is Activity.JOINED
    assert found["127.0.0.1:10001"].pid == os.getpid()
    assert opened.neighbours() == found
    opened.close()
    assert not faulthandler.unregister(STACK_SIGNAL), "its descriptor is closed"


def test_another_file_under_the_number_of_the_board_is_left_alone() -> None:
    with open(__file__, "rb") as other:
        opened = ProgressBoard.open(spec_of(other.fileno()))
        opened.begin_turn(1, 1.0)
    assert opened.neighbours() == {}


TURN = Reading(worker="a:1", activity=Activity.TURN, step=12, num_begun=50, since_s=100.0, median_s=0.2)
PROGRAM = replace(TURN, activity=Activity.PROGRAM)


@pytest.mark.parametrize(
    ("asked", "reading", "looks", "limit"),
    [
        (None, TURN, 5, 60),
        (None, replace(TURN, median_s=10.0), 50, 200),
        (None, PROGRAM, 300, 600),
        (None, replace(PROGRAM, median_s=10.0), 300, 2000),
        (None, replace(TURN, num_begun=FIRST_STEPS, median_s=0.0), 300, 600),
        (3.0, TURN, 1.5, 3),
        (3.0, PROGRAM, 15, 30),
        (0.0, TURN, 5, float("inf")),
        (0.0, PROGRAM, 300, float("inf")),
    ],
)
def test_a_worker_is_measured_by_its_own_recent_steps(
    asked: float | None, reading: Reading, looks: float, limit: float
) -> None:
    rule = StallRule(asked)
    assert rule.limit_s(reading) == limit
    assert rule.look_s(reading) == looks


def test_of_whom_nothing_is_known_has_the_time_of_code_outside_of_turns() -> None:
    assert StallRule().limit_s(None, median_s=1.0) == 600
    assert StallRule().limit_s(None, median_s=10.0) == 2000


def test_a_stack_that_changes_gives_more_time_outside_of_turns_only() -> None:
    assert idle_s(replace(PROGRAM, moved_s=150.0), 160.0) == 10
    assert idle_s(replace(TURN, moved_s=150.0), 160.0) == 60


def test_what_is_said_of_a_worker() -> None:
    assert describe(TURN) == "in step 12"
    assert describe(PROGRAM) == "in the program's code after step 12"
    assert describe(replace(PROGRAM, num_begun=0)) == "before its first step"
    assert complaint(TURN, 61).startswith("stalled in step 12: the others have waited 1m1s for it")
    assert complaint(None, 61).startswith("stalled")


@pytest.mark.parametrize(("text", "value"), [("", None), ("off", 0.0), ("OFF", 0.0), ("90s", 90.0), ("1m30s", 90.0)])
def test_the_timeout_is_a_time_or_off(text: str, value: float | None) -> None:
    assert parse_stall_timeout(text) == value
    assert parse_stall_timeout(format_stall_timeout(value)) == value


@pytest.mark.parametrize("text", ["0", "-1s", "never", "0s"])
def test_another_timeout_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match="--stall-timeout"):
        parse_stall_timeout(text)
