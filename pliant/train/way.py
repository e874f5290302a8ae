"""How the sums of each step travel: what the first worker's tuner has chosen, carried out on this worker.

`priority.tuning` decides; here gradients, connections and updates under way are told, and all workers' figures are heard.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.comm.engine import Engine
from pliant.train.gradients.catching import Gradients
from pliant.train.priority.crossing import Awaited, Crossing
from pliant.train.priority.tuning import Choice, Measured, SyncStats, Tuner


class Way:
    """The way of the step in progress, and of the next one."""

    def __init__(self, gradients: Gradients, crossing: Crossing, tuner: Tuner) -> None:
        self._gradients, self._crossing, self._tuner = gradients, crossing, tuner
        self._now = Choice()
        self._next: Choice | None = None
        self._in_flight_bytes = 0
        """What the connections were told last."""

    @property
    def wish(self) -> Choice:
        """How this worker would have them travel; counts where it is the first."""
        return self._tuner.choice

    def work_in(self) -> None:
        """There is another view."""
        self._next = None

    def begin_step(self, engine: Engine) -> None:
        """In a view's first step by buckets: newcomers know no better, and the order in which parameters are used is
        observed meanwhile."""
        way = self._next
        if way is None and self._tuner.may_cross and engine.size > 1:
            self._crossing.observe()
        if way is not None and way.in_flight_bytes != self._in_flight_bytes:
            self._in_flight_bytes = way.in_flight_bytes
            engine.keep_below(way.in_flight_bytes)
        self._now = way or Choice()
        self._gradients.sums.travel(self._now, self._crossing.order)

    def heed(self, chosen: Choice, measured: Sequence[Measured], rank: int) -> None:
        """The first worker has chosen for all. The others keep up with it, for they may be first in the next view."""
        self._next = chosen
        self._tuner.learn(measured, decides=rank == 0)
        if rank != 0:
            self._tuner.choice = chosen

    def cross(self, awaited: Sequence[Awaited]) -> None:
        """These sums are under way: the program goes on, and each is taken in when it is needed."""
        wanted = {index: place for place, index in enumerate(self._crossing.order)}
        priorities = [wanted.get(index, len(wanted)) for index in range(len(self._gradients.parameters))]
        self._crossing.begin(awaited, priorities)

    def stats(self) -> SyncStats:
        """How the sums travel now, and what the network has cost so far."""
        waits, choice = self._crossing.waits, self._now
        return SyncStats(
            choice.mode,
            waits.count,
            waits.seconds,
            waits.until_s,
            choice.slice_bytes,
            choice.in_flight_bytes,
            self._tuner.rate,
            self._tuner.r,
        )
