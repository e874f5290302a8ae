"""Tensors that a worker lends to its peers.

A worker lends a list of tensors under a name: as they are, on their device. Nothing is copied before a peer asks. The peer
fetches them as one run of bytes, piece by piece (`comm.fetching`).

On the same host no piece goes through a socket: the peer reads it from shared memory and then returns it. If the tensor
does not lie in shared memory, the lender's copying thread copies the piece into a slot first, beside everything else that
the worker does; from a GPU it does so on a stream of its own. The slots are few, pinned once, and used again and again.
Between hosts a piece is sent over the connection, while the copying thread prepares the next ones.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.byte_copies import PIECE_BYTES, ByteRun, CopyJob, CopyThread
from pliant.comm.frames import SEQ, Frame, FrameKind, header, unpack_request
from pliant.comm.memory import Arena, SharedMemory, bytes_of
from pliant.comm.reactor import ReactorCall
from pliant.errors import CommError, PliantError

if TYPE_CHECKING:
    from pliant.comm.connection import PeerLink
    from pliant.comm.cuda_staging import CudaStaging
    from pliant.comm.peers import SharedMemoryMap
    from pliant.comm.reactor import Reactor

log = logging.getLogger(__name__)

NUM_SLOTS = 8
SMALL_BYTES = 16 << 10
"""Pieces up to this size go through the socket on the same host, too: one message instead of two."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of shared memory with a copy of one piece."""

    memory: torch.Tensor
    key: tuple[ByteRun, int, int] | None = None
    """The lent tensors, and the first and the last byte of the piece."""
    is_copied: bool = False
    num_readers: int = 0
    """The peers that read it, or are about to."""
    awaiting: list[PieceRequest] = field(default_factory=list)
    """What is answered when the copy is there."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceRequest:
    """A request of a peer for the bytes from `begin` to `end` of what is lent."""

    link: PeerLink
    seq: int
    lent: ByteRun
    begin: int
    end: int
    memory_map: SharedMemoryMap
    """That of the view in which the peer asks."""

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def view(self) -> int:
        return self.memory_map.peers.view.number

    @property
    def is_dead(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self.link.closed or self.memory_map.peers.retired


class Lending:
    """What one worker lends, through all views: the tensors, the slots, and what peers read just now.

    Any thread may call `lend`, `save`, `reclaim` and `get`; everything else belongs to the engine's thread.
    """

    def __init__(self, memory: SharedMemory, reactor: Reactor | None, cuda: Callable[[], CudaStaging]) -> None:
        self.memory = memory
        self.copies = CopyThread()
        self.num_copied_bytes = 0
        """The bytes that were copied into slots so far."""
        self._reactor = reactor
        self._cuda = cuda
        self._lent: dict[str, ByteRun] = {}
        self._numbers = itertools.count(1)
        self._num_slots = 0
        self._free: list[Slot] = []
        self._copied: OrderedDict[tuple[ByteRun, int, int], Slot] = OrderedDict()
        """The slots in use by what they hold, the one that was used last at the end."""
        self._read: dict[tuple[PeerLink, int], Slot | ByteRun] = {}
        """What each open request of a peer reads."""
        self._waiting: deque[PieceRequest] = deque()
        """Requests for which there was no slot."""
        self.links: Callable[[], Iterable[PeerLink]] = lambda: ()
        """Returns the links to all peers, also to those that will only be in the next view. The engine's thread."""
        self._pins = False
        """Whether this worker uses a GPU."""
        self.is_new = True
        """Whether this worker was in no view yet. Then it will fetch, and pins the slots of its peers as soon as it knows of
        them. Later that would only hold up its training."""
        self._abandoned: list[object] = []
        """What a peer was reading that has fallen silent: it may come back, read on, and believe what it has read."""

    # --- any thread ---

    def lend(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let peers fetch these contiguous tensors. They must not change until they are reclaimed."""
        self._lent[name] = ByteRun(tensors)

    def save(self, name: str, tensor: torch.Tensor) -> None:
        """Let peers fetch a copy of `tensor`."""
        copy = self.memory.empty(tensor.numel(), tensor.dtype)
        copy.copy_(tensor.detach().reshape(-1))
        self.lend(name, [copy])

    def reclaim(self, prefix: str) -> None:
        """Lend nothing any more under names that begin with `prefix`."""
        gone = [lent for name in list(self._lent) if name.startswith(prefix) and (lent := self._lent.pop(name, None))]
        if gone:
            self.call(partial(self._forget, gone))

    def get(self, name: str) -> ByteRun | None:
        return self._lent.get(name)

    def next_number(self) -> int:
        return next(self._numbers) & 0xFFFFFFFF

    def call(self, act: Callable[[], None]) -> None:
        """Call `act` on the engine's thread, unless that has ended."""
        if self._reactor is None:
            act()
            return
        with contextlib.suppress(PliantError):
            self._reactor.post(ReactorCall(act))
            self._reactor.wake()

    def pin_own(self, flat: torch.Tensor) -> None:
        """Pin own shared memory, on the copying thread."""
        self._cuda().pin(flat)

    def pin_mapped(self, arena: Arena) -> None:
        """Pin the shared memory of a peer, on the copying thread."""
        self._cuda().pin_mapped(arena)

    def close(self) -> None:
        self.copies.close()

    # --- answers ---

    def on_request(self, link: PeerLink, frame: Frame, payload: bytes, memory_map: SharedMemoryMap) -> None:
        """Handle the request of a peer for a piece."""
        name, begin, end, num_bytes = unpack_request(payload)
        lent = self.get(name)
        if lent is None or lent.num_bytes != num_bytes or not begin <= end <= num_bytes:
            _refuse(link, memory_map.peers.view.number, frame[SEQ], lent)
        else:
            self._answer(PieceRequest(link, frame[SEQ], lent, begin, end, memory_map))

    def _answer(self, request: PieceRequest) -> None:
        """Answer now, or when a copy is there."""
        link, lent = request.link, request.lent
        parts = lent.cut(request.begin, request.end)
        in_place = not any(part.is_cuda for part in parts)
        if in_place and (not link.shared or request.size <= SMALL_BYTES):
            self._send(request, [bytes_of(part) for part in parts], None)
            return
        place = self.memory.locate(parts[0]) if in_place and len(parts) == 1 else None
        if place is not None:
            self._read[link, request.seq] = lent
            self._tell_place(request, *place)
        elif request.size > PIECE_BYTES:
            raise CommError(f"a request for {request.size} bytes at once: do all workers run the same version?")
        else:
            self._copy(request)

    def _send(self, request: PieceRequest, views: list[memoryview], on_sent: Callable[[], None] | None) -> None:
        request.link.egress_bytes += request.size
        extra, length = request.lent.num_bytes, request.size
        head = header(FrameKind.RESPONSE, request.view, seq=request.seq, piece=1, extra=extra, length=length)
        request.link.send(0, head, views, on_sent)

    def _tell_place(self, request: PieceRequest, arena: int, offset: int) -> None:
        request.link.egress_bytes += request.size
        request.memory_map.announce(arena)
        request.link.send_control(header(FrameKind.LENT, request.view, seq=request.seq, piece=arena, extra=offset))

    def _copy(self, request: PieceRequest) -> None:
        """Find a slot with this piece, or copy it into one."""
        key = request.lent, request.begin, request.end
        slot = self._copied.get(key)
        if slot is not None:
            self._copied.move_to_end(key)
            slot.num_readers += 1
            self._deliver(request, slot) if slot.is_copied else slot.awaiting.append(request)
            return
        slot = self.take_slot()
        if slot is None:
            self._waiting.append(request)
            return
        slot.key, slot.is_copied, slot.num_readers, slot.awaiting = key, False, 1, [request]
        self._copied[key] = slot
        self.num_copied_bytes += request.size
        sources, target = request.lent.cut(request.begin, request.end), slot.memory[: request.size]
        end = lambda error: self.call(partial(self._on_copied, slot, error))  # noqa: E731
        self.copies.submit(CopyJob([target], sources, end, request.lent.ready, partial(self.pin_own, slot.memory)))

    def _on_copied(self, slot: Slot, error: Exception | None) -> None:
        awaiting, slot.awaiting, slot.is_copied = slot.awaiting, [], True
        if error is None:
            for request in awaiting:
                self._deliver(request, slot)
            return
        log.error("a copy of what is lent failed: %s", repr(error))  # a record with the error would hold the memory
        for request in awaiting:
            if not request.is_dead:
                _refuse(request.link, request.view, request.seq)
        assert slot.key is not None, "it is in use"
        del self._copied[slot.key]  # there is nothing in it for the next one who asks
        self.give_back(slot)

    def _deliver(self, request: PieceRequest, slot: Slot) -> None:
        if request.is_dead:
            self._end_reading(slot)
            return
        self._read[request.link, request.seq] = slot
        if request.link.shared:
            place = self.memory.locate(slot.memory)
            assert place is not None, "slots lie in shared memory"
            self._tell_place(request, *place)
        else:
            returned = partial(self.on_returned, request.link, request.seq)
            self._send(request, [bytes_of(slot.memory[: request.size])], returned)

    # --- slots ---

    def take_slot(self) -> Slot | None:
        """Return a slot that nobody reads; None if there is none."""
        if not self._free and self._num_slots == 0:
            whole = self.memory.empty_arena(NUM_SLOTS * PIECE_BYTES)  # peers pin it as a whole
            self._free = [Slot(each) for each in whole.split(PIECE_BYTES)]  # type: ignore[no-untyped-call]
            self._num_slots = NUM_SLOTS
        elif not self._free and self._num_slots < NUM_SLOTS:  # one was abandoned
            self._free.append(Slot(self.memory.empty(PIECE_BYTES, torch.uint8)))
            self._num_slots += 1
        if self._free:
            return self._free.pop()
        idle = next((slot for slot in self._copied.values() if not slot.num_readers), None)
        if idle is not None and idle.key is not None:
            del self._copied[idle.key]
        return idle

    def prepare(self) -> None:
        """Have slots that are pinned, here and by the peers of this host, before somebody asks. Any thread."""

        def pin_slots() -> None:
            self._pins = True
            for link in self.links():
                for arena in link.arenas.values():
                    self.on_mapped(arena)
            slot = self.take_slot()
            if slot is not None:
                memory = slot.memory
                self.give_back(slot)
                self.copies.call(partial(self.pin_own, memory))
                self._tell_slots(memory)

        self.call(pin_slots)

    def _tell_slots(self, memory: torch.Tensor) -> None:
        """Let all peers of this host map the arena with this slot."""
        place = self.memory.locate(memory)
        assert place is not None, "slots lie in shared memory"
        self.memory.arenas[place[0]].has_slots = True
        for link in self.links():
            if link.shared and not link.is_leaving:
                link.send_arenas(self.memory.arenas, place[0], max(0, link.view))

    def on_mapped(self, arena: Arena) -> None:
        """Handle an arena of a peer that is mapped here. A new worker pins one with slots, once."""
        if self._pins and self.is_new and arena.has_slots:
            self.copies.call(partial(self.pin_mapped, arena))

    def give_back(self, slot: Slot) -> None:
        """Free a slot, and serve who waits for one."""
        slot.key = None
        self._free.append(slot)
        self._serve_waiting()

    def on_returned(self, link: PeerLink, seq: int) -> None:
        """Handle a peer that has read what it asked for."""
        read = self._read.pop((link, seq), None)
        if isinstance(read, Slot):
            self._end_reading(read)

    def _end_reading(self, slot: Slot) -> None:
        slot.num_readers -= 1
        if slot.num_readers == 0:
            if slot.key is not None and slot.key[0] not in self._lent.values():
                self._copied.pop(slot.key, None)
                self.give_back(slot)
            else:
                self._serve_waiting()

    def _serve_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if not request.is_dead:
                before = len(self._waiting)
                self._copy(request)
                if len(self._waiting) > before:
                    self._waiting.rotate(1)  # it keeps its turn
                    return

    def on_dropped(self, link: PeerLink, *, may_live: bool) -> None:
        """Handle a connection that is gone. If the peer `may_live`, memory that it was reading is never used again."""
        for key in [key for key in self._read if key[0] is link]:
            read = self._read[key]
            if may_live and link.shared:
                del self._read[key]
                self._abandoned.append(read)
                if isinstance(read, Slot) and read.key is not None and self._copied.get(read.key) is read:
                    del self._copied[read.key]
                    self._num_slots -= 1
            else:
                self.on_returned(*key)
        self._serve_waiting()  # with slots in the place of those that are given up

    def _forget(self, gone: Sequence[ByteRun]) -> None:
        """Free the slots of tensors that are lent no more."""
        for key in [key for key in self._copied if key[0] in gone]:
            if not self._copied[key].num_readers:
                self.give_back(self._copied.pop(key))


def _refuse(link: PeerLink, view: int, seq: int, lent: ByteRun | None = None) -> None:
    """Answer that there is nothing under a name, or something else than what was asked for."""
    extra = lent.num_bytes if lent is not None else 0
    link.send(0, header(FrameKind.RESPONSE, view, seq=seq, piece=lent is not None, extra=extra), [], None)
