"""The handle that a submitted collective returns at once: wait for it, or have a function called when it is done."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pliant.errors import CollectiveTimeout

if TYPE_CHECKING:
    from pliant.comm.engine import Engine

_making_lock = _thread.allocate_lock()


class Handle:
    """The outcome of one collective. Any thread may wait, any number of times."""

    __slots__ = ("_after", "_callbacks", "_done", "_error", "_lock", "_owner", "_result", "name", "subject")

    def __init__(self, name: str, owner: Engine, subject: object) -> None:
        self.name = name
        self.subject = subject
        """The operation, or whatever else the owner identifies the work by."""
        self._owner = owner
        self._result: torch.Tensor | None = None
        self._error: Exception | None = None
        self._after: Callable[[], None] | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self._done = False
        self._lock: _thread.LockType | None = None
        """Made by the first thread that has to wait: most handles of a burst are done before anybody asks."""

    @property
    def done(self) -> bool:
        """Whether the collective has ended, with a result or an error."""
        return self._done

    @property
    def succeeded(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._done and self._error is None

    @property
    def error(self) -> Exception | None:
        """The error of a collective that has failed."""
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the collective ends, with a result or an error.

        It is called on the thread that ends the collective, which it must not block; at once if it has ended.
        """
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self._done:  # perhaps since before the callback was added
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread has taken it
                return
            callback()

    def wait(self, timeout_s: float | None = None) -> torch.Tensor | None:
        """Block until the collective has ended; return its result if it has one on this rank.

        Raises:
            CollectiveTimeout: it has not ended within `timeout_s` (default: the engine's limit). It continues.
            CommError: what went wrong, on this rank or any other.
        """
        if not self._done:
            limit_s = self._owner.timeout_s if timeout_s is None else timeout_s
            if not self._block(limit_s):
                raise CollectiveTimeout(self.name, limit_s, self._owner.missing(self))
        if self._error is not None:
            # Without the traceback of earlier waiters: one error may end many collectives.
            raise self._error.with_traceback(None)
        if self._after is not None:
            self._after()
        return self._result

    def _block(self, limit_s: float) -> bool:
        with _making_lock:
            if self._lock is None:
                self._lock = _thread.allocate_lock()
                self._lock.acquire()
        # Checked again now that there is a lock to release: the thread that ends the work sees one or the other.
        if self._done:
            return True
        self._owner.wake()
        if not self._lock.acquire(timeout=limit_s):
            return self._done
        self._lock.release()
        return True

    def finish(self, result: torch.Tensor | None, after: Callable[[], None] | None = None) -> None:
        """End with a result; called once, by the engine. `after` runs in each waiting thread (to wait on a stream)."""
        self._result, self._after = result, after
        self._end()

    def fail(self, error: Exception) -> None:
        """End with an error; called once, by the engine."""
        self._error = error
        self._end()

    def copy_outcome(self, other: Handle) -> None:
        """End with the outcome of `other`, which has ended."""
        if other.error is not None:
            self.fail(other.error)
        else:
            self.finish(other._result, other._after)

    def _end(self) -> None:
        # The subject refers back to this handle and holds the memory it worked on. Without the
        # cycle that memory is free at once, and not at the next garbage collection.
        self.subject = None
        self._done = True
        if self._lock is not None:
            self._lock.release()
        if self._callbacks:
            self._run_callbacks()
