"""From a call to an operation in the engine's inbox: what all ranks must agree on, its number, and its program.

Any thread may submit. Which memory it works on is `comm.binding`'s to say, which strategy it takes
`comm.strategies`'.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pliant.comm.binding import Finish
from pliant.comm.collective.core import Core
from pliant.comm.collective.operation import Operation
from pliant.comm.collective.program import Known, Program, make_program
from pliant.comm.collective.span import Span
from pliant.comm.handle import Handle, Patron
from pliant.comm.kernels import Reducer, dtype_name, dtype_of
from pliant.comm.plan import Channel, Spec, local_ranks, make_plan
from pliant.comm.reactor import Errand
from pliant.comm.slices import Portion
from pliant.comm.strategies import Strategies
from pliant.comm.transport.wire import channel_tag
from pliant.comm.workshop import Workshop
from pliant.errors import ConfigError


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
