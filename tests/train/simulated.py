"""Several workers of one job in one process, on a network and a config server that do what the test says.

Each worker runs a whole program in a thread of its own: job, trainer, model, optimizers, loader, gradients and guard are
real. The network, the transport and the config server are not, but `elastic.membership` gives the memberships. Only one
thread runs at a time, and it gives way where it waits for others. So a run is a function of its schedule and its events,
and each worker has random generators of its own.

A moment is the submission of a collective, or of a request for the state. Events happen at moments: a worker dies, and
what it has sent reaches some of the others; or a new worker comes. A loss is noticed where somebody waits in vain.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from simulated_engine import Killed, Network, SimulatedEngine, SimulatedTransport

from pliant.cluster import ClusterSnapshot, Membership, View, Worker
from pliant.elastic.member import Member
from pliant.elastic.membership import (
    AddWorker,
    ElasticState,
    FinishNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    RestoreNotice,
    SettledNotice,
)
from pliant.errors import CommError, MustBeReplaced, NotWanted, WorkerLost
from pliant.identity import WorkerSpec
from pliant.train import assembly, determinism, worker_run
from pliant.train.adaptation import AdaptationSettings
from pliant.train.context import capture_rng, restore_rng, seeded_rng
from pliant.train.declared import JobSettings
from pliant.train.job import Job
from pliant.train.meeting import MeetingWatch
from pliant.train.rendezvous import Left

HOST = "10.0.0.1"
JOB = "0"
"""The id of the job's state; a server that has lost it has another one."""
RUNNER = Worker(HOST, 1)
TOO_LONG = 200_000
"""Switches between workers, after which a run counts as endless."""


class Hang(AssertionError):
    """Nobody can go on."""


Program = Callable[[Job, "Notes"], None]


class Notes(dict[Any, Any]):
    """What a worker's program has seen, by place. A place that is seen again must look the same."""

    def __setitem__(self, place: Any, value: Any) -> None:
        assert place not in self or _same(self[place], value), f"{place}: first {self[place]}, then {value}"
        super().__setitem__(place, value)


# --- what happens, and in which order ---


@dataclass(frozen=True)
class Death:
    """A worker dies at a moment. What it has sent by then reaches these of the others."""

    moment: int
    victim: int
    reaches: frozenset[int] = frozenset()
    is_replaced: bool = False
    """Whether its runner starts another in its place."""


@dataclass(frozen=True)
class Arrival:
    """A new worker comes at a moment."""

    moment: int


@dataclass(frozen=True)
class ServerLoss:
    """The config server comes back without its state at a moment."""

    moment: int


@dataclass(frozen=True)
class Schedule:
    """The order in which things happen. With a seed it is random."""

    is_eager: bool = False
    """Results and news arrive at once. Else they arrive when nobody can go on without them."""
    is_reversed: bool = False
    """The last worker goes first."""
    seed: int | None = None


LAZY, EAGER, REVERSED = Schedule(), Schedule(is_eager=True), Schedule(is_reversed=True)


# --- workers ---


class SimulatedMember(Member):
    """One worker as a member of the job: without threads, and told by the world of each new membership."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._world = actor, actor.world
        self.me, self.elastic, self.max_members, self.entering = actor.worker, True, None, False
        self.transport = SimulatedTransport(actor)  # type: ignore[assignment]
        self._latest, self._wanted, self._current = Membership(), (), ()
        self._prepared, self._newest, self._entered, self._closing = {}, 0, -1, False
        self._restored, self._reports, self._lost = 0, {}, set()
        self.known = ClusterSnapshot()
        self._was_removed = False
        self._changed = self  # type: ignore[assignment]
        self._follower = mock.Mock(lost_s=None)
        self._sender = self  # type: ignore[assignment]

    def start(self) -> None:
        pass

    close = start

    # --- news ---

    @property
    def has_news(self) -> bool:
        return not self._latest.over and (self._world.server.membership != self._latest or not self.is_up_to_date)

    @property
    def is_up_to_date(self) -> bool:
        """Whether this worker knows nothing yet, or has heard of the server since it has last lost its state."""
        server = self._world.server
        return not self.known.id or (server.id, server.restored) == (self.known.id, self.known.restored)

    def hear(self) -> None:
        """Hear of the newest membership, and connect to its members."""
        self._world.running = self._actor
        if not self._world.server.snapshot.has_kept(self.known):
            self._world.restore(self.known)
        self.known = self._world.server.snapshot
        self._on_change(self.known)
        members = self._latest.members[: self.max_members]
        if self.me not in members or all(self._world.lives(worker) for worker in members):
            self._note_prepared(self._latest)

    # --- in place of the condition that threads wait for ---

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait(self, timeout: float) -> None:
        """Wait for a change that somebody waits for."""
        before = self._latest, len(self._prepared)
        self._actor.wait_until(lambda: before != (self._latest, len(self._prepared)), "a membership")

    # --- in place of the connection to the config server ---

    def report(self, _: str, call: Callable[[Any], None]) -> None:
        with contextlib.suppress(NotWanted):
            call(self._world)

    def ask(self, call: Callable[[Any], None], _: float) -> None:
        call(self._world)


def _closed_lock() -> threading.Lock:
    """Return a lock on which one thread waits until another lets it go on."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Actor:
    """A worker: its thread, and what it has seen."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.has_shadow = world.has_shadow and bool(world.networks)
        """Whether it warms up: others train already."""
        self.worker = Worker(HOST, 10000 + number)
        self.member = SimulatedMember(self)
        self.engine: SimulatedEngine | None = None
        self.job: Job | None = None
        self.notes = Notes()
        self.commits: list[int] = []
        self.state: dict[str, Any] | None = None
        """The state of the job when the program was over."""
        self.outcome: BaseException | None = None
        self.is_dead = self.has_ended = self.is_noted = False
        self.where = "the start"
        self.waits: Callable[[], bool] | None = None
        self.may_time_out = False
        self._random = seeded_rng(5)
        self._may_run = _closed_lock()
        self._thread = threading.Thread(target=self._run, name=f"pliant-simulated-{number}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        how = "dead" if self.is_dead else "ended" if self.has_ended else f"waits for {self.where}"
        return f"worker {self.number} ({how}; view {self.member.entered})"

    @property
    def is_there(self) -> bool:
        return not self.is_dead and not self.has_ended

    @property
    def has_state(self) -> bool:
        return (
            self.is_there
            and self.job is not None
            and self.job._run.parts is not None
            and self.job._run.parts.rendezvous.has_state
        )

    @property
    def can_run(self) -> bool:
        return not self.has_ended and (self.is_dead or self.waits is None or self.waits())

    def take_turn(self) -> None:
        """Let this worker run until it waits."""
        restore_rng(self._random)
        self.world.running = self
        self._may_run.release()
        self.world.gave_way.acquire()
        self.world.running = None
        self._random = capture_rng()

    def join(self) -> None:
        self._thread.join(timeout=10)

    # --- in the thread of the worker ---

    def wait_until(self, is_there: Callable[[], bool], where: str, *, may_time_out: bool = False) -> None:
        """Give way to the others until something is there, or the wait has taken too long."""
        if self.is_dead:
            raise Killed
        self.where, self.waits, self.may_time_out = where, is_there, may_time_out
        self.world.gave_way.release()
        self._may_run.acquire()
        self.waits, self.may_time_out = None, False
        if self.is_dead:
            raise Killed

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self.is_dead:
                self.world.play(self)
        except BaseException as error:
            self.outcome = error
        finally:
            self.has_ended = True
            self.world.gave_way.release()

    def leave_view(self, why: CommError) -> None:
        """Leave the present view in good order: the others get what this worker has finished."""
        engine, self.engine = self.engine, None
        if engine is not None:
            arrives = self.world.arrives
            engine.network.leave(engine.rank, why, lambda rank, is_done: is_done or arrives())
            engine.abort(why)


# --- the world ---


class World:
    """A job, from its first worker to its last one."""

    def __init__(
        self,
        program: Program,
        size: int,
        *,
        replicas: int = 3,
        sync: str = "fifo",
        verify: int = 1,
        schedule: Schedule = LAZY,
        events: Sequence[Death | Arrival | ServerLoss] = (),
        adapting: Callable[[], AdaptationSettings] = AdaptationSettings,
        has_shadow: bool = True,
    ) -> None:
        self.schedule, self.networks = schedule, dict[int, Network]()
        self.has_shadow = has_shadow
        """Whether new workers warm up alone before they report that they are ready."""
        self.server = ElasticState(id=JOB)
        self._runner_knows = ClusterSnapshot()
        self._untold: list[tuple[Actor | None, Any]] = []
        """What a server that has lost its state has yet to be told, and by whom."""
        self.moments: list[tuple[int, str]] = []
        """Who has submitted what."""
        self.actors: list[Actor] = []
        self.running: Actor | None = None
        self.gave_way = _closed_lock()
        self._program, self._sync, self._replicas, self._verify, self._adapting = (
            program,
            sync,
            replicas,
            verify,
            adapting,
        )
        self._events = sorted(events, key=lambda event: event.moment)
        self._unreported: list[tuple[Actor, bool]] = []
        """The dead that the server has yet to hear of, and whether they are replaced."""
        self._chance = random.Random(schedule.seed) if schedule.seed is not None else None
        self._size = size

    # --- a run ---

    def run(self) -> None:
        """Run all programs to their ends. Raises Hang, or the first error that is no answer to a loss."""
        before = capture_rng()
        with _without_threads(self):
            try:
                first = [self._new_actor() for _ in range(self._size)]
                self.tell(PutView(View(0, tuple(each.worker for each in first), (RUNNER,))))
                for _ in range(TOO_LONG):
                    if not self._advance():
                        break
                else:
                    raise Hang(f"no end: {self.actors}")
            finally:
                for each in self.actors:
                    each.is_dead = each.is_dead or not each.has_ended
                    while not each.has_ended:
                        each.take_turn()
                    each.join()
                restore_rng(before)

    def _new_actor(self) -> Actor:
        self.actors.append(Actor(self, len(self.actors)))
        return self.actors[-1]

    def play(self, actor: Actor) -> None:
        """Run the program of a worker, in its thread."""
        settings = JobSettings(
            self._replicas,
            "D1",
            sync=self._sync,
            slice_bytes=1 << 20,
            in_flight_bytes=1 << 20,
            adapting=self._adapting(),
            verify=self._verify,
        )
        spec = None
        if actor.has_shadow:
            spec = WorkerSpec(worker=actor.worker, view=View(0, (actor.worker,), (RUNNER,)), secret=b"", shadow=True)
        with Job(spec, settings) as job:
            actor.job = job
            job.on_commit(lambda event: None if actor.is_dead else actor.commits.append(event.step))
            self._program(job, actor.notes)
            assert job._run.trainer is not None, "the program trains"
            actor.state = {**job._run.trainer.state.read(), "gradients": None}
            actor.state["progress"] = actor.state["progress"][:3]  # how often one met at the end depends on the workers
            actor.state["layouts"] = None
            actor.state["run"] = ""  # the id of this run, which no other one has
            decided = actor.state["adaptation"]  # which has times, too
            actor.state["adaptation"] = decided["batch_size"], decided["learning_rate_factor"]
            actor.state = _copied(actor.state)

    # --- what happens next ---

    def _advance(self) -> bool:
        """Let one thing happen; return False if everything is over."""
        for actor in self.actors:
            if actor.has_ended and not actor.is_dead and not actor.is_noted:
                self._end(actor)
        dying = [actor for actor in self.actors if actor.is_dead and not actor.has_ended]
        if dying:
            dying[0].take_turn()
            return True
        if all(actor.has_ended for actor in self.actors):
            return False
        choices = self._choices()
        if self._chance is not None and self._chance.random() < 0.5:  # else in the usual order
            every = list(choices)
            choices = iter(self._chance.sample(every, min(1, len(every))))
        chosen = next(choices, None)
        if chosen is None:
            raise Hang(f"nobody can go on: {self.actors}")
        chosen()
        return True

    def _choices(self) -> Iterator[Callable[[], None]]:
        """Yield what may happen next, in the order in which it happens if there is no chance."""
        living = [actor for actor in self.actors if actor.is_there]
        if self.schedule.is_reversed:
            living.reverse()
        if self.schedule.is_eager:
            yield from (functools.partial(self._report, *each) for each in self._unreported)
            yield from (actor.member.hear for actor in living if actor.member.has_news)
        yield from (actor.take_turn for actor in living if actor.can_run)
        engines = [actor.engine for actor in living if actor.engine is not None and actor.engine.ended is None]
        yield from (functools.partial(engine.deliver, each) for engine in engines for each in engine.arrived())
        yield from (functools.partial(engine.answer, each) for engine in engines for each in engine.answerable())
        yield from (functools.partial(engine.notice, each) for engine in engines for each in engine.hopeless())
        yield from (functools.partial(self._report, *each) for each in self._unreported)
        yield from (actor.member.hear for actor in living if actor.member.has_news)
        if not self.server.snapshot.has_kept(self._runner_knows):
            yield functools.partial(self.restore, self._runner_knows)
        yield from (actor.take_turn for actor in living if actor.may_time_out)

    def _report(self, actor: Actor, is_replaced: bool) -> None:
        """Do what a runner does when a worker has died."""
        self._unreported.remove((actor, is_replaced))
        self.tell(LossNotice(actor.worker))
        if is_replaced:
            self._add_worker()

    def _add_worker(self) -> None:
        if not self.server.membership.over:
            self.tell(AddWorker(self._new_actor().worker))

    def _end(self, actor: Actor) -> None:
        """A program has come to its end."""
        actor.is_noted, error = True, actor.outcome
        self._disconnect(actor, "it left the job", lambda _, is_done: is_done or self.arrives())
        if isinstance(error, MustBeReplaced):
            self._unreported.append((actor, True))
        elif error is not None and not isinstance(error, Left):
            raise error

    # --- for workers ---

    def tell(self, notice: Any) -> None:
        """Tell the config server something; those who are dead tell nothing."""
        if self.running is None or not self.running.is_dead:
            if self.server.id != JOB:  # the sender tries again
                self._untold.append((self.running, notice))
                return
            self.server = self.server.after(notice)
            self._runner_knows = self.server.snapshot

    def restore(self, known: ClusterSnapshot) -> None:
        """Somebody tells the server what it has lost; then all others can tell it what they had to."""
        self.server = self.server.after(RestoreNotice(known))
        untold, self._untold = self._untold, []
        for actor, notice in untold:
            if actor is None or not actor.is_dead:
                with contextlib.suppress(NotWanted):
                    self.server = self.server.after(notice)

    def _lose_server(self) -> None:
        if all(actor.member.is_up_to_date for actor in self.actors if actor.is_there):
            self.server = ElasticState(id=f"{self.server.restored + 1}")

    def ready(self, worker: Worker) -> None:
        self.tell(ReadyNotice(worker))

    def settled(self, worker: Worker, replicas: int, membership: int) -> None:
        self.tell(SettledNotice(worker, replicas, membership))

    def finish(self, worker: Worker) -> None:
        self.tell(FinishNotice(worker))

    def lives(self, worker: Worker) -> bool:
        return any(actor.worker == worker and actor.is_there for actor in self.actors)

    def arrives(self) -> bool:
        """Whether what somebody had sent before it left arrives before the news of that."""
        return self.schedule.is_eager if self._chance is None else self._chance.random() < 0.5

    def pass_moment(self, actor: Actor, name: str) -> None:
        """A worker has submitted something: let happen what is due, and perhaps give way."""
        moment = len(self.moments)
        self.moments.append((actor.number, name))
        while self._events and self._events[0].moment <= moment:
            event = self._events.pop(0)
            if isinstance(event, Arrival):
                self._add_worker()
            elif isinstance(event, ServerLoss):
                self._lose_server()
            else:
                self._kill(self.actors[event.victim % len(self.actors)], event)
        if actor.is_dead:
            raise Killed
        if self._chance is not None and self._chance.random() < 0.2:
            actor.wait_until(lambda: True, "its turn")

    def _kill(self, actor: Actor, death: Death) -> None:
        others = [each for each in self.actors if each is not actor and each.has_state]
        if not actor.is_there or not others:
            return
        actor.is_dead, actor.engine = True, None
        self._unreported.append((actor, death.is_replaced))
        self._disconnect(actor, "the test says so", lambda number, _: number in death.reaches)

    def _disconnect(self, actor: Actor, why: str, reached: Callable[[int, bool], bool]) -> None:
        """Take a worker out of every view: also of those that it has not entered, where others may wait for it."""
        for network in self.networks.values():
            if actor.worker in network.view.workers:
                rank = network.view.rank_of(actor.worker)
                if actor.is_dead:
                    network.dead.add(rank)
                numbers = [worker.port - 10000 for worker in network.view.workers]
                error = WorkerLost(str(actor.worker), rank, why)
                network.leave(rank, error, lambda other, is_done, known=numbers: reached(known[other], is_done))  # type: ignore[misc]


@contextlib.contextmanager
def _without_threads(world: World) -> Iterator[None]:
    """Run jobs on the simulated network, without threads of their own and without the search for garbage, which would
    end the generators of one worker in the thread of another."""

    @contextlib.contextmanager
    def open_member(*_: object) -> Iterator[SimulatedMember]:
        assert world.running is not None, "a worker makes its job"
        yield world.running.member

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            mock.patch.object(worker_run, "open_member", open_member),
            mock.patch.object(worker_run.WorkerRun, "notify"),
            mock.patch.object(MeetingWatch, "begin"),
            mock.patch.object(assembly, "refuse_untracked_scalers", return_value=lambda: None),
            mock.patch.object(determinism, "self_check", return_value=determinism.SelfCheck(True, "")),
        ):
            yield
    finally:
        if was_enabled:
            gc.enable()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _same(mine: Any, theirs: Any) -> bool:
    return not differences(mine, theirs)


def differences(mine: Any, theirs: Any, place: str = "") -> list[str]:
    """Where two states differ; tensors are equal bit by bit."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return [] if mine.dtype == theirs.dtype and torch.equal(mine, theirs) else [place]
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return [f"{place}: {sorted(map(str, mine.keys() ^ theirs.keys()))}"]
        return [found for key in mine for found in differences(mine[key], theirs[key], f"{place}[{key}]")]
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [f"{place}: {len(mine)} and {len(theirs)}"]
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{place}[{index}]")]
    shown = f": {mine} and {theirs}" if len(f"{mine}{theirs}") < 100 else ""
    return [] if type(mine) is type(theirs) and mine == theirs else [f"{place}{shown}"]
