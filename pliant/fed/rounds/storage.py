"""The files of a federated job: its record, the artifact's training_perf, and TensorBoard events. Starts without torch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import CheckpointError, ConfigError
from pliant.fed.config import FedConfig, name_stored_preset
from pliant.fed.history import History, Point, Round, WorkFigures
from pliant.files import hold_lock, write_atomic
from pliant.json_text import parse_json
from pliant.record import Recorder
from pliant.tensorboard import EventWriter

log = logging.getLogger(__name__)


RECORD, PERF, TENSORBOARD, LOCK = "record.jsonl", "training_perf", "tensorboard", ".lock"
TASKS = {"speech": "speech", "play": "nlp", "posts": "nlp"}
"""The artifact's names for kinds of data; `cv` for all others."""
MAY_CHANGE = ("rounds", "target", "checkpoint_every")
"""Settings that a resumed job may change: they affect no round that is done."""
Watch = Callable[[str, Mapping[str, Any]], None]
"""Called with the kind and the content of each fact that is written."""


class JobRecorder:
    """Writes the files of a job and keeps its history. Without a folder it only keeps the history."""

    def __init__(
        self, folder: Path | None = None, *, say: Callable[[str], None] | None = None, watch: Watch | None = None
    ) -> None:
        self.folder = folder
        self.history = History()
        self._say, self._watch = say, watch
        self._config: FedConfig | None = None
        self._recorder: Recorder | None = None
        self._events: EventWriter | None = None
        self._open_files = contextlib.ExitStack()
        self._workers: tuple[str, ...] = ()
        """The worker processes that the record knows of."""

    def begin(self, config: FedConfig, resumed_at: int | None, facts: Mapping[str, Any]) -> None:
        """Open the files of a new job (None), or of one that continues after round `resumed_at`.

        Raises CheckpointError if the record is another job's, or lacks rounds that the checkpoint has.
        """
        self.history = History()
        self._config, self._workers = config, ()
        if self.folder is not None:
            self._open(self.folder, config, resumed_at)
        if resumed_at is None:
            self._fact("start", 0, {"config": config.model_dump(mode="json"), **facts})
            if self._say is not None and (remark := warn_too_few_clients(config, facts.get("clients"))):
                self._say(remark)
        elif self._say is not None:
            self._say(f"{config.name}: goes on after round {resumed_at}")

    def _open(self, folder: Path, config: FedConfig, resumed_at: int | None) -> None:
        busy = ConfigError(f"{folder}: another process runs this job; stop it first, or use another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open_files.enter_context(hold_lock(folder / LOCK, busy))
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; give a folder that can be written to") from None
        self._read_and_cut(folder / RECORD, config, resumed_at)
        self._recorder = self._open_files.enter_context(Recorder(folder / RECORD))
        self._open_events(folder / TENSORBOARD)

    def _open_events(self, folder: Path) -> None:
        """Write TensorBoard's events anew, under FedScale's names; none if its writer is not installed."""
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink(missing_ok=True)
        try:
            self._events = EventWriter(folder)
        except ConfigError as error:
            log.info("no events: %s", error)
            return
        self._open_files.callback(self._events.close)
        for done in self.history.rounds:
            self._show_round(done)
        for point in self.history.points:
            self._show_test(point)

    def _read_and_cut(self, record: Path, config: FedConfig, resumed_at: int | None) -> None:
        """Cut the record after its last line about a round that is done; read the rest as the history."""
        kept_bytes = 0
        if resumed_at is not None or record.exists():
            try:
                lines = record.read_bytes().splitlines(keepends=True)
            except OSError as error:
                raise CheckpointError(
                    f"{record}: {error.strerror}; the checkpoint beside it goes on with it, so put it back, or use another folder"
                ) from None
            for number, line in enumerate(lines):
                fact = _parse_fact(line)
                if number == 0:
                    _check_same_job(record, fact, config)
                if fact is None or fact["kind"] == "end" or fact["step"] > (-1 if resumed_at is None else resumed_at):
                    break
                kept_bytes += len(line)
                try:
                    if fact["kind"] == "round":
                        self.history.rounds.append(Round.from_json(fact))
                    elif fact["kind"] == "test":
                        self.history.points.append(Point.from_json(fact))
                except ValueError as error:
                    raise CheckpointError(
                        f"{record}:{number + 1}: this {fact['kind']} is not as a federated job writes it: {error}; "
                        "put the record back as it was, or use another folder to begin anew"
                    ) from None
            os.truncate(record, kept_bytes)
        found = self.history.rounds[-1].round if self.history.rounds else 0
        if resumed_at is not None and found != resumed_at:
            raise CheckpointError(
                f"{record} ends with round {found}, and the checkpoint beside it with round {resumed_at}: "
                "they are not of the same job, or the record was cut; use another folder to begin anew"
            )

    def round(self, done: Round) -> None:
        self.history.rounds.append(done)
        self._fact("round", done.round, done.as_json())
        self._show_round(done)

    def work(self, number: int, round_s: float, test_s: float, found: WorkFigures) -> None:
        """Record how long a round and its test really took, and what the workers did meanwhile."""
        if found.workers != self._workers:
            self._workers = found.workers
            self._fact("workers", number, {"workers": list(found.workers)})
        waits = {"wait_s": round(found.wait_s, 6), "slowest": found.slowest} if found.slowest else {}
        gpus = {"gpu_bytes": int(found.gpu_bytes), "gpu_use": round(found.gpu_use, 3)} if found.gpu_bytes else {}
        self._fact("work", number, {"round_s": round(round_s, 6), "test_s": round(test_s, 6), **waits, **gpus})

    def test(self, point: Point) -> None:
        self.history.points.append(point)
        self._fact("test", point.round, point.as_json())
        if self.folder is not None and self._config is not None:
            perf = training_perf(self._config, self.history)
            write_atomic(self.folder / PERF, pickle.dumps(perf, protocol=4))
        self._show_test(point)
        if self._say is not None:
            self._say(_format_test(point))

    def end(self, why: str) -> None:
        self.history.why = why
        rounds = len(self.history.rounds)
        clock_s = self.history.rounds[-1].clock_s if rounds else 0.0
        best = self.history.best
        data = {"why": why, "rounds": rounds, "clock_s": clock_s, "best": None if best is None else best.accuracy}
        self._fact("end", rounds, data)

    def sync(self) -> None:
        """Have the record survive a power cut, before a checkpoint refers to it."""
        if self._recorder is not None:
            with self._recorder.path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        self._open_files.close()
        self._recorder = self._events = None

    def _fact(self, kind: str, step: int, data: dict[str, Any]) -> None:
        clean = _replace_nan(data)
        if self._recorder is not None:
            self._recorder.write(kind, step, **clean)
            if (gap := self._recorder.gap) is not None:
                raise CheckpointError(
                    f"{self._recorder.path}: {gap.why}; a federated job is resumed with its record, so it ends here: make room, "
                    "and start it again, and it goes on from its last checkpoint"
                )
        if self._watch is not None:
            self._watch(kind, clean)

    def _show_round(self, done: Round) -> None:
        if self._events is None:
            return
        self._events.add_scalars(
            {"Train/round_to_loss": done.loss, "Train/round_duration (min)": done.duration_s / 60}, done.round
        )
        self._events.add_scalars({"Train/time_to_train_loss (min)": done.loss}, int(done.clock_s / 60))
        if done.client_s:
            minutes = np.array(done.client_s) / 60
            self._events.add_histogram("Train/client_duration (min)", minutes, done.round)

    def _show_test(self, point: Point) -> None:
        if self._events is None:
            return
        shown = {
            "Test/round_to_accuracy": point.accuracy,
            "Test/round_to_loss": point.loss,
            "Privacy/epsilon": point.epsilon,
        }
        self._events.add_scalars(shown, point.round)
        self._events.add_scalars({"Test/time_to_test_accuracy (min)": point.accuracy}, int(point.clock_s / 60))


def warn_too_few_clients(config: FedConfig, num_clients: int | None) -> str:
    """Return a warning if over-commit invites more clients than there are; empty if not."""
    if num_clients is None or config.invited <= num_clients:
        return ""
    return (
        f"warning: participants {config.participants} x overcommit {config.overcommit:g} is {config.invited}, but there are "
        f"{num_clients} clients: each round invites all of them, and nobody is selected; lower participants, or raise "
        "data.clients, or lower overcommit"
    )


def training_perf(config: FedConfig, history: History) -> dict[str, object]:
    """Return the tests in the artifact's form: names that end in a colon, shares in percent, and zeros for round 0."""
    perf: OrderedDict[int, dict[str, float]] = OrderedDict()
    perf[0] = {"round": 0, "clock": 0.0, "top_1: ": 0.0, "top_5: ": 0.0, "loss": 0.0}
    for point in history.points:
        perf[point.round] = {
            "round": point.round,
            "clock": point.clock_s,
            "top_1: ": 100 * point.accuracy,
            "top_5: ": 100 * point.top_5,
            "loss": math.nan if point.loss is None else point.loss,
        }
    return {
        "data_set": config.data.kind,
        "model": config.model,
        "sample_mode": config.selector.kind,
        "gradient_policy": config.aggregator.kind,
        "task": TASKS.get(config.data.kind, "cv"),
        "perf": perf,
    }


def _parse_fact(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the record; None if a crash has cut it short."""
    try:
        fact = parse_json(line)
        whole = line.endswith(b"\n") and isinstance(fact["kind"], str) and isinstance(fact["step"], int)
    except (ValueError, KeyError, TypeError):
        return None
    return fact if whole else None


def _check_same_job(record: Path, first: dict[str, Any] | None, config: FedConfig) -> None:
    """Refuse the record of another job: it must not be overwritten."""
    if first is None:
        return
    if first["kind"] != "start" or not isinstance(first.get("config"), dict):
        raise CheckpointError(f"{record} is not the record of a federated job: use another folder")
    check_same_config(f"{record}", first["config"], config)


def check_same_config(where: str, theirs: Mapping[str, Any], config: FedConfig) -> None:
    """Refuse files of a job with another config: raises CheckpointError with the first field that differs."""
    mine = config.model_dump(mode="json")
    found = _difference(
        {name: value for name, value in name_stored_preset(theirs).items() if name not in MAY_CHANGE},
        {name: value for name, value in mine.items() if name not in MAY_CHANGE},
    )
    if found is not None:
        name, old, new = found
        remedy = "resume with the same settings"
        if name == "selector.options.preset":  # the job's file may name none: the default was another
            remedy = f"write `preset: {old}` into its selector to resume it"
        raise CheckpointError(
            f"{where} is of a job with {name}={old!r}, this one has {name}={new!r}: {remedy}, or use another folder"
        )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], inside: str = "") -> tuple[str, object, object] | None:
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            if (found := _difference(before, after, f"{inside}{name}.")) is not None:
                return found
        elif before != after:
            return f"{inside}{name}", before, after
    return None


def _replace_nan(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as NaN, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(each) for key, each in value.items()}
    return [_replace_nan(each) for each in value] if isinstance(value, (list, tuple)) else value


def _format_test(point: Point) -> str:
    hours, rest = divmod(int(point.clock_s), 3600)
    text = f"round {point.round:>5}  {hours:>3} h {rest // 60:02} min {rest % 60:02} s  accuracy {point.accuracy:6.2%}"
    if point.loss is not None:
        text += f"  loss {point.loss:.4f}"
    return text if point.epsilon is None else f"{text}  epsilon {point.epsilon:.2f}"
