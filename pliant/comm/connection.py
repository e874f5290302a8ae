"""What Linux is asked about a TCP connection, and told: how fast the path is, and how much may lie in its queues.

Functions of a socket. On one that is no TCP connection they do nothing, and know nothing.

What waits to leave on one connection, and what goes next. Pure: no socket; it is told how much has gone.

Control frames overtake data, data goes by priority, and a frame that has begun is finished first. What
was queued in one view leaves before anything of the next.

One connection to one peer: frames out in the order of their priority, frames in as they come.

A stream socket that never blocks. The engine's thread calls `read` and `flush`; no other thread
touches a link. What leaves next is `outbox`'s to say. A frame that has begun is finished first; so
slices must be small, and so must what the kernel holds below us.

A link outlives views. A frame of a view that this worker has not entered stops the reading until it
has; nothing of it is lost.

What the engine's thread sleeps on: the sockets of links, and a bell that any thread may ring.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from pliant.comm.frames import ANYTIME, BULK, HEADER, KIND, LENGTH, MAX_CONTROL_BYTES, VIEW, Frame
from pliant.comm.memory import Arena
from pliant.comm.operations import PriorityQueue
from pliant.comm.telemetry import Delivered
from pliant.errors import CommError

if TYPE_CHECKING:
    from pliant.cluster import Worker

_NUMBER, _LONG = struct.Struct("=I"), struct.Struct("=Q")
# Offsets in tcp_info.
_BYTES_ACKED, _MIN_RTT, _DELIVERY_RATE, _BUSY_TIME, _RWND_LIMITED = 120, 148, 160, 168, 176
_UNKNOWN = 0xFFFFFFFF


def is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def send_at_once(sock: socket.socket) -> None:
    """Small frames shall not wait for more to come."""
    if is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_unsent(sock: socket.socket, num_bytes: int) -> None:
    """Call the connection writable only while less than this lies unsent in its queue."""
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if lowat is not None and is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, lowat, num_bytes)


def acknowledged_by_peer(sock: socket.socket) -> Delivered | None:
    """What the other end has acknowledged so far; None where that is not known, or no more."""
    if not is_tcp(sock):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RWND_LIMITED + 8)
    except OSError:
        return None
    if len(info) < _RWND_LIMITED + 8:  # a kernel before 4.10
        return None
    acknowledged, busy_us, full_us = (
        _LONG.unpack_from(info, at)[0] for at in (_BYTES_ACKED, _BUSY_TIME, _RWND_LIMITED)
    )
    # Not the time for which the other end had no room: then its process is late, and not the network.
    return Delivered(acknowledged, (busy_us - full_us) / 1e6)


def path_bytes(sock: socket.socket) -> int | None:
    """What the path holds at the rate seen so far; 0 if nothing was seen, None where that is not known."""
    if not is_tcp(sock):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE + 8)
    if len(info) < _DELIVERY_RATE + 8:
        return None
    (min_rtt_us,), (bytes_per_s,) = _NUMBER.unpack_from(info, _MIN_RTT), _LONG.unpack_from(info, _DELIVERY_RATE)
    return 0 if min_rtt_us == _UNKNOWN else bytes_per_s * min_rtt_us // 1_000_000


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


WRITE_BYTES = 128 << 10
"""At most this much is handed to the kernel at once, and at most this much may lie there unsent, if not told otherwise."""
LEAST_FRAGMENT_BYTES = 24 << 10
LEAST_WRITE_BYTES = 8 << 10
READ_BYTES = 1 << 20
"""At most about this much is taken in from one peer before the others have their turn."""
BUFFER_BYTES = 64 << 10
"""Headers and small frames pass through a buffer of this size; of a bulk payload at most as much is copied."""
PATIENCE_S = 0.004
PATIENCE_BYTES = 256 << 10
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_FD_BYTES = array.array("i").itemsize
_NOWHERE = memoryview(bytearray(256 << 10))
"""Where payloads go that nobody wants."""


class Receiver(Protocol):
    """Who takes what arrives on a link."""

    def on_frame(self, link: Link, frame: Frame, payload: bytes) -> None:
        """A small frame has arrived."""

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the bulk payload of this frame shall go, exactly as long as it; None if nobody wants it."""

    def on_bulk(self, link: Link, frame: Frame) -> None:
        """The payload is in its place."""


class Link:
    """A connected, authenticated socket to `worker`.

    `receiver` takes the frames of `view`, and until another one is entered also all that belong to no view.
    Whenever there is something to write, the link puts itself into `unsent`; whoever flushes it takes it out.
    """

    def __init__(
        self,
        rank: int,
        worker: Worker,
        sock: socket.socket,
        *,
        shared: bool,
        receiver: Receiver,
        unsent: set[Link],
        view: int = 0,
    ) -> None:
        self.rank = rank
        """The peer's rank in this worker's view; negative if it is not in it."""
        self.view = view
        """The number of the view that this worker is in; negative before the first."""
        self.worker = worker
        self.sock = sock
        self.shared = shared
        """Whether the peer is on this host, with shared memory."""
        self.egress_bytes = 0
        self.ingress_bytes = 0
        self.sent_bytes = 0
        """Handed to the kernel, headers and all."""
        self.said_bye = False
        self.closed = False
        self.paused = False
        """Whether the next frame is of a view that this worker has yet to enter."""
        self.arenas: dict[int, Arena] = {}
        """The peer's shared memory that is mapped here."""
        self.told = 0
        """How many of our own arenas the peer knows."""
        self.last_seen_s = 0.0
        self.last_sent_s = 0.0
        self.fds: deque[int] = deque()
        """Descriptors received and not yet claimed."""
        self.fragment_bytes = 0
        """Payloads are sent in fragments of about this size, so that others can overtake them; 0: whole."""
        self._lobby = self._receiver = receiver
        self._bulk_receiver = receiver
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._outbox = Outbox()
        self._unsent = unsent
        self._write_bytes = WRITE_BYTES
        self._blocked_bytes = 0
        """How much TLS was given when it could not write it; 0: it could."""
        self._kernel_bytes = 0
        """What the kernel was told to keep at most; 0: nothing."""
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._bulk: Frame | None = None
        self._bulk_place = memoryview(b"")
        self._skip = 0
        """How much of the payload is still to come that goes nowhere."""
        self._bulk_began_s = 0.0
        self._rate_bytes_per_s = 0.0
        self._low_water = 1
        self._patient = self._plain and is_tcp(sock)
        sock.setblocking(False)
        send_at_once(sock)
        limit_unsent(sock, WRITE_BYTES // 3)

    def enter(self, view: int, rank: int, receiver: Receiver) -> None:
        """Go on in another view. Whatever arrives of the old one from now on is no longer the old receiver's."""
        self._outbox.end_view()
        if self._bulk is not None:
            self.divert()
            self._bulk_receiver = self._lobby
        self.view, self.rank, self._receiver = view, rank, receiver

    # --- out ---

    def say(self, header: bytes, payload: bytes = b"", fd: int | None = None) -> None:
        """Queue a control frame: it leaves before all data that has not begun to."""
        self._outbox.say(header, payload, fd)
        self._unsent.add(self)

    def send(
        self, priority: int, header: bytes, payload: Sequence[memoryview], on_sent: Callable[[], None] | None
    ) -> None:
        """Queue a data frame; `on_sent` is called when its last byte is with the kernel."""
        self._outbox.data.push(priority, ([memoryview(header), *payload], on_sent))
        self._unsent.add(self)

    def flush(self, now_s: float) -> bool:
        """Write what can be written now; True if more waits. Raises OSError when the connection is gone."""
        outbox, limit = self._outbox, self._write_bytes
        while outbox.fill():
            asked = min(outbox.num_bytes, limit)
            try:
                if not self._plain:
                    sent = self._write_tls(outbox.first)
                elif outbox.fds:
                    sent = self._write_with_fds(outbox.fds)
                else:
                    sent = self.sock.sendmsg(outbox.views(limit))
            except _BLOCKED:
                return True
            self.last_sent_s = now_s
            self.sent_bytes += sent
            outbox.advance(sent)
            if not self.shared and sent >= limit:
                return bool(outbox)
            if sent < asked and self._plain:
                return True  # the kernel takes no more
        return False

    def _write_with_fds(self, fds: list[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = self.sock.sendmsg(self._outbox.views(self._write_bytes), ancillary)
        fds.clear()
        return sent

    def _write_tls(self, view: memoryview) -> int:
        # A write that blocked must be tried again with no less: part of it may be encrypted already.
        length = min(len(view), max(self._write_bytes, self._blocked_bytes))
        self._blocked_bytes = length
        sent = self.sock.send(view[:length])
        self._blocked_bytes = 0
        return sent

    # --- how much lies below us ---

    def keep_below(self, num_bytes: int) -> None:
        """Hand the kernel at most about this much at a time: what has left the priority queue cannot be overtaken."""
        self._write_bytes = max(LEAST_WRITE_BYTES, num_bytes)
        self.fragment_bytes = max(LEAST_FRAGMENT_BYTES, num_bytes)
        limit_unsent(self.sock, self._write_bytes // 3)

    def fit_buffer(self) -> None:
        """Let the kernel keep no more unacknowledged than the path needs: the rest would lie in queues on the way, where
        no priority reaches it. Called now and then, because the path is found out by sending."""
        on_path = None if self.shared else path_bytes(self.sock)
        if on_path is None:
            return
        # Four times what is on the path at the rate seen: if it was this buffer that held the rate down, it grows.
        wanted = max(self._write_bytes // 2, 4 * on_path)
        if not 0.8 < wanted / max(1, self._kernel_bytes) < 1.25:
            self._kernel_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    def delivered(self) -> Delivered | None:
        """What the other end has acknowledged so far; None where this is no TCP connection, or no more. From any thread."""
        return acknowledged_by_peer(self.sock)

    # --- in ---

    def read(self, now_s: float) -> None:
        """Take in what has arrived. Raises EOFError or OSError when the connection is gone."""
        if self.paused:
            self.paused = False
            self._parse(now_s)
        if not self.paused:
            self._take_in(now_s)
        if self._patient:
            self._be_patient()

    def _take_in(self, now_s: float) -> None:
        budget = READ_BYTES
        # What TLS holds decrypted is in no selector's sight: left there, it might wait for ever.
        while budget > 0 or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
            place = self._place()
            try:
                got = self._receive(place)
            except _BLOCKED:
                return
            if got == 0:
                raise EOFError("connection closed")
            self.last_seen_s = now_s
            budget -= got
            if self._bulk is None:
                self._end += got
                self._parse(now_s)
            else:
                if self._skip:
                    self._skip -= got
                else:
                    self._bulk_place = self._bulk_place[got:]
                self._finish_bulk(now_s)
            if self.paused or (got < len(place) and self._plain):
                return

    def _place(self) -> memoryview:
        if self._bulk is None:
            return self._room()
        return _NOWHERE[: self._skip] if self._skip else self._bulk_place

    def _room(self) -> memoryview:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._view[self._begin : self._end])
            self._grow_to(max(len(self._buffer), 2 * len(rest)))
            self._view[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return self._view[self._end :]

    def _grow_to(self, size: int) -> None:
        if size > len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)

    def _receive(self, place: memoryview) -> int:
        if not self.shared:
            return self.sock.recv_into(place)
        got, ancillary, _, _ = self.sock.recvmsg_into(
            [place], socket.CMSG_SPACE(64 * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array.array("i", data[: len(data) - len(data) % _FD_BYTES]))
        return got

    def _be_patient(self) -> None:
        """In the middle of a payload, have the kernel collect a few milliseconds' worth before it wakes us.

        A shaped link delivers a packet at a time; waking for each would cost more than all else.
        """
        wanted = 1
        if self._bulk is not None:
            wanted = max(
                1, min(len(self._bulk_place) + self._skip, PATIENCE_BYTES, int(self._rate_bytes_per_s * PATIENCE_S))
            )
        if wanted != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._low_water = wanted

    def _parse(self, now_s: float) -> None:
        while self._end - self._begin >= HEADER.size:
            frame: Frame = HEADER.unpack_from(self._buffer, self._begin)
            length = frame[LENGTH]
            receiver = self._receiver
            if frame[VIEW] != self.view:
                if frame[VIEW] > self.view and frame[KIND] not in ANYTIME:
                    self.paused = True
                    return
                receiver = self._lobby
            if frame[KIND] in BULK:
                self._begin += HEADER.size
                self._start_bulk(frame, now_s, receiver)
                if self._bulk is not None:
                    return
                continue
            if length == 0:
                self._begin += HEADER.size
                receiver.on_frame(self, frame, b"")
                continue
            if length > MAX_CONTROL_BYTES:
                raise CommError(f"a frame of kind {frame[KIND]} claims {length} bytes: the stream is damaged")
            if self._end - self._begin < HEADER.size + length:
                return
            begin = self._begin + HEADER.size
            self._begin = begin + length
            receiver.on_frame(self, frame, bytes(self._view[begin : begin + length]))

    def _start_bulk(self, frame: Frame, now_s: float, receiver: Receiver) -> None:
        place = receiver.place_for(self, frame)
        here = min(self._end - self._begin, frame[LENGTH])
        self._bulk, self._bulk_began_s, self._bulk_receiver = frame, now_s, receiver
        if place is None:
            self._skip, self._bulk_place = frame[LENGTH] - here, memoryview(b"")
        else:
            place[:here] = self._view[self._begin : self._begin + here]
            self._bulk_place = place[here:]
        self._begin += here
        self._finish_bulk(now_s)

    def _finish_bulk(self, now_s: float) -> None:
        if len(self._bulk_place) == 0 and self._skip == 0 and self._bulk is not None:
            frame, self._bulk = self._bulk, None
            if now_s > self._bulk_began_s:
                self._rate_bytes_per_s = frame[LENGTH] / (now_s - self._bulk_began_s)
            self._bulk_receiver.on_bulk(self, frame)

    def divert(self) -> None:
        """Let the rest of the payload that is arriving go nowhere: its place is no longer ours to write."""
        self._skip += len(self._bulk_place)
        self._bulk_place = memoryview(b"")

    def take_arena(self, number: int, size: int) -> None:
        """Map the memory whose descriptor has come with a frame."""
        if not self.fds:
            raise CommError(f"{self.worker} announced shared memory, but no descriptor came with it")
        fd = self.fds.popleft()
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise CommError(f"{self.worker} announced {size} bytes of shared memory, but gave less")
        arena = self.arenas[number] = Arena(fd, size)
        arena.close()  # the mapping stays

    def close(self) -> None:
        self.closed = True
        self._outbox.clear()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds.clear()
        self.sock.close()


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
