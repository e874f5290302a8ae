"""All connections of one worker, to members of its view and others: reading, writing, and noticing who is gone.

They outlive views; `enter` moves them into the next one. On the engine's thread only, which `comm.reactor`
owns. What a frame means is the core's business, or the lobby's.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable, Iterable

from pliant.cluster import Worker
from pliant.comm.collective.core import Core
from pliant.comm.lobby import Lobby
from pliant.comm.telemetry import PressureGauge
from pliant.comm.transport.link import Link
from pliant.comm.transport.poller import READABLE, WRITABLE, Poller, hung_up
from pliant.comm.transport.wire import Kind, header
from pliant.errors import CommError, ViewChanged, WorkerLost

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
