"""How a federated job's accuracy grew, as files tell it: our records, and the `training_perf` of the artifact and of FedScale.

The pickles of others are read without running anything in them (`fed.pickles`). Shares are from 0 to 1 here, and clocks in
seconds of the virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pliant import record
from pliant.errors import ConfigError
from pliant.fed.history import Point, number, whole
from pliant.fed.tables import read_pickle

RECORD = "record.jsonl"
PICKLES = ("training_perf", "testing_perf")
ABOUT = ("data_set", "model", "sample_mode", "gradient_policy", "task")
NAMES = {"accuracy": ("top_1: ", "top_1"), "top_5": ("top_5: ", "top_5"), "loss": ("loss",), "clock": ("clock",)}
"""What tests are called in pickles: the artifact's names end in a colon and a space."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The tests of one job, in the order of its rounds."""

    name: str
    path: Path
    points: tuple[Point, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    """data_set, model, sample_mode, gradient_policy, task: as far as the file says."""
    num_rounds: int = 0
    clock_s: float = 0.0
    """Of its end, or of its last test."""


def read_curve(path: Path) -> Curve:
    """The curve in a file; or in a job's folder, where of several runs the last one counts.

    Raises:
        ConfigError: there is no such file, or it tells of no tests.
    """
    file = _file(path)
    curve = _from_record(file) if file.name.endswith(".jsonl") else _from_pickle(file)
    if not curve.points:
        raise ConfigError(f"{file}: the model was not tested yet; wait for the first test (evaluate_every)")
    return curve


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for folder in (path, path / "aggregator"):
        for name in (RECORD, *PICKLES):
            if (folder / name).is_file():
                return folder / name
    runs = [run for run in path.iterdir() if run.is_dir() and any((run / "aggregator").glob("*"))]
    if not runs:
        raise ConfigError(f"{path}: neither {RECORD} nor training_perf is there; give a job's folder, or a file")
    return _file(max(runs, key=lambda run: (run.stat().st_mtime, run.name)))


def _name(file: Path) -> str:
    """What to call a file among others: its own name, or that of the job whose folder it is in."""
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
    for fact in record.read(file):
        try:
            if fact.kind == "start" and isinstance(fact.data.get("config"), dict):
                about = _about(fact.data["config"])
            elif fact.kind == "round":
                rounds, clock_s = whole(fact.data, "round"), number(fact.data, "clock_s")
            elif fact.kind == "test":
                points.append(Point.from_json(fact.data))
        except ValueError as error:
            raise ConfigError(
                f"{file}: the {fact.kind} of step {fact.step} is not as a federated job writes it: {error}; "
                "give a record that nobody has changed, or the training_perf beside it"
            ) from None
    if not about:
        raise ConfigError(f"{file}: this is not the record of a federated job")
    return Curve(_name(file), file, tuple(points), about, rounds, clock_s)


def _about(config: Mapping[str, object]) -> dict[str, str]:
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
        raise ConfigError(
            f"{file}: not a training_perf or record: give a job's name, its folder, or such a file"
        ) from None
    perf = found.get("perf") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(perf, dict):
        raise ConfigError(f"{file}: no training_perf: a dictionary with `perf`, of rounds and what they were tested to")
    points = [point for number, row in perf.items() if (point := _point(file, number, row)) is not None]
    points.sort(key=lambda point: point.round)
    about = {key: str(found[key]) for key in ABOUT if key in found and found[key] is not None}
    last = points[-1] if points else None
    return Curve(_name(file), file, tuple(points), about, last.round if last else 0, last.clock_s if last else 0.0)


def _point(file: Path, number: object, row: object) -> Point | None:
    """None for the zeros that stand for round 0."""
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
