"""The progress board: what each worker of a host does now, in memory that its runner and its neighbours read.

A worker writes by plain stores, without a lock or a system call, and whoever reads needs nothing of the worker: not even
that its Python runs. The runner makes the board, with a slot for each of its workers, which inherit it as a descriptor.
Behind the slots there is room for a text: there a worker's threads show their stacks if the runner asks for them.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import hashlib
import mmap
import os
import signal
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.identity import WorkerSpec

NUM_SLOTS = 1024
SLOT_BYTES = 512
_TEXT = NUM_SLOTS * SLOT_BYTES
_MAX_TEXT_BYTES = 64 << 10
_NAME = "pliant-board"
BOARD_VARIABLE = "PLIANT_BOARD_FD"
"""The environment variable that names a worker's descriptor of the board."""
STACK_SIGNAL = signal.SIGRTMAX - 2
"""A worker that gets this signal shows the stacks of its threads on the board, whatever it does."""
KEPT_STEPS = 16
"""The median is that of so many steps."""

_WHO = struct.Struct("=qQq64s")
"""The process, the identity of its main thread as Python shows it, the thread that takes signals, the worker."""
_NOW = struct.Struct("=qqqd")
"""The activity, the step, how many steps were begun in this view, since when."""
_MEETING = struct.Struct("=qqq112s")
"""The view, the number, how often this worker has waited, and the place of a wait for the other workers."""
_RANK = struct.Struct("=q")
_TIMES = struct.Struct("=d")
_RECENT = struct.Struct(f"={KEPT_STEPS}d")
_FAILURE = struct.Struct("=16s")
"""A digest of the error that has ended the program."""
_NOW_AT, _MEETING_AT, _RANK_AT, _MOVED_AT, _PULSE_AT, _RECENT_AT, _FAILURE_AT = 96, 128, 264, 272, 280, 288, 416


class Activity(enum.IntEnum):
    """What a worker does."""

    NONE = 0
    """Its program has not joined."""
    JOINED = 1
    """Its program has joined, and does not train yet."""
    PROGRAM = 2
    """It runs the program's code outside of turns."""
    TURN = 3
    """A replica has its turn."""
    WAITING = 4
    """It has handed in its part, and waits for other workers."""
    ENDING = 5
    """Its program has ended, with an error or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a slot of the board says."""

    worker: str
    activity: Activity
    step: int
    num_begun: int
    """Steps that it has begun in its present view."""
    since_s: float
    """When it began to do what it does, by time.monotonic()."""
    median_s: float
    """The median time from one step to the next, lately; 0 where too few are known."""
    view: int = 0
    number: int = 0
    """What all workers have done together before, where it waits."""
    wait: int = 0
    """How often it has waited for others: another number says that it has moved on."""
    place: str = ""
    """Where in the program it waits for the others, or waited last."""
    rank: int = 0
    pid: int = 0
    main_thread: int = 0
    """As Python's own stacks name it."""
    signal_thread: int = 0
    """The thread that may be interrupted by a signal without harm; 0: any."""
    pulse_s: float = 0.0
    """When its I/O thread last ran, which cannot while another thread holds the interpreter lock; 0: it has none."""
    moved_s: float = 0.0
    """When the runner last saw that its stack had changed; 0: never."""

    @property
    def is_busy(self) -> bool:
        """Whether it runs code of its own, on which the others depend."""
        return self.activity in (Activity.PROGRAM, Activity.TURN)


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """The error that has ended a worker's program: two are equal if the same error has come at the same step."""

    step: int
    digest: bytes


class Board:
    """The memory of all slots, mapped. In the runner, which makes it, and in its workers."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _TEXT)
        self.view = memoryview(self._memory)

    @classmethod
    def make(cls) -> Board:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _TEXT)
        return cls(descriptor)

    def close(self) -> None:
        self.view.release()
        self._memory.close()
        os.close(self.descriptor)

    def clear(self, slot: int) -> None:
        """Prepare a slot for another worker."""
        begin = slot * SLOT_BYTES
        self.view[begin : begin + SLOT_BYTES] = bytes(SLOT_BYTES)

    def has_joined(self, slot: int) -> bool:
        """Return whether the program of the worker with this slot has joined its job."""
        return bool(_NOW.unpack_from(self.view, slot * SLOT_BYTES + _NOW_AT)[0])

    def failure(self, slot: int) -> ProgramFailure | None:
        """Return the error that has ended the program of the worker with this slot; None if there was none."""
        [digest] = _FAILURE.unpack_from(self.view, slot * SLOT_BYTES + _FAILURE_AT)
        step = _NOW.unpack_from(self.view, slot * SLOT_BYTES + _NOW_AT)[1]
        return ProgramFailure(step, digest) if any(digest) else None

    def note_moved(self, slot: int, at_s: float) -> None:
        """Note that the worker's stack was seen to change."""
        _TIMES.pack_into(self.view, slot * SLOT_BYTES + _MOVED_AT, at_s)

    def read(self, slot: int) -> Reading | None:
        """Return what a slot says; None if its worker has not joined, or writes just now."""
        place = self.view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        data = bytes(place)
        return _parse(data) if data == bytes(place) else None

    def read_all(self) -> dict[str, Reading]:
        """Return what the workers of this host do that have joined, by their names."""
        slots = [slot for slot in range(NUM_SLOTS) if _WHO.unpack_from(self.view, slot * SLOT_BYTES)[0]]
        return {reading.worker: reading for slot in slots if (reading := self.read(slot)) is not None}

    # --- the text ---

    def begin_text(self) -> None:
        """Make room for the text that is written next."""
        os.ftruncate(self.descriptor, _TEXT)
        os.lseek(self.descriptor, _TEXT, os.SEEK_SET)

    def read_text(self) -> str:
        return os.pread(self.descriptor, _MAX_TEXT_BYTES, _TEXT).decode(errors="replace")


# What is called at every step: as quick as it can be.
_show_now, _show_time = _NOW.pack_into, _TIMES.pack_into
_TURN, _PROGRAM = int(Activity.TURN), int(Activity.PROGRAM)


class ProgressBoard:
    """A worker's own slot of the board. A process without a runner has a board of its own, that nobody else sees."""

    def __init__(self, board: Board | None = None, slot: int = 0) -> None:
        self._board = board
        self._slot = memoryview(bytearray(SLOT_BYTES)) if board is None else board.view[slot * SLOT_BYTES :]
        self._begun = self._recent = self._step = self._waits = 0
        self._own = _PROGRAM
        self._worker = ""
        self._is_own = False

    @classmethod
    def open(cls, spec: WorkerSpec) -> ProgressBoard:
        """Return this worker's slot, and show there that its program has joined."""
        made = cls()
        if spec.board_fd is not None:
            with contextlib.suppress(OSError, ValueError):
                # A program between the runner and this one may have closed it, and the number may be another file's now.
                if os.readlink(f"/proc/self/fd/{spec.board_fd}").startswith(f"/memfd:{_NAME}"):
                    made = cls(Board(os.dup(spec.board_fd)), spec.board_slot)
                    made._is_own = True
                    made._show_stacks()
        made._worker = str(spec.worker)
        made.take_signals_on(0)
        _NOW.pack_into(made._slot, _NOW_AT, Activity.JOINED, 0, 0, time.monotonic())
        return made

    def _show_stacks(self) -> None:
        assert self._board is not None, "somebody could read it"
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:  # else the program uses it
            faulthandler.register(STACK_SIGNAL, self._board.descriptor, all_threads=True)

    def take_signals_on(self, thread: int) -> None:
        """Show which thread of this process (its number for the kernel) is interrupted by a signal without harm; 0: any."""
        main = threading.main_thread().ident or 0
        _WHO.pack_into(self._slot, 0, os.getpid(), main, thread, self._worker.encode())

    def enter_view(self, rank: int) -> None:
        self._begun = 0
        _RANK.pack_into(self._slot, _RANK_AT, rank)

    def close(self) -> None:
        """Leave the slot as it is, and give up the memory."""
        self._slot.release()
        if self._board is not None and self._is_own:
            faulthandler.unregister(STACK_SIGNAL)  # its descriptor may soon be another file's
            self._board.close()

    # --- what it does ---

    def begin_turn(self, step: int, now_s: float, *, begins_step: bool = False) -> None:
        """A replica has its turn from now on, or the step begins with the data of the first turn."""
        slot = self._slot
        self._step, self._own = step, _TURN
        if begins_step:
            self._recent = recent = (self._recent + 1) % KEPT_STEPS
            self._begun += 1
            _show_time(slot, _RECENT_AT + 8 * recent, now_s)
        _show_now(slot, _NOW_AT, _TURN, step, self._begun, now_s)

    def run_program(self, now_s: float) -> None:
        """The program's code outside of turns runs from now on."""
        self._own = _PROGRAM
        _show_now(self._slot, _NOW_AT, _PROGRAM, self._step, self._begun, now_s)

    def begin_wait(self, view: int, number: int, place: str, now_s: float) -> None:
        """The others are waited for from now on."""
        self._waits += 1
        _MEETING.pack_into(self._slot, _MEETING_AT, view, number, self._waits, place.encode())
        _NOW.pack_into(self._slot, _NOW_AT, Activity.WAITING, self._step, self._begun, now_s)

    def resume(self, now_s: float) -> None:
        """What was interrupted by a wait goes on."""
        _NOW.pack_into(self._slot, _NOW_AT, self._own, self._step, self._begun, now_s)

    def show_pulse(self, now_s: float) -> None:
        """The I/O thread runs."""
        _TIMES.pack_into(self._slot, _PULSE_AT, now_s)

    def end(self) -> None:
        """The program has ended."""
        _NOW.pack_into(self._slot, _NOW_AT, Activity.ENDING, self._step, self._begun, time.monotonic())

    # --- what this worker and its neighbours do ---

    def read(self) -> Reading:
        """Return what this worker does."""
        found = _parse(bytes(self._slot[:SLOT_BYTES]))
        return found or Reading(
            worker=self._worker, activity=Activity.NONE, step=0, num_begun=0, since_s=0.0, median_s=0.0
        )

    @property
    def is_shared(self) -> bool:
        """Whether a runner, and the workers of this host, can read it."""
        return self._board is not None

    def neighbours(self) -> dict[str, Reading]:
        """Return what the workers of this host do, this one among them, by their names; nothing without a runner."""
        return self._board.read_all() if self._board is not None else {}


def note_failure(spec: WorkerSpec, error: str) -> None:
    """Show on the board of the runner which error ends this program, in words that are the same whenever it comes."""
    with contextlib.suppress(OSError, ValueError):
        if spec.board_fd is None or not os.readlink(f"/proc/self/fd/{spec.board_fd}").startswith(f"/memfd:{_NAME}"):
            return
        with mmap.mmap(spec.board_fd, _TEXT) as memory:  # the job may have given up its own by now
            digest = hashlib.blake2b(error.encode(errors="replace"), digest_size=_FAILURE.size).digest()
            _FAILURE.pack_into(memory, spec.board_slot * SLOT_BYTES + _FAILURE_AT, digest)


def _parse(data: bytes) -> Reading | None:
    pid, main, thread, name = _WHO.unpack_from(data)
    activity, step, begun, since_s = _NOW.unpack_from(data, _NOW_AT)
    view, number, wait, place = _MEETING.unpack_from(data, _MEETING_AT)
    begins = sorted(filter(None, _RECENT.unpack_from(data, _RECENT_AT)))
    steps = [after - before for before, after in pairwise(begins)]
    try:
        doing = Activity(activity)
    except ValueError:
        return None
    if doing is Activity.NONE:
        return None
    return Reading(
        worker=_text(name),
        activity=doing,
        step=step,
        num_begun=begun,
        since_s=since_s,
        median_s=statistics.median(steps) if len(steps) > 1 else 0.0,
        view=view,
        number=number,
        wait=wait,
        place=_text(place),
        rank=_RANK.unpack_from(data, _RANK_AT)[0],
        pid=pid,
        main_thread=main,
        signal_thread=thread,
        pulse_s=_TIMES.unpack_from(data, _PULSE_AT)[0],
        moved_s=_TIMES.unpack_from(data, _MOVED_AT)[0],
    )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
