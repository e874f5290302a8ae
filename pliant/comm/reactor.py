"""The engine's thread: waits for sockets and submissions, and lets `comm.core` act on them.

One thread per engine owns all sockets and does all folding. It sleeps in a selector and never polls;
it notices peers that died or fell silent. What a frame or a submission means is not its business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pliant.comm.core import Core
from pliant.comm.link import Link, header
from pliant.comm.operation import Burst, Operation
from pliant.comm.wire import Kind
from pliant.errors import CommError, EngineClosed

log = logging.getLogger(__name__)

DOZE_S = 0.001
"""Submissions come in bursts. When the first one wakes the thread, and after the last one it has seen, the
thread dozes for this long: what is submitted meanwhile is found when it wakes, without a system call and a
fight for the interpreter for each tensor. Whoever waits for a result wakes it at once."""
ANNOUNCE_S = 0.01
"""Results are announced when all that was submitted together is done, or this long after the last time."""
WORK_S = 0.001
"""Folding goes on for at most about this long before the sockets have their turn."""
PARTING_S = 1.0
"""Who leaves waits this long for the others to take note."""
SHARED_WORK_S = 0.004
"""The same where all peers share memory: no wire runs dry meanwhile, and fewer notices cost less."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Something else than a collective for the engine's thread to do."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called instead if the engine ends first."""


class Reactor:
    """The thread of one engine. Any thread may `post` and `hurry`."""

    def __init__(
        self, core: Core, *, heartbeat_timeout_s: float, linger_s: float, farewell: Callable[[], bytes]
    ) -> None:
        self._core = core
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._linger_s = linger_s
        self._farewell = farewell
        """What to tell peers when leaving."""
        self._inbox: deque[Operation | Errand] = deque()
        self._selector = selectors.DefaultSelector()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        """Held while the alarm is rung, so that its number cannot meanwhile mean another file."""
        self._asleep = False
        self._dozing = False
        self._busy = False
        self._hurried = False
        self._announced_s = 0.0
        self._hearts_due_s = 0.0
        self._work_s = WORK_S
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._writing: set[Link] = set()
        """Links whose kernel buffer is full: the selector watches them."""
        self._writable: set[Link] = set()
        self._thread = threading.Thread(target=self._run, name=f"pliant-engine-{core.rank}", daemon=True)

    def start(self) -> None:
        """Begin to serve the core's links."""
        now_s = time.monotonic()
        for link in self._core.links.values():
            link.last_seen_s = link.last_sent_s = now_s
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        if all(link.shared for link in self._core.links.values()):
            self._work_s = SHARED_WORK_S
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, say goodbye, end. What still waits fails with EngineClosed."""
        self._closing = True
        if self._thread.ident is None:  # never started
            self._selector.close()
            self._silence_alarm()
            return
        self._wake()
        self._thread.join(timeout=self._linger_s + 5)

    def post(self, call: Operation | Errand) -> None:
        """Have the engine's thread begin this, or do this."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise EngineClosed("the engine is closed: submit before leaving its `with`")
        self._inbox.append(call)
        if self._asleep:
            self._wake()
        if self._ended:  # between the look at `_closing` and now
            self._refuse_inbox()

    def hurry(self) -> None:
        """Somebody waits: what lies in the inbox shall not wait as well."""
        self._hurried = True
        if self._dozing and self._inbox:
            self._wake()

    def _wake(self) -> None:
        with self._ringing:
            if self._alarm >= 0:
                os.eventfd_write(self._alarm, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._begin(len(self._inbox))  # so that the goodbye does not count them as finished
            self._say_goodbye()
        except Exception as error:
            log.exception("rank %d: the engine's thread failed", self._core.rank)
            self._broken = CommError(f"the engine's thread failed: {error!r}")
            self._core.fail_all(self._broken)
        finally:
            self._core.fail_all(EngineClosed("the engine was closed while this was in progress"))
            self._ended = True
            self._refuse_inbox()
            for link in self._core.links.values():
                link.close()
            self._selector.close()
            self._silence_alarm()

    def _silence_alarm(self) -> None:
        with self._ringing:
            if self._alarm >= 0:
                os.close(self._alarm)
            self._alarm = -1

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        core = self._core
        was_asleep = self._take_in(self._patience_s())
        if was_asleep and self._inbox and not self._hurried:
            self._dozing = True
            self._take_in(0.0 if self._hurried else DOZE_S)
        self._hurried = False
        if self._inbox:
            self._busy = True
            self._begin(len(self._inbox))
        core.work(time.monotonic() + self._work_s)
        core.say_notices()
        now_s = time.monotonic()
        if now_s > self._hearts_due_s:
            self._hearts_due_s = now_s + self._heartbeat_timeout_s / 16
            self._check_hearts(now_s)
        self._flush()
        if core.completed:
            late = now_s - self._announced_s > ANNOUNCE_S
            if late:
                self._announced_s = now_s
            core.announce(everything=late)

    def _begin(self, size: int) -> None:
        """Begin what was submitted, as one burst."""
        items = [self._inbox.popleft() for _ in range(size)]
        burst = Burst(sum(isinstance(item, Operation) for item in items))
        for item in items:
            if isinstance(item, Operation):
                item.burst = burst
                self._core.begin(item)
            else:
                item.run()

    def _refuse_inbox(self) -> None:
        """What comes too late fails at once; whoever gets an item here, the ending thread or a submitting one."""
        error = EngineClosed("the engine was closed while this was submitted")
        with contextlib.suppress(IndexError):
            while True:
                item = self._inbox.popleft()
                if isinstance(item, Operation):
                    item.handle.fail(error)
                else:
                    item.fail(error)

    def _take_in(self, patience_s: float) -> bool:
        """Read what has come; whether the thread had been asleep before."""
        events = self._selector.select(patience_s)
        was_asleep = self._asleep
        self._asleep = self._dozing = False
        for key, mask in events:
            link = key.data
            if link is None:
                os.eventfd_read(self._alarm)
                continue
            if mask & selectors.EVENT_READ:
                self._guarded(link, link.read)
            if mask & selectors.EVENT_WRITE:
                self._writable.add(link)
        return was_asleep

    def _patience_s(self) -> float:
        if len(self._core.runnable) or self._core.dirty - self._writing:
            return 0.0
        if self._busy:
            self._busy, self._dozing = False, True
            return 0.0 if self._inbox else DOZE_S
        self._asleep = True
        # Set before the last look: who submits after it sees the flag and rings the alarm.
        if self._inbox:
            return 0.0
        return ANNOUNCE_S if self._core.completed else self._heartbeat_timeout_s / 8

    def _flush(self) -> None:
        now_s = time.monotonic()
        for link in list(self._core.dirty):
            if link.rank in self._core.lost:
                self._core.dirty.discard(link)
            elif link not in self._writing or link in self._writable:
                # A link that was full is left alone until the kernel says so: else every turn would
                # stuff a few bytes into it.
                self._guarded(link, self._flush_link, now_s=now_s)
        self._writable.clear()

    def _flush_link(self, now_s: float, link: Link) -> None:
        more = link.flush(now_s)
        if not more:
            self._core.dirty.discard(link)
        if more != (link in self._writing):
            (self._writing.add if more else self._writing.discard)(link)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(link.sock, events, link)

    def _guarded(self, link: Link, act: Callable[..., None], now_s: float | None = None) -> None:
        """Read from or write to a link; if it is gone, so is the worker."""
        try:
            if link.rank in self._core.lost:
                # A peer has told us before we saw it ourselves; a dead socket is always readable.
                self._close_link(link)
            elif act == link.read:
                link.read(time.monotonic())
            else:
                act(now_s, link)
        except EOFError:
            self._drop(link, "its connection closed (the process ended or was killed)")
        except OSError as error:
            # Writing failed, but its last words may still lie in the receive buffer: perhaps it has left.
            with contextlib.suppress(EOFError, OSError, CommError):
                while not link.said_bye:
                    before = link.last_seen_s
                    link.read(time.monotonic())
                    if link.last_seen_s == before:
                        break
            self._drop(link, f"its connection broke ({error.strerror or error})")
        except Exception as error:  # whatever a faulty peer sends must not end this engine
            log.error("rank %d: %s sent nonsense: %r", self._core.rank, link.worker, error)
            self._drop(link, f"it sent nonsense: {error!r}")

    def _drop(self, link: Link, why: str) -> None:
        if link.said_bye:
            self._core.leave(link.rank)
        else:
            self._core.lose(link.rank, why)
        self._close_link(link)

    def _close_link(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(link.sock)
        self._core.dirty.discard(link)
        self._writing.discard(link)
        link.close()

    def _check_hearts(self, now_s: float) -> None:
        timeout_s = self._heartbeat_timeout_s
        for rank, link in self._core.links.items():
            if rank in self._core.lost:
                continue
            if now_s - link.last_sent_s > timeout_s / 4:
                link.say(header(Kind.HEARTBEAT, self._core.view.number))
                link.last_sent_s = now_s
                self._core.dirty.add(link)
            if now_s - link.last_seen_s > timeout_s:
                # In the middle of a payload the kernel may hold back what is too little to wake us for.
                self._guarded(link, link.read)
            if now_s - link.last_seen_s > timeout_s and rank not in self._core.lost:
                silent_s = now_s - link.last_seen_s
                self._drop(link, f"silent for {silent_s:.1f} s (heartbeat_timeout_s={timeout_s:g}); "
                                 "raise --heartbeat-timeout if it was only slow")  # fmt: skip

    def _say_goodbye(self) -> None:
        """Send what is queued, then BYE, then wait briefly for the peers to read it."""
        deadline_s = time.monotonic() + self._linger_s
        farewell = self._farewell()
        for rank, link in self._core.links.items():
            if rank not in self._core.lost:
                link.say(header(Kind.BYE, self._core.view.number, length=len(farewell)), farewell)
                self._core.dirty.add(link)
        while self._core.dirty and time.monotonic() < deadline_s:
            self._flush()
            if self._core.dirty:
                self._take_in(0.05)
        self._await_closing(min(deadline_s, time.monotonic() + PARTING_S))

    def _await_closing(self, deadline_s: float) -> None:
        """Let the peers close first. Closing with something unread would reset the connection, and a reset may
        overtake our goodbye."""
        self._selector.unregister(self._alarm)
        for rank, link in self._core.links.items():
            if rank not in self._core.lost:
                with contextlib.suppress(OSError):
                    link.sock.shutdown(socket.SHUT_WR)
        while self._selector.get_map() and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(max(0.0, deadline_s - time.monotonic())):
                try:
                    more = key.data.sock.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    more = b""
                if not more:
                    self._selector.unregister(key.data.sock)
