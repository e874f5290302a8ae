"""Series of numbers that grow at their end, and their thinning to what a screen can show. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MOST_KEPT = 500_000
"""Points of a series; beyond that it is thinned to half, so that a job of a month fits into memory."""
Floats = NDArray[np.float64]
Point = tuple[float, float]


class Series:
    """Points with growing x. What has not happened after all is cut off again."""

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[Point]:
        return zip(self._x, self._y, strict=True)

    @property
    def last(self) -> float | None:
        return self._y[-1] if self._y else None

    def add(self, x: float, y: float) -> None:
        """One more point; what lies at x or after it is replaced. What is no number, as of a model that has diverged, is a gap."""
        if self._x and x <= self._x[-1]:
            self.cut(math.nextafter(x, -math.inf))
        self._x.append(x)
        self._y.append(y if math.isfinite(y) else math.nan)
        if len(self._x) > MOST_KEPT:
            kept = self.thinned(MOST_KEPT // 2)
            self._x, self._y = array("d", (x for x, _ in kept)), array("d", (y for _, y in kept))

    def part(self, begin: float, end: float) -> Series:
        """The points from `begin` to `end`, and one more on each side, so that a line through them leaves the picture."""
        first = max(0, bisect_left(self._x, begin) - 1)
        last = bisect_right(self._x, end) + 1
        found = Series()
        found._x, found._y = self._x[first:last], self._y[first:last]
        return found

    def x_at(self, y: float) -> float | None:
        """The last x at which the series had not grown over `y`; None: it had at once. For what never falls, such as time."""
        place = bisect_right(self._y, y)
        return self._x[place - 1] if place else None

    def cut(self, after: float) -> None:
        """Forget what is after this x."""
        keep = bisect_right(self._x, after)
        del self._x[keep:], self._y[keep:]

    def thinned(self, most: int) -> list[Point]:
        """As `thin`, of all points; gaps are left out."""
        # Copies: a view would keep the arrays from growing.
        return thin(np.array(self._x), np.array(self._y), most)

    def mean(self, most: int) -> list[Point]:
        """At most so many points, each the mean of its neighbours: for what jumps so much that extremes say nothing."""
        x, y = _finite(np.array(self._x), np.array(self._y))
        if len(x) <= most:
            return _points(x, y)
        starts = np.unique(np.linspace(0, len(x), most, endpoint=False).astype(np.int64))
        counts = np.diff(np.append(starts, len(x)))
        return _points(x[starts], np.add.reduceat(y, starts) / counts)


def thin(x: Floats, y: Floats, most: int) -> list[Point]:
    """At most `most` of the points, with the same outline: of each run of neighbours, the first, last, least and greatest.

    So no spike is lost, whatever its width; a mean would hide it, and every n-th point would miss it.
    """
    x, y = _finite(x, y)
    if len(x) <= most:
        return _points(x, y)
    runs = max(1, most // 4)
    edges = np.linspace(0, len(x), runs + 1).astype(np.int64)
    kept = set()
    for begin, end in pairwise(edges.tolist()):
        part = y[begin:end]
        kept |= {begin, end - 1, begin + int(part.argmin()), begin + int(part.argmax())}
    places = np.fromiter(sorted(kept), np.int64)
    return _points(x[places], y[places])


def _finite(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    good = np.isfinite(y)
    return (x, y) if good.all() else (x[good], y[good])


def _points(x: Floats, y: Floats) -> list[Point]:
    return list(zip(x.tolist(), y.tolist(), strict=True))
