"""What travels between the server of a federated job and its executors: frames, and a connection that carries them.

A frame is a fixed head, a JSON object of some lines at most, and a payload of raw bytes (`parcels` says how tensors lie
in it). Nothing is ever unpickled. Sizes are bounded before anything is allocated: a stranger may send little, and a member
no more than what it was asked for. Who sends something else is cut off, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from pliant.errors import CommError, HandshakeRefused

MAGIC = b"PFED"
STRANGERS_BYTES = 4096
"""The largest body of who has not proved yet that it knows the token; it has no payload."""
BODY_BYTES = 4 << 20
"""The largest body of a member."""
CHUNK_BYTES = 1 << 20
"""What is given to the kernel at once: more waits here, uncopied, until the other side takes it."""
HANDSHAKE_S = 10.0


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # an executor: who I am
    CHALLENGE = 2  # the server: prove that you know the token; this proves that I do
    PROOF = 3
    REFUSED = 4  # why not; the connection ends
    WELCOME = 5  # the job's config
    READY = 6  # I have built the job's task
    MODEL = 7  # from now on units start from this model
    UNIT = 8
    CANCEL = 9  # this unit is not needed any more, if you have not begun it
    RESULT = 10
    FAILED = 11  # this unit raised
    BEAT = 12
    LEAVE = 13  # I end in good order: nothing that I hold is to blame
    OVER = 14  # the job has ended


_KINDS = frozenset(Kind)
HEAD = struct.Struct("<4sBxxxIQ")
"""Magic, kind, length of the body, length of the payload."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    body: dict[str, Any] = field(default_factory=dict)
    payload: Tensor | None = None
    """Bytes, in memory of its own that is aligned as torch's own is."""


def encoded(kind: Kind, body: dict[str, Any] | None = None, payload: Tensor | None = None) -> list[memoryview]:
    """A frame as what is to be written, in as few pieces as need no copy of a large payload."""
    text = json.dumps(body or {}, separators=(",", ":")).encode()
    num_bytes = 0 if payload is None else payload.numel()
    head = HEAD.pack(MAGIC, kind, len(text), num_bytes) + text
    if payload is None or not num_bytes:
        return [memoryview(head)]
    raw = payload.numpy().data
    if num_bytes <= CHUNK_BYTES:
        return [memoryview(b"".join((head, raw)))]
    return [memoryview(head), raw]


class Decoder:
    """Frames out of a stream of bytes. It says where the next bytes go; large payloads thus arrive in place.

    Raises:
        CommError: what came is no frame, or larger than allowed.
    """

    def __init__(self) -> None:
        self.body_limit = STRANGERS_BYTES
        self.payload_limit = 0
        self._head = bytearray(HEAD.size)
        self._kind = Kind.BEAT
        self._body = bytearray()
        self._payload: Tensor | None = None
        self._place = memoryview(self._head)
        self._stage: Callable[[], Frame | None] = self._head_is_there

    @property
    def between_frames(self) -> bool:
        return self._stage == self._head_is_there and len(self._place) == HEAD.size

    def room(self) -> memoryview:
        """Where the next bytes are to be put; never empty."""
        return self._place

    def advance(self, num_bytes: int) -> Frame | None:
        """So many bytes were put there; the frame that they complete."""
        self._place = self._place[num_bytes:]
        while not len(self._place):
            if (frame := self._stage()) is not None:
                return frame
        return None

    def _head_is_there(self) -> None:
        magic, kind, num_body, num_payload = HEAD.unpack(self._head)
        if magic != MAGIC:
            raise CommError(f"it sent {bytes(self._head[:16])!r}, which begins no frame")
        if kind not in _KINDS:
            raise CommError(f"it sent a frame of the unknown kind {kind}: install one version everywhere")
        if num_body > self.body_limit or num_payload > self.payload_limit:
            raise CommError(
                f"it announced a {Kind(kind).name} of {num_body} + {num_payload} bytes, "
                f"where {self.body_limit} + {self.payload_limit} are allowed"
            )
        self._kind = Kind(kind)
        self._body = bytearray(num_body)
        self._payload = torch.empty(num_payload, dtype=torch.uint8) if num_payload else None
        self._place, self._stage = memoryview(self._body), self._body_is_there

    def _body_is_there(self) -> None:
        place = memoryview(b"") if self._payload is None else self._payload.numpy().data
        self._place, self._stage = place, self._payload_is_there

    def _payload_is_there(self) -> Frame:
        try:
            body = json.loads(self._body) if self._body else {}
        except (ValueError, RecursionError) as error:
            raise CommError(f"the body of a {self._kind.name} is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise CommError(f"the body of a {self._kind.name} is no JSON object")
        frame = Frame(self._kind, body, self._payload)
        self._payload = None
        self._place, self._stage = memoryview(self._head), self._head_is_there
        return frame


class Link(asyncio.BufferedProtocol):
    """One connection. Frames wait for `receive` until they are handed to somebody (`hand_to`)."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self.peer = "somebody"
        self.heard_s = 0.0
        """On the loop's clock."""
        self.why_lost = ""
        """Empty as long as the connection stands."""
        self._transport: asyncio.Transport | None = None
        self._out: deque[memoryview] = deque()
        self._paused = False
        self._closing = False
        self._waiting: deque[Frame] = deque()
        self._news = asyncio.Event()
        self._take: Callable[[Frame], None] = self._keep
        self._lost: Callable[[str], None] = lambda why: None

    def admit(self, payload_limit: int) -> None:
        """The other side is a member: it may send as much as that."""
        self.decoder.body_limit, self.decoder.payload_limit = BODY_BYTES, payload_limit

    def hand_to(self, take: Callable[[Frame], None], lost: Callable[[str], None]) -> None:
        """From now on `take` is given each frame, and `lost` the reason of the end. Frames that wait come first."""
        self._take, self._lost = take, lost
        while self._waiting and not self.why_lost:
            self._deliver(self._waiting.popleft())
        if self.why_lost:
            lost(self.why_lost)

    async def receive(self, *allowed: Kind, timeout_s: float = HANDSHAKE_S) -> Frame:
        """The next frame, which is of one of these kinds.

        Raises:
            HandshakeRefused: the other side says why not.
            CommError: the connection is lost, another kind came, or nothing did.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._waiting:
                    if self.why_lost:
                        raise CommError(self.why_lost)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise CommError(f"no {allowed[0].name} within {timeout_s:g} s") from None
        frame = self._waiting.popleft()
        if frame.kind is Kind.REFUSED:
            raise HandshakeRefused(str(frame.body.get("why"))[:500])
        if frame.kind not in allowed:
            raise CommError(f"it sent {frame.kind.name} instead of {allowed[0].name}")
        return frame

    def send(self, kind: Kind, body: dict[str, Any] | None = None, payload: Tensor | None = None) -> None:
        self.send_encoded(encoded(kind, body, payload))

    def send_encoded(self, pieces: list[memoryview]) -> None:
        """What was encoded once may go to many. Nothing happens where the connection is lost."""
        if not self.why_lost and not self._closing:
            self._out.extend(pieces)
            self._pump()

    def close(self) -> None:
        """End, once all that was sent is written."""
        self._closing = True
        self._pump()

    def cut(self, why: str) -> None:
        """End at once."""
        if not self.why_lost:
            self.why_lost = why
            self._out.clear()
            self._news.set()
            if self._transport is not None:
                self._transport.abort()
            self._lost(why)

    def _pump(self) -> None:
        if self._transport is None:
            return
        while self._out and not self._paused:
            piece = self._out.popleft()
            if len(piece) > CHUNK_BYTES:
                self._out.appendleft(piece[CHUNK_BYTES:])
            self._transport.write(piece[:CHUNK_BYTES])
        if self._closing and not self._out:
            self._transport.close()

    def _keep(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._news.set()

    def _deliver(self, frame: Frame) -> None:
        try:
            self._take(frame)
        except CommError as error:
            self.cut(str(error))

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.heard_s = asyncio.get_running_loop().time()
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "somebody"
        self._pump()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.decoder.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self.why_lost:
            return
        self.heard_s = asyncio.get_running_loop().time()
        try:
            frame = self.decoder.advance(nbytes)
        except CommError as error:
            self.cut(str(error))
        else:
            if frame is not None:
                self._deliver(frame)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        where = "" if self.decoder.between_frames else " in the middle of a frame"
        self.cut(f"the connection was lost{where}: {exc}" if exc else f"the connection was closed{where}")
