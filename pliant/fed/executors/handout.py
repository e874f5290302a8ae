"""Which executor has which unit. Pure: told who comes, goes and has finished what, it answers who is to be given what.

Units are numbers. Each executor has one that it works on and one ahead, so that it does not wait for the next; who has
nothing to do takes one that another has only ahead. A unit that was in the hands of several executors as they were lost
is given up: it would take them all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

DEPTH = 2
MAX_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Give:
    executor: int
    unit: int


@dataclass(frozen=True, slots=True)
class Take:
    """It need not do this unit, if it has not begun."""

    executor: int
    unit: int


class Handout:
    def __init__(self, depth: int = DEPTH, max_losses: int = MAX_LOSSES) -> None:
        self.holding: dict[int, list[int]] = {}
        """Of each executor, in the order in which it does them."""
        self._depth = depth
        self._max_losses = max_losses
        self._free: list[int] = []
        self._open: set[int] = set()
        self._losses: Counter[int] = Counter()

    @property
    def num_open(self) -> int:
        """Units without a result."""
        return len(self._open)

    def is_open(self, unit: int) -> bool:
        """Whether its result is still wanted."""
        return unit in self._open

    def add(self, units: Iterable[int]) -> None:
        for unit in units:
            self._open.add(unit)
            heapq.heappush(self._free, unit)

    def drop_all(self) -> list[Take]:
        """No unit is wanted any more."""
        taken = [Take(executor, unit) for executor, units in self.holding.items() for unit in units]
        for units in self.holding.values():
            units.clear()
        self._free.clear()
        self._open.clear()
        self._losses.clear()
        return taken

    def join(self, executor: int) -> None:
        self.holding[executor] = []

    def leave(self, executor: int, *, blame: bool = True) -> int | None:
        """It is gone, and what it held is free. The unit that is now given up, if there is one."""
        units = self.holding.pop(executor, [])
        for unit in units:
            heapq.heappush(self._free, unit)
        return self._lose(units[0]) if units and blame else None

    def fail(self, executor: int, unit: int) -> int | None:
        """It could not do the unit, which another may try. The unit, if it is given up."""
        if unit not in self.holding.get(executor, []):
            return None
        self.holding[executor].remove(unit)
        heapq.heappush(self._free, unit)
        return self._lose(unit)

    def finish(self, executor: int, unit: int) -> list[Take] | None:
        """Its result of the unit is there; None: there was one before, or none is wanted."""
        if unit not in self._open:
            return None
        self._open.remove(unit)
        self._losses.pop(unit, None)
        taken = []
        for holder, units in self.holding.items():
            if unit in units:
                units.remove(unit)
                if holder != executor:
                    taken.append(Take(holder, unit))
        if unit in self._free:
            self._free.remove(unit)
            heapq.heapify(self._free)
        return taken

    def next(self, horizon: int) -> list[Give | Take]:
        """Who is to be given what now, the units below `horizon` in their order, the idlest executor first."""
        orders: list[Give | Take] = []
        while self.holding:
            idlest = min(self.holding, key=lambda each: len(self.holding[each]))
            if len(self.holding[idlest]) >= self._depth:
                break
            if self._free and self._free[0] < horizon:
                unit = heapq.heappop(self._free)
            elif not self.holding[idlest] and (owner := self._busiest()) is not None:
                unit = self.holding[owner].pop()
                orders.append(Take(owner, unit))
            else:
                break
            self.holding[idlest].append(unit)
            orders.append(Give(idlest, unit))
        return orders

    def _busiest(self) -> int | None:
        """Who has a unit that it has not begun: of several, whose is the earliest."""
        owners = [each for each, units in self.holding.items() if len(units) > 1]
        return min(owners, key=lambda each: self.holding[each][-1], default=None)

    def _lose(self, unit: int) -> int | None:
        self._losses[unit] += 1
        return unit if self._losses[unit] >= self._max_losses else None
