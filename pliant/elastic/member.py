"""One worker as a member of its job: the roll it follows, and the transport that connects it to the others.

Two threads keep `Member` up to date while the program trains: one holds a request at the config server and learns of
each new roll, the other connects to whoever is new in it. The program only asks which roll is
prepared, and enters it when all members have agreed to, at a step's boundary.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.topology import Strategy
from pliant.comm.transport import Transport, loopback_engines
from pliant.elastic.client import ConfigClient
from pliant.elastic.roll import Roll
from pliant.errors import CommError, ConfigError, EngineClosed, PliantError, ServerUnavailable, ViewChanged
from pliant.identity import WorkerSpec

log = logging.getLogger(__name__)

HOLD_S = 25.0
"""How long the config server may hold a request for the roll."""
RETRY_S = 0.2
CONNECT_S = 60.0
GATHER_S = 300.0
"""How long the workers of a job that is not elastic wait for each other at the start."""
SERVER_LOST_S = 60.0
"""Who needs a new roll and has not reached the config server for this long stops."""
FINISH_S = 10.0
"""How long to try to tell the server that the job is done."""
COLLECTIVE_S = 1800.0
"""A peer may evaluate for long between two steps; whether it lives, its heartbeat tells."""


class Member:
    """This worker's membership. Made by `member_of`; a job that is not elastic has one roll, for ever."""

    def __init__(self, spec: WorkerSpec, transport: Transport) -> None:
        self.me = spec.worker
        self.elastic = spec.elastic
        self.max_members: int | None = None
        """How many of a roll take part: the others stand by. Set before `ready`."""
        self._spec = spec
        self._transport = transport
        self._changed = threading.Condition()
        self._latest = Roll()
        self._prepared: dict[int, Roll] = {}
        self._entered = -1
        self._current: tuple[Worker, ...] = ()
        self.settling = False
        """Whether the program is on its way into a roll: it then turns to the next one as soon as there is one."""
        self._closing = self._finished = False
        self._reached_s = time.monotonic()
        self._errands: queue.SimpleQueue[tuple[str, Worker, str] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def size(self) -> int:
        return len(self._current)

    @property
    def over(self) -> bool:
        return self._latest.over

    @property
    def entered(self) -> int:
        """The number of the roll that this worker is in; -1 before the first."""
        return self._entered

    def view_of(self, roll: Roll) -> View:
        """Those of the roll who take part."""
        members = roll.members[: self.max_members]
        hosts = dict.fromkeys(worker.host for worker in members)
        return View(roll.number, members, tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in hosts))

    # --- following ---

    def start(self) -> None:
        """Begin to follow the roll; a job that is not elastic connects to its only one."""
        if not self.elastic:
            roll = Roll(number=self._spec.view.number, members=self._spec.view.workers)
            self._transport.connect(roll.members, roll.number, timeout_s=GATHER_S)
            self._latest, self._prepared = roll, {roll.number: roll}
            return
        self._transport.on_lost = self._on_lost
        for act in (self._follow, self._prepare, self._run_errands):
            thread = threading.Thread(target=act, name=f"pliant-member{act.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._closing = True
        self._transport.on_lost = None
        self._errands.put(None)
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.name != "pliant-member_follow":  # it may sit in a held request; it dies with the process
                thread.join(timeout=2)

    def _client(self) -> ConfigClient:
        return ConfigClient(self._spec.config_server, self._spec.token)

    def _follow(self) -> None:
        with self._client() as client:
            while not self._closing:
                try:
                    roll = client.wait_roll(self._latest.number, HOLD_S)
                except ServerUnavailable as error:
                    log.debug("%s cannot reach the config server: %s", self.me, error)
                    time.sleep(RETRY_S)
                    continue
                except PliantError as error:
                    log.warning("%s: the config server answered: %s", self.me, error)
                    time.sleep(RETRY_S)
                    continue
                self._reached_s = time.monotonic()
                self._take(roll)
                if roll.over:
                    return

    def _take(self, roll: Roll) -> None:
        with self._changed:
            if roll.number < self._latest.number:
                return
            self._latest = roll
            # Somebody was lost: those who stay have left, or will leave, the view that this worker is in.
            # Waiting there for them would be in vain.
            if self._entered >= 0 and not self._closing:
                with contextlib.suppress(EngineClosed):  # the program may be leaving just now
                    if roll.urgent > self._entered:
                        self._transport.abort(ViewChanged(f"roll {roll.urgent} excludes a lost worker"))
                    elif self.settling and roll.number > self._entered:
                        self._transport.abort(ViewChanged(f"roll {roll.number} has come meanwhile"))
                    elif roll.over and not roll.members and not self._finished:
                        self._transport.abort(ViewChanged("the job is over"))
            self._changed.notify_all()

    def _prepare(self) -> None:
        """Connect to the members of the newest roll, while the program trains in an older one."""
        done = 0
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda beyond=done: self._closing or self._latest.number > beyond)  # type: ignore[misc]
                roll = self._latest
            members = roll.members[: self.max_members]
            if self.me in members:
                try:
                    stale = partial(self._stale, roll)
                    self._transport.connect(members, roll.number, timeout_s=CONNECT_S, cancelled=stale)
                except CommError as error:
                    if not self._stale(roll):
                        log.warning("%s cannot prepare roll %d: %s", self.me, roll.number, error)
                        time.sleep(RETRY_S)
                    continue
            done = roll.number
            with self._changed:
                self._prepared[roll.number] = roll
                for old in sorted(self._prepared)[:-8]:
                    del self._prepared[old]
                self._changed.notify_all()

    def _stale(self, roll: Roll) -> bool:
        return self._closing or self._latest.number != roll.number or self._latest.over

    def _on_lost(self, worker: Worker, why: str) -> None:
        if worker in self._current or worker in self._latest.members:
            self._errands.put(("lost", worker, why))

    def _run_errands(self) -> None:
        with self._client() as client:
            while (errand := self._errands.get()) is not None:
                self._carry(client, *errand)

    def _carry(self, client: ConfigClient, what: str, worker: Worker, why: str) -> None:
        """Tell the server, again and again if it does not answer: others wait for what follows from it."""
        while not self._closing:
            try:
                if what == "lost":
                    client.lost(worker, why, by=self.me)
                elif what == "settled":
                    client.settled(worker, self.max_members or 0)
                elif what == "leave":
                    client.leave(worker)
                return
            except ServerUnavailable:
                time.sleep(RETRY_S)
            except PliantError as error:
                log.warning("the config server takes no note that %s is %s: %s", worker, what, error)
                return

    # --- what the program asks and says ---

    @property
    def prepared(self) -> int:
        """The newest roll to whose members this worker is connected; 0 before there is one."""
        return max(self._prepared, default=0)

    def roll(self, number: int) -> Roll | None:
        """A prepared roll, unless it is long past."""
        return self._prepared.get(number)

    def ready(self) -> None:
        """Say that this worker could take part; it will be listed in a roll to come."""
        if not self.elastic:
            return
        deadline_s = time.monotonic() + SERVER_LOST_S
        with self._client() as client:
            while True:
                try:
                    client.ready(self.me)
                    return
                except ServerUnavailable:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(RETRY_S)

    def await_roll(self, after: int) -> Roll:
        """The newest prepared roll beyond `after`, or one that says that the job is over.

        Raises:
            ServerUnavailable: nothing was heard from the config server for `SERVER_LOST_S`.
        """
        with self._changed:
            while True:
                newest = self.prepared
                if self._latest.over:
                    return self._latest
                if (newest > after or after < 0) and newest in self._prepared and newest == self._latest.number:
                    return self._prepared[newest]
                silent_s = time.monotonic() - self._reached_s
                if self.elastic and silent_s > SERVER_LOST_S + HOLD_S:
                    raise ServerUnavailable(
                        f"{self.me} needs to know who is left, but {self._spec.config_server} has not answered for "
                        f"{silent_s:.0f} s: this worker stops; start the config server again and resume"
                    )
                self._changed.wait(timeout=5.0)

    def enter(self, roll: Roll) -> Engine:
        """Move to this roll's view. Raises CommError if a member is gone already."""
        view = self.view_of(roll)
        with self._changed:
            engine = self._transport.enter(view)
            self._entered, self._current = roll.number, view.workers
            if self._latest.number > roll.number:
                raise ViewChanged(f"roll {self._latest.number} has come meanwhile")
        return engine

    def publish(self, name: str, tensor: object) -> None:
        self._transport.publish(name, tensor)  # type: ignore[arg-type]

    def unpublish(self, prefix: str) -> None:
        self._transport.unpublish(prefix)

    def settled(self) -> None:
        """Say that this worker has the state of the job; returns at once."""
        if self.elastic:
            self._errands.put(("settled", self.me, ""))

    def leave(self) -> None:
        """Ask to be left out of the next roll (a spot notice); returns at once."""
        self._errands.put(("leave", self.me, ""))

    def finish(self) -> None:
        """Tell the server that the job has done its work, so that those who stand by may go. Every member does: any of them
        may be killed before it could."""
        self._finished = True
        deadline_s = time.monotonic() + FINISH_S
        while self.elastic and time.monotonic() < deadline_s:
            try:
                with self._client() as client:
                    client.finish()
                return
            except ServerUnavailable:
                time.sleep(RETRY_S)
            except PliantError as error:
                log.warning("the config server takes no note that the job is done: %s", error)
                return

    def resize(self, size: int) -> None:
        """Ask for another number of workers.

        Raises:
            PliantError: the config server refuses, or cannot be reached.
        """
        with self._client() as client:
            client.resize(size)


class Alone:
    """The membership of a program that was started without `pliant run`: one worker, for ever."""

    elastic = False
    settling = False
    over = False
    entered = -1
    prepared = 0
    size = 1

    def __init__(self, engine: Engine) -> None:
        self.me = engine.view.workers[0]
        self.max_members: int | None = None
        self._engine = engine
        self._roll = Roll(number=0, members=(self.me,))

    def view_of(self, roll: Roll) -> View:
        return self._engine.view

    def roll(self, number: int) -> Roll | None:
        return self._roll

    def ready(self) -> None:
        """Nobody else is waited for."""

    def await_roll(self, after: int) -> Roll:
        return self._roll

    def enter(self, roll: Roll) -> Engine:
        self.entered = 0
        return self._engine

    def publish(self, name: str, tensor: object) -> None:
        """Nobody would ask."""

    def unpublish(self, prefix: str) -> None:
        """Nothing is published."""

    def settled(self) -> None:
        """There is nobody to tell."""

    def leave(self) -> None:
        """There is nobody to tell."""

    def finish(self) -> None:
        """There is nobody to tell."""

    def resize(self, size: int) -> None:
        raise ConfigError(f"resize to {size}: this program runs alone; start it with `pliant run -w -np 1 ...`")


@contextlib.contextmanager
def member_of(spec: WorkerSpec | None) -> Iterator[Member | Alone]:
    """This process as a member of the job that `spec` describes; alone where there is none."""
    config = EngineConfig(collective_timeout_s=COLLECTIVE_S)
    if spec is None:
        with loopback_engines(["127.0.0.1"], config) as engines:
            yield Alone(engines[0])
        return
    mesh = MeshConfig(secret=spec.secret, listen_fd=spec.listen_fd, tls_cert=spec.tls_cert, tls_key=spec.tls_key)
    config = EngineConfig(
        strategy=Strategy(spec.strategy.upper()),
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
        collective_timeout_s=COLLECTIVE_S,
    )
    with Transport(spec.worker, mesh, config).open() as transport:
        member = Member(spec, transport)
        try:
            yield member
        finally:
            member.close()
