"""The user's federated jobs: where each is kept, and how it is. All of it is in files, so they are known when nothing runs.

    STATE/pliant/federated/NAME.json            where the job of this name is (the last one of that name)
    LOG_PATH/logs/NAME/TIME/job.json            what was submitted
                            lock                held as long as somebody minds the job
                            keeper.json         which process that is
                            exit.json           how it ended
                            aggregator/         the server's log, record.jsonl, training_perf, checkpoint
                            worker/log_RANK     what the executors say

A job whose lock nobody holds, and of whose end nothing is written, was interrupted: its keeper was killed, or the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.errors import ConfigError, NameTaken, PliantError, UnknownJob
from pliant.fed.jobs.job import FedJob
from pliant.launch.registry import is_held, start_ticks

State = Literal["running", "finished", "failed", "stopped", "interrupted"]
TAIL_BYTES = 1 << 18
GLANCE_S = 0.5
"""Somebody who only looks holds a lock for an instant."""
GO_ON = "`pliant submit --resume {}` goes on {}"


class FedStatus(BaseModel):
    """How a job is."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: State
    why: str
    folder: str
    workers: tuple[str, ...]
    participants: int
    round: int
    rounds: int
    """How many it shall have."""
    clock_s: float
    """Virtual."""
    accuracy: float | None
    submitted_s: float
    ended_s: float | None
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        """An interrupted job is over, until it is resumed."""
        return self.state != "running"


@contextlib.contextmanager
def locked(path: Path, patience_s: float, refusal: PliantError) -> Iterator[int]:
    """Hold the lock in this file: its descriptor. Who holds it may be about to end, so it is waited for a while.

    Raises:
        PliantError: `refusal`, if that was not long enough.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline_s = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise refusal from None
                time.sleep(0.01)
        yield lock
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class JobFolder:
    """One job's files."""

    path: Path

    @property
    def aggregator(self) -> Path:
        return self.path / "aggregator"

    @property
    def log(self) -> Path:
        return self.aggregator / "log"

    @property
    def checkpoint(self) -> Path:
        """As `fed.rounds.checkpoints` has it, which imports torch."""
        return self.aggregator / "checkpoint.safetensors"

    @property
    def begin(self) -> str:
        """Where the job would go on, in words."""
        return "from its checkpoint" if self.checkpoint.exists() else "from its beginning"

    def worker_log(self, rank: int) -> Path:
        return self.path / "worker" / f"log_{rank}"

    def job(self) -> FedJob:
        """Raises ConfigError where the folder holds none."""
        try:
            return FedJob.model_validate_json((self.path / "job.json").read_bytes())
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "its job.json is damaged, or of another version"
            raise ConfigError(f"{self.path}: {why}; give the folder of a federated job") from None

    def write(self, name: str, value: object) -> None:
        """One of the small files: all of it or nothing."""
        write_file(self.path / name, json.dumps(value))

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def forget_end(self) -> None:
        for name in ("exit.json", "keeper.json"):
            (self.path / name).unlink(missing_ok=True)

    def end(self, state: State, code: int, why: str = "") -> None:
        self.write("exit.json", {"state": state, "code": code, "why": why, "at_s": time.time()})

    @contextlib.contextmanager
    def minded(self) -> Iterator[int]:
        """Hold the job's lock: the descriptor, which a keeper may inherit.

        Raises:
            NameTaken: somebody holds it.
        """
        name = self.path.parent.name
        taken = NameTaken(f"{name} is running: stop it first, or give another --name")
        with locked(self.path / "lock", GLANCE_S, taken) as lock:
            yield lock

    def is_minded(self) -> bool:
        return is_held(self.path / "lock")

    def keeper(self) -> int | None:
        """The process that minds the job, if it lives."""
        told = self.read("keeper.json")
        if told is None or not isinstance(told.get("pid"), int):
            return None
        return int(told["pid"]) if start_ticks(told["pid"]) == told.get("start_ticks") else None

    def note_keeper(self) -> None:
        self.write("keeper.json", {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())})

    def progress(self) -> tuple[int, float, float | None]:
        """Rounds done, the virtual clock, and the last test's accuracy: from the end of the record."""
        number, clock_s, accuracy = 0, 0.0, None
        for line in _tail(self.aggregator / "record.jsonl"):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                fact = json.loads(line)
                if fact.get("kind") == "round":
                    number, clock_s = int(fact["round"]), float(fact["clock_s"])
                elif fact.get("kind") == "test":
                    accuracy = float(fact["accuracy"])
        return number, clock_s, accuracy

    def status(self) -> FedStatus:
        job = self.job()
        minded = self.is_minded()
        ended = None if minded else self.read("exit.json")
        state: State = "running" if minded else "interrupted"
        why = "" if minded else f"nobody minds it any more: {GO_ON.format(job.config.name, self.begin)}"
        if ended is not None and ended.get("state") in ("finished", "failed", "stopped"):
            state, why = ended["state"], str(ended.get("why", ""))
        number, clock_s, accuracy = self.progress()
        return FedStatus(
            name=job.config.name,
            state=state,
            why=why,
            folder=str(self.path),
            workers=job.ground.workers,
            participants=job.config.participants,
            round=number,
            rounds=job.config.rounds,
            clock_s=clock_s,
            accuracy=accuracy,
            submitted_s=(self.path / "job.json").stat().st_mtime,
            ended_s=float(ended["at_s"]) if ended else None,
            exit_code=int(ended["code"]) if ended else None,
        )


class Jobs:
    """Where the user's jobs are, by name."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @classmethod
    def of_user(cls, environ: Mapping[str, str] = os.environ) -> Jobs:
        state = environ.get("XDG_STATE_HOME") or os.path.join(
            environ.get("HOME") or os.path.expanduser("~"), ".local/state"
        )
        return cls(Path(state) / "pliant" / "federated")

    def all(self) -> list[JobFolder]:
        """Those whose folders are there, the first submitted first."""
        found = [folder for file in self._home.glob("*.json") if (folder := self._at(file)) is not None]
        return sorted(found, key=lambda folder: (folder.path / "job.json").stat().st_mtime)

    def names(self) -> set[str]:
        return {file.stem for file in self._home.glob("*.json") if self._at(file) is not None}

    def has(self, name: str) -> bool:
        return self._at(self._home / f"{name}.json") is not None

    def find(self, name: str) -> JobFolder:
        """Raises UnknownJob where there is none."""
        found = self._at(self._home / f"{name}.json")
        if found is None:
            known = ", ".join(sorted(self.names())) or "none"
            raise UnknownJob(f"no federated job is called {name!r}: there are {known}")
        return found

    def create(self, job: FedJob) -> JobFolder:
        """Make the folder of a new job, and know it by its name from now on; an ended one of that name is no longer.

        Raises:
            NameTaken: a job of that name runs.
            ConfigError: the folder cannot be made, or is another job's.
        """
        name = job.config.name
        before = self._at(self._home / f"{name}.json")
        if before is not None and before.is_minded():
            raise NameTaken(f"the name {name} is taken by a job that runs: stop it first, or give another --name")
        runs = Path(job.ground.log_path) / "logs" / name
        try:
            folder = JobFolder(_new_folder(runs, job.time))
            write_file(folder.path / "job.json", job.model_dump_json(indent=1))
            folder.aggregator.mkdir()
            (folder.path / "worker").mkdir()
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(self._home / f"{name}.json", json.dumps({"folder": str(folder.path)}))
        except OSError as error:
            where = f"{job.log_path_line}: " if job.log_path_line else ""
            raise ConfigError(
                f"{where}log_path {job.ground.log_path}: {error.strerror or error}; give a folder that can be written to"
            ) from None
        return folder

    def forget(self, name: str) -> JobFolder:
        """Know the job by its name no longer; its files stay, in the folder that is returned.

        Raises:
            UnknownJob: there is none.
            NameTaken: it runs.
        """
        folder = self.find(name)
        with folder.minded():
            (self._home / f"{name}.json").unlink(missing_ok=True)
        return folder

    def _at(self, file: Path) -> JobFolder | None:
        try:
            folder = Path(json.loads(file.read_text())["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return JobFolder(folder) if (folder / "job.json").is_file() else None


def one_line(error: BaseException) -> str:
    """What an exception that nobody expected says, with its kind."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def write_file(path: Path, text: str) -> None:
    """All of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _new_folder(runs: Path, time_stamp: str) -> Path:
    """Named by the time, as the artifact does; two of one second get a number."""
    stamp = time_stamp or time.strftime("%m%d_%H%M%S")
    for number in range(1000):
        path = runs / (stamp if not number else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        if time_stamp:
            raise ConfigError(f"{path} is there already: leave time_stamp out, or give another")
    raise ConfigError(f"{runs}: a thousand jobs began in this second")


def _tail(path: Path) -> list[bytes]:
    """The whole lines at the end of a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    return [line for line in (lines if size <= TAIL_BYTES else lines[1:]) if line.endswith(b"\n")]
