"""The work queue of a coordinator: which worker has which unit. Pure: events in, assignments out.

Units are numbers. Each worker has one unit that it works on and one ahead, so that it need not wait for the next. A
worker without a unit takes over one that another worker only has ahead. A unit that several workers held when they were
lost is given up: it would take them all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNITS_PER_WORKER = 2
MAX_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Assign:
    """The worker is to do this unit."""

    worker: int
    unit: int


@dataclass(frozen=True, slots=True)
class Unassign:
    """The worker need not do this unit, unless it has begun."""

    worker: int
    unit: int


class WorkQueue:
    """Units without a result, and the workers that hold them."""

    def __init__(self, max_losses: int = MAX_LOSSES) -> None:
        self.holding: dict[int, list[int]] = {}
        """The units of each worker, in the order in which it does them."""
        self._max_losses = max_losses
        self._free: list[int] = []
        self._open: set[int] = set()
        self._losses: Counter[int] = Counter()

    @property
    def num_open(self) -> int:
        """Number of units without a result."""
        return len(self._open)

    def is_open(self, unit: int) -> bool:
        """Return whether the result of this unit is still wanted."""
        return unit in self._open

    def add(self, units: Iterable[int]) -> None:
        for unit in units:
            self._open.add(unit)
            heapq.heappush(self._free, unit)

    def drop_all(self) -> list[Unassign]:
        """Forget all units: no result is wanted any more."""
        taken = [Unassign(worker, unit) for worker, units in self.holding.items() for unit in units]
        for units in self.holding.values():
            units.clear()
        self._free.clear()
        self._open.clear()
        self._losses.clear()
        return taken

    def join(self, worker: int) -> Sequence[int]:
        """Add a worker; return the list of its units, which changes with what happens."""
        self.holding[worker] = []
        return self.holding[worker]

    def leave(self, worker: int, *, blame: bool = True) -> int | None:
        """Free the units of a worker that is gone; return the unit that is now given up, if any.

        With `blame`, its loss counts against the unit that it worked on.
        """
        units = self.holding.pop(worker, [])
        for unit in units:
            heapq.heappush(self._free, unit)
        return self._count_loss(units[0]) if units and blame else None

    def fail(self, worker: int, unit: int) -> int | None:
        """Free a unit that failed on a worker, so that another may try; return it if it is given up instead."""
        if unit not in self.holding.get(worker, []):
            return None
        self.holding[worker].remove(unit)
        heapq.heappush(self._free, unit)
        return self._count_loss(unit)

    def finish(self, worker: int, unit: int) -> list[Unassign] | None:
        """Take note of a result; None if there was one before, or none is wanted."""
        if unit not in self._open:
            return None
        self._open.remove(unit)
        self._losses.pop(unit, None)
        taken = []
        for holder, units in self.holding.items():
            if unit in units:
                units.remove(unit)
                if holder != worker:
                    taken.append(Unassign(holder, unit))
        if unit in self._free:
            self._free.remove(unit)
            heapq.heapify(self._free)
        return taken

    def assign(self, horizon: int) -> list[Assign | Unassign]:
        """Assign units below `horizon`, in their order, to the workers that hold fewest."""
        orders: list[Assign | Unassign] = []
        while self.holding:
            idlest = min(self.holding, key=lambda each: len(self.holding[each]))
            if len(self.holding[idlest]) >= UNITS_PER_WORKER:
                break
            if self._free and self._free[0] < horizon:
                unit = heapq.heappop(self._free)
            elif not self.holding[idlest] and (owner := self._owner_of_waiting_unit()) is not None:
                unit = self.holding[owner].pop()
                orders.append(Unassign(owner, unit))
            else:
                break
            self.holding[idlest].append(unit)
            orders.append(Assign(idlest, unit))
        return orders

    def _owner_of_waiting_unit(self) -> int | None:
        """Return a worker that has a unit ahead; of several, the one whose unit comes first."""
        owners = [each for each, units in self.holding.items() if len(units) > 1]
        return min(owners, key=lambda each: self.holding[each][-1], default=None)

    def _count_loss(self, unit: int) -> int | None:
        self._losses[unit] += 1
        return unit if self._losses[unit] >= self._max_losses else None
