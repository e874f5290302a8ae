"""How a worker fetches what its peers lend (`comm.lending`): as one run of bytes, piece by piece, into tensors of its own.

A few pieces are open at each lender at any time. On the same host a piece is read in the shared memory of the lender, and
then returned. From another host it arrives over the connection, straight in the tensor that it belongs to where that lies
on the host, else in a slot from which it is copied to the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.byte_copies import PIECE_BYTES, ByteRun, CopyJob, OnEnd, copy_bytes
from pliant.comm.frames import EXTRA, LENGTH, PIECE, SEQ, Frame, FrameKind, header, pack_request
from pliant.comm.memory import bytes_of
from pliant.errors import CommError, Mismatch, NotStored

if TYPE_CHECKING:
    from pliant.comm.connection import PeerLink
    from pliant.comm.lending import Lending, Slot
    from pliant.comm.peers import Peers

WINDOW = 4
"""The pieces that one fetch has open at each lender. So two fetches find slots, and one keeps reading and copying busy."""
GROUPED_BYTES = 1 << 20
"""Smaller tensors share a piece with their neighbours."""
AT_ONCE_BYTES = 256 << 10
"""Pieces up to this size are copied at once on the engine's thread: waking another would take longer."""


def cut_pieces(sizes: Sequence[int], limit: int, *, is_even: bool = False) -> list[tuple[int, int]]:
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


class TensorFetcher:
    """The fetches of one worker in one view. It belongs to the engine's thread."""

    def __init__(self, peers: Peers, lending: Lending) -> None:
        self._view = peers.view.number
        self._peers = peers
        self._lending = lending
        """For slots, the copying thread, and what this worker fetches from itself."""
        self._open: dict[int, OpenPiece] = {}
        self._arriving: dict[PeerLink, int] = {}
        """The piece whose bytes arrive on each link."""

    # --- asking ---

    def fetch(self, ranks: Sequence[int], name: str, target: ByteRun, on_end: OnEnd) -> None:
        """Fetch what these ranks lend under a name, a share from each, perhaps from this rank itself."""
        # Between hosts a piece can be received straight in a tensor on the host, if it lies in one.
        links = [self._peers.links[rank] for rank in ranks if rank in self._peers.links]
        is_even = target.is_on_device or all(link.shared for link in links)
        pieces = deque(cut_pieces(target.sizes, PIECE_BYTES, is_even=is_even))
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
        payload = pack_request(fetch.name, begin, end, fetch.target.num_bytes)
        head = header(FrameKind.REQUEST, self._view, seq=seq, length=len(payload))
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
            link.send_control(header(FrameKind.RETURNED, self._view, seq=seq))
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
        copies.call(partial(fetch.on_end, error)) if copies.is_started else fetch.on_end(error)

    def fail(self, error: Exception, rank: int | None = None) -> None:
        """End all fetches, or those that ask `rank`, with `error`."""
        for fetch in {piece.fetch for piece in self._open.values() if rank is None or piece.rank == rank}:
            self._fail(fetch, error)

    # --- answers ---

    def on_lent(self, link: PeerLink, frame: Frame) -> None:
        """Handle a piece that lies in the shared memory of a peer."""
        piece = self._open.get(frame[SEQ])
        if piece is None:
            link.send_control(header(FrameKind.RETURNED, self._view, seq=frame[SEQ]))
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


def _wrong_size(who: str, stored: int, fetch: Fetch) -> Mismatch:
    return Mismatch(f"{fetch.name!r}: {who} stored {stored} bytes, but {fetch.target.num_bytes} were asked for")
