"""The engine's mind: frames and submissions in, folds and frames out. One thread, no waiting.

Message-driven: a step of a plan is taken when its operands are there; nobody waits for a global order,
and there is no coordinator. Here everything comes in, and here it is decided what the loss of a worker
and the end of a view mean; the parts do the rest: `matching` what peers say, `steps` the folding,
`delivery` what is sent, `ledger` what has ended. `comm.reactor` owns the thread and the sockets'
readiness. A core lives as long as its view; memory, links and the store are the station's, and outlive it.
"""

from __future__ import annotations

import logging
import time

import torch

from pliant.cluster import View
from pliant.comm.collective.delivery import Delivery
from pliant.comm.collective.intake import Intake
from pliant.comm.collective.ledger import Ledger
from pliant.comm.collective.matching import Matching
from pliant.comm.collective.notices import Notices
from pliant.comm.collective.operation import Operation
from pliant.comm.collective.peers import Peers
from pliant.comm.collective.pings import Answered, Pings
from pliant.comm.collective.program import Known
from pliant.comm.collective.reach import Reach
from pliant.comm.collective.requests import Answer, Requests
from pliant.comm.collective.steps import Steps
from pliant.comm.collective.vocabulary import Vocabulary
from pliant.comm.plan import Spec
from pliant.comm.shm import SharedMemory
from pliant.comm.store import Store
from pliant.comm.telemetry import Watcher
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import KIND, LENGTH, TAGGED, Frame, Kind, header
from pliant.errors import CommError

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
                self._vocabulary.learn(link, number, payload)
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
