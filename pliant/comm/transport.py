"""The transport of one worker: its connections, shared memory and I/O thread, through all views.

A transport outlives views. `connect` makes sure that there is a connection to every member of the next view while the
present one continues; `enter` moves to it on the existing connections. Of each pair the greater worker (by host, then
port) connects and the lesser waits, so it does not matter who is in which view, or has which rank. A connection to a
worker outside the view stays open until that worker leaves.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from pliant.cluster import View, Worker
from pliant.comm.collective import Collectives
from pliant.comm.connection import PeerLink, Poller
from pliant.comm.cuda_staging import CudaStaging
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.lending import Lending
from pliant.comm.memory import SharedMemory
from pliant.comm.mesh import Mesh, MeshConfig
from pliant.comm.reactor import Connections, Reactor, ReactorCall
from pliant.errors import CommError, ConfigError, HandshakeRefused

CANCEL_S = 0.02
"""Interval at which a waiting `connect` calls `cancelled`."""


class Transport:
    """Connections, shared memory and the I/O thread of one worker. Outlives a view; each Engine borrows it."""

    def __init__(self, me: Worker, mesh: MeshConfig, config: EngineConfig) -> None:
        self.engine: Engine | None = None
        """The engine of the view that the worker is in."""
        self.on_lost: Callable[[Worker, str], None] | None = None
        """Called with worker and reason when a connection broke without a goodbye, or a peer fell silent.

        It is called on the engine's thread and must not block.
        """
        self.on_left: Callable[[Worker], None] | None = None
        """The same for a worker that said goodbye."""
        self.memory = SharedMemory()
        poller = Poller()
        self.connections = Connections(
            me, poller, heartbeat_timeout_s=config.heartbeat_timeout_s, are_watched=config.are_watched
        )
        self.connections.on_lost, self.connections.on_left = self._on_lost, self._on_left
        self.connections.on_change = self._notify_changed
        self.reactor = Reactor(self.connections, poller, linger_s=config.linger_s)
        self.lending = Lending(self.memory, self.reactor, self.cuda_staging)
        self.lending.links = self.connections.links.values
        self.connections.on_returned, self.connections.on_mapped = self.lending.on_returned, self.lending.on_mapped
        self.connections.on_dropped = lambda link, may_live: self.lending.on_dropped(link, may_live=may_live)
        self._me = me
        self._config = config
        self._mesh = Mesh(me, mesh, self)
        self._cuda: CudaStaging | None = None
        self._making_cuda = threading.Lock()
        self._changed = threading.Condition()
        """Notified when connections were added or dropped, or could not be made."""
        self._connecting: set[Worker] = set()

    # --- lifetime ---

    @contextlib.contextmanager
    def open(self) -> Iterator[Transport]:
        """Listen, and serve until the end of the `with`; then say goodbye to all peers.

        Raises:
            CommError: the port, or the worker's name on this host, is in use.
        """
        _transports.add(self)
        self.reactor.start()
        try:
            self._mesh.open()
            yield self
        finally:
            self.close()

    def start(self) -> None:
        """Serve connections that `add_connection` brings, without listening for any. The thread starts when it is needed."""
        _transports.add(self)
        self.reactor.start_when_needed()

    def close(self) -> None:
        """Say goodbye to all peers and close everything."""
        self._mesh.close()
        self.close_engine()
        _transports.discard(self)

    def close_engine(self) -> None:
        """Send what is still queued, say goodbye and end the thread. Handles that still wait fail with EngineClosed."""
        self.reactor.close()
        self.lending.close()
        with self._making_cuda:
            if self._cuda is not None:
                self._cuda.close()
            self._cuda = None
        self.memory.close()

    def close_in_child(self) -> None:
        """In a forked child: close the parent's connections, or the parent's peers would not see it die."""
        self._mesh.close_in_child()
        self.reactor.close_in_child()

    # --- connections ---

    def is_connected(self, worker: Worker) -> bool:
        """Return whether there is a connection to `worker` that is not known to be dead."""
        link = self.connections.links.get(worker)
        return link is not None and not link.is_leaving

    def connect(
        self, workers: Sequence[Worker], number: int, *, timeout_s: float, cancelled: Callable[[], bool] | None = None
    ) -> None:
        """Block until there is a connection to each of `workers`. Thread-safe. Existing connections cost nothing.

        `number` is the number of the view in which they will meet; error messages show it.

        Raises:
            CommError: a worker did not come in time, or `cancelled` returned true; says who is missing.
            HandshakeRefused: a worker refused the connection.
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
                        raise self._missing_error(missing, number, errors, None if stopped else timeout_s)
                    for worker in missing:
                        if worker < self._me and worker not in self._connecting and worker not in errors:
                            self._start_connecting(worker, deadline_s, given_up, errors)
                    left_s = max(0.001, deadline_s - time.monotonic())
                    self._changed.wait(left_s if cancelled is None else min(left_s, CANCEL_S))
        finally:
            given_up.set()

    def _start_connecting(
        self, worker: Worker, deadline_s: float, given_up: threading.Event, errors: dict[Worker, CommError]
    ) -> None:
        def connect() -> None:
            try:
                self.add_connection(worker, self._mesh.connect(worker, deadline_s, given_up.is_set))
            except CommError as error:
                errors[worker] = error
            finally:
                with self._changed:
                    self._connecting.discard(worker)
                    self._changed.notify_all()

        try:
            threading.Thread(target=connect, name="pliant-connect", daemon=True).start()
        except RuntimeError as error:
            raise CommError(
                f"{self._me} cannot connect to {worker} ({error}): let its user have more threads"
            ) from None
        self._connecting.add(worker)  # under the lock that the thread needs to discard it

    def _missing_error(
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
        """Return whether a newcomer may use the name of `worker`: not if there is a living connection to it."""
        answers = queue.SimpleQueue[bool]()
        check = partial(self.connections.check_duplicate, worker, answers.put)
        self.reactor.post(ReactorCall(check, lambda _: answers.put(False)))
        return answers.get()

    def add_connection(self, worker: Worker, sock: socket.socket) -> None:
        """Serve an authenticated connection; an older one to the same worker is dropped.

        Raises:
            CommError: the transport is closed; the connection is closed, too.
        """
        shared = worker.host == self._me.host
        connections = self.connections
        link = PeerLink(-1, worker, sock, shared=shared, receiver=connections, unsent=connections.unsent, view=-1)
        self.reactor.need_thread()
        try:
            self._call(partial(connections.add, link))
        except CommError:
            link.close()
            raise

    def _on_lost(self, worker: Worker, why: str) -> None:
        if self.on_lost is not None:
            self.on_lost(worker, why)

    def _on_left(self, worker: Worker) -> None:
        if self.on_left is not None:
            self.on_left(worker)

    def _notify_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- views ---

    def enter(self, view: View) -> Engine:
        """Move to another view, at once, and return its engine.

        Open collectives and requests of the old engine fail with ViewChanged, and it refuses further calls. What this
        worker owed its peers in the old view is still delivered. Frames of faster peers wait until this worker has
        entered.

        Memory: the old view writes to none of this worker's memory from here on, but a peer that is still in it may.
        Tensors of collectives that have *completed* are free at once. Those of failed ones are free when a collective
        of all members of the new view (such as a barrier) is complete: each member took part in it, so each has left
        the old view. Nothing holds back a worker that was given up while it still lives; end it before its peers'
        memory is used again.

        Raises:
            ConfigError: `view` does not come after the present one, or this worker is not in it.
            WorkerLost: the connection to a member is gone; nothing has changed.
            CommError: there was never a connection to a member; nothing has changed.
        """
        rank = view.rank_of(self._me)
        if self.engine is not None and view.number <= self.engine.view.number:
            raise ConfigError(f"view {view.number} does not come after {self.engine.view.number}: views only go on")
        collectives = Collectives(view, rank, self.lending)
        self._call(partial(self.reactor.enter, collectives))
        self.lending.is_new = False
        self.engine = Engine(collectives, self._config, self)
        return self.engine

    def abort(self, error: Exception) -> None:
        """Fail everything that is open or submitted later in the present view with `error`. Thread-safe."""
        if self.engine is not None:
            self.engine.abort(error)

    def give_up(self, worker: Worker, why: str) -> None:
        """Count a worker as lost, though its connection is open: it keeps the others waiting. Thread-safe."""
        self.reactor.post(ReactorCall(partial(self.connections.give_up, worker, why)))

    def _call(self, act: Callable[[], None]) -> None:
        """Call `act` on the engine's thread and wait for it."""
        if self.reactor.is_current:
            raise ConfigError("the engine's thread cannot wait for itself: leave `on_lost` first, then do this")
        outcome = queue.SimpleQueue[Exception | None]()

        def run() -> None:
            try:
                act()
            except Exception as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self.reactor.post(ReactorCall(run, outcome.put))
        self.reactor.wake()
        error = outcome.get()
        if error is not None:
            raise error

    # --- memory ---

    def cuda_staging(self) -> CudaStaging:
        """Return the object that copies CUDA tensors; memory that it has pinned stays pinned over views."""
        with self._making_cuda:
            if self._cuda is None:
                self._cuda = CudaStaging(self.memory)
            return self._cuda

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor in memory that the workers of this host share; valid in every view."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return self.memory.empty(math.prod(sizes), dtype).view(sizes)

    def reserve(
        self, tensors: Sequence[tuple[int, torch.dtype]] = (), num_bytes: int = 0, *, pins: bool = False
    ) -> None:
        """Have memory for these tensors (lengths and types), or for so many bytes of any, before a view needs it: the first
        use of a page costs more than most that is done with it. If `pins`, pin it, and the memory for what is lent. Blocks
        the calling thread, which should not be the one that trains."""
        prepare = self.cuda_staging().pin if pins else torch.Tensor.zero_
        made = []
        for length, dtype in tensors:
            made.append(self.memory.empty(length, dtype))
            prepare(made[-1])
        if num_bytes:
            prepare(self.memory.reserve(num_bytes))
        if pins:
            self.lending.prepare()

    def lend(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let peers fetch these tensors as they are, on whatever device. Nothing is copied until somebody asks, so they
        must not change until they are reclaimed.

        Raises:
            ConfigError: a tensor is not contiguous.
        """
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ConfigError(f"lend {name!r}: only contiguous tensors can be read as they are; use `save`")
        self.lending.lend(name, tensors)

    def reclaim(self, prefix: str) -> None:
        """Lend nothing any more under names that begin with `prefix`; what was asked for is still sent."""
        self.lending.reclaim(prefix)


@contextlib.contextmanager
def connected(view: View, me: Worker, mesh: MeshConfig, config: EngineConfig) -> Iterator[Engine]:
    """Open a transport for worker `me`, connect it to all others of the view, and yield its engine.

    Raises:
        CommError: a worker did not come, or refused the connection.
    """
    with Transport(me, mesh, config).open() as transport:
        transport.connect(view.workers, view.number, timeout_s=mesh.join_timeout_s)
        yield transport.enter(view)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for transport in list(_transports):
        transport.close_in_child()
    _transports.clear()


os.register_at_fork(after_in_child=_close_all_in_child)


# --- all ranks in one process: for tests, and for jobs with a single worker ---
# The transports are the real ones, each with its thread; only the sockets are pairs made here instead of connections
# between processes.


def view_of(hosts: Sequence[str], number: int = 0) -> View:
    """Return a view with one worker for each entry of `hosts` (names or addresses)."""
    workers = tuple(Worker(host, 10000 + rank) for rank, host in enumerate(hosts))
    runners = tuple(Worker(host, 38080) for host in dict.fromkeys(hosts))
    return View(number, workers, runners)


@contextlib.contextmanager
def loopback_transports(workers: Sequence[Worker], config: EngineConfig | None = None) -> Iterator[list[Transport]]:
    """Yield one transport for each worker, connected to one another, in no view yet."""
    made = [Transport(worker, MeshConfig(secret=b"loopback"), config or EngineConfig()) for worker in workers]
    with contextlib.ExitStack() as stack:
        for transport in made:
            transport.start()
            stack.callback(transport.close)
        for index, transport in enumerate(made):
            for other in range(index):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                transport.add_connection(workers[other], ours)
                made[other].add_connection(workers[index], theirs)
        yield made


@contextlib.contextmanager
def loopback_engines(hosts: Sequence[str], config: EngineConfig | None = None) -> Iterator[list[Engine]]:
    """Yield one engine for each rank, connected to one another."""
    view = view_of(hosts)
    with loopback_transports(view.workers, config) as made:
        yield [transport.enter(view) for transport in made]
