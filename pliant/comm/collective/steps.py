"""The steps that can be taken now, by priority: fold what is there, and hand on what comes of it.

A step is runnable when all its operands are there; `matching` notices that. Where the same memory is
folded at every training step, all that was found out the last time is used again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import is_

import torch

from pliant.comm.collective.delivery import Delivery, Items
from pliant.comm.collective.ledger import Ledger
from pliant.comm.collective.notices import Notices
from pliant.comm.collective.operation import Operation
from pliant.comm.collective.peers import Peers
from pliant.comm.collective.program import Again
from pliant.comm.collective.reach import Reach
from pliant.comm.collective.span import Folded, Span
from pliant.comm.kernels import Recipe, Reducer, Scratch
from pliant.comm.plan import Step
from pliant.comm.shm import SharedMemory
from pliant.comm.slices import PriorityQueue
from pliant.comm.transport.wire import FINISHED


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
