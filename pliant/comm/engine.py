"""Asynchronous collectives between the workers of a view: the public face.

Any thread may submit any name at any time; ranks need not agree on an order. A submission returns a
`Handle` at once. The work is done by `comm.core`, in the thread of `comm.reactor`. An engine is good
for one view; `comm.station` makes it, and the next one.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from pliant.cluster import View
from pliant.comm import graph
from pliant.comm.core import Core
from pliant.comm.handle import Handle
from pliant.comm.kernels import Reducer, dtype_name, dtype_of, reducer
from pliant.comm.link import header
from pliant.comm.operation import Known, Operation, Program, Span, make_program
from pliant.comm.plan import Channel, Spec, Strategy, local_ranks, make_plan
from pliant.comm.reactor import Errand
from pliant.comm.slices import Portion
from pliant.comm.telemetry import Counters, Delivered, LaneThroughput, Pressure, Watcher
from pliant.comm.wire import TAGGED, Kind, channel_tag
from pliant.comm.workshop import Workshop
from pliant.errors import CollectiveTimeout, ConfigError, Mismatch, NotStored

Determinism = Literal["exact", "fast"]
Array = torch.Tensor | np.ndarray

AUTO = Strategy("AUTO")
INTERNAL = "pliant:"
"""Names that begin so are the engine's own."""


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
        self.cross_ranks = graph.masters(view.hosts)
        """The first rank of every host: pass them as `ranks` for a collective between hosts."""
        self.timeout_s = config.collective_timeout_s
        self._workshop = workshop
        self._memory, self._store, self._reactor = workshop.memory, workshop.store, workshop.reactor
        self._core = Core(view, rank, self._memory, self._store, self._reactor.dirty)
        self._begin = self._core.begin
        self._strategies = [config.strategy]
        self._late: dict[bytes, list[tuple[int, int]]] = {}
        """Channels on which this rank lagged behind at a change: (collectives before, number of the strategy)."""
        self._prepared: dict[tuple[object, ...], tuple[Known, Span, list[Span], Reducer]] = {}
        self._seqs: dict[int, int] = {}
        self._names: dict[int, Channel] = {}
        self._submitting = threading.RLock()

    # --- lifetime ---

    def enter(self) -> None:
        """Begin, on the connections that the worker has. On the engine's thread; by `comm.station`.

        Raises:
            CommError: there is none to some member; nothing has changed.
        """
        self._reactor.switch(self._core)

    def abort(self, error: Exception) -> None:
        """Fail all that is open with `error`, and what is submitted later; from any thread."""
        self._reactor.post(Errand(partial(self._core.abort, error), lambda _: None))

    def close(self) -> None:
        """Send what is still queued, say goodbye and end. Handles that still wait fail with EngineClosed."""
        self._workshop.close()

    def _post(self, call: Operation | Errand) -> None:
        if self._core.retired and self._core.ended is not None:
            raise self._core.ended
        self._reactor.post(call)

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
        target = _as_tensor(tensor)
        memo = None
        if ranks is None and contributions is None and parts is None and not target.is_cuda:
            memo = (name, target.data_ptr(), target.numel(), target.dtype, op, determinism, portion)
            prepared = self._prepared.get(memo)
            if prepared is not None and target.is_contiguous():
                return self._submit(*prepared, priority, _finish_in_place, result=target, prompt=prompt)
        known = self._describe("all_reduce", name, target, op, determinism, ranks, -1, parts, portion)
        reduce = reducer(op, target.dtype)
        out, finished = self._bind(target, known.spec, read=contributions is None, write=True)
        if memo is not None and out.lasting:
            # The same memory under the same name at every step: what follows from it need not be found again.
            self._prepared[memo] = (known, out, [out], reduce)
        if contributions is None:
            return self._submit(known, out, [out], reduce, priority, finished, result=target, prompt=prompt)
        self._check_contributions(known.spec, target, contributions)
        own = [self._bind_operand(part, known.spec) for part in contributions]
        return self._submit(
            known, out, own, reduce, priority, finished, result=target, kept=tuple(contributions), prompt=prompt
        )

    def _check_contributions(self, spec: Spec, target: torch.Tensor, contributions: Sequence[torch.Tensor]) -> None:
        wanted = spec.parts[spec.members.index(self.rank)] if spec.parts else 1
        if len(contributions) != wanted:
            raise ConfigError(
                f"{spec.name!r}: {len(contributions)} contributions, but `parts` says {wanted} for this rank"
            )
        for part in contributions:
            if part.numel() != target.numel() or part.dtype != target.dtype:
                raise ConfigError(
                    f"{spec.name!r}: a contribution has {part.numel()} x {part.dtype}, the result "
                    f"{target.numel()} x {target.dtype}: they must be alike"
                )

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
        target = _as_tensor(tensor)
        known = self._describe("reduce", name, target, op, determinism, ranks, root, portion=portion)
        reduce = reducer(op, target.dtype)
        out, finished = self._bind(target, known.spec, read=True, write=self.rank == root)
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
        target = _as_tensor(tensor)
        known = self._describe("broadcast", name, target, "none", "fast", ranks, root)
        out, finished = self._bind(target, known.spec, read=self.rank == root, write=self.rank != root)
        return self._submit(known, out, [], None, priority, finished, result=target, prompt=prompt)

    def all_gather(self, name: str, tensor: Array, *, priority: int = 0, ranks: Sequence[int] | None = None) -> Handle:
        """Everybody's `tensor` on every rank: `wait` returns them stacked, in the order of ranks."""
        return self._gather("all_gather", name, _as_tensor(tensor), -1, priority, ranks)

    def gather(
        self, name: str, tensor: Array, root: int = 0, *, priority: int = 0, ranks: Sequence[int] | None = None
    ) -> Handle:
        """Everybody's `tensor` on the root: there `wait` returns them stacked, elsewhere None."""
        return self._gather("gather", name, _as_tensor(tensor), root, priority, ranks)

    def _gather(
        self, kind: str, name: str, part: torch.Tensor, root: int, priority: int, ranks: Sequence[int] | None
    ) -> Handle:
        known = self._describe(kind, name, part, "none", "fast", ranks, root)
        length, me = part.numel(), known.spec.members.index(self.rank)
        if kind == "gather" and self.rank != root:
            out, finished = self._bind(part, known.spec, read=True, write=False)
            return self._submit(
                known, out, [], None, priority, _without_result(finished), result=part, base=me * length
            )
        whole = self._memory.empty(length * len(known.spec.members), part.dtype)
        whole[me * length : (me + 1) * length].copy_(part.detach().reshape(-1))
        stacked = whole.view(len(known.spec.members), *part.shape)

        def finish(operation: Operation) -> None:
            operation.handle.finish(stacked.to(part.device))

        return self._submit(known, self._span_of(whole), [], None, priority, finish)

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

    # --- the store ---

    def save(self, name: str, tensor: Array, version: int | None = None) -> None:
        """Keep a copy for others to `request`; of versioned ones the last three."""
        _check_version(version)
        self._store.save(name, _as_tensor(tensor), version)

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
        target = _as_tensor(out)
        landing = torch.empty(target.numel(), dtype=target.dtype)
        handle = Handle(f"request {name!r}", self, rank)

        def answer(error: Exception | None) -> None:
            if error is not None:
                handle.fail(error)
            else:
                target.copy_(landing.view(target.shape))
                handle.finish(target)

        self._post(Errand(partial(self._ask, rank, name, version, landing, answer), answer))
        return handle

    def _ask(
        self, rank: int, name: str, version: int | None, out: torch.Tensor, answer: Callable[[Exception | None], None]
    ) -> None:
        gone = self._core.ended or self._core.lost.get(rank)
        if gone is not None:
            answer(gone)
            return
        if rank != self.rank:
            link = self._core.links[rank]
            self._core.requests.ask(link, name, version, out, answer)
            self._core.dirty.add(link)
            return
        found = self._store.get(name, version)
        if found is None:
            answer(NotStored(f"nothing is stored here under {name!r} (version {version})"))
        elif found.nbytes != out.nbytes:
            answer(Mismatch(f"{name!r} was stored with {found.nbytes} bytes, but {out.nbytes} were asked for"))
        else:
            out.view(torch.uint8).copy_(found.view(torch.uint8))
            answer(None)

    # --- topologies ---

    @property
    def num_lanes(self) -> int:
        """How many topologies the strategy has: between how many owners slices can be shared."""
        return len(self.strategy.topologies(self.view.hosts, exact=True))

    @property
    def strategy(self) -> Strategy:
        """The strategy that collectives submitted from now on use."""
        return self._strategies[-1]

    def set_strategy(self, strategy: str | Sequence[int] | Strategy, *, timeout_s: float | None = None) -> None:
        """Change the topology while collectives are in flight. Every rank calls this; none is lost.

        Each collective runs wholly on the old or wholly on the new topology, the same on all ranks:
        what any rank had submitted before the change still takes the old one everywhere.

        Raises:
            ConfigError: no such strategy, or no tree.
            Mismatch: the ranks asked for different ones; nothing has changed.
        """
        wanted = self._check_strategy(strategy)
        epoch = len(self._strategies)
        if not self.consensus(f"strategy:{epoch}", repr(wanted).encode(), timeout_s=timeout_s):
            raise Mismatch(f"the ranks ask for different strategies (this one for {wanted}): nothing is changed")
        # From here on every rank is inside this call, so holding back submissions cannot block anybody.
        with self._submitting:
            mine = {channel_tag(channel): self._seqs[number] for number, channel in self._names.items()}
            for tag, furthest in self._furthest(epoch, mine, timeout_s).items():
                if furthest > mine.get(tag, 0):
                    self._late.setdefault(tag, []).append((furthest, epoch - 1))
            self._strategies.append(wanted)

    def _check_strategy(self, strategy: str | Sequence[int] | Strategy) -> Strategy:
        if isinstance(strategy, Strategy):
            wanted = strategy
        elif isinstance(strategy, str):
            wanted = Strategy(strategy.upper())
        else:
            wanted = Strategy("FOREST", tuple(int(father) for father in strategy))
            if len(wanted.forest) != self.size:
                raise ConfigError(
                    f"forest {list(strategy)} has {len(wanted.forest)} entries, but there are {self.size} ranks"
                )
        wanted.topologies(self.view.hosts, exact=False)
        return wanted

    def _furthest(self, epoch: int, mine: Mapping[bytes, int], timeout_s: float | None) -> dict[bytes, int]:
        """For each channel, how many collectives the furthest rank has submitted."""
        table = b"".join(TAGGED.pack(tag, seq) for tag, seq in mine.items())
        furthest: dict[bytes, int] = {}
        for other in self.all_gather_bytes(f"{INTERNAL}cut:{epoch}", table, timeout_s=timeout_s):
            for tag, seq in TAGGED.iter_unpack(other):
                furthest[tag] = max(furthest.get(tag, 0), seq)
        return furthest

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

    # --- looking at it ---

    @property
    def may_be_written_to(self) -> bool:
        """Whether a lost worker may still live and write to the memory of collectives that have failed here."""
        return any(lost.may_live for lost in list(self._core.lost.values()))

    def counters(self) -> Counters:
        """Payload bytes to and from each peer so far."""
        links = self._core.links.values()
        return Counters(
            {str(link.worker): link.egress_bytes for link in links},
            {str(link.worker): link.ingress_bytes for link in links},
        )

    def pressure(self) -> Pressure:
        """What went out so far while the network was the limit, and how long that was: together, its rate."""
        return self._reactor.pressure.total

    @property
    def wire_bytes(self) -> int:
        """What was handed to the kernel for other hosts so far, headers and all, on the connections of this view."""
        return sum(link.sent_bytes for link in list(self._core.links.values()) if not link.shared)

    def delivered(self, rank: int) -> Delivered | None:
        """What `rank` has acknowledged so far, by the kernel's count; None where the connection is no TCP."""
        link = self._core.links.get(rank)
        return link.delivered() if link is not None else None

    def keep_below(self, num_bytes: int) -> None:
        """How much may lie in the kernel's queues to other hosts, where no priority reaches it; from any thread."""
        self._reactor.post(Errand(partial(self._reactor.keep_below, num_bytes), lambda _: None))

    def watch(self, watcher: Watcher | None) -> None:
        """Have `watcher` told of every slice that goes out and comes back, on the engine's thread."""
        self._core.watcher = watcher

    def throughput(self) -> dict[int, LaneThroughput]:
        """What each topology of the strategy carried since the last call."""
        return self._core.lanes.take()

    def latencies(self, timeout_s: float = 10.0) -> list[float]:
        """Round-trip seconds to every rank; 0 to itself, infinite to the lost."""
        found = [0.0] * self.size
        done = threading.Semaphore(0)

        def pong(rank: int, seconds: float) -> None:
            found[rank] = seconds
            done.release()

        def give_up(_: Exception) -> None:
            for rank in range(1, self.size):
                pong(rank, float("inf"))

        self._post(Errand(partial(self._ping, pong), give_up))
        deadline_s = time.monotonic() + timeout_s
        for _ in range(self.size - 1):
            if not done.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                missing = tuple(str(self.view.workers[rank]) for rank, waiting in self._core.pongs.items() if waiting)
                raise CollectiveTimeout("latencies", timeout_s, missing)
        return found

    def _ping(self, pong: Callable[[int, float], None]) -> None:
        for rank, link in self._core.links.items():
            if rank in self._core.lost or self._core.ended is not None:
                pong(rank, float("inf"))
                continue
            self._core.pongs[rank].append(partial(pong, rank))
            link.say(header(Kind.PING, self.view.number, extra=time.perf_counter_ns()))
            self._core.dirty.add(link)

    def minimum_spanning_tree(self, timeout_s: float = 30.0) -> graph.Forest:
        """The lightest tree over the measured latencies, as a forest array; the same on every rank, which all call."""
        row = torch.tensor(self.latencies(timeout_s), dtype=torch.float64)
        rows = self.all_gather(f"{INTERNAL}latencies", row).wait(timeout_s)
        assert rows is not None, "an all_gather has a result on every rank"
        return graph.forest_of_edges(graph.minimum_spanning_tree(rows.tolist()), self.size)

    # --- submitting ---

    def _describe(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        op: str,
        determinism: Determinism | None,
        ranks: Sequence[int] | None,
        root: int,
        parts: Sequence[int] | None = None,
        portion: Portion | None = None,
    ) -> Known:
        members = tuple(range(self.size)) if ranks is None else tuple(sorted({int(rank) for rank in ranks}))
        if not members or members[0] < 0 or members[-1] >= self.size:
            raise ConfigError(f"{kind} {name!r}: ranks={list(members)} must be some of 0..{self.size - 1}")
        if self.rank not in members:
            raise ConfigError(f"{kind} {name!r}: rank {self.rank} is not one of ranks={list(members)}")
        if kind in ("reduce", "broadcast", "gather") and root not in members:
            raise ConfigError(f"{kind} {name!r}: root={root} is not one of ranks={list(members)}")
        exact = (determinism or self.config.determinism) == "exact"
        if parts is not None and (len(parts) != len(members) or min(parts) < 1):
            raise ConfigError(
                f"{kind} {name!r}: parts={list(parts)} must have one number, 1 or more, for each of {len(members)} ranks"
            )
        dtype, length = dtype_name(tensor.dtype), tensor.numel()
        if portion is not None and (not portion.lanes or portion.begin < 0 or portion.begin + length > portion.whole):
            raise ConfigError(f"{kind} {name!r}: {portion} does not hold {length} elements in one slice or more")
        return self._core.know(
            Spec(kind, name, members, dtype, length, op, exact, int(root), tuple(map(int, parts or ())), portion)
        )

    def _submit(
        self,
        known: Known,
        out: Span,
        own: list[Span],
        reduce: Reducer | None,
        priority: int,
        finished: Callable[[Operation], None],
        *,
        result: torch.Tensor | None = None,
        base: int = 0,
        kept: tuple[torch.Tensor, ...] = (),
        prompt: bool = False,
    ) -> Handle:
        with self._submitting:
            channel = known.channel
            seq = self._seqs.get(channel, 0)
            self._seqs[channel] = seq + 1
            if seq == 0 and known.spec.kind not in ("gather", "all_gather"):  # these take no strategy
                self._names[channel] = known.spec.channel
            program = self._program(known, self._epoch_of(known, seq))
            operation = Operation(program, seq, priority, out, own, reduce, result, finished, base)
            operation.kept, operation.prompt = kept, prompt
            operation.begin = self._begin
            operation.handle = handle = Handle(known.spec.name, self, operation)
            if result is not None and result.is_cuda:
                self._workshop.stage().submit(result, operation, lambda: self._post(operation))
            else:
                self._post(operation)
        return handle

    def _epoch_of(self, known: Known, seq: int) -> int:
        """The number of the strategy that this collective takes, on every rank."""
        if self._late:
            tag = channel_tag(known.spec.channel)
            for before, epoch in self._late.get(tag, ()):
                if seq < before:
                    return epoch
            self._late.pop(tag, None)
        return len(self._strategies) - 1

    def _program(self, known: Known, epoch: int) -> Program:
        program = known.programs.get(epoch)
        if program is None:
            item_bytes = dtype_of(known.spec.dtype).itemsize
            strategy, slice_bytes = self._strategies[epoch], self.config.slice_bytes
            plan = make_plan(known.spec, self.rank, self.view.hosts, strategy, item_bytes, slice_bytes)
            program = make_program(known, plan, lambda rank: rank in self.local_ranks, item_bytes)
            known.programs[epoch] = program
        return program

    def missing(self, handle: Handle) -> tuple[str, ...]:
        """Whom a collective of this engine is waiting for."""
        subject = handle.subject
        ranks = sorted(subject.waiting_for()) if isinstance(subject, Operation) else [subject]
        return tuple(f"{self.view.workers[rank]} (rank {rank})" for rank in ranks if isinstance(rank, int))

    def _bind(
        self, tensor: torch.Tensor, spec: Spec, *, read: bool, write: bool
    ) -> tuple[Span, Callable[[Operation], None]]:
        """The memory to work on, and what to do when the result is there."""
        flat = tensor.detach()
        shared = any(rank in self.local_ranks for rank in spec.members if rank != self.rank)
        if flat.is_contiguous() and not flat.is_cuda:
            flat = flat.view(-1)
            place = self._memory.locate(flat) if len(flat) else None
            if place is not None:
                return self._core.reach.span((self.rank, *place), flat.dtype, len(flat)), _finish_in_place
            if not shared:
                return Span(flat), _finish_in_place
        staging = self._memory.empty(tensor.numel(), tensor.dtype)
        if flat.is_cuda:
            return self._span_of(staging), partial(self._workshop.stage().finish, tensor, staging, write)
        if read:
            staging.copy_(flat.reshape(-1))

        def copy_back(operation: Operation) -> None:
            if write:
                flat.copy_(staging.view(flat.shape))
            _finish_in_place(operation)

        return self._span_of(staging), copy_back

    def _bind_operand(self, tensor: torch.Tensor, spec: Spec) -> Span:
        span = self._bind(tensor, spec, read=True, write=False)[0]
        if tensor.is_cuda:
            span.flat.copy_(tensor.detach().reshape(-1))
        return span

    def _span_of(self, flat: torch.Tensor) -> Span:
        """A span on memory that was just handed out; it keeps the tensor, and with it the place."""
        arena, offset = self._memory.locate(flat) or (0, 0)
        return Span(flat, self.rank, arena, offset)


def _as_tensor(value: Array) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise ConfigError(f"{type(value).__name__} {value!r:.40} is neither a tensor nor a NumPy array")


def _check_version(version: int | None) -> None:
    if version is not None and version < 0:
        raise ConfigError(f"version={version}: use 0 or more, or None for the latest")


def _finish_in_place(operation: Operation) -> None:
    operation.handle.finish(operation.result)


def _without_result(finished: Callable[[Operation], None]) -> Callable[[Operation], None]:
    """For ranks on which a collective has no result to return."""

    def finish(operation: Operation) -> None:
        operation.result = None
        finished(operation)

    return finish
