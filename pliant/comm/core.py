"""The engine's mind: frames and submissions in, folds and frames out. One thread, no waiting.

Message-driven: whatever arrives is matched by (view, name, slice) with what was submitted here, or
kept until it is. A step of a plan is taken when its operands are there; nobody waits for a global
order, and there is no coordinator. `comm.reactor` owns the thread and the sockets' readiness. A core
lives as long as its view; memory, links and the store are the station's, and outlive it.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from operator import is_

import torch

from pliant.cluster import View
from pliant.comm import wire
from pliant.comm.intake import Intake
from pliant.comm.kernels import Recipe, Reducer, Scratch, dtype_of
from pliant.comm.link import FRAGMENT, Link, header
from pliant.comm.operation import ARRIVED, Again, Folded, Known, Landing, Operation, Span
from pliant.comm.plan import Channel, Spec, Step
from pliant.comm.reach import Reach
from pliant.comm.requests import Requests
from pliant.comm.shm import SharedMemory
from pliant.comm.slices import PriorityQueue, even_partition
from pliant.comm.store import Store
from pliant.comm.telemetry import LaneStats, Watcher
from pliant.comm.wire import Frame, Kind
from pliant.errors import CommError, Mismatch, ViewChanged, WorkerLost

log = logging.getLogger(__name__)


class Core:
    """All collectives of one rank in one view.

    `retire` is its end: it has then said all that it owed, and never again writes to any memory, its
    own or a peer's, nor answers anybody. A peer that is still in the old view may write for a while: to
    the memory of collectives that were open here, because it does not know yet. That ends when it
    enters the new view. So once a collective of all members of the new view is complete, which takes
    everybody's part in it, all of them have left the old view, and the memory is free to be used again.
    """

    def __init__(self, view: View, rank: int, memory: SharedMemory, store: Store, dirty: set[Link]) -> None:
        self.view = view
        self.rank = rank
        self.memory = memory
        self.links: dict[int, Link] = {}
        self.reach = Reach(rank, memory, self.links)
        self.requests = Requests(view.number, store)
        self.ended: Exception | None = None
        """Why nothing begins here any more."""
        self.retired = False
        self.lost: dict[int, WorkerLost] = {}
        self.given_up: list[Link] = []
        """Links to workers that others have reported lost: to be closed."""
        self.lanes = LaneStats()
        self.watcher: Watcher | None = None
        self.runnable: PriorityQueue[tuple[Operation, int]] = PriorityQueue()
        self.dirty = dirty
        """Links with something to write."""
        self.pongs: defaultdict[int, deque[Callable[[float], None]]] = defaultdict(deque)
        self._scratch = Scratch()
        self.completed: list[Operation] = []
        """Done, but nobody was told yet: waking a waiting thread for each would cost more than the work."""
        self._known: dict[Spec, Known] = {}
        self._channels: dict[Channel, int] = {}
        self._numbering = threading.Lock()
        self._theirs: dict[int, dict[int, Known]] = defaultdict(dict)
        self._operations: dict[int, Operation] = {}
        self._early: dict[int, list[Callable[[], None]]] = {}
        self._early_errors: dict[int, CommError] = {}
        self._offers: defaultdict[Link, bytearray] = defaultdict(bytearray)
        self._done: defaultdict[Link, bytearray] = defaultdict(bytearray)
        self._early_offers: dict[int, list[tuple[Link, Known, int, int]]] = {}
        self._intake = Intake(memory, self._result_place)
        self._submitted: dict[int, int] = {}
        self._buried: deque[tuple[object, ...]] = deque(maxlen=4096)
        """Memory of failed collectives: a peer that has not heard of the failure may still write to it."""
        self._inherited: list[deque[tuple[object, ...]]] = []
        """The same of earlier views, until everybody is known to have left them."""
        self._finished_by: dict[int, dict[bytes, int]] = {}
        self._moved_on: set[int] = set()
        self._moved: dict[int, ViewChanged] = {}
        """Ranks that left the job from a later view: they had finished with this one."""

    # --- what users submit ---

    def know(self, spec: Spec) -> Known:
        """What stands for this spec here; made by whoever mentions it first, the user or a peer."""
        found = self._known.get(spec)
        if found is None:
            with self._numbering:
                channel = self._channels.setdefault(spec.channel, len(self._channels))
                found = self._known.setdefault(spec, Known(spec, len(self._known), channel))
        return found

    def begin(self, operation: Operation) -> None:
        """Begin a collective; if that goes wrong, it alone fails."""
        if self.ended is not None:
            operation.handle.fail(self.ended)
            return
        self._confined(operation, self._submit, operation)

    def _submit(self, operation: Operation) -> None:
        program = operation.program
        channel = program.known.channel
        self._submitted[channel] = operation.seq + 1
        if self.lost or self._moved or self._early_errors:
            absent: dict[int, CommError] = {**self._moved, **self.lost}
            gone = next((absent[r] for r in program.spec.members if r in absent and self._needs(r, operation)), None)
            error = gone or self._early_errors.pop(operation.key, None)
            if error is not None:
                self.fail(operation, error)
                return
        self._operations[operation.key] = operation
        operation.began_s = time.monotonic()
        if operation.left == 0:
            self._complete(operation)
            return
        if program.offer_to:
            self._offer(operation)
        for index in program.ready:
            self.runnable.push(operation.priority, (operation, index))
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

    def _needs(self, rank: int, operation: Operation) -> bool:
        """Whether a lost rank is missing in this collective: not if it had finished it before it left."""
        if rank in self._moved_on:
            return False
        finished = self._finished_by.get(rank)
        return finished is None or operation.seq >= finished.get(wire.channel_tag(operation.program.spec.channel), 0)

    def _offer(self, operation: Operation) -> None:
        """Tell the peers of this host where our memory for this collective lies."""
        program, out = operation.program, operation.out
        known = program.known
        self._announce(out.arena)
        if not program.offering:
            links = [self.links[peer] for peer in program.offer_to]
            program.offering.extend(
                (self._explained(known, link), program.offered_bytes.get(link.rank, 0)) for link in links
            )
        if len(operation.own) > 1 or (operation.own and operation.own[0] is not out):
            self._offer_parts(operation)
            return
        entry = wire.OFFERED.pack(known.number, operation.seq, out.arena, out.offset)
        for link, num_bytes in program.offering:
            link.egress_bytes += num_bytes
            self._offers[link] += entry

    def _offer_parts(self, operation: Operation) -> None:
        """The same where the operands lie apart from the result."""
        for span in operation.own:
            self._announce(span.arena)
        places = wire.pack_places([span.place() for span in (operation.out, *operation.own)])
        head = self._header(Kind.PARTS, operation.program.known, operation, length=len(places))
        for link, num_bytes in operation.program.offering:
            link.egress_bytes += num_bytes
            link.say(head, places)
            self.dirty.add(link)

    def _explained(self, known: Known, link: Link) -> Link:
        self._tell_spec(known, link)
        return link

    def say_notices(self) -> None:
        """Tell the peers of this host, in one frame each, what was offered and what was done in this turn."""
        for kind, notices in ((Kind.OFFER, self._offers), (Kind.DONE, self._done)):
            if notices:
                for link, entries in notices.items():
                    if link.rank not in self.lost:
                        link.say(header(kind, self.view.number, length=len(entries)), bytes(entries))
                        self.dirty.add(link)
                notices.clear()

    def _header(
        self, kind: Kind, known: Known, operation: Operation, piece: int = 0, extra: int = 0, length: int = 0
    ) -> bytes:
        return header(
            kind, self.view.number, spec=known.number, seq=operation.seq, piece=piece, extra=extra, length=length
        )

    def _tell_spec(self, known: Known, link: Link) -> Known:
        if link.rank not in known.told:
            known.told.add(link.rank)
            payload = wire.pack_spec(known.spec)
            link.say(header(Kind.DEFINE, self.view.number, spec=known.number, length=len(payload)), payload)
            self.dirty.add(link)
        return known

    def _announce(self, arena: int) -> None:
        if arena < self.reach.told:
            return
        peers = [link for link in self.links.values() if link.shared and link.rank not in self.lost]
        self.reach.announce(arena, self.view.number, peers)
        self.dirty.update(peers)

    # --- what arrives ---

    def on_frame(self, link: Link, frame: Frame, payload: bytes) -> None:
        kind, _, _, _, _, _, piece, extra, _ = frame
        match kind:
            case Kind.OFFER:
                for number, seq, arena, offset in wire.OFFERED.iter_unpack(payload):
                    self._on_offer(link, number, seq, arena, offset)
            case Kind.DONE:
                for number, seq, index in wire.FINISHED.iter_unpack(payload):
                    self._on_done(link, number, seq, index)
            case Kind.READY:
                self._match(link, frame[4], frame[5], lambda op: self._on_ready(op, link, piece, payload))
            case Kind.PARTS:
                self._match(link, frame[4], frame[5], lambda op: self._on_parts(op, link, payload))
            case Kind.DEFINE:
                self._theirs[link.rank][frame[4]] = self.know(wire.unpack_spec(payload))
            case Kind.ARENA:
                link.take_arena(piece, extra)
                self.on_arena(link, piece)
            case Kind.ERROR:
                self._on_error(link, frame, payload)
            case Kind.LOST:
                if piece != self.rank and piece not in self.lost:
                    self.lose(piece, payload.decode(errors="replace"), reported_by=link.rank)
            case Kind.PING:
                link.say(header(Kind.PONG, self.view.number, extra=extra))
                self.dirty.add(link)
            case Kind.PONG:
                if self.pongs[link.rank]:
                    self.pongs[link.rank].popleft()((time.perf_counter_ns() - extra) / 1e9)
            case Kind.ASK:
                self.requests.on_ask(link, frame, payload)
                self.dirty.add(link)
            case Kind.BYE:
                self.on_bye(link, frame[3], payload)
            case Kind.MOVED:
                self._finished_by[link.rank] = dict(wire.TAGGED.iter_unpack(payload))
                self._go_on_without(link)
            case Kind.HEARTBEAT:
                pass
            case _:
                raise CommError(f"a frame of unknown kind {kind}: do all workers run the same version?")

    def on_arena(self, link: Link, number: int) -> None:
        """Memory of a peer is mapped now: go on with what had to wait for it."""
        for act in self.reach.arrived(link.rank, number):
            act()

    def on_bye(self, link: Link, view: int, payload: bytes) -> None:
        """A peer is about to leave, from this view or from one before or after it."""
        link.said_bye = True
        if view > self.view.number:
            self._moved_on.add(link.rank)
        else:
            told = wire.TAGGED.iter_unpack(payload) if view == self.view.number else ()
            self._finished_by[link.rank] = dict(told)

    def _match(self, link: Link, number: int, seq: int, act: Callable[[Operation], None]) -> None:
        """Let `act` happen on the operation that a frame speaks of, now or when it is submitted."""
        known = self._theirs[link.rank].get(number)
        if known is None:
            raise CommError(f"a frame speaks of spec {number}, which was never explained")
        key = known.channel << 32 | seq
        operation = self._operations.get(key)
        if operation is None:
            self._early.setdefault(key, []).append(lambda: self._match(link, number, seq, act))
        elif operation.program.known is not known:
            self._disagree(operation, link, known.spec)
        else:
            act(operation)

    def _on_offer(self, link: Link, number: int, seq: int, arena: int, offset: int) -> None:
        known = self._theirs[link.rank].get(number)
        if known is None:
            raise CommError(f"a frame speaks of spec {number}, which was never explained")
        key = known.channel << 32 | seq
        operation = self._operations.get(key)
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
            spans = program.offers[key] = [self.reach.span(key, operation.out.flat.dtype, program.plan.out_length)]
        self._take_offer(operation, link, spans)

    def _on_parts(self, operation: Operation, link: Link, payload: bytes) -> None:
        program, dtype = operation.program, operation.out.flat.dtype
        out, *own = wire.unpack_places(payload)
        operands = [self.reach.span(place, dtype, program.spec.length) for place in own]
        self._take_offer(operation, link, [self.reach.span(out, dtype, program.plan.out_length), *operands])

    def _take_offer(self, operation: Operation, link: Link, spans: list[Span]) -> None:
        """A peer's memory is known now: read what it contributes, write what it is owed."""
        program = operation.program
        operation.offers[link.rank] = spans
        link.ingress_bytes += program.read_bytes.get(link.rank, 0)
        missing = operation.missing
        for index in program.by_offer.get(link.rank, ()):
            missing[index] -= 1
            if missing[index] == 0:
                self.runnable.push(operation.priority, (operation, index))
        if operation.owed:
            for index in operation.owed.pop(link.rank, ()):
                self._push(operation, program.plan.steps[index], index, link, spans[0])
                self._finish_part(operation)

    def _on_ready(self, operation: Operation, link: Link, index: int, payload: bytes) -> None:
        step = operation.program.plan.steps[index]
        dtype = operation.out.flat.dtype
        places = wire.unpack_places(payload)
        if not self.reach.covers(places, lambda: self._on_ready(operation, link, index, payload)):
            return
        spans = [self.reach.span(place, dtype, step.length) for place in places]
        link.ingress_bytes += len(spans) * step.length * dtype.itemsize
        operation.hear(index, link.rank, spans)
        self._heard(operation, index)

    def _on_done(self, link: Link, number: int, seq: int, index: int) -> None:
        known = self._theirs[link.rank][number]
        operation = self._operations.get(known.channel << 32 | seq)
        if operation is None:
            return  # it has failed here meanwhile
        step = operation.program.plan.steps[index]
        if step.source is not None:
            link.ingress_bytes += step.length * operation.out.flat.dtype.itemsize
            operation.missing[index] = ARRIVED
            if step.listeners:
                self._tell(operation, step, index)
        else:
            self._release(operation, step, index)
        self._finish_part(operation)

    def _heard(self, operation: Operation, index: int) -> None:
        operation.missing[index] -= 1
        if operation.missing[index] == 0:
            self.runnable.push(operation.priority, (operation, index))

    # --- bulk payloads ---

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        if frame[0] == Kind.TELL:
            return self.requests.place_for(frame)
        return self._intake.place_for(link, frame)

    def _result_place(self, link: Link, frame: Frame) -> tuple[Operation, memoryview] | None:
        """Where a result belongs whose collective has begun here."""
        if frame[0] != Kind.BCAST:
            return None
        known = self._theirs[link.rank].get(frame[4])
        operation = self._operations.get(known.channel << 32 | frame[5]) if known else None
        if operation is None or operation.program.known is not known:
            return None
        step = operation.program.plan.steps[frame[6]]
        place = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        return (operation, place) if len(place) == frame[8] else None

    def on_bulk(self, link: Link, frame: Frame) -> None:
        link.ingress_bytes += frame[8]
        if frame[0] == Kind.TELL:
            self.requests.on_told(link, frame)
            return
        arrived = self._intake.arrived(link, frame)
        if arrived is None:
            return
        whole, place = arrived
        if isinstance(place, Operation):
            self._on_result(place, whole[6])
        elif place is not None and whole[0] == Kind.BCAST:
            self._match(link, whole[4], whole[5], lambda op: self._on_early_result(op, whole[6], place.scratch))
        elif place is not None:
            self._match(link, whole[4], whole[5], lambda op: self._on_operands(op, link, whole, place))

    def _on_result(self, operation: Operation, index: int) -> None:
        operation.missing[index] = ARRIVED
        if self.watcher is not None:
            now_s = time.monotonic()
            self.watcher("back", operation.program.spec.name, index, self.rank, now_s, now_s)
        self._tell(operation, operation.program.plan.steps[index], index)
        self._finish_part(operation)

    def _on_early_result(self, operation: Operation, index: int, scratch: torch.Tensor) -> None:
        step = operation.program.plan.steps[index]
        self._cut(operation, step).copy_(scratch.view(operation.out.flat.dtype))
        self._on_result(operation, index)

    def _on_operands(self, operation: Operation, link: Link, frame: Frame, landing: Landing) -> None:
        index = frame[6]
        step = operation.program.plan.steps[index]
        if landing.step is not step:
            landing.parts = self._parts(operation, step, link, landing.scratch)
            landing.step = step
        operation.hear(index, link.rank, landing.parts)
        operation.landings.append(((link.rank, frame[4], index, frame[8]), landing))
        self._heard(operation, index)

    def _parts(self, operation: Operation, step: Step, link: Link, scratch: torch.Tensor) -> list[Span]:
        """The operands in what a peer has sent for a step."""
        flat = scratch.view(operation.out.flat.dtype)
        count = next(count for child, count in step.children if child == link.rank)
        if flat.numel() != count * step.length:
            raise CommError(f"{link.worker} sent {flat.numel()} elements for {count} x {step.length}")
        arena, offset = self.memory.locate(scratch) or (-1, 0)
        size = step.length * flat.dtype.itemsize
        return [
            Span(flat[k * step.length : (k + 1) * step.length], self.rank, arena, offset + k * size)
            for k in range(count)
        ]

    # --- steps ---

    def work(self, until_s: float) -> None:
        """Take steps whose operands are all there; one at least, so that there is always progress."""
        repeated: list[tuple[Operation, int, Again]] = []
        while len(self.runnable):
            operation, index = self.runnable.pop()
            again = operation.program.again.get(index)
            if (
                again is not None
                and again.out is operation.out
                and again.own == operation.own
                and again.offers == operation.offers
            ):
                # The hot path of training on one host: same tensor, same memory, next step.
                if not operation.failed:
                    again.recipe.run()
                    repeated.append((operation, index, again))
            elif not operation.failed:
                self._confined(operation, self._step, operation, index)
            if time.monotonic() > until_s:
                break
        # A fold drives the interpreter out of the cache, so the bookkeeping is done for many at once.
        for operation, index, again in repeated:
            self._repeated(operation, index, again)

    def _step(self, operation: Operation, index: int) -> None:
        step = operation.program.plan.steps[index]
        if not step.reduces:
            self._tell(operation, step, index)
            self._finish_part(operation)
            return
        operands = self._operands(operation, step, index)
        if step.up is None:
            self._finish_at_root(operation, step, index, operands)
        else:
            self._send_up(operation, step, index, operands)

    def _operands(self, operation: Operation, step: Step, index: int) -> list[tuple[Span, int]]:
        """(span, first element) of each operand, in the plan's order."""
        found = [(own, step.begin) for own in operation.own]
        for child, _ in step.children:
            if child in step.offered:
                spans = operation.offers[child]
                found += [(span, step.begin) for span in (spans[1:] or spans)]
            else:
                found += [(span, 0) for span in operation.operands[index, child]]
        return found

    def _finish_at_root(self, operation: Operation, step: Step, index: int, operands: list[tuple[Span, int]]) -> None:
        out = self._cut(operation, step)
        # Results are written into the memory of this host's listeners block by block, while the
        # block is still in the cache; only then are they told.
        pushed = [peer for peer in step.listeners if self.links[peer].shared and peer in operation.offers]
        targets = [operation.offers[peer][0] for peer in pushed]
        if step.folds:
            assert operation.reduce is not None, "only a reduction has folds"
            recipe = self._recipe(operation, operation.reduce, step, out, operands, targets)
            recipe.run()
            if len(pushed) == len(step.listeners) and len(step.offered) == len(step.children):
                self._remember(operation, index, recipe, pushed, [span for span, _ in operands] + targets)
        else:
            span, begin = operands[0]
            value = span.cut(begin, begin + step.length)
            for copy in (out, *(target.cut(step.begin, step.end) for target in targets)):
                if copy.data_ptr() != value.data_ptr():
                    copy.copy_(value)
        for peer in pushed:
            self._note_done(operation, step, index, self.links[peer])
        if len(pushed) < len(step.listeners):
            self._tell(operation, step, index, already=pushed)
        self._release(operation, step, index)
        self._finish_part(operation)

    def _recipe(
        self,
        operation: Operation,
        reduce: Reducer,
        step: Step,
        out: torch.Tensor,
        operands: list[tuple[Span, int]],
        targets: list[Span],
    ) -> Recipe:
        """How to fold; the same as the last time where the operands have landed where they did then."""
        last = operands[-1][0]
        others = [span for span, _ in operands[:-1]] + targets
        folded = last.folded
        if folded is not None and folded.out is operation.out and _same(folded.others, others):
            return folded.recipe
        values = [span.cut(begin, begin + step.length) for span, begin in operands]
        copies = [target.cut(step.begin, step.end) for target in targets]
        recipe = Recipe(reduce, values, step.folds, self._scratch.of(out.dtype), out, copies)
        landed = bool(operation.landings) and not last.lasting
        if landed and operation.out.lasting and all(span.lasting for span in operation.own):
            last.folded = Folded(operation.out, others, recipe)
        return recipe

    def _remember(self, operation: Operation, index: int, recipe: Recipe, pushed: list[int], used: list[Span]) -> None:
        """Keep a step that is wholly a matter of this host's memory, for the next time with the same memory."""
        spans = [operation.out, *used]
        if operation.program.spec.kind == "all_reduce" and all(span.lasting for span in spans):
            links = [self.links[peer] for peer in pushed]
            program = operation.program
            program.again[index] = Again(operation.out, operation.own, dict(operation.offers), recipe, links)

    def _repeated(self, operation: Operation, index: int, again: Again) -> None:
        program = operation.program
        length = program.plan.steps[index].length * operation.out.flat.dtype.itemsize
        entry = wire.FINISHED.pack(program.known.number, operation.seq, index)
        for link in again.links:
            link.egress_bytes += length
            self._done[link] += entry
        self._finish_part(operation)

    def _send_up(self, operation: Operation, step: Step, index: int, operands: list[tuple[Span, int]]) -> None:
        assert step.up is not None, "the root has nobody above it"
        if step.up in self.lost:
            self._sent_up(operation, step, index, operands, frames=0)
            return
        link = self.links[step.up]
        items: list[tuple[Span, int]] = []
        if step.folds and operation.reduce is not None:
            flat = self.memory.empty(step.length, operation.out.flat.dtype)
            values = [span.cut(begin, begin + step.length) for span, begin in operands]
            Recipe(operation.reduce, values, step.folds, self._scratch.of(flat.dtype), flat).run()
            arena, offset = self.memory.locate(flat) or (-1, 0)
            items.append((Span(flat, self.rank, arena, offset), 0))
        items += [operands[i] for i in step.passed_on]
        known = self._tell_spec(operation.program.known, link)
        size = step.length * operation.out.flat.dtype.itemsize
        link.egress_bytes += len(items) * size
        if link.shared:
            operation.kept += (items,)
            for span, _ in items:
                if span.owner == self.rank:
                    self._announce(span.arena)
            payload = wire.pack_places([span.place(begin) for span, begin in items])
            link.say(self._header(Kind.READY, known, operation, piece=index, length=len(payload)), payload)
        else:
            views = [span.bytes(begin, begin + step.length) for span, begin in items]
            operation.left += 1
            sent: Callable[[], None] = lambda: self._sent_up(operation, step, index, items)  # noqa: E731
            self._send(
                Kind.REDUCE, known, operation, index, link, views, self._watched("push", operation, index, link, sent)
            )
        self.dirty.add(link)

    def _sent_up(self, operation: Operation, step: Step, index: int, items: object, frames: int = 1) -> None:
        del items  # kept alive until here
        if self.retired:
            return
        if operation.program.spec.kind == "reduce":
            self._release(operation, step, index)
            self._finish_part(operation)
        for _ in range(frames):
            self._finish_part(operation)

    def _release(self, operation: Operation, step: Step, index: int) -> None:
        """In a plain reduce no result comes back; children of this host must learn that their memory is free."""
        if operation.program.spec.kind != "reduce":
            return
        for child, _ in step.children:
            if self.links[child].shared:
                self._say_done(operation, index, self.links[child])

    def _tell(self, operation: Operation, step: Step, index: int, already: Sequence[int] = ()) -> None:
        """Pass the result of a slice on."""
        for peer in step.listeners:
            if peer in already or peer in self.lost:
                continue
            link = self.links[peer]
            if not link.shared:
                self._send_result(operation, step, index, link)
            elif peer in operation.offers:
                self._push(operation, step, index, link, operation.offers[peer][0])
            else:
                operation.left += 1
                operation.owe(peer, index)

    def _send_result(self, operation: Operation, step: Step, index: int, link: Link) -> None:
        known = self._tell_spec(operation.program.known, link)
        view = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        operation.left += 1
        link.egress_bytes += len(view)
        sent: Callable[[], None] = lambda: self._finish_part(operation)  # noqa: E731
        self._send(
            Kind.BCAST, known, operation, index, link, [view], self._watched("reply", operation, index, link, sent)
        )
        self.dirty.add(link)

    def _send(
        self,
        kind: Kind,
        known: Known,
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
            head = self._header(kind, known, operation, piece=index, length=total)
            link.send(operation.priority, head, views, sent)
            return
        view, spec, seq = self.view.number, known.number, operation.seq
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

    def _push(self, operation: Operation, step: Step, index: int, link: Link, theirs: Span) -> None:
        """Write the result of a slice into the memory of a peer on this host."""
        theirs.cut(step.begin, step.end).copy_(self._cut(operation, step))
        self._note_done(operation, step, index, link)

    def _note_done(self, operation: Operation, step: Step, index: int, link: Link) -> None:
        link.egress_bytes += step.length * operation.out.flat.dtype.itemsize
        self._say_done(operation, index, link)

    def _say_done(self, operation: Operation, index: int, link: Link) -> None:
        known = self._tell_spec(operation.program.known, link)
        self._done[link] += wire.FINISHED.pack(known.number, operation.seq, index)

    def _cut(self, operation: Operation, step: Step) -> torch.Tensor:
        return operation.out.cut(step.begin - operation.base, step.end - operation.base)

    def _finish_part(self, operation: Operation) -> None:
        operation.left -= 1
        if operation.left == 0 and not operation.failed:
            self._complete(operation)

    def _complete(self, operation: Operation) -> None:
        del self._operations[operation.key]
        if operation.landings:
            self._intake.recycle(operation.landings)
            operation.landings = []
        self.lanes.add(operation.program, operation.began_s, time.monotonic())
        operation.burst.open -= 1
        self.completed.append(operation)
        if self._inherited and self._proves_arrival(operation.program.spec):
            self._inherited.clear()

    def _proves_arrival(self, spec: Spec) -> bool:
        """Whether a complete collective of this kind means that everybody has entered this view."""
        return spec.kind in ("all_reduce", "all_gather") and len(spec.members) == self.view.size and spec.length > 0

    def announce(self, everything: bool) -> None:
        """Wake those who wait for what is complete: whole bursts, or `everything` there is."""
        ready = self.completed if everything else [op for op in self.completed if op.burst.open == 0]
        if not ready:
            return
        self.completed = [] if everything else [op for op in self.completed if op.burst.open]
        # The last one first: whoever waits for all of them, in order, is then woken once.
        for operation in reversed(ready):
            self._confined(operation, operation.finished, operation)

    def _confined(self, operation: Operation, act: Callable[..., None], *args: object) -> None:
        """What goes wrong in one collective is that collective's affair, not the end of all."""
        try:
            act(*args)
        except Exception as error:
            # The text, not the exception: a record that is kept would keep the tensors of its frames.
            log.error("rank %d: %r failed\n%s", self.rank, operation.program.spec.name, traceback.format_exc())
            self.fail(operation, CommError(f"{operation.program.spec.name!r} failed here: {error!r}"))

    # --- what goes wrong ---

    def _disagree(self, operation: Operation, link: Link, theirs: Spec) -> None:
        text = (
            f"{operation.program.spec.kind} {operation.program.spec.name!r}: rank {self.rank} submitted "
            f"{_describe(operation.program.spec)}, rank {link.rank} {_describe(theirs)}; "
            "one name must mean the same on every rank"
        )
        payload = text.encode()
        for peer in operation.program.spec.members:
            if peer != self.rank and peer not in self.lost:
                other = self.links[peer]
                known = self._tell_spec(operation.program.known, other)
                other.say(self._header(Kind.ERROR, known, operation, length=len(payload)), payload)
                self.dirty.add(other)
        self.fail(operation, Mismatch(text))

    def _on_error(self, link: Link, frame: Frame, payload: bytes) -> None:
        known = self._theirs[link.rank][frame[4]]
        key = known.channel << 32 | frame[5]
        error = Mismatch(payload.decode(errors="replace"))
        operation = self._operations.get(key)
        if operation is None:
            self._early_errors[key] = error
        else:
            self.fail(operation, error)

    def fail(self, operation: Operation, error: Exception) -> None:
        if operation.failed or operation.handle.done:
            return
        operation.failed = True
        operation.burst.open -= 1
        self._buried.append((operation.out, operation.own, operation.result, operation.kept, operation.landings))
        self._operations.pop(operation.key, None)
        self._intake.divert(operation)
        operation.handle.fail(error)

    def lose(self, rank: int, why: str, reported_by: int | None = None) -> None:
        """A worker is gone: end all that needs it, and tell the others."""
        if rank in self.lost:
            return
        worker = self.view.workers[rank]
        seen = why if reported_by is None else f"{why} (reported by rank {reported_by})"
        error = self.lost[rank] = WorkerLost(str(worker), rank, seen)
        log.debug("rank %d: %s", self.rank, error)
        if reported_by is not None:
            self.given_up.append(self.links[rank])
        payload = why.encode()
        for peer, link in self.links.items():
            if peer not in self.lost:
                link.say(header(Kind.LOST, self.view.number, piece=rank, length=len(payload)), payload)
                self.dirty.add(link)
        for operation in [o for o in self._operations.values() if rank in o.program.spec.members]:
            self.fail(operation, error)
        self._forget(rank, error)

    def _go_on_without(self, link: Link) -> None:
        """A worker is in another view now: what it had finished here needs nothing more from it, all else fails."""
        error = self._moved[link.rank] = ViewChanged(f"{link.worker} has moved on to another view")
        for operation in list(self._operations.values()):
            if link.rank in operation.program.spec.members and self._needs(link.rank, operation):
                self.fail(operation, error)
        self.requests.fail(error, link.rank)

    def leave(self, rank: int) -> None:
        """A worker has left in good order: what it had finished needs nothing more from it, all else fails."""
        if rank in self.lost:
            return
        error = self.lost[rank] = WorkerLost(str(self.view.workers[rank]), rank, "it left the job")
        for operation in list(self._operations.values()):
            if rank in operation.program.spec.members and self._needs(rank, operation):
                self.fail(operation, error)
        self._forget(rank, error)

    def farewell(self) -> bytes:
        """For each channel, how many collectives this rank has finished: what peers need to know when it leaves."""
        counts = dict(self._submitted)
        for operation in self._operations.values():
            channel = operation.program.known.channel
            counts[channel] = min(counts.get(channel, 0), operation.seq)
        tags = {number: wire.channel_tag(channel) for channel, number in self._channels.items()}
        return b"".join(wire.TAGGED.pack(tags[number], count) for number, count in counts.items())

    def _forget(self, rank: int, error: WorkerLost) -> None:
        self._intake.forget(rank)
        self.requests.fail(error, rank)
        for pong in self.pongs.pop(rank, ()):
            pong(float("inf"))

    def abort(self, error: Exception) -> None:
        """End all that is open with `error`, and whatever is submitted later."""
        self.ended = error
        self.fail_all(error)

    def retire(self, error: Exception) -> None:
        """The worker moves to another view. What peers were owed is queued; all else ends with `error`."""
        self.retired = True
        self.say_notices()
        # Whoever still waits for us in this view waits in vain, and must be told: it may have been asked to move on later
        # than we were, or have got further than we had.
        finished = self.farewell()
        for rank, link in self.links.items():
            if rank not in self.lost:
                link.say(header(Kind.MOVED, self.view.number, length=len(finished)), finished)
                self.dirty.add(link)
        self.abort(error)
        self.runnable.clear()
        self._early.clear()
        self._early_offers.clear()
        self._intake.close()

    def succeed(self, former: Core) -> None:
        """Begin where a retired core ended: keep the memory that peers may still write to."""
        self._inherited = [*former._inherited, former._buried]

    def fail_all(self, error: Exception) -> None:
        """The engine ends: so does everything that waits for it."""
        self.announce(everything=True)
        for pongs in self.pongs.values():
            for pong in pongs:
                pong(float("inf"))
        self.pongs.clear()
        for operation in list(self._operations.values()):
            self.fail(operation, error)
        self.requests.fail(error)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _between(views: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes [begin, end) of some runs of memory one after the other."""
    found, at = [], 0
    for view in views:
        if at < end and at + len(view) > begin:
            found.append(view[max(0, begin - at) : end - at])
        at += len(view)
    return found


def _describe(spec: Spec) -> str:
    order = "exact" if spec.exact else "fast"
    slices = f", {len(spec.portion.lanes)} slices" if spec.portion is not None else ""
    return f"{spec.length} x {dtype_of(spec.dtype)} ({spec.op}, {order}, root {spec.root}, parts {spec.parts or 1}{slices})"
