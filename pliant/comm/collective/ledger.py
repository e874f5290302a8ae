"""The collectives that this rank has begun in a view, until whoever waits for them is told how they ended.

Also what must be kept of those that failed. Engine's thread only. What they are waiting for is not known here.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable

from pliant.comm.collective.intake import Intake
from pliant.comm.collective.operation import Operation
from pliant.comm.collective.peers import Peers
from pliant.comm.plan import Spec
from pliant.comm.telemetry import LaneStats
from pliant.errors import CommError

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
