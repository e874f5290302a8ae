"""How two workers come to trust each other: a mutual HMAC challenge over the job's secret, before the first frame.

It covers the protocol's version and, under TLS, the certificate. Neither side learns the secret from
it, and a recorded handshake is worth nothing. Sockets are made and closed by `comm.mesh`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

from pliant.cluster import Worker
from pliant.errors import ConfigError, HandshakeRefused

PROTOCOL = 3
MAGIC = b"PLIANT"
_HELLO = struct.Struct("<6sHIB")  # magic, protocol, view, length of the worker's name
_NONCE = 16
_MAC = 32
_OK, _NO = b"\x01", b"\x00"


def greet(sock: socket.socket, secret: bytes, view: int, me: Worker, binding: bytes, deadline_s: float) -> None:
    """The connecting side. `binding` is what both ends know of the channel (the certificate under TLS).

    Raises:
        HandshakeRefused: with the other side's reason, or because it does not know the secret.
        OSError: the connection broke or the deadline passed.
    """
    name, nonce = str(me).encode(), os.urandom(_NONCE)
    hello = _HELLO.pack(MAGIC, PROTOCOL, view, len(name)) + name + nonce
    _send(sock, hello, deadline_s)
    _expect_ok(sock, deadline_s)
    answer = _receive(sock, _NONCE + _MAC, deadline_s)
    transcript = hello + answer[:_NONCE] + binding
    if not hmac.compare_digest(_mac(secret, b"acceptor", transcript), answer[_NONCE:]):
        raise HandshakeRefused(
            "the other side does not know this job's secret: another job's worker listens there, or PLIANT_SECRET "
            "(or the secret file) differs between the hosts"
        )
    _send(sock, _mac(secret, b"connector", transcript), deadline_s)
    _expect_ok(sock, deadline_s)


def answer(sock: socket.socket, secret: bytes, binding: bytes, deadline_s: float) -> Worker:
    """The accepting side: who connected, proved to know the secret. It may come from any view.

    Raises:
        HandshakeRefused: it did not; it has been told why.
        OSError: the connection broke or the deadline passed.
    """
    head = _receive(sock, _HELLO.size, deadline_s)
    magic, protocol, _, length = _HELLO.unpack(head)
    if magic != MAGIC:
        raise HandshakeRefused(f"not a pliant worker: it began with {head[:16]!r}")
    rest = _receive(sock, length + _NONCE, deadline_s)
    if protocol != PROTOCOL:
        _refuse(
            sock,
            f"protocol {protocol}, but this worker speaks {PROTOCOL}: install one version on all hosts",
            deadline_s,
        )
    try:
        worker = Worker.parse(rest[:length].decode())
    except (ConfigError, UnicodeDecodeError) as error:
        _refuse(sock, f"no worker's name: {error}", deadline_s)
        raise AssertionError("unreachable: _refuse raises") from None
    nonce = os.urandom(_NONCE)
    transcript = head + rest + nonce + binding
    _send(sock, _OK + nonce + _mac(secret, b"acceptor", transcript), deadline_s)
    proof = _receive(sock, _MAC, deadline_s)
    if not hmac.compare_digest(_mac(secret, b"connector", transcript), proof):
        _refuse(sock, f"{worker} does not know this job's secret", deadline_s)
    return worker


def welcome(sock: socket.socket, deadline_s: float) -> None:
    """Tell a worker that proved itself that it is taken in."""
    _send(sock, _OK, deadline_s)


def turn_away(sock: socket.socket, reason: str, deadline_s: float) -> None:
    """Tell the other side why not."""
    text = reason.encode()[:255]
    _send(sock, _NO + bytes([len(text)]) + text, deadline_s)


def _refuse(sock: socket.socket, reason: str, deadline_s: float) -> None:
    turn_away(sock, reason, deadline_s)
    raise HandshakeRefused(reason)


def _mac(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, role + transcript, hashlib.sha256).digest()


def _expect_ok(sock: socket.socket, deadline_s: float) -> None:
    if _receive(sock, 1, deadline_s) != _OK:
        reason = _receive(sock, _receive(sock, 1, deadline_s)[0], deadline_s)
        raise HandshakeRefused(f"refused: {reason.decode(errors='replace')}")


def _send(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    sock.settimeout(_left(deadline_s))
    sock.sendall(data)


def _receive(sock: socket.socket, length: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(_left(deadline_s))
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionResetError("closed during the handshake")
        data += more
    return data


def _left(deadline_s: float) -> float:
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer to the handshake in time")
    return left
