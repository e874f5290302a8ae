"""One worker as a member of its job: the membership that it follows, and its connections to the other members.

While the program trains, two threads keep `Member` up to date: `ConfigFollower` learns of every new membership, and a
second thread connects to the workers that are new in it. The program only asks which membership is prepared, and enters it
at a step's boundary, when all members have agreed to. `Session` is the simpler way in for programs that only want the
engine of a fixed set of workers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pliant.cluster import BY_PROGRAM, DEFAULT_RUNNER_PORT, ClusterSnapshot, Membership, View, Worker
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.topology import Strategy
from pliant.comm.transport import Transport, connected, loopback_transports, view_of
from pliant.elastic.client import ConfigFollower, ConfigSender, MembershipClient
from pliant.errors import GIVEN_UP, CommError, ConfigError, EngineClosed, PliantError, ServerUnavailable, ViewChanged
from pliant.identity import WorkerSpec, worker_spec
from pliant.progress_board import ProgressBoard, note_failure
from pliant.uncaught import report_uncaught

log = logging.getLogger(__name__)

RETRY_S = 0.2
CONNECT_S = 60.0
GATHER_S = 300.0
"""How long the workers of a job that is not elastic wait for each other at the start."""
SERVER_AWAY_S = 600.0
"""A worker that needs the config server stops if it has not reached it for this long."""
SAY_AWAY_S = 10.0
"""When it says that it waits for the config server."""
FINISH_S = 10.0
"""How long to try to tell the server that the job is done."""
COLLECTIVE_S = 1800.0
"""How long the workers of a job that is not elastic wait for each other. One may evaluate for long between two steps. In an
elastic job `--stall-timeout` limits such a wait, by the loss of the worker that is waited for."""
KEPT_MEMBERSHIPS = 8


class Member:
    """This worker's part in the membership. Made by `open_member`; a job that is not elastic has one membership for ever."""

    def __init__(self, spec: WorkerSpec, transport: Transport) -> None:
        self.me = spec.worker
        self.elastic = spec.elastic
        self.max_members: int | None = None
        """How many members take part; the others stand by. Set before `ready`."""
        self.entering = False
        """Whether the program is on its way into a membership: a newer one then interrupts it."""
        self.on_prepare: Callable[[View], None] | None = None
        """Called with the view of a coming membership, in a thread of its own, while the program trains in an older one. All
        members wait with the change until it has returned."""
        self.transport = transport
        self._spec = spec
        self._changed = threading.Condition()
        self._latest = Membership()
        self._wanted: tuple[Worker, ...] = ()
        self._prepared: dict[int, Membership] = {}
        self._newest = 0
        self._entered = -1
        self._restored = 0
        self._reports: dict[str, Callable[[MembershipClient], object]] = {}
        """The last report of each kind, for a server that has forgotten it."""
        self._current: tuple[Worker, ...] = ()
        self._lost: set[Worker] = set()
        self._closing = False
        self._was_removed = False
        """Whether a request has removed this worker: a member that is not wanted. A loss removes it from both at once."""
        self._follower = ConfigFollower(spec.config_server, spec.token, self._on_change, lost_level=logging.DEBUG)
        self._sender = ConfigSender(spec.config_server, spec.token, origin=BY_PROGRAM)
        self._preparing = threading.Thread(target=self._prepare, name="pliant-prepare-members", daemon=True)

    @property
    def size(self) -> int:
        """Workers that take part in the current view."""
        return len(self._current)

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._latest.over

    @property
    def was_told_to_end(self) -> bool:
        """Whether the job is over, or about to be, because nobody is wanted any more, rather than finished."""
        return not self._wanted

    @property
    def is_wanted(self) -> bool:
        """Whether this worker shall take part, now or later."""
        return self.me in self._wanted

    def is_given_up(self, membership: Membership) -> bool:
        """Whether `membership` is without this worker because it was reported lost, rather than removed by a request."""
        return membership.urgent > self._entered >= 0 and not (self.is_wanted or self._was_removed)

    @property
    def entered(self) -> int:
        """The number of the membership that this worker is in; -1 before the first."""
        return self._entered

    @property
    def prepared(self) -> int:
        """The newest membership to whose members this worker is connected; 0 before there is one."""
        return self._newest

    def prepared_membership(self, number: int) -> Membership | None:
        """Return a prepared membership; None if it is long past."""
        return self._prepared.get(number)

    def view_of(self, membership: Membership) -> View:
        """Return the view of the members that take part."""
        members = membership.members[: self.max_members]
        hosts = dict.fromkeys(worker.host for worker in members)
        return View(membership.number, members, tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in hosts))

    # --- following the config server ---

    def start(self) -> None:
        """Begin to follow the membership. In a job that is not elastic, connect to all workers of its only one."""
        if not self.elastic:
            fixed = Membership(number=self._spec.view.number, members=self._spec.view.workers)
            self.transport.connect(fixed.members, fixed.number, timeout_s=GATHER_S)
            self._latest, self._prepared, self._newest = fixed, {fixed.number: fixed}, fixed.number
            return
        self.transport.on_lost, self.transport.on_left = self._on_lost, self._on_left
        self._follower.start(ClusterSnapshot())
        self._preparing.start()

    def close(self) -> None:
        """Stop the threads; messages that were not sent are dropped."""
        self._closing = True
        self.transport.on_lost = self.transport.on_left = None
        self._follower.stop()
        with self._changed:
            self._changed.notify_all()
        self._sender.close()
        if self._preparing.ident is not None:
            self._preparing.join(timeout=2)

    def _on_change(self, snapshot: ClusterSnapshot) -> None:
        membership = snapshot.membership
        with self._changed:
            if membership.number < self._latest.number:
                return
            self._latest, self._wanted = membership, snapshot.wanted.workers
            self._sender.job = snapshot.id
            if snapshot.restored > self._restored:
                self._restored = snapshot.restored
                # That it is ready comes last: with that all is said.
                for what, report in reversed(list(self._reports.items())):
                    self._sender.report(what, report)
            if self.me in membership.members:
                self._was_removed = not self.is_wanted
            # Once a worker was lost, the others have left, or will leave, the view that this worker is in. Waiting for
            # them there would be in vain. The end of the job is no such reason: like any other change that is not urgent,
            # all members agree on it in a step, and end before the next.
            if membership.urgent > self._entered:
                for worker in set(self._current).difference(membership.members, self._wanted):
                    # Somebody has reported it lost. It may only be stopped, and write to this worker's memory later.
                    self.give_up(worker, GIVEN_UP)
                self._abort(f"membership {membership.urgent} excludes a lost worker")
            elif self.entering and membership.number > self._entered and not membership.over:
                self._abort(f"membership {membership.number} has come meanwhile")
            self._changed.notify_all()
        if membership.over:
            self._follower.stop()

    def give_up(self, worker: Worker, why: str) -> None:
        """Count a member as lost, and report it: it keeps this worker waiting for too long. Thread-safe."""
        with contextlib.suppress(EngineClosed):
            self.transport.give_up(worker, why)

    def _abort(self, why: str) -> None:
        """Fail what this worker waits for in its view."""
        if self._entered >= 0 and not self._closing:
            with contextlib.suppress(EngineClosed):  # the program may be leaving just now
                self.transport.abort(ViewChanged(why))

    def _prepare(self) -> None:
        """Connect to the members of the newest membership, while the program trains in an older one."""
        done, said = 0, ""
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda beyond=done: self._closing or self._latest.number > beyond)  # type: ignore[misc]
                membership = self._latest
            members = membership.members[: self.max_members]
            if self.me in members:
                try:
                    stale = partial(self._is_stale, membership)
                    self.transport.connect(members, membership.number, timeout_s=CONNECT_S, cancelled=stale)
                except CommError as error:
                    if not self._is_stale(membership):
                        why = f"{self.me} cannot connect to membership {membership.number}: {error}"
                        if why != said:
                            log.warning("%s", why)
                        said = why
                        time.sleep(RETRY_S)
                    continue
                if self.on_prepare is not None:
                    try:
                        self.on_prepare(self.view_of(membership))
                    except Exception:
                        log.exception("%s could not prepare for membership %d", self.me, membership.number)
            done = membership.number
            with self._changed:
                self._note_prepared(membership)
                self._changed.notify_all()

    def _note_prepared(self, membership: Membership) -> None:
        self._prepared[membership.number] = membership
        for old in sorted(self._prepared)[:-KEPT_MEMBERSHIPS]:
            del self._prepared[old]
        self._newest = max(self._prepared)

    def _is_stale(self, membership: Membership) -> bool:
        return self._closing or self._latest.number != membership.number or self._latest.over

    def _on_lost(self, worker: Worker, why: str) -> None:
        self._lost.add(worker)
        if worker in self._current or worker in self._latest.members:
            self._sender.report(f"{worker} is lost", lambda client: client.lost(worker, why, by=self.me))

    def _on_left(self, worker: Worker) -> None:
        """Report a worker that has ended in good order though the others still count on it: somebody has ended it at once,
        or its program has."""
        if worker in self._latest.members and not self._latest.over:
            self._sender.report(f"{worker} is gone", lambda client: client.lost(worker, "it has left", by=self.me))

    # --- for the program ---

    def ready(self) -> None:
        """Report that this worker could take part; it will be a member later.

        Raises:
            NotWanted: the worker was removed meanwhile, and must end.
            ServerUnavailable: the config server has not answered for `SERVER_AWAY_S`.
        """
        if self.elastic:
            self._sender.ask(self._remember(f"{self.me} is ready", lambda client: client.ready(self.me)), SERVER_AWAY_S)

    def wait_for_membership(self, after: int) -> Membership:
        """Return the newest prepared membership beyond `after`, or one that says that the job is over.

        Raises:
            ServerUnavailable: nothing was heard from the config server for `SERVER_AWAY_S`.
        """
        has_said = False
        with self._changed:
            while True:
                newest = self.prepared
                if self._latest.over:
                    return self._latest
                if (newest > after or after < 0) and newest in self._prepared and newest == self._latest.number:
                    return self._prepared[newest]
                lost_s = self._follower.lost_s
                silent_s = 0.0 if lost_s is None else time.monotonic() - lost_s
                if silent_s > SAY_AWAY_S and not has_said:
                    has_said = True
                    log.warning(
                        "%s, but it does not answer: start it again at this address; this worker waits for %.0f s",
                        self._why_waiting(),
                        SERVER_AWAY_S,
                    )
                if silent_s > SERVER_AWAY_S:
                    raise ServerUnavailable(
                        f"{self._why_waiting()}, but it has not answered for {silent_s:.0f} s: this worker stops; start the "
                        "config server again, and the job with `--resume auto`"
                    )
                self._changed.wait(timeout=1.0)

    def _why_waiting(self) -> str:
        lost = [str(worker) for worker in self._current if worker in self._lost]
        why = f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost, and " if lost else ""
        return f"{self.me} waits: {why}only the config server {self._spec.config_server} can say who goes on"

    def enter(self, membership: Membership) -> Engine:
        """Move to the view of `membership`; raise CommError if a member is gone already."""
        view = self.view_of(membership)
        with self._changed:
            engine = self.transport.enter(view)
            self._entered, self._current = membership.number, view.workers
            if self._latest.number > membership.number and not self._latest.over:
                raise ViewChanged(f"membership {self._latest.number} has come meanwhile")
        return engine

    def settled(self, *, after_step: bool = False) -> None:
        """Report that this worker has the state of the job, or `after_step` that it has done a step in its present
        membership; return at once."""
        if self.elastic:
            replicas, membership = self.max_members or 0, self._entered if after_step else 0
            what = f"{self.me} is settled"
            self._sender.report(
                what, self._remember(what, lambda client: client.settled(self.me, replicas, membership))
            )

    def leave(self) -> None:
        """Ask to be left out of the next membership, as after a preemption notice; return at once.

        If the job is over already, its time for ending between two steps has passed: this worker waits for the others no
        longer.
        """
        if self.over:
            self._sender.submit(lambda _: self._abort("the job is over, and the time for its last step has passed"))
        elif self.elastic:
            what = f"{self.me} leaves"
            self._sender.report(what, self._remember(what, lambda client: client.leave(self.me)))

    def _remember(
        self, what: str, report: Callable[[MembershipClient], Membership]
    ) -> Callable[[MembershipClient], Membership]:
        """Keep a report, to be made again to a server that was restored; return it."""
        self._reports[what] = report
        return report

    def finish(self) -> None:
        """Report that the job has done its work, so that members that stand by may end.

        Every member does: any of them may be killed before it could.
        """
        if not self.elastic:
            return
        try:
            self._sender.ask(lambda client: client.finish(self.me), FINISH_S)
        except ServerUnavailable:
            return
        except PliantError as error:
            log.warning("the config server refused the report that the job is done: %s", error)

    def resize(self, size: int) -> None:
        """Ask for another number of workers.

        Raises:
            PliantError: there is no config server, it refuses, or it cannot be reached.
        """
        if not self._spec.config_server:
            raise ConfigError(f"resize to {size}: the workers of this job are fixed; start it with `pliant run -w`")
        self._sender.ask(lambda client: client.resize(size), 0.0)


@contextlib.contextmanager
def open_member(spec: WorkerSpec | None, board: ProgressBoard | None = None) -> Iterator[Member]:
    """Yield this process as a member of the job that `spec` describes; without one, as the only worker of a fixed job."""
    with contextlib.ExitStack() as stack:
        if spec is None:
            view = view_of(["127.0.0.1"])
            spec = WorkerSpec(worker=view.workers[0], view=view, secret=b"alone")
            config = EngineConfig(collective_timeout_s=COLLECTIVE_S)
            [transport] = stack.enter_context(loopback_transports(view.workers, config))
        else:
            config = EngineConfig(
                strategy=Strategy(spec.strategy.upper()),
                heartbeat_timeout_s=spec.heartbeat_timeout_s,
                are_watched=spec.board_fd is not None,
                collective_timeout_s=threading.TIMEOUT_MAX if spec.elastic else COLLECTIVE_S,
            )
            transport = stack.enter_context(Transport(spec.worker, _mesh_config(spec), config).open())
        if board is not None:
            board.take_signals_on(transport.reactor.thread_number)
            transport.connections.on_pulse = board.show_pulse
        member = Member(spec, transport)
        stack.callback(member.close)
        yield member


@dataclass(frozen=True, slots=True)
class Session:
    """A worker that has joined a fixed set of workers: who it is, and the engine that connects it to the others."""

    spec: WorkerSpec
    engine: Engine

    @property
    def view(self) -> View:
        return self.spec.view

    @classmethod
    @contextlib.contextmanager
    def join(cls, spec: WorkerSpec | None = None, *, timeout_s: float = 60.0) -> Iterator[Session]:
        """Join the workers that the environment (or `spec`) describes; leave them at the end of the `with`.

        Raises:
            NotLaunched: this process was not started by `pliant run`.
            CommError: the others did not come within `timeout_s`.
        """
        with contextlib.ExitStack() as stack:
            if spec is None:
                spec = worker_spec()
                rank = spec.view.rank_of(spec.worker)
                report_uncaught(lambda: rank, partial(note_failure, spec))
                stack.callback(ProgressBoard.open(spec).close)
            config = EngineConfig(
                strategy=Strategy(spec.strategy.upper()),
                heartbeat_timeout_s=spec.heartbeat_timeout_s,
                are_watched=spec.board_fd is not None,
            )
            mesh = _mesh_config(spec, timeout_s)
            yield cls(spec, stack.enter_context(connected(spec.view, spec.worker, mesh, config)))


def _mesh_config(spec: WorkerSpec, timeout_s: float = 60.0) -> MeshConfig:
    return MeshConfig(
        secret=spec.secret,
        join_timeout_s=timeout_s,
        listen_fd=spec.listen_fd,
        tls_cert=spec.tls_cert,
        tls_key=spec.tls_key,
    )
