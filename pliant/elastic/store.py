"""What the config server keeps, in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from pliant.cluster import Membership, View, Wanted, Worker
from pliant.elastic.membership import ElasticState
from pliant.errors import ConfigError

IN_MEMORY = ":memory:"
_LOCK_TIMEOUT_S = 1.0
# The tables keep the names that version 0.1 gave them, so that its state files can still be read.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS wanted (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL, view TEXT)",
    "CREATE TABLE IF NOT EXISTS roll (id INTEGER PRIMARY KEY CHECK (id = 1), roll TEXT NOT NULL, ready TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS settled (id INTEGER PRIMARY KEY CHECK (id = 1), workers TEXT NOT NULL, replicas INTEGER)",
    "CREATE TABLE IF NOT EXISTS newcomers (id INTEGER PRIMARY KEY CHECK (id = 1), workers TEXT NOT NULL, stepped INTEGER)",
    "CREATE TABLE IF NOT EXISTS leaving (id INTEGER PRIMARY KEY CHECK (id = 1), workers TEXT NOT NULL, unused INTEGER)",
)


class StateStore:
    """Keeps one `ElasticState` in SQLite; made with a path, opened by `with`. Not for two threads at once.

    While open, the file is locked: a second server with the same file would answer with a state that the first has
    already changed.
    """

    def __init__(self, path: str = IN_MEMORY) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self.state = ElasticState()
        """What is kept now; change it with `save`."""

    def __enter__(self) -> StateStore:
        """Open the file, creating it if there is none, and read what it keeps.

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
            self.state = _load(self._database)
        except (sqlite3.Error, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(
                f"state file {self._path}: {error}; give a file of a config server, or a new one, in a directory that "
                "exists, and stop any other server that uses it"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def save(self, state: ElasticState) -> None:
        """Keep `state`; it is on disk when this returns.

        Raises:
            sqlite3.Error: it could not be written; what was kept before still is.
        """
        assert self._database is not None, "save() needs an open store: use `with`"
        view = None if state.wanted.view is None else json.dumps(state.wanted.view.to_json())
        membership = json.dumps(state.membership.to_json())
        rows: dict[str, tuple[object, ...]] = {
            "wanted": (state.wanted.version, view),
            "roll": (membership, _to_text(state.ready)),
            "settled": (_to_text(state.settled), state.replicas),
            "newcomers": (_to_text(state.newcomers), state.stepped),
            "leaving": (_to_text(state.leaving), None),
        }
        with self._database:  # commits, or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            for table, values in rows.items():
                self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES (1, ?, ?)", values)
        self.state = state


def _load(database: sqlite3.Connection) -> ElasticState:
    rows = [database.execute(f"SELECT * FROM {table}").fetchone() for table in ("wanted", "roll", "settled")]
    if None in rows:  # a new file
        return ElasticState()
    (_, version, view), (_, membership, ready), (_, settled, replicas) = rows
    # A file of version 0.1 knows of no newcomers, and of nobody who leaves.
    _, newcomers, stepped = database.execute("SELECT * FROM newcomers").fetchone() or (1, "[]", 0)
    _, leaving, _ = database.execute("SELECT * FROM leaving").fetchone() or (1, "[]", None)
    return ElasticState(
        Wanted(version, None if view is None else View.from_json(json.loads(view), version)),
        Membership.from_json(json.loads(membership)),
        _from_text(ready),
        _from_text(settled),
        replicas,
        _from_text(newcomers),
        stepped,
        _from_text(leaving),
    )


def _to_text(workers: Iterable[Worker]) -> str:
    return json.dumps([worker.to_json() for worker in sorted(workers)])


def _from_text(text: str) -> frozenset[Worker]:
    return frozenset(Worker.from_json(worker) for worker in json.loads(text))
