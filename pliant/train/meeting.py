"""Notices when all workers wait, but at different places of the program: nobody would ever come.

A worker that has waited for long says where it waits. Only workers that wait say so, and as soon as all of them have, they
know whether they wait for the same thing. If not, everybody's wait ends with an error that names two places.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError, TrainError
from pliant.train.step import OWN_COUNTER

AFTER_S = 10.0
"""A worker says where it is after it has waited for so long."""
PERIOD_S = 1.0
_PATIENCE = 3
"""Looks between the answer and the error: every worker shall have the answer before one of them ends."""
_PLACE_BYTES = 128


@dataclass(slots=True)
class _Wait:
    engine: Engine
    number: int
    place: str
    since_s: float
    asked: Handle | None = None
    looks: int = 0


class MeetingWatch:
    """Watches the waits of one worker, from a thread of its own."""

    def __init__(self, after_s: float | None = None) -> None:
        self._after_s = AFTER_S if after_s is None else after_s
        self._wait: _Wait | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, engine: Engine, number: int, place: str) -> None:
        """This worker waits for the others. `number` counts what all workers have done together before."""
        if engine.view.size == 1:
            return
        self._wait = _Wait(engine, number, place, time.monotonic())
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
        try:
            if wait.asked is None:
                row = torch.zeros(_PLACE_BYTES, dtype=torch.uint8)
                text = wait.place.encode()[:_PLACE_BYTES]
                row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                wait.asked = wait.engine.all_gather(f"place:{wait.number}", row)
            elif wait.asked.succeeded:
                wait.looks += 1
                rows = wait.asked.wait()
                assert rows is not None, "an all_gather has a result on every rank"
                places = [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]
                if len(set(places)) > 1 and wait.looks > _PATIENCE and wait is self._wait:
                    wait.engine.abort(TrainError(_complaint(wait.engine, places)))
        except CommError:  # a worker is lost: the wait ends by itself
            return


def _complaint(engine: Engine, places: list[str]) -> str:
    workers = engine.view.workers
    other = next(rank for rank, place in enumerate(places) if place != places[0])
    return (
        f"{workers[0]} waits for the others in {places[0]}, but {workers[other]} in {places[other]}: all workers must come to "
        f"the same places of the program. {OWN_COUNTER}"
    )
