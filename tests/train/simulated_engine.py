"""A network in one process on which engines of several workers do what the test says: for `simulated`.

Whoever waits gives way to the other workers. When a result or the news of a loss reaches a rank is left to the caller, who
picks one of the things that may happen to an engine next.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pliant.cluster import View
from pliant.comm import order
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.plan import Portion
from pliant.comm.telemetry import TimedBytes
from pliant.comm.topology import Strategy
from pliant.errors import CollectiveTimeout, CommError, Mismatch, NotStored, ViewChanged, WorkerLost

if TYPE_CHECKING:
    from simulated import Actor


class Killed(BaseException):
    """Raised in the thread of a worker that dies, wherever it waits."""


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


# --- a worker's engine ---


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
        for asked in self._open_requests():
            asked.handle.fail(error)

    # --- what may happen to this rank next ---

    def arrived(self) -> Iterator[Collective]:
        """Yield the collectives whose results can come here."""
        return (each for each in self.network.open_at(self.rank) if each.can_end(self.rank))

    def answerable(self) -> Iterator[Request]:
        """Yield the requests of this rank that can be answered."""
        there = self.network.engines.keys() - self.network.gone.keys()
        return (each for each in self._open_requests() if each.owner in there)

    def hopeless(self) -> Iterator[Collective | Request]:
        """Yield what will never come here."""
        gone = self.network.gone.keys()
        if gone:
            yield from (
                each
                for each in self.network.open_at(self.rank)
                if not each.can_end(self.rank) and gone & set(each.ranks)
            )
            yield from (each for each in self._open_requests() if each.owner in gone)

    def deliver(self, collective: Collective) -> None:
        """Bring the result of a collective here."""
        collective.end(self.rank)

    def answer(self, asked: Request) -> None:
        """Bring what another worker lends: what is there now."""
        stored = self.network.engines[asked.owner].actor.member.transport.stored  # type: ignore[attr-defined]
        if asked.name not in stored:
            asked.handle.fail(NotStored(f"{asked.name} is not stored"))
            return
        asked.target.detach().view(-1).copy_(stored[asked.name].view(-1))
        asked.handle.finish(asked.target)

    def notice(self, what: Collective | Request) -> None:
        """Notice that somebody is gone. All that it takes part in fails."""
        network = self.network
        involved = what.ranks if isinstance(what, Collective) else (what.owner,)
        rank, why = next((rank, network.gone[rank]) for rank in involved if rank in network.gone)
        for each in network.collectives.values():
            is_open = self.rank in each.parts and not each.parts[self.rank].handle.done
            if rank in each.ranks and (rank in network.dead or not each.can_end(self.rank)):
                each.lost_for.add(self.rank)
                if is_open:
                    each.fail(self.rank, why)
        for asked in self._open_requests():
            if asked.owner == rank:
                asked.handle.fail(why)

    def _open_requests(self) -> Iterator[Request]:
        return (each for each in self.network.requests if each.rank == self.rank and not each.handle.done)


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

    def give_up(self, *_: Any) -> None:
        """Whoever was reported lost here is dead."""

    def abort(self, error: Exception) -> None:
        if self._actor.engine is not None:
            self._actor.engine.abort(error)
