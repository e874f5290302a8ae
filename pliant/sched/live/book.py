"""What the live scheduler must not forget, in SQLite: its jobs, what happened to them, and what is reserved.

Written before anything is done about it, so that a scheduler that is killed at any moment finds what it may have begun.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from pliant.errors import ConfigError
from pliant.sched.live.actions import Note
from pliant.sched.live.ground import Counts
from pliant.sched.live.job import LiveJob

FILE = "book.sqlite"
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS jobs (name TEXT PRIMARY KEY, number INTEGER NOT NULL, job TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, job TEXT NOT NULL, at_s REAL NOT NULL, what TEXT NOT NULL, "
    "why TEXT NOT NULL, devices TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS events_of ON events (job)",
    "CREATE TABLE IF NOT EXISTS reserved (id INTEGER PRIMARY KEY CHECK (id = 1), devices TEXT NOT NULL)",
)


class Book:
    """Opened by `with`. Not for two threads at once; the scheduler's lock keeps other schedulers out."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._database: sqlite3.Connection | None = None

    def __enter__(self) -> Book:
        """Open it, made anew where there is none.

        Raises:
            ConfigError: it cannot be opened, or is something else.
        """
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            for statement in _SCHEMA:
                self._database.execute(statement)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(
                f"{self._path}: {error}; give --state a directory of `pliant serve`, or a new one"
            ) from None
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

    def jobs(self) -> list[LiveJob]:
        """All jobs there ever were, in the order of submission."""
        rows = self._open.execute("SELECT job FROM jobs ORDER BY number")
        return [LiveJob.from_json(json.loads(text)) for (text,) in rows]

    def reserved(self) -> dict[str, int]:
        row = self._open.execute("SELECT devices FROM reserved").fetchone()
        return dict(json.loads(row[0])) if row else {}

    def events(self, job: str) -> list[dict[str, Any]]:
        """What happened to a job, as the API tells it."""
        rows = self._open.execute("SELECT at_s, what, why, devices FROM events WHERE job = ? ORDER BY id", (job,))
        return [
            {"at": at_s, "what": what, "why": why, "devices": json.loads(devices)} for at_s, what, why, devices in rows
        ]

    def write(self, jobs: Iterable[LiveJob], notes: Iterable[Note], reserved: Counts, at_s: float) -> None:
        """Keep these jobs as they are now; all of it is on the disk when this returns, or nothing.

        Raises:
            sqlite3.Error: it could not be written.
        """
        database = self._open
        database.execute("BEGIN IMMEDIATE")
        try:
            database.executemany(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)",
                [(job.name, job.number, json.dumps(job.to_json())) for job in jobs],
            )
            database.executemany(
                "INSERT INTO events (job, at_s, what, why, devices) VALUES (?, ?, ?, ?, ?)",
                [(note.job, at_s, note.what, note.why, json.dumps(note.devices)) for note in notes],
            )
            database.execute("INSERT OR REPLACE INTO reserved VALUES (1, ?)", (json.dumps(dict(reserved)),))
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
