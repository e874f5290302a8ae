"""The wanted view and the roll on disk: a row of SQLite each, committed together before anybody is told.

What a request does to them is decided in `elastic.membership` and `elastic.roll`; this file only keeps them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pliant.cluster import View, Worker
from pliant.elastic.membership import Wanted
from pliant.elastic.roll import Membership, Roll
from pliant.errors import ConfigError

IN_MEMORY = ":memory:"
_LOCK_TIMEOUT_S = 1.0
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS wanted (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL, view TEXT)",
    "CREATE TABLE IF NOT EXISTS roll (id INTEGER PRIMARY KEY CHECK (id = 1), roll TEXT NOT NULL, ready TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS settled (id INTEGER PRIMARY KEY CHECK (id = 1), workers TEXT NOT NULL, replicas INTEGER)",
)


class Store:
    """Keeps one `Membership`; made with a path, opened by `with`. Not for two threads at once.

    While open, the file is locked: a second server on the same state would answer from a past
    that the first has already changed.
    """

    def __init__(self, path: str = IN_MEMORY) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self.state = Membership()
        """What is kept now; change it with `save`."""

    def __enter__(self) -> Store:
        """Open the file, making it if there is none, and read what it keeps.

        Raises:
            ConfigError: it cannot be opened, is not ours, or another server has it open.
        """
        try:
            # The thread that serves is not the one that opens; they never use it at the same time.
            self._database = sqlite3.connect(
                self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("BEGIN EXCLUSIVE")
            for statement in _SCHEMA:
                self._database.execute(statement)
            self._database.execute("COMMIT")
            self.state = self._load(self._database)
        except (sqlite3.Error, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(
                f"state file {self._path}: {error}; give a file of a config server, or a new one, in a directory that "
                "exists, and stop any other server that uses it"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def save(self, state: Membership) -> None:
        """Keep `state`; on disk when this returns.

        Raises:
            sqlite3.Error: it could not be written; what was kept before still is.
        """
        assert self._database is not None, "save() needs an open store: use `with`"
        wanted = state.wanted
        view = None if wanted.view is None else json.dumps(wanted.view.to_json())
        roll, ready, settled = json.dumps(state.roll.to_json()), _listed(state.ready), _listed(state.settled)
        with _transaction(self._database):
            self._database.execute(
                "INSERT OR REPLACE INTO wanted (id, version, view) VALUES (1, ?, ?)", (wanted.version, view)
            )
            self._database.execute("INSERT OR REPLACE INTO roll (id, roll, ready) VALUES (1, ?, ?)", (roll, ready))
            self._database.execute(
                "INSERT OR REPLACE INTO settled (id, workers, replicas) VALUES (1, ?, ?)", (settled, state.replicas)
            )
        self.state = state

    @staticmethod
    def _load(database: sqlite3.Connection) -> Membership:
        row = database.execute("SELECT version, view FROM wanted").fetchone()
        if row is None:
            return Membership()
        version, view = row
        wanted = Wanted(version, None if view is None else View.from_json(json.loads(view), version))
        row = database.execute("SELECT roll, ready FROM roll").fetchone()
        if row is None:  # written before there were rolls
            return Membership.of(wanted)
        roll, ready = row
        settled, replicas = database.execute("SELECT workers, replicas FROM settled").fetchone() or ("[]", 0)
        return Membership(wanted, Roll.from_json(json.loads(roll)), _workers(ready), _workers(settled), replicas)


def _listed(workers: Iterable[Worker]) -> str:
    return json.dumps([worker.to_json() for worker in sorted(workers)])


def _workers(text: str) -> frozenset[Worker]:
    return frozenset(Worker.from_json(worker) for worker in json.loads(text))


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All statements of the block, or none."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
