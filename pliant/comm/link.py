"""One connection to one peer: frames out in the order of their priority, frames in as they come.

A stream socket that never blocks. The engine's thread calls `read` and `flush`; no other thread
touches a link. Control frames overtake data, data goes by priority, and a frame that has begun is
finished first; so slices must be small, and so must what the kernel holds below us.

A link outlives views. What was queued in one view leaves before anything of the next. A frame of a
view that this worker has not entered stops the reading until it has; nothing of it is lost.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pliant.cluster import Worker
from pliant.comm.shm import Arena
from pliant.comm.slices import PriorityQueue
from pliant.comm.telemetry import Delivered
from pliant.comm.wire import ANYTIME, BULK, HEADER, MAX_CONTROL_BYTES, Frame, Kind
from pliant.errors import CommError

WRITE_BYTES = 128 << 10
"""At most this much is handed to the kernel at once, and at most this much may lie there unsent, if not told otherwise."""
FRAGMENT = 1
"""The flag of a frame that carries a part of a payload; `extra` says where it begins, and how long the whole is."""
LEAST_FRAGMENT_BYTES = 24 << 10
LEAST_WRITE_BYTES = 8 << 10
TOGETHER_BYTES = 16 << 10
"""Frames are put together until they are this large: a system call has its price."""
READ_BYTES = 1 << 20
"""At most about this much is taken in from one peer before the others have their turn."""
BUFFER_BYTES = 64 << 10
"""Headers and small frames pass through a buffer of this size; of a bulk payload at most as much is copied."""
PATIENCE_S = 0.004
PATIENCE_BYTES = 256 << 10
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TCP_INFO_BYTES = 168
"""As much of Linux' tcp_info as is looked at: tcpi_min_rtt is at 148, tcpi_delivery_rate at 160."""
_MIN_RTT, _DELIVERY_RATE = struct.Struct("=I"), struct.Struct("=Q")
_ACKNOWLEDGED_AT, _BUSY_AT, _FULL_AT = 120, 168, 176
"""Of tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited."""
_UNKNOWN = 0xFFFFFFFF
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
    """

    def __init__(
        self, rank: int, worker: Worker, sock: socket.socket, *, shared: bool, receiver: Receiver, view: int = 0
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
        self._lobby = self._receiver = receiver
        self._bulk_receiver = receiver
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._control = bytearray()
        self._with_fds: deque[tuple[bytes, int]] = deque()
        self._data: PriorityQueue[tuple[list[memoryview], Callable[[], None] | None]] = PriorityQueue()
        self._elder: deque[tuple[list[memoryview], Callable[[], None] | None]] = deque()
        """What was queued in earlier views."""
        self._current: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        """What is on its way to the kernel, and what to call when each is there. Nothing can overtake it any more."""
        self._current_bytes = 0
        self._current_fds: list[int] = []
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
        self._write_bytes = WRITE_BYTES
        self._blocked_bytes = 0
        """How much TLS was given when it could not write it; 0: it could."""
        self.fragment_bytes = 0
        """Payloads are sent in fragments of about this size, so that others can overtake them; 0: whole."""
        self._buffer_bytes = 0
        """What the kernel was told to keep at most; 0: nothing."""
        self._patient = self._plain and sock.family in (socket.AF_INET, socket.AF_INET6)
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.keep_below(WRITE_BYTES, first=True)

    def keep_below(self, num_bytes: int, *, first: bool = False) -> None:
        """Hand the kernel at most about this much at a time: what has left the priority queue cannot be overtaken."""
        self._write_bytes = max(LEAST_WRITE_BYTES, num_bytes)
        if not first:
            self.fragment_bytes = max(LEAST_FRAGMENT_BYTES, num_bytes)
        lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        if lowat is not None and self.sock.family in (socket.AF_INET, socket.AF_INET6):
            self.sock.setsockopt(socket.IPPROTO_TCP, lowat, self._write_bytes // 3)

    def delivered(self) -> Delivered | None:
        """What the other end has acknowledged so far; None where this is no TCP connection, or no more. From any thread."""
        if self.sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FULL_AT + 8)
        except OSError:
            return None
        if len(info) < _FULL_AT + 8:  # a kernel before 4.10
            return None
        places = (_ACKNOWLEDGED_AT, _BUSY_AT, _FULL_AT)
        acknowledged, busy_us, full_us = (_DELIVERY_RATE.unpack_from(info, at)[0] for at in places)
        # Not the time for which the other end had no room: then its process is late, and not the network.
        return Delivered(acknowledged, (busy_us - full_us) / 1e6)

    def fit_buffer(self) -> None:
        """Let the kernel keep no more unacknowledged than the path needs: the rest would lie in queues on the way, where
        no priority reaches it. Called now and then, because the path is found out by sending."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if self.shared or len(info) < _TCP_INFO_BYTES:
            return
        (min_rtt_us,), (bytes_per_s,) = _MIN_RTT.unpack_from(info, 148), _DELIVERY_RATE.unpack_from(info, 160)
        # Four times what is on the path at the rate seen: if it was this buffer that held the rate down, it grows.
        path_bytes = 0 if min_rtt_us == _UNKNOWN else 4 * bytes_per_s * min_rtt_us // 1_000_000
        wanted = max(self._write_bytes // 2, path_bytes)
        if not 0.8 < wanted / max(1, self._buffer_bytes) < 1.25:
            self._buffer_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    def enter(self, view: int, rank: int, receiver: Receiver) -> None:
        """Go on in another view. Whatever arrives of the old one from now on is no longer the old receiver's."""
        if self._control:
            self._elder.append(([memoryview(bytes(self._control))], None))
            self._control.clear()
        while len(self._data):
            self._elder.append(self._data.pop())
        if self._bulk is not None:
            self.divert()
            self._bulk_receiver = self._lobby
        self.view, self.rank, self._receiver = view, rank, receiver

    # --- out ---

    def say(self, header: bytes, payload: bytes = b"", fd: int | None = None) -> None:
        """Queue a control frame: it leaves before all data that has not begun to."""
        if fd is not None:
            # Alone, and before all else: the kernel passes only so many descriptors at a time, and
            # what is said next may speak of this one.
            self._with_fds.append((header + payload, fd))
            return
        self._control += header
        self._control += payload

    def send(
        self, priority: int, header: bytes, payload: Sequence[memoryview], on_sent: Callable[[], None] | None
    ) -> None:
        """Queue a data frame; `on_sent` is called when its last byte is with the kernel."""
        self._data.push(priority, ([memoryview(header), *payload], on_sent))

    @property
    def has_output(self) -> bool:
        return bool(self._current or self._with_fds or self._elder or self._control or len(self._data))

    def flush(self, now_s: float) -> bool:
        """Write what can be written now; True if more waits. Raises OSError when the connection is gone."""
        while self._fill():
            asked = min(self._current_bytes, self._write_bytes)
            try:
                sent = self._write()
            except _BLOCKED:
                return True
            self.last_sent_s = now_s
            self.sent_bytes += sent
            self._advance(sent)
            if not self.shared and sent >= self._write_bytes:
                return self.has_output
            if sent < asked and self._plain:
                return True  # the kernel takes no more
        return False

    def _fill(self) -> bool:
        """Have something to write, and small frames together."""
        while self._current_bytes < TOGETHER_BYTES and not self._current_fds:
            if self._with_fds:
                if self._current:
                    break
                frame, fd = self._with_fds.popleft()
                self._add(([memoryview(frame)], None))
                self._current_fds = [fd]
            elif self._elder:
                self._add(self._elder.popleft())
            elif self._control:
                self._add(([memoryview(bytes(self._control))], None))
                self._control.clear()
            elif len(self._data):
                self._add(self._data.pop())
            else:
                break
        return bool(self._current)

    def _add(self, frame: tuple[list[memoryview], Callable[[], None] | None]) -> None:
        views, sent = frame
        for view in views[:-1]:
            self._current.append((view, None))
            self._current_bytes += len(view)
        self._current.append((views[-1], sent))
        self._current_bytes += len(views[-1])

    def _write(self) -> int:
        if not self._plain:
            return self._write_tls(self._current[0][0])
        if self._current_bytes <= self._write_bytes:
            ready = [view for view, _ in self._current]
        else:
            ready, room = [], self._write_bytes
            for view, _ in self._current:
                ready.append(view[:room])
                room -= len(ready[-1])
                if room == 0:
                    break
        if self._current_fds:
            fds = array.array("i", self._current_fds)
            sent = self.sock.sendmsg(ready, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            self._current_fds = []
            return sent
        return self.sock.sendmsg(ready)

    def _write_tls(self, view: memoryview) -> int:
        # A write that blocked must be tried again with no less: part of it may be encrypted already.
        length = min(len(view), max(self._write_bytes, self._blocked_bytes))
        self._blocked_bytes = length
        sent = self.sock.send(view[:length])
        self._blocked_bytes = 0
        return sent

    def _advance(self, sent: int) -> None:
        current = self._current
        self._current_bytes -= sent
        while current and sent >= len(current[0][0]):
            view, done = current.popleft()
            sent -= len(view)
            if done is not None:
                done()
        if sent:
            view, done = current[0]
            current[0] = (view[sent:], done)

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
            length = frame[8]
            receiver = self._receiver
            if frame[3] != self.view:
                if frame[3] > self.view and frame[0] not in ANYTIME:
                    self.paused = True
                    return
                receiver = self._lobby
            if frame[0] in BULK:
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
                raise CommError(f"a frame of kind {frame[0]} claims {length} bytes: the stream is damaged")
            if self._end - self._begin < HEADER.size + length:
                return
            begin = self._begin + HEADER.size
            self._begin = begin + length
            receiver.on_frame(self, frame, bytes(self._view[begin : begin + length]))

    def _start_bulk(self, frame: Frame, now_s: float, receiver: Receiver) -> None:
        place = receiver.place_for(self, frame)
        here = min(self._end - self._begin, frame[8])
        self._bulk, self._bulk_began_s, self._bulk_receiver = frame, now_s, receiver
        if place is None:
            self._skip, self._bulk_place = frame[8] - here, memoryview(b"")
        else:
            place[:here] = self._view[self._begin : self._begin + here]
            self._bulk_place = place[here:]
        self._begin += here
        self._finish_bulk(now_s)

    def _finish_bulk(self, now_s: float) -> None:
        if len(self._bulk_place) == 0 and self._skip == 0 and self._bulk is not None:
            frame, self._bulk = self._bulk, None
            if now_s > self._bulk_began_s:
                self._rate_bytes_per_s = frame[8] / (now_s - self._bulk_began_s)
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
        self._data.clear()
        self._elder.clear()
        self._current.clear()
        self._current_bytes = 0
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds.clear()
        self.sock.close()


def header(
    kind: Kind,
    view: int,
    *,
    spec: int = 0,
    seq: int = 0,
    piece: int = 0,
    extra: int = 0,
    length: int = 0,
    flags: int = 0,
) -> bytes:
    return HEADER.pack(kind, flags, 0, view, spec, seq, piece, extra, length)
