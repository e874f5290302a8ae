"""What travels between two workers: frames, and the handshake that comes before them.

A frame is a fixed header and a payload of raw bytes or JSON; nothing is ever unpickled. The
handshake is a mutual HMAC challenge over the job's secret and the protocol's version: neither side
learns the secret from it, and a recorded handshake is worth nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from enum import IntEnum

from pliant.cluster import Worker
from pliant.comm.plan import KINDS, Channel, Spec
from pliant.comm.slices import Portion
from pliant.errors import CommError, ConfigError, HandshakeRefused

PROTOCOL = 3
MAGIC = b"PLIANT"
MAX_CONTROL_BYTES = 16 << 20


class Kind(IntEnum):
    """What a frame says."""

    DEFINE = 1  # from now on this number stands for this spec
    OFFER = 2  # my memory for these collectives lies here: read my operands, write my results
    READY = 3  # operands for this slice lie here (same host)
    REDUCE = 4  # operands for this slice
    BCAST = 5  # the result of this slice
    DONE = 6  # the results of these slices are in your memory
    ERROR = 7  # this collective has failed
    LOST = 8  # a worker is gone
    HEARTBEAT = 9
    PING = 10
    PONG = 11
    ARENA = 12  # a descriptor of shared memory comes with this frame
    ASK = 13  # send me what you stored
    TELL = 14  # here it is
    BYE = 15  # I am leaving in good order
    MOVED = 17  # I have left this view for another one; this is what I had finished in it
    PARTS = 16  # like OFFER, for one collective whose operands lie apart from its result


HEADER = struct.Struct("<BBHIIIIQQ")
"""kind, flags, unused, view, spec, seq, slice, extra, length of the payload."""

Frame = tuple[int, int, int, int, int, int, int, int, int]
BULK = frozenset((Kind.REDUCE, Kind.BCAST, Kind.TELL))
"""Kinds whose payload is received straight into its place; all others are small and arrive whole."""
ANYTIME = frozenset((Kind.HEARTBEAT, Kind.PING, Kind.PONG, Kind.ARENA, Kind.BYE))
"""Kinds that concern the connection and not a view: they are taken whatever view they were sent in."""

OFFERED = struct.Struct("<IIIQ")
"""One collective in an OFFER: spec, seq, arena, offset."""
FINISHED = struct.Struct("<III")
"""One slice in a DONE: spec, seq, slice."""
TAGGED = struct.Struct("<8sQ")
"""A channel's tag, and a count."""
_PLACE = struct.Struct("<IIQ")

Place = tuple[int, int, int]
"""(owner's rank, arena, offset): where something lies in the shared memory of a host."""


def pack_places(places: list[Place]) -> bytes:
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(payload: bytes) -> list[Place]:
    return [(owner, arena, offset) for owner, arena, offset in _PLACE.iter_unpack(payload)]


def pack_spec(spec: Spec) -> bytes:
    fields = (spec.kind, spec.name, spec.members, spec.dtype, spec.length, spec.op, spec.exact, spec.root, spec.parts)
    portion = spec.portion and (spec.portion.whole, spec.portion.begin, spec.portion.lanes)
    return json.dumps((*fields, portion)).encode()


def unpack_spec(payload: bytes) -> Spec:
    """Raises CommError if `payload` is not a spec."""
    try:
        kind, name, members, dtype, length, op, exact, root, parts, run = json.loads(payload)
        portion = Portion(int(run[0]), int(run[1]), tuple(map(int, run[2]))) if run is not None else None
        spec = Spec(kind, name, tuple(members), dtype, int(length), op, bool(exact), int(root), tuple(parts), portion)
    except (ValueError, TypeError, IndexError) as error:
        raise CommError(f"a peer sent a damaged description of a collective: {error}") from None
    if spec.kind not in KINDS:
        raise CommError(f"a peer asked for an unknown kind of collective {spec.kind!r}: do all run the same version?")
    return spec


def channel_tag(channel: Channel) -> bytes:
    """Eight bytes that stand for a channel on every rank."""
    return hashlib.sha256(repr(channel).encode()).digest()[:8]


# --- the handshake ---------------------------------------------------------------------------------------------------

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
