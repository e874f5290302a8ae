"""Execution of the collectives of one rank in a view: receive buffers, open operations, sending and folding.

Within a host no data is sent, only places in memory: a result is written where the peer wants it, and the peer is
notified. Between hosts payloads are queued on links, in fragments so that urgent ones can overtake. What was prepared for
some memory is reused at the next training step. Only the engine's thread calls these classes.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import torch

from pliant.comm.frames import (
    EXTRA,
    FINISHED,
    FLAGS,
    FRAGMENT,
    KIND,
    LENGTH,
    OFFERED,
    PIECE,
    SEQ,
    SPEC,
    Frame,
    FrameKind,
    header,
    pack_places,
)
from pliant.comm.kernels import PreparedFold, Reducer, Scratch
from pliant.comm.memory import CachedFold, OperandBuffer, SharedMemory, Span
from pliant.comm.operations import CachedStep, OperandBufferKey, Operation, PriorityQueue
from pliant.comm.order import even_partition
from pliant.comm.peers import NoticeBatch
from pliant.comm.telemetry import LaneStats, SliceWatcher
from pliant.errors import CommError

if TYPE_CHECKING:
    from pliant.comm.connection import PeerLink
    from pliant.comm.peers import Peers, SharedMemoryMap, SpecRegistry
    from pliant.comm.plan import SliceStep, Spec

log = logging.getLogger(__name__)

MAX_BUFFER_BYTES = 256 << 20
"""At most this much memory for received operands is kept from step to step."""

PayloadTarget = Operation | OperandBuffer


# --- receive buffers ---


@dataclass(slots=True, eq=False)
class FragmentedPayload:
    """A payload of which some fragments have arrived."""

    view: memoryview | None
    """The destination; None if the payload is discarded."""
    target: PayloadTarget | None
    """The operation or buffer that the payload is for."""
    total: int
    missing: int


class ReceiveBuffers:
    """The destinations of payloads: the memory of a collective's result, or a buffer for operands.

    A payload may come in fragments, with other payloads between them. What was meant for a collective that has failed
    is discarded, because its memory may have another owner by then.
    """

    def __init__(self, memory: SharedMemory, specs: SpecRegistry, operations: Mapping[int, Operation]) -> None:
        self._memory = memory
        self._specs = specs
        self._operations = operations
        """The open operations by key."""
        self._arriving: dict[PeerLink, PayloadTarget | FragmentedPayload | None] = {}
        """The target of the payload that arrives on each link; None if it is discarded."""
        self._fragmented: dict[tuple[int, int, int, int, int], FragmentedPayload] = {}
        """By peer, kind, spec, number and slice."""
        self._spare: dict[OperandBufferKey, OperandBuffer] = {}
        """The buffers that are not in use."""
        self._spare_bytes = 0

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview | None:
        """Return the destination of the payload of this frame; None to discard it."""
        if frame[FLAGS] != FRAGMENT:
            return self._place(link, frame)
        total, begin = frame[EXTRA] >> 32, frame[EXTRA] & 0xFFFFFFFF
        key = _payload_key(link, frame)
        payload = self._fragmented.get(key)
        if payload is None:
            view = self._place(link, (*frame[:8], total))
            target = self._arriving[link]
            assert not isinstance(target, FragmentedPayload), "a fragmented payload is only made here"
            payload = self._fragmented[key] = FragmentedPayload(view, target, total, total)
        self._arriving[link] = payload
        return None if payload.view is None else payload.view[begin : begin + frame[LENGTH]]

    def _place(self, link: PeerLink, frame: Frame) -> memoryview:
        """Return the destination of a whole payload."""
        found = self._result_place(link, frame)
        if found is not None:
            self._arriving[link] = found[0]
            return found[1]
        length = frame[LENGTH]
        buffer = self._spare.pop((link.rank, frame[SPEC], frame[PIECE], length), None)
        if buffer is None:
            buffer = OperandBuffer(self._memory.empty(length, torch.uint8))
        else:
            self._spare_bytes -= length
        self._arriving[link] = buffer
        return buffer.bytes

    def _result_place(self, link: PeerLink, frame: Frame) -> tuple[Operation, memoryview] | None:
        """Return the operation whose result a payload is, and the memory of the result.

        None if the payload is an operand, or if the operation has not been submitted here yet.
        """
        if frame[KIND] != FrameKind.BCAST:
            return None
        registered = self._specs.by_peer[link.rank].get(frame[SPEC])
        operation = self._operations.get(registered.channel << 32 | frame[SEQ]) if registered else None
        if operation is None or operation.compiled.registered is not registered:
            return None
        step = operation.compiled.plan.steps[frame[PIECE]]
        place = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        return (operation, place) if len(place) == frame[LENGTH] else None

    def on_payload(self, link: PeerLink, frame: Frame) -> tuple[Frame, PayloadTarget | None] | None:
        """Note that a payload is in its destination; return the frame of the whole payload and its target.

        None if there are fragments to come.
        """
        target = self._arriving.pop(link)
        if not isinstance(target, FragmentedPayload):
            return frame, target
        target.missing -= frame[LENGTH]
        if target.missing:
            return None
        del self._fragmented[_payload_key(link, frame)]
        return (*frame[:7], 0, target.total), target.target

    def discard_for(self, operation: Operation) -> None:
        """Discard everything that is on its way to this operation."""
        for link, arriving in list(self._arriving.items()):
            if arriving is operation or (isinstance(arriving, FragmentedPayload) and arriving.target is operation):
                if arriving is operation:
                    self._arriving[link] = None
                link.discard_payload()
        for payload in self._fragmented.values():
            if payload.target is operation:
                payload.view = payload.target = None

    def recycle(self, buffers: list[tuple[OperandBufferKey, OperandBuffer]]) -> None:
        """Keep the buffers of a complete collective for the next one."""
        for key, buffer in buffers:
            if key in self._spare:
                continue  # two collectives of one name were under way at once
            if self._spare_bytes + key[3] > MAX_BUFFER_BYTES:
                self.drop_spare()  # most likely the slices had another size before
            self._spare[key] = buffer
            self._spare_bytes += key[3]

    def drop_spare(self) -> None:
        """Free the buffers that are not in use."""
        self._spare.clear()
        self._spare_bytes = 0

    def drop_peer(self, rank: int) -> None:
        """Forget the fragments of a peer from which nothing more will come."""
        for key in [key for key in self._fragmented if key[0] == rank]:
            del self._fragmented[key]

    def close(self) -> None:
        self._arriving.clear()
        self._fragmented.clear()


def _payload_key(link: PeerLink, frame: Frame) -> tuple[int, int, int, int, int]:
    return link.rank, frame[KIND], frame[SPEC], frame[SEQ], frame[PIECE]


# --- open operations ---

FailedMemory = deque[tuple[object, ...]]


class OpenOperations:
    """The operations that this rank has begun in a view, until their waiters are notified.

    It also keeps the memory of operations that failed, because peers may still write to it.
    """

    def __init__(self, peers: Peers, operations: dict[int, Operation], buffers: ReceiveBuffers) -> None:
        self.by_key = operations
        self.completed: list[Operation] = []
        """Operations whose waiters are not notified yet: waking a thread for each would cost more than the work."""
        self.num_begun: dict[int, int] = {}
        """The number of operations of each channel that were ever begun."""
        self.lanes = LaneStats()
        self._peers = peers
        self._buffers = buffers
        self._failed_memory: FailedMemory = deque(maxlen=4096)
        """Memory of failed operations: a peer that has not heard of the failure may still write to it."""
        self._former_memory: list[FailedMemory] = []
        """The same of earlier views, until every worker is known to have left them."""

    def involving(self, rank: int) -> list[Operation]:
        """Return the open operations in which `rank` takes part."""
        return [operation for operation in self.by_key.values() if rank in operation.compiled.spec.members]

    def num_finished(self) -> dict[int, int]:
        """Return for each channel up to which number all operations have ended here."""
        counts = dict(self.num_begun)
        for operation in self.by_key.values():
            channel = operation.compiled.registered.channel
            counts[channel] = min(counts.get(channel, 0), operation.seq)
        return counts

    def finish_part(self, operation: Operation) -> None:
        """Note that one step or frame of an operation is done; complete the operation if it was the last."""
        operation.left -= 1
        if operation.left == 0 and not operation.failed:
            self.complete(operation)

    def complete(self, operation: Operation) -> None:
        del self.by_key[operation.key]
        if operation.buffers:
            self._buffers.recycle(operation.buffers)
            operation.buffers = []
        self.lanes.add(operation.compiled, operation.began_s, time.monotonic())
        operation.burst.open -= 1
        self.completed.append(operation)
        if self._former_memory and self._proves_arrival(operation.compiled.spec):
            for failed in self._former_memory:
                failed.clear()
            self._former_memory = []

    def _proves_arrival(self, spec: Spec) -> bool:
        """Return whether completion of a collective with this spec means that every worker has entered this view."""
        everybody = len(spec.members) == self._peers.view.size
        return spec.kind in ("all_reduce", "all_gather") and everybody and spec.length > 0

    def notify_waiters(self, everything: bool) -> None:
        """Finish the handles of completed operations: of whole bursts, or of all if `everything`."""
        ready = self.completed if everything else [op for op in self.completed if op.burst.open == 0]
        if not ready:
            return
        self.completed = [] if everything else [op for op in self.completed if op.burst.open]
        # The last one first: a thread that waits for all of them, in order, is then woken once.
        for operation in reversed(ready):
            self.guard(operation, operation.on_complete, operation)

    def guard(self, operation: Operation, act: Callable[..., None], *args: object) -> None:
        """Call `act`; if it raises, only this operation fails, and the engine continues."""
        try:
            act(*args)
        except Exception as error:
            name = operation.compiled.spec.name
            # The text, not the exception: a log record that is kept would keep the tensors of its frames.
            log.error("rank %d: %r failed\n%s", self._peers.rank, name, traceback.format_exc())
            self.fail(operation, CommError(f"{name!r} failed here: {error!r}"))

    def fail(self, operation: Operation, error: Exception) -> None:
        if operation.failed or operation.handle.done:
            return
        operation.failed = True
        operation.burst.open -= 1
        self._failed_memory.append((operation.out, operation.own, operation.result, operation.kept, operation.buffers))
        self.by_key.pop(operation.key, None)
        self._buffers.discard_for(operation)
        operation.handle.fail(error)

    def fail_all(self, error: Exception) -> None:
        """Notify the waiters of what is complete, and fail everything else with `error`."""
        self.notify_waiters(everything=True)
        for operation in list(self.by_key.values()):
            self.fail(operation, error)

    def keep_memory_of(self, former: OpenOperations) -> None:
        """Keep the memory to which peers that are still in the former view may write."""
        self._former_memory = [*former._former_memory, former._failed_memory]


# --- slices ---

Operands = list[tuple[Span, int]]
"""Operands as (span, first element in the span)."""


class SliceExecutor:
    """Takes the steps of operations whose operands are there, by priority: folds, sends operands up and results down.

    It also offers memory to the peers of this host, and defines a spec to a peer before its first use.
    """

    def __init__(
        self, peers: Peers, memory_map: SharedMemoryMap, specs: SpecRegistry, operations: OpenOperations
    ) -> None:
        self.watcher: SliceWatcher | None = None
        self.runnable: PriorityQueue[tuple[Operation, int]] = PriorityQueue()
        """The steps that can be taken now."""
        self.notices = NoticeBatch(peers)
        self._peers = peers
        self._view = peers.view.number
        self._links = peers.links
        self._memory = memory_map.memory
        self._memory_map = memory_map
        self._specs = specs
        self._operations = operations
        self._scratch = Scratch()

    # --- sending ---

    def offer(self, operation: Operation) -> None:
        """Tell the peers of this host where our memory for this operation lies."""
        compiled, out = operation.compiled, operation.out
        registered = compiled.registered
        self._memory_map.announce(out.arena)
        if not compiled.offering:
            for peer in compiled.offer_to:
                self._specs.define(registered, self._links[peer])
                compiled.offering.append((self._links[peer], compiled.offered_bytes.get(peer, 0)))
        if len(operation.own) > 1 or (operation.own and operation.own[0] is not out):
            self._offer_parts(operation)
            return
        entry = OFFERED.pack(registered.number, operation.seq, out.arena, out.offset)
        offers = self.notices.offers
        for link, num_bytes in compiled.offering:
            link.egress_bytes += num_bytes
            offers[link] += entry

    def _offer_parts(self, operation: Operation) -> None:
        """Offer memory whose operands lie apart from the result."""
        for span in operation.own:
            self._memory_map.announce(span.arena)
        places = pack_places([span.place() for span in (operation.out, *operation.own)])
        head = self._header(FrameKind.OFFER_PARTS, operation, length=len(places))
        for link, num_bytes in operation.compiled.offering:
            link.egress_bytes += num_bytes
            link.send_control(head, places)

    def send_up(self, operation: Operation, step: SliceStep, index: int, operands: Operands) -> None:
        """Hand operands to the parent."""
        assert step.up is not None, "the root has no parent"
        link = self._links[step.up]
        self._specs.define(operation.compiled.registered, link)
        link.egress_bytes += len(operands) * step.length * operation.out.flat.dtype.itemsize
        if link.shared:
            operation.kept += (operands,)
            for span, _ in operands:
                if span.owner == self._peers.rank:
                    self._memory_map.announce(span.arena)
            places = pack_places([span.place(begin) for span, begin in operands])
            link.send_control(self._header(FrameKind.READY, operation, index, length=len(places)), places)
            return
        views = [span.bytes(begin, begin + step.length) for span, begin in operands]
        operation.left += 1
        on_sent: Callable[[], None] = lambda: self._on_sent_up(operation, step, index, operands)  # noqa: E731
        on_sent = self._watched("push", operation, index, link, on_sent)
        self._send(FrameKind.REDUCE, operation, index, link, views, on_sent)

    def _on_sent_up(self, operation: Operation, step: SliceStep, index: int, operands: Operands) -> None:
        del operands  # kept alive until here
        if self._peers.retired:
            return
        self.end_reduce_step(operation, step, index)
        self._operations.finish_part(operation)

    def end_reduce_step(self, operation: Operation, step: SliceStep, index: int) -> None:
        """End a step of a plain reduce after its operands went up, because no result comes back."""
        if operation.compiled.spec.kind == "reduce":
            self.release_children(operation, step, index)
            self._operations.finish_part(operation)

    def release_children(self, operation: Operation, step: SliceStep, index: int) -> None:
        """In a plain reduce, tell children of this host that their memory is free, because no result comes back."""
        if operation.compiled.spec.kind != "reduce":
            return
        for child, _ in step.children:
            if self._links[child].shared:
                self._notify_done(operation, index, self._links[child])

    def send_result(self, operation: Operation, step: SliceStep, index: int, already: Sequence[int] = ()) -> None:
        """Pass the result of a slice on to all listeners except those in `already`."""
        for peer in step.listeners:
            if peer in already or peer in self._peers.lost:
                continue
            link = self._links[peer]
            if not link.shared:
                self._send_to_host(operation, step, index, link)
            elif peer in operation.offers:
                self.write_result(operation, step, index, link, operation.offers[peer][0])
            else:
                operation.left += 1
                operation.owe_result(peer, index)

    def write_result(self, operation: Operation, step: SliceStep, index: int, link: PeerLink, theirs: Span) -> None:
        """Write the result of a slice into the memory of a peer on this host."""
        theirs.cut(step.begin, step.end).copy_(operation.cut(step))
        self.on_result_written(operation, step, index, link)

    def on_result_written(self, operation: Operation, step: SliceStep, index: int, link: PeerLink) -> None:
        """Notify a peer on this host that the result of a slice is in its memory."""
        link.egress_bytes += step.length * operation.out.flat.dtype.itemsize
        self._notify_done(operation, index, link)

    def _notify_done(self, operation: Operation, index: int, link: PeerLink) -> None:
        registered = operation.compiled.registered
        self._specs.define(registered, link)
        self.notices.done[link] += FINISHED.pack(registered.number, operation.seq, index)

    def _send_to_host(self, operation: Operation, step: SliceStep, index: int, link: PeerLink) -> None:
        """Send the result of a slice to another host."""
        self._specs.define(operation.compiled.registered, link)
        view = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        operation.left += 1
        link.egress_bytes += len(view)
        on_sent: Callable[[], None] = lambda: self._operations.finish_part(operation)  # noqa: E731
        on_sent = self._watched("reply", operation, index, link, on_sent)
        self._send(FrameKind.BCAST, operation, index, link, [view], on_sent)

    def send_error(self, operation: Operation, text: str) -> None:
        """Tell all members that a collective has failed."""
        payload = text.encode()
        for peer in operation.compiled.spec.members:
            if peer != self._peers.rank and peer not in self._peers.lost:
                link = self._links[peer]
                self._specs.define(operation.compiled.registered, link)
                link.send_control(self._header(FrameKind.ERROR, operation, length=len(payload)), payload)

    def _header(self, kind: FrameKind, operation: Operation, piece: int = 0, length: int = 0) -> bytes:
        number = operation.compiled.registered.number
        return header(kind, self._view, spec=number, seq=operation.seq, piece=piece, length=length)

    def _send(
        self,
        kind: FrameKind,
        operation: Operation,
        index: int,
        link: PeerLink,
        views: list[memoryview],
        on_sent: Callable[[], None],
    ) -> None:
        """Queue a slice, in fragments if the link has a fragment size, so that urgent slices need not wait for it."""
        total = sum(map(len, views))
        count = -(-total // link.fragment_bytes) if link.fragment_bytes else 1
        if count <= 1:
            link.send(operation.priority, self._header(kind, operation, index, total), views, on_sent)
            return
        view, spec, seq = self._view, operation.compiled.registered.number, operation.seq
        for begin, end in even_partition(total, count):
            extra = total << 32 | begin
            head = header(kind, view, spec=spec, seq=seq, piece=index, extra=extra, length=end - begin, flags=FRAGMENT)
            link.send(operation.priority, head, _bytes_between(views, begin, end), on_sent if end == total else None)

    def _watched(
        self, event: str, operation: Operation, index: int, link: PeerLink, on_sent: Callable[[], None]
    ) -> Callable[[], None]:
        """Return `on_sent`; with a watcher, it first reports when the slice was queued and when it had left."""
        watcher, queued_s = self.watcher, time.monotonic()
        if watcher is None:
            return on_sent

        def report() -> None:
            watcher(event, operation.compiled.spec.name, index, link.rank, queued_s, time.monotonic())
            on_sent()

        return report

    # --- folding ---

    def on_operands(self, operation: Operation, index: int) -> None:
        """Note that the operands of one more child are there for a step."""
        operation.missing[index] -= 1
        if operation.missing[index] == 0:
            self.runnable.push(operation.priority, (operation, index))

    def work(self, until_s: float) -> None:
        """Run runnable steps until `until_s`, but at least one, so that there is always progress."""
        repeated: list[tuple[Operation, int, CachedStep]] = []
        while len(self.runnable):
            operation, index = self.runnable.pop()
            cached = operation.compiled.cached_steps.get(index)
            if (
                cached is not None
                and cached.out is operation.out
                and cached.own == operation.own
                and cached.offers == operation.offers
            ):
                # The hot path of training on one host: same tensor, same memory, next step.
                if not operation.failed:
                    cached.prepared.run()
                    repeated.append((operation, index, cached))
            elif not operation.failed:
                self._operations.guard(operation, self._run_step, operation, index)
            if time.monotonic() > until_s:
                break
        # A fold evicts the interpreter from the cache, so the bookkeeping is done for many at once.
        for operation, index, cached in repeated:
            self._end_repeated(operation, index, cached)

    def _end_repeated(self, operation: Operation, index: int, cached: CachedStep) -> None:
        compiled = operation.compiled
        length = compiled.plan.steps[index].length * operation.out.flat.dtype.itemsize
        entry = FINISHED.pack(compiled.registered.number, operation.seq, index)
        done = self.notices.done
        for link in cached.links:
            link.egress_bytes += length
            done[link] += entry
        self._operations.finish_part(operation)

    def _run_step(self, operation: Operation, index: int) -> None:
        step = operation.compiled.plan.steps[index]
        if not step.reduces:
            self.send_result(operation, step, index)
            self._operations.finish_part(operation)
            return
        operands = self._operands(operation, step, index)
        if step.up is None:
            self._finish_at_root(operation, step, index, operands)
        elif step.up in self._peers.lost:
            self.end_reduce_step(operation, step, index)
        else:
            self.send_up(operation, step, index, self._fold_upwards(operation, step, operands))

    def _operands(self, operation: Operation, step: SliceStep, index: int) -> Operands:
        """Return the operands of a step in the order of the plan."""
        found = [(own, step.begin) for own in operation.own]
        for child, _ in step.children:
            if child in step.offered:
                spans = operation.offers[child]
                found += [(span, step.begin) for span in (spans[1:] or spans)]
            else:
                found += [(span, 0) for span in operation.operands[index, child]]
        return found

    def _fold_upwards(self, operation: Operation, step: SliceStep, operands: Operands) -> Operands:
        """Return what goes up: the sums that are formed here, then the operands that are not part of one."""
        found: Operands = []
        if step.sums and operation.reduce is not None:
            values = [span.cut(begin, begin + step.length) for span, begin in operands]
            for ranges in step.sums:
                flat = self._memory.empty(step.length, operation.out.flat.dtype)
                PreparedFold(operation.reduce, values, ranges, self._scratch, flat).run()
                found.append((self._memory_map.new_span(flat), 0))
        return found + [operands[i] for i in step.passed_on]

    def _finish_at_root(self, operation: Operation, step: SliceStep, index: int, operands: Operands) -> None:
        """Compute the result of a slice and pass it on."""
        out = operation.cut(step)
        # Results are written into the memory of this host's listeners block by block, while the
        # block is still in the cache; only then are the listeners notified.
        written = [peer for peer in step.listeners if self._links[peer].shared and peer in operation.offers]
        targets = [operation.offers[peer][0] for peer in written]
        if step.sums:
            assert operation.reduce is not None, "only a reduction has sums"
            prepared = self._prepare_fold(operation, operation.reduce, step, out, operands, targets)
            prepared.run()
            if len(written) == len(step.listeners) and len(step.offered) == len(step.children):
                self._cache_step(operation, index, prepared, written, [span for span, _ in operands] + targets)
        else:
            span, begin = operands[0]
            value = span.cut(begin, begin + step.length)
            for copy in (out, *(target.cut(step.begin, step.end) for target in targets)):
                if copy.data_ptr() != value.data_ptr():
                    copy.copy_(value)
        for peer in written:
            self.on_result_written(operation, step, index, self._links[peer])
        if len(written) < len(step.listeners):
            self.send_result(operation, step, index, already=written)
        self.release_children(operation, step, index)
        self._operations.finish_part(operation)

    def _prepare_fold(
        self,
        operation: Operation,
        reduce: Reducer,
        step: SliceStep,
        out: torch.Tensor,
        operands: Operands,
        targets: list[Span],
    ) -> PreparedFold:
        """Return the fold of a step, from the cache if the operands were received into the same buffers as last time."""
        last = operands[-1][0]
        others = [span for span, _ in operands[:-1]] + targets
        cached = last.cached_fold
        if cached is not None and cached.out is operation.out and _identical(cached.others, others):
            return cached.prepared
        values = [span.cut(begin, begin + step.length) for span, begin in operands]
        copies = [target.cut(step.begin, step.end) for target in targets]
        prepared = PreparedFold(reduce, values, step.sums[0], self._scratch, out, copies)
        received = bool(operation.buffers) and not last.lasting
        if received and operation.out.lasting and all(span.lasting for span in operation.own):
            last.cached_fold = CachedFold(operation.out, others, prepared)
        return prepared

    def _cache_step(
        self, operation: Operation, index: int, prepared: PreparedFold, written: list[int], used: list[Span]
    ) -> None:
        """Keep a step that only uses memory of this host, for the next time with the same memory."""
        spans = [operation.out, *used]
        if operation.compiled.spec.kind == "all_reduce" and all(span.lasting for span in spans):
            links = [self._links[peer] for peer in written]
            cached = CachedStep(operation.out, operation.own, dict(operation.offers), prepared, links)
            operation.compiled.cached_steps[index] = cached


def _bytes_between(views: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """Return the bytes [begin, end) of the concatenation of some views."""
    found, at = [], 0
    for view in views:
        if at < end and at + len(view) > begin:
            found.append(view[max(0, begin - at) : end - at])
        at += len(view)
    return found


def _identical(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
