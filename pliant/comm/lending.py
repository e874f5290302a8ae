"""Tensors that a worker lends to its peers, and how their bytes get there.

A worker lends a list of tensors under a name: as they are, on their device. Nothing is copied before a peer asks. The peer
fetches them as one run of bytes, piece by piece, straight into tensors of its own.

On the same host no piece goes through a socket: the peer reads it from shared memory and then returns it. If the tensor
does not lie in shared memory, the lender's copying thread copies the piece into a slot first, beside everything else that
the worker does; from a GPU it does so on a stream of its own. The slots are few, pinned once, and used again and again.
Between hosts a piece is sent over the connection, while the copying thread prepares the next ones.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import queue
import struct
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.frames import EXTRA, LENGTH, PIECE, SEQ, Frame, FrameKind, header
from pliant.comm.memory import Arena, SharedMemory, bytes_of
from pliant.comm.reactor import ReactorCall
from pliant.errors import CommError, Mismatch, NotStored, PliantError

if TYPE_CHECKING:
    from pliant.comm.connection import PeerLink
    from pliant.comm.cuda_staging import CudaStaging
    from pliant.comm.peers import Peers, SharedMemoryMap
    from pliant.comm.reactor import Reactor

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""The largest piece, and the size of a slot. A GPU copies this much in the time that a few messages take."""
NUM_SLOTS = 8
WINDOW = 4
"""The pieces that one fetch has open at each lender. So two fetches find slots, and one keeps reading and copying busy."""
GROUPED_BYTES = 1 << 20
"""Smaller tensors share a piece with their neighbours."""
SMALL_BYTES = 16 << 10
"""Pieces up to this size go through the socket on the same host, too: one message instead of two."""
AT_ONCE_BYTES = 256 << 10
"""Pieces up to this size are copied at once on the engine's thread: waking another would take longer."""
_RANGE = struct.Struct("<QQQ")
"""First and last byte of a piece, and the bytes of all tensors; the name follows."""

OnEnd = Callable[[Exception | None], None]
"""Called once: with None when everything has arrived, else with the error."""


# --- bytes of tensors ---


def cut_pieces(sizes: Sequence[int], limit: int = PIECE_BYTES, *, is_even: bool = False) -> list[tuple[int, int]]:
    """Cut the run of bytes of tensors with these sizes into pieces of at most `limit` bytes, at least one.

    A large tensor begins a piece of its own, so that most pieces lie in one tensor; small ones share pieces. If `is_even`,
    all pieces but the last have `limit` bytes, wherever tensors begin: these are the fewest.
    """
    if is_even:
        total = sum(sizes)
        return [(at, min(at + limit, total)) for at in range(0, max(1, total), limit)]
    pieces: list[tuple[int, int]] = []
    begin = end = 0
    for size in sizes:
        if end > begin and (size > GROUPED_BYTES or end + size - begin > limit):
            pieces.append((begin, end))
            begin = end
        end += size
        if size > GROUPED_BYTES:
            pieces += [(at, min(at + limit, end)) for at in range(begin, end, limit)]
            begin = end
    if end > begin or not pieces:
        pieces.append((begin, end))
    return pieces


class ByteRun:
    """Contiguous tensors, seen as one run of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.flats = [each.detach().view(-1).view(torch.uint8) for each in tensors if each.numel()]
        self._begins = [0, *itertools.accumulate(map(len, self.flats))]
        self.is_on_device = any(each.is_cuda for each in self.flats)
        self.ready: list[torch.cuda.Event] = []
        """Events after which the work that was queued when this object was made has ended."""
        if self.is_on_device:
            devices = {each.device for each in self.flats if each.is_cuda}
            self.ready = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def num_bytes(self) -> int:
        return self._begins[-1]

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.flats]

    def cut(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the bytes from `begin` to `end`, one flat tensor for each tensor that they lie in."""
        found = []
        for index in range(bisect.bisect_right(self._begins, begin) - 1, len(self.flats)):
            first = self._begins[index]
            if first >= end:
                break
            found.append(self.flats[index][max(0, begin - first) : end - first])
        return found


def copy_bytes(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the bytes of `sources`, one after another, to `targets`; both have as many. On a GPU, only queue the copies."""
    into, at = iter(targets), 0
    target = next(into, None)
    for source in sources:
        done = 0
        while done < len(source):
            assert target is not None, "both have as many bytes"
            size = min(len(source) - done, len(target) - at)
            target[at : at + size].copy_(source[done : done + size], non_blocking=True)
            done, at = done + size, at + size
            if at == len(target):
                target, at = next(into, None), 0


# --- the copying thread ---


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A copy of bytes, or only a call if there are no targets."""

    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    end: OnEnd
    ready: Sequence[torch.cuda.Event] = ()
    """What a copy from or to a device waits for."""
    pin: Callable[[], None] = lambda: None
    """Called before a copy from or to a device: pins the memory on the host."""


class CopyThread:
    """A thread that copies in the order of submission, and then calls `end`. It starts with the first job."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def submit(self, job: CopyJob) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pliant-lending", daemon=True)
                self._thread.start()
        self._todo.put(job)

    def close(self) -> None:
        """End the thread after what was submitted."""
        with self._starting:
            if self._thread is not None:
                self._todo.put(None)
                self._thread.join(timeout=10)

    def _run(self) -> None:
        begun: deque[tuple[CopyJob, torch.cuda.Event | Exception | None]] = deque()
        while True:
            try:
                job = self._todo.get(block=not begun)
            except queue.Empty:
                # Everything is queued on the device before the thread waits for the first copy.
                self._end(*begun.popleft())
                continue
            if job is None:
                break
            begun.append((job, self._begin(job)))
            while begun and _has_ended(begun[0][1]):
                self._end(*begun.popleft())
        for each in begun:
            self._end(*each)

    def _begin(self, job: CopyJob) -> torch.cuda.Event | Exception | None:
        try:
            device = next((each.device for each in (*job.targets, *job.sources) if each.is_cuda), None)
            if device is None:
                copy_bytes(job.targets, job.sources)
                return None
            job.pin()
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for event in job.ready:
                stream.wait_event(event)
            with torch.cuda.stream(stream):
                copy_bytes(job.targets, job.sources)
            copied: torch.cuda.Event = stream.record_event()
            return copied
        except Exception as error:
            return error

    def _end(self, job: CopyJob, outcome: torch.cuda.Event | Exception | None) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        try:
            if outcome is not None and not isinstance(outcome, Exception):
                outcome.synchronize()
        except Exception as failure:
            error = failure
        try:
            job.end(error)
        except Exception:
            log.exception("the end of a copy failed")


def _has_ended(outcome: torch.cuda.Event | Exception | None) -> bool:
    try:
        return outcome is None or isinstance(outcome, Exception) or bool(outcome.query())  # type: ignore[no-untyped-call]
    except Exception:
        return True  # whoever waits for it gets the error


# --- the lender ---


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of shared memory with a copy of one piece."""

    memory: torch.Tensor
    key: tuple[ByteRun, int, int] | None = None
    """The lent tensors, and the first and the last byte of the piece."""
    is_copied: bool = False
    num_readers: int = 0
    """The peers that read it, or are about to."""
    awaiting: list[Errand] = field(default_factory=list)
    """What is answered when the copy is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """A request of a peer."""

    link: PeerLink
    seq: int
    lent: ByteRun
    begin: int
    end: int
    requests: TensorRequests
    """Those of the view in which the peer asks."""

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_dead(self) -> bool:
        return self.link.closed or self.requests.has_ended


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
        self._waiting: deque[Errand] = deque()
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
        self._lent[name] = ByteRun([copy])

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

    def answer(self, errand: Errand) -> None:
        """Answer a request of a peer: now, or when a copy is there."""
        link, lent = errand.link, errand.lent
        parts = lent.cut(errand.begin, errand.end)
        in_place = not any(part.is_cuda for part in parts)
        if in_place and (not link.shared or errand.size <= SMALL_BYTES):
            self._send(errand, [bytes_of(part) for part in parts], None)
            return
        place = self.memory.locate(parts[0]) if in_place and len(parts) == 1 else None
        if place is not None:
            self._read[link, errand.seq] = lent
            self._tell_place(errand, *place)
        elif errand.size > PIECE_BYTES:
            raise CommError(f"a request for {errand.size} bytes at once: do all workers run the same version?")
        else:
            self._copy(errand)

    def _send(self, errand: Errand, views: list[memoryview], on_sent: Callable[[], None] | None) -> None:
        errand.link.egress_bytes += errand.size
        head = header(
            FrameKind.RESPONSE, errand.requests.view, seq=errand.seq, piece=1, extra=errand.lent.num_bytes,
            length=errand.size,
        )  # fmt: skip
        errand.link.send(0, head, views, on_sent)

    def _tell_place(self, errand: Errand, arena: int, offset: int) -> None:
        errand.link.egress_bytes += errand.size
        errand.requests.memory_map.announce(arena)
        errand.link.send_control(
            header(FrameKind.LENT, errand.requests.view, seq=errand.seq, piece=arena, extra=offset)
        )

    def _copy(self, errand: Errand) -> None:
        """Find a slot with this piece, or copy it into one."""
        key = errand.lent, errand.begin, errand.end
        slot = self._copied.get(key)
        if slot is not None:
            self._copied.move_to_end(key)
            slot.num_readers += 1
            self._deliver(errand, slot) if slot.is_copied else slot.awaiting.append(errand)
            return
        slot = self.take_slot()
        if slot is None:
            self._waiting.append(errand)
            return
        slot.key, slot.is_copied, slot.num_readers, slot.awaiting = key, False, 1, [errand]
        self._copied[key] = slot
        self.num_copied_bytes += errand.size
        parts = errand.lent.cut(errand.begin, errand.end)
        self.copies.submit(
            CopyJob(
                [slot.memory[: errand.size]],
                parts,
                lambda error: self.call(partial(self._on_copied, slot, error)),
                errand.lent.ready,
                partial(self.pin_own, slot.memory),
            )
        )

    def _on_copied(self, slot: Slot, error: Exception | None) -> None:
        awaiting, slot.awaiting, slot.is_copied = slot.awaiting, [], True
        for errand in awaiting:
            if error is None:
                self._deliver(errand, slot)
                continue
            log.error("a copy of what is lent failed: %r", error)
            if not errand.is_dead:
                errand.requests.refuse(errand.link, errand.seq)
            self._end_reading(slot)

    def _deliver(self, errand: Errand, slot: Slot) -> None:
        if errand.is_dead:
            self._end_reading(slot)
            return
        self._read[errand.link, errand.seq] = slot
        if errand.link.shared:
            place = self.memory.locate(slot.memory)
            assert place is not None, "slots lie in shared memory"
            self._tell_place(errand, *place)
        else:
            returned = partial(self.on_returned, errand.link, errand.seq)
            self._send(errand, [bytes_of(slot.memory[: errand.size])], returned)

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
                self.copies.submit(CopyJob([], [], lambda _: self.pin_own(memory)))
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
            self.copies.submit(CopyJob([], [], lambda _: self.pin_mapped(arena)))

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
            errand = self._waiting.popleft()
            if not errand.is_dead:
                before = len(self._waiting)
                self._copy(errand)
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
                if isinstance(read, Slot) and read.key is not None and read.key in self._copied:
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


# --- the borrower ---


@dataclass(slots=True, eq=False)
class Fetch:
    """Tensors that are on their way here."""

    name: str
    target: ByteRun
    on_end: OnEnd
    pieces: deque[tuple[int, int]]
    """What was not asked for yet."""
    left: int
    """The number of pieces that have not arrived."""
    num_open: Counter[int] = field(default_factory=Counter)
    """The pieces on their way, by rank."""
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class OpenPiece:
    """A piece that was asked for."""

    fetch: Fetch
    rank: int
    begin: int
    end: int
    slot: Slot | None = None
    """Where it arrives, if it comes from another host and does not lie in one tensor on the host here."""
    scratch: torch.Tensor | None = None
    """The same memory, or some that is not shared where there is no slot."""

    @property
    def targets(self) -> list[torch.Tensor]:
        return self.fetch.target.cut(self.begin, self.end)


class TensorRequests:
    """The fetches of this worker in one view, and its answers to those of its peers."""

    def __init__(self, peers: Peers, lending: Lending, memory_map: SharedMemoryMap) -> None:
        self.view = peers.view.number
        self.memory_map = memory_map
        self._peers = peers
        self._lending = lending
        self._open: dict[int, OpenPiece] = {}
        self._arriving: dict[PeerLink, int] = {}
        """The piece whose bytes arrive on each link."""

    @property
    def has_ended(self) -> bool:
        """Whether this worker has left the view."""
        return self._peers.retired

    # --- asking ---

    def fetch(self, ranks: Sequence[int], name: str, target: ByteRun, on_end: OnEnd) -> None:
        """Fetch what these ranks lend under a name, a share from each, perhaps from this rank itself."""
        # Between hosts a piece can be received straight in a tensor on the host, if it lies in one.
        links = [self._peers.links[rank] for rank in ranks if rank in self._peers.links]
        is_even = target.is_on_device or all(link.shared for link in links)
        pieces = deque(cut_pieces(target.sizes, is_even=is_even))
        fetch = Fetch(name, target, on_end, pieces, len(pieces))
        for _ in range(WINDOW):
            for rank in ranks:
                self._ask(fetch, rank)

    def _ask(self, fetch: Fetch, rank: int) -> None:
        """Ask a rank for the next piece."""
        if fetch.has_ended or not fetch.pieces or fetch.num_open[rank] >= WINDOW:
            return
        if rank in self._peers.absent:
            self._fail(fetch, self._peers.absent[rank])
            return
        begin, end = fetch.pieces.popleft()
        seq = self._lending.next_number()
        self._open[seq] = piece = OpenPiece(fetch, rank, begin, end)
        fetch.num_open[rank] += 1
        if rank == self._peers.rank:
            self._copy_own(seq, piece)
            return
        payload = _RANGE.pack(begin, end, fetch.target.num_bytes) + fetch.name.encode()
        head = header(FrameKind.REQUEST, self.view, seq=seq, length=len(payload))
        self._peers.links[rank].send_control(head, payload)

    def _copy_own(self, seq: int, piece: OpenPiece) -> None:
        lent = self._lending.get(piece.fetch.name)
        if lent is None:
            self._fail(piece.fetch, NotStored(f"nothing is stored here under {piece.fetch.name!r}"))
        elif lent.num_bytes != piece.fetch.target.num_bytes:
            self._fail(piece.fetch, _wrong_size("this worker", lent.num_bytes, piece.fetch))
        else:
            self._copy_in(seq, piece, lent.cut(piece.begin, piece.end), lent.ready, lambda: None)

    def _copy_in(
        self,
        seq: int,
        piece: OpenPiece,
        sources: Sequence[torch.Tensor],
        ready: Sequence[torch.cuda.Event],
        pin: Callable[[], None],
    ) -> None:
        """Copy a piece to where it belongs."""
        targets, target = piece.targets, piece.fetch.target
        small = piece.end - piece.begin <= AT_ONCE_BYTES
        if small and not any(each.is_cuda for each in (*targets, *sources)):
            copy_bytes(targets, sources)
            self._on_copied(seq, piece, None)
            return
        end = lambda error: self._lending.call(partial(self._on_copied, seq, piece, error))  # noqa: E731
        self._lending.copies.submit(CopyJob(targets, sources, end, (*ready, *target.ready), pin))

    def _on_copied(self, seq: int, piece: OpenPiece, error: Exception | None) -> None:
        """Note that a piece is where it belongs; ask for the next one, or end."""
        if piece.slot is not None:
            self._lending.give_back(piece.slot)
        link = self._peers.links.get(piece.rank)
        if link is not None and link.shared and not link.closed:
            link.send_control(header(FrameKind.RETURNED, self.view, seq=seq))
        if self._open.pop(seq, None) is None:
            return  # it has failed meanwhile
        fetch = piece.fetch
        fetch.num_open[piece.rank] -= 1
        fetch.left -= 1
        if error is not None:
            self._fail(fetch, CommError(f"{fetch.name!r} could not be copied here: {error!r}"))
        elif fetch.left == 0:
            fetch.has_ended = True
            fetch.on_end(None)
        else:
            self._ask(fetch, piece.rank)

    def _fail(self, fetch: Fetch, error: Exception) -> None:
        """End a fetch with an error, once nothing is written to its tensors any more."""
        for seq in [seq for seq, piece in self._open.items() if piece.fetch is fetch]:
            piece = self._open.pop(seq)
            link = self._peers.links.get(piece.rank)
            if link is not None and self._arriving.get(link) == seq:
                del self._arriving[link]
                if not link.closed:
                    link.discard_payload()
                if piece.slot is not None:
                    self._lending.give_back(piece.slot)
        if fetch.has_ended:
            return
        fetch.has_ended = True
        fetch.pieces.clear()
        copies = self._lending.copies
        copies.submit(CopyJob([], [], lambda _: fetch.on_end(error))) if copies.is_started else fetch.on_end(error)

    def fail(self, error: Exception, rank: int | None = None) -> None:
        """End all fetches, or those that ask `rank`, with `error`."""
        for fetch in {piece.fetch for piece in self._open.values() if rank is None or piece.rank == rank}:
            self._fail(fetch, error)

    # --- answers to this worker ---

    def on_lent(self, link: PeerLink, frame: Frame) -> None:
        """Handle a piece that lies in the shared memory of a peer."""
        piece = self._open.get(frame[SEQ])
        if piece is None:
            link.send_control(header(FrameKind.RETURNED, self.view, seq=frame[SEQ]))
            return
        size = piece.end - piece.begin
        link.ingress_bytes += size
        arena = link.arenas[frame[PIECE]]
        source = arena.flat(frame[EXTRA], torch.uint8, size)
        self._copy_in(frame[SEQ], piece, [source], (), partial(self._lending.pin_mapped, arena))

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview | None:
        """Return the destination of a response; None if it does not fit or nobody waits for it."""
        piece = self._open.get(frame[SEQ])
        if piece is None or piece.end - piece.begin != frame[LENGTH] or not frame[LENGTH]:
            return None
        self._arriving[link] = frame[SEQ]
        targets = piece.targets
        if len(targets) == 1 and not targets[0].is_cuda:
            return bytes_of(targets[0])
        piece.slot = self._lending.take_slot()
        memory = piece.slot.memory if piece.slot is not None else torch.empty(frame[LENGTH], dtype=torch.uint8)
        piece.scratch = memory[: frame[LENGTH]]
        return bytes_of(piece.scratch)

    def on_response(self, link: PeerLink, frame: Frame) -> None:
        """Handle a piece that has arrived, or the news that there is none."""
        self._arriving.pop(link, None)
        seq = frame[SEQ]
        piece = self._open.get(seq)
        if piece is None:
            return
        fetch = piece.fetch
        if not frame[PIECE]:
            self._fail(fetch, NotStored(f"{link.worker} (rank {link.rank}) has nothing stored under {fetch.name!r}"))
        elif frame[EXTRA] != fetch.target.num_bytes or frame[LENGTH] != piece.end - piece.begin:
            self._fail(fetch, _wrong_size(str(link.worker), frame[EXTRA], fetch))
        elif piece.scratch is not None:
            self._copy_in(seq, piece, [piece.scratch], (), partial(self._lending.pin_own, piece.scratch))
        else:
            self._on_copied(seq, piece, None)

    # --- requests of peers ---

    def on_request(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        begin, end, num_bytes = _RANGE.unpack_from(payload)
        lent = self._lending.get(payload[_RANGE.size :].decode(errors="replace"))
        if lent is None or lent.num_bytes != num_bytes or not begin <= end <= num_bytes:
            self.refuse(link, frame[SEQ], lent)
        else:
            self._lending.answer(Errand(link, frame[SEQ], lent, begin, end, self))

    def refuse(self, link: PeerLink, seq: int, lent: ByteRun | None = None) -> None:
        """Answer that there is nothing under a name, or something else than what was asked for."""
        extra = lent.num_bytes if lent is not None else 0
        head = header(FrameKind.RESPONSE, self.view, seq=seq, piece=lent is not None, extra=extra)
        link.send(0, head, [], None)


def _wrong_size(who: str, stored: int, fetch: Fetch) -> Mismatch:
    return Mismatch(f"{fetch.name!r}: {who} stored {stored} bytes, but {fetch.target.num_bytes} were asked for")
