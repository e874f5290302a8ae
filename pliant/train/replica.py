"""What belongs to one replica and not to the worker that hosts it: random state, loader state, buffers.

Model and optimizer are the same on all replicas at a step's boundary and exist once per worker. The rest is a
`Context`: restored before the replica's turn, captured when its backward is over, and small enough to
be copied to all other workers with every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pliant.train import rng
from pliant.train.data import Stream
from pliant.train.rng import RngState

Tensors = list[torch.Tensor]


class Buffers:
    """The buffers of a model (BatchNorm's running statistics and the like), saved and loaded as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Found once: walking through the modules of a large model costs more than copying what is found there.
        self._places = [(module._buffers, name) for module, name in _owners(model)]
        self.num_bytes = sum(buffer.nbytes for buffer in self._current())
        self._groups = _alike(self._current())

    def _current(self) -> Tensors:
        # Looked up each time: a program may have put another tensor there.
        found = [buffers[name] for buffers, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def save(self) -> Tensors:
        current = self._current()
        saved = [torch.empty_like(buffer) for buffer in current]
        self._copy(saved, current)
        return saved

    def load(self, saved: Sequence[torch.Tensor]) -> None:
        self._copy(self._current(), saved)

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for group in self._groups:  # of one type: a few launches for all of them
                torch._foreach_copy_([targets[index] for index in group], [sources[index] for index in group])

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


def _owners(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Where each buffer is kept, in the order of `model.buffers()`."""
    owners, seen = [], set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                owners.append((module, name))
    return owners


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(groups.values())


class Context:
    """All that the next turn of a replica depends on, beside model and optimizer. One that came as bytes is read when
    somebody wants to know: most are only kept for others."""

    __slots__ = ("_data", "_num_loaders", "_parts")

    def __init__(self, random: RngState, stream: Stream, buffers: bytes = b"") -> None:
        self._parts: tuple[RngState, Stream, bytes] | None = (random, stream, buffers)
        self._data: bytes | None = None
        self._num_loaders = 0

    @property
    def random(self) -> RngState:
        return self._read()[0]

    @property
    def stream(self) -> Stream:
        """Where its data stand."""
        return self._read()[1]

    @property
    def buffers(self) -> bytes:
        """Its own buffers, where replicas keep theirs (`sync_buffers=False`); else all begin with replica 0's."""
        return self._read()[2]

    def at(self, stream: Stream) -> Context:
        """The same with its data elsewhere."""
        return Context(self.random, stream, self.buffers)

    def _read(self) -> tuple[RngState, Stream, bytes]:
        if self._parts is None:
            assert self._data is not None, "one or the other is there"
            data, cut = self._data, rng.SIZE + Stream.size(self._num_loaders)
            random, stream = RngState.from_bytes(data[: rng.SIZE]), Stream.from_bytes(data[rng.SIZE : cut])
            self._parts = random, stream, data[cut:]
        return self._parts

    def to_bytes(self, num_loader_workers: int) -> bytes:
        if self._data is None or self._num_loaders != num_loader_workers:
            random, stream, buffers = self._read()
            self._data = random.to_bytes() + stream.to_bytes(num_loader_workers) + buffers
            self._num_loaders = num_loader_workers
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes, num_loader_workers: int) -> Context:
        context = cls.__new__(cls)
        context._data, context._num_loaders, context._parts = data, num_loader_workers, None
        return context
