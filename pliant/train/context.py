"""What belongs to one replica and not to the worker that hosts it: random state, loader state, buffers of its own.

Model and optimizer are the same on all replicas at a step's boundary and exist once per worker. The rest is a
`Context`: restored before the replica's turn, captured when its backward is over, and small enough to
be copied to all other workers with every step.
"""

from __future__ import annotations

from pliant.train import rng
from pliant.train.data.stream import Stream
from pliant.train.rng import RngState


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
