"""What waits to leave on one connection, and what goes next. Pure: no socket; it is told how much has gone.

Control frames overtake data, data goes by priority, and a frame that has begun is finished first. What
was queued in one view leaves before anything of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pliant.comm.slices import PriorityQueue

TOGETHER_BYTES = 16 << 10
"""Frames are put together until they are this large: a system call has its price."""

Sent = Callable[[], None]
"""Called when the last byte of a frame is with the kernel."""
Queued = tuple[list[memoryview], Sent | None]


class Outbox:
    """The frames of one connection that have not left yet. In turns: `fill`, write some of `views`, `advance`."""

    def __init__(self) -> None:
        self.data: PriorityQueue[Queued] = PriorityQueue()
        """Frames with payloads, each with its header first: push them here."""
        self.fds: list[int] = []
        """Descriptors that go with the first byte of what is next."""
        self.num_bytes = 0
        """How much is next: nothing can overtake that any more."""
        self._control = bytearray()
        self._with_fds: deque[tuple[bytes, int]] = deque()
        self._elder: deque[Queued] = deque()
        """What was queued in earlier views."""
        self._next: deque[tuple[memoryview, Sent | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._next or self._with_fds or self._elder or self._control or len(self.data))

    def say(self, header: bytes, payload: bytes, fd: int | None) -> None:
        """Queue a control frame: it leaves before all data that has not begun to."""
        if fd is not None:
            # Alone, and before all else: the kernel passes only so many descriptors at a time, and
            # what is said next may speak of this one.
            self._with_fds.append((header + payload, fd))
            return
        self._control += header
        self._control += payload

    def end_view(self) -> None:
        """Let all that waits now leave before anything that is queued later."""
        if self._control:
            self._elder.append(([memoryview(bytes(self._control))], None))
            self._control.clear()
        while len(self.data):
            self._elder.append(self.data.pop())

    def fill(self) -> bool:
        """Have something that is next, and small frames together; False if there is nothing at all."""
        while self.num_bytes < TOGETHER_BYTES and not self.fds:
            if self._with_fds:
                if self._next:
                    break
                frame, fd = self._with_fds.popleft()
                self._add(([memoryview(frame)], None))
                self.fds = [fd]
            elif self._elder:
                self._add(self._elder.popleft())
            elif self._control:
                self._add(([memoryview(bytes(self._control))], None))
                self._control.clear()
            elif len(self.data):
                self._add(self.data.pop())
            else:
                break
        return bool(self._next)

    def _add(self, frame: Queued) -> None:
        views, sent = frame
        for view in views[:-1]:
            self._next.append((view, None))
            self.num_bytes += len(view)
        self._next.append((views[-1], sent))
        self.num_bytes += len(views[-1])

    @property
    def first(self) -> memoryview:
        """The first run of memory of what is next."""
        return self._next[0][0]

    def views(self, limit: int) -> list[memoryview]:
        """What is next, up to `limit` bytes of it."""
        if self.num_bytes <= limit:
            return [view for view, _ in self._next]
        views, room = [], limit
        for view, _ in self._next:
            views.append(view[:room])
            room -= len(views[-1])
            if room == 0:
                break
        return views

    def advance(self, sent: int) -> None:
        """So much of what is next has gone."""
        queue = self._next
        self.num_bytes -= sent
        while queue and sent >= len(queue[0][0]):
            view, done = queue.popleft()
            sent -= len(view)
            if done is not None:
                done()
        if sent:
            view, done = queue[0]
            queue[0] = (view[sent:], done)

    def clear(self) -> None:
        """The connection is closed: nothing leaves any more."""
        self.data.clear()
        self._elder.clear()
        self._next.clear()
        self.num_bytes = 0
