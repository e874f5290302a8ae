"""What the engines of one worker have in common in all views: memory, stored tensors, connections, thread, GPU copies.

One worker's place in the job's traffic, through all views: where it listens, whom it is connected to.

A station outlives views. `connect` sees to it that there is a connection to everybody of the next view,
while the present one goes on; `enter` moves to it, on connections that live on. Of each pair the
greater worker (by host, then port) calls and the lesser waits, so it does not matter who is in which
view, or has which rank. A connection to a worker outside the view stays open until that one leaves.

All ranks in one process: for tests, and for reading how a collective runs.

The stations are the real ones, each with its thread; only the sockets are pairs made here instead
of connections between processes. Ranks on one host share memory as they would elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from pliant.cluster import View, Worker
from pliant.comm.connection import Link, Poller
from pliant.comm.cuda_staging import CudaStage
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.memory import SharedMemory, Store
from pliant.comm.mesh import Mesh, MeshConfig
from pliant.comm.reactor import Connections, Errand, Reactor
from pliant.errors import CommError, ConfigError, HandshakeRefused


class Workshop:
    """Made once per worker, used by one engine after the other."""

    def __init__(self, me: Worker, *, heartbeat_timeout_s: float, linger_s: float) -> None:
        self.memory = SharedMemory()
        self.store = Store()
        poller = Poller()
        self.connections = Connections(me, poller, heartbeat_timeout_s=heartbeat_timeout_s)
        self.reactor = Reactor(self.connections, poller, linger_s=linger_s)
        self._cuda: CudaStage | None = None
        self._making = threading.Lock()

    def stage(self) -> CudaStage:
        """What copies CUDA tensors; the memory that it has pinned stays so over views."""
        with self._making:
            if self._cuda is None:
                self._cuda = CudaStage(self.memory)
            return self._cuda

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in memory that the workers of this host share."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return self.memory.empty(math.prod(sizes), dtype).view(sizes)

    def close(self) -> None:
        """Send what is still queued, say goodbye and end. Handles that still wait fail with EngineClosed."""
        self.reactor.close()
        with self._making:
            if self._cuda is not None:
                self._cuda.close()
            self._cuda = None
        self.memory.close()


CANCEL_S = 0.02
"""How often a waiting `connect` looks whether it shall go on."""


class Station:
    """The connections, memory and thread of one worker; `enter` gives the engine of a view."""

    def __init__(self, me: Worker, mesh: MeshConfig, config: EngineConfig) -> None:
        self._me = me
        self._config = config
        self._workshop = Workshop(me, heartbeat_timeout_s=config.heartbeat_timeout_s, linger_s=config.linger_s)
        self._reactor = self._workshop.reactor
        self._connections = self._workshop.connections
        self._connections.on_change = self._wake
        self._mesh = Mesh(me, mesh, self)
        self._engine: Engine | None = None
        self._changed = threading.Condition()
        """Connections have come or gone, or calls have failed."""
        self._calling: set[Worker] = set()

    # --- lifetime ---

    @contextlib.contextmanager
    def open(self) -> Iterator[Station]:
        """Listen, and serve until the end of the `with`; then say goodbye to all.

        Raises:
            CommError: the port, or the worker's name on this host, is taken.
        """
        self.start()
        try:
            self._mesh.open()
            yield self
        finally:
            self.close()

    def start(self) -> None:
        """Serve connections, without listening for any: for those that `take` brings."""
        _stations.add(self)
        self._reactor.start()

    def close(self) -> None:
        """Say goodbye to all and close everything."""
        self._mesh.close()
        self._workshop.close()
        _stations.discard(self)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, or its peers would not see it die."""
        self._mesh.abandon()
        self._reactor.abandon()

    # --- whom it is connected to ---

    @property
    def on_lost(self) -> Callable[[Worker, str], None] | None:
        """Called when a connection broke without a goodbye, or a peer fell silent; on the engine's thread: be quick."""
        return self._connections.on_lost

    @on_lost.setter
    def on_lost(self, call: Callable[[Worker, str], None] | None) -> None:
        self._connections.on_lost = call

    def is_connected(self, worker: Worker) -> bool:
        """Whether there is a connection to `worker` that is not known to be dead."""
        link = self._connections.links.get(worker)
        return link is not None and not link.said_bye

    def connect(
        self,
        workers: Sequence[Worker],
        number: int,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Return when there is a connection to each of `workers`; from any thread. Those that are there cost nothing.

        `number` is that of the view in which they are to meet.

        Raises:
            CommError: somebody did not come in time, or `cancelled` has become true; says who is missing.
            HandshakeRefused: somebody would not have us.
        """
        deadline_s = time.monotonic() + timeout_s
        others = [worker for worker in workers if worker != self._me]
        errors: dict[Worker, CommError] = {}
        given_up = threading.Event()
        try:
            with self._changed:
                while missing := [worker for worker in others if not self.is_connected(worker)]:
                    for refusal in errors.values():
                        if isinstance(refusal, HandshakeRefused):
                            raise refusal
                    stopped = cancelled is not None and cancelled()
                    if stopped or time.monotonic() > deadline_s:
                        raise self._missing(missing, number, errors, None if stopped else timeout_s)
                    for worker in missing:
                        if worker < self._me and worker not in self._calling and worker not in errors:
                            self._calling.add(worker)
                            self._begin_call(worker, number, deadline_s, given_up, errors)
                    left_s = max(0.001, deadline_s - time.monotonic())
                    self._changed.wait(left_s if cancelled is None else min(left_s, CANCEL_S))
        finally:
            given_up.set()

    def _begin_call(
        self,
        worker: Worker,
        number: int,
        deadline_s: float,
        given_up: threading.Event,
        errors: dict[Worker, CommError],
    ) -> None:
        def call() -> None:
            try:
                self.take(worker, self._mesh.call(worker, number, deadline_s, given_up.is_set))
            except CommError as error:
                errors[worker] = error
            finally:
                with self._changed:
                    self._calling.discard(worker)
                    self._changed.notify_all()

        threading.Thread(target=call, name="pliant-call", daemon=True).start()

    def _missing(
        self, missing: Sequence[Worker], number: int, errors: dict[Worker, CommError], timeout_s: float | None
    ) -> CommError:
        names = ", ".join(map(str, missing))
        if timeout_s is None:
            return CommError(f"{self._me} no longer waits for {names} of view {number}: it was told not to")
        causes = "; ".join(str(errors[worker]) for worker in missing if worker in errors)
        return CommError(
            f"{self._me} waited {timeout_s:g} s for {names} of view {number}{causes and f' ({causes})'}: "
            "is the runner on that host up, and the port reachable?"
        )

    def admit(self, worker: Worker) -> bool:
        """Whether a worker that has come may have a connection: not if it has one that lives."""
        free: list[bool] = []
        done = threading.Event()

        def answer(value: bool) -> None:
            free.append(value)
            done.set()

        self._reactor.post(Errand(lambda: self._connections.claim(worker, answer), lambda _: answer(False)))
        done.wait()
        return free[0]

    def take(self, worker: Worker, sock: socket.socket) -> None:
        """Serve an authenticated connection; an older one to the same worker is dropped.

        Raises:
            CommError: the station is closed; so is the connection.
        """
        shared = worker.host == self._me.host
        lobby, unsent = self._connections.lobby, self._connections.unsent
        link = Link(-1, worker, sock, shared=shared, receiver=lobby, unsent=unsent, view=-1)
        try:
            self._call(lambda: self._connections.add(link))
        except CommError:
            link.close()
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- views ---

    @property
    def engine(self) -> Engine | None:
        """The engine of the view that the worker is in."""
        return self._engine

    def enter(self, view: View) -> Engine:
        """Move to another view, at once, and return its engine.

        The old engine's open collectives and requests fail with ViewChanged, and it refuses further
        calls. What this worker owed its peers in the old view is still delivered. Frames of faster peers
        wait until this worker has entered.

        Memory: the old view writes to none of this worker's from here on, but a peer that is still in it
        may. Tensors of collectives that have *completed* are free at once. Those of failed ones are
        free when a collective of all members of the new view (such as a barrier) is complete: each took
        part in it, so each has left the old view. Nothing holds back a worker that was given up while
        it still lives; end it before its peers' memory is used again.

        Raises:
            ConfigError: `view` does not come after the present one, or this worker is not in it.
            WorkerLost: the connection to a member is gone; nothing has changed.
            CommError: there was never one; nothing has changed.
        """
        rank = view.rank_of(self._me)
        if self._engine is not None and view.number <= self._engine.view.number:
            raise ConfigError(f"view {view.number} does not come after {self._engine.view.number}: views only go on")
        engine = Engine(view, rank, self._config, self._workshop)
        self._call(engine.enter)
        self._engine = engine
        return engine

    def abort(self, error: Exception) -> None:
        """Fail all that is open in the present view with `error`, and what is submitted to it later; any thread."""
        if self._engine is not None:
            self._engine.abort(error)

    def _call(self, act: Callable[[], None]) -> None:
        """Do this on the engine's thread, and wait for it."""
        if self._reactor.is_current:
            raise ConfigError("the engine's thread cannot wait for itself: leave `on_lost` first, then do this")
        outcome: list[Exception | None] = []
        done = threading.Event()

        def end(error: Exception | None) -> None:
            outcome.append(error)
            done.set()

        def run() -> None:
            try:
                act()
            except Exception as error:
                end(error)
            else:
                end(None)

        self._reactor.hasten(Errand(run, end))
        done.wait()
        if outcome[0] is not None:
            raise outcome[0]

    # --- memory ---

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in memory that the workers of this host share; good in every view."""
        return self._workshop.empty(shape, dtype)

    def publish(self, name: str, tensor: torch.Tensor) -> None:
        """Let others `request` this very memory, without a copy: they get what is there when it is sent.

        Raises:
            ConfigError: the tensor is not contiguous CPU memory.
        """
        if tensor.is_cuda or not tensor.is_contiguous():
            raise ConfigError(f"publish {name!r}: only contiguous CPU memory can be read as it is; use `save`")
        self._workshop.store.publish(name, tensor.detach().view(-1))

    def unpublish(self, prefix: str) -> None:
        """Forget what was published under names that begin so; what has been asked for is still sent."""
        self._workshop.store.unpublish(prefix)


@contextlib.contextmanager
def connected(view: View, me: Worker, mesh: MeshConfig, config: EngineConfig) -> Iterator[Engine]:
    """The engine of worker `me`, connected to all others of the view.

    Raises:
        CommError: somebody did not come, or would not have us.
    """
    with Station(me, mesh, config).open() as station:
        station.connect(view.workers, view.number, timeout_s=mesh.join_timeout_s)
        yield station.enter(view)


_stations: weakref.WeakSet[Station] = weakref.WeakSet()


def _abandon_all() -> None:
    for station in list(_stations):
        station.abandon()
    _stations.clear()


os.register_at_fork(after_in_child=_abandon_all)


def view_of(hosts: Sequence[str], number: int = 0) -> View:
    """A view with one worker for each entry of `hosts` (names or addresses)."""
    workers = tuple(Worker(host, 10000 + rank) for rank, host in enumerate(hosts))
    runners = tuple(Worker(host, 38080) for host in dict.fromkeys(hosts))
    return View(number, workers, runners)


@contextlib.contextmanager
def loopback_stations(workers: Sequence[Worker], config: EngineConfig | None = None) -> Iterator[list[Station]]:
    """One station for each worker, connected to one another, in no view yet."""
    made = [Station(worker, MeshConfig(secret=b"loopback"), config or EngineConfig()) for worker in workers]
    with contextlib.ExitStack() as stack:
        for station in made:
            station.start()
            stack.callback(station.close)
        for index, station in enumerate(made):
            for other in range(index):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                station.take(workers[other], ours)
                made[other].take(workers[index], theirs)
        yield made


@contextlib.contextmanager
def loopback_engines(hosts: Sequence[str], config: EngineConfig | None = None) -> Iterator[list[Engine]]:
    """One engine for each rank, connected to one another."""
    view = view_of(hosts)
    with loopback_stations(view.workers, config) as made:
        yield [station.enter(view) for station in made]
