"""Federated jobs side by side: how long each took, on the virtual clock, to the accuracy that all of them reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.errors import ConfigError
from pliant.fed.history import Point
from pliant.fed.jobs.perf_files import Curve

METRICS = ("accuracy", "top_5", "loss")


@dataclass(frozen=True, slots=True)
class Reached:
    """A job, and when it first had the target."""

    curve: Curve
    best: float | None
    final: float | None
    point: Point | None
    """None: it never had."""
    speedup: float | None
    """The first job's time over this one's; None where one of them has none."""

    @property
    def hours(self) -> float | None:
        return None if self.point is None else self.point.clock_s / 3600

    def as_json(self, metric: str) -> dict[str, object]:
        return {
            "name": self.curve.name,
            "path": str(self.curve.path),
            **self.curve.about,
            "rounds": self.curve.num_rounds,
            "clock_s": self.curve.clock_s,
            "best": self.best,
            "final": self.final,
            "reached": None
            if self.point is None
            else {"round": self.point.round, "clock_s": self.point.clock_s, "hours": self.hours},
            "speedup": self.speedup,
            "tests": [[point.round, point.clock_s, value_of(point, metric)] for point in self.curve.points],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    metric: str
    target: float
    is_asked: bool
    """Whether the user named the target; else it is what all of them reached."""
    runs: tuple[Reached, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "report": "compare",
            "metric": self.metric,
            "target": self.target,
            "target_by": "the user" if self.is_asked else "the best of whichever reached least",
            "runs": [run.as_json(self.metric) for run in self.runs],
        }


def value_of(point: Point, metric: str) -> float | None:
    """What is compared; None where the file does not say."""
    found = getattr(point, metric)
    return None if found is None or not math.isfinite(found) else float(found)


def compare(curves: Sequence[Curve], *, target: float | None = None, metric: str = "accuracy") -> Comparison:
    """When each job first had `target`; without one, the best value of the job whose best is least.

    Raises:
        ConfigError: an unknown metric, one that a file does not tell, or a target that cannot be.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric!r}: use one of {', '.join(METRICS)}")
    if not curves:
        raise ConfigError("nothing to compare: give the folders or files of one or several jobs")
    if target is not None:
        target = _checked(target, metric)
    lower = metric == "loss"
    bests = [_best(curve, metric) for curve in curves]
    asked = target is not None
    goal = target if target is not None else (max(bests) if lower else min(bests))
    points = [_first(curve, metric, goal) for curve in curves]
    return Comparison(
        metric,
        goal,
        asked,
        tuple(
            Reached(curve, best, _final(curve, metric), point, _speedup(points[0], point))
            for curve, best, point in zip(curves, bests, points, strict=True)
        ),
    )


def _checked(target: float, metric: str) -> float:
    if metric != "loss" and 1 < target <= 100:
        target /= 100
    if not (math.isfinite(target) and target > 0) or (metric != "loss" and target > 1):
        raise ConfigError(f"--target {target:g}: use a share such as 0.8, or percent such as 80")
    return target


def _values(curve: Curve, metric: str) -> list[tuple[Point, float]]:
    found = [(point, value) for point in curve.points if (value := value_of(point, metric)) is not None]
    if not found:
        raise ConfigError(f"{curve.path}: it does not tell {metric}; use another --metric")
    return found


def _best(curve: Curve, metric: str) -> float:
    values = [value for _, value in _values(curve, metric)]
    return min(values) if metric == "loss" else max(values)


def _final(curve: Curve, metric: str) -> float:
    return _values(curve, metric)[-1][1]


def _first(curve: Curve, metric: str, goal: float) -> Point | None:
    lower = metric == "loss"
    return next((point for point, value in _values(curve, metric) if (value <= goal if lower else value >= goal)), None)


def _speedup(first: Point | None, this: Point | None) -> float | None:
    if first is None or this is None or not this.clock_s:
        return None
    return first.clock_s / this.clock_s
