"""The guard: workers compare checksums of the whole state, so that no difference between them goes unnoticed.

Parameters, optimizer states, tracked objects and the contexts of all replicas must be the same on every worker. A checksum
has 64 bits and travels with the other messages of a step. Where checksums differ, the workers compare tensor by tensor,
and the job ends with an error that names the first one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pliant.comm.engine import Engine
from pliant.train.job_state import JobState

EVERY = 100
"""The number of steps between two comparisons."""
_MASK = 2**64 - 1
_PRIME = 0x9E3779B97F4A7C15
CAUSES = (
    "the usual causes: a learning rate or a decision from a counter of one's own (use step.number or job.state), random "
    "numbers that only some workers draw, state that the job does not know (job.track), or damaged memory"
)


class Guard:
    """One worker's part in the comparison."""

    def __init__(self, state: JobState, every: int = EVERY) -> None:
        """Compare every so many steps, and in the first step of each view; 0: never."""
        self._state, self._every = state, every
        self._is_due = self._is_new_view = False

    def enter_view(self) -> None:
        self._is_new_view = True

    def begin_step(self, step: int) -> None:
        """Find out whether this step compares. All workers come to the same answer."""
        self._is_due = self._every > 0 and (self._is_new_view or step % self._every == 0)
        self._is_new_view = False

    def checksum(self) -> int:
        """Return the checksum of the state, if this step compares; else 0."""
        if not self._is_due or self._state.averaging is not None:
            return 0
        total = 0
        for name, checksum in checksums(self._state):
            total = (total * _PRIME + checksum + zlib.crc32(name.encode())) & _MASK
        return total or 1

    def compare(self, engine: Engine, found: Sequence[int], step: int) -> str:
        """Return what is wrong if the checksums differ; empty if they do not. Every worker calls this."""
        if len(set(found)) <= 1:
            return ""
        own = list(checksums(self._state))
        rows = [json.loads(row) for row in engine.all_gather_bytes("guard", json.dumps(own).encode())]
        workers = engine.view.workers
        for place, (name, _) in enumerate(rows[0]):
            values = [tuple(row[place]) if place < len(row) else None for row in rows]
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                return (
                    f"the workers differ before step {step}: {name} is not the same on {workers[0]} and {workers[other]}; "
                    f"{CAUSES}"
                )
        return (
            f"the workers differ before step {step} in what they keep: {len(rows[0])} things on {workers[0]}; {CAUSES}"
        )


def checksums(state: JobState) -> Iterator[tuple[str, int]]:
    """Yield the name and the checksum of each part of the state, in a fixed order."""
    tensors: list[tuple[str, torch.Tensor]] = []
    values: list[tuple[str, Any]] = []
    for number, model in enumerate(state.models):
        prefix = f"model {number} " if len(state.models) > 1 else ""
        tensors += [(prefix + name, parameter.detach()) for name, parameter in model.named_parameters()]
    for number, optimizer in enumerate(state.optimizers):
        _collect(f"optimizer {number}", optimizer.state_dict(), tensors, values)
    for name, thing in state.tracked.items():
        _collect(name, thing.state_dict(), tensors, values)
    for name, tensor in tensors:
        yield name, checksum_of(tensor)
    for name, value in values:
        yield name, zlib.crc32(repr(value).encode())
    for replica, context in enumerate(state.replicas.contexts):
        data = context.to_bytes(state.replicas.num_loader_workers)
        yield f"the random state and data position of replica {replica}", zlib.crc32(data)


def _collect(name: str, value: Any, tensors: list[tuple[str, torch.Tensor]], values: list[tuple[str, Any]]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((name, value))
    elif isinstance(value, dict):
        for key, each in value.items():
            _collect(f"{name} {key}", each, tensors, values)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            _collect(f"{name} {place}", each, tensors, values)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        values.append((name, value))


def checksum_of(tensor: torch.Tensor) -> int:
    """Return a checksum of 64 bits of the tensor's bits."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    data = flat.view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = 0
    if whole:
        words = data[:whole].view(torch.int64)
        half = words.numel() // 2
        # Wrapping sums of both halves: equal bits give equal sums, in any order of summation.
        total = int(words[:half].sum()) * 3 + int(words[half:].sum())
    for byte in data[whole:].tolist():
        total = total * 257 + byte
    return total & _MASK
