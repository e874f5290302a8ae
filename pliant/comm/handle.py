"""What a submitted collective gives back at once: something to wait for.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Protocol

import torch

from pliant.errors import CollectiveTimeout


class Patron(Protocol):
    """Who works on what a handle stands for."""

    timeout_s: float
    """How long to wait where nothing else is said."""

    def hurry(self) -> None:
        """Somebody waits now."""

    def missing(self, handle: Handle) -> tuple[str, ...]:
        """Whom the work is waiting for."""


_making = _thread.allocate_lock()


class Handle:
    """The outcome of one collective. Any thread may wait, any number of times."""

    __slots__ = ("_acts", "_after", "_done", "_error", "_lock", "_patron", "_result", "name", "subject")

    def __init__(self, name: str, patron: Patron, subject: object) -> None:
        self.name = name
        self.subject = subject
        """What the patron knows it by."""
        self._patron = patron
        self._result: torch.Tensor | None = None
        self._error: Exception | None = None
        self._after: Callable[[], None] | None = None
        self._acts: list[Callable[[], None]] | None = None
        self._done = False
        self._lock: _thread.LockType | None = None
        """Made by the first thread that has to wait: most of a burst's handles are done before anybody asks."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._done

    @property
    def succeeded(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    @property
    def error(self) -> Exception | None:
        """What went wrong."""
        return self._error

    def then(self, act: Callable[[], None]) -> None:
        """Have `act` called when it has ended, well or badly: on the thread that ended it, which must not be kept."""
        if self._acts is None:
            self._acts = []
        self._acts.append(act)
        if self._done:  # perhaps since before it was noted
            self._act()

    def _act(self) -> None:
        while self._acts:
            try:
                act = self._acts.pop()
            except IndexError:  # another thread has taken it
                return
            act()

    def wait(self, timeout_s: float | None = None) -> torch.Tensor | None:
        """Block until the collective has ended; its result, where it has one on this rank.

        Raises:
            CollectiveTimeout: not in time (the engine's own limit if `timeout_s` is None); it goes on.
            CommError: what went wrong, on this rank or any other.
        """
        if not self._done:
            limit_s = self._patron.timeout_s if timeout_s is None else timeout_s
            if not self._block(limit_s):
                raise CollectiveTimeout(self.name, limit_s, self._patron.missing(self))
        if self._error is not None:
            # Without the traceback of whoever waited before: one error may end many collectives.
            raise self._error.with_traceback(None)
        if self._after is not None:
            self._after()
        return self._result

    def _block(self, limit_s: float) -> bool:
        with _making:
            if self._lock is None:
                self._lock = _thread.allocate_lock()
                self._lock.acquire()
        # Looked at again after the lock is there to be released: whoever ends the work sees one or the other.
        if self._done:
            return True
        self._patron.hurry()
        if not self._lock.acquire(timeout=limit_s):
            return self._done
        self._lock.release()
        return True

    def finish(self, result: torch.Tensor | None, after: Callable[[], None] | None = None) -> None:
        """Called once, by the engine. `after` runs in each thread that waits (a CUDA stream's own wait)."""
        self._result, self._after = result, after
        self._end()

    def fail(self, error: Exception) -> None:
        """Called once, by the engine."""
        self._error = error
        self._end()

    def follow(self, other: Handle) -> None:
        """End as `other` has ended."""
        if other.error is not None:
            self.fail(other.error)
        else:
            self.finish(other._result, other._after)

    def _end(self) -> None:
        # The subject refers back to this handle and holds the memory it worked on: without the
        # circle that memory is free at once, and not when the collector next comes by.
        self.subject = None
        self._done = True
        if self._lock is not None:
            self._lock.release()
        if self._acts:
            self._act()
