"""From a call to an operation in the engine's inbox: the memory it works on, its spec, its number and its plan.

Any thread may submit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pliant.comm.frames import channel_tag
from pliant.comm.handle import Handle
from pliant.comm.kernels import Reducer, dtype_name, dtype_of
from pliant.comm.memory import Span
from pliant.comm.operations import CompiledPlan, Operation, RegisteredSpec, compile_plan
from pliant.comm.plan import Channel, Portion, Spec, StrategyHistory, local_ranks, make_plan
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.comm.collective import Collectives
    from pliant.comm.engine import Engine
    from pliant.comm.peers import SharedMemoryMap
    from pliant.comm.reactor import ReactorCall
    from pliant.comm.transport import Transport

Array = torch.Tensor | np.ndarray
OnComplete = Callable[[Operation], None]
"""Called on the engine's thread when the result is in place; ends with finishing the handle."""


class TensorBinder:
    """Chooses the memory that an operation works on: the user's tensor itself, or a copy in shared memory."""

    def __init__(
        self, transport: Transport, memory_map: SharedMemoryMap, rank: int, local_ranks: Sequence[int]
    ) -> None:
        self._transport = transport
        self._memory = transport.memory
        self._memory_map = memory_map
        self._rank = rank
        self._others_here = frozenset(local_ranks) - {rank}

    def bind(self, tensor: torch.Tensor, spec: Spec, *, read: bool, write: bool) -> tuple[Span, OnComplete]:
        """Return the memory to work on, and the function to call when the result is there."""
        flat = tensor.detach()
        if flat.is_contiguous() and not flat.is_cuda:
            flat = flat.view(-1)
            place = self._memory.locate(flat) if len(flat) else None
            if place is not None:
                return self._memory_map.span((self._rank, *place), flat.dtype, len(flat)), finish_in_place
            if self._others_here.isdisjoint(spec.members):
                return Span(flat), finish_in_place
        staging = self._memory.empty(tensor.numel(), tensor.dtype)
        span = self._memory_map.new_span(staging)
        if flat.is_cuda:
            return span, partial(self._transport.cuda_staging().finish, tensor, staging, write)
        if read:
            staging.copy_(flat.reshape(-1))

        def copy_back(operation: Operation) -> None:
            if write:
                flat.copy_(staging.view(flat.shape))
            finish_in_place(operation)

        return span, copy_back

    def bind_contributions(self, parts: Sequence[torch.Tensor], target: torch.Tensor, spec: Spec) -> list[Span]:
        """Return the memory of several operands, which the result in `target` does not replace.

        Raises:
            ConfigError: their number is wrong, or they differ from the result in size or type.
        """
        me = spec.members.index(self._rank)
        hosted = spec.parts[me] if spec.parts else 1
        wanted = len(spec.operands[me]) if spec.order == "tree" else hosted
        if len(parts) != wanted:
            blocks = ", ".join(f"[{term[0]}, {term[-1] + 1})" for term in spec.operands[me])
            raise ConfigError(
                f"{spec.name!r}: {len(parts)} contributions, but by `parts` this rank has {wanted} in the order "
                f"{spec.order!r}: the sums of the replicas {blocks}"
            )
        spans = []
        for part in parts:
            if part.numel() != target.numel() or part.dtype != target.dtype:
                raise ConfigError(
                    f"{spec.name!r}: a contribution has {part.numel()} x {part.dtype}, the result "
                    f"{target.numel()} x {target.dtype}: they must be alike"
                )
            span = self.bind(part, spec, read=True, write=False)[0]
            if part.is_cuda:
                span.flat.copy_(part.detach().reshape(-1))
            spans.append(span)
        return spans

    def bind_gathered(self, part: torch.Tensor, count: int, index: int) -> tuple[Span, torch.Tensor]:
        """Return memory for `count` tensors like `part`, with `part` copied to its place; and the same, stacked."""
        length = part.numel()
        whole = self._memory.empty(length * count, part.dtype)
        whole[index * length : (index + 1) * length].copy_(part.detach().reshape(-1))
        return self._memory_map.new_span(whole), whole.view(count, *part.shape)


def finish_in_place(operation: Operation) -> None:
    operation.handle.finish(operation.result)


def without_result(on_complete: OnComplete) -> OnComplete:
    """Return `on_complete` for a rank on which the collective has no result."""

    def end(operation: Operation) -> None:
        operation.result = None
        on_complete(operation)

    return end


def as_tensor(value: Array) -> torch.Tensor:
    """Return the same memory as a tensor; raises ConfigError if it is neither a tensor nor an array."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise ConfigError(f"{type(value).__name__} {value!r:.40} is neither a tensor nor a NumPy array")


class Submitter:
    """Numbers the collectives of one rank in a view, channel by channel, and hands them to the engine's thread."""

    def __init__(
        self,
        collectives: Collectives,
        transport: Transport,
        strategies: StrategyHistory,
        owner: Engine,
        *,
        slice_bytes: int,
    ) -> None:
        self._collectives = collectives
        self._transport = transport
        self._reactor = transport.reactor
        self._strategies = strategies
        self._owner = owner
        self._slice_bytes = slice_bytes
        self._hosts = collectives.view.hosts
        self._local_ranks = local_ranks(self._hosts, collectives.rank)
        self._begin = collectives.begin
        self._seqs: dict[int, int] = {}
        self._channels: dict[int, Channel] = {}
        """The channels whose collectives depend on the strategy."""
        self._submitting = threading.RLock()

    def register_spec(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        op: str,
        order: str,
        ranks: Sequence[int] | None,
        root: int,
        parts: Sequence[int] | None = None,
        portion: Portion | None = None,
    ) -> RegisteredSpec:
        """Check the arguments of a collective and register its spec.

        Raises:
            ConfigError: the arguments are invalid; the message says which, and what is possible.
        """
        size, rank = self._collectives.view.size, self._collectives.rank
        members = tuple(range(size)) if ranks is None else tuple(sorted({int(rank) for rank in ranks}))
        if not members or members[0] < 0 or members[-1] >= size:
            raise ConfigError(f"{kind} {name!r}: ranks={list(members)} must be some of 0..{size - 1}")
        if rank not in members:
            raise ConfigError(f"{kind} {name!r}: rank {rank} is not one of ranks={list(members)}")
        if kind in ("reduce", "broadcast", "gather") and root not in members:
            raise ConfigError(f"{kind} {name!r}: root={root} is not one of ranks={list(members)}")
        if parts is not None and (len(parts) != len(members) or min(parts) < 1):
            raise ConfigError(
                f"{kind} {name!r}: parts={list(parts)} must have one number, 1 or more, for each of {len(members)} ranks"
            )
        dtype, length = dtype_name(tensor.dtype), tensor.numel()
        if portion is not None and (not portion.lanes or portion.begin < 0 or portion.begin + length > portion.whole):
            raise ConfigError(f"{kind} {name!r}: {portion} does not hold {length} elements in one slice or more")
        return self._collectives.specs.register(
            Spec(kind, name, members, dtype, length, op, order, int(root), tuple(map(int, parts or ())), portion)
        )

    def submit(
        self,
        registered: RegisteredSpec,
        out: Span,
        own: list[Span],
        reduce: Reducer | None,
        priority: int,
        on_complete: OnComplete,
        *,
        result: torch.Tensor | None = None,
        base: int = 0,
        kept: tuple[torch.Tensor, ...] = (),
        prompt: bool = False,
    ) -> Handle:
        """Submit a collective on this memory; return its handle at once."""
        with self._submitting:
            channel = registered.channel
            seq = self._seqs.get(channel, 0)
            self._seqs[channel] = seq + 1
            if seq == 0 and registered.spec.kind not in ("gather", "all_gather"):  # these do not use a strategy
                self._channels[channel] = registered.spec.channel
            compiled = self._compiled_plan(registered, self._strategies.number_for(registered.spec, seq))
            operation = Operation(compiled, seq, priority, out, own, reduce, result, on_complete, base)
            operation.kept, operation.prompt = kept, prompt
            operation.begin = self._begin
            operation.handle = handle = Handle(registered.spec.name, self._owner, operation)
            if result is not None and result.is_cuda:
                self._transport.cuda_staging().submit(result, operation, lambda: self.post(operation))
            else:
                self.post(operation)
        return handle

    def post(self, call: Operation | ReactorCall) -> None:
        """Hand a call to the engine's thread; raises ViewChanged if the worker has left the view."""
        if self._collectives.peers.retired and self._collectives.ended is not None:
            raise self._collectives.ended
        self._reactor.post(call)

    def _compiled_plan(self, registered: RegisteredSpec, number: int) -> CompiledPlan:
        compiled = registered.plans.get(number)
        if compiled is None:
            spec, strategy = registered.spec, self._strategies[number]
            item_bytes = dtype_of(spec.dtype).itemsize
            plan = make_plan(spec, self._collectives.rank, self._hosts, strategy, item_bytes, self._slice_bytes)
            compiled = compile_plan(registered, plan, lambda rank: rank in self._local_ranks, item_bytes)
            registered.plans[number] = compiled
        return compiled

    @contextmanager
    def hold_submissions(self) -> Iterator[dict[bytes, int]]:
        """Block all submissions in the `with`; yield the number submitted so far on each channel that has a strategy."""
        with self._submitting:
            yield {channel_tag(channel): self._seqs[number] for number, channel in self._channels.items()}
