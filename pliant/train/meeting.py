"""Watches the waits of a worker for the others: one of them may never come, or all may wait at different places.

A worker that has waited for a while reads on the progress board what its neighbours do, and asks the workers of other
hosts. Who runs code of its own for too long (`pliant.stall_rule`) is given up, by those that wait for it: its runner starts
another in its place. If all workers wait for each other at different places of the program, nobody would ever come, and
everybody's wait ends with an error that names two places.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pliant.cluster import Worker
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError, TrainError
from pliant.progress_board import Activity, ProgressBoard, Reading
from pliant.stall_rule import StallRule, complaint, idle_s
from pliant.train.step import OWN_COUNTER

AFTER_S = 10.0
"""A worker says where it waits, and asks the workers of other hosts, after so long."""
PERIOD_S = 1.0
_PATIENCE = 3
"""Equal answers before the error: every worker shall have them before one of them ends."""
_NAME = "place"
_ROW = struct.Struct("<qqqqqqdd112s")
GiveUp = Callable[[Worker, str], None]
"""Called with a worker that keeps the others waiting, and the reason."""


@dataclass(slots=True)
class _Wait:
    engine: Engine
    number: int
    """What all workers have done together before."""
    since_s: float
    may_give_up: bool
    asked: dict[int, tuple[torch.Tensor, Handle]] = field(default_factory=dict)
    """What the ranks on other hosts were asked."""
    answers: dict[int, Reading] = field(default_factory=dict)
    """The last answers of those that have answered."""
    last_places: tuple[object, ...] = ()
    looks: int = 0
    """How often in a row all workers waited at these places."""


class MeetingWatch:
    """Watches the waits of one worker, from a thread of its own, and shows on the board what the worker does."""

    def __init__(
        self,
        board: ProgressBoard | None = None,
        rule: StallRule | None = None,
        give_up: GiveUp | None = None,
        *,
        after_s: float = AFTER_S,
    ) -> None:
        """Without `give_up`, as in a job whose workers are not replaced, no worker is given up."""
        self.board = board or ProgressBoard()
        self._rule, self._give_up, self._after_s = rule or StallRule(), give_up, after_s
        self._period_s = PERIOD_S
        if self._rule.timeout_s and give_up is not None:
            self._after_s = min(after_s, self._rule.timeout_s / 2)
            self._period_s = max(0.1, min(PERIOD_S, self._rule.timeout_s / 8))
        self._wait: _Wait | None = None
        self._is_open = False
        self._engine: Engine | None = None
        self._number, self._times, self._was_long = -1, 0, False
        """What the workers last did together, how often one was given up there, and whether one is about to be. Each time
        they wait twice as long, so that what takes that long by nature is done at last."""
        self._looked_s = float("inf")
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, engine: Engine, number: int, place: str, *, may_give_up: bool = True) -> None:
        """This worker waits for the others. `number` counts what all workers have done together before; it is negative
        where they change the view."""
        self._is_open, self._engine, self._wait = True, engine, None
        if engine.view.size == 1:
            return
        if number >= 0:
            self._times = 0 if number != self._number else self._times + self._was_long
            self._number, self._was_long = number, False
        now_s = time.monotonic()
        self.board.begin_wait(engine.view.number, number, place, now_s)
        self._wait = _Wait(engine, number, now_s, may_give_up)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pliant-meeting", daemon=True)
            self._thread.start()

    def await_entry(self) -> None:
        """This new worker waits until the others let it in."""
        self._is_open = True
        self.board.begin_wait(-1, -1, "its first view", time.monotonic())

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """In the middle of the program's code, this worker waits for a sum that is on its way."""
        if self._is_open or self._engine is None:
            yield
            return
        self.begin(self._engine, -1, what)
        try:
            yield
        finally:
            self._is_open, self._wait = False, None
            self.board.resume(time.monotonic())

    def end(self) -> None:
        """The wait is over, if there was one: the program goes on."""
        if self._is_open:
            self._is_open, self._wait = False, None
            self.board.run_program(time.monotonic())

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            self.look()

    def look(self) -> None:
        """Tell the workers of other hosts what this one does; if it has waited for long, see what it waits for."""
        wait, engine, now_s = self._wait, self._engine, time.monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if wait is not None and gap_s > 2 * self._period_s + 1:
            wait.since_s = min(
                now_s, wait.since_s + gap_s
            )  # this process did not run, and perhaps its whole host did not: that says nothing
        if engine is None:
            return
        waited_s = now_s - wait.since_s if wait is not None else 0.0
        is_long = waited_s >= self._after_s
        if not is_long and self._is_on_one_board(engine):
            return
        neighbours = self.board.neighbours()
        others = [rank for rank, worker in enumerate(engine.view.workers) if str(worker) not in neighbours]
        try:
            if others and (wait is None or is_long):
                engine.save(_NAME, _to_row(self.board.read()))
            if wait is None or not is_long:
                return
            for rank in others:
                self._ask(wait, rank)
        except CommError:  # a worker is lost: the wait ends by itself
            return
        readings = [
            neighbours.get(str(worker)) or wait.answers.get(rank) for rank, worker in enumerate(engine.view.workers)
        ]
        if wait is self._wait:
            self._end_if_apart(wait, readings)
            self._end_stalls(wait, readings, waited_s)

    def _is_on_one_board(self, engine: Engine) -> bool:
        """Return whether all workers of the view can read what this one does."""
        return self.board.is_shared and len(set(engine.view.hosts)) == 1

    def _ask(self, wait: _Wait, rank: int) -> None:
        """Ask a rank what it does, unless it was asked already; take its answer if that is here."""
        if rank in wait.asked:
            row, handle = wait.asked[rank]
            if not handle.done:
                return
            if handle.succeeded:
                wait.answers[rank] = _from_row(row, wait.engine.view.workers[rank])
        row = torch.zeros(_ROW.size, dtype=torch.uint8)
        wait.asked[rank] = row, wait.engine.request(rank, _NAME, row)

    # --- workers that do not come ---

    def _end_stalls(self, wait: _Wait, readings: Sequence[Reading | None], waited_s: float) -> None:
        """Give up the workers that have kept this one waiting for too long."""
        if self._give_up is None or not wait.may_give_up or not self._rule.is_on:
            return
        own_median_s, now_s = self.board.read().median_s, time.monotonic()
        for rank, reading in enumerate(readings):
            if rank == wait.engine.rank:
                continue
            limit_s = self._rule.limit_s(reading, own_median_s) * 2**self._times
            has_waited_s = waited_s if reading is None else min(waited_s, idle_s(reading, now_s))
            self._was_long = self._was_long or has_waited_s > limit_s / 2
            if has_waited_s > limit_s:
                self._give_up(wait.engine.view.workers[rank], complaint(reading, waited_s))

    # --- workers that wait elsewhere ---

    def _end_if_apart(self, wait: _Wait, readings: Sequence[Reading | None]) -> None:
        """End all waits if every worker waits in this view, for the same meeting, and one of them at another place."""
        view = wait.engine.view
        found = [each for each in readings if each is not None and each.activity is Activity.WAITING]
        meetings = {(each.view, each.number) for each in found}
        places = tuple((each.wait, each.place) for each in found)
        if len(found) < view.size or meetings != {(view.number, wait.number)} or wait.number < 0:
            wait.looks = 0
            return
        wait.looks = wait.looks + 1 if places == wait.last_places else 1
        wait.last_places = places
        texts = [each.place for each in found]
        if wait.looks > _PATIENCE and len(set(texts)) > 1:
            other = next(rank for rank, text in enumerate(texts) if text != texts[0])
            wait.engine.abort(
                TrainError(
                    f"{view.workers[0]} waits for the others in {texts[0]}, but {view.workers[other]} in {texts[other]}: all "
                    f"workers must come to the same places of the program. {OWN_COUNTER}"
                )
            )


# --- what workers of other hosts are told ---


def _to_row(own: Reading) -> torch.Tensor:
    packed = _ROW.pack(
        own.view,
        own.number,
        own.wait,
        own.activity,
        own.step,
        own.num_begun,
        idle_s(own, time.monotonic()),
        own.median_s,
        own.place.encode(),
    )
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _from_row(row: torch.Tensor, worker: Worker) -> Reading:
    view, number, wait, activity, step, begun, for_s, median_s, place = _ROW.unpack(bytes(row.numpy()))
    return Reading(
        worker=str(worker),
        activity=Activity(activity),
        step=step,
        num_begun=begun,
        since_s=time.monotonic() - for_s,
        view=view,
        number=number,
        wait=wait,
        place=place.rstrip(b"\0").decode(errors="replace"),
        median_s=median_s,
    )
