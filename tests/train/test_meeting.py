"""Workers that wait for each other at different places of the program are told, and nobody else is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from pliant.cluster import Worker
from pliant.comm.engine import Engine
from pliant.comm.transport import loopback_engines
from pliant.errors import TrainError
from pliant.progress_board import Activity, ProgressBoard
from pliant.stall_rule import StallRule
from pliant.train.meeting import MeetingWatch

pytestmark = pytest.mark.timeout(30)


def test_waits_at_different_places_end_with_an_error_that_names_them() -> None:
    with loopback_engines("AA") as engines:
        watches = [MeetingWatch(after_s=0) for _ in engines]
        places = ("job.evaluate", "the loop over step 5")
        for watch, engine, place in zip(watches, engines, places, strict=True):
            watch.begin(engine, 7, place)
        waits = [engine.all_gather(place, torch.zeros(1)) for engine, place in zip(engines, places, strict=True)]
        while not all(wait.done for wait in waits):
            for watch in watches:
                watch.look()
        for wait in waits:
            with pytest.raises(TrainError, match=r"in job\.evaluate, but .* in the loop over step 5: all workers must"):
                wait.wait()
        for watch in watches:
            watch.close()


@pytest.mark.parametrize("numbers", [(7, 7), (7, 8)], ids=["the same place", "an earlier wait"])
def test_whoever_waits_for_the_same_is_left_alone(numbers: tuple[int, int]) -> None:
    """What a worker has said in a wait that is over does not count."""
    with loopback_engines("AA") as engines:
        watches = [MeetingWatch(after_s=0) for _ in engines]
        for watch, engine, number in zip(watches, engines, numbers, strict=True):
            watch.begin(engine, number, f"step {number}")
        for _ in range(20):
            for watch in watches:
                watch.look()
        watches[1].end()  # a place that was published stays, but the worker has moved on
        watches[1].begin(engines[1], numbers[1] + 1, "the next step")
        for _ in range(20):
            watches[0].look()
        waits = [engine.all_gather("here", torch.zeros(1)) for engine in engines]
        for wait in waits:
            wait.wait()  # raises nothing
        for watch in watches:
            watch.close()


# --- a worker that does not come ---


class Stuck:
    """Two workers on hosts of their own: the first waits, the second does what the test says."""

    def __init__(self, engines: Sequence[Engine], rule: StallRule) -> None:
        self.given_up: list[tuple[str, str]] = []
        self.waits = MeetingWatch(ProgressBoard(), rule, self.note, after_s=0)
        self.other = MeetingWatch(ProgressBoard(), rule, after_s=0)
        self.engines = engines
        self.other.begin(engines[1], 6, "the step before")
        self.other.end()

    def note(self, worker: Worker, why: str) -> None:
        self.given_up.append((str(worker), why))

    def look(self, seconds: float) -> None:
        """Let both look, until the first has an answer of the second, `seconds` after it began to wait."""
        wait = self.waits._wait
        assert wait is not None
        wait.since_s = time.monotonic()
        wait.asked.pop(1, None)  # an older answer
        deadline_s = time.monotonic() + 10
        wait.answers.clear()
        self.other.look()
        while 1 not in wait.answers and time.monotonic() < deadline_s:
            self.waits.look()
        wait.since_s = time.monotonic() - seconds
        self.waits.look()

    def close(self) -> None:
        self.waits.close()
        self.other.close()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    with loopback_engines("AB") as engines:
        made = Stuck(engines, StallRule(60.0))
        made.other._thread, thread = None, made.other._thread  # the test looks
        yield made
        made.other._thread = thread
        made.close()


def take_steps(board: ProgressBoard, count: int, since_s: float) -> None:
    """Begin so many steps, the last one `since_s` ago."""
    for step in range(count):
        board.begin_turn(step, time.monotonic() - since_s - (count - 1 - step) * 0.1, begins_step=True)


def test_whoever_is_in_its_turn_for_too_long_is_given_up_by_those_that_wait(stuck: Stuck) -> None:
    stuck.waits.begin(stuck.engines[0], 7, "the loop over step 9")
    take_steps(stuck.other.board, 10, 50)
    stuck.look(100)
    assert stuck.given_up == [], "it is in its turn for 50 s only"
    take_steps(stuck.other.board, 10, 70)
    stuck.look(50)
    assert stuck.given_up == [], "it is waited for since 50 s only"
    stuck.look(100)
    [(worker, why)] = set(stuck.given_up)
    assert worker == str(stuck.engines[0].view.workers[1])
    assert why.startswith("stalled in step 9: the others have waited 1m40s for it")


def test_code_outside_of_turns_and_first_steps_have_ten_times_as_long(stuck: Stuck) -> None:
    stuck.waits.begin(stuck.engines[0], 7, "the loop over step 9")
    for prepare in (
        lambda: take_steps(stuck.other.board, 3, 500),
        lambda: stuck.other.board.run_program(time.monotonic() - 500),
    ):
        prepare()
        stuck.look(550)
        assert stuck.given_up == []
    stuck.other.board.run_program(time.monotonic() - 650)
    stuck.look(650)
    assert stuck.given_up


def test_whoever_waits_too_is_never_given_up(stuck: Stuck) -> None:
    stuck.waits.begin(stuck.engines[0], 7, "the loop over step 9")
    take_steps(stuck.other.board, 10, 5000)
    stuck.other.begin(stuck.engines[1], 7, "the loop over step 9")
    stuck.look(10_000)
    assert stuck.given_up == []


def test_where_somebody_was_given_up_the_others_wait_twice_as_long_the_next_time(stuck: Stuck) -> None:
    for times, limit_s in enumerate((60, 120, 240)):
        stuck.waits.begin(stuck.engines[0], 7, "the loop over step 9")
        take_steps(stuck.other.board, 10, limit_s - 5)
        stuck.look(1000)
        assert len(set(stuck.given_up)) == times
        take_steps(stuck.other.board, 10, limit_s + 5)
        stuck.look(1000 + times)
        assert len(set(stuck.given_up)) == times + 1
        stuck.waits.begin(stuck.engines[0], -1, "the change to view 3")
        stuck.waits.end()
    stuck.waits.begin(stuck.engines[0], 8, "the loop over step 10")
    take_steps(stuck.other.board, 10, 65)
    stuck.look(2000)
    assert len(set(stuck.given_up)) == 4, "another step, and the usual time"


def test_a_wait_for_a_sum_in_the_middle_of_a_turn_is_shown_as_such(stuck: Stuck) -> None:
    """With priority sync a forward waits for sums of the step before: who waits there is not stalled, and gives others up."""
    stuck.waits.begin(stuck.engines[0], 6, "the loop over step 8")
    stuck.waits.end()
    take_steps(stuck.waits.board, 10, 0)
    take_steps(stuck.other.board, 10, 70)
    with stuck.waits.awaiting("the sum of weight"):
        assert stuck.waits.board.read().activity is Activity.WAITING
        stuck.look(100)
        assert stuck.given_up
    assert stuck.waits.board.read().activity is Activity.TURN
    stuck.waits.begin(stuck.engines[0], 7, "the loop over step 9")
    with stuck.waits.awaiting("the sum of bias"):  # of which there is one in a wait that has begun already
        assert stuck.waits.board.read().place == "the loop over step 9"
