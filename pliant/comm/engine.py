"""Asynchronous collectives between the workers of a view: the public interface.

Any thread may submit any name at any time; ranks need not agree on an order. A submission returns a `Handle` at once.
The engine's thread does the work (`comm.reactor`). An engine is valid for one view; `comm.transport` makes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.byte_copies import ByteRun
from pliant.comm.handle import Handle
from pliant.comm.kernels import Reducer, reducer
from pliant.comm.operations import Operation, RegisteredSpec
from pliant.comm.order import ORDERS, Order
from pliant.comm.plan import INTERNAL, Portion, StrategyHistory, highest_counts, local_ranks, pack_counts
from pliant.comm.reactor import ReactorCall
from pliant.comm.submission import Array, Submitter, TensorBinder, as_tensor, finish_in_place, without_result
from pliant.comm.telemetry import Counters, LaneThroughput, SliceWatcher, TimedBytes
from pliant.comm.topology import Strategy, check_strategy, host_leaders
from pliant.errors import ConfigError, Mismatch

if TYPE_CHECKING:
    from pliant.comm.collective import Collectives
    from pliant.comm.memory import Span
    from pliant.comm.peers import OnPong
    from pliant.comm.transport import Transport

AUTO = Strategy("AUTO")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine, equal on all ranks except for the timeouts."""

    order: Order = "ddp"
    """How values are added. `ddp`: the bits of torch's all_reduce on gloo, on any topology. `tree`: a balanced binary tree
    over the replicas, on any topology. `fast`: the topology's own fixed order."""
    strategy: Strategy = AUTO
    """The strategy that collectives start with."""
    slice_bytes: int = 1 << 20
    """Tensors are cut into slices of at most this size."""
    heartbeat_timeout_s: float = 10.0
    """A peer that is silent for this long is lost, unless the kernel says that it lives (`comm.liveness`)."""
    are_watched: bool = False
    """Whether a runner watches over the process of each worker, and ends one that is stopped. Without one, a peer on
    another host whose process is silent counts as lost."""
    collective_timeout_s: float = 300.0
    """Default timeout of `Handle.wait`."""
    linger_s: float = 5.0
    """How long `close` waits for what is still to be sent."""

    def __post_init__(self) -> None:
        check_order(self.order)
        if self.heartbeat_timeout_s <= 0:
            raise ConfigError(f"heartbeat_timeout_s={self.heartbeat_timeout_s:g}: use a positive number of seconds")


def check_order(order: Order) -> Order:
    """Return `order`.

    Raises:
        ConfigError: there is no such order.
    """
    if order not in ORDERS:
        raise ConfigError(f"order={order!r} is unknown: use one of {', '.join(ORDERS)}")
    return order


class Engine:
    """The collectives of one rank in one view. Made by `Transport.enter`; it borrows the transport."""

    def __init__(self, collectives: Collectives, config: EngineConfig, transport: Transport) -> None:
        self.view = view = collectives.view
        self.rank = rank = collectives.rank
        self.size = view.size
        self.config = config
        self.local_ranks = local_ranks(view.hosts, rank)
        """The ranks on this host: pass them as `ranks` for a collective within the host."""
        self.cross_ranks = host_leaders(view.hosts)
        """The first rank of every host: pass them as `ranks` for a collective between hosts."""
        self.timeout_s = config.collective_timeout_s
        self._transport = transport
        self._reactor = transport.reactor
        self._collectives = collectives
        self._strategies = StrategyHistory(config.strategy)
        self._binder = TensorBinder(transport, collectives.memory_map, rank, self.local_ranks)
        self._submitter = Submitter(collectives, transport, self._strategies, self, slice_bytes=config.slice_bytes)
        self._submit = self._submitter.submit
        self._prepared: dict[tuple[object, ...], tuple[RegisteredSpec, Span, list[Span], Reducer]] = {}
        """The arguments of `_submit` for calls that come again at every step."""

    # --- lifetime ---

    def abort(self, error: Exception) -> None:
        """Fail everything that is open, and everything that is submitted later, with `error`. Thread-safe."""
        self._reactor.post(ReactorCall(partial(self._collectives.abort, error)))

    def close(self) -> None:
        """Send what is still queued, say goodbye and end. Handles that still wait fail with EngineClosed."""
        self._transport.close_engine()

    def add_torn_callback(self, callback: Callable[[Exception], None]) -> None:
        """Have `callback` called once, on the engine's thread, as soon as not all workers take part in this view any more:
        one is lost, has left or has moved on, or this one has. It gets the error, and must not block. Thread-safe."""
        self._reactor.post(ReactorCall(partial(self._collectives.add_torn_callback, callback), callback))

    def wake(self) -> None:
        """Make progress at once, because somebody waits for a result."""
        self._reactor.wake()

    # --- memory ---

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor in memory that the workers of this host share: collectives on it copy nothing."""
        return self._transport.empty(shape, dtype)

    def release_unused(self) -> None:
        """Give memory back to the system that only earlier collectives used. Not if memory is pinned. Thread-safe."""
        self._reactor.post(ReactorCall(self._collectives.release_unused))

    def pin(self, tensor: torch.Tensor) -> None:
        """Pin the memory of a tensor from `empty`, so that copies between it and a GPU are fast."""
        self._transport.cuda_staging().pin(tensor)

    def after(self, event: torch.cuda.Event, submit: Callable[[], Handle], name: str) -> Handle:
        """Call `submit` when a device has reached `event`; return a handle of its collective at once."""
        awaited = Handle(name, self, self.rank)

        def act() -> None:
            try:
                submitted = submit()
            except Exception as error:
                awaited.fail(error)
                return
            submitted.add_done_callback(lambda: awaited.copy_outcome(submitted))

        self._transport.cuda_staging().call_after(event, act, awaited.fail)
        return awaited

    # --- collectives ---

    def all_reduce(
        self,
        name: str,
        tensor: Array,
        *,
        op: str = "sum",
        priority: int = 0,
        order: Order | None = None,
        ranks: Sequence[int] | None = None,
        contributions: Sequence[torch.Tensor] | None = None,
        parts: Sequence[int] | None = None,
        portion: Portion | None = None,
        prompt: bool = False,
    ) -> Handle:
        """Reduce `tensor` over all ranks, in place; return at once.

        Every rank of `ranks` (default: all) must submit the same names, in any order and from any thread; a name may
        be used again at any time. Lower `priority` goes first. How values are added follows from `order` alone
        (default: the engine's), never from arrival, so equal inputs give equal bits.

        A rank that hosts several replicas passes `contributions`, and `parts` is the number of replicas that each rank
        hosts; the result goes to `tensor`. There is one contribution for each of its replicas; in the order "tree"
        one for each of the largest subtrees of its block, which `comm.order.subtrees` lists, with their sums.

        A `portion` says that `tensor` is a run of a larger one, whose order of summation it keeps, and how it is
        sliced. A thread that waits for a `prompt` collective is woken as soon as it is done; otherwise when everything
        is done that was submitted at about the same time.

        Raises:
            ConfigError: this type or operation cannot be reduced.
            Mismatch, WorkerLost: from `wait`, on every rank.
        """
        target = as_tensor(tensor)
        memo = None
        if ranks is None and contributions is None and parts is None and not target.is_cuda:
            memo = (name, target.data_ptr(), target.numel(), target.dtype, op, order, portion)
            prepared = self._prepared.get(memo)
            if prepared is not None and target.is_contiguous():
                return self._submit(*prepared, priority, finish_in_place, result=target, prompt=prompt)
        registered = self._submitter.register_spec(
            "all_reduce", name, target, op, self._checked(order), ranks, -1, parts, portion
        )
        reduce = reducer(op, target.dtype)
        out, on_complete = self._binder.bind(target, registered.spec, read=contributions is None, write=True)
        if memo is not None and out.lasting:
            # A training step submits the same memory under the same name again: skip the lookups next time.
            self._prepared[memo] = (registered, out, [out], reduce)
        if contributions is None:
            return self._submit(registered, out, [out], reduce, priority, on_complete, result=target, prompt=prompt)
        own = self._binder.bind_contributions(contributions, target, registered.spec)
        return self._submit(
            registered, out, own, reduce, priority, on_complete, result=target, kept=tuple(contributions), prompt=prompt
        )

    def _checked(self, order: Order | None) -> Order:
        return self.config.order if order is None else check_order(order)

    def reduce(
        self,
        name: str,
        tensor: Array,
        root: int = 0,
        *,
        op: str = "sum",
        priority: int = 0,
        order: Order | None = None,
        ranks: Sequence[int] | None = None,
        portion: Portion | None = None,
        prompt: bool = False,
    ) -> Handle:
        """Reduce `tensor` over all ranks into the root's tensor; the tensors of other ranks stay as they are."""
        target = as_tensor(tensor)
        asked = self._checked(order)
        registered = self._submitter.register_spec("reduce", name, target, op, asked, ranks, root, portion=portion)
        reduce = reducer(op, target.dtype)
        out, on_complete = self._binder.bind(target, registered.spec, read=True, write=self.rank == root)
        return self._submit(registered, out, [out], reduce, priority, on_complete, result=target, prompt=prompt)

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
        """Copy the root's `tensor` to the tensors of all ranks."""
        target = as_tensor(tensor)
        is_root = self.rank == root
        registered = self._submitter.register_spec("broadcast", name, target, "none", "none", ranks, root)
        out, on_complete = self._binder.bind(target, registered.spec, read=is_root, write=not is_root)
        return self._submit(registered, out, [], None, priority, on_complete, result=target, prompt=prompt)

    def all_gather(self, name: str, tensor: Array, *, priority: int = 0, ranks: Sequence[int] | None = None) -> Handle:
        """Gather the tensors of all ranks on every rank: `wait` returns them stacked, in the order of ranks."""
        return self._gather("all_gather", name, as_tensor(tensor), -1, priority, ranks)

    def gather(
        self, name: str, tensor: Array, root: int = 0, *, priority: int = 0, ranks: Sequence[int] | None = None
    ) -> Handle:
        """Gather the tensors of all ranks on the root: there `wait` returns them stacked, elsewhere None."""
        return self._gather("gather", name, as_tensor(tensor), root, priority, ranks)

    def _gather(
        self, kind: str, name: str, part: torch.Tensor, root: int, priority: int, ranks: Sequence[int] | None
    ) -> Handle:
        registered = self._submitter.register_spec(kind, name, part, "none", "none", ranks, root)
        me = registered.spec.members.index(self.rank)
        if kind == "gather" and self.rank != root:
            out, on_complete = self._binder.bind(part, registered.spec, read=True, write=False)
            ending = without_result(on_complete)
            return self._submit(registered, out, [], None, priority, ending, result=part, base=me * part.numel())
        out, stacked = self._binder.bind_gathered(part, len(registered.spec.members), me)

        def finish(operation: Operation) -> None:
            operation.handle.finish(stacked.to(part.device))

        return self._submit(registered, out, [], None, priority, finish)

    def barrier(
        self, name: str = "barrier", *, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> None:
        """Block until every rank has called this."""
        token = torch.zeros(1, dtype=torch.uint8)
        self.all_reduce(f"{INTERNAL}barrier:{name}", token, op="max", order="fast", ranks=ranks).wait(timeout_s)

    def consensus(self, name: str, data: bytes, *, timeout_s: float | None = None) -> bool:
        """Return whether all ranks have called this with the same bytes; the answer is the same on every rank."""
        digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
        digests = self.all_gather(f"{INTERNAL}consensus:{name}", digest).wait(timeout_s)
        assert digests is not None, "an all_gather has a result on every rank"
        return bool((digests == digests[0]).all())

    def all_gather_bytes(self, name: str, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Gather the `data` of all ranks, which may differ in length, on every rank; blocks."""
        lengths = self.all_gather(f"{name}:length", torch.tensor([len(data)])).wait(timeout_s)
        assert lengths is not None, "an all_gather has a result on every rank"
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(f"{name}:data", padded).wait(timeout_s)
        assert rows is not None, "an all_gather has a result on every rank"
        return [bytes(row[: int(length)].numpy()) for row, length in zip(rows, lengths, strict=True)]

    # --- tensors that are lent ---

    def save(self, name: str, tensor: Array) -> None:
        """Keep a copy of `tensor` for other ranks to `request`."""
        self._transport.lending.save(name, as_tensor(tensor))

    def request(self, rank: int, name: str, out: Array) -> Handle:
        """Fetch what `rank` saved or lends under `name` into `out`, as `fetch` does."""
        return self.fetch([rank], name, [out])

    def fetch(self, ranks: Sequence[int], name: str, outs: Sequence[Array]) -> Handle:
        """Fetch the tensors that all these ranks lend under `name` into `outs`, a share from each rank.

        From ranks of this host they are read in shared memory, straight into `outs`, which may be on a GPU.

        Raises (from `wait`):
            NotStored: one of them has nothing under that name; `outs` are unchanged.
            Mismatch: it has another size; `outs` are unchanged.
            WorkerLost: it is gone; `outs` may be written to in part.
        """
        for rank in ranks:
            if not 0 <= rank < self.size:
                raise ConfigError(f"fetch {name!r}: rank {rank} is not one of 0..{self.size - 1}")
        targets = [as_tensor(out) for out in outs]
        places = [each if each.is_contiguous() else torch.empty_like(each, memory_format=torch.contiguous_format)
                  for each in targets]  # fmt: skip
        handle = Handle(f"fetch {name!r}", self, ranks[0])

        def on_end(error: Exception | None) -> None:
            if error is not None:
                handle.fail(error)
                return
            for target, place in zip(targets, places, strict=True):
                if target is not place:
                    target.detach().copy_(place)
            handle.finish(targets[0] if targets else None)

        send = partial(self._collectives.fetch, ranks, name, ByteRun(places), on_end)
        self._submitter.post(ReactorCall(send, on_end))
        return handle

    # --- strategies ---

    @property
    def num_lanes(self) -> int:
        """The number of topologies of the strategy, over which slices can be spread."""
        return len(self.strategy.topologies(self.view.hosts, self.config.order))

    @property
    def strategy(self) -> Strategy:
        """The strategy of collectives that are submitted from now on."""
        return self._strategies[self._strategies.latest]

    def set_strategy(self, strategy: str | Sequence[int] | Strategy, *, timeout_s: float | None = None) -> None:
        """Change the strategy while collectives are in flight. Every rank must call this; no collective is lost.

        Each collective uses either the old or the new topology, the same on all ranks: what any rank had submitted
        before the change still uses the old one everywhere.

        Raises:
            ConfigError: there is no such strategy, or the parents are not a tree.
            Mismatch: the ranks asked for different strategies; nothing has changed.
        """
        wanted = check_strategy(strategy, self.view.hosts)
        change = self._strategies.latest + 1
        if not self.consensus(f"strategy:{change}", repr(wanted).encode(), timeout_s=timeout_s):
            raise Mismatch(f"the ranks ask for different strategies (this one for {wanted}): nothing is changed")
        # From here on every rank is inside this call, so holding back submissions cannot block anybody.
        with self._submitter.hold_submissions() as mine:
            everybodys = self.all_gather_bytes(f"{INTERNAL}cut:{change}", pack_counts(mine), timeout_s=timeout_s)
            self._strategies.change(wanted, mine, highest_counts(everybodys))

    # --- telemetry ---

    @property
    def may_be_written_to(self) -> bool:
        """Whether a lost worker may still live and write to the memory of collectives that have failed here."""
        return any(lost.may_live for lost in list(self._collectives.peers.lost.values()))

    def counters(self) -> Counters:
        """Return the payload bytes to and from each peer so far."""
        links = self._collectives.peers.links.values()
        return Counters(
            {str(link.worker): link.egress_bytes for link in links},
            {str(link.worker): link.ingress_bytes for link in links},
        )

    def backpressure(self) -> TimedBytes:
        """Return the bytes sent, and the time passed, while the network was the limit."""
        return self._transport.connections.backpressure.total

    @property
    def wire_bytes(self) -> int:
        """The bytes handed to the kernel for other hosts so far, headers included, on the connections of this view."""
        return sum(link.sent_bytes for link in list(self._collectives.peers.links.values()) if not link.shared)

    def acknowledged(self, rank: int) -> TimedBytes | None:
        """Return what `rank` has acknowledged so far by the kernel's count; None if the connection is not TCP."""
        link = self._collectives.peers.links.get(rank)
        return link.acknowledged() if link is not None else None

    def limit_kernel_queue(self, num_bytes: int) -> None:
        """Let at most about `num_bytes` lie in the kernel's queues to other hosts, where no priority applies. Thread-safe."""
        self._reactor.post(ReactorCall(partial(self._transport.connections.limit_kernel_queue, num_bytes)))

    def watch(self, watcher: SliceWatcher | None) -> None:
        """Call `watcher` for every slice that leaves and comes back, on the engine's thread."""
        self._collectives.executor.watcher = watcher

    def throughput(self) -> dict[int, LaneThroughput]:
        """Return what each topology of the strategy carried since the last call."""
        return self._collectives.operations.lanes.take()

    def ping(self, on_pong: OnPong) -> None:
        """Call `on_pong(rank, seconds)` for every other rank, on the engine's thread; infinite for lost ranks."""

        def fail(_: Exception) -> None:
            for rank in range(self.size):
                if rank != self.rank:
                    on_pong(rank, float("inf"))

        self._submitter.post(ReactorCall(partial(self._collectives.ping, on_pong), fail))

    def unanswered_pings(self) -> tuple[str, ...]:
        """Return the workers that have not answered a ping."""
        return tuple(str(self.view.workers[rank]) for rank in self._collectives.pings.waiting_for())

    def missing(self, handle: Handle) -> tuple[str, ...]:
        """Return the workers that a collective of this engine waits for."""
        subject = handle.subject
        ranks = sorted(subject.waiting_for()) if isinstance(subject, Operation) else [subject]
        return tuple(f"{self.view.workers[rank]} (rank {rank})" for rank in ranks if isinstance(rank, int))
