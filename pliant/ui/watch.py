"""Looks at all sources again and again, in a thread, and keeps what was seen for whoever draws it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pliant.ui.seen import Seen, Source

log = logging.getLogger(__name__)

LOOK_S = 0.5


class Watch:
    """Hold `lock` while reading a story: the thread adds to it. All else in `seen` is replaced as a whole, never half."""

    def __init__(self, sources: Sequence[Source], look_s: float = LOOK_S) -> None:
        self._sources = sources
        self._look_s = look_s
        self._stopping = threading.Event()
        self.seen = Seen()
        self.lock = threading.Lock()
        self.looks = 0

    def look(self) -> None:
        """Once, now."""
        for source in self._sources:
            source.look(self.seen)
        unread = list(self.seen.jobs.values())
        while unread and not self._stopping.is_set():
            unread = [job for job in unread if job.read(self.lock)]
        self.looks += 1

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Look until the block ends."""
        thread = threading.Thread(target=self._work, name="pliant-watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join(timeout=10)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:  # one odd record must not end the page for the others
                log.exception("a look at the jobs failed")
            self._stopping.wait(self._look_s)
