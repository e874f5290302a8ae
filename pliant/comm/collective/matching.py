"""What peers say of a collective, matched with what was submitted here; what comes too early is kept until it is.

By channel, number and slice: nobody waits for a global order, and there is no coordinator. Engine's thread
only. What is done with operands that are all there is `steps`' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pliant.comm.collective.delivery import Delivery
from pliant.comm.collective.ledger import Ledger
from pliant.comm.collective.operation import ARRIVED, Operation
from pliant.comm.collective.peers import Peers
from pliant.comm.collective.program import Known
from pliant.comm.collective.reach import Reach
from pliant.comm.collective.span import Landing, Span
from pliant.comm.collective.steps import Steps
from pliant.comm.collective.vocabulary import Vocabulary
from pliant.comm.kernels import dtype_of
from pliant.comm.plan import Spec, Step
from pliant.comm.shm import SharedMemory
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import FINISHED, KIND, LENGTH, OFFERED, PIECE, SEQ, SPEC, Frame, Kind, unpack_places
from pliant.errors import CommError, Mismatch


class Matching:
    """Frames about collectives in, operands and results in their places."""

    def __init__(
        self,
        peers: Peers,
        memory: SharedMemory,
        vocabulary: Vocabulary,
        reach: Reach,
        ledger: Ledger,
        delivery: Delivery,
        steps: Steps,
    ) -> None:
        self.early_errors: dict[int, CommError] = {}
        """Of collectives that have failed elsewhere before they were submitted here."""
        self._peers = peers
        self._memory = memory
        self._vocabulary = vocabulary
        self._reach = reach
        self._ledger = ledger
        self._open = ledger.open
        self._delivery = delivery
        self._steps = steps
        self._runnable = steps.runnable
        self._early: dict[int, list[Callable[[], None]]] = {}
        self._early_offers: dict[int, list[tuple[Link, Known, int, int]]] = {}

    def catch_up(self, operation: Operation) -> None:
        """A collective has begun here: take what has come for it before."""
        key = operation.key
        if key in self._early_offers:
            for link, known, arena, offset in self._early_offers.pop(key):
                if operation.program.known is known:
                    self._offered(operation, link, arena, offset)
                elif not operation.failed:
                    self._disagree(operation, link, known.spec)
        if key in self._early:
            for arrival in self._early.pop(key):
                arrival()

    def close(self) -> None:
        """The view is left: nothing that came early begins any more."""
        self._early.clear()
        self._early_offers.clear()

    def _match(self, link: Link, number: int, seq: int, act: Callable[[Operation], None]) -> None:
        """Let `act` happen on the operation that a frame speaks of, now or when it is submitted."""
        known = self._vocabulary.theirs[link.rank].get(number)
        if known is None:
            raise _unexplained(number)
        key = known.channel << 32 | seq
        operation = self._open.get(key)
        if operation is None:
            self._early.setdefault(key, []).append(lambda: self._match(link, number, seq, act))
        elif operation.program.known is not known:
            self._disagree(operation, link, known.spec)
        else:
            act(operation)

    # --- memory of this host ---

    def on_offers(self, link: Link, payload: bytes) -> None:
        """A peer says where its memory lies, for one collective after the other."""
        theirs, operations = self._vocabulary.theirs[link.rank], self._open
        # `_match` in place: there are as many as tensors, and most of a step's are here before ours are.
        for number, seq, arena, offset in OFFERED.iter_unpack(payload):
            known = theirs.get(number)
            if known is None:
                raise _unexplained(number)
            key = known.channel << 32 | seq
            operation = operations.get(key)
            if operation is None:
                self._early_offers.setdefault(key, []).append((link, known, arena, offset))
            elif operation.program.known is not known:
                self._disagree(operation, link, known.spec)
            else:
                self._offered(operation, link, arena, offset)

    def _offered(self, operation: Operation, link: Link, arena: int, offset: int) -> None:
        program = operation.program
        key = (link.rank, arena, offset)
        spans = program.offers.get(key)
        if spans is None:
            spans = program.offers[key] = [self._reach.span(key, operation.out.flat.dtype, program.plan.out_length)]
        self._take_offer(operation, link, spans)

    def on_parts(self, link: Link, frame: Frame, payload: bytes) -> None:
        """The same for one collective, with operands that lie apart from the result."""
        self._match(link, frame[SPEC], frame[SEQ], lambda operation: self._offered_parts(operation, link, payload))

    def _offered_parts(self, operation: Operation, link: Link, payload: bytes) -> None:
        program, dtype = operation.program, operation.out.flat.dtype
        out, *own = unpack_places(payload)
        operands = [self._reach.span(place, dtype, program.spec.length) for place in own]
        self._take_offer(operation, link, [self._reach.span(out, dtype, program.plan.out_length), *operands])

    def _take_offer(self, operation: Operation, link: Link, spans: list[Span]) -> None:
        """A peer's memory is known now: read what it contributes, write what it is owed."""
        program = operation.program
        operation.offers[link.rank] = spans
        link.ingress_bytes += program.read_bytes.get(link.rank, 0)
        missing = operation.missing
        for index in program.by_offer.get(link.rank, ()):
            missing[index] -= 1
            if missing[index] == 0:
                self._runnable.push(operation.priority, (operation, index))
        if operation.owed:
            for index in operation.owed.pop(link.rank, ()):
                self._delivery.push(operation, program.plan.steps[index], index, link, spans[0])
                self._ledger.finish_part(operation)

    def on_ready(self, link: Link, frame: Frame, payload: bytes) -> None:
        """Operands of a slice lie in the memory of this host."""
        index = frame[PIECE]
        self._match(link, frame[SPEC], frame[SEQ], lambda operation: self._ready(operation, link, index, payload))

    def _ready(self, operation: Operation, link: Link, index: int, payload: bytes) -> None:
        step = operation.program.plan.steps[index]
        dtype = operation.out.flat.dtype
        places = unpack_places(payload)
        if not self._reach.covers(places, lambda: self._ready(operation, link, index, payload)):
            return
        spans = [self._reach.span(place, dtype, step.length) for place in places]
        link.ingress_bytes += len(spans) * step.length * dtype.itemsize
        operation.hear(index, link.rank, spans)
        self._steps.heard(operation, index)

    def on_done(self, link: Link, payload: bytes) -> None:
        """A peer has written results into our memory, or needs it no more."""
        theirs, operations = self._vocabulary.theirs[link.rank], self._open
        for number, seq, index in FINISHED.iter_unpack(payload):
            operation = operations.get(theirs[number].channel << 32 | seq)
            if operation is not None:  # else it has failed here meanwhile
                self._done(operation, link, index)

    def _done(self, operation: Operation, link: Link, index: int) -> None:
        step = operation.program.plan.steps[index]
        if step.source is not None:
            link.ingress_bytes += step.length * operation.out.flat.dtype.itemsize
            operation.missing[index] = ARRIVED
            if step.listeners:
                self._delivery.tell(operation, step, index)
        else:
            self._delivery.release(operation, step, index)
        self._ledger.finish_part(operation)

    # --- payloads from other hosts ---

    def on_payload(self, link: Link, frame: Frame, target: Operation | Landing) -> None:
        """All of a payload is in its place: in the collective's result, or where it has landed."""
        index = frame[PIECE]
        if isinstance(target, Operation):
            self._on_result(target, index)
        elif frame[KIND] == Kind.BCAST:
            scratch = target.scratch
            self._match(
                link, frame[SPEC], frame[SEQ], lambda operation: self._on_early_result(operation, index, scratch)
            )
        else:
            self._match(
                link, frame[SPEC], frame[SEQ], lambda operation: self._on_operands(operation, link, frame, target)
            )

    def _on_result(self, operation: Operation, index: int) -> None:
        operation.missing[index] = ARRIVED
        watcher = self._delivery.watcher
        if watcher is not None:
            now_s = time.monotonic()
            watcher("back", operation.program.spec.name, index, self._peers.rank, now_s, now_s)
        self._delivery.tell(operation, operation.program.plan.steps[index], index)
        self._ledger.finish_part(operation)

    def _on_early_result(self, operation: Operation, index: int, scratch: torch.Tensor) -> None:
        step = operation.program.plan.steps[index]
        operation.cut(step).copy_(scratch.view(operation.out.flat.dtype))
        self._on_result(operation, index)

    def _on_operands(self, operation: Operation, link: Link, frame: Frame, landing: Landing) -> None:
        index = frame[PIECE]
        step = operation.program.plan.steps[index]
        if landing.step is not step:
            landing.parts = self._parts(operation, step, link, landing.scratch)
            landing.step = step
        operation.hear(index, link.rank, landing.parts)
        operation.landings.append(((link.rank, frame[SPEC], index, frame[LENGTH]), landing))
        self._steps.heard(operation, index)

    def _parts(self, operation: Operation, step: Step, link: Link, scratch: torch.Tensor) -> list[Span]:
        """The operands in what a peer has sent for a step."""
        flat = scratch.view(operation.out.flat.dtype)
        count = next(count for child, count in step.children if child == link.rank)
        if flat.numel() != count * step.length:
            raise CommError(f"{link.worker} sent {flat.numel()} elements for {count} x {step.length}")
        arena, offset = self._memory.locate(scratch) or (0, 0)
        size = step.length * flat.dtype.itemsize
        return [
            Span(flat[k * step.length : (k + 1) * step.length], self._peers.rank, arena, offset + k * size)
            for k in range(count)
        ]

    # --- what goes wrong ---

    def on_error(self, link: Link, frame: Frame, payload: bytes) -> None:
        """A collective has failed on a peer."""
        key = self._vocabulary.theirs[link.rank][frame[SPEC]].channel << 32 | frame[SEQ]
        error = Mismatch(payload.decode(errors="replace"))
        operation = self._open.get(key)
        if operation is None:
            self.early_errors[key] = error
        else:
            self._ledger.fail(operation, error)

    def _disagree(self, operation: Operation, link: Link, theirs: Spec) -> None:
        ours = operation.program.spec
        text = (
            f"{ours.kind} {ours.name!r}: rank {self._peers.rank} submitted {_describe(ours)}, rank {link.rank} "
            f"{_describe(theirs)}; one name must mean the same on every rank"
        )
        self._delivery.say_error(operation, text)
        self._ledger.fail(operation, Mismatch(text))


def _unexplained(number: int) -> CommError:
    return CommError(f"a frame speaks of spec {number}, which was never explained")


def _describe(spec: Spec) -> str:
    order = "exact" if spec.exact else "fast"
    slices = f", {len(spec.portion.lanes)} slices" if spec.portion is not None else ""
    return f"{spec.length} x {dtype_of(spec.dtype)} ({spec.op}, {order}, root {spec.root}, parts {spec.parts or 1}{slices})"
