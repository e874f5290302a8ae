"""What belongs to one replica and not to the worker that hosts it: random state, loader state, buffers.

Model and optimizer are the same on all replicas at a step's boundary and exist once per worker. The rest is a
`Context`: restored before the replica's turn, captured when its backward is over, and small enough to
be copied to all other workers with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pliant.train import rng
from pliant.train.data import Stream
from pliant.train.rng import RngState

Tensors = list[torch.Tensor]


class Buffers:
    """The buffers of a model (BatchNorm's running statistics and the like), saved and loaded as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.num_bytes = sum(buffer.nbytes for buffer in self._current())

    def _current(self) -> Tensors:
        # Asked anew each time: a program may replace a buffer by another tensor.
        return list(self._model.buffers())

    def save(self) -> Tensors:
        return [buffer.detach().clone() for buffer in self._current()]

    def load(self, saved: Sequence[torch.Tensor]) -> None:
        current = self._current()
        if current:
            with torch.no_grad():
                torch._foreach_copy_(current, list(saved))

    def pack(self, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        """All of them as one run of bytes on the host."""
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() for tensor in saved if tensor.numel()]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)

    def unpack(self, flat: torch.Tensor) -> Tensors:
        """What `pack` made, on the devices where the model's buffers are."""
        tensors, begin = [], 0
        for buffer in self._current():
            piece = flat[begin : begin + buffer.nbytes].clone()
            tensors.append(piece.view(buffer.dtype).view(buffer.shape).to(buffer.device))
            begin += buffer.nbytes
        return tensors


@dataclass(frozen=True, slots=True)
class Context:
    """All that the next turn of a replica depends on, beside model and optimizer."""

    random: RngState
    stream: Stream
    """Where its data stand."""
    buffers: bytes = b""
    """Its own buffers, where replicas keep theirs (`sync_buffers=False`); else all begin with replica 0's."""

    def to_bytes(self, num_loader_workers: int) -> bytes:
        return self.random.to_bytes() + self.stream.to_bytes(num_loader_workers) + self.buffers

    @classmethod
    def from_bytes(cls, data: bytes, num_loader_workers: int) -> Context:
        cut = rng.SIZE + Stream.size(num_loader_workers)
        return cls(RngState.from_bytes(data[: rng.SIZE]), Stream.from_bytes(data[rng.SIZE : cut]), data[cut:])
