"""What one rank sends in its collectives: where its memory lies, operands up, results down.

Within a host nothing is sent but places in memory: results are written where the peer wants them, and it
is told. Between hosts payloads are queued on links, in fragments where something more urgent shall not
have to wait. What is folded before it goes up is `steps`' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pliant.comm.collective.ledger import Ledger
from pliant.comm.collective.notices import Notices
from pliant.comm.collective.operation import Operation
from pliant.comm.collective.peers import Peers
from pliant.comm.collective.reach import Reach
from pliant.comm.collective.span import Span
from pliant.comm.collective.vocabulary import Vocabulary
from pliant.comm.plan import Step
from pliant.comm.slices import even_partition
from pliant.comm.telemetry import Watcher
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import FINISHED, FRAGMENT, OFFERED, Kind, header, pack_places

Items = list[tuple[Span, int]]
"""Operands: the memory each lies in, and its first element there."""


class Delivery:
    """Messages to the peers of a view. A peer is told what a spec's number means before the first that has it."""

    def __init__(self, peers: Peers, reach: Reach, vocabulary: Vocabulary, notices: Notices, ledger: Ledger) -> None:
        self.watcher: Watcher | None = None
        self._peers = peers
        self._view = peers.view.number
        self._links = peers.links
        self._reach = reach
        self._vocabulary = vocabulary
        self._notices = notices
        self._ledger = ledger

    # --- where our memory lies ---

    def offer(self, operation: Operation) -> None:
        """Tell the peers of this host where our memory for this collective lies."""
        program, out = operation.program, operation.out
        known = program.known
        self._reach.announce(out.arena)
        if not program.offering:
            for peer in program.offer_to:
                self._vocabulary.explain(known, self._links[peer])
                program.offering.append((self._links[peer], program.offered_bytes.get(peer, 0)))
        if len(operation.own) > 1 or (operation.own and operation.own[0] is not out):
            self._offer_parts(operation)
            return
        entry = OFFERED.pack(known.number, operation.seq, out.arena, out.offset)
        offers = self._notices.offers
        for link, num_bytes in program.offering:
            link.egress_bytes += num_bytes
            offers[link] += entry

    def _offer_parts(self, operation: Operation) -> None:
        """The same where the operands lie apart from the result."""
        for span in operation.own:
            self._reach.announce(span.arena)
        places = pack_places([span.place() for span in (operation.out, *operation.own)])
        head = self._header(Kind.PARTS, operation, length=len(places))
        for link, num_bytes in operation.program.offering:
            link.egress_bytes += num_bytes
            link.say(head, places)

    # --- up ---

    def send_up(self, operation: Operation, step: Step, index: int, items: Items) -> None:
        """Hand operands to the rank above."""
        assert step.up is not None, "the root has nobody above it"
        link = self._links[step.up]
        self._vocabulary.explain(operation.program.known, link)
        link.egress_bytes += len(items) * step.length * operation.out.flat.dtype.itemsize
        if link.shared:
            operation.kept += (items,)
            for span, _ in items:
                if span.owner == self._peers.rank:
                    self._reach.announce(span.arena)
            places = pack_places([span.place(begin) for span, begin in items])
            link.say(self._header(Kind.READY, operation, index, length=len(places)), places)
            return
        views = [span.bytes(begin, begin + step.length) for span, begin in items]
        operation.left += 1
        sent: Callable[[], None] = lambda: self._sent_up(operation, step, index, items)  # noqa: E731
        self._send(Kind.REDUCE, operation, index, link, views, self._watched("push", operation, index, link, sent))

    def _sent_up(self, operation: Operation, step: Step, index: int, items: Items) -> None:
        del items  # kept alive until here
        if self._peers.retired:
            return
        self.done_with(operation, step, index)
        self._ledger.finish_part(operation)

    def done_with(self, operation: Operation, step: Step, index: int) -> None:
        """Nothing more is to go up. In a plain reduce no result comes back, so that is the end of the step."""
        if operation.program.spec.kind == "reduce":
            self.release(operation, step, index)
            self._ledger.finish_part(operation)

    def release(self, operation: Operation, step: Step, index: int) -> None:
        """In a plain reduce no result comes back; children of this host must learn that their memory is free."""
        if operation.program.spec.kind != "reduce":
            return
        for child, _ in step.children:
            if self._links[child].shared:
                self._say_done(operation, index, self._links[child])

    # --- down ---

    def tell(self, operation: Operation, step: Step, index: int, already: Sequence[int] = ()) -> None:
        """Pass the result of a slice on."""
        for peer in step.listeners:
            if peer in already or peer in self._peers.lost:
                continue
            link = self._links[peer]
            if not link.shared:
                self._send_result(operation, step, index, link)
            elif peer in operation.offers:
                self.push(operation, step, index, link, operation.offers[peer][0])
            else:
                operation.left += 1
                operation.owe(peer, index)

    def push(self, operation: Operation, step: Step, index: int, link: Link, theirs: Span) -> None:
        """Write the result of a slice into the memory of a peer on this host."""
        theirs.cut(step.begin, step.end).copy_(operation.cut(step))
        self.note_done(operation, step, index, link)

    def note_done(self, operation: Operation, step: Step, index: int, link: Link) -> None:
        """The result of a slice is in the memory of a peer on this host."""
        link.egress_bytes += step.length * operation.out.flat.dtype.itemsize
        self._say_done(operation, index, link)

    def _say_done(self, operation: Operation, index: int, link: Link) -> None:
        known = operation.program.known
        self._vocabulary.explain(known, link)
        self._notices.done[link] += FINISHED.pack(known.number, operation.seq, index)

    def _send_result(self, operation: Operation, step: Step, index: int, link: Link) -> None:
        self._vocabulary.explain(operation.program.known, link)
        view = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        operation.left += 1
        link.egress_bytes += len(view)
        sent: Callable[[], None] = lambda: self._ledger.finish_part(operation)  # noqa: E731
        self._send(Kind.BCAST, operation, index, link, [view], self._watched("reply", operation, index, link, sent))

    # --- errors ---

    def say_error(self, operation: Operation, text: str) -> None:
        """Tell all members that a collective has failed."""
        payload = text.encode()
        for peer in operation.program.spec.members:
            if peer != self._peers.rank and peer not in self._peers.lost:
                link = self._links[peer]
                self._vocabulary.explain(operation.program.known, link)
                link.say(self._header(Kind.ERROR, operation, length=len(payload)), payload)

    # --- on the wire ---

    def _header(self, kind: Kind, operation: Operation, piece: int = 0, length: int = 0) -> bytes:
        known = operation.program.known
        return header(kind, self._view, spec=known.number, seq=operation.seq, piece=piece, length=length)

    def _send(
        self,
        kind: Kind,
        operation: Operation,
        index: int,
        link: Link,
        views: list[memoryview],
        sent: Callable[[], None],
    ) -> None:
        """Queue a slice; in fragments, where something more urgent shall not have to wait for all of it."""
        total = sum(map(len, views))
        count = -(-total // link.fragment_bytes) if link.fragment_bytes else 1
        if count <= 1:
            link.send(operation.priority, self._header(kind, operation, index, total), views, sent)
            return
        view, spec, seq = self._view, operation.program.known.number, operation.seq
        for begin, end in even_partition(total, count):
            extra = total << 32 | begin
            head = header(kind, view, spec=spec, seq=seq, piece=index, extra=extra, length=end - begin, flags=FRAGMENT)
            link.send(operation.priority, head, _between(views, begin, end), sent if end == total else None)

    def _watched(
        self, what: str, operation: Operation, index: int, link: Link, sent: Callable[[], None]
    ) -> Callable[[], None]:
        """`sent`, and where somebody watches: also tell when the slice was queued and when it had left."""
        watcher, queued_s = self.watcher, time.monotonic()
        if watcher is None:
            return sent

        def tell() -> None:
            watcher(what, operation.program.spec.name, index, link.rank, queued_s, time.monotonic())
            sent()

        return tell


def _between(views: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes [begin, end) of some runs of memory one after the other."""
    found, at = [], 0
    for view in views:
        if at < end and at + len(view) > begin:
            found.append(view[max(0, begin - at) : end - at])
        at += len(view)
    return found
