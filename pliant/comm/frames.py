"""The wire format between two workers: frames with a fixed header and a payload of raw bytes or JSON.

Nothing is ever unpickled. Before the first frame two workers authenticate each other, see `comm.mesh`.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

MAX_CONTROL_BYTES = 16 << 20


class FrameKind(IntEnum):
    """The meaning of a frame."""

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
    REQUEST = 13  # send me a piece of what you lend under this name
    RESPONSE = 14  # the piece
    BYE = 15  # I am leaving the job in good order
    OFFER_PARTS = 16  # like OFFER, for one collective whose operands lie apart from its result
    MOVED = 17  # I have left this view for another one; these are the collectives that I had finished in it
    LENT = 18  # the piece that you asked for lies here: read it, and return it (same host)
    RETURNED = 19  # I have read the piece


HEADER = struct.Struct("<BBHIIIIQQ")
"""kind, flags, unused, view, spec, seq, piece, extra, length of the payload."""

Frame = tuple[int, int, int, int, int, int, int, int, int]
"""An unpacked header: a plain tuple, because one is made for every frame."""
KIND, FLAGS, _, VIEW, SPEC, SEQ, PIECE, EXTRA, LENGTH = range(9)
"""The index of each field in a `Frame`; a piece is the index of a slice."""
FRAGMENT = 1
"""The flag of a frame that carries a part of a payload; `extra` says where it begins, and how long the whole is."""
BULK = frozenset((FrameKind.REDUCE, FrameKind.BCAST, FrameKind.RESPONSE))
"""Kinds whose payload is received straight into its destination; all others are small and arrive whole."""
ANY_VIEW = frozenset(
    (FrameKind.HEARTBEAT, FrameKind.PING, FrameKind.PONG, FrameKind.ARENA, FrameKind.BYE, FrameKind.RETURNED)
)
"""Kinds that concern the connection and not a view: they are accepted whatever view they were sent in."""

OFFERED = struct.Struct("<IIIQ")
"""One collective in an OFFER: spec, seq, arena, offset."""
FINISHED = struct.Struct("<III")
"""One slice in a DONE: spec, seq, slice."""
TAGGED = struct.Struct("<8sQ")
"""The tag of a channel, and a count."""
_PLACE = struct.Struct("<IIQ")
_REQUESTED = struct.Struct("<QQQ")
"""A REQUEST: first and last byte of the piece, and the bytes of all tensors; the name follows."""

Place = tuple[int, int, int]
"""(rank of the owner, arena, offset): an address in the shared memory of a host."""


def header(
    kind: FrameKind,
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


def pack_places(places: list[Place]) -> bytes:
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(payload: bytes) -> list[Place]:
    return [(owner, arena, offset) for owner, arena, offset in _PLACE.iter_unpack(payload)]


def pack_request(name: str, begin: int, end: int, num_bytes: int) -> bytes:
    """Pack a request for the bytes from `begin` to `end` of what is lent under a name, which has `num_bytes` in all."""
    return _REQUESTED.pack(begin, end, num_bytes) + name.encode()


def unpack_request(payload: bytes) -> tuple[str, int, int, int]:
    """Return name, begin, end and the number of bytes in all."""
    begin, end, num_bytes = _REQUESTED.unpack_from(payload)
    return payload[_REQUESTED.size :].decode(errors="replace"), begin, end, num_bytes


def channel_tag(channel: tuple[str, str, tuple[int, ...]]) -> bytes:
    """Return eight bytes that stand for a channel on every rank."""
    return hashlib.sha256(repr(channel).encode()).digest()[:8]
