"""What arrives outside the view that a worker is in: from workers that are not in it, or sent in another one.

Only what concerns the connection itself matters then. The rest is of a view that has passed.

All connections of one worker, to members of its view and others: reading, writing, and noticing who is gone.

They outlive views; `enter` moves them into the next one. On the engine's thread only, which `comm.reactor`
owns. What a frame means is the core's business, or the lobby's.

How a worker leaves the job in good order: what is queued goes out, then its goodbye, and the others close first.

The engine's thread: waits for sockets and submissions, and lets `comm.collective.core` act on them.

One thread per worker does all reading, writing and folding, through all views. It sleeps in epoll and
never polls. Who is connected is `comm.connections`' to say, and what a frame or a submission means
the core's.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pliant.comm.connection import READABLE, WRITABLE, Link, Poller, hung_up
from pliant.comm.frames import LENGTH, Frame, Kind, header
from pliant.comm.operations import Burst, Operation
from pliant.comm.telemetry import PressureGauge
from pliant.errors import CommError, EngineClosed, ViewChanged, WorkerLost

if TYPE_CHECKING:
    from pliant.cluster import Worker
    from pliant.comm.collective import Core


class Lobby:
    """Takes frames that belong to no view, or to one that this worker has left."""

    def __init__(self) -> None:
        self.core: Core | None = None
        """The view that the worker is in."""

    def on_frame(self, link: Link, frame: Frame, payload: bytes) -> None:
        kind, _, _, view, _, _, piece, extra, _ = frame
        core = self.core
        if core is not None and core.peers.links.get(link.rank) is not link:
            core = None
        match kind:
            case Kind.ARENA:
                link.take_arena(piece, extra)
                if core is not None:
                    core.reach.on_arena(link.rank, piece)
            case Kind.BYE:
                link.said_bye = True
                if core is not None:
                    core.peers.on_bye(link, view, payload)
            case Kind.PING:
                link.say(header(Kind.PONG, view, extra=extra))
            case _ if kind not in frozenset(Kind):
                raise CommError(f"a frame of unknown kind {kind}: do all workers run the same version?")
            case _:
                pass

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        return None

    def on_bulk(self, link: Link, frame: Frame) -> None:
        link.ingress_bytes += frame[LENGTH]


log = logging.getLogger(__name__)
GAUGE_S = 0.01
"""How often what goes out is looked at, while it is the network that limits it."""
CLAIM_S = 1.0
"""Who comes under the name of a connected worker is taken in if that one does not stir for this long."""


class Connections:
    """The links of worker `me`, by worker."""

    def __init__(self, me: Worker, poller: Poller, *, heartbeat_timeout_s: float) -> None:
        self.me = me
        self.core: Core | None = None
        """The view that the worker is in."""
        self.links: dict[Worker, Link] = {}
        """The open connections, to members of the view and others."""
        self.lobby = Lobby()
        self.gone: dict[Worker, str] = {}
        """Why there is no connection to these any more."""
        self.unsent: set[Link] = set()
        """Links with something to write."""
        self.full: set[Link] = set()
        """Those of them that the kernel takes no more from: epoll watches them."""
        self.pressure = PressureGauge()
        self.on_lost: Callable[[Worker, str], None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a connection has come or gone."""
        self._poller = poller
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._hearts_due_s = 0.0
        self._claims: dict[Link, tuple[float, Callable[[bool], None]]] = {}
        """Connected workers as whom another process has come: since when they are looked at, and who wants to know."""
        self._pressed = False
        """Whether a full link leads to another host."""
        self._writable: set[Link] = set()
        self._gauge_due_s = 0.0
        self._below_bytes = 0
        """What may lie in the kernel's queues to other hosts, all together; 0: as much as links take by themselves."""

    def close(self) -> None:
        for _, answer in self._claims.values():
            answer(False)
        for link in self.links.values():
            link.close()

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent. Nothing that it shares with the parent is changed."""
        for link in list(self.links.values()):
            link.sock.close()

    # --- views ---

    def enter(self, core: Core) -> None:
        """Move to another view, on the connections that are there.

        Raises:
            CommError: to a member there is none; nothing has changed.
        """
        self.drop_given_up()
        links = {
            rank: self._member(rank, worker, core.view.number)
            for rank, worker in enumerate(core.view.workers)
            if rank != core.rank
        }
        if self.core is not None:
            here = f"{self.me} has moved from view {self.core.view.number} to {core.view.number}"
            self.core.retire(ViewChanged(f"{here} while this was in progress: submit it to the new engine"))
            core.succeed(self.core)
        core.peers.links.update(links)
        self.core = self.lobby.core = core
        ranks = {link: rank for rank, link in links.items()}
        for link in self.links.values():
            rank = ranks.get(link, -1)
            link.enter(core.view.number, rank, self.lobby if rank < 0 else core)
        for link in [link for link in self.links.values() if link.paused]:
            self._read(link)

    def _member(self, rank: int, worker: Worker, number: int) -> Link:
        link = self.links.get(worker)
        if link is not None and not link.said_bye:
            return link
        if link is None and worker not in self.gone:
            raise CommError(f"{self.me} has no connection to {worker} of view {number}: connect to it first")
        raise WorkerLost(str(worker), rank, "it left the job" if link is not None else self.gone[worker])

    # --- who comes ---

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

    def claim(self, worker: Worker, answer: Callable[[bool], None]) -> None:
        """Somebody comes as this worker: answer whether there is no living connection to it. A dead one is dropped.

        Takes `CLAIM_S` at most.
        """
        link = self.links.get(worker)
        if link is not None and hung_up(link):
            if not link.paused:
                self._read(link)
            if not link.closed:
                self._drop(link, "its connection closed (the process ended or was killed)")
        if link is not None and link.said_bye:
            self._drop(link, "it left the job")
        if link is None or link.closed:
            answer(True)
        elif link.paused or link in self._claims:
            # We do not listen to it now, so its silence means nothing; or another newcomer is being looked at.
            answer(False)
        else:
            self._claims[link] = (time.monotonic(), answer)
            link.say(header(Kind.PING, max(0, link.view)))

    def _check_claims(self, now_s: float) -> None:
        for link, (since_s, answer) in list(self._claims.items()):
            if not link.closed and link.last_seen_s <= since_s and now_s - since_s > CLAIM_S:
                self._drop(link, "it did not stir while another process came under its name")
            if link.closed or link.last_seen_s > since_s:
                del self._claims[link]
                answer(link.closed)

    # --- reading ---

    def on_events(self, events: Iterable[tuple[int, int]]) -> None:
        """Read what has come, and note what can be written to."""
        poller = self._poller
        for fd, mask in events:
            if fd == poller.bell:
                poller.hush()
                continue
            link, wanted = poller.watched.get(fd, (None, 0))
            if link is None:
                continue  # dropped, by what another one has said
            if mask & READABLE and wanted & select.EPOLLIN:
                self._read(link)
            if mask & WRITABLE and wanted & select.EPOLLOUT:
                self._writable.add(link)

    def _read(self, link: Link) -> None:
        if link.closed:
            return
        if self.core is not None and link.rank in self.core.peers.lost:
            # A peer has told us before we saw it ourselves; a dead socket is always readable.
            self._drop(link, self.core.peers.lost[link.rank].why)
            return
        was_paused = link.paused
        self._guarded(link, link.read, time.monotonic())
        if link.paused != was_paused and not link.closed:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        self._poller.watch(link, writing=link in self.full)

    # --- writing ---

    def flush(self) -> None:
        """Write what can be written now."""
        now_s = time.monotonic()
        for link in list(self.unsent):
            if link.closed or self.is_lost(link):
                self.unsent.discard(link)
            elif link not in self.full or link in self._writable:
                # A link that was full is left alone until the kernel says so: else every turn would
                # stuff a few bytes into it.
                self._guarded(link, self._flush_link, link, now_s)
        self._writable.clear()
        self._gauge(now_s)

    def _flush_link(self, link: Link, now_s: float) -> None:
        more = link.flush(now_s)
        if not more:
            self.unsent.discard(link)
        if more != (link in self.full):
            (self.full.add if more else self.full.discard)(link)
            self._pressed = any(not other.shared for other in self.full)
            self._watch(link)

    def _gauge(self, now_s: float) -> None:
        """Note how much has gone out while some link was full: at its begin and end, and now and then between."""
        pressed = self._pressed
        if pressed != self.pressure.pressed or (pressed and now_s > self._gauge_due_s):
            self._gauge_due_s = now_s + GAUGE_S
            self.pressure.note(pressed, sum(link.sent_bytes for link in self.links.values() if not link.shared), now_s)

    def keep_below(self, num_bytes: int) -> None:
        """Let at most about this much lie in the kernel's queues to other hosts."""
        self._below_bytes = num_bytes
        self._share_out()

    def _share_out(self) -> None:
        remote = [link for link in self.links.values() if not link.shared]
        for link in remote if self._below_bytes else ():
            link.keep_below(self._below_bytes // len(remote))
            link.fit_buffer()

    # --- who goes ---

    @property
    def patience_s(self) -> float:
        """After how long `tend` has something to do at the latest."""
        return (min(CLAIM_S, self._heartbeat_timeout_s) if self._claims else self._heartbeat_timeout_s) / 8

    def tend(self, now_s: float) -> None:
        """Look now and then for peers that say nothing."""
        if now_s > self._hearts_due_s:
            self._hearts_due_s = now_s + self._heartbeat_timeout_s / 16
            self._check_hearts(now_s)
        if self._claims:
            self._check_claims(now_s)

    def _check_hearts(self, now_s: float) -> None:
        timeout_s = self._heartbeat_timeout_s
        for link in list(self.links.values()):
            if self.is_lost(link):
                continue
            if self._below_bytes and not link.shared:
                link.fit_buffer()
            if now_s - link.last_sent_s > timeout_s / 4:
                link.say(header(Kind.HEARTBEAT, max(0, link.view)))
                link.last_sent_s = now_s
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

    def is_lost(self, link: Link) -> bool:
        """Whether it leads to a member of the view that is known to be gone."""
        return self.core is not None and link.rank in self.core.peers.lost

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
            log.error("%s: %s sent nonsense: %r", self.me, link.worker, error)
            self._drop(link, f"it sent nonsense: {error!r}")

    def _drop(self, link: Link, why: str) -> None:
        """Close a connection that is of no use any more, and let everybody know."""
        if link.closed:
            return
        member = self.core is not None and self.core.peers.links.get(link.rank) is link
        self._poller.unwatch(link)
        self.unsent.discard(link)
        self.full.discard(link)
        self._pressed = any(not other.shared for other in self.full)
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
                log.exception("%s: what was to be done at the loss of %s failed", self.me, link.worker)
        self.on_change()

    def drop_given_up(self) -> None:
        """Close what leads to workers that others have reported lost; so one that lives learns it."""
        while self.core is not None and self.core.given_up:
            link = self.core.given_up.pop()
            self._drop(link, self.core.peers.lost[link.rank].why)


PARTING_S = 1.0
"""Who leaves waits this long for the others to take note."""


def part(connections: Connections, poller: Poller, linger_s: float) -> None:
    """Send what is queued, then BYE, then wait briefly for the peers to read it. The last use of both."""
    deadline_s = time.monotonic() + linger_s
    farewell = b"" if connections.core is None else connections.core.farewell()
    leaving = [link for link in connections.links.values() if not connections.is_lost(link)]
    for link in leaving:
        link.say(header(Kind.BYE, max(0, link.view), length=len(farewell)), farewell)
    while connections.unsent and time.monotonic() < deadline_s:
        connections.flush()
        if connections.unsent:
            connections.on_events(poller.poll(0.05))
    _await_closing(leaving, poller, min(deadline_s, time.monotonic() + PARTING_S))


def _await_closing(leaving: Sequence[Link], poller: Poller, deadline_s: float) -> None:
    """Let the peers close first. Closing with something unread would reset the connection, and a reset may
    overtake our goodbye."""
    poller.listen(to_bell=False)
    for link in leaving:
        if not link.closed:
            link.paused = False  # what it says is of no interest now, but must be read
            poller.watch(link, writing=False)
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
    while poller.watched and time.monotonic() < deadline_s:
        for fd, _ in poller.poll(max(0.0, deadline_s - time.monotonic())):
            link = poller.watched[fd][0]
            try:
                more = link.sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                more = b""
            if not more:
                poller.unwatch(link)


DOZE_S = 0.001
"""Submissions come in bursts. When the first one wakes the thread, and after the last one it has seen, the
thread dozes for this long: what is submitted meanwhile is found when it wakes, without a system call and a
fight for the interpreter for each tensor. Whoever waits for a result wakes it at once."""
ANNOUNCE_S = 0.01
"""Results are announced when all that was submitted together is done, or this long after the last time."""
WORK_S = 0.001
"""Folding goes on for at most about this long before the sockets have their turn."""
SHARED_WORK_S = 0.004
"""The same where all peers share memory: no wire runs dry meanwhile, and fewer notices cost less."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Something else than a collective for the engine's thread to do."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called instead if the engine ends first."""


class Reactor:
    """The thread of one worker. Any thread may `post` and `hurry`."""

    def __init__(self, connections: Connections, poller: Poller, *, linger_s: float) -> None:
        self._connections = connections
        self._poller = poller
        self._linger_s = linger_s
        self._inbox: deque[Operation | Errand] = deque()
        self._asleep = False
        self._dozing = False
        self._busy = False
        self._hurried = False
        self._announced_s = 0.0
        self._work_s = WORK_S
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"pliant-engine-{connections.me}", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        """Begin to serve."""
        self._poller.listen(to_bell=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, say goodbye, end. What still waits fails with EngineClosed."""
        self._closing = True
        if self._thread.ident is None:  # never started
            self._poller.close()
            return
        self._poller.ring()
        self._thread.join(timeout=self._linger_s + 5)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent. Nothing that it shares with the parent is changed."""
        self._connections.abandon()
        self._poller.abandon()
        self._closing = self._ended = True

    def post(self, call: Operation | Errand) -> None:
        """Have the engine's thread begin this, or do this."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise EngineClosed("the engine is closed: submit before leaving its `with`")
        self._inbox.append(call)
        if self._asleep:
            self._poller.ring()
        if self._ended:  # between the look at `_closing` and now
            self._refuse_inbox()

    def hasten(self, errand: Errand) -> None:
        """The same for somebody who waits for it now."""
        self.post(errand)
        self.hurry()

    def hurry(self) -> None:
        """Somebody waits: what lies in the inbox shall not wait as well."""
        self._hurried = True
        if self._dozing and self._inbox:
            self._poller.ring()

    @property
    def is_current(self) -> bool:
        """Whether this is the engine's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def enter(self, core: Core) -> None:
        """Move to another view, on the connections that are there. By an errand.

        Raises:
            CommError: to a member there is none; nothing has changed.
        """
        self._connections.enter(core)
        shared = all(link.shared for link in core.peers.links.values())
        self._work_s = SHARED_WORK_S if shared else WORK_S

    # --- the thread itself ---

    def _run(self) -> None:
        connections = self._connections
        try:
            while not self._closing:
                self._turn()
            self._begin(len(self._inbox))  # so that the goodbye does not count them as finished
            part(connections, self._poller, self._linger_s)
        except Exception as error:
            log.exception("%s: the engine's thread failed", connections.me)
            self._broken = CommError(f"the engine's thread failed: {error!r}")
            if connections.core is not None:
                connections.core.fail_all(self._broken)
        finally:
            if connections.core is not None:
                connections.core.fail_all(EngineClosed("the engine was closed while this was in progress"))
            self._ended = True
            self._refuse_inbox()
            connections.close()
            self._poller.close()

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
        connections = self._connections
        core = connections.core
        if core is not None:
            if core.given_up:
                connections.drop_given_up()
            core.work(time.monotonic() + self._work_s)
        now_s = time.monotonic()
        connections.tend(now_s)
        connections.flush()
        if core is not None and core.has_news:
            late = now_s - self._announced_s > ANNOUNCE_S
            if late:
                self._announced_s = now_s
            core.announce(everything=late)

    def _take_in(self, patience_s: float) -> bool:
        """Read what has come; whether the thread had been asleep before."""
        events = self._poller.poll(patience_s)
        was_asleep = self._asleep
        self._asleep = self._dozing = False
        self._connections.on_events(events)
        return was_asleep

    def _patience_s(self) -> float:
        connections = self._connections
        core = connections.core
        if (core is not None and len(core.runnable)) or not connections.unsent <= connections.full:
            return 0.0
        if self._busy:
            self._busy, self._dozing = False, True
            return 0.0 if self._inbox else DOZE_S
        self._asleep = True
        # Set before the last look: who submits after it sees the flag and rings the bell.
        if self._inbox:
            return 0.0
        if core is not None and core.has_news:
            return ANNOUNCE_S
        return connections.patience_s

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
