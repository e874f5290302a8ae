"""Notices when all workers wait, but at different places of the program: nobody would ever come.

A worker that has waited for long publishes where it waits, and asks the others where they do. If all of them have waited for
long, and one waits elsewhere, everybody's wait ends with an error that names two places.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError, TrainError
from pliant.train.step import OWN_COUNTER

AFTER_S = 10.0
"""A worker says where it is after it has waited for so long."""
PERIOD_S = 1.0
_PATIENCE = 3
"""Equal answers before the error: every worker shall have them before one of them ends."""
_NAME = "place"
_ROW = struct.Struct("<qqq128s")


class _Place(NamedTuple):
    """Where a worker waits."""

    view: int
    number: int
    """What all workers have done together before."""
    wait: int
    """How often this worker has waited: another number says that it has moved on."""
    text: str

    def to_row(self) -> torch.Tensor:
        packed = _ROW.pack(self.view, self.number, self.wait, self.text.encode())
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def from_row(cls, row: torch.Tensor) -> _Place:
        view, number, wait, text = _ROW.unpack(bytes(row.numpy()))
        return cls(view, number, wait, text.rstrip(b"\0").decode(errors="replace"))


@dataclass(slots=True)
class _Wait:
    engine: Engine
    place: _Place
    since_s: float
    asked: list[tuple[torch.Tensor, Handle]] = field(default_factory=list)
    answers: list[_Place] = field(default_factory=list)
    """The last answers of the workers that have published where they wait, in the order of ranks."""
    looks: int = 0
    """How often in a row the answers were these."""


class MeetingWatch:
    """Watches the waits of one worker, from a thread of its own."""

    def __init__(self, after_s: float | None = None) -> None:
        self._after_s = AFTER_S if after_s is None else after_s
        self._wait: _Wait | None = None
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, engine: Engine, number: int, place: str) -> None:
        """This worker waits for the others. `number` counts what all workers have done together before."""
        if engine.view.size == 1:
            return
        self._count += 1
        here = _Place(engine.view.number, number, self._count, place)
        self._wait = _Wait(engine, here, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pliant-meeting", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The wait is over."""
        self._wait = None

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self.look()

    def look(self) -> None:
        """Ask where the others wait if this takes long; end the wait if they wait elsewhere."""
        wait = self._wait
        if wait is None or time.monotonic() - wait.since_s < self._after_s:
            return
        if not all(handle.done for _, handle in wait.asked):
            return
        asked, wait.asked = wait.asked, []
        answers = [_Place.from_row(row) for row, handle in asked if handle.succeeded]
        wait.looks = wait.looks + 1 if answers == wait.answers else 1
        wait.answers = answers
        try:
            if wait.looks > _PATIENCE and wait is self._wait:
                _compare(wait.engine, answers)
            self._ask(wait)
        except CommError:  # a worker is lost: the wait ends by itself
            return

    def _ask(self, wait: _Wait) -> None:
        """Publish where this worker waits, and ask where the others do."""
        engine = wait.engine
        engine.save(_NAME, wait.place.to_row())
        rows = [torch.zeros(_ROW.size, dtype=torch.uint8) for _ in engine.view.workers]
        wait.asked = [(row, engine.request(rank, _NAME, row)) for rank, row in enumerate(rows)]


def _compare(engine: Engine, answers: list[_Place]) -> None:
    """End all waits if every worker waits in this view, for the same meeting, and one of them at another place."""
    meetings, places = {(each.view, each.number) for each in answers}, [each.text for each in answers]
    if len(answers) < engine.size or len(meetings) > 1 or answers[0].view != engine.view.number:
        return
    if len(set(places)) > 1:
        engine.abort(TrainError(_complaint(engine, places)))


def _complaint(engine: Engine, places: list[str]) -> str:
    workers = engine.view.workers
    other = next(rank for rank, place in enumerate(places) if place != places[0])
    return (
        f"{workers[0]} waits for the others in {places[0]}, but {workers[other]} in {places[other]}: all workers must come to "
        f"the same places of the program. {OWN_COUNTER}"
    )
