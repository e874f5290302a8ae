"""Watches the workers of a runner: which are stopped, which are stuck, and what their threads do.

Nothing here depends on the worker's Python: what a worker does is on the progress board, whether its process is stopped in
/proc, and its stacks are shown by a handler that needs no interpreter lock. Nobody is replaced here: the workers that wait for
one decide that (`train.meeting`), since a job in which all are busy would lose its state.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant.child import STOPPED, process_state
from pliant.cluster import Worker
from pliant.duration import span_text
from pliant.errors import PliantError
from pliant.launch import events
from pliant.progress_board import STACK_SIGNAL, Activity, Board, Reading
from pliant.record import Recorder
from pliant.stall_rule import StallRule, describe, idle_s

log = logging.getLogger(__name__)

PERIOD_S = 1.0
STACK_WAIT_S = 0.5
"""How long a process has to show its stacks."""
WORK_PER_S = 1.0
"""A process does nothing if its main thread wakes up less often, and it and its children compute for fewer hundredths of a
second."""
CHECKS = 8
"""Whether a process does something is looked at so often within the time that it may do nothing."""
MOST_FRAMES = 24
MOST_CHILDREN = 8
_STARTER = f'"{Path(__file__).with_name("warm.py")}"'
"""In whose frames the program of a worker begins."""
NO_STACK = "it did not show its stack"


@dataclass(slots=True)
class Watched:
    """A worker that is watched."""

    worker: Worker
    pid: int
    slot: int
    stopped_s: float = 0.0
    """When its process was first seen stopped; 0: it is not."""
    reported_s: float = 0.0
    """When it was last reported that it is stopped."""
    shown: float = 0.0
    """Since when it did what it was last seen stuck in."""
    worked_s: float = 0.0
    """When its process was last seen to do something, or was started."""
    work: int = 0
    """What `_work_of` said when its process was last looked at."""
    work_s: float = 0.0
    """When that was."""
    is_idle_shown: bool = False
    """Whether it was told that its process does nothing."""
    sampled_s: float = 0.0
    stack: Sequence[str] = ()
    """Its stack when it was last sampled, and when that was."""


class WorkerWatch:
    """Looks at the workers of this host now and then, from a thread of its own."""

    def __init__(
        self,
        board: Board,
        rule: StallRule,
        post: Callable[[events.Event], None],
        *,
        stopped_limit_s: float,
        replaces: bool,
        must_join: bool = True,
        record: str = "",
    ) -> None:
        """
        Args:
            stopped_limit_s: how long a process may be stopped.
            replaces: whether the job replaces workers that are stuck.
            must_join: whether a program that never joins the job is a mistake.
            record: the record of the job, where there is one.
        """
        self._board, self._rule, self._post = board, rule, post
        self._stopped_limit_s, self._replaces, self._record = stopped_limit_s, replaces, record
        self._start_limit_s = rule.start_limit_s if must_join else float("inf")
        self._watched: dict[Worker, Watched] = {}
        self._lock = threading.Lock()
        """Held while a worker gets a signal, which must not go to another process that has got its number."""
        self._closing = threading.Event()
        self._period_s = max(0.1, min(PERIOD_S, stopped_limit_s / 4, (rule.timeout_s or PERIOD_S * 8) / 8))
        self._thread = threading.Thread(target=self._run, name="watch-workers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def add(self, worker: Worker, pid: int, slot: int) -> None:
        with self._lock:
            self._watched[worker] = Watched(worker, pid, slot, worked_s=time.monotonic())

    def forget(self, worker: Worker) -> None:
        """Watch a worker no more: its process has ended, and is about to be reaped."""
        with self._lock:
            self._watched.pop(worker, None)

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self.look(time.monotonic())
            except Exception:  # whatever is wrong with the watch, the job goes on
                log.exception("the watch over the workers has failed, and is tried again")

    def look(self, now_s: float) -> None:
        """Look at all workers."""
        watched = [(each, process_state(each.pid) in STOPPED) for each in list(self._watched.values())]
        others_run = not all(is_stopped for _, is_stopped in watched)
        for each, is_stopped in watched:
            reading = self._board.read(each.slot)
            if reading is not None and reading.activity is Activity.ENDING:
                continue
            if is_stopped:
                self._on_stopped(each, now_s, others_run)
                continue
            each.stopped_s = each.reported_s = 0.0
            if reading is not None and (reading.is_busy or reading.activity is Activity.WAITING):
                self._on_busy(each, reading, now_s)
            if reading is None or (reading.activity is not Activity.WAITING and not reading.num_begun):
                self._on_starting(each, reading, now_s)

    def _on_stopped(self, each: Watched, now_s: float, others_run: bool) -> None:
        each.stopped_s = each.stopped_s or now_s
        if now_s - max(each.stopped_s, each.reported_s) >= self._stopped_limit_s:
            each.reported_s = now_s
            self._post(events.Stopped(each.worker, now_s - each.stopped_s, others_run))

    def _on_starting(self, each: Watched, reading: Reading | None, now_s: float) -> None:
        """Look at a worker that has not begun its first step: the others, or its runner, wait for it.

        Nobody can say how long a start takes: data are downloaded, kernels compiled. So only a process that does nothing at
        all is stuck.
        """
        limit_s = self._start_limit_s
        if now_s - each.work_s >= limit_s / CHECKS:
            work = _work_of(each.pid)
            is_running = process_state(each.pid) == "R"  # or would run, if it had a core
            if is_running or not each.work_s or work - each.work >= WORK_PER_S * (now_s - each.work_s):
                each.worked_s, each.is_idle_shown = now_s, False
            each.work, each.work_s = work, now_s
        idle_s = now_s - each.worked_s
        if idle_s > limit_s / 2 and not each.is_idle_shown and (reading is None or not reading.is_busy):
            each.is_idle_shown = True
            where = describe(reading) if reading is not None else "which has not called pliant.join() yet"
            stack = self._stack_of(each, reading)
            follows = (
                f"After {span_text(limit_s)} it is replaced." if self._replaces else "Without -w it is not replaced."
            )
            calls = "\n  ".join([*stack, *self._children_of(each, reading)])
            log.warning(
                "worker %s, %s, has done nothing for %s. %s Its main thread, the last call first:\n  %s",
                each.worker, where, span_text(idle_s), follows, calls,
            )  # fmt: skip
        if idle_s > limit_s:
            self._post(events.Idle(each.worker, idle_s, limit_s))

    def _on_busy(self, each: Watched, reading: Reading, now_s: float) -> None:
        for_s = idle_s(reading, now_s)
        if reading.activity is Activity.PROGRAM and now_s - max(each.sampled_s, reading.since_s) > self._sample_s(
            reading
        ):
            stack = self._stack_of(each, reading)
            if each.stack and stack != each.stack and each.sampled_s > reading.since_s:
                self._board.note_moved(each.slot, now_s)
            each.stack, each.sampled_s = stack, now_s
        if for_s > self._rule.look_s(reading) and each.shown != reading.since_s:
            each.shown = reading.since_s
            self._show(each, reading, for_s)

    def _sample_s(self, reading: Reading) -> float:
        """Return how often to see whether a worker outside of a turn moves on."""
        return self._rule.look_s(reading) / 4

    # --- what is told ---

    def _show(self, each: Watched, reading: Reading, for_s: float) -> None:
        """Tell who is stuck, where, and what comes next."""
        others = [self._board.read(other.slot) for other in list(self._watched.values())]
        waiting = sum(other is not None and other.activity is Activity.WAITING for other in others)
        stack = self._stack_of(each, reading)
        children = self._children_of(each, reading)
        usual = f" (its steps take {reading.median_s:.3g} s)" if reading.median_s else ""
        text = "\n  ".join(
            [
                f"worker {each.worker} (rank {reading.rank}) has been {describe(reading)} for {span_text(for_s)}{usual}; "
                f"{waiting or 'no'} other workers of this host wait for it. {self._what_follows(reading)} Its main thread, the "
                "last call first:",
                *stack,
                *children,
            ]
        )
        log.warning("%s", text)
        if self._record and Path(self._record).exists():
            try:
                with Recorder(self._record) as record:
                    record.write(
                        "stall",
                        reading.step,
                        worker=str(each.worker),
                        rank=reading.rank,
                        for_s=round(for_s, 1),
                        what=describe(reading),
                        stack=[*stack, *children],
                    )
            except (OSError, PliantError) as error:
                log.warning("the stall is not in the record: %s", error)

    def _what_follows(self, reading: Reading) -> str:
        limit_s = self._rule.limit_s(reading)
        if not self._rule.is_on:
            return "It is not replaced (--stall-timeout off)."
        if not self._replaces:
            return "Without -w it is not replaced."
        return f"Who keeps others waiting for {span_text(limit_s)} here is replaced (--stall-timeout)."

    # --- stacks ---

    def _stack_of(self, each: Watched, reading: Reading | None) -> list[str]:
        """Return the calls in progress in a worker's main thread, the last one first."""
        text = self._take_text(each, each.pid, reading.signal_thread if reading is not None else 0)
        return _main_stack(text, reading) or [
            f"{NO_STACK} (its process is in state {process_state(each.pid) or 'gone'})"
        ]

    def _children_of(self, each: Watched, reading: Reading | None) -> list[str]:
        """Return the processes that a worker has started, such as those of a DataLoader, and what those of them do that are
        forks of it."""
        lines = []
        for pid in _children(each.pid)[:MOST_CHILDREN]:
            lines.append(f"its process {pid} ({_name(pid)}, state {process_state(pid)}):")
            stack = _main_stack(self._take_text(each, pid, 0), reading)
            lines += ["  " + line for line in stack[: MOST_FRAMES // 2]]
        return lines

    def _take_text(self, each: Watched, pid: int, thread: int) -> str:
        """Have a process show its stacks, and return them; nothing if it does not."""
        with self._lock:
            if each.worker not in self._watched or not _catches(pid):
                return ""
            self._board.begin_text()
            with contextlib.suppress(ProcessLookupError):  # a process of a loader may end at any moment
                _send(pid, thread)
        deadline_s, text = time.monotonic() + STACK_WAIT_S, ""
        while time.monotonic() < deadline_s:
            self._closing.wait(0.01)
            before, text = text, self._board.read_text()
            if text and text == before:
                break
        return text


def _send(pid: int, thread: int) -> None:
    """Send the signal that shows stacks, to this thread of the process where the system can do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not (thread and hasattr(libc, "tgkill") and libc.tgkill(pid, thread, int(STACK_SIGNAL)) == 0):
        os.kill(pid, STACK_SIGNAL)


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for the signal: without one it would end by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (int(STACK_SIGNAL) - 1) & 1)


def _main_stack(text: str, reading: Reading | None) -> list[str]:
    """Return the calls in progress in the main thread of a worker, or of a fork of it, the last one first."""
    blocks = text.split("\n\n")
    name = f"0x{reading.main_thread if reading is not None else 0:016x}"
    # A fork's main thread is that which has forked it. The oldest thread stands last.
    block = next((block for block in blocks if name in block.partition("\n")[0]), blocks[-1])
    calls = [line.strip() for line in block.splitlines() if line.startswith("  ") and _STARTER not in line]
    return calls[:MOST_FRAMES]


def _children(pid: int) -> list[int]:
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*/children")):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return found


def _work_of(pid: int) -> int:
    """Return a number that grows as a process works: how often its main thread was run, and the hundredths of a second that
    it has computed, and so have the processes that it has started, with their own children. (A thread that has a core for
    itself is run once, and computes on.)"""
    work = 0
    main_thread = Path(f"/proc/{pid}/task/{pid}")
    try:
        for line in (main_thread / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                work += int(line.split()[1])
        work += sum(map(int, _numbers_of(main_thread)[11:13]))
    except (OSError, ValueError):
        return 0
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        try:
            work += sum(map(int, _numbers_of(Path(f"/proc/{child}"))[11:15]))
        except OSError:
            continue
        waiting += _children(child)
    return work


def _numbers_of(task: Path) -> list[str]:
    """Return what the kernel says of a process or thread, without its number and name."""
    return (task / "stat").read_text().rpartition(")")[2].split()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
