"""The job store: every job of one user in an SQLite database, with its state, events and decisions.

It lies in the user's state directory, readable by the user only. Two kinds of rows describe jobs:

- `jobs`: jobs with a specification, which stay until they are forgotten. The scheduler owns the scheduled ones. A
  federated job in the foreground (`pliant fed run`) writes its own row.
- `runs`: foreground processes (`pliant run`, `pliant fed run`, and the runners that the scheduler starts), for as long as
  they live. A row whose process is gone is recognised by process id and start time, and ignored.

Each job has a folder for its files: DIRECTORY/jobs/NAME, or where a federated job's log_path says.
Everything here is the standard library, so that `pliant run` does not load pydantic to register itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

from pliant.child import start_ticks
from pliant.errors import ConfigError, NameTaken
from pliant.identity import JOB_NAME
from pliant.tokens import check_private, state_directory

log = logging.getLogger(__name__)

FILE = "jobs.sqlite"
LISTING_PERIOD_S = 10.0
"""How often a process tries to list itself in a store that could not be written."""
START_ONE = "start one with `pliant run -w -np 4 train.py`, or name its config server with --config-server URL"
BUSY_S = 10.0
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS jobs (name TEXT PRIMARY KEY, number INTEGER NOT NULL, scheduled INTEGER NOT NULL, "
    "job TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS runs (pid INTEGER PRIMARY KEY, run TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, job TEXT NOT NULL, at_s REAL NOT NULL, what TEXT NOT NULL, "
    "why TEXT NOT NULL, devices TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS events_of ON events (job)",
    "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)

StoredJob = dict[str, Any]
"""A row of `jobs`: `name`, `scheduled`, `spec`, `folder`, `state`, `submitted_s` and further fields, as JSON."""
Event = tuple[str, str, str, Mapping[str, int]]
"""Job, what happened, why, and the devices that it concerns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForegroundRun:
    """A runner or a foreground job, as its process has registered it."""

    name: str
    """Program and process id, or the job's name; `--job` takes it."""
    pid: int
    start_ticks: int
    """Start time of the process in the kernel's ticks: a later process with the same id has another one."""
    started_s: float
    """Unix time of the registration."""
    command: str
    """The program and its arguments, quoted for a shell."""
    kind: str = "train"
    config_server: str = ""
    """URL of the config server; empty for federated jobs."""
    host: str = ""
    """Address of this machine in the job."""
    token: str = field(default="", repr=False)
    """Token of the config server; empty where it asks for none."""
    record: str = ""
    """Path of the record; empty where the job writes none."""
    logdir: str = ""
    """Directory with the workers' output; empty where they write none."""

    def __str__(self) -> str:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))
        return f"{self.name}  pid {self.pid}  {self.config_server}  since {begun}  {self.command:.80}"

    @property
    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


class JobStore:
    """The database in a state directory. A context manager; the directory is created with mode 0700.

    One thread at a time may use it. Other processes may use the same database at the same time.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / FILE
        self._database: sqlite3.Connection | None = None

    def __enter__(self) -> JobStore:
        """Open the database.

        Raises:
            ConfigError: the directory is not private, or the file cannot be used.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.directory)
            # Created by hand, so that nobody else can read it at any moment. An existing file must not be opened and closed
            # here: that would drop the locks of another connection of this process, and SQLite would lose writes.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise ConfigError(f"{self.directory}: {error.strerror}; give a directory that can be written") from None
        try:
            self._database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            for statement in _SCHEMA:
                self._database.execute(statement)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"{self._path}: {error}; give a state directory of pliant, or a new one") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._database is not None, "used outside its `with`"
        return self._database

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is on the disk when the block ends, or nothing."""
        database = self._open
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    # --- jobs ---

    def jobs(self, *, scheduled: bool | None = None) -> list[StoredJob]:
        """Return all jobs, or only those that the scheduler does (not) own, in the order of submission."""
        rows = self._open.execute("SELECT name, scheduled, job FROM jobs ORDER BY number").fetchall()
        return [
            {**json.loads(text), "name": name, "scheduled": bool(owned)}
            for name, owned, text in rows
            if scheduled is None or bool(owned) is scheduled
        ]

    def job(self, name: str) -> StoredJob | None:
        """Return a job; None if there is none of that name."""
        return next((job for job in self.jobs() if job["name"] == name), None)

    def names(self) -> set[str]:
        """Return the names of all jobs, and of the processes in the foreground."""
        rows = self._open.execute("SELECT name FROM jobs").fetchall()
        return {name for (name,) in rows} | {run.name for run in self.runs()}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the history of a job, as `JobEvent` has it."""
        rows = self._open.execute("SELECT at_s, what, why, devices FROM events WHERE job = ? ORDER BY id", (name,))
        return [
            {"at": at_s, "what": what, "why": why, "devices": json.loads(devices)} for at_s, what, why, devices in rows
        ]

    def save(
        self,
        jobs: Iterable[tuple[str, int, StoredJob]],
        events: Iterable[Event] = (),
        *,
        at_s: float,
        reserved: Mapping[str, int] | None = None,
        scheduled: bool = True,
    ) -> None:
        """Write jobs (name, number, fields), new events and the reservation in one transaction.

        Raises:
            sqlite3.Error: it could not be written.
        """
        with self._writing() as database:
            database.executemany(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)",
                [(name, number, int(scheduled), json.dumps(job)) for name, number, job in jobs],
            )
            database.executemany(
                "INSERT INTO events (job, at_s, what, why, devices) VALUES (?, ?, ?, ?, ?)",
                [(job, at_s, what, why, json.dumps(dict(devices))) for job, what, why, devices in events],
            )
            if reserved is not None:
                _set(database, "reserved", dict(reserved))

    def next_number(self) -> int:
        """Return a number above that of every job."""
        return int(self._open.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM jobs").fetchone()[0])

    def forget(self, name: str) -> None:
        """Delete a job and its history; its files stay."""
        with self._writing() as database:
            database.execute("DELETE FROM jobs WHERE name = ?", (name,))
            database.execute("DELETE FROM events WHERE job = ?", (name,))

    # --- settings ---

    def setting(self, name: str) -> dict[str, Any]:
        """Return a saved mapping, such as `reserved`; empty if there is none."""
        row = self._open.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return dict(json.loads(row[0])) if row else {}

    def set(self, name: str, value: Mapping[str, Any]) -> None:
        with self._writing() as database:
            _set(database, name, value)

    # --- processes in the foreground ---

    def runs(self) -> list[ForegroundRun]:
        """Return the registered processes that live, the oldest first."""
        found = [ForegroundRun(**json.loads(text)) for (text,) in self._open.execute("SELECT run FROM runs").fetchall()]
        return sorted((run for run in found if run.is_alive), key=lambda run: (run.started_s, run.pid))

    def add_run(self, run: ForegroundRun) -> None:
        """Register a process, and drop the rows of dead ones."""
        with self._writing() as database:
            alive = [each for each in self.runs() if each.pid != run.pid]
            database.execute("DELETE FROM runs")
            database.executemany(
                "INSERT INTO runs VALUES (?, ?)", [(each.pid, json.dumps(asdict(each))) for each in (*alive, run)]
            )

    def remove_run(self, pid: int) -> None:
        with self._writing() as database:
            database.execute("DELETE FROM runs WHERE pid = ?", (pid,))


def _set(database: sqlite3.Connection, name: str, value: Mapping[str, Any]) -> None:
    database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, json.dumps(value)))


def opened_store(directory: Path) -> JobStore | None:
    """Return the store of a directory, to be entered; None if there is none yet."""
    return JobStore(directory) if (directory / FILE).is_file() else None


# --- registration of `pliant run` ---


@contextlib.contextmanager
def registered(
    config_server: str,
    command: Sequence[str],
    *,
    host: str = "",
    token: str = "",
    record: str = "",
    logdir: str = "",
    kind: str = "train",
    name: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Iterator[ForegroundRun]:
    """List this process in the user's store for the time of the block.

    If the store cannot be written, the job runs all the same, a warning is logged, and it is tried again once in a while.
    """
    pid = os.getpid()
    run = ForegroundRun(
        name=name or environ.get(JOB_NAME) or f"{_program_name(command)}-{pid}",
        pid=pid,
        start_ticks=start_ticks(pid) or 0,
        started_s=time.time(),
        command=shlex.join(command),
        kind=kind,
        config_server=config_server,
        host=host,
        token=token,
        record=record,
        logdir=os.path.abspath(logdir) if logdir else "",
    )
    directory = state_directory(environ)
    is_listed, is_over = False, threading.Event()

    def try_to_list() -> Exception | None:
        nonlocal is_listed
        try:
            with JobStore(directory) as store:
                store.add_run(run)
        except (ConfigError, sqlite3.Error) as error:
            return error
        is_listed = True
        return None

    def keep_trying() -> None:
        while not is_over.wait(LISTING_PERIOD_S) and try_to_list():
            pass

    retry: threading.Thread | None = None
    if error := try_to_list():
        log.warning("`pliant list` and `pliant resize` do not find this job yet (%s): give them --config-server", error)
        retry = threading.Thread(target=keep_trying, name="pliant-listing", daemon=True)
        retry.start()
    try:
        yield run
    finally:
        if os.getpid() == pid:  # a forked child leaves the block, too
            is_over.set()
            if retry is not None:
                retry.join()
            if is_listed:
                with contextlib.suppress(ConfigError, sqlite3.Error), JobStore(directory) as store:
                    store.remove_run(pid)


def running_jobs(environ: Mapping[str, str] = os.environ) -> list[ForegroundRun]:
    """Return the user's processes with a config server that run on this machine, the oldest first."""
    store = opened_store(state_directory(environ))
    if store is None:
        return []
    try:
        with store:
            return [run for run in store.runs() if run.config_server]
    except ConfigError:
        return []


def choose_run(runs: Sequence[ForegroundRun], wanted: str = "") -> ForegroundRun:
    """Return the run whose name or process id is `wanted`; without one, the only run there is.

    Raises:
        ConfigError: there is none, or there are several; the message lists them.
    """
    if not runs:
        which = f"--job {wanted}: " if wanted else ""
        raise ConfigError(f"{which}no job of yours with a config server runs on this machine: {START_ONE}")
    found = [run for run in runs if wanted in (run.name, str(run.pid))] if wanted else runs
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"  {run}" for run in runs)
    if wanted:
        raise ConfigError(f"--job {wanted} is none of the running jobs:\n{listed}")
    raise ConfigError(f"{len(runs)} jobs are running: say which with --job ID\n{listed}")


def _program_name(command: Sequence[str]) -> str:
    """Return the script's name without its extension, where there is a script; or the module's name."""
    script = (
        f"{command[1]}.py"
        if len(command) > 1 and "-m" in command[:1]
        else next((word for word in command if word.endswith(".py")), command[0] if command else "job")
    )
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in PurePath(script).stem)
    return name or "job"


# --- federated jobs in the foreground ---


@contextlib.contextmanager
def foreground_job(
    spec: StoredJob, name: str, folder: Path, record: Path, environ: Mapping[str, str] = os.environ
) -> Iterator[StoredJob]:
    """Own a federated job for the time of the block; the block sets `state`, `exit_code` and `why` in what it is given.

    If the process is killed, the job stays `running` in the store, without a process: it was interrupted.

    Raises:
        NameTaken: the job runs elsewhere.
    """
    with JobStore(state_directory(environ)) as store:
        before = store.job(name)
        check_not_running(store, name)
        number = before["number"] if before is not None else store.next_number()
        job: StoredJob = {
            "spec": spec, "number": number, "submitted_s": time.time(), "state": "running", "why": "", "folder": str(folder),
            "started_s": time.time(), "ended_s": None, "exit_code": None, "tenant": before.get("tenant", "") if before else "",
        }  # fmt: skip
        store.save([(name, number, job)], at_s=time.time(), scheduled=False)
        with registered("", [name], kind="federated", name=name, record=str(record), environ=environ):
            try:
                yield job
            finally:
                if job["state"] != "running":
                    job["ended_s"] = time.time()
                    store.save([(name, number, job)], at_s=time.time(), scheduled=False)


def check_not_running(store: JobStore, name: str) -> None:
    """Raise NameTaken if a process of that job lives, or a server looks after it."""
    job = store.job(name)
    is_alive = any(run.name == name for run in store.runs())
    if is_alive or (job is not None and job["state"] in ("waiting", "starting", "put-off")):
        raise NameTaken(f"{name} is running: stop it first with `pliant stop {name}`")
