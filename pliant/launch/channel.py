"""A connection between two runners: who it is, proved with the job's secret, and sealed lines after that.

Lines of JSON. After the handshake each line carries an HMAC under a key of this connection, with
its direction and number, so that nothing can be altered, repeated or left out unseen.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time

from pliant.cluster import Worker
from pliant.errors import ConfigError
from pliant.launch.secret import REMEDY

PROTOCOL = 1
HANDSHAKE_S = 5.0
SEND_S = 10.0
MAX_LINE_BYTES = 1 << 20

Message = dict[str, object]


class Channel:
    """A connection to another runner, after the handshake."""

    def __init__(self, sock: socket.socket, reader: LineReader, key: bytes, *, is_head: bool) -> None:
        self._sock, self._reader, self._key = sock, reader, key
        self._sending, self._receiving = (b"head", b"runner") if is_head else (b"runner", b"head")
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError."""
        body = json.dumps(message).encode()
        with self._lock:
            mac = _mac(self._key, self._sending, str(self._num_sent).encode(), body)
            self._num_sent += 1
            self._sock.sendall(mac.encode() + b" " + body + b"\n")

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None at the end of the connection. Raises TimeoutError."""
        line = self._reader.line(timeout_s)
        if line is None:
            return None
        mac, _, body = line.partition(b" ")
        expected = _mac(self._key, self._receiving, str(self._num_received).encode(), body)
        if not hmac.compare_digest(mac, expected.encode()):
            return None
        self._num_received += 1
        return _parse(body)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class LineReader:
    """Lines from a socket, each within a time limit and a length limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def line(self, timeout_s: float | None, max_bytes: int = MAX_LINE_BYTES) -> bytes | None:
        """The next line; None at the end, or where it is too long. Raises TimeoutError."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if len(self._rest) > max_bytes:
                return None
            self._sock.settimeout(None if deadline_s is None else max(0.001, deadline_s - time.monotonic()))
            try:
                data = self._sock.recv(65536)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _mac(key: bytes, *parts: bytes) -> str:
    """Length before each part, so that no two lists of parts look alike."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _parse(line: bytes) -> Message | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def text_of(message: Message | None, key: str) -> str:
    value = message.get(key) if message is not None else None
    return value if isinstance(value, str) else ""


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other machine is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def _send_line(sock: socket.socket, message: Message) -> None:
    sock.settimeout(SEND_S)
    sock.sendall(json.dumps(message).encode() + b"\n")


def greet(sock: socket.socket, secret: bytes) -> tuple[str, Channel] | None:
    """The head's side of the handshake: the host that came, or None for a stranger (who is told why)."""
    reader = LineReader(sock)
    challenge = secrets.token_hex(16)
    _send_line(sock, {"pliant": PROTOCOL, "challenge": challenge})
    answer = _parse(reader.line(HANDSHAKE_S, 4096) or b"")
    host, nonce = text_of(answer, "host"), text_of(answer, "nonce")
    expected = _mac(secret, b"runner", challenge.encode(), nonce.encode(), host.encode())
    if not hmac.compare_digest(text_of(answer, "mac").encode(), expected.encode()):
        _send_line(sock, {"refused": f"the secrets differ: {REMEDY}"})
        return None
    _send_line(sock, {"mac": _mac(secret, b"head", nonce.encode(), challenge.encode())})
    key = _mac(secret, b"key", challenge.encode(), nonce.encode()).encode()
    return host, Channel(sock, reader, key, is_head=True)


def introduce(sock: socket.socket, secret: bytes, host: str, head: Worker) -> Channel:
    """A runner's side of the handshake.

    Raises:
        ConfigError: the head refuses, or cannot prove that it knows the secret.
        OSError: the connection broke.
    """
    reader = LineReader(sock)
    hello = _parse(reader.line(HANDSHAKE_S, 4096) or b"")
    if hello is None:
        raise OSError("no greeting")
    if hello.get("pliant") != PROTOCOL:
        raise ConfigError(f"{head} is not a runner of this version: give a free port with -port, on every host")
    challenge, nonce = text_of(hello, "challenge"), secrets.token_hex(16)
    mac = _mac(secret, b"runner", challenge.encode(), nonce.encode(), host.encode())
    _send_line(sock, {"host": host, "nonce": nonce, "mac": mac})
    answer = _parse(reader.line(HANDSHAKE_S, 4096) or b"")
    if refused := text_of(answer, "refused"):
        raise ConfigError(f"the runner at {head} refused this one: {refused}")
    if not hmac.compare_digest(
        text_of(answer, "mac").encode(), _mac(secret, b"head", nonce.encode(), challenge.encode()).encode()
    ):
        raise ConfigError(f"{head} does not know the job's secret: {REMEDY}")
    key = _mac(secret, b"key", challenge.encode(), nonce.encode()).encode()
    return Channel(sock, reader, key, is_head=False)
