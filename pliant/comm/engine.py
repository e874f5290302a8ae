"""Asynchronous collectives between the workers of a view: the public face.

Any thread may submit any name at any time; ranks need not agree on an order. A submission returns a
`Handle` at once. The work is done by `comm.collective`, in the thread of `comm.reactor`. An engine is
good for one view; `comm.station` makes it, and the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from pliant.comm.collective import Core
from pliant.comm.handle import Handle
from pliant.comm.kernels import Reducer, reducer
from pliant.comm.operations import Known, Operation
from pliant.comm.plan import INTERNAL, Portion, Strategies, checked, furthest, local_ranks, pack_counts
from pliant.comm.reactor import Errand
from pliant.comm.submission import Array, Binding, Submission, as_tensor, finish_in_place, without_result
from pliant.comm.telemetry import Counters, Delivered, LaneThroughput, Pressure, Watcher
from pliant.comm.topology import Strategy, masters
from pliant.errors import ConfigError, Mismatch

if TYPE_CHECKING:
    from pliant.cluster import View
    from pliant.comm.memory import Span
    from pliant.comm.peers import Answered
    from pliant.comm.transport import Workshop

Determinism = Literal["exact", "fast"]
AUTO = Strategy("AUTO")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine behaves; equal on all ranks except for the timeouts."""

    determinism: Determinism = "exact"
    """`exact`: the bits of torch's all_reduce on gloo, on any topology. `fast`: the topology's own fixed order."""
    strategy: Strategy = AUTO
    """The topologies that collectives start with."""
    slice_bytes: int = 1 << 20
    """Tensors are cut into slices of at most this size."""
    heartbeat_timeout_s: float = 10.0
    """A peer that says nothing for this long is lost."""
    collective_timeout_s: float = 300.0
    """How long `wait` waits if it is not told otherwise."""
    linger_s: float = 5.0
    """How long `close` waits for what is still to be sent."""

    def __post_init__(self) -> None:
        if self.slice_bytes < 4096:
            raise ConfigError(f"slice_bytes={self.slice_bytes}: headers would dominate; use 4096 or more")
        if self.determinism not in ("exact", "fast"):
            raise ConfigError(f"determinism={self.determinism!r}: use 'exact' or 'fast'")
        if self.heartbeat_timeout_s <= 0:
            raise ConfigError(f"heartbeat_timeout_s={self.heartbeat_timeout_s:g}: use a positive number of seconds")


class Engine:
    """The collectives of one rank in one view. Made by `comm.station` or by `comm.loopback`."""

    def __init__(self, view: View, rank: int, config: EngineConfig, workshop: Workshop) -> None:
        self.view = view
        self.rank = rank
        self.size = view.size
        self.config = config
        self.local_ranks = local_ranks(view.hosts, rank)
        """The ranks on this host: pass them as `ranks` for a collective within the host."""
        self.cross_ranks = masters(view.hosts)
        """The first rank of every host: pass them as `ranks` for a collective between hosts."""
        self.timeout_s = config.collective_timeout_s
        self._workshop = workshop
        self._reactor = workshop.reactor
        self._core = Core(view, rank, workshop.memory, workshop.store)
        self._strategies = Strategies(config.strategy)
        self._binding = Binding(workshop, self._core.reach, rank, self.local_ranks)
        self._submission = Submission(self._core, workshop, self._strategies, self, slice_bytes=config.slice_bytes)
        self._submit = self._submission.submit
        self._prepared: dict[tuple[object, ...], tuple[Known, Span, list[Span], Reducer]] = {}
        """What followed from calls that come again at every step."""

    # --- lifetime ---

    def enter(self) -> None:
        """Begin, on the connections that the worker has. On the engine's thread; by `comm.station`.

        Raises:
            CommError: there is none to some member; nothing has changed.
        """
        self._reactor.enter(self._core)

    def abort(self, error: Exception) -> None:
        """Fail all that is open with `error`, and what is submitted later; from any thread."""
        self._reactor.post(Errand(partial(self._core.abort, error), lambda _: None))

    def close(self) -> None:
        """Send what is still queued, say goodbye and end. Handles that still wait fail with EngineClosed."""
        self._workshop.close()

    def hurry(self) -> None:
        """Somebody waits for a result now."""
        self._reactor.hurry()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory ---

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in memory that the workers of this host share: collectives on it copy nothing."""
        return self._workshop.empty(shape, dtype)

    def pin(self, tensor: torch.Tensor) -> None:
        """Make copies between a GPU and this tensor, which is from `empty`, as fast as they can be."""
        self._workshop.stage().pin(tensor)

    def after(self, event: torch.cuda.Event, submit: Callable[[], Handle], name: str) -> Handle:
        """The handle of a collective that is submitted when a device has come to `event`; returns at once."""
        awaited = Handle(name, self, self.rank)

        def act() -> None:
            try:
                submitted = submit()
            except Exception as error:
                awaited.fail(error)
                return
            submitted.then(lambda: awaited.follow(submitted))

        self._workshop.stage().after(event, act)
        return awaited

    # --- collectives ---

    def all_reduce(
        self,
        name: str,
        tensor: Array,
        *,
        op: str = "sum",
        priority: int = 0,
        determinism: Determinism | None = None,
        ranks: Sequence[int] | None = None,
        contributions: Sequence[torch.Tensor] | None = None,
        parts: Sequence[int] | None = None,
        portion: Portion | None = None,
        prompt: bool = False,
    ) -> Handle:
        """Reduce `tensor` over all ranks, in place; returns at once.

        Every rank of `ranks` (default: all) must submit the same names, in any order and from any
        thread; a name may be used again at any time. Lower `priority` goes first. The order of
        summation follows from `determinism` alone, never from arrival, so equal inputs give equal bits.

        A rank that hosts several replicas brings one tensor for each of them as `contributions`, and
        `parts` says how many each rank brings; the result goes to `tensor`.

        A `portion` says that `tensor` is a run of a larger one, whose order of summation it keeps, and how
        it is sliced. Whoever waits for a `prompt` one is woken as soon as it is done; otherwise when all is
        that was submitted about the same time.

        Raises:
            ConfigError: this type or operation cannot be reduced.
            Mismatch, WorkerLost: from `wait`, on every rank.
        """
        target = as_tensor(tensor)
        memo = None
        if ranks is None and contributions is None and parts is None and not target.is_cuda:
            memo = (name, target.data_ptr(), target.numel(), target.dtype, op, determinism, portion)
            prepared = self._prepared.get(memo)
            if prepared is not None and target.is_contiguous():
                return self._submit(*prepared, priority, finish_in_place, result=target, prompt=prompt)
        exact = self._is_exact(determinism)
        known = self._submission.describe("all_reduce", name, target, op, exact, ranks, -1, parts, portion)
        reduce = reducer(op, target.dtype)
        out, finished = self._binding.bind(target, known.spec, read=contributions is None, write=True)
        if memo is not None and out.lasting:
            # The same memory under the same name at every step: what follows from it need not be found again.
            self._prepared[memo] = (known, out, [out], reduce)
        if contributions is None:
            return self._submit(known, out, [out], reduce, priority, finished, result=target, prompt=prompt)
        own = self._binding.bind_contributions(contributions, target, known.spec)
        return self._submit(
            known, out, own, reduce, priority, finished, result=target, kept=tuple(contributions), prompt=prompt
        )

    def _is_exact(self, determinism: Determinism | None) -> bool:
        return (determinism or self.config.determinism) == "exact"

    def reduce(
        self,
        name: str,
        tensor: Array,
        root: int = 0,
        *,
        op: str = "sum",
        priority: int = 0,
        determinism: Determinism | None = None,
        ranks: Sequence[int] | None = None,
        portion: Portion | None = None,
        prompt: bool = False,
    ) -> Handle:
        """Reduce `tensor` over all ranks into the root's; the others' stay as they are."""
        target = as_tensor(tensor)
        exact = self._is_exact(determinism)
        known = self._submission.describe("reduce", name, target, op, exact, ranks, root, portion=portion)
        reduce = reducer(op, target.dtype)
        out, finished = self._binding.bind(target, known.spec, read=True, write=self.rank == root)
        return self._submit(known, out, [out], reduce, priority, finished, result=target, prompt=prompt)

    def broadcast(
        self,
        name: str,
        tensor: Array,
        root: int = 0,
        *,
        priority: int = 0,
        ranks: Sequence[int] | None = None,
        prompt: bool = False,
    ) -> Handle:
        """Make `tensor` on all ranks what it is on the root."""
        target = as_tensor(tensor)
        known = self._submission.describe("broadcast", name, target, "none", False, ranks, root)
        out, finished = self._binding.bind(target, known.spec, read=self.rank == root, write=self.rank != root)
        return self._submit(known, out, [], None, priority, finished, result=target, prompt=prompt)

    def all_gather(self, name: str, tensor: Array, *, priority: int = 0, ranks: Sequence[int] | None = None) -> Handle:
        """Everybody's `tensor` on every rank: `wait` returns them stacked, in the order of ranks."""
        return self._gather("all_gather", name, as_tensor(tensor), -1, priority, ranks)

    def gather(
        self, name: str, tensor: Array, root: int = 0, *, priority: int = 0, ranks: Sequence[int] | None = None
    ) -> Handle:
        """Everybody's `tensor` on the root: there `wait` returns them stacked, elsewhere None."""
        return self._gather("gather", name, as_tensor(tensor), root, priority, ranks)

    def _gather(
        self, kind: str, name: str, part: torch.Tensor, root: int, priority: int, ranks: Sequence[int] | None
    ) -> Handle:
        known = self._submission.describe(kind, name, part, "none", False, ranks, root)
        me = known.spec.members.index(self.rank)
        if kind == "gather" and self.rank != root:
            out, finished = self._binding.bind(part, known.spec, read=True, write=False)
            base = me * part.numel()
            return self._submit(known, out, [], None, priority, without_result(finished), result=part, base=base)
        out, stacked = self._binding.gathered(part, len(known.spec.members), me)

        def finish(operation: Operation) -> None:
            operation.handle.finish(stacked.to(part.device))

        return self._submit(known, out, [], None, priority, finish)

    def barrier(
        self, name: str = "barrier", *, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> None:
        """Return when every rank has called this."""
        token = torch.zeros(1, dtype=torch.uint8)
        self.all_reduce(f"{INTERNAL}barrier:{name}", token, op="max", determinism="fast", ranks=ranks).wait(timeout_s)

    def consensus(self, name: str, data: bytes, *, timeout_s: float | None = None) -> bool:
        """Whether all ranks have called this with the same bytes; the same answer on every rank."""
        digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
        digests = self.all_gather(f"{INTERNAL}consensus:{name}", digest).wait(timeout_s)
        assert digests is not None, "an all_gather has a result on every rank"
        return bool((digests == digests[0]).all())

    def all_gather_bytes(self, name: str, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Everybody's `data`, which may differ in length; blocks."""
        lengths = self.all_gather(f"{name}:length", torch.tensor([len(data)])).wait(timeout_s)
        assert lengths is not None, "an all_gather has a result on every rank"
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(f"{name}:data", padded).wait(timeout_s)
        assert rows is not None, "an all_gather has a result on every rank"
        return [bytes(row[: int(length)].numpy()) for row, length in zip(rows, lengths, strict=True)]

    # --- the store ---

    def save(self, name: str, tensor: Array, version: int | None = None) -> None:
        """Keep a copy for others to `request`; of versioned ones the last three."""
        _check_version(version)
        self._workshop.store.save(name, as_tensor(tensor), version)

    def request(self, rank: int, name: str, out: Array, version: int | None = None) -> Handle:
        """Fetch what `rank` saved under `name` into `out`.

        Raises (from `wait`):
            NotStored: it has no such name or version; `out` is unchanged.
            Mismatch: it has another size; `out` is unchanged.
            WorkerLost: it is gone.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"request: rank {rank} is not one of 0..{self.size - 1}")
        _check_version(version)
        target = as_tensor(out)
        landing = torch.empty(target.numel(), dtype=target.dtype)
        handle = Handle(f"request {name!r}", self, rank)

        def answer(error: Exception | None) -> None:
            if error is not None:
                handle.fail(error)
            else:
                target.copy_(landing.view(target.shape))
                handle.finish(target)

        ask = partial(self._core.request, rank, name, version, landing, answer)
        self._submission.post(Errand(ask, answer))
        return handle

    # --- topologies ---

    @property
    def num_lanes(self) -> int:
        """How many topologies the strategy has: between how many owners slices can be shared."""
        return len(self.strategy.topologies(self.view.hosts, exact=True))

    @property
    def strategy(self) -> Strategy:
        """The strategy that collectives submitted from now on use."""
        return self._strategies[self._strategies.latest]

    def set_strategy(self, strategy: str | Sequence[int] | Strategy, *, timeout_s: float | None = None) -> None:
        """Change the topology while collectives are in flight. Every rank calls this; none is lost.

        Each collective runs wholly on the old or wholly on the new topology, the same on all ranks:
        what any rank had submitted before the change still takes the old one everywhere.

        Raises:
            ConfigError: no such strategy, or no tree.
            Mismatch: the ranks asked for different ones; nothing has changed.
        """
        wanted = checked(strategy, self.view.hosts)
        change = self._strategies.latest + 1
        if not self.consensus(f"strategy:{change}", repr(wanted).encode(), timeout_s=timeout_s):
            raise Mismatch(f"the ranks ask for different strategies (this one for {wanted}): nothing is changed")
        # From here on every rank is inside this call, so holding back submissions cannot block anybody.
        with self._submission.held() as mine:
            everybodys = self.all_gather_bytes(f"{INTERNAL}cut:{change}", pack_counts(mine), timeout_s=timeout_s)
            self._strategies.change(wanted, mine, furthest(everybodys))

    # --- looking at it ---

    @property
    def may_be_written_to(self) -> bool:
        """Whether a lost worker may still live and write to the memory of collectives that have failed here."""
        return any(lost.may_live for lost in list(self._core.peers.lost.values()))

    def counters(self) -> Counters:
        """Payload bytes to and from each peer so far."""
        links = self._core.peers.links.values()
        return Counters(
            {str(link.worker): link.egress_bytes for link in links},
            {str(link.worker): link.ingress_bytes for link in links},
        )

    def pressure(self) -> Pressure:
        """What went out so far while the network was the limit, and how long that was: together, its rate."""
        return self._workshop.connections.pressure.total

    @property
    def wire_bytes(self) -> int:
        """What was handed to the kernel for other hosts so far, headers and all, on the connections of this view."""
        return sum(link.sent_bytes for link in list(self._core.peers.links.values()) if not link.shared)

    def delivered(self, rank: int) -> Delivered | None:
        """What `rank` has acknowledged so far, by the kernel's count; None where the connection is no TCP."""
        link = self._core.peers.links.get(rank)
        return link.delivered() if link is not None else None

    def keep_below(self, num_bytes: int) -> None:
        """How much may lie in the kernel's queues to other hosts, where no priority reaches it; from any thread."""
        self._reactor.post(Errand(partial(self._workshop.connections.keep_below, num_bytes), lambda _: None))

    def watch(self, watcher: Watcher | None) -> None:
        """Have `watcher` told of every slice that goes out and comes back, on the engine's thread."""
        self._core.watch(watcher)

    def throughput(self) -> dict[int, LaneThroughput]:
        """What each topology of the strategy carried since the last call."""
        return self._core.lanes.take()

    def ping(self, answered: Answered) -> None:
        """Have `answered(rank, seconds)` called for every other rank, on the engine's thread; infinite for the lost."""

        def give_up(_: Exception) -> None:
            for rank in range(self.size):
                if rank != self.rank:
                    answered(rank, float("inf"))

        self._submission.post(Errand(partial(self._core.ping, answered), give_up))

    def unanswered(self) -> tuple[str, ...]:
        """Who has not answered a ping."""
        return tuple(str(self.view.workers[rank]) for rank in self._core.unanswered())

    def missing(self, handle: Handle) -> tuple[str, ...]:
        """Whom a collective of this engine is waiting for."""
        subject = handle.subject
        ranks = sorted(subject.waiting_for()) if isinstance(subject, Operation) else [subject]
        return tuple(f"{self.view.workers[rank]} (rank {rank})" for rank in ranks if isinstance(rank, int))


def _check_version(version: int | None) -> None:
    if version is not None and version < 0:
        raise ConfigError(f"version={version}: use 0 or more, or None for the latest")
