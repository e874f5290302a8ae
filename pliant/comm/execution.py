"""Where what peers send is put, before it is used: straight into a collective's result, or where operands land.

A payload may come in fragments, between which others come. What was meant for a collective that has failed goes nowhere:
its memory may be somebody else's by then. Landings are kept from step to step.

The collectives that this rank has begun in a view, until whoever waits for them is told how they ended.

Also what must be kept of those that failed. Engine's thread only. What they are waiting for is not known here.

What one rank sends in its collectives: where its memory lies, operands up, results down.

Within a host nothing is sent but places in memory: results are written where the peer wants them, and it
is told. Between hosts payloads are queued on links, in fragments where something more urgent shall not
have to wait. What is folded before it goes up is `steps`' business.

The steps that can be taken now, by priority: fold what is there, and hand on what comes of it.

A step is runnable when all its operands are there; `matching` notices that. Where the same memory is
folded at every training step, all that was found out the last time is used again.
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
    Kind,
    header,
    pack_places,
)
from pliant.comm.kernels import Recipe, Reducer, Scratch
from pliant.comm.memory import Folded, Landing, SharedMemory, Span
from pliant.comm.operations import Again, LandingKey, Operation, PriorityQueue
from pliant.comm.order import even_partition
from pliant.comm.telemetry import LaneStats, Watcher
from pliant.errors import CommError

if TYPE_CHECKING:
    from pliant.comm.connection import Link
    from pliant.comm.peers import Notices, Peers, Reach, Vocabulary
    from pliant.comm.plan import Spec, Step

LANDING_BYTES = 256 << 20
"""At most this much memory for operands is kept from step to step."""
Target = Operation | Landing


@dataclass(slots=True, eq=False)
class Gathering:
    """A payload that comes in fragments."""

    view: memoryview | None
    """Where it goes; None: nowhere."""
    target: Target | None
    """What it is for."""
    total: int
    missing: int


class Intake:
    """The payloads of one core, one at a time per link."""

    def __init__(self, memory: SharedMemory, vocabulary: Vocabulary, operations: Mapping[int, Operation]) -> None:
        self._memory = memory
        self._vocabulary = vocabulary
        self._operations = operations
        """The open ones, by key."""
        self._arriving: dict[Link, Target | Gathering | None] = {}
        """What the payload of each link is for; None: for nothing any more."""
        self._gathering: dict[tuple[int, int, int, int, int], Gathering] = {}
        """By peer, kind, spec, number and slice."""
        self._landings: dict[LandingKey, Landing] = {}
        """Not in use now."""
        self._landing_bytes = 0

    def place_for(self, link: Link, frame: Frame) -> memoryview | None:
        """Where the payload of this frame goes; None: nowhere."""
        if frame[FLAGS] != FRAGMENT:
            return self._place(link, frame)
        total, begin = frame[EXTRA] >> 32, frame[EXTRA] & 0xFFFFFFFF
        key = _key(link, frame)
        gathering = self._gathering.get(key)
        if gathering is None:
            view = self._place(link, (*frame[:8], total))
            target = self._arriving[link]
            assert not isinstance(target, Gathering), "that is what is made here"
            gathering = self._gathering[key] = Gathering(view, target, total, total)
        self._arriving[link] = gathering
        return None if gathering.view is None else gathering.view[begin : begin + frame[LENGTH]]

    def _place(self, link: Link, frame: Frame) -> memoryview:
        """Where a payload belongs as a whole."""
        found = self._result_place(link, frame)
        if found is not None:
            self._arriving[link] = found[0]
            return found[1]
        length = frame[LENGTH]
        landing = self._landings.pop((link.rank, frame[SPEC], frame[PIECE], length), None)
        if landing is None:
            landing = Landing(self._memory.empty(length, torch.uint8))
        else:
            self._landing_bytes -= length
        self._arriving[link] = landing
        return landing.bytes

    def _result_place(self, link: Link, frame: Frame) -> tuple[Operation, memoryview] | None:
        """The collective whose result a payload is, and the result's place; None where it is an operand, or comes early."""
        if frame[KIND] != Kind.BCAST:
            return None
        known = self._vocabulary.theirs[link.rank].get(frame[SPEC])
        operation = self._operations.get(known.channel << 32 | frame[SEQ]) if known else None
        if operation is None or operation.program.known is not known:
            return None
        step = operation.program.plan.steps[frame[PIECE]]
        place = operation.out.bytes(step.begin - operation.base, step.end - operation.base)
        return (operation, place) if len(place) == frame[LENGTH] else None

    def arrived(self, link: Link, frame: Frame) -> tuple[Frame, Target | None] | None:
        """A payload is in its place: the frame it came with, as a whole, and what it is for. None: there are fragments to
        come."""
        target = self._arriving.pop(link)
        if not isinstance(target, Gathering):
            return frame, target
        target.missing -= frame[LENGTH]
        if target.missing:
            return None
        del self._gathering[_key(link, frame)]
        return (*frame[:7], 0, target.total), target.target

    def divert(self, operation: Operation) -> None:
        """What is on its way to this collective goes nowhere."""
        for link, arriving in list(self._arriving.items()):
            if arriving is operation or (isinstance(arriving, Gathering) and arriving.target is operation):
                if arriving is operation:
                    self._arriving[link] = None
                link.divert()
        for gathering in self._gathering.values():
            if gathering.target is operation:
                gathering.view = gathering.target = None

    def recycle(self, landings: list[tuple[LandingKey, Landing]]) -> None:
        """Keep what a complete collective no longer needs for the next one."""
        for key, landing in landings:
            if key in self._landings:
                continue  # two of one name were under way at once
            if self._landing_bytes + key[3] > LANDING_BYTES:
                # Slices of another size than now, most likely: begin anew.
                self._landings.clear()
                self._landing_bytes = 0
            self._landings[key] = landing
            self._landing_bytes += key[3]

    def forget(self, rank: int) -> None:
        """Nothing more comes from this peer."""
        for key in [key for key in self._gathering if key[0] == rank]:
            del self._gathering[key]

    def close(self) -> None:
        self._arriving.clear()
        self._gathering.clear()


def _key(link: Link, frame: Frame) -> tuple[int, int, int, int, int]:
    return link.rank, frame[KIND], frame[SPEC], frame[SEQ], frame[PIECE]


log = logging.getLogger(__name__)
Buried = deque[tuple[object, ...]]


class Ledger:
    """Open, complete, or failed: where each collective stands."""

    def __init__(self, peers: Peers, operations: dict[int, Operation], intake: Intake) -> None:
        self.open = operations
        """By key."""
        self.completed: list[Operation] = []
        """Done, but nobody was told yet: waking a waiting thread for each would cost more than the work."""
        self.submitted: dict[int, int] = {}
        """How many of each channel were ever begun."""
        self.lanes = LaneStats()
        self._peers = peers
        self._intake = intake
        self._buried: Buried = deque(maxlen=4096)
        """Memory of failed collectives: a peer that has not heard of the failure may still write to it."""
        self._inherited: list[Buried] = []
        """The same of earlier views, until everybody is known to have left them."""

    def with_member(self, rank: int) -> list[Operation]:
        """The open ones that this rank has a part in."""
        return [operation for operation in self.open.values() if rank in operation.program.spec.members]

    def finished(self) -> dict[int, int]:
        """How many of each channel have ended here, all before them too."""
        counts = dict(self.submitted)
        for operation in self.open.values():
            channel = operation.program.known.channel
            counts[channel] = min(counts.get(channel, 0), operation.seq)
        return counts

    # --- the good end ---

    def finish_part(self, operation: Operation) -> None:
        """One step or frame less to wait for."""
        operation.left -= 1
        if operation.left == 0 and not operation.failed:
            self.complete(operation)

    def complete(self, operation: Operation) -> None:
        del self.open[operation.key]
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
        everybody = len(spec.members) == self._peers.view.size
        return spec.kind in ("all_reduce", "all_gather") and everybody and spec.length > 0

    def announce(self, everything: bool) -> None:
        """Wake those who wait for what is complete: whole bursts, or `everything` there is."""
        ready = self.completed if everything else [op for op in self.completed if op.burst.open == 0]
        if not ready:
            return
        self.completed = [] if everything else [op for op in self.completed if op.burst.open]
        # The last one first: whoever waits for all of them, in order, is then woken once.
        for operation in reversed(ready):
            self.confined(operation, operation.finished, operation)

    # --- the bad end ---

    def confined(self, operation: Operation, act: Callable[..., None], *args: object) -> None:
        """What goes wrong in one collective is that collective's affair, not the end of all."""
        try:
            act(*args)
        except Exception as error:
            name = operation.program.spec.name
            # The text, not the exception: a record that is kept would keep the tensors of its frames.
            log.error("rank %d: %r failed\n%s", self._peers.rank, name, traceback.format_exc())
            self.fail(operation, CommError(f"{name!r} failed here: {error!r}"))

    def fail(self, operation: Operation, error: Exception) -> None:
        if operation.failed or operation.handle.done:
            return
        operation.failed = True
        operation.burst.open -= 1
        self._buried.append((operation.out, operation.own, operation.result, operation.kept, operation.landings))
        self.open.pop(operation.key, None)
        self._intake.divert(operation)
        operation.handle.fail(error)

    def fail_all(self, error: Exception) -> None:
        """Nothing goes on here: who waits for what is complete is told so, and all others that it failed."""
        self.announce(everything=True)
        for operation in list(self.open.values()):
            self.fail(operation, error)

    def inherit(self, former: Ledger) -> None:
        """Keep the memory that peers which are still in the former view may write to."""
        self._inherited = [*former._inherited, former._buried]


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


class Steps:
    """The runnable steps of one rank's collectives, and how they are taken."""

    def __init__(
        self, peers: Peers, memory: SharedMemory, reach: Reach, notices: Notices, ledger: Ledger, delivery: Delivery
    ) -> None:
        self.runnable: PriorityQueue[tuple[Operation, int]] = PriorityQueue()
        self._peers = peers
        self._links = peers.links
        self._memory = memory
        self._reach = reach
        self._notices = notices
        self._ledger = ledger
        self._delivery = delivery
        self._scratch = Scratch()

    def heard(self, operation: Operation, index: int) -> None:
        """One operand less is missing for a step."""
        operation.missing[index] -= 1
        if operation.missing[index] == 0:
            self.runnable.push(operation.priority, (operation, index))

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
                self._ledger.confined(operation, self._take, operation, index)
            if time.monotonic() > until_s:
                break
        # A fold drives the interpreter out of the cache, so the bookkeeping is done for many at once.
        for operation, index, again in repeated:
            self._repeated(operation, index, again)

    def _repeated(self, operation: Operation, index: int, again: Again) -> None:
        program = operation.program
        length = program.plan.steps[index].length * operation.out.flat.dtype.itemsize
        entry = FINISHED.pack(program.known.number, operation.seq, index)
        done = self._notices.done
        for link in again.links:
            link.egress_bytes += length
            done[link] += entry
        self._ledger.finish_part(operation)

    def _take(self, operation: Operation, index: int) -> None:
        step = operation.program.plan.steps[index]
        if not step.reduces:
            self._delivery.tell(operation, step, index)
            self._ledger.finish_part(operation)
            return
        operands = self._operands(operation, step, index)
        if step.up is None:
            self._finish_at_root(operation, step, index, operands)
        elif step.up in self._peers.lost:
            self._delivery.done_with(operation, step, index)
        else:
            self._delivery.send_up(operation, step, index, self._folded(operation, step, operands))

    def _operands(self, operation: Operation, step: Step, index: int) -> Items:
        """(span, first element) of each operand, in the plan's order."""
        found = [(own, step.begin) for own in operation.own]
        for child, _ in step.children:
            if child in step.offered:
                spans = operation.offers[child]
                found += [(span, step.begin) for span in (spans[1:] or spans)]
            else:
                found += [(span, 0) for span in operation.operands[index, child]]
        return found

    # --- on the way up ---

    def _folded(self, operation: Operation, step: Step, operands: Items) -> Items:
        """What goes up: the sum of what may be folded here, then the operands that may not."""
        items: Items = []
        if step.folds and operation.reduce is not None:
            flat = self._memory.empty(step.length, operation.out.flat.dtype)
            values = [span.cut(begin, begin + step.length) for span, begin in operands]
            Recipe(operation.reduce, values, step.folds, self._scratch.of(flat.dtype), flat).run()
            items.append((self._reach.new_span(flat), 0))
        return items + [operands[i] for i in step.passed_on]

    # --- at the root ---

    def _finish_at_root(self, operation: Operation, step: Step, index: int, operands: Items) -> None:
        out = operation.cut(step)
        # Results are written into the memory of this host's listeners block by block, while the
        # block is still in the cache; only then are they told.
        pushed = [peer for peer in step.listeners if self._links[peer].shared and peer in operation.offers]
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
            self._delivery.note_done(operation, step, index, self._links[peer])
        if len(pushed) < len(step.listeners):
            self._delivery.tell(operation, step, index, already=pushed)
        self._delivery.release(operation, step, index)
        self._ledger.finish_part(operation)

    def _recipe(
        self, operation: Operation, reduce: Reducer, step: Step, out: torch.Tensor, operands: Items, targets: list[Span]
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
            links = [self._links[peer] for peer in pushed]
            again = Again(operation.out, operation.own, dict(operation.offers), recipe, links)
            operation.program.again[index] = again


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
