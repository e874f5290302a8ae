"""Where a collective works: on the user's tensor itself, or on a copy in memory that the host shares; and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from pliant.comm.collective.operation import Operation
from pliant.comm.collective.reach import Reach
from pliant.comm.collective.span import Span
from pliant.comm.plan import Spec
from pliant.comm.workshop import Workshop
from pliant.errors import ConfigError

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
