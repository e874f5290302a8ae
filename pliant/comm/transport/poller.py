"""What the engine's thread sleeps on: the sockets of links, and a bell that any thread may ring."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from pliant.comm.transport.link import Link

# As selectors has it: what has hung up is both, so that reading or writing tells why.
READABLE, WRITABLE = ~select.EPOLLOUT, ~select.EPOLLIN
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Poller:
    """Epoll, and who is behind each descriptor. Any thread may `ring`; the rest is the engine's thread's."""

    def __init__(self) -> None:
        # Not `selectors`: after each sleep the caches are cold, and every layer of Python costs.
        self._epoll = select.epoll()
        self.poll = self._epoll.poll
        """(descriptor, events) of what is ready, after so many seconds at the latest."""
        self.watched: dict[int, tuple[Link, int]] = {}
        """The links that epoll looks at, and what for, by descriptor."""
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Negative once it is silenced."""
        self._ringing = threading.Lock()
        """Held while the bell is rung, so that its number cannot meanwhile mean another file."""

    def listen(self, to_bell: bool) -> None:
        """Whether ringing ends a `poll`."""
        if to_bell:
            self._epoll.register(self.bell, select.EPOLLIN)
        else:
            self._epoll.unregister(self.bell)

    def ring(self) -> None:
        """End the engine's thread's sleep."""
        with self._ringing:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    def hush(self) -> None:
        """The bell was heard."""
        os.eventfd_read(self.bell)

    def watch(self, link: Link, *, writing: bool) -> None:
        """Look for something to read, unless the link is paused; and if `writing`, for room."""
        events = 0 if link.paused else select.EPOLLIN
        if writing:
            events |= select.EPOLLOUT
        fd = link.sock.fileno()
        watched = self.watched.get(fd)
        if not events:
            self.unwatch(link)
        elif watched is None:
            self._epoll.register(fd, events)
            self.watched[fd] = link, events
        elif watched != (link, events):
            self._epoll.modify(fd, events)
            self.watched[fd] = link, events

    def unwatch(self, link: Link) -> None:
        fd = link.sock.fileno()
        if self.watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()
        with self._ringing:
            if self.bell >= 0:
                os.close(self.bell)
            self.bell = -1

    def abandon(self) -> None:
        """In a forked child: close without changing anything that is shared with the parent."""
        self._ringing = threading.Lock()  # the parent's thread may have held it at the fork
        self.close()


def hung_up(link: Link) -> bool:
    """Whether the peer has closed its end, even if there is still something to read."""
    poll = select.poll()
    poll.register(link.sock, select.POLLIN | select.POLLRDHUP)
    return any(events & _HUNG_UP for _, events in poll.poll(0))
