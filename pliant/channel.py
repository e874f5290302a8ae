"""Authenticated connections: a handshake in which both sides prove that they know a secret, and sealed messages after it.

The handshake is a mutual HMAC challenge. It covers the protocol's version, the purpose of the connection, the name of who
connects and, under TLS, the certificate. Neither side learns the secret from it, and a recording of it is worth nothing.
Until it is done, a stranger costs a few hundred bytes and a limited time.

    connector                                        acceptor
    magic, protocol, purpose, name, nonce   ->
                                            <-   ok, nonce, proof by the acceptor
    proof by the connector                  ->
                                            <-   ok, or the reason of a refusal

`HandshakeServer` accepts connections and keeps strangers within bounds. `comm` puts its own frames on the socket after the
handshake. Runners and the workers of a federated round use `Channel`: each message is a JSON object with an optional binary
payload, and carries a MAC over its direction, its number, its sizes and its content, so that no message can be altered,
repeated or left out unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

from pliant.errors import CommError, HandshakeRefused

log = logging.getLogger(__name__)

PROTOCOL = 4
MAGIC = b"PLIANT"
HANDSHAKE_S = 5.0
"""Time limit of a handshake."""
MAX_STRANGERS = 256
"""Connections of a server whose handshake is not done; for a further one the oldest of them is closed."""
ROOM_S = 1.0
"""How long to wait until that one is closed."""
CROWD = "too many at once, {} others have not said who they are"
MOST_TOLD = 50
"""Refusals of a server that are lines in its log, within `REPORT_S`; of further ones the log has the number."""
REPORT_S = 60.0
MAX_BODY_BYTES = 1 << 20
STALL_S = 30.0
"""A message that has begun, but of which nothing more comes (or leaves) for this long, is given up."""

_HELLO = struct.Struct("<6sHBB")  # magic, protocol, length of the purpose, length of the name
_REASON = struct.Struct("<H")
_HEAD = struct.Struct("<IQ")  # length of the body, length of the payload
_NONCE_BYTES = 16
_MAC_BYTES = 32
_OK, _NO = b"\x01", b"\x00"
_MAX_REASON_BYTES = 1000
_CHUNK_BYTES = 1 << 20
_RETRY_S = 0.05


# --- the handshake ---


def connect_handshake(
    sock: socket.socket,
    secret: bytes,
    *,
    purpose: str,
    name: str,
    deadline_s: float,
    binding: bytes = b"",
    remedy: str = "give both sides the same secret",
) -> bytes:
    """Do the connecting side's part of the handshake; return the key of this connection, for a `Channel`.

    `name` says who connects, in at most 255 bytes. `binding` is what both ends know of the connection, such as the
    digest of the certificate under TLS. `deadline_s` is a time of `time.monotonic`. `remedy` ends the message if the
    other side does not know the secret.

    Raises:
        HandshakeRefused: with the other side's reason, or because it does not know the secret.
        OSError: the connection broke, or the deadline passed.
    """
    wanted, me, nonce = purpose.encode(), name.encode(), os.urandom(_NONCE_BYTES)
    hello = _HELLO.pack(MAGIC, PROTOCOL, len(wanted), len(me)) + wanted + me + nonce
    _send_all(sock, hello, deadline_s)
    _expect_ok(sock, deadline_s)
    answer = _receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES, deadline_s)
    transcript = hello + answer[:_NONCE_BYTES] + binding
    if not hmac.compare_digest(_proof(secret, b"acceptor", transcript), answer[_NONCE_BYTES:]):
        with contextlib.suppress(OSError):
            _send_all(sock, bytes(_MAC_BYTES), deadline_s)  # not a proof: so that the other side, too, can say why
        raise HandshakeRefused(f"the other side does not know this job's secret: {remedy}")
    _send_all(sock, _proof(secret, b"connector", transcript), deadline_s)
    _expect_ok(sock, deadline_s)
    return _proof(secret, b"key", transcript)


def accept_handshake(
    sock: socket.socket, secret: bytes, *, purpose: str, deadline_s: float, binding: bytes = b""
) -> tuple[str, bytes]:
    """Do the accepting side's part; return the name of who connected, and the key of this connection.

    The other side has then proved that it knows the secret, and waits for `send_welcome` or `refuse`.

    Raises:
        HandshakeRefused: the other side did not prove it, or wants something else; it has been told why.
        OSError: the connection broke, or the deadline passed.
    """
    head = _receive_exactly(sock, _HELLO.size, deadline_s)
    magic, protocol, num_purpose, num_name = _HELLO.unpack(head)
    if magic != MAGIC:
        raise HandshakeRefused(f"not a pliant process: it began with {head[:16]!r}")
    rest = _receive_exactly(sock, num_purpose + num_name + _NONCE_BYTES, deadline_s)
    if protocol != PROTOCOL:
        reason = f"protocol {protocol}, but this side speaks {PROTOCOL}: install one version everywhere"
        refuse(sock, reason, deadline_s)
    wanted, name = rest[:num_purpose].decode(errors="replace"), rest[num_purpose : num_purpose + num_name]
    if wanted != purpose:
        refuse(sock, f"this port is for a {purpose}, not for a {wanted}: check the address", deadline_s)
    nonce = os.urandom(_NONCE_BYTES)
    transcript = head + rest + nonce + binding
    _send_all(sock, _OK + nonce + _proof(secret, b"acceptor", transcript), deadline_s)
    given = _receive_exactly(sock, _MAC_BYTES, deadline_s)
    who = name.decode(errors="replace")
    if not hmac.compare_digest(_proof(secret, b"connector", transcript), given):
        refuse(sock, f"{who} does not know this job's secret", deadline_s)
    return who, _proof(secret, b"key", transcript)


def send_welcome(sock: socket.socket, deadline_s: float) -> None:
    """End the handshake of a side that proved itself: it is accepted."""
    _send_all(sock, _OK, deadline_s)


def refuse(sock: socket.socket, reason: str, deadline_s: float) -> NoReturn:
    """End the handshake: tell the other side why it is not accepted, and raise HandshakeRefused."""
    text = reason.encode(errors="replace")[:_MAX_REASON_BYTES]
    with contextlib.suppress(OSError):
        _send_all(sock, _NO + _REASON.pack(len(text)) + text, deadline_s)
    raise HandshakeRefused(reason)


def _proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, role + transcript, hashlib.sha256).digest()


def _expect_ok(sock: socket.socket, deadline_s: float) -> None:
    if _receive_exactly(sock, 1, deadline_s) != _OK:
        (length,) = _REASON.unpack(_receive_exactly(sock, _REASON.size, deadline_s))
        reason = _receive_exactly(sock, min(length, _MAX_REASON_BYTES), deadline_s)
        raise HandshakeRefused(f"refused: {reason.decode(errors='replace')}")


def _send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    sock.settimeout(_seconds_until(deadline_s))
    sock.sendall(data)


def _receive_exactly(sock: socket.socket, length: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(_seconds_until(deadline_s))
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionResetError("closed during the handshake")
        data += more
    return data


def _seconds_until(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer to the handshake in time")
    return left_s


# --- messages ---


class Message(NamedTuple):
    """What a channel delivers."""

    body: dict[str, Any]
    payload: memoryview = memoryview(b"")


class Channel:
    """A connection after the handshake. One thread may receive while others send; `close` works from any thread.

    `max_payload_bytes` bounds what the other side may send, and may be changed at any time. `allocate` returns the memory
    for a payload of so many bytes, into which it is received without a copy; it may be changed before the first payload.

    Raises (from `send` and `receive`):
        CommError: the connection is lost, or the other side sent what is no valid message; the channel is then closed.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_connector: bool) -> None:
        self.max_payload_bytes = 0
        self.allocate: Callable[[int], memoryview] = lambda num_bytes: memoryview(bytearray(num_bytes))
        self._sock, self._key = sock, key
        self._sending, self._receiving = (b"c", b"a") if is_connector else (b"a", b"c")
        self._num_sent = self._num_received = 0
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        # The two directions have waits of their own, so the socket does not block. OpenSSL's state is not for two
        # threads at once; a call that does not block can be made under a lock.
        self._call_lock: contextlib.AbstractContextManager[object] = (
            threading.Lock() if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext()
        )
        self._closed = False
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: Mapping[str, object], payload: memoryview | bytes | bytearray = b"") -> None:
        """Send a message. Blocks until the kernel has taken all of it, however long the other side keeps taking some."""
        text = json.dumps(body, separators=(",", ":")).encode()
        content = memoryview(payload).cast("B")
        head = _HEAD.pack(len(text), len(content))
        with self._send_lock:
            mac = self._mac(self._sending, self._num_sent, head)
            mac.update(text)
            try:
                if len(content) <= _CHUNK_BYTES:
                    mac.update(content)
                    self._write(memoryview(b"".join((head, text, content, mac.digest()))))
                else:
                    self._write(memoryview(head + text))
                    for begin in range(0, len(content), _CHUNK_BYTES):
                        chunk = content[begin : begin + _CHUNK_BYTES]
                        mac.update(chunk)
                        self._write(chunk)
                    self._write(memoryview(mac.digest()))
            except OSError as error:
                self._shut_down()
                raise CommError(f"the connection was lost: {error}") from None
            self._num_sent += 1

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message; None if the other side, or `close` on this side, ended the connection.

        Raises:
            TimeoutError: no message has begun within `timeout_s`; the channel can still be used.
        """
        with self._receive_lock:
            head = bytearray(_HEAD.size)
            try:
                if not self._read(memoryview(head), timeout_s, may_end=True):
                    return None
                num_body, num_payload = _HEAD.unpack(head)
                if num_body > MAX_BODY_BYTES or num_payload > self.max_payload_bytes:
                    raise CommError(
                        f"a message of {num_body} + {num_payload} bytes was announced, where {MAX_BODY_BYTES} + "
                        f"{self.max_payload_bytes} are allowed"
                    )
                return self._receive_content(bytes(head), num_body, num_payload)
            except CommError:
                self._shut_down()
                raise
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise  # nothing came in time; with a number, the kernel has given the other machine up
                self._shut_down()
                if self._closed:
                    return None
                raise CommError(f"the connection was lost: {error}") from None

    def close(self) -> None:
        """End the connection at once; a thread that sends or receives returns."""
        self._closed = True
        self._shut_down()
        with self._send_lock, self._receive_lock:
            self._sock.close()

    def _receive_content(self, head: bytes, num_body: int, num_payload: int) -> Message:
        mac = self._mac(self._receiving, self._num_received, head)
        text = bytearray(num_body)
        self._read(memoryview(text), STALL_S, mac=mac)
        payload = self.allocate(num_payload).cast("B") if num_payload else memoryview(b"")
        self._read(payload, STALL_S, mac=mac)
        given = bytearray(_MAC_BYTES)
        self._read(memoryview(given), STALL_S)
        if not hmac.compare_digest(mac.digest(), given):
            raise CommError("a message was altered, repeated or left out on its way")
        self._num_received += 1
        try:
            body = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise CommError(f"the body of a message is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise CommError("the body of a message is not a JSON object")
        return Message(body, payload)

    def _mac(self, direction: bytes, number: int, head: bytes) -> hmac.HMAC:
        return hmac.new(self._key, direction + number.to_bytes(8, "little") + head, hashlib.sha256)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                with self._call_lock:
                    num_bytes = self._sock.send(data)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, STALL_S, f"the other side took nothing for {STALL_S:g} s")
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, STALL_S, f"the other side took nothing for {STALL_S:g} s")
            else:
                data = data[num_bytes:]

    def _read(
        self, place: memoryview, timeout_s: float | None, *, may_end: bool = False, mac: hmac.HMAC | None = None
    ) -> bool:
        """Fill `place`; False if `may_end` and the connection ended before the first byte."""
        done = 0
        while done < len(place):
            try:
                with self._call_lock:
                    num_bytes = self._sock.recv_into(place[done : done + _CHUNK_BYTES])
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait_to_read(select.POLLIN, timeout_s, has_begun=not may_end or done > 0)
                continue
            except ssl.SSLWantWriteError:
                self._wait_to_read(select.POLLOUT, timeout_s, has_begun=not may_end or done > 0)
                continue
            if num_bytes == 0:
                if may_end and not done:
                    return False
                raise CommError("the connection ended in the middle of a message")
            if mac is not None:
                mac.update(place[done : done + num_bytes])
            done += num_bytes
        return True

    def _wait_to_read(self, event: int, timeout_s: float | None, *, has_begun: bool) -> None:
        if not has_begun:
            self._wait(event, timeout_s, "no message in time")
            return
        try:
            self._wait(event, STALL_S, "")
        except TimeoutError:
            raise CommError(f"the rest of a message did not come for {STALL_S:g} s") from None

    def _wait(self, event: int, timeout_s: float | None, why: str) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError(why)

    def _shut_down(self) -> None:
        # Wakes a thread that waits in poll(). The descriptor itself stays open until nobody uses it.
        with contextlib.suppress(OSError), self._call_lock:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other machine is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


# --- opening channels ---


def connect_channel(
    address: tuple[str, int],
    secret: bytes,
    *,
    purpose: str,
    name: str,
    tls: ssl.SSLContext | None = None,
    remedy: str = "give both sides the same secret",
) -> Channel:
    """Connect to a `ChannelServer` at (host, port), and prove to each other that both know `secret`.

    With `tls`, certificates are checked as the context says; the handshake covers the server's certificate besides.

    Raises:
        HandshakeRefused: with the server's reason, or because it does not know the secret.
        OSError: it cannot be reached, or did not answer within `HANDSHAKE_S`.
    """
    deadline_s = time.monotonic() + HANDSHAKE_S
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        keep_alive(sock)
        binding = b""
        if tls is not None:
            wrapped = tls.wrap_socket(sock, server_hostname=address[0])
            sock, binding = wrapped, certificate_digest(wrapped.getpeercert(binary_form=True) or b"")
        key = connect_handshake(
            sock, secret, purpose=purpose, name=name, deadline_s=deadline_s, binding=binding, remedy=remedy
        )
        return Channel(sock, key, is_connector=True)
    except BaseException:
        sock.close()
        raise


def certificate_digest(der: bytes) -> bytes:
    """Return what a handshake under TLS is bound to: the digest of the server's certificate."""
    return hashlib.sha256(der).digest()


OnAccepted = Callable[[socket.socket, str, bytes, float], Callable[[], None] | None]
"""Called with the socket, the name and key of its other side, and the deadline of the handshake."""


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection whose handshake is not done."""

    sock: socket.socket
    has_proved: bool = False
    """Whether its other side has proved that it knows the secret."""
    is_pushed_out: bool = False
    """Whether it was closed to make room for another one."""


class HandshakeServer:
    """Accepts connections at `listener`, and hands those whose other side knows the secret to `on_accepted`.

    Each handshake has a thread of its own. If there are too many, the oldest makes room: who knows the secret needs a moment,
    so a stream of strangers does not keep it out. `on_accepted` ends it with `send_welcome` or `refuse`. If it returns a function,
    that is called on the same thread, when the handshake no longer counts. Strangers are refused and logged. `owner` begins
    the messages in the log. `certificate` is the one of `tls`. `listener` belongs to the server from now on.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        on_accepted: OnAccepted,
        *,
        purpose: str,
        owner: str,
        tls: ssl.SSLContext | None = None,
        certificate: bytes = b"",
    ) -> None:
        self.closing = False
        self._listener, self._secret, self._on_accepted = listener, secret, on_accepted
        self._purpose, self._owner, self._tls = purpose, owner, tls
        self._binding = certificate_digest(certificate) if tls is not None else b""
        self._strangers: dict[_Stranger, None] = {}
        """Connections whose handshake is not done, the oldest first."""
        self._room = threading.Condition()
        self._refusals = _RefusalLog(owner)
        self._thread = threading.Thread(target=self._accept, name=f"pliant-accept-{purpose}", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Accept nobody more."""
        self.closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; close alone does not
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
        self._refusals.close()

    def close_in_child(self) -> None:
        """In a forked child: close the parent's sockets."""
        for sock in (self._listener, *(stranger.sock for stranger in list(self._strangers))):
            sock.close()

    def _accept(self) -> None:
        self._listener.settimeout(None)
        while not self.closing:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self.closing:
                    log.warning("%s cannot accept a connection now: %s", self._owner, error)
                    time.sleep(_RETRY_S)  # out of descriptors: asking again at once would only spin
                continue
            stranger = _Stranger(sock)
            try:
                self._admit(stranger)
                name = f"pliant-hello-{self._purpose}"
                threading.Thread(target=self._attend, args=(stranger, address), name=name, daemon=True).start()
            except (RuntimeError, TimeoutError) as error:  # no thread can be made, or none of them ends
                self._forget(stranger)
                self._log_refusal(address, error)
                sock.close()

    def _admit(self, stranger: _Stranger) -> None:
        """Wait for room, which the oldest makes that has proved nothing; raise TimeoutError if there is none."""
        with self._room:
            if len(self._strangers) >= MAX_STRANGERS:
                for oldest in self._strangers:
                    if not (oldest.has_proved or oldest.is_pushed_out):
                        oldest.is_pushed_out = True
                        with contextlib.suppress(OSError):
                            socket.socket.shutdown(oldest.sock, socket.SHUT_RDWR)  # wakes its thread, which closes it
                        break
                if not self._room.wait_for(lambda: len(self._strangers) < MAX_STRANGERS, ROOM_S):
                    raise TimeoutError(CROWD.format(MAX_STRANGERS))
            self._strangers[stranger] = None

    def _forget(self, stranger: _Stranger) -> None:
        with self._room:
            self._strangers.pop(stranger, None)
            self._room.notify_all()

    def _attend(self, stranger: _Stranger, address: object) -> None:
        deadline_s, sock = time.monotonic() + HANDSHAKE_S, stranger.sock
        try:
            if self._tls is not None:
                sock.settimeout(HANDSHAKE_S)
                wrapped = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                stranger.sock = sock = wrapped
                wrapped.do_handshake()
            name, key = accept_handshake(
                sock, self._secret, purpose=self._purpose, deadline_s=deadline_s, binding=self._binding
            )
            stranger.has_proved = True
            serve = self._on_accepted(sock, name, key, deadline_s)
        except (CommError, OSError, ValueError) as error:
            self._log_refusal(address, CROWD.format(MAX_STRANGERS) if stranger.is_pushed_out else error)
            sock.close()
            return
        finally:
            self._forget(stranger)
        if serve is not None:
            serve()

    def _log_refusal(self, address: object, reason: object) -> None:
        if not self.closing:
            self._refusals.tell(address or "this host", reason)


class _RefusalLog:
    """The lines about refused connections: those of a flood are counted, so that strangers cannot fill a disk."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._begun_s = -REPORT_S
        self._num_told = self._num_untold = 0

    def tell(self, address: object, reason: object) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._begun_s >= REPORT_S:
                self._tell_number()
                self._begun_s, self._num_told = now_s, 0
            self._num_told += 1
            if self._num_told > MOST_TOLD:
                self._num_untold += 1
                return
        log.warning("%s refused a connection from %s: %s", self._owner, address, reason)
        if self._num_told == MOST_TOLD:
            log.warning("%s: further refusals are counted for %g s", self._owner, REPORT_S)

    def close(self) -> None:
        """Tell how many there were, if that was not told yet."""
        with self._lock:
            self._tell_number()

    def _tell_number(self) -> None:
        if self._num_untold:
            log.warning("%s refused %d more connections", self._owner, self._num_untold)
        self._num_untold = 0


class ChannelServer(HandshakeServer):
    """Accepts connections of processes that know the secret, and calls `serve` with the name and channel of each.

    `serve` runs in a thread of its own per connection; the channel is closed when it returns. It may raise `CommError` and
    `OSError`, which end the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        serve: Callable[[str, Channel], None],
        *,
        purpose: str,
        tls: ssl.SSLContext | None = None,
        certificate: bytes = b"",
    ) -> None:
        super().__init__(
            listener, secret, self._welcome, purpose=purpose, owner=purpose, tls=tls, certificate=certificate
        )
        self._serve = serve
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()

    def close(self) -> None:
        """Accept nobody more, and end all connections."""
        super().close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _welcome(self, sock: socket.socket, name: str, key: bytes, deadline_s: float) -> Callable[[], None]:
        keep_alive(sock)
        send_welcome(sock, deadline_s)
        return partial(self._serve_channel, name, Channel(sock, key, is_connector=False))

    def _serve_channel(self, name: str, channel: Channel) -> None:
        with self._lock:
            self._channels.add(channel)
        try:
            if not self.closing:
                self._serve(name, channel)
        except (CommError, OSError) as error:
            log.info("the connection of %s ended: %s", name, error)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
