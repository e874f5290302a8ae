"""The engine's thread: waits for sockets and submissions, and lets `comm.collective` act on them.

One thread per worker does all reading, writing and folding, through all views. It sleeps in epoll and never polls.
`Connections` holds the links of the worker and notices which peers are gone; `Reactor` owns the thread.
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

from pliant.comm.connection import READABLE, WRITABLE, PeerLink, Poller
from pliant.comm.frames import LENGTH, SEQ, Frame, FrameKind, header
from pliant.comm.operations import Burst, Operation
from pliant.comm.telemetry import BackpressureGauge
from pliant.errors import CommError, EngineClosed, ViewChanged, WorkerLost

if TYPE_CHECKING:
    from pliant.cluster import Worker
    from pliant.comm.collective import Collectives
    from pliant.comm.memory import Arena

log = logging.getLogger(__name__)

GAUGE_S = 0.01
"""Interval at which outgoing bytes are measured while the network is the limit."""
DUPLICATE_S = 1.0
"""A newcomer under the name of a connected worker replaces it if that worker does not react for this long."""
PULSE_S = 2.0
GOODBYE_S = 1.0
"""A worker that leaves waits this long for its peers to close."""
DOZE_S = 0.001
"""Submissions come in bursts. When the first one wakes the thread, and after the last one it has seen, the thread dozes
for this long. What is submitted meanwhile is found when it wakes, without a system call and a fight for the interpreter
lock for each tensor. A thread that waits for a result wakes it at once."""
NOTIFY_S = 0.01
"""Waiters are notified when a whole burst is done, or this long after the last time."""
WORK_S = 0.001
"""Folding continues for at most about this long before the sockets have their turn."""
SHARED_WORK_S = 0.004
"""The same if all peers share memory: no network link runs idle meanwhile, and fewer notices cost less."""


# --- connections ---


class Connections:
    """The links of worker `me`, to members of its view and others. They outlive views. Engine's thread only.

    It also receives the frames that concern a connection and not a view. Of what comes from workers outside the view, or
    was sent in a view that this worker has left, nothing else matters.
    """

    def __init__(self, me: Worker, poller: Poller, *, heartbeat_timeout_s: float, are_watched: bool = False) -> None:
        """`are_watched`: a runner watches over the process of each worker."""
        self.me = me
        self.collectives: Collectives | None = None
        """The collectives of the view that the worker is in."""
        self.links: dict[Worker, PeerLink] = {}
        """The open connections, to members of the view and others."""
        self.closed_because: dict[Worker, str] = {}
        """The reason why there is no connection to a worker any more."""
        self.unsent: set[PeerLink] = set()
        """The links with something to write."""
        self.full: set[PeerLink] = set()
        """Those of them from which the kernel takes no more; epoll watches them."""
        self.backpressure = BackpressureGauge()
        self.on_lost: Callable[[Worker, str], None] = lambda worker, why: None
        """Called when a worker is gone without a goodbye."""
        self.on_left: Callable[[Worker], None] = lambda worker: None
        """Called when a worker is gone after its goodbye."""
        self.on_returned: Callable[[PeerLink, int], None] = lambda link, seq: None
        """Called when a peer has read what this worker has lent it."""
        self.on_mapped: Callable[[Arena], None] = lambda arena: None
        """Called when memory of a peer was mapped."""
        self.on_dropped: Callable[[PeerLink, bool], None] = lambda link, may_live: None
        """Called when a connection is gone, and whether the peer may live, as it has not closed its end."""
        self.on_pulse: Callable[[float], None] = lambda now_s: None
        """Called with the time, about every `PULSE_S`, while the thread runs."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a connection has been added or dropped."""
        self._poller = poller
        self._heartbeat_timeout_s, self._are_watched = heartbeat_timeout_s, are_watched
        self._next_heartbeat_s = self._next_pulse_s = 0.0
        self._duplicates: dict[PeerLink, tuple[float, Callable[[bool], None]]] = {}
        """Links whose worker's name another process has claimed: since when they are tested, and the answer function."""
        self._limited = False
        """Whether a full link leads to another host."""
        self._writable: set[PeerLink] = set()
        self._next_gauge_s = 0.0
        self._max_kernel_bytes = 0
        """How much may lie in the kernel's queues to other hosts, all together; 0 sets no limit."""

    def close(self) -> None:
        for _, answer in self._duplicates.values():
            answer(False)
        for link in self.links.values():
            link.close()

    def close_in_child(self) -> None:
        """In a forked child: close the parent's sockets without changing anything that is shared with the parent."""
        for link in list(self.links.values()):
            link.sock.close()

    # --- views ---

    def enter(self, collectives: Collectives) -> None:
        """Move to another view, on the connections that exist.

        Raises:
            CommError: there is no connection to a member; nothing has changed.
        """
        self.drop_reported_lost()
        links = {
            rank: self._member_link(rank, worker, collectives.view.number)
            for rank, worker in enumerate(collectives.view.workers)
            if rank != collectives.rank
        }
        if self.collectives is not None:
            moved = f"{self.me} has moved from view {self.collectives.view.number} to {collectives.view.number}"
            self.collectives.retire(ViewChanged(f"{moved} while this was in progress: submit it to the new engine"))
            collectives.take_over_from(self.collectives)
        collectives.peers.links.update(links)
        self.collectives = collectives
        ranks = {link: rank for rank, link in links.items()}
        for link in self.links.values():
            rank = ranks.get(link, -1)
            link.enter_view(collectives.view.number, rank, self if rank < 0 else collectives)
        for link in [link for link in self.links.values() if link.paused]:
            self._read(link)

    def _member_link(self, rank: int, worker: Worker, number: int) -> PeerLink:
        link = self.links.get(worker)
        if link is not None and not link.is_leaving:
            return link
        if link is None and worker not in self.closed_because:
            raise CommError(f"{self.me} has no connection to {worker} of view {number}: connect to it first")
        raise WorkerLost(str(worker), rank, "it left the job" if link is not None else self.closed_because[worker])

    # --- frames that concern no view ---

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        kind, _, _, view, _, _, piece, extra, _ = frame
        collectives = self.collectives
        if collectives is not None and collectives.peers.links.get(link.rank) is not link:
            collectives = None
        match kind:
            case FrameKind.ARENA:
                self.on_mapped(link.map_arena(piece, extra, has_slots=bool(frame[SEQ])))
                if collectives is not None:
                    collectives.memory_map.on_arena(link.rank, piece)
            case FrameKind.BYE:
                link.is_leaving = True
                if collectives is not None:
                    collectives.peers.on_bye(link, view, payload)
            case FrameKind.RETURNED:
                self.on_returned(link, frame[SEQ])
            case FrameKind.PING:
                link.send_control(header(FrameKind.PONG, view, extra=extra))
            case _ if kind not in frozenset(FrameKind):
                raise CommError(f"a frame of unknown kind {kind}: do all workers run the same version?")

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview | None:
        return None

    def on_bulk(self, link: PeerLink, frame: Frame) -> None:
        link.ingress_bytes += frame[LENGTH]

    # --- new connections ---

    def add(self, link: PeerLink) -> None:
        """Serve a new connection; it replaces an older one to the same worker."""
        old = self.links.get(link.worker)
        if old is not None:
            self._drop(old, "another connection has taken the place of this one")
        link.view = -1 if self.collectives is None else self.collectives.view.number
        link.last_seen_s = link.last_sent_s = time.monotonic()
        self.links[link.worker] = link
        self.closed_because.pop(link.worker, None)
        self._watch(link)
        self._share_kernel_queue()
        self.on_change()

    def check_duplicate(self, worker: Worker, answer: Callable[[bool], None]) -> None:
        """Answer whether a newcomer may use the name of `worker`: only if there is no living connection to it.

        A dead connection is dropped. The answer takes `DUPLICATE_S` at most.
        """
        link = self.links.get(worker)
        if link is not None and link.has_hung_up():
            if not link.paused:
                self._read(link)
            if not link.closed:
                self._drop(link, "its connection closed (the process ended or was killed)")
        if link is not None and link.is_leaving:
            self._drop(link, "it left the job")
        if link is None or link.closed:
            answer(True)
        elif link.paused or link in self._duplicates:
            # We do not read from it now, so its silence means nothing; or another newcomer is being checked.
            answer(False)
        else:
            self._duplicates[link] = (time.monotonic(), answer)
            link.send_control(header(FrameKind.PING, max(0, link.view)))

    def _answer_duplicates(self, now_s: float) -> None:
        for link, (since_s, answer) in list(self._duplicates.items()):
            if not link.closed and link.last_seen_s <= since_s and now_s - since_s > DUPLICATE_S:
                self._drop(link, "it did not react while another process came under its name")
            if link.closed or link.last_seen_s > since_s:
                del self._duplicates[link]
                answer(link.closed)

    # --- reading ---

    def on_events(self, events: Iterable[tuple[int, int]]) -> None:
        """Read from readable links, and note the writable ones."""
        poller = self._poller
        for fd, mask in events:
            if fd == poller.wakeup_fd:
                poller.clear_wakeup()
                continue
            link, wanted = poller.watched.get(fd, (None, 0))
            if link is None:
                continue  # dropped, because of what another link has brought
            if mask & READABLE and wanted & select.EPOLLIN:
                self._read(link)
            if mask & WRITABLE and wanted & select.EPOLLOUT:
                self._writable.add(link)

    def _read(self, link: PeerLink) -> None:
        if link.closed:
            return
        if self.collectives is not None and link.rank in self.collectives.peers.lost:
            # A peer has reported the loss before we saw it; a dead socket is always readable.
            self._drop(link, self.collectives.peers.lost[link.rank].why)
            return
        was_paused = link.paused
        self._guarded(link, link.read, time.monotonic())
        if link.paused != was_paused and not link.closed:
            self._watch(link)

    def _watch(self, link: PeerLink) -> None:
        self._poller.watch(link, writing=link in self.full)

    # --- writing ---

    def flush(self) -> None:
        """Write what can be written now."""
        now_s = time.monotonic()
        for link in list(self.unsent):
            if link.closed or self.is_lost(link):
                self.unsent.discard(link)
            elif link not in self.full or link in self._writable:
                # A link that was full is left alone until epoll reports it: otherwise every turn would
                # stuff a few bytes into it.
                self._guarded(link, self._flush_link, link, now_s)
        self._writable.clear()
        limited = self._limited
        if limited != self.backpressure.in_interval or (limited and now_s > self._next_gauge_s):
            self._next_gauge_s = now_s + GAUGE_S
            sent_bytes = sum(link.sent_bytes for link in self.links.values() if not link.shared)
            self.backpressure.update(limited, sent_bytes, now_s)

    def _flush_link(self, link: PeerLink, now_s: float) -> None:
        more = link.flush(now_s)
        if not more:
            self.unsent.discard(link)
        if more != (link in self.full):
            (self.full.add if more else self.full.discard)(link)
            self._limited = any(not other.shared for other in self.full)
            self._watch(link)

    def limit_kernel_queue(self, num_bytes: int) -> None:
        """Let at most about `num_bytes` lie in the kernel's queues to other hosts."""
        self._max_kernel_bytes = num_bytes
        self._share_kernel_queue()

    def _share_kernel_queue(self) -> None:
        remote = [link for link in self.links.values() if not link.shared]
        for link in remote if self._max_kernel_bytes else ():
            link.limit_kernel_queue(self._max_kernel_bytes // len(remote))
            link.fit_send_buffer()

    # --- liveness ---

    @property
    def poll_timeout_s(self) -> float:
        """The time after which `check_liveness` must be called again."""
        timeout_s = min(self._heartbeat_timeout_s, 8 * PULSE_S)
        return (min(DUPLICATE_S, timeout_s) if self._duplicates else timeout_s) / 8

    def check_liveness(self, now_s: float) -> None:
        """Send heartbeats and drop silent peers, if it is time for that."""
        if now_s > self._next_pulse_s:
            self._next_pulse_s = now_s + PULSE_S / 2
            self.on_pulse(now_s)
        if now_s > self._next_heartbeat_s:
            if now_s - self._next_heartbeat_s > self._heartbeat_timeout_s / 2:
                # This process did not run, and perhaps no other one of the host did: that says nothing of the peers.
                for link in self.links.values():
                    link.last_seen_s = now_s
            self._next_heartbeat_s = now_s + self._heartbeat_timeout_s / 16
            for link in list(self.links.values()):
                if not self.is_lost(link):
                    self._check_heartbeat(link, now_s)
        if self._duplicates:
            self._answer_duplicates(now_s)

    def _check_heartbeat(self, link: PeerLink, now_s: float) -> None:
        timeout_s = self._heartbeat_timeout_s
        if self._max_kernel_bytes and not link.shared:
            link.fit_send_buffer()
        if now_s - link.last_sent_s > timeout_s / 4:
            link.send_control(header(FrameKind.HEARTBEAT, max(0, link.view)))
            link.last_sent_s = now_s
        if link.paused:
            link.last_seen_s = now_s  # it may have sent much; it is we who do not read
            return
        if now_s - link.last_seen_s > timeout_s:
            # In the middle of a payload the kernel may hold back what is less than the low-water mark.
            self._read(link)
        silent_s = now_s - link.last_seen_s
        if silent_s <= timeout_s or link.closed or link.paused:
            return
        # It may only be slow, because a thread of it holds the interpreter lock.
        if not link.seems_alive(timeout_s, is_watched=self._are_watched):
            self._dismiss(link, f"silent for {silent_s:.1f} s: its process is stopped, or its host cannot be reached "
                                f"(heartbeat_timeout_s={timeout_s:g})")  # fmt: skip

    def is_lost(self, link: PeerLink) -> bool:
        """Return whether a link leads to a member of the view that is known to be gone."""
        return self.collectives is not None and link.rank in self.collectives.peers.lost

    def _guarded(self, link: PeerLink, act: Callable[..., None], *args: object) -> None:
        """Read from or write to a link; if the connection is gone, drop the worker."""
        try:
            act(*args)
        except EOFError:
            self._drop(link, "its connection closed (the process ended or was killed)")
        except OSError as error:
            # Writing failed, but a last BYE may still lie in the receive buffer.
            with contextlib.suppress(EOFError, OSError, CommError):
                while not link.is_leaving:
                    before = link.last_seen_s
                    link.read(time.monotonic())
                    if link.last_seen_s == before:
                        break
            self._drop(link, f"its connection broke ({error.strerror or error})")
        except Exception as error:  # whatever a faulty peer sends must not end this engine
            log.error("%s: %s sent an invalid frame: %r", self.me, link.worker, error)
            self._drop(link, f"it sent an invalid frame: {error!r}")

    def _drop(self, link: PeerLink, why: str) -> None:
        """Close a connection, and notify collectives, listeners and waiters."""
        if link.closed:
            return
        member = self.collectives is not None and self.collectives.peers.links.get(link.rank) is link
        self._poller.unwatch(link)
        self.unsent.discard(link)
        self.full.discard(link)
        self._limited = any(not other.shared for other in self.full)
        self.backpressure.drop_interval()
        may_live = not link.is_leaving and not link.has_hung_up()
        link.close()
        if self.links.get(link.worker) is link:
            del self.links[link.worker]
            self.closed_because[link.worker] = "it left the job" if link.is_leaving else why
        if self.collectives is not None and member:
            (self.collectives.on_left(link.rank) if link.is_leaving else self.collectives.on_lost(link.rank, why))
        self.on_dropped(link, may_live)
        try:
            if link.is_leaving:
                self.on_left(link.worker)
            elif self.collectives is None or not self.collectives.is_given_up:
                self.on_lost(link.worker, why)
        except Exception:
            log.exception("%s: the callback for the loss of %s failed", self.me, link.worker)
        self.on_change()

    def give_up(self, worker: Worker, why: str) -> None:
        """Close the connection to a worker that is of no use any more, though it may live."""
        link = self.links.get(worker)
        if link is not None:
            self._dismiss(link, why)

    def _dismiss(self, link: PeerLink, why: str) -> None:
        """Close the connection to a worker that may live, and tell it first: else it would take its peers for lost."""
        if not link.closed:
            notice = why.encode()
            head = header(FrameKind.LOST, max(0, link.view), piece=max(0, link.rank), length=len(notice))
            link.send_control(head, notice)
            with contextlib.suppress(OSError):
                link.flush(time.monotonic())
        self._drop(link, why)

    def drop_reported_lost(self) -> None:
        """Close the connections to workers that peers have reported lost; a worker that lives learns it that way."""
        while self.collectives is not None and self.collectives.links_to_drop:
            link = self.collectives.links_to_drop.pop()
            self._dismiss(link, self.collectives.peers.lost[link.rank].why)

    # --- leaving the job ---

    def leave_job(self, linger_s: float) -> None:
        """Send what is queued, then BYE, then wait briefly for the peers to read it. Nothing may be called after it."""
        deadline_s = time.monotonic() + linger_s
        finished = b"" if self.collectives is None else self.collectives.pack_finished()
        links = [link for link in self.links.values() if not self.is_lost(link)]
        for link in links:
            link.send_control(header(FrameKind.BYE, max(0, link.view), length=len(finished)), finished)
        while self.unsent and time.monotonic() < deadline_s:
            self.flush()
            if self.unsent:
                self.on_events(self._poller.poll(0.05))
        self._await_close(links, min(deadline_s, time.monotonic() + GOODBYE_S))

    def _await_close(self, links: Sequence[PeerLink], deadline_s: float) -> None:
        """Let the peers close first: closing with something unread resets the connection, and a reset may overtake BYE."""
        poller = self._poller
        poller.enable_wakeup(False)
        for link in links:
            if not link.closed:
                link.paused = False  # what it sends no longer matters, but must be read
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


# --- the thread ---


@dataclass(frozen=True, slots=True)
class ReactorCall:
    """A call for the engine's thread that is not a collective."""

    run: Callable[[], None]
    fail: Callable[[Exception], object] = lambda _: None
    """Called instead of `run` if the engine ends first."""


class Reactor:
    """The engine's thread of one worker. Any thread may call `post` and `wake`."""

    def __init__(self, connections: Connections, poller: Poller, *, linger_s: float) -> None:
        self._connections = connections
        self._poller = poller
        self._linger_s = linger_s
        self._inbox: deque[Operation | ReactorCall] = deque()
        self._asleep = False
        self._dozing = False
        self._busy = False
        self._hurried = False
        self._notified_s = 0.0
        self._work_s = WORK_S
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"pliant-engine-{connections.me}", daemon=True)
        self._is_put_off = False
        """Whether the thread starts only when it is needed, and has not been so far."""
        self._starting = threading.RLock()

    # --- for any thread ---

    @property
    def thread_number(self) -> int:
        """The number of the thread for the kernel; 0 if it does not run."""
        return self._thread.native_id or 0

    def start(self) -> None:
        self._poller.enable_wakeup(True)
        self._thread.start()

    def start_when_needed(self) -> None:
        """Start the thread with the first operation or connection; until then, calls are made where they are posted.

        A worker that is alone may never need it, and a second thread costs something even while it sleeps: the C library then
        takes locks, which makes programs that create many small tensors 5 % slower.
        """
        self._is_put_off = True

    def need_thread(self) -> None:
        """Start the thread, if that was put off and the reactor is not closed."""
        if self._is_put_off:
            with self._starting:
                if self._is_put_off and not self._closing:
                    self.start()
                    self._is_put_off = False

    def close(self) -> None:
        """Send what is queued, say goodbye to all peers, and end. What still waits fails with EngineClosed."""
        with self._starting:
            self._closing = True
            if self._thread.ident is None:  # never started
                self._poller.close()
                return
        self._poller.wake()
        self._thread.join(timeout=self._linger_s + 5)

    def close_in_child(self) -> None:
        """In a forked child: close the parent's descriptors without changing anything that is shared with it."""
        self._connections.close_in_child()
        self._poller.close_in_child()
        self._closing = self._ended = True

    def post(self, call: Operation | ReactorCall) -> None:
        """Have the engine's thread begin an operation or make a call."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise EngineClosed("the engine is closed: submit before leaving its `with`")
        if self._is_put_off and self._was_called(call):
            return
        self._inbox.append(call)
        if self._asleep:
            self._poller.wake()
        if self._ended:  # between the check of `_closing` and now
            self._refuse_inbox()

    def _was_called(self, call: Operation | ReactorCall) -> bool:
        """Make the call here, if the thread has not been needed so far; else return False, and the thread runs."""
        if isinstance(call, Operation):
            self.need_thread()
            return False
        with self._starting:
            if self._is_put_off:
                call.run()
                return True
        return False

    def wake(self) -> None:
        """Have the inbox handled at once, because somebody waits."""
        self._hurried = True
        if self._dozing and self._inbox:
            self._poller.wake()

    @property
    def is_current(self) -> bool:
        """Whether this is called on the engine's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def enter(self, collectives: Collectives) -> None:
        """Move to another view, on the connections that exist. To be called on the engine's thread.

        Raises:
            CommError: there is no connection to a member; nothing has changed.
        """
        self._connections.enter(collectives)
        shared = all(link.shared for link in collectives.peers.links.values())
        self._work_s = SHARED_WORK_S if shared else WORK_S

    # --- on the engine's thread ---

    def _run(self) -> None:
        connections = self._connections
        try:
            while not self._closing:
                self._turn()
            self._begin_inbox(len(self._inbox))  # so that the goodbye does not count them as finished
            connections.leave_job(self._linger_s)
        except Exception as error:
            log.exception("%s: the engine's thread failed", connections.me)
            self._broken = CommError(f"the engine's thread failed: {error!r}")
            if connections.collectives is not None:
                connections.collectives.fail_all(self._broken)
        finally:
            if connections.collectives is not None:
                connections.collectives.fail_all(EngineClosed("the engine was closed while this was in progress"))
            self._ended = True
            self._refuse_inbox()
            connections.close()
            self._poller.close()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        was_asleep = self._poll(self._poll_timeout_s())
        if was_asleep and self._inbox and not self._hurried:
            self._dozing = True
            self._poll(0.0 if self._hurried else DOZE_S)
        self._hurried = False
        if self._inbox:
            self._busy = True
            self._begin_inbox(len(self._inbox))
        connections = self._connections
        collectives = connections.collectives
        if collectives is not None:
            if collectives.links_to_drop:
                connections.drop_reported_lost()
            collectives.work(time.monotonic() + self._work_s)
        now_s = time.monotonic()
        connections.check_liveness(now_s)
        connections.flush()
        if collectives is not None and collectives.operations.completed:
            late = now_s - self._notified_s > NOTIFY_S
            if late:
                self._notified_s = now_s
            collectives.operations.notify_waiters(everything=late)

    def _poll(self, timeout_s: float) -> bool:
        """Wait for events and read what has come; return whether the thread had been asleep."""
        events = self._poller.poll(timeout_s)
        was_asleep = self._asleep
        self._asleep = self._dozing = False
        self._connections.on_events(events)
        return was_asleep

    def _poll_timeout_s(self) -> float:
        connections = self._connections
        collectives = connections.collectives
        if (collectives is not None and len(collectives.runnable)) or not connections.unsent <= connections.full:
            return 0.0
        if self._busy:
            self._busy, self._dozing = False, True
            return 0.0 if self._inbox else DOZE_S
        self._asleep = True
        # Set before the last look at the inbox: a thread that submits after it sees the flag and wakes us.
        if self._inbox:
            return 0.0
        if collectives is not None and collectives.operations.completed:
            return NOTIFY_S
        return connections.poll_timeout_s

    def _begin_inbox(self, size: int) -> None:
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
        """Fail what was posted too late. The ending thread and a posting thread may both do it."""
        error = EngineClosed("the engine was closed while this was submitted")
        with contextlib.suppress(IndexError):
            while True:
                item = self._inbox.popleft()
                if isinstance(item, Operation):
                    item.handle.fail(error)
                else:
                    item.fail(error)
