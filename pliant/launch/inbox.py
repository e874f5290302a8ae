"""Where everything that a runner must react to comes in: one queue, one wait."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterator
from types import FrameType

from pliant.cluster import Worker
from pliant.launch.events import Event, Interrupted

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Inbox:
    """Events from other threads, signals, and ends of processes, waited for together."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._events: deque[Event] = deque()

    def post(self, event: Event) -> None:
        """Hand over an event, from any thread or a signal handler's frame."""
        self._events.append(event)
        with contextlib.suppress(OSError):  # full: the wait will end anyway; closed: nobody waits any more
            self._wake_write.send(b"\0")

    def watch(self, worker: Worker, pidfd: int) -> None:
        self._selector.register(pidfd, selectors.EVENT_READ, worker)

    def forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)

    def wait(self, timeout_s: float | None) -> tuple[list[Event], list[Worker]]:
        """What came in, and the workers that ended; both empty when the time is over."""
        ready = self._selector.select(timeout_s)
        ended = []
        for key, _ in ready:
            if key.data is not None:
                ended.append(key.data)
                continue
            with contextlib.suppress(BlockingIOError):
                while self._wake_read.recv(4096):
                    continue
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events, ended

    def close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP come in as events, until the end of the block; SIGHUP not under nohup."""

        def note(signum: int, _: FrameType | None) -> None:
            self.post(Interrupted(signum))

        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [signum for signum in HANDLED if signum != signal.SIGHUP or not under_nohup]
        before = {signum: signal.signal(signum, note) for signum in handled}
        # Python runs handlers between bytecodes of the main thread; the descriptor ends the wait.
        wake = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wake)
            for signum, handler in before.items():
                signal.signal(signum, handler)
