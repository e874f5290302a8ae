"""What peers say of a collective, matched with what was submitted here; what comes too early is kept until it is.

By channel, number and slice: nobody waits for a global order, and there is no coordinator. Engine's thread
only. What is done with operands that are all there is `steps`' business.

The engine's mind: frames and submissions in, folds and frames out. One thread, no waiting.

Message-driven: a step of a plan is taken when its operands are there; nobody waits for a global order,
and there is no coordinator. Here everything comes in, and here it is decided what the loss of a worker
and the end of a view mean; the parts do the rest: `matching` what peers say, `steps` the folding,
`delivery` what is sent, `ledger` what has ended. `comm.reactor` owns the thread and the sockets'
readiness. A core lives as long as its view; memory, links and the store are the station's, and outlive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pliant.comm.execution import Delivery, Intake, Ledger, Steps
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
    Kind,
    header,
    unpack_places,
)
from pliant.comm.kernels import dtype_of
from pliant.comm.memory import Landing, SharedMemory, Span, Store
from pliant.comm.operations import ARRIVED, Known, Operation
from pliant.comm.peers import Answer, Answered, Notices, Peers, Pings, Reach, Requests, Vocabulary
from pliant.comm.plan import Spec, Step
from pliant.errors import CommError, Mismatch

if TYPE_CHECKING:
    from pliant.cluster import View
    from pliant.comm.connection import Link
    from pliant.comm.telemetry import Watcher


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


log = logging.getLogger(__name__)


class Core:
    """All collectives of one rank in one view.

    `retire` is its end: it has then said all that it owed, and never again writes to any memory, its
    own or a peer's, nor answers anybody. A peer that is still in the old view may write for a while: to
    the memory of collectives that were open here, because it does not know yet. That ends when it
    enters the new view. So once a collective of all members of the new view is complete, which takes
    everybody's part in it, all of them have left the old view, and the memory is free to be used again.
    """

    def __init__(self, view: View, rank: int, memory: SharedMemory, store: Store) -> None:
        self.view = view
        self.rank = rank
        self.peers = Peers(view, rank)
        self._vocabulary = Vocabulary(view.number)
        self.reach = Reach(memory, self.peers)
        operations: dict[int, Operation] = {}
        self._intake = Intake(memory, self._vocabulary, operations)
        self._ledger = Ledger(self.peers, operations, self._intake)
        self._notices = Notices(self.peers)
        self._delivery = Delivery(self.peers, self.reach, self._vocabulary, self._notices, self._ledger)
        self._steps = Steps(self.peers, memory, self.reach, self._notices, self._ledger, self._delivery)
        self._matching = Matching(
            self.peers, memory, self._vocabulary, self.reach, self._ledger, self._delivery, self._steps
        )
        self._requests = Requests(self.peers, store)
        self._pings = Pings(self.peers)
        self.runnable = self._steps.runnable
        """Steps that can be taken now."""
        self.lanes = self._ledger.lanes
        self.ended: Exception | None = None
        """Why nothing begins here any more."""
        self.given_up: list[Link] = []
        """Links to workers that others have reported lost: to be closed."""

    # --- what users submit ---

    def know(self, spec: Spec) -> Known:
        """What stands for this spec here; any thread."""
        return self._vocabulary.know(spec)

    def begin(self, operation: Operation) -> None:
        """Begin a collective; if that goes wrong, it alone fails."""
        if self.ended is not None:
            operation.handle.fail(self.ended)
            return
        self._ledger.confined(operation, self._begin, operation)

    def _begin(self, operation: Operation) -> None:
        program, ledger, matching = operation.program, self._ledger, self._matching
        ledger.submitted[program.known.channel] = operation.seq + 1
        if self.peers.absent or matching.early_errors:
            gone = self.peers.missing_in(program.spec, operation.seq)
            error = gone or matching.early_errors.pop(operation.key, None)
            if error is not None:
                ledger.fail(operation, error)
                return
        ledger.open[operation.key] = operation
        operation.began_s = time.monotonic()
        if operation.left == 0:
            ledger.complete(operation)
            return
        if program.offer_to:
            self._delivery.offer(operation)
        for index in program.ready:
            self.runnable.push(operation.priority, (operation, index))
        matching.catch_up(operation)

    def request(self, rank: int, name: str, version: int | None, out: torch.Tensor, answer: Answer) -> None:
        """Fetch what a rank has stored into the flat CPU tensor `out`."""
        if self.ended is not None:
            answer(self.ended)
        else:
            self._requests.ask(rank, name, version, out, answer)

    def ping(self, answered: Answered) -> None:
        """Measure the way to every peer and back."""
        for rank, link in self.peers.links.items():
            if self.ended is not None:
                answered(rank, float("inf"))
            else:
                self._pings.send(link, answered)

    def unanswered(self) -> list[int]:
        """Who has not answered a ping yet; any thread."""
        return self._pings.waiting_for()

    # --- what is to be done in a turn ---

    def work(self, until_s: float) -> None:
        """Take steps that can be taken, and tell the peers of this host what was offered and done."""
        self._steps.work(until_s)
        self._notices.say()

    @property
    def has_news(self) -> bool:
        """Whether something is complete and nobody was told."""
        return bool(self._ledger.completed)

    def announce(self, everything: bool) -> None:
        """Wake those who wait for what is complete: whole bursts, or `everything` there is."""
        self._ledger.announce(everything)

    def watch(self, watcher: Watcher | None) -> None:
        """Have `watcher` told of every slice that goes out and comes back."""
        self._delivery.watcher = watcher

    # --- what arrives ---

    def on_frame(self, link: Link, frame: Frame, payload: bytes) -> None:
        kind, _, _, view, number, _, piece, extra, _ = frame
        match kind:
            case Kind.OFFER:
                self._matching.on_offers(link, payload)
            case Kind.DONE:
                self._matching.on_done(link, payload)
            case Kind.READY:
                self._matching.on_ready(link, frame, payload)
            case Kind.PARTS:
                self._matching.on_parts(link, frame, payload)
            case Kind.DEFINE:
                self._vocabulary.learn(link, number, Spec.unpack(payload))
            case Kind.ARENA:
                link.take_arena(piece, extra)
                self.reach.on_arena(link.rank, piece)
            case Kind.ERROR:
                self._matching.on_error(link, frame, payload)
            case Kind.LOST:
                if piece != self.rank and piece not in self.peers.lost:
                    self.lose(piece, payload.decode(errors="replace"), reported_by=link.rank)
            case Kind.PING:
                link.say(header(Kind.PONG, self.view.number, extra=extra))
            case Kind.PONG:
                self._pings.on_pong(link, extra)
            case Kind.ASK:
                self._requests.on_ask(link, frame, payload)
            case Kind.BYE:
                self.peers.on_bye(link, view, payload)
            case Kind.MOVED:
                error = self.peers.on_moved(link, payload)
                self._fail_what_needs(link.rank, error)
                self._requests.fail(error, link.rank)
            case Kind.HEARTBEAT:
                pass
            case _:
                raise CommError(f"a frame of unknown kind {kind}: do all workers run the same version?")

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        if frame[KIND] == Kind.TELL:
            return self._requests.place_for(frame)
        return self._intake.place_for(link, frame)

    def on_bulk(self, link: Link, frame: Frame) -> None:
        link.ingress_bytes += frame[LENGTH]
        if frame[KIND] == Kind.TELL:
            self._requests.on_told(link, frame)
            return
        arrived = self._intake.arrived(link, frame)
        if arrived is not None:
            whole, target = arrived
            if target is not None:
                self._matching.on_payload(link, whole, target)

    # --- workers that go ---

    def lose(self, rank: int, why: str, reported_by: int | None = None) -> None:
        """A worker is gone: end all that it is part of, and tell the others."""
        if rank in self.peers.lost:
            return
        error = self.peers.lose(rank, why if reported_by is None else f"{why} (reported by rank {reported_by})")
        log.debug("rank %d: %s", self.rank, error)
        if reported_by is not None:
            self.given_up.append(self.peers.links[rank])
        self.peers.tell_all(Kind.LOST, why.encode(), piece=rank)
        for operation in self._ledger.with_member(rank):
            self._ledger.fail(operation, error)
        self._forget(rank, error)

    def leave(self, rank: int) -> None:
        """A worker has left in good order: what it had finished needs nothing more from it, all else fails."""
        if rank in self.peers.lost:
            return
        error = self.peers.lose(rank, "it left the job")
        self._fail_what_needs(rank, error)
        self._forget(rank, error)

    def _fail_what_needs(self, rank: int, error: Exception) -> None:
        for operation in self._ledger.with_member(rank):
            if self.peers.needs(rank, operation.program.spec, operation.seq):
                self._ledger.fail(operation, error)

    def _forget(self, rank: int, error: Exception) -> None:
        self._intake.forget(rank)
        self._requests.fail(error, rank)
        self._pings.give_up(rank)

    # --- the end ---

    def farewell(self) -> bytes:
        """For each channel, how many collectives this rank has finished: what peers need to know when it leaves."""
        tags = self._vocabulary.tags()
        return b"".join(TAGGED.pack(tags[channel], count) for channel, count in self._ledger.finished().items())

    def abort(self, error: Exception) -> None:
        """End all that is open with `error`, and whatever is submitted later."""
        self.ended = error
        self.fail_all(error)

    def fail_all(self, error: Exception) -> None:
        """The engine ends: so does everything that waits for it."""
        self._ledger.fail_all(error)
        self._pings.give_up()
        self._requests.fail(error)

    def retire(self, error: Exception) -> None:
        """The worker moves to another view. What peers were owed is queued; all else ends with `error`."""
        self.peers.retired = True
        self._notices.say()
        # Whoever still waits for us in this view waits in vain, and must be told: it may have been asked to move on later
        # than we were, or have got further than we had.
        self.peers.tell_all(Kind.MOVED, self.farewell())
        self.abort(error)
        self.runnable.clear()
        self._matching.close()
        self._intake.close()

    def succeed(self, former: Core) -> None:
        """Begin where a retired core ended: keep the memory that peers may still write to."""
        self._ledger.inherit(former._ledger)
