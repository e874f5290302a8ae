"""One connection to one peer: frames leave in the order of their priority, and arrive as they come.

A `PeerLink` is a stream socket that never blocks; only the engine's thread uses it. A frame that has begun is finished
before the next one. So that urgent data can overtake, slices must be small, and so must what the kernel holds below
us. A link outlives views: a frame of a view that this worker has not entered pauses reading until it has, and nothing
is lost.
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

from pliant.comm.frames import (
    ANY_VIEW,
    BULK,
    HEADER,
    KIND,
    LENGTH,
    MAX_CONTROL_BYTES,
    VIEW,
    Frame,
    FrameKind,
    header,
)
from pliant.comm.liveness import host_answers, peer_process, process_runs
from pliant.comm.memory import Arena
from pliant.comm.operations import PriorityQueue
from pliant.comm.telemetry import TimedBytes
from pliant.errors import CommError

if TYPE_CHECKING:
    from pliant.cluster import Worker

WRITE_BYTES = 128 << 10
"""Default for how much is handed to the kernel at once, and for how much may lie there unsent."""
LEAST_FRAGMENT_BYTES = 24 << 10
LEAST_WRITE_BYTES = 8 << 10
READ_BYTES = 1 << 20
"""About this much is read from one peer before the others have their turn."""
BUFFER_BYTES = 64 << 10
"""Size of the buffer for headers and small frames; at most this much of a bulk payload is copied through it."""
LOW_WATER_S = 0.004
LOW_WATER_BYTES = 256 << 10
TOGETHER_BYTES = 16 << 10
"""Frames are combined until they are this large, because a system call has its price."""
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_FD_BYTES = array.array("i").itemsize
_DISCARD = memoryview(bytearray(256 << 10))
"""Destination of payloads that nobody wants."""


# --- TCP options: on a socket that is not TCP these functions do nothing and return None ---

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
# Offsets in tcp_info.
_BYTES_ACKED, _MIN_RTT, _DELIVERY_RATE, _BUSY_TIME, _RWND_LIMITED = 120, 148, 160, 168, 176
_UNKNOWN = 0xFFFFFFFF


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _limit_unsent(sock: socket.socket, num_bytes: int) -> None:
    """Have the kernel report the socket as writable only while less than `num_bytes` lie unsent in its queue."""
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if lowat is not None and _is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, lowat, num_bytes)


def _path_bytes(sock: socket.socket) -> int | None:
    """Return bandwidth times delay of the path as seen so far; 0 if nothing was seen, None if it is unknown."""
    if not _is_tcp(sock):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE + 8)
    if len(info) < _DELIVERY_RATE + 8:
        return None
    (min_rtt_us,), (bytes_per_s,) = _U32.unpack_from(info, _MIN_RTT), _U64.unpack_from(info, _DELIVERY_RATE)
    return 0 if min_rtt_us == _UNKNOWN else bytes_per_s * min_rtt_us // 1_000_000


# --- frames that wait to leave ---

OnSent = Callable[[], None]
"""Called when the last byte of a frame is with the kernel."""
QueuedFrame = tuple[list[memoryview], OnSent | None]


class Outbox:
    """The frames of one connection that have not left yet. It has no socket: call `fill`, write some of `views`, `advance`.

    Control frames overtake data, data goes by priority, and a frame that has begun is finished first. What was queued
    in one view leaves before anything of the next.
    """

    def __init__(self) -> None:
        self.data: PriorityQueue[QueuedFrame] = PriorityQueue()
        """Frames with payloads, each with its header first; push them here."""
        self.fds: list[int] = []
        """Descriptors that go with the first byte of `views`."""
        self.num_bytes = 0
        """The size of what is in `views`; nothing can overtake that any more."""
        self._control = bytearray()
        self._with_fds: deque[tuple[bytes, int]] = deque()
        self._former: deque[QueuedFrame] = deque()
        """Frames that were queued in earlier views."""
        self._next: deque[tuple[memoryview, OnSent | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._next or self._with_fds or self._former or self._control or len(self.data))

    def add_control(self, header: bytes, payload: bytes, fd: int | None) -> None:
        """Queue a control frame: it leaves before all data that has not begun to leave."""
        if fd is not None:
            # Alone, and before everything else: the kernel passes only so many descriptors at a time, and
            # the next frame may refer to this one.
            self._with_fds.append((header + payload, fd))
            return
        self._control += header
        self._control += payload

    def end_view(self) -> None:
        """Let everything that waits now leave before anything that is queued later."""
        if self._control:
            self._former.append(([memoryview(bytes(self._control))], None))
            self._control.clear()
        while len(self.data):
            self._former.append(self.data.pop())

    def fill(self) -> bool:
        """Choose what leaves next, combining small frames; False if nothing waits."""
        while self.num_bytes < TOGETHER_BYTES and not self.fds:
            if self._with_fds:
                if self._next:
                    break
                frame, fd = self._with_fds.popleft()
                self._add(([memoryview(frame)], None))
                self.fds = [fd]
            elif self._former:
                self._add(self._former.popleft())
            elif self._control:
                self._add(([memoryview(bytes(self._control))], None))
                self._control.clear()
            elif len(self.data):
                self._add(self.data.pop())
            else:
                break
        return bool(self._next)

    def _add(self, frame: QueuedFrame) -> None:
        views, on_sent = frame
        for view in views[:-1]:
            self._next.append((view, None))
            self.num_bytes += len(view)
        self._next.append((views[-1], on_sent))
        self.num_bytes += len(views[-1])

    @property
    def first(self) -> memoryview:
        """The first contiguous piece of what leaves next."""
        return self._next[0][0]

    def views(self, limit: int) -> list[memoryview]:
        """Return what leaves next, up to `limit` bytes of it."""
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
        """Remove the first `sent` bytes of what leaves next: the kernel has them."""
        queue = self._next
        self.num_bytes -= sent
        while queue and sent >= len(queue[0][0]):
            view, on_sent = queue.popleft()
            sent -= len(view)
            if on_sent is not None:
                on_sent()
        if sent:
            view, on_sent = queue[0]
            queue[0] = (view[sent:], on_sent)

    def clear(self) -> None:
        """Drop everything: the connection is closed."""
        self.data.clear()
        self._former.clear()
        self._next.clear()
        self.num_bytes = 0


# --- the connection ---


class FrameReceiver(Protocol):
    """The object that handles what arrives on a link."""

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        """Handle a small frame."""

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview | None:
        """Return the destination of a bulk payload, exactly as long as it; None to discard the payload."""

    def on_bulk(self, link: PeerLink, frame: Frame) -> None:
        """Handle a bulk payload that is now in its destination."""


class PeerLink:
    """A connected, authenticated socket to `worker`.

    `receiver` handles the frames of `view`, and until another view is entered also all that belong to no view.
    Whenever there is something to write, the link adds itself to `unsent`; the caller of `flush` removes it.
    """

    def __init__(
        self,
        rank: int,
        worker: Worker,
        sock: socket.socket,
        *,
        shared: bool,
        receiver: FrameReceiver,
        unsent: set[PeerLink],
        view: int = 0,
    ) -> None:
        self.rank = rank
        """The peer's rank in the view of this worker; negative if it is not in it."""
        self.view = view
        """The number of the view that this worker is in; negative before the first."""
        self.worker = worker
        self.sock = sock
        self.shared = shared
        """Whether the peer is on this host, with shared memory."""
        self.egress_bytes = 0
        self.ingress_bytes = 0
        self.sent_bytes = 0
        """Bytes handed to the kernel, headers included."""
        self.is_leaving = False
        """Whether the peer has sent BYE."""
        self.closed = False
        self.paused = False
        """Whether the next frame is of a view that this worker has yet to enter."""
        self.arenas: dict[int, Arena] = {}
        """The peer's shared memory that is mapped here."""
        self.num_arenas_sent = 0
        """The number of our own arenas that the peer knows."""
        self.last_seen_s = 0.0
        self.last_sent_s = 0.0
        self._process = peer_process(sock)
        self.fds: deque[int] = deque()
        """Descriptors that were received and not yet claimed."""
        self.fragment_bytes = 0
        """Payloads are sent in fragments of about this size, so that others can overtake them; 0 sends them whole."""
        self.default_receiver = self._receiver = receiver
        """The receiver of frames that concern the connection and not a view."""
        self._bulk_receiver = receiver
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._outbox = Outbox()
        self._unsent = unsent
        self._write_bytes = WRITE_BYTES
        self._blocked_bytes = 0
        """The size of a TLS write that blocked; 0 if none did."""
        self._kernel_bytes = 0
        """The size of the kernel's send buffer that we have set; 0 if none."""
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._bulk: Frame | None = None
        self._bulk_place = memoryview(b"")
        self._discard_bytes = 0
        """How much of the arriving payload is still to be discarded."""
        self._bulk_began_s = 0.0
        self._rate_bytes_per_s = 0.0
        self._low_water = 1
        self._sets_low_water = self._plain and _is_tcp(sock)
        sock.setblocking(False)
        if _is_tcp(sock):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limit_unsent(sock, WRITE_BYTES // 3)

    def enter_view(self, view: int, rank: int, receiver: FrameReceiver) -> None:
        """Continue in another view. The old receiver gets nothing more, whatever arrives of the old view."""
        self._outbox.end_view()
        if self._bulk is not None:
            self.discard_payload()
            self._bulk_receiver = self.default_receiver
        self.view, self.rank, self._receiver = view, rank, receiver

    # --- out ---

    def send_control(self, header: bytes, payload: bytes = b"", fd: int | None = None) -> None:
        """Queue a control frame: it leaves before all data that has not begun to leave."""
        self._outbox.add_control(header, payload, fd)
        self._unsent.add(self)

    def send(
        self, priority: int, header: bytes, payload: Sequence[memoryview], on_sent: Callable[[], None] | None
    ) -> None:
        """Queue a data frame; `on_sent` is called when its last byte is with the kernel."""
        self._outbox.data.push(priority, ([memoryview(header), *payload], on_sent))
        self._unsent.add(self)

    def flush(self, now_s: float) -> bool:
        """Write what can be written now; True if more waits. Raises OSError if the connection is gone."""
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
        # A write that blocked must be repeated with no less: part of it may be encrypted already.
        length = min(len(view), max(self._write_bytes, self._blocked_bytes))
        self._blocked_bytes = length
        sent = self.sock.send(view[:length])
        self._blocked_bytes = 0
        return sent

    # --- how much the kernel holds ---

    def limit_kernel_queue(self, num_bytes: int) -> None:
        """Hand the kernel at most about `num_bytes` at a time: what has left the priority queue cannot be overtaken."""
        self._write_bytes = max(LEAST_WRITE_BYTES, num_bytes)
        self.fragment_bytes = max(LEAST_FRAGMENT_BYTES, num_bytes)
        _limit_unsent(self.sock, self._write_bytes // 3)

    def fit_send_buffer(self) -> None:
        """Let the kernel keep no more unacknowledged bytes than the path needs.

        The rest would lie in queues on the way, where no priority applies. Call it now and then, because sending is
        what reveals the path.
        """
        path_bytes = None if self.shared else _path_bytes(self.sock)
        if path_bytes is None:
            return
        # Four times what is on the path at the rate seen: if this buffer limited the rate, it grows.
        wanted = max(self._write_bytes // 2, 4 * path_bytes)
        if not 0.8 < wanted / max(1, self._kernel_bytes) < 1.25:
            self._kernel_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    def acknowledged(self) -> TimedBytes | None:
        """Return the bytes that the peer has acknowledged, and the time in which bytes were on their way. Thread-safe.

        None if that is unknown: the connection is not TCP, or closed.
        """
        if not _is_tcp(self.sock):
            return None
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RWND_LIMITED + 8)
        except OSError:
            return None
        if len(info) < _RWND_LIMITED + 8:  # a kernel before 4.10
            return None
        acked, busy_us, full_us = (_U64.unpack_from(info, at)[0] for at in (_BYTES_ACKED, _BUSY_TIME, _RWND_LIMITED))
        # The time in which the receiver had no room does not count: then its process is late, and not the network.
        return TimedBytes(acked, (busy_us - full_us) / 1e6)

    # --- in ---

    def read(self, now_s: float) -> None:
        """Handle what has arrived. Raises EOFError or OSError if the connection is gone."""
        if self.paused:
            self.paused = False
            self._parse(now_s)
        if not self.paused:
            self._read_socket(now_s)
        if self._sets_low_water:
            self._set_low_water()

    def _read_socket(self, now_s: float) -> None:
        budget = READ_BYTES
        # What TLS holds decrypted is invisible to epoll: left there, it might wait for ever.
        while budget > 0 or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
            if self._bulk is None:
                place = self._room()
            else:
                place = _DISCARD[: self._discard_bytes] if self._discard_bytes else self._bulk_place
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
                if self._discard_bytes:
                    self._discard_bytes -= got
                else:
                    self._bulk_place = self._bulk_place[got:]
                self._finish_bulk(now_s)
            if self.paused or (got < len(place) and self._plain):
                return

    def _room(self) -> memoryview:
        """Return the free part of the buffer, after moving or growing it if there is none."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._view[self._begin : self._end])
            size = max(len(self._buffer), 2 * len(rest))
            if size > len(self._buffer):
                self._buffer = bytearray(size)
                self._view = memoryview(self._buffer)
            self._view[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return self._view[self._end :]

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

    def _set_low_water(self) -> None:
        """In the middle of a payload, have the kernel collect a few milliseconds' worth before it wakes us.

        A shaped link delivers a packet at a time; waking for each would cost more than all else.
        """
        wanted = 1
        if self._bulk is not None:
            left = len(self._bulk_place) + self._discard_bytes
            wanted = max(1, min(left, LOW_WATER_BYTES, int(self._rate_bytes_per_s * LOW_WATER_S)))
        if wanted != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._low_water = wanted

    def _parse(self, now_s: float) -> None:
        while self._end - self._begin >= HEADER.size:
            frame: Frame = HEADER.unpack_from(self._buffer, self._begin)
            length = frame[LENGTH]
            receiver = self._receiver
            if frame[VIEW] != self.view:
                if frame[VIEW] > self.view and frame[KIND] not in ANY_VIEW:
                    self.paused = True
                    return
                receiver = self.default_receiver
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

    def _start_bulk(self, frame: Frame, now_s: float, receiver: FrameReceiver) -> None:
        place = receiver.place_for(self, frame)
        here = min(self._end - self._begin, frame[LENGTH])
        self._bulk, self._bulk_began_s, self._bulk_receiver = frame, now_s, receiver
        if place is None:
            self._discard_bytes, self._bulk_place = frame[LENGTH] - here, memoryview(b"")
        else:
            place[:here] = self._view[self._begin : self._begin + here]
            self._bulk_place = place[here:]
        self._begin += here
        self._finish_bulk(now_s)

    def _finish_bulk(self, now_s: float) -> None:
        if len(self._bulk_place) == 0 and self._discard_bytes == 0 and self._bulk is not None:
            frame, self._bulk = self._bulk, None
            if now_s > self._bulk_began_s:
                self._rate_bytes_per_s = frame[LENGTH] / (now_s - self._bulk_began_s)
            self._bulk_receiver.on_bulk(self, frame)

    def discard_payload(self) -> None:
        """Discard the rest of the payload that is arriving: its destination is no longer ours to write."""
        self._discard_bytes += len(self._bulk_place)
        self._bulk_place = memoryview(b"")

    def send_arenas(self, arenas: Sequence[Arena], last: int, view: int) -> None:
        """Let the peer map our arenas up to number `last`."""
        while self.num_arenas_sent <= last:
            number = self.num_arenas_sent
            mine = arenas[number]
            head = header(FrameKind.ARENA, view, seq=mine.has_slots, piece=number, extra=mine.size)
            self.send_control(head, fd=mine.fd)
            self.num_arenas_sent += 1

    def map_arena(self, number: int, size: int, *, has_slots: bool = False) -> Arena:
        """Map the shared memory whose descriptor has come with a frame."""
        if not self.fds:
            raise CommError(f"{self.worker} announced shared memory, but no descriptor came with it")
        fd = self.fds.popleft()
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise CommError(f"{self.worker} announced {size} bytes of shared memory, but gave less")
        arena = self.arenas[number] = Arena(fd, size)
        arena.has_slots = has_slots
        arena.close()  # the mapping stays
        return arena

    def seems_alive(self, within_s: float, *, is_watched: bool) -> bool:
        """Return whether the peer lives, though it says nothing.

        A host that answers does not show that the peer's process runs. Only if a runner there watches over the process,
        and ends it if it is stopped (`is_watched`), is that enough.
        """
        if self.shared and (runs := process_runs(self._process)) is not None:
            return runs
        return is_watched and bool(host_answers(self.sock, within_s))

    def has_hung_up(self) -> bool:
        """Return whether the peer has closed its end, even if there is still something to read."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return any(events & _HUNG_UP for _, events in poll.poll(0))

    def close(self) -> None:
        self.closed = True
        self._outbox.clear()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds.clear()
        self.sock.close()


# --- epoll ---

# As in `selectors`: a socket that has hung up is both, so that reading or writing reports the reason.
READABLE, WRITABLE = ~select.EPOLLOUT, ~select.EPOLLIN
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Poller:
    """Epoll on the sockets of links, and an eventfd to end a `poll`. Any thread may `wake`; the rest is the engine's."""

    def __init__(self) -> None:
        # Not `selectors`: after each sleep the caches are cold, and every layer of Python costs.
        self._epoll = select.epoll()
        self.poll = self._epoll.poll
        """Return (descriptor, events) of what is ready, after the given number of seconds at the latest."""
        self.watched: dict[int, tuple[PeerLink, int]] = {}
        """The watched links and the events they are watched for, by descriptor."""
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Negative once it is closed."""
        self._waking = threading.Lock()
        """Held while the eventfd is written, so that its number cannot meanwhile mean another file."""

    def enable_wakeup(self, enabled: bool) -> None:
        """Choose whether `wake` ends a `poll`."""
        if enabled:
            self._epoll.register(self.wakeup_fd, select.EPOLLIN)
        else:
            self._epoll.unregister(self.wakeup_fd)

    def wake(self) -> None:
        """End the `poll` of the engine's thread."""
        with self._waking:
            if self.wakeup_fd >= 0:
                os.eventfd_write(self.wakeup_fd, 1)

    def clear_wakeup(self) -> None:
        os.eventfd_read(self.wakeup_fd)

    def watch(self, link: PeerLink, *, writing: bool) -> None:
        """Watch a link for data, unless it is paused, and if `writing` for room to write."""
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

    def unwatch(self, link: PeerLink) -> None:
        fd = link.sock.fileno()
        if self.watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()
        with self._waking:
            if self.wakeup_fd >= 0:
                os.close(self.wakeup_fd)
            self.wakeup_fd = -1

    def close_in_child(self) -> None:
        """In a forked child: close without changing anything that is shared with the parent."""
        self._waking = threading.Lock()  # a thread of the parent may have held it at the fork
        self.close()
