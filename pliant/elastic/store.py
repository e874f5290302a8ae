"""What the config server keeps, in a SQLite file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sqlite3
import time
from dataclasses import replace

from pliant.cluster import Membership, View, Wanted, Worker
from pliant.elastic.membership import ElasticState
from pliant.errors import ConfigError
from pliant.files import PRIVATE_MODE

log = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
RETRY_PERIOD_S = 1.0
_LOCK_TIMEOUT_S = 1.0
_SCHEMA = "CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY CHECK (id = 1), state TEXT NOT NULL)"
_TABLES_OF_0_1 = ("wanted", "roll", "settled")
"""What a state file of version 0.1 has instead, each with one row."""


class StateStore:
    """Keeps one `ElasticState` in SQLite; made with a path, opened by `with`. Not for two threads at once.

    While open, the file is locked: a second server with the same file would answer with a state that the first has
    already changed.

    If not `durable`, the file survives the process but not a loss of power, which saves the wait for the disk; and a file
    that cannot be opened is only a warning: the state is then kept in memory.
    """

    def __init__(self, path: str = IN_MEMORY, *, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        self._database: sqlite3.Connection | None = None
        self.state = ElasticState()
        """What is kept now; change it with `save`."""
        self._is_behind = False
        """Whether the file lacks the last changes, because it could not be written."""
        self._tried_s = 0.0

    def __enter__(self) -> StateStore:
        """Open the file, creating it if there is none, and read what it keeps.

        Raises:
            ConfigError: it cannot be opened, is not ours, or another server has it open.
        """
        try:
            self._open()
        except ConfigError as error:
            if self._durable:
                raise
            log.warning("%s: the state is kept in memory", error)
            self._path = IN_MEMORY
            self._open()
        return self

    def _open(self) -> None:
        try:
            if self._path != IN_MEMORY:  # SQLite would create a file that others can read
                with contextlib.suppress(OSError):  # which it then tells
                    os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_MODE))
            # The thread that serves is not the one that opens; they never use it at the same time.
            self._database = sqlite3.connect(
                self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute(_SCHEMA)
            self._database.execute("COMMIT")
            kept = self._database.execute("SELECT state FROM state").fetchone()
            if kept is None:
                self.state = replace(_load_0_1(self._database), id=secrets.token_hex(8))
            else:
                self.state = ElasticState.from_json(json.loads(kept[0]))
                if not self._durable:  # some of it may not have been written
                    self.save(self.state.recovered())
        except (sqlite3.Error, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(
                f"state file {self._path}: {error}; give a file of a config server, or a new one, in a directory that "
                "exists, and stop any other server that uses it"
            ) from None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def save(self, state: ElasticState) -> None:
        """Keep `state`; it is written when this returns, unless the disk is full or failing.

        Then it is kept in memory, with a warning: training must not wait for a disk. `retry` and the next call write it.
        """
        self.state = state
        self._tried_s = time.monotonic()
        try:
            self._write(state)
        except sqlite3.Error as error:
            if not self._is_behind:
                log.warning(
                    "state file %s: %s. What changes is kept in memory until it can be written", self._path, error
                )
            self._is_behind = True
        else:
            if self._is_behind:
                log.warning("state file %s can be written again, and is up to date", self._path)
            self._is_behind = False

    def retry(self) -> None:
        """Write what is in memory only, if something is, at most once a second."""
        if self._is_behind and time.monotonic() - self._tried_s >= RETRY_PERIOD_S:
            self.save(self.state)

    def _write(self, state: ElasticState) -> None:
        assert self._database is not None, "save() needs an open store: use `with`"
        self._database.execute("INSERT OR REPLACE INTO state VALUES (1, ?)", (json.dumps(state.to_json()),))


def _load_0_1(database: sqlite3.Connection) -> ElasticState:
    """Return the state in a file of version 0.1; an empty one if it is a new file."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables.issuperset(_TABLES_OF_0_1):
        return ElasticState()
    rows = [database.execute(f"SELECT * FROM {name}").fetchone() for name in _TABLES_OF_0_1]
    if None in rows:
        return ElasticState()
    (_, version, view), (_, membership, ready), (_, settled, replicas) = rows
    return ElasticState(
        Wanted(version, None if view is None else View.from_json(json.loads(view), version)),
        Membership.from_json(json.loads(membership)),
        _from_text(ready),
        _from_text(settled),
        replicas,
    )


def _from_text(text: str) -> frozenset[Worker]:
    return frozenset(Worker.from_json(worker) for worker in json.loads(text))
