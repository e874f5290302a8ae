"""The engine's thread: waits for sockets and submissions, and lets `comm.core` act on them.

One thread per worker owns all sockets and does all folding, through all views. It sleeps in epoll
and never polls; it notices peers that died or fell silent. What a frame or a submission means is not
its business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pliant.cluster import Worker
from pliant.comm.core import Core
from pliant.comm.link import Link, header
from pliant.comm.lobby import Lobby
from pliant.comm.operation import Burst, Operation
from pliant.comm.telemetry import PressureGauge
from pliant.comm.wire import Kind
from pliant.errors import CommError, EngineClosed, ViewChanged, WorkerLost

log = logging.getLogger(__name__)

DOZE_S = 0.001
"""Submissions come in bursts. When the first one wakes the thread, and after the last one it has seen, the
thread dozes for this long: what is submitted meanwhile is found when it wakes, without a system call and a
fight for the interpreter for each tensor. Whoever waits for a result wakes it at once."""
ANNOUNCE_S = 0.01
"""Results are announced when all that was submitted together is done, or this long after the last time."""
WORK_S = 0.001
"""Folding goes on for at most about this long before the sockets have their turn."""
GAUGE_S = 0.01
"""How often what goes out is looked at, while it is the network that limits it."""
PARTING_S = 1.0
"""Who leaves waits this long for the others to take note."""
SHARED_WORK_S = 0.004
"""The same where all peers share memory: no wire runs dry meanwhile, and fewer notices cost less."""


PROBE_S = 1.0
"""Who comes under the name of a connected worker is taken in if that one does not stir for this long."""
# As selectors has it: what has hung up is both, so that reading or writing tells why.
_READABLE, _WRITABLE = ~select.EPOLLOUT, ~select.EPOLLIN
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass(frozen=True, slots=True)
class Errand:
    """Something else than a collective for the engine's thread to do."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called instead if the engine ends first."""


class Reactor:
    """The thread of one worker. Any thread may `post` and `hurry`; the rest is for errands, on the thread itself."""

    def __init__(self, me: Worker, *, heartbeat_timeout_s: float, linger_s: float) -> None:
        self._me = me
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._linger_s = linger_s
        self.core: Core | None = None
        """The view that the worker is in."""
        self.links: dict[Worker, Link] = {}
        """The open connections, to members of the view and others."""
        self.dirty: set[Link] = set()
        """Links with something to write."""
        self.lobby = Lobby(self.dirty)
        self.gone: dict[Worker, str] = {}
        """Why there is no connection to these any more."""
        self.on_lost: Callable[[Worker, str], None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a connection has come or gone."""
        self._probes: dict[Link, tuple[float, Callable[[bool], None]]] = {}
        self._inbox: deque[Operation | Errand] = deque()
        # Not `selectors`: after each sleep the caches are cold, and every layer of Python costs.
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Link, int]] = {}
        """The links that epoll looks at, and what for, by descriptor."""
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
        """Links whose kernel buffer is full: epoll watches them."""
        self._pressed = False
        """Whether one of them leads to another host."""
        self._writable: set[Link] = set()
        self.pressure = PressureGauge()
        self._gauge_due_s = 0.0
        self._below_bytes = 0
        """What may lie in the kernel's queues to other hosts, all together; 0: as much as links take by themselves."""
        self._thread = threading.Thread(target=self._run, name=f"pliant-engine-{me}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, say goodbye, end. What still waits fails with EngineClosed."""
        self._closing = True
        if self._thread.ident is None:  # never started
            self._epoll.close()
            self._silence_alarm()
            return
        self._wake()
        self._thread.join(timeout=self._linger_s + 5)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent. Nothing that it shares with the parent is changed."""
        for link in list(self.links.values()):
            link.sock.close()
        self._epoll.close()
        self._ringing = threading.Lock()  # the parent's thread may have held it at the fork
        self._silence_alarm()
        self._closing = self._ended = True

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

    @property
    def is_current(self) -> bool:
        """Whether this is the engine's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def hasten(self, errand: Errand) -> None:
        """The same for somebody who waits for it now."""
        self.post(errand)
        self.hurry()

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
            log.exception("%s: the engine's thread failed", self._me)
            self._broken = CommError(f"the engine's thread failed: {error!r}")
            if self.core is not None:
                self.core.fail_all(self._broken)
        finally:
            if self.core is not None:
                self.core.fail_all(EngineClosed("the engine was closed while this was in progress"))
            self._ended = True
            self._refuse_inbox()
            for _, answer in self._probes.values():
                answer(False)
            for link in self.links.values():
                link.close()
            self._epoll.close()
            self._silence_alarm()

    def _silence_alarm(self) -> None:
        with self._ringing:
            if self._alarm >= 0:
                os.close(self._alarm)
            self._alarm = -1

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        was_asleep = self._take_in(self._patience_s())
        if was_asleep and self._inbox and not self._hurried:
            self._dozing = True
            self._take_in(0.0 if self._hurried else DOZE_S)
        self._hurried = False
        if self._inbox:
            self._busy = True
            self._begin(len(self._inbox))
        core = self.core
        if core is not None:
            if core.given_up:
                self._drop_given_up()
            core.work(time.monotonic() + self._work_s)
            core.say_notices()
        now_s = time.monotonic()
        if now_s > self._hearts_due_s:
            self._hearts_due_s = now_s + self._heartbeat_timeout_s / 16
            self._check_hearts(now_s)
        if self._probes:
            self._check_probes(now_s)
        self._flush()
        if core is not None and core.completed:
            late = now_s - self._announced_s > ANNOUNCE_S
            if late:
                self._announced_s = now_s
            core.announce(everything=late)

    def _begin(self, size: int) -> None:
        """Begin what was submitted, as one burst."""
        items = [self._inbox.popleft() for _ in range(size)]
        burst = Burst(sum(isinstance(item, Operation) and not item.prompt for item in items))
        for item in items:
            if isinstance(item, Operation):
                item.burst = Burst(1) if item.prompt else burst
                item.begin(item)
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
        events = self._epoll.poll(patience_s)
        was_asleep = self._asleep
        self._asleep = self._dozing = False
        for fd, mask in events:
            if fd == self._alarm:
                os.eventfd_read(fd)
                continue
            link, wanted = self._watched.get(fd, (None, 0))
            if link is None:
                continue  # dropped, by what another one has said
            if mask & _READABLE and wanted & select.EPOLLIN:
                self._read(link)
            if mask & _WRITABLE and wanted & select.EPOLLOUT:
                self._writable.add(link)
        return was_asleep

    def _patience_s(self) -> float:
        core = self.core
        if (core is not None and len(core.runnable)) or not self.dirty <= self._writing:
            return 0.0
        if self._busy:
            self._busy, self._dozing = False, True
            return 0.0 if self._inbox else DOZE_S
        self._asleep = True
        # Set before the last look: who submits after it sees the flag and rings the alarm.
        if self._inbox:
            return 0.0
        if core is not None and core.completed:
            return ANNOUNCE_S
        return min(PROBE_S, self._heartbeat_timeout_s) / 8 if self._probes else self._heartbeat_timeout_s / 8

    # --- views ---

    def switch(self, core: Core) -> None:
        """Move to another view, on the connections that are there.

        Raises:
            CommError: to a member there is none; nothing has changed.
        """
        self._drop_given_up()
        links: dict[int, Link] = {}
        for rank, worker in enumerate(core.view.workers):
            if rank != core.rank:
                links[rank] = self._member(rank, worker, core.view.number)
        if self.core is not None:
            here = f"{self._me} has moved from view {self.core.view.number} to {core.view.number}"
            self.core.retire(ViewChanged(f"{here} while this was in progress: submit it to the new engine"))
            core.succeed(self.core)
        core.links.update(links)
        self.core = self.lobby.core = core
        ranks = {link: rank for rank, link in links.items()}
        for link in self.links.values():
            rank = ranks.get(link, -1)
            link.enter(core.view.number, rank, self.lobby if rank < 0 else core)
        self._work_s = SHARED_WORK_S if all(link.shared for link in links.values()) else WORK_S
        for link in [link for link in self.links.values() if link.paused]:
            self._read(link)

    def _member(self, rank: int, worker: Worker, number: int) -> Link:
        link = self.links.get(worker)
        if link is not None and not link.said_bye:
            return link
        if link is None and worker not in self.gone:
            raise CommError(f"{self._me} has no connection to {worker} of view {number}: connect to it first")
        raise WorkerLost(str(worker), rank, "it left the job" if link is not None else self.gone[worker])

    # --- connections ---

    def add(self, link: Link) -> None:
        """Serve a new connection; it takes the place of an older one to the same worker."""
        old = self.links.get(link.worker)
        if old is not None:
            self._drop(old, "another connection has taken the place of this one")
        link.view = -1 if self.core is None else self.core.view.number
        link.last_seen_s = link.last_sent_s = time.monotonic()
        self.links[link.worker] = link
        self.gone.pop(link.worker, None)
        self._watch(link)
        self._share_out()
        self.on_change()

    def keep_below(self, num_bytes: int) -> None:
        """Let at most about this much lie in the kernel's queues to other hosts."""
        self._below_bytes = num_bytes
        self._share_out()

    def _share_out(self) -> None:
        remote = [link for link in self.links.values() if not link.shared]
        for link in remote if self._below_bytes else ():
            link.keep_below(self._below_bytes // len(remote))
            link.fit_buffer()

    def _gauge(self, now_s: float) -> None:
        """Note how much has gone out while some link was full: at its begin and end, and now and then between."""
        pressed = self._pressed
        if pressed != self.pressure.pressed or (pressed and now_s > self._gauge_due_s):
            self._gauge_due_s = now_s + GAUGE_S
            self.pressure.note(pressed, sum(link.sent_bytes for link in self.links.values() if not link.shared), now_s)

    def probe(self, worker: Worker, answer: Callable[[bool], None]) -> None:
        """Whether there is no living connection to this worker; a dead one is dropped. Takes `PROBE_S` at most."""
        link = self.links.get(worker)
        if link is not None and _hung_up(link):
            if not link.paused:
                self._read(link)
            if not link.closed:
                self._drop(link, "its connection closed (the process ended or was killed)")
        if link is not None and link.said_bye:
            self._drop(link, "it left the job")
        if link is None or link.closed:
            answer(True)
        elif link.paused or link in self._probes:
            # We do not listen to it now, so its silence means nothing; or another newcomer is being looked at.
            answer(False)
        else:
            self._probes[link] = (time.monotonic(), answer)
            link.say(header(Kind.PING, max(0, link.view)))
            self.dirty.add(link)

    def _check_probes(self, now_s: float) -> None:
        for link, (since_s, answer) in list(self._probes.items()):
            if not link.closed and link.last_seen_s <= since_s and now_s - since_s > PROBE_S:
                self._drop(link, "it did not stir while another process came under its name")
            if link.closed or link.last_seen_s > since_s:
                del self._probes[link]
                answer(link.closed)

    def _watch(self, link: Link) -> None:
        """Have epoll look for what this link can do now."""
        events = 0 if link.paused else select.EPOLLIN
        if link in self._writing:
            events |= select.EPOLLOUT
        fd = link.sock.fileno()
        watched = self._watched.get(fd)
        if not events:
            self._unwatch(link)
        elif watched is None:
            self._epoll.register(fd, events)
            self._watched[fd] = link, events
        elif watched != (link, events):
            self._epoll.modify(fd, events)
            self._watched[fd] = link, events

    def _unwatch(self, link: Link) -> None:
        fd = link.sock.fileno()
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _flush(self) -> None:
        now_s = time.monotonic()
        for link in list(self.dirty):
            if link.closed or self._is_lost(link):
                self.dirty.discard(link)
            elif link not in self._writing or link in self._writable:
                # A link that was full is left alone until the kernel says so: else every turn would
                # stuff a few bytes into it.
                self._guarded(link, self._flush_link, link, now_s)
        self._writable.clear()
        self._gauge(now_s)

    def _flush_link(self, link: Link, now_s: float) -> None:
        more = link.flush(now_s)
        if not more:
            self.dirty.discard(link)
        if more != (link in self._writing):
            (self._writing.add if more else self._writing.discard)(link)
            self._pressed = any(not other.shared for other in self._writing)
            self._watch(link)

    def _read(self, link: Link) -> None:
        if link.closed:
            return
        if self.core is not None and link.rank in self.core.lost:
            # A peer has told us before we saw it ourselves; a dead socket is always readable.
            self._drop(link, self.core.lost[link.rank].why)
            return
        was_paused = link.paused
        self._guarded(link, link.read, time.monotonic())
        if link.paused != was_paused and not link.closed:
            self._watch(link)

    def _is_lost(self, link: Link) -> bool:
        return self.core is not None and link.rank in self.core.lost

    def _guarded(self, link: Link, act: Callable[..., None], *args: object) -> None:
        """Read from or write to a link; if it is gone, so is the worker."""
        try:
            act(*args)
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
            log.error("%s: %s sent nonsense: %r", self._me, link.worker, error)
            self._drop(link, f"it sent nonsense: {error!r}")

    def _drop(self, link: Link, why: str) -> None:
        """Close a connection that is of no use any more, and let everybody know."""
        if link.closed:
            return
        member = self.core is not None and self.core.links.get(link.rank) is link
        self._unwatch(link)
        self.dirty.discard(link)
        self._writing.discard(link)
        self._pressed = any(not other.shared for other in self._writing)
        self.pressure.forget()
        link.close()
        if self.links.get(link.worker) is link:
            del self.links[link.worker]
            self.gone[link.worker] = "it left the job" if link.said_bye else why
        if self.core is not None and member:
            (self.core.leave(link.rank) if link.said_bye else self.core.lose(link.rank, why))
        if not link.said_bye and self.on_lost is not None:
            try:
                self.on_lost(link.worker, why)
            except Exception:
                log.exception("%s: what was to be done at the loss of %s failed", self._me, link.worker)
        self.on_change()

    def _drop_given_up(self) -> None:
        """Close what leads to workers that others have reported lost; so one that lives learns it."""
        while self.core is not None and self.core.given_up:
            link = self.core.given_up.pop()
            self._drop(link, self.core.lost[link.rank].why)

    def _check_hearts(self, now_s: float) -> None:
        timeout_s = self._heartbeat_timeout_s
        for link in list(self.links.values()):
            if self._is_lost(link):
                continue
            if self._below_bytes and not link.shared:
                link.fit_buffer()
            if now_s - link.last_sent_s > timeout_s / 4:
                link.say(header(Kind.HEARTBEAT, max(0, link.view)))
                link.last_sent_s = now_s
                self.dirty.add(link)
            if link.paused:
                link.last_seen_s = now_s  # it may have said much; it is we who do not listen
                continue
            if now_s - link.last_seen_s > timeout_s:
                # In the middle of a payload the kernel may hold back what is too little to wake us for.
                self._read(link)
            if now_s - link.last_seen_s > timeout_s and not link.closed and not link.paused:
                silent_s = now_s - link.last_seen_s
                self._drop(link, f"silent for {silent_s:.1f} s (heartbeat_timeout_s={timeout_s:g}); "
                                 "raise --heartbeat-timeout if it was only slow")  # fmt: skip

    # --- leaving ---

    def _say_goodbye(self) -> None:
        """Send what is queued, then BYE, then wait briefly for the peers to read it."""
        deadline_s = time.monotonic() + self._linger_s
        farewell = b"" if self.core is None else self.core.farewell()
        leaving = [link for link in self.links.values() if not self._is_lost(link)]
        for link in leaving:
            link.say(header(Kind.BYE, max(0, link.view), length=len(farewell)), farewell)
            self.dirty.add(link)
        while self.dirty and time.monotonic() < deadline_s:
            self._flush()
            if self.dirty:
                self._take_in(0.05)
        self._await_closing(leaving, min(deadline_s, time.monotonic() + PARTING_S))

    def _await_closing(self, leaving: list[Link], deadline_s: float) -> None:
        """Let the peers close first. Closing with something unread would reset the connection, and a reset may
        overtake our goodbye."""
        self._epoll.unregister(self._alarm)
        for link in leaving:
            if not link.closed:
                link.paused = False  # what it says is of no interest now, but must be read
                self._watch(link)
                with contextlib.suppress(OSError):
                    link.sock.shutdown(socket.SHUT_WR)
        while self._watched and time.monotonic() < deadline_s:
            for fd, _ in self._epoll.poll(max(0.0, deadline_s - time.monotonic())):
                link = self._watched[fd][0]
                try:
                    more = link.sock.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    more = b""
                if not more:
                    self._unwatch(link)


def _hung_up(link: Link) -> bool:
    """Whether the peer has closed its end, even if there is still something to read."""
    poll = select.poll()
    poll.register(link.sock, select.POLLIN | select.POLLRDHUP)
    return any(events & _HUNG_UP for _, events in poll.poll(0))
