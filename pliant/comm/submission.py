"""Where a collective works: on the user's tensor itself, or on a copy in memory that the host shares; and the way back.

From a call to an operation in the engine's inbox: what all ranks must agree on, its number, and its program.

Any thread may submit. Which memory it works on is `comm.binding`'s to say, which strategy it takes
`comm.strategies`'.
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
from pliant.comm.handle import Handle, Patron
from pliant.comm.kernels import Reducer, dtype_name, dtype_of
from pliant.comm.memory import Span
from pliant.comm.operations import Known, Operation, Program, make_program
from pliant.comm.plan import Channel, Portion, Spec, Strategies, local_ranks, make_plan
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.comm.collective import Core
    from pliant.comm.peers import Reach
    from pliant.comm.reactor import Errand
    from pliant.comm.transport import Workshop

Array = torch.Tensor | np.ndarray
Finish = Callable[[Operation], None]
"""What remains to be done when the result is in place."""


class Binding:
    """Binds tensors of rank `rank`, whose host has the ranks `local_ranks`."""

    def __init__(self, workshop: Workshop, reach: Reach, rank: int, local_ranks: Sequence[int]) -> None:
        self._workshop = workshop
        self._memory = workshop.memory
        self._reach = reach
        self._rank = rank
        self._others_here = frozenset(local_ranks) - {rank}

    def bind(self, tensor: torch.Tensor, spec: Spec, *, read: bool, write: bool) -> tuple[Span, Finish]:
        """The memory to work on, and what to do when the result is there."""
        flat = tensor.detach()
        if flat.is_contiguous() and not flat.is_cuda:
            flat = flat.view(-1)
            place = self._memory.locate(flat) if len(flat) else None
            if place is not None:
                return self._reach.span((self._rank, *place), flat.dtype, len(flat)), finish_in_place
            if self._others_here.isdisjoint(spec.members):
                return Span(flat), finish_in_place
        staging = self._memory.empty(tensor.numel(), tensor.dtype)
        if flat.is_cuda:
            return self._reach.new_span(staging), partial(self._workshop.stage().finish, tensor, staging, write)
        if read:
            staging.copy_(flat.reshape(-1))

        def copy_back(operation: Operation) -> None:
            if write:
                flat.copy_(staging.view(flat.shape))
            finish_in_place(operation)

        return self._reach.new_span(staging), copy_back

    def bind_contributions(self, parts: Sequence[torch.Tensor], target: torch.Tensor, spec: Spec) -> list[Span]:
        """The memory of several operands, which the result in `target` does not replace.

        Raises:
            ConfigError: there must be another number of them, or they are not like the result.
        """
        wanted = spec.parts[spec.members.index(self._rank)] if spec.parts else 1
        if len(parts) != wanted:
            raise ConfigError(f"{spec.name!r}: {len(parts)} contributions, but `parts` says {wanted} for this rank")
        for part in parts:
            if part.numel() != target.numel() or part.dtype != target.dtype:
                raise ConfigError(
                    f"{spec.name!r}: a contribution has {part.numel()} x {part.dtype}, the result "
                    f"{target.numel()} x {target.dtype}: they must be alike"
                )
        return [self._bind_operand(part, spec) for part in parts]

    def _bind_operand(self, tensor: torch.Tensor, spec: Spec) -> Span:
        span = self.bind(tensor, spec, read=True, write=False)[0]
        if tensor.is_cuda:
            span.flat.copy_(tensor.detach().reshape(-1))
        return span

    def gathered(self, part: torch.Tensor, count: int, index: int) -> tuple[Span, torch.Tensor]:
        """Memory for `count` tensors like `part`, which is in its place already; and the same, stacked."""
        length = part.numel()
        whole = self._memory.empty(length * count, part.dtype)
        whole[index * length : (index + 1) * length].copy_(part.detach().reshape(-1))
        return self._reach.new_span(whole), whole.view(count, *part.shape)


def finish_in_place(operation: Operation) -> None:
    operation.handle.finish(operation.result)


def without_result(finish: Finish) -> Finish:
    """For ranks on which a collective has no result to return."""

    def end(operation: Operation) -> None:
        operation.result = None
        finish(operation)

    return end


def as_tensor(value: Array) -> torch.Tensor:
    """The same memory as a tensor; raises ConfigError if it is neither a tensor nor an array."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise ConfigError(f"{type(value).__name__} {value!r:.40} is neither a tensor nor a NumPy array")


class Submission:
    """Numbers the collectives of one rank in a view, channel by channel, and hands them to the engine's thread."""

    def __init__(
        self, core: Core, workshop: Workshop, strategies: Strategies, patron: Patron, *, slice_bytes: int
    ) -> None:
        self._core = core
        self._workshop = workshop
        self._reactor = workshop.reactor
        self._strategies = strategies
        self._patron = patron
        self._slice_bytes = slice_bytes
        self._hosts = core.view.hosts
        self._local_ranks = local_ranks(self._hosts, core.rank)
        self._begin = core.begin
        self._seqs: dict[int, int] = {}
        self._channels: dict[int, Channel] = {}
        """Those that take a strategy."""
        self._submitting = threading.RLock()

    def describe(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        op: str,
        exact: bool,
        ranks: Sequence[int] | None,
        root: int,
        parts: Sequence[int] | None = None,
        portion: Portion | None = None,
    ) -> Known:
        """What all ranks must agree on.

        Raises:
            ConfigError: it cannot be so; says what, and what can.
        """
        size, rank = self._core.view.size, self._core.rank
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
        return self._core.know(
            Spec(kind, name, members, dtype, length, op, exact, int(root), tuple(map(int, parts or ())), portion)
        )

    def submit(
        self,
        known: Known,
        out: Span,
        own: list[Span],
        reduce: Reducer | None,
        priority: int,
        finished: Finish,
        *,
        result: torch.Tensor | None = None,
        base: int = 0,
        kept: tuple[torch.Tensor, ...] = (),
        prompt: bool = False,
    ) -> Handle:
        """Have a collective done on this memory; returns at once."""
        with self._submitting:
            channel = known.channel
            seq = self._seqs.get(channel, 0)
            self._seqs[channel] = seq + 1
            if seq == 0 and known.spec.kind not in ("gather", "all_gather"):  # these take no strategy
                self._channels[channel] = known.spec.channel
            program = self._program(known, self._strategies.number_for(known.spec, seq))
            operation = Operation(program, seq, priority, out, own, reduce, result, finished, base)
            operation.kept, operation.prompt = kept, prompt
            operation.begin = self._begin
            operation.handle = handle = Handle(known.spec.name, self._patron, operation)
            if result is not None and result.is_cuda:
                self._workshop.stage().submit(result, operation, lambda: self.post(operation))
            else:
                self.post(operation)
        return handle

    def post(self, call: Operation | Errand) -> None:
        """Hand this to the engine's thread; raises ViewChanged if the worker has left the view."""
        if self._core.peers.retired and self._core.ended is not None:
            raise self._core.ended
        self._reactor.post(call)

    def _program(self, known: Known, number: int) -> Program:
        program = known.programs.get(number)
        if program is None:
            item_bytes = dtype_of(known.spec.dtype).itemsize
            strategy = self._strategies[number]
            plan = make_plan(known.spec, self._core.rank, self._hosts, strategy, item_bytes, self._slice_bytes)
            program = make_program(known, plan, lambda rank: rank in self._local_ranks, item_bytes)
            known.programs[number] = program
        return program

    @contextmanager
    def held(self) -> Iterator[dict[bytes, int]]:
        """Nothing else is submitted meanwhile; how many were, on each channel that takes a strategy, by its tag."""
        with self._submitting:
            yield {channel_tag(channel): self._seqs[number] for number, channel in self._channels.items()}
