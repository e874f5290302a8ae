"""Workers that wait for each other at different places of the program are told, and nobody else is."""

from __future__ import annotations

import pytest
import torch

from pliant.comm.transport import loopback_engines
from pliant.errors import TrainError
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
