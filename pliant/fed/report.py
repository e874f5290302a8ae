"""Compares federated jobs: the virtual time that each needed to reach an accuracy.

Curves are read from our records and from the `training_perf` pickles of Oort's artifact and of FedScale, which are parsed
without running code in them (`fed.tables`). Accuracies are shares from 0 to 1, clocks are seconds of the virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant import record
from pliant.errors import ConfigError
from pliant.fed.history import Point, Round
from pliant.fed.participation import ClientFigures, Participation, RoundClients
from pliant.fed.tables import read_pickle

# --- curves from files ---

RECORD = "record.jsonl"
PICKLES = ("training_perf", "testing_perf")
ABOUT = ("data_set", "model", "sample_mode", "gradient_policy", "task")
NAMES = {"accuracy": ("top_1: ", "top_1"), "top_5": ("top_5: ", "top_5"), "loss": ("loss",), "clock": ("clock",)}
"""Names of the metrics in pickles; the artifact's end in a colon and a space."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The tests of one job in the order of its rounds."""

    name: str
    path: Path
    points: tuple[Point, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    """data_set, model, sample_mode, gradient_policy and task, as far as the file has them."""
    num_rounds: int = 0
    clock_s: float = 0.0
    """Virtual time of the job's end, or of its last test."""
    clients: ClientFigures | None = None
    """How its clients took part; None if the file does not have its rounds."""


def read_curve(path: Path) -> Curve:
    """Read the curve from a file, or from a job's folder; of several runs in it the last one counts."""
    file = _find_file(path)
    curve = _from_record(file) if file.name.endswith(".jsonl") else _from_pickle(file)
    if not curve.points and curve.clients is None:
        raise ConfigError(f"{file}: the model was not tested yet; wait for the first test (evaluate_every)")
    return curve


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for folder in (path, path / "aggregator"):
        for name in (RECORD, *PICKLES):
            if (folder / name).is_file():
                return folder / name
    runs = [run for run in path.iterdir() if run.is_dir() and any((run / "aggregator").glob("*"))]
    if not runs:
        raise ConfigError(f"{path}: neither {RECORD} nor training_perf is there; give a job's folder, or a file")
    return _find_file(max(runs, key=lambda run: (run.stat().st_mtime, run.name)))


def _curve_name(file: Path) -> str:
    """Return a name for a curve: that of the file, or JOB/TIME where it is in a job's folder."""
    if file.name not in (RECORD, *PICKLES):
        return file.stem
    parts = file.absolute().parts
    if len(parts) > 4 and parts[-2] == "aggregator":
        return f"{parts[-4]}/{parts[-3]}"
    return file.absolute().parent.name


def _from_record(file: Path) -> Curve:
    points: list[Point] = []
    about: dict[str, str] = {}
    rounds, clock_s = 0, 0.0
    counted = Participation()
    for fact in record.read(file):
        try:
            if fact.kind == "start" and isinstance(fact.data.get("config"), dict):
                about, counted = _describe(fact.data["config"]), Participation.of_start(fact.data)
            elif fact.kind == "round":
                last = Round.from_json(fact.data)
                rounds, clock_s = last.round, last.clock_s
                counted.add(RoundClients.from_json(fact.data))
            elif fact.kind == "test":
                points.append(Point.from_json(fact.data))
        except ValueError as error:
            raise ConfigError(
                f"{file}: the {fact.kind} of step {fact.step} is not as a federated job writes it: {error}; "
                "give a record that nobody has changed, or the training_perf beside it"
            ) from None
    if not about:
        raise ConfigError(f"{file}: this is not the record of a federated job")
    clients = counted.figures() if rounds else None
    return Curve(_curve_name(file), file, tuple(points), about, rounds, clock_s, clients)


def _describe(config: Mapping[str, object]) -> dict[str, str]:
    def kind(section: str) -> str:
        found = config.get(section)
        return str(found.get("kind", "")) if isinstance(found, dict) else ""

    return {
        "data_set": kind("data"),
        "model": str(config.get("model", "")),
        "sample_mode": kind("selector"),
        "gradient_policy": kind("aggregator"),
    }


def _from_pickle(file: Path) -> Curve:
    try:
        found = read_pickle(file)
    except ConfigError:
        if not file.is_file() or file.read_bytes()[:1] == b"\x80":
            raise
        raise ConfigError(f"{file}: not a training_perf or record: give a job's name, its folder, or a file") from None
    perf = found.get("perf") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(perf, dict):
        raise ConfigError(f"{file}: no training_perf: a dictionary with `perf`, of rounds and what they were tested to")
    points = [point for number, row in perf.items() if (point := _parse_point(file, number, row)) is not None]
    points.sort(key=lambda point: point.round)
    about = {key: str(found[key]) for key in ABOUT if key in found and found[key] is not None}
    last = points[-1] if points else None
    return Curve(
        _curve_name(file), file, tuple(points), about, last.round if last else 0, last.clock_s if last else 0.0
    )


def _parse_point(file: Path, number: object, row: object) -> Point | None:
    """Return the test of one round; None for the zeros that the artifact writes as round 0."""
    values: dict[str, float] = {}
    if isinstance(row, dict):
        for name, theirs in NAMES.items():
            given = next((row[key] for key in theirs if key in row), None)
            if isinstance(given, int | float):
                values[name] = float(given)
    if not isinstance(number, int) or not {"accuracy", "clock"} <= set(values) or not math.isfinite(values["clock"]):
        raise ConfigError(f"{file}: round {number!r} is {str(row)[:60]}: it has no clock and top_1")
    if number == 0 and not any(values.values()):
        return None
    loss = values.get("loss", math.nan)
    return Point(
        number,
        values["clock"],
        values["accuracy"] / 100,
        values.get("top_5", math.nan) / 100,
        loss if math.isfinite(loss) else None,
    )


# --- comparison ---

METRICS = ("accuracy", "top_5", "loss")


@dataclass(frozen=True, slots=True)
class TargetReached:
    """When one job first reached the target."""

    curve: Curve
    best: float | None
    final: float | None
    point: Point | None
    """None if it never did."""
    speedup: float | None
    """The first job's time divided by this one's; None where one of them never reached the target."""

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
            "clients": None if self.curve.clients is None else self.curve.clients.as_json(),
            "tests": [[point.round, point.clock_s, value_of(point, metric)] for point in self.curve.points],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several jobs compared by one metric."""

    metric: str
    target: float | None
    """None if no job was tested."""
    is_asked: bool
    """If false, the target is the best value that all tested jobs reached."""
    runs: tuple[TargetReached, ...]

    @property
    def reached_by(self) -> str:
        """Who reached the target, as the end of a sentence; empty if the user asked for it."""
        return "" if self.is_asked else ", which all tested jobs reached"

    def as_json(self) -> dict[str, object]:
        return {
            "report": "compare",
            "metric": self.metric,
            "target": self.target,
            "target_by": "the user" if self.is_asked else "the best that every tested job reached",
            "runs": [run.as_json(self.metric) for run in self.runs],
        }


def value_of(point: Point, metric: str) -> float | None:
    """Return the metric of a test; None where the file does not have it."""
    found = getattr(point, metric)
    return None if found is None or not math.isfinite(found) else float(found)


def compare(curves: Sequence[Curve], *, target: float | None = None, metric: str = "accuracy") -> Comparison:
    """Compare when each job first reached `target`; default: the best value that all tested jobs reached."""
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric!r}: use one of {', '.join(METRICS)}")
    if not curves:
        raise ConfigError("nothing to compare: give the folders or files of one or several jobs")
    if target is not None:
        target = _check_target(target, metric)
    bests = [_best(curve, metric) for curve in curves]
    asked = target is not None
    known = [best for best in bests if best is not None]
    goal = target
    if goal is None and known:
        goal = max(known) if metric == "loss" else min(known)
    points = [None if goal is None else _first_reaching(curve, metric, goal) for curve in curves]
    return Comparison(
        metric,
        goal,
        asked,
        tuple(
            TargetReached(curve, best, _final(curve, metric), point, _speedup(points[0], point))
            for curve, best, point in zip(curves, bests, points, strict=True)
        ),
    )


def _check_target(target: float, metric: str) -> float:
    if metric != "loss" and 1 < target <= 100:
        target /= 100
    if not (math.isfinite(target) and target > 0) or (metric != "loss" and target > 1):
        raise ConfigError(f"--target {target:g}: use a share such as 0.8, or percent such as 80")
    return target


def _values(curve: Curve, metric: str) -> list[tuple[Point, float]]:
    found = [(point, value) for point in curve.points if (value := value_of(point, metric)) is not None]
    if curve.points and not found:
        raise ConfigError(f"{curve.path}: it does not tell {metric}; use another --metric")
    return found


def _best(curve: Curve, metric: str) -> float | None:
    """Return the best value of the tests; None if there was no test."""
    values = [value for _, value in _values(curve, metric)]
    return min(values, default=None) if metric == "loss" else max(values, default=None)


def _final(curve: Curve, metric: str) -> float | None:
    values = _values(curve, metric)
    return values[-1][1] if values else None


def _first_reaching(curve: Curve, metric: str, goal: float) -> Point | None:
    lower = metric == "loss"
    return next((point for point, value in _values(curve, metric) if (value <= goal if lower else value >= goal)), None)


def _speedup(first: Point | None, this: Point | None) -> float | None:
    if first is None or this is None or not this.clock_s:
        return None
    return first.clock_s / this.clock_s
