"""The state machine of all collectives of one rank in one view: frames and submissions in, folds and frames out.

It is message-driven: a step of a plan is taken when its operands are there. Nobody waits for a global order, and there
is no coordinator. It runs on one thread, which `comm.reactor` owns, and never blocks. It lives as long as its view;
memory, links and lent tensors belong to the transport and outlive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pliant.comm.byte_copies import ByteRun, OnEnd
from pliant.comm.execution import OpenOperations, ReceiveBuffers, SliceExecutor
from pliant.comm.fetching import TensorFetcher
from pliant.comm.frames import (
    FINISHED,
    KIND,
    LENGTH,
    OFFERED,
    PIECE,
    SEQ,
    SPEC,
    TAGGED,
    Frame,
    FrameKind,
    unpack_places,
)
from pliant.comm.kernels import dtype_of
from pliant.comm.memory import OperandBuffer, Span
from pliant.comm.operations import ARRIVED, Operation
from pliant.comm.peers import (
    OnPong,
    Peers,
    Pings,
    SharedMemoryMap,
    SpecRegistry,
)
from pliant.comm.plan import SliceStep, Spec
from pliant.errors import CommError, Mismatch

if TYPE_CHECKING:
    from pliant.cluster import View
    from pliant.comm.connection import PeerLink
    from pliant.comm.lending import Lending

log = logging.getLogger(__name__)


EarlyFrame = tuple[Any, ...]
"""(registered spec, function, link, arguments...) of a frame that came too early."""


class FrameMatcher:
    """Matches frames about collectives with submitted operations, and puts operands and results in their places.

    Frames are matched by channel, number and slice. A frame that comes before the operation is submitted here is kept
    until it is.
    """

    def __init__(
        self,
        peers: Peers,
        specs: SpecRegistry,
        memory_map: SharedMemoryMap,
        operations: OpenOperations,
        executor: SliceExecutor,
    ) -> None:
        self.early_errors: dict[int, CommError] = {}
        """Errors of operations that failed on a peer before they were submitted here."""
        self._peers = peers
        self._specs = specs
        self._memory_map = memory_map
        self._operations = operations
        self._by_key = operations.by_key
        self._executor = executor
        self._runnable = executor.runnable
        self._early: dict[int, list[EarlyFrame]] = {}

    def replay_early(self, operation: Operation) -> None:
        """Handle the frames that came before this operation was submitted here."""
        for registered, act, link, *args in self._early.pop(operation.key, ()):
            if operation.failed:
                return
            if operation.compiled.registered is registered:
                act(operation, link, *args)
            else:
                self._fail_mismatch(operation, link, registered.spec)

    def close(self) -> None:
        """Drop the early frames, because the view is left."""
        self._early.clear()

    def _match(self, link: PeerLink, number: int, seq: int, act: Callable[..., None], *args: object) -> None:
        """Call `act(operation, link, *args)` with the operation that a frame refers to, now or when it is submitted."""
        registered = self._specs.by_peer[link.rank].get(number)
        if registered is None:
            raise _undefined(number)
        key = registered.channel << 32 | seq
        operation = self._by_key.get(key)
        if operation is None:
            self._early.setdefault(key, []).append((registered, act, link, *args))
        elif operation.compiled.registered is not registered:
            self._fail_mismatch(operation, link, registered.spec)
        else:
            act(operation, link, *args)

    # --- memory of this host ---

    def on_offers(self, link: PeerLink, payload: bytes) -> None:
        """Handle a batch of offers: places of a peer's memory, one per operation."""
        theirs, operations, on_offer = self._specs.by_peer[link.rank], self._by_key, self._on_offer
        # `_match` inlined: there are as many offers as tensors, and most of a step's come before our own submission.
        for number, seq, arena, offset in OFFERED.iter_unpack(payload):
            registered = theirs.get(number)
            if registered is None:
                raise _undefined(number)
            key = registered.channel << 32 | seq
            operation = operations.get(key)
            if operation is None:
                self._early.setdefault(key, []).append((registered, on_offer, link, arena, offset))
            elif operation.compiled.registered is not registered:
                self._fail_mismatch(operation, link, registered.spec)
            else:
                on_offer(operation, link, arena, offset)

    def _on_offer(self, operation: Operation, link: PeerLink, arena: int, offset: int) -> None:
        compiled = operation.compiled
        key = (link.rank, arena, offset)
        spans = compiled.offers.get(key)
        if spans is None:
            span = self._memory_map.span(key, operation.out.flat.dtype, compiled.plan.out_length)
            spans = compiled.offers[key] = [span]
        self._accept_offer(operation, link, spans)

    def on_offer_parts(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        """Handle an offer for one operation whose operands lie apart from the result."""
        self._match(link, frame[SPEC], frame[SEQ], self._on_parts, payload)

    def _on_parts(self, operation: Operation, link: PeerLink, payload: bytes) -> None:
        compiled, dtype = operation.compiled, operation.out.flat.dtype
        out, *own = unpack_places(payload)
        operands = [self._memory_map.span(place, dtype, compiled.spec.length) for place in own]
        result = self._memory_map.span(out, dtype, compiled.plan.out_length)
        self._accept_offer(operation, link, [result, *operands])

    def _accept_offer(self, operation: Operation, link: PeerLink, spans: list[Span]) -> None:
        """Use a peer's memory: read its operands, and write the results that are owed to it."""
        compiled = operation.compiled
        operation.offers[link.rank] = spans
        link.ingress_bytes += compiled.read_bytes.get(link.rank, 0)
        missing = operation.missing
        for index in compiled.by_offer.get(link.rank, ()):
            missing[index] -= 1
            if missing[index] == 0:
                self._runnable.push(operation.priority, (operation, index))
        if operation.owed:
            for index in operation.owed.pop(link.rank, ()):
                self._executor.write_result(operation, compiled.plan.steps[index], index, link, spans[0])
                self._operations.finish_part(operation)

    def on_ready(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        """Handle operands of a slice that lie in the shared memory of this host."""
        self._match(link, frame[SPEC], frame[SEQ], self._ready, frame[PIECE], payload)

    def _ready(self, operation: Operation, link: PeerLink, index: int, payload: bytes) -> None:
        step = operation.compiled.plan.steps[index]
        dtype = operation.out.flat.dtype
        places = unpack_places(payload)
        if not self._memory_map.is_mapped(places, lambda: self._ready(operation, link, index, payload)):
            return
        spans = [self._memory_map.span(place, dtype, step.length) for place in places]
        link.ingress_bytes += len(spans) * step.length * dtype.itemsize
        operation.add_operands(index, link.rank, spans)
        self._executor.on_operands(operation, index)

    def on_done(self, link: PeerLink, payload: bytes) -> None:
        """Handle slices whose results a peer has written into our memory, or for which it needs our memory no more."""
        theirs, operations = self._specs.by_peer[link.rank], self._by_key
        for number, seq, index in FINISHED.iter_unpack(payload):
            operation = operations.get(theirs[number].channel << 32 | seq)
            if operation is not None:  # otherwise it has failed here meanwhile
                self._done(operation, link, index)

    def _done(self, operation: Operation, link: PeerLink, index: int) -> None:
        step = operation.compiled.plan.steps[index]
        if step.source is not None:
            link.ingress_bytes += step.length * operation.out.flat.dtype.itemsize
            operation.missing[index] = ARRIVED
            if step.listeners:
                self._executor.send_result(operation, step, index)
        else:
            self._executor.release_children(operation, step, index)
        self._operations.finish_part(operation)

    # --- payloads from other hosts ---

    def on_payload(self, link: PeerLink, frame: Frame, target: Operation | OperandBuffer) -> None:
        """Handle a whole payload, which is in the memory of the result or in a buffer."""
        index = frame[PIECE]
        if isinstance(target, Operation):
            self._on_result(target, index)
        elif frame[KIND] == FrameKind.BCAST:
            self._match(link, frame[SPEC], frame[SEQ], self._on_early_result, index, target.scratch)
        else:
            self._match(link, frame[SPEC], frame[SEQ], self._on_operands, frame, target)

    def _on_result(self, operation: Operation, index: int) -> None:
        operation.missing[index] = ARRIVED
        watcher = self._executor.watcher
        if watcher is not None:
            now_s = time.monotonic()
            watcher("back", operation.compiled.spec.name, index, self._peers.rank, now_s, now_s)
        self._executor.send_result(operation, operation.compiled.plan.steps[index], index)
        self._operations.finish_part(operation)

    def _on_early_result(self, operation: Operation, _: PeerLink, index: int, scratch: torch.Tensor) -> None:
        step = operation.compiled.plan.steps[index]
        operation.cut(step).copy_(scratch.view(operation.out.flat.dtype))
        self._on_result(operation, index)

    def _on_operands(self, operation: Operation, link: PeerLink, frame: Frame, buffer: OperandBuffer) -> None:
        index = frame[PIECE]
        step = operation.compiled.plan.steps[index]
        if buffer.step is not step:
            buffer.parts = self._operand_spans(operation, step, link, buffer.scratch)
            buffer.step = step
        operation.add_operands(index, link.rank, buffer.parts)
        operation.buffers.append(((link.rank, frame[SPEC], index, frame[LENGTH]), buffer))
        self._executor.on_operands(operation, index)

    def _operand_spans(
        self, operation: Operation, step: SliceStep, link: PeerLink, scratch: torch.Tensor
    ) -> list[Span]:
        """Return the operands in the payload that a peer has sent for a step."""
        flat = scratch.view(operation.out.flat.dtype)
        count = next(count for child, count in step.children if child == link.rank)
        if flat.numel() != count * step.length:
            raise CommError(f"{link.worker} sent {flat.numel()} elements for {count} x {step.length}")
        whole, size = self._memory_map.new_span(scratch), step.length * flat.dtype.itemsize
        return [
            Span(flat[k * step.length : (k + 1) * step.length], whole.owner, whole.arena, whole.offset + k * size)
            for k in range(count)
        ]

    # --- errors ---

    def on_error(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        """Handle a collective that has failed on a peer."""
        key = self._specs.by_peer[link.rank][frame[SPEC]].channel << 32 | frame[SEQ]
        error = Mismatch(payload.decode(errors="replace"))
        operation = self._by_key.get(key)
        if operation is None:
            self.early_errors[key] = error
        else:
            self._operations.fail(operation, error)

    def _fail_mismatch(self, operation: Operation, link: PeerLink, theirs: Spec) -> None:
        """Fail an operation, here and on all members, because a peer submitted another spec under its name."""
        ours = operation.compiled.spec
        text = (
            f"{ours.kind} {ours.name!r}: rank {self._peers.rank} submitted {_describe(ours)}, rank {link.rank} "
            f"{_describe(theirs)}; one name must mean the same on every rank"
        )
        self._executor.send_error(operation, text)
        self._operations.fail(operation, Mismatch(text))


def _undefined(number: int) -> CommError:
    return CommError(f"a frame refers to spec {number}, which was never defined")


def _describe(spec: Spec) -> str:
    slices = f", {len(spec.portion.lanes)} slices" if spec.portion is not None else ""
    return f"{spec.length} x {dtype_of(spec.dtype)} ({spec.op}, {spec.order}, root {spec.root}, parts {spec.parts or 1}{slices})"


class Collectives:
    """All collectives of one rank in one view.

    `retire` ends it. From then on it has sent everything it owed, never again writes to any memory, its own or a
    peer's, and answers nobody. A peer that is still in the old view may write for a while to the memory of collectives
    that were open here, because it does not know yet. That ends when the peer enters the new view. So once a
    collective of all members of the new view is complete, all of them have left the old view, and the memory may be
    used again.
    """

    def __init__(self, view: View, rank: int, lending: Lending) -> None:
        memory = lending.memory
        self.view = view
        self.rank = rank
        self.peers = Peers(view, rank)
        self.memory_map = SharedMemoryMap(memory, self.peers)
        self._memory = memory
        self._lending = lending
        self.specs = SpecRegistry(view.number)
        by_key: dict[int, Operation] = {}
        self._buffers = ReceiveBuffers(memory, self.specs, by_key)
        self.operations = OpenOperations(self.peers, by_key, self._buffers)
        self.executor = SliceExecutor(self.peers, self.memory_map, self.specs, self.operations)
        self._matcher = FrameMatcher(self.peers, self.specs, self.memory_map, self.operations, self.executor)
        self._fetcher = TensorFetcher(self.peers, lending)
        self.pings = Pings(self.peers)
        self.runnable = self.executor.runnable
        """The steps that can be taken now."""
        self.is_given_up = False
        """Whether a peer has counted this worker as lost. Whoever closes a connection then is not lost."""
        self.ended: Exception | None = None
        """The reason why nothing begins here any more."""
        self.links_to_drop: list[PeerLink] = []
        """Links to workers that peers have reported lost."""
        self._torn: Exception | None = None
        self._torn_callbacks: list[Callable[[Exception], None]] = []

    def release_unused(self) -> None:
        """Give memory back to the system that only earlier collectives used."""
        self._buffers.drop_spare()
        self._memory.trim()

    # --- submissions ---

    def begin(self, operation: Operation) -> None:
        """Begin an operation; if that raises, only this operation fails."""
        if self.ended is not None:
            operation.handle.fail(self.ended)
            return
        self.operations.guard(operation, self._begin, operation)

    def _begin(self, operation: Operation) -> None:
        compiled, operations, matcher = operation.compiled, self.operations, self._matcher
        operations.num_begun[compiled.registered.channel] = operation.seq + 1
        if self.peers.absent or matcher.early_errors:
            absent = self.peers.why_incomplete(compiled.spec, operation.seq)
            error = absent or matcher.early_errors.pop(operation.key, None)
            if error is not None:
                operations.fail(operation, error)
                return
        operations.by_key[operation.key] = operation
        operation.began_s = time.monotonic()
        if operation.left == 0:
            operations.complete(operation)
            return
        if compiled.offer_to:
            self.executor.offer(operation)
        for index in compiled.ready:
            self.runnable.push(operation.priority, (operation, index))
        matcher.replay_early(operation)

    def fetch(self, ranks: Sequence[int], name: str, target: ByteRun, on_end: OnEnd) -> None:
        """Fetch what these ranks lend under a name into `target`."""
        if self.ended is not None:
            on_end(self.ended)
        else:
            self._fetcher.fetch(ranks, name, target, on_end)

    def ping(self, on_pong: OnPong) -> None:
        """Measure the round-trip time to every peer."""
        for rank, link in self.peers.links.items():
            if self.ended is not None:
                on_pong(rank, float("inf"))
            else:
                self.pings.send(link, on_pong)

    def work(self, until_s: float) -> None:
        """Run runnable steps until `until_s`, and send the peers of this host the notices of this turn."""
        self.executor.work(until_s)
        self.executor.notices.send()

    # --- arriving frames ---

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        kind, _, _, _, number, _, piece, extra, _ = frame
        match kind:
            case FrameKind.OFFER:
                self._matcher.on_offers(link, payload)
            case FrameKind.DONE:
                self._matcher.on_done(link, payload)
            case FrameKind.READY:
                self._matcher.on_ready(link, frame, payload)
            case FrameKind.OFFER_PARTS:
                self._matcher.on_offer_parts(link, frame, payload)
            case FrameKind.DEFINE:
                self.specs.on_definition(link, number, Spec.unpack(payload))
            case FrameKind.ERROR:
                self._matcher.on_error(link, frame, payload)
            case FrameKind.LOST:
                self.is_given_up = self.is_given_up or piece == self.rank
                if piece != self.rank and piece not in self.peers.lost:
                    self.on_lost(piece, payload.decode(errors="replace"), reported_by=link.rank)
            case FrameKind.PONG:
                self.pings.on_pong(link, extra)
            case FrameKind.REQUEST:
                self._lending.on_request(link, frame, payload, self.memory_map)
            case FrameKind.LENT:
                self._fetcher.on_lent(link, frame)
            case FrameKind.MOVED:
                error = self.peers.on_moved(link, payload)
                self._tear(error)
                self._fail_dependents(link.rank, error)
                self._fetcher.fail(error, link.rank)
            case _:
                link.default_receiver.on_frame(link, frame, payload)

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview | None:
        if frame[KIND] == FrameKind.RESPONSE:
            return self._fetcher.place_for(link, frame)
        return self._buffers.place_for(link, frame)

    def on_bulk(self, link: PeerLink, frame: Frame) -> None:
        link.ingress_bytes += frame[LENGTH]
        if frame[KIND] == FrameKind.RESPONSE:
            self._fetcher.on_response(link, frame)
            return
        arrived = self._buffers.on_payload(link, frame)
        if arrived is not None:
            whole, target = arrived
            if target is not None:
                self._matcher.on_payload(link, whole, target)

    # --- workers that leave ---

    def on_lost(self, rank: int, why: str, reported_by: int | None = None) -> None:
        """Handle the loss of a worker: fail every collective that it takes part in, and tell the other peers."""
        if rank in self.peers.lost:
            return
        error = self.peers.mark_lost(rank, why if reported_by is None else f"{why} (reported by rank {reported_by})")
        log.debug("rank %d: %s", self.rank, error)
        if reported_by is not None:
            self.links_to_drop.append(self.peers.links[rank])
        if not self.is_given_up:
            self.peers.send_to_all(FrameKind.LOST, why.encode(), piece=rank)
        self._tear(error)
        for operation in self.operations.involving(rank):
            self.operations.fail(operation, error)
        self._drop_peer(rank, error)

    def on_left(self, rank: int) -> None:
        """Handle a worker that left in good order: collectives that it had not finished fail."""
        if rank in self.peers.lost:
            return
        error = self.peers.mark_lost(rank, "it left the job")
        self._tear(error)
        self._fail_dependents(rank, error)
        self._drop_peer(rank, error)

    def add_torn_callback(self, callback: Callable[[Exception], None]) -> None:
        """Have `callback` called once, when not all workers take part in this view any more; at once if that is so."""
        if self._torn is not None:
            callback(self._torn)
        else:
            self._torn_callbacks.append(callback)

    def _tear(self, error: Exception) -> None:
        if self._torn is None:
            self._torn = error
            for callback in self._torn_callbacks:
                callback(error)

    def _fail_dependents(self, rank: int, error: Exception) -> None:
        for operation in self.operations.involving(rank):
            if self.peers.is_missing(rank, operation.compiled.spec, operation.seq):
                self.operations.fail(operation, error)

    def _drop_peer(self, rank: int, error: Exception) -> None:
        self._buffers.drop_peer(rank)
        self._fetcher.fail(error, rank)
        self.pings.cancel(rank)

    # --- the end ---

    def pack_finished(self) -> bytes:
        """Return the number of finished collectives of each channel, which peers need to know when this rank leaves."""
        tags = self.specs.channel_tags()
        return b"".join(TAGGED.pack(tags[channel], count) for channel, count in self.operations.num_finished().items())

    def abort(self, error: Exception) -> None:
        """Fail everything that is open, and everything that is submitted later, with `error`."""
        self.ended = error
        self.fail_all(error)

    def fail_all(self, error: Exception) -> None:
        """Fail everything that is open with `error`."""
        self._tear(error)
        self.operations.fail_all(error)
        self.pings.cancel()
        self._fetcher.fail(error)

    def retire(self, error: Exception) -> None:
        """End, because the worker moves to another view: queue what peers are owed, and fail the rest with `error`."""
        self.peers.retired = True
        self.executor.notices.send()
        # A peer that still waits for us in this view waits in vain and must be told: it may have been asked to move on
        # later than we were, or it may have got further than we had.
        self.peers.send_to_all(FrameKind.MOVED, self.pack_finished())
        self.abort(error)
        self.runnable.clear()
        self._matcher.close()
        self._buffers.close()
        self.specs.close()
        self.memory_map.close()

    def take_over_from(self, former: Collectives) -> None:
        """Keep the memory of a retired view to which peers may still write."""
        self.operations.keep_memory_of(former.operations)
