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
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from pliant.cluster import Membership, View, Worker
from pliant.comm import order
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.plan import Portion
from pliant.comm.telemetry import TimedBytes
from pliant.comm.topology import Strategy
from pliant.elastic.member import Member
from pliant.elastic.membership import (
    AddWorker,
    ElasticState,
    FinishNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    SettledNotice,
)
from pliant.errors import CollectiveTimeout, CommError, Mismatch, MustBeReplaced, NotStored, ViewChanged, WorkerLost
from pliant.identity import WorkerSpec
from pliant.train import assembly, determinism
from pliant.train import job as job_module
from pliant.train.adaptation import AdaptationSettings
from pliant.train.assembly import JobSettings
from pliant.train.context import capture_rng, restore_rng, seeded_rng
from pliant.train.job import Job
from pliant.train.meeting import MeetingWatch
from pliant.train.rendezvous import Left

HOST = "10.0.0.1"
RUNNER = Worker(HOST, 1)
TOO_LONG = 200_000
"""Switches between workers, after which a run counts as endless."""


class Killed(BaseException):
    """Raised in the thread of a worker that dies, wherever it waits."""


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
class Schedule:
    """The order in which things happen. With a seed it is random."""

    is_eager: bool = False
    """Results and news arrive at once. Else they arrive when nobody can go on without them."""
    is_reversed: bool = False
    """The last worker goes first."""
    seed: int | None = None


LAZY, EAGER, REVERSED = Schedule(), Schedule(is_eager=True), Schedule(is_reversed=True)


# --- the network ---


@dataclass(eq=False)
class Part:
    """What one rank has submitted of a collective."""

    rank: int
    handle: Handle
    target: torch.Tensor
    operands: Sequence[torch.Tensor]
    likeness: tuple[Any, ...]
    """What must be the same on all ranks."""
    portion: Portion | None = None
    """Of which tensor it is a part; None if it is a whole one."""


@dataclass(eq=False)
class Collective:
    """One collective of a view."""

    kind: str
    name: str
    op: str
    root: int
    ranks: tuple[int, ...]
    parts: dict[int, Part] = field(default_factory=dict)
    lost_for: set[int] = field(default_factory=set)
    """The ranks that what somebody had sent has not reached."""
    result: torch.Tensor | None = None

    @property
    def is_over(self) -> bool:
        return len(self.parts) == len(self.ranks) and all(part.handle.done for part in self.parts.values())

    def needs(self, rank: int) -> tuple[int, ...]:
        """The ranks without whom it does not end on this one."""
        if self.kind == "broadcast" or (self.kind == "reduce" and rank != self.root):
            return (self.root,) if self.kind == "broadcast" else (rank,)
        return self.ranks

    def can_end(self, rank: int) -> bool:
        return rank not in self.lost_for and self.parts.keys() >= {*self.needs(rank), rank}

    def compute(self) -> None:
        """Compute the result as soon as everybody has submitted: from then on nobody's memory is needed."""
        if self.kind == "broadcast":
            if self.result is None and self.root in self.parts:
                self.result = self.parts[self.root].target.detach().clone()
        elif self.result is None and len(self.parts) == len(self.ranks):
            operands = [each.detach().view(-1) for rank in self.ranks for each in self.parts[rank].operands]
            if self.kind == "all_gather":
                first = self.parts[self.ranks[0]].target
                self.result = torch.stack(operands).view(len(self.ranks), *first.shape)
            elif self.op == "sum":
                self.result = sum_as_ddp(operands, self.parts[self.ranks[0]].portion)
            else:
                fold = {"max": torch.maximum, "min": torch.minimum}[self.op]
                self.result = functools.reduce(fold, operands[1:], operands[0].clone())

    def end(self, rank: int) -> None:
        """Bring the result to a rank."""
        part = self.parts[rank]
        if self.kind == "all_gather":
            assert self.result is not None, "everybody has submitted"
            part.handle.finish(self.result.clone())
        elif self.kind == "reduce" and rank != self.root:
            part.handle.finish(None)
        else:
            assert self.result is not None, "it was computed"
            if rank != self.root or self.kind != "broadcast":
                part.target.detach().view(-1).copy_(self.result.view(-1))
            part.handle.finish(part.target)

    def fail(self, rank: int, error: Exception) -> None:
        """Fail on a rank. What is written in place is then torn, but others may still get what was sent."""
        part = self.parts[rank]
        part.operands = [each.detach().clone() for each in part.operands]
        if self.kind in ("all_reduce", "reduce") and part.target.is_floating_point():
            part.target.detach().fill_(torch.nan)
        part.handle.fail(error)


def sum_as_ddp(operands: Sequence[torch.Tensor], portion: Portion | None) -> torch.Tensor:
    """Sum in the order that a worker with all replicas has, too."""
    total, count = operands[0].clone(), len(operands)
    whole, first = (portion.whole, portion.begin) if portion is not None else (len(total), 0)
    length = order.chunk_length(whole, total.element_size(), count)
    for begin, end, chunk in order.chunks_between(first, first + len(total), length):
        values = [operands[replica][begin - first : end - first] for replica in order.chain(chunk, count)]
        total[begin - first : end - first] = functools.reduce(torch.add, values)
    return total


@dataclass(eq=False)
class Request:
    """A request for what another rank has published."""

    rank: int
    owner: int
    name: tuple[str, int]
    target: torch.Tensor
    handle: Handle


class Network:
    """The collectives and requests of one view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.collectives: dict[tuple[str, int], Collective] = {}
        self.unfinished: list[Collective] = []
        self.requests: list[Request] = []
        self.gone: dict[int, CommError] = {}
        """The ranks that have left this view, and why."""
        self.dead: set[int] = set()
        """Those of them that have died."""
        self.engines: dict[int, SimulatedEngine] = {}

    def leave(self, rank: int, why: CommError, reached: Callable[[int, bool], bool]) -> None:
        """A rank leaves the view. `reached` tells whether what it has sent of a collective reaches a rank, which may
        depend on whether this rank has the result."""
        if rank in self.gone:
            return
        self.gone[rank] = why
        for each in self.collectives.values():
            if rank in each.ranks:
                part = each.parts.get(rank)
                for other in each.ranks:
                    if other != rank and (part is None or not reached(other, part.handle.succeeded)):
                        each.lost_for.add(other)

    def open_at(self, rank: int) -> Iterator[Collective]:
        """Yield the collectives that a rank waits for, the oldest first."""
        self.unfinished = [each for each in self.unfinished if not each.is_over]
        return (each for each in self.unfinished if rank in each.parts and not each.parts[rank].handle.done)


# --- a worker's engine and membership ---


class Waiter:
    """Whoever waits for a collective gives way to the others."""

    timeout_s = 1e9

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.handle: Handle | None = None

    def wake(self) -> None:
        handle = self.handle
        assert handle is not None, "it was submitted"
        self._actor.wait_until(lambda: handle.done, handle.name)

    def missing(self, _: Handle) -> tuple[str, ...]:
        return ()


class SimulatedEngine(Engine):
    """The collectives of one rank in one view."""

    may_be_written_to = False  # type: ignore[assignment]
    num_lanes = 2  # type: ignore[assignment]
    wire_bytes = 0  # type: ignore[assignment]
    strategy = Strategy("STAR")  # type: ignore[assignment]

    def __init__(self, actor: Actor, network: Network) -> None:
        self.actor, self.network, self.view = actor, network, network.view
        self.rank, self.size = network.view.rank_of(actor.worker), network.view.size
        self.timeout_s = Waiter.timeout_s
        self.ended: Exception | None = None
        self._counts: Counter[str] = Counter()
        network.engines[self.rank] = self

    # --- memory and telemetry ---

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def backpressure(self) -> TimedBytes:
        return TimedBytes(0, 0.0)

    def throughput(self) -> dict[int, Any]:
        return {}

    def limit_kernel_queue(self, num_bytes: int) -> None:
        pass

    def watch(self, watcher: Any) -> None:
        pass

    def set_strategy(self, *_: Any, **__: Any) -> None:
        self.barrier("strategy")

    def release_unused(self) -> None:
        """There is no memory that others have mapped."""

    # --- collectives ---

    def all_reduce(  # type: ignore[override]
        self,
        name: str,
        tensor: Any,
        *,
        op: str = "sum",
        ranks: Any = None,
        contributions: Any = None,
        portion: Portion | None = None,
        **_: Any,
    ) -> Handle:
        operands = [tensor] if contributions is None else contributions
        return self._submit("all_reduce", name, tensor, operands, op, ranks, -1, portion)

    def reduce(self, name: str, tensor: Any, root: int = 0, *, op: str = "sum", ranks: Any = None, **_: Any) -> Handle:  # type: ignore[override]
        return self._submit("reduce", name, tensor, [tensor], op, ranks, root)

    def broadcast(self, name: str, tensor: Any, root: int = 0, *, ranks: Any = None, **_: Any) -> Handle:  # type: ignore[override]
        return self._submit("broadcast", name, tensor, [], "none", ranks, root)

    def all_gather(self, name: str, tensor: Any, *, ranks: Any = None, **_: Any) -> Handle:  # type: ignore[override]
        return self._submit("all_gather", name, tensor, [tensor], "none", ranks, -1)

    def barrier(self, name: str = "barrier", *, ranks: Any = None, timeout_s: float | None = None) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        handle = self.all_reduce(f"barrier:{name}", token, op="max", ranks=ranks)
        if timeout_s is not None and not handle.done:
            self.actor.wait_until(lambda: handle.done, handle.name, may_time_out=True)
            if not handle.done:
                raise CollectiveTimeout(name, timeout_s, ())
        handle.wait()

    def _submit(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        operands: Sequence[torch.Tensor],
        op: str,
        ranks: Any,
        root: int,
        portion: Portion | None = None,
    ) -> Handle:
        world, network = self.actor.world, self.network
        members = tuple(ranks) if ranks is not None else tuple(range(self.size))
        handle = self._handle(name)
        number, self._counts[name] = self._counts[name], self._counts[name] + 1
        likeness = kind, op, root, members, tensor.numel(), tensor.dtype
        part = Part(self.rank, handle, tensor, operands, likeness, portion)
        if self.ended is not None:
            handle.fail(self.ended)
        else:
            made = network.collectives.get((name, number))
            if made is None:
                made = network.collectives[name, number] = Collective(kind, name, op, root, members)
                network.unfinished.append(made)
            if set(members) & network.gone.keys() - made.parts.keys():
                made.lost_for.add(self.rank)
            made.parts[self.rank] = part
            if len({each.likeness for each in made.parts.values()}) > 1:
                for rank, each in made.parts.items():
                    if not each.handle.done:
                        made.fail(rank, Mismatch(f"{name}: {[each.likeness for each in made.parts.values()]}"))
            else:
                made.compute()
                if world.schedule.is_eager:
                    for rank in members:
                        if rank in made.parts and made.can_end(rank) and not made.parts[rank].handle.done:
                            made.end(rank)
        world.pass_moment(self.actor, name)
        return handle

    def fetch(self, ranks: Sequence[int], name: str, outs: Sequence[Any]) -> Handle:
        """Fetch what these ranks lend: each tensor from one of them, in turn."""
        world, handle = self.actor.world, self._handle(f"fetch {name}")
        owners = [ranks[number % len(ranks)] for number in range(len(outs))]
        asked = [
            Request(self.rank, owner, (name, number), out, self._handle(f"fetch {name} {number}"))
            for number, (owner, out) in enumerate(zip(owners, outs, strict=True))
        ]

        def on_end() -> None:
            failed = next((each.handle.error for each in asked if each.handle.error is not None), None)
            if failed is not None and not handle.done:
                handle.fail(failed)
            elif all(each.handle.done for each in asked) and not handle.done:
                handle.finish(outs[0])

        for each in asked:
            each.handle.add_done_callback(on_end)
            if self.ended is not None:
                each.handle.fail(self.ended)
        if self.ended is None:
            self.network.requests += asked
        if not asked:
            handle.finish(None)
        world.pass_moment(self.actor, "request")
        return handle

    def save(self, name: str, tensor: Any) -> None:
        self.actor.member.transport.lend(name, [tensor.detach().clone()])

    def _handle(self, name: str) -> Handle:
        if self.actor.is_dead:
            raise Killed
        waiter = Waiter(self.actor)
        waiter.handle = Handle(name, waiter, self.rank)  # type: ignore[arg-type]
        return waiter.handle

    def abort(self, error: Exception) -> None:
        """Fail everything that is open here, and everything that comes."""
        self.ended = self.ended or error
        for each in self.network.open_at(self.rank):
            each.fail(self.rank, error)
        for asked in self.network.requests:
            if asked.rank == self.rank and not asked.handle.done:
                asked.handle.fail(error)


class SimulatedTransport:
    """What a worker lends, and its way from view to view."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.stored: dict[tuple[str, int], torch.Tensor] = {}
        """What others may fetch, by the name of the list and its place there."""

    def lend(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        assert all(each.is_contiguous() for each in tensors), f"{name} cannot be read as it is"
        self.reclaim(name)
        self.stored |= {(name, number): each for number, each in enumerate(tensors)}

    def reserve(self, *_: Any, **__: Any) -> None:
        """Memory is there at once."""

    def reclaim(self, prefix: str) -> None:
        for each in [each for each in self.stored if each[0].startswith(prefix)]:
            del self.stored[each]

    def enter(self, view: View) -> Engine:
        actor = self._actor
        for rank, worker in enumerate(view.workers):
            if not actor.world.lives(worker):
                raise WorkerLost(str(worker), rank, "it is gone")
        actor.leave_view(ViewChanged(f"{actor.worker} has moved to view {view.number}"))
        network = actor.world.networks.setdefault(view.number, Network(view))
        actor.engine = SimulatedEngine(actor, network)
        return actor.engine

    def abort(self, error: Exception) -> None:
        if self._actor.engine is not None:
            self._actor.engine.abort(error)


class SimulatedMember(Member):
    """One worker as a member of the job: without threads, and told by the world of each new membership."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._world = actor, actor.world
        self.me, self.elastic, self.max_members, self.entering = actor.worker, True, None, False
        self.transport = SimulatedTransport(actor)  # type: ignore[assignment]
        self._latest, self._wanted, self._current = Membership(), (), ()
        self._prepared, self._newest, self._entered, self._closing = {}, 0, -1, False
        self._changed = self  # type: ignore[assignment]
        self._follower = mock.Mock(reached_s=math.inf)
        self._sender = self  # type: ignore[assignment]

    def start(self) -> None:
        pass

    close = start

    # --- news ---

    @property
    def has_news(self) -> bool:
        return self._world.server.membership != self._latest

    def hear(self) -> None:
        """Hear of the newest membership, and connect to its members."""
        self._on_change(self._world.server.snapshot)
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
        call(self._world)

    def ask(self, call: Callable[[Any], None], _: float) -> None:
        call(self._world)


# --- workers and their world ---


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
            and self.job._parts is not None
            and self.job._parts.rendezvous.has_state
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
        events: Sequence[Death | Arrival] = (),
        adapting: Callable[[], AdaptationSettings] = AdaptationSettings,
        has_shadow: bool = True,
    ) -> None:
        self.schedule, self.networks = schedule, dict[int, Network]()
        self.has_shadow = has_shadow
        """Whether new workers warm up alone before they report that they are ready."""
        self.server = ElasticState()
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
            assert job._trainer is not None, "the program trains"
            actor.state = {**job._trainer.state.read(), "gradients": None}
            actor.state["progress"] = actor.state["progress"][:3]  # how often one met at the end depends on the workers
            actor.state["layouts"] = None
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
        yield from (functools.partial(self._deliver, engine, each) for engine in engines for each in _arrived(engine))
        yield from (functools.partial(self._serve, engine, each) for engine in engines for each in _served(engine))
        yield from (functools.partial(self._notice, engine, each) for engine in engines for each in _hopeless(engine))
        yield from (functools.partial(self._report, *each) for each in self._unreported)
        yield from (actor.member.hear for actor in living if actor.member.has_news)
        yield from (actor.take_turn for actor in living if actor.may_time_out)

    def _deliver(self, engine: SimulatedEngine, collective: Collective) -> None:
        collective.end(engine.rank)

    def _serve(self, engine: SimulatedEngine, asked: Request) -> None:
        """Bring what another worker lends: what is there now."""
        stored = engine.network.engines[asked.owner].actor.member.transport.stored  # type: ignore[attr-defined]
        if asked.name not in stored:
            asked.handle.fail(NotStored(f"{asked.name} is not stored"))
            return
        asked.target.detach().view(-1).copy_(stored[asked.name].view(-1))
        asked.handle.finish(asked.target)

    def _notice(self, engine: SimulatedEngine, what: Collective | Request) -> None:
        """Notice that somebody is gone. All that it takes part in fails."""
        network = engine.network
        involved = what.ranks if isinstance(what, Collective) else (what.owner,)
        rank, why = next((rank, network.gone[rank]) for rank in involved if rank in network.gone)
        for each in network.collectives.values():
            is_open = engine.rank in each.parts and not each.parts[engine.rank].handle.done
            if rank in each.ranks and (rank in network.dead or not each.can_end(engine.rank)):
                each.lost_for.add(engine.rank)
                if is_open:
                    each.fail(engine.rank, why)
        for asked in network.requests:
            if asked.rank == engine.rank and asked.owner == rank and not asked.handle.done:
                asked.handle.fail(why)

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
            self.server = self.server.after(notice)

    def ready(self, worker: Worker) -> None:
        self.tell(ReadyNotice(worker))

    def settled(self, worker: Worker, replicas: int, membership: int) -> None:
        self.tell(SettledNotice(worker, replicas, membership))

    def finish(self) -> None:
        self.tell(FinishNotice())

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


def _arrived(engine: SimulatedEngine) -> Iterator[Collective]:
    """The collectives whose results can come to a rank."""
    return (each for each in engine.network.open_at(engine.rank) if each.can_end(engine.rank))


def _served(engine: SimulatedEngine) -> Iterator[Request]:
    """The requests of a rank that can be answered."""
    network = engine.network
    there = network.engines.keys() - network.gone.keys()
    return (
        each for each in network.requests if each.rank == engine.rank and not each.handle.done and each.owner in there
    )


def _hopeless(engine: SimulatedEngine) -> Iterator[Collective | Request]:
    """What will never come to a rank."""
    rank, network = engine.rank, engine.network
    if network.gone:
        for each in network.open_at(rank):
            if not each.can_end(rank) and network.gone.keys() & set(each.ranks):
                yield each
        for asked in network.requests:
            if asked.rank == rank and not asked.handle.done and asked.owner in network.gone:
                yield asked


@contextlib.contextmanager
def _without_threads(world: World) -> Iterator[None]:
    """Run jobs on the simulated network, without threads of their own and without the search for garbage, which would
    end the generators of one worker in the thread of another."""

    @contextlib.contextmanager
    def open_member(_: object) -> Iterator[SimulatedMember]:
        assert world.running is not None, "a worker makes its job"
        yield world.running.member

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            mock.patch.object(job_module, "open_member", open_member),
            mock.patch.object(Job, "_notify"),
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
