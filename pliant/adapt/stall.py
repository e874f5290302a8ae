"""Says so when something takes suspiciously long, while it still does.

    with stalls.watch("all-reduce"):
        handle.wait()

One thread looks every few seconds, and only as long as there is something to look at: begin and end of a watch cost
a dictionary entry, and an idle job is never woken.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

PERIOD_S = 3.0
VARIABLES = ("PLIANT_STALL_DETECTION", "KUNGFU_CONFIG_ENABLE_STALL_DETECTION")
_TRUE = ("1", "true", "yes", "on")


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks for it."""
    found = os.environ if environ is None else environ
    return any(found.get(name, "").strip().lower() in _TRUE for name in VARIABLES)


class StallDetector:
    """Watches what may block. Any thread may use it; close it, or use it in `with`."""

    def __init__(
        self, say: Callable[[str], None], period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        """Stalls so far."""
        self._say, self._period_s, self._clock = say, period_s, clock
        self._open: dict[int, tuple[str, float]] = {}
        """What is being watched: its name, and since when."""
        self._told: set[int] = set()
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._asleep, self._closed = True, False
        """Asleep: the thread waits for the first thing to watch, without a limit."""
        self._busy = False
        """Whether anything was watched since the last look."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Have it said if the block takes long."""
        number = self.begin(name)
        try:
            yield
        finally:
            self.end(number)

    def begin(self, name: str) -> int:
        """Watch from now on; what to give to `end`."""
        number = next(self._numbers)
        self._open[number] = (name, self._clock())
        self._busy = True
        if self._asleep:
            with self._news:
                self._asleep = False
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._look_on, name="stalls", daemon=True)
                    self._thread.start()
                self._news.notify()
        return number

    def end(self, number: int) -> None:
        name, since_s = self._open.pop(number)
        if number in self._told:
            self._told.discard(number)
            self._say(f"{name} recovered after {self._clock() - since_s:.1f}s")

    @property
    def stalled_s(self) -> float:
        """How long the longest stall that is going on has lasted; 0 if there is none."""
        now_s = self._clock()
        open_now = self._open.copy()
        return max((now_s - open_now[number][1] for number in set(self._told) if number in open_now), default=0.0)

    def look(self) -> bool:
        """Say what has taken long by now; whether there is anything to look at again later."""
        now_s = self._clock()
        for number, (name, since_s) in self._open.copy().items():
            took_s = now_s - since_s
            if took_s < self._period_s:
                continue
            if number not in self._told:
                self._told.add(number)
                self.count += 1
            if number not in self._open:  # it has ended meanwhile, and nobody would say so
                self._told.discard(number)
                continue
            self._say(f"{name} stalled for {took_s:.1f}s")
        busy, self._busy = self._busy, False
        return busy or bool(self._open)

    def _look_on(self) -> None:
        with self._news:
            while not self._closed:
                self._news.wait(None if self._asleep else self._period_s)
                if not self._closed and not self._asleep and not self.look():
                    self._asleep = True
                    if self._open:  # begun between the look and falling asleep
                        self._asleep = False

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> StallDetector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
