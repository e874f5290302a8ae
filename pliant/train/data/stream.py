"""Where one replica stands in its data, as a value that is small enough to travel with every step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.errors import ConfigError
from pliant.train import rng
from pliant.train.data.options import LoaderOptions

_HEADER = struct.Struct("<qqq?q")
_WORKER = struct.Struct(f"<?{rng.SIZE}s")


@dataclass(frozen=True, slots=True)
class Stream:
    """Where one replica stands in its data."""

    epoch: int = 0
    batch: int = 0
    """The next one to take."""
    consumed: int = 0
    """Samples of the epoch that were used before it was dealt to this number of replicas."""
    base_seed: int | None = None
    """What the loader workers' random states come from; None: not drawn yet."""
    workers: tuple[bytes | None, ...] = ()
    """The random state (`RngState.to_bytes`) of each loader worker after its last taken batch; None: as seeded."""

    def next_epoch(self, options: LoaderOptions) -> Stream:
        """The beginning of the epoch after this one."""
        if options.persistent_workers:
            return Stream(self.epoch + 1, base_seed=self.base_seed, workers=self.workers)
        return Stream(self.epoch + 1)

    @staticmethod
    def size(num_workers: int) -> int:
        """Bytes of any stream with so many loader workers."""
        return _HEADER.size + num_workers * _WORKER.size

    def to_bytes(self, num_workers: int) -> bytes:
        """This stream in `size(num_workers)` bytes."""
        drawn = self.base_seed is not None
        parts = [_HEADER.pack(self.epoch, self.batch, self.consumed, drawn, self.base_seed or 0)]
        for state in filled(self.workers, num_workers):
            parts.append(_WORKER.pack(state is not None, state or b""))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Stream:
        """What `to_bytes` wrote.

        Raises:
            ConfigError: `data` has a size that no stream has.
        """
        num_workers, rest = divmod(len(data) - _HEADER.size, _WORKER.size)
        if rest or num_workers < 0:
            raise ConfigError(f"{len(data)} bytes are no stream: written by another version?")
        epoch, batch, consumed, drawn, base_seed = _HEADER.unpack_from(data)
        states = _WORKER.iter_unpack(data[_HEADER.size :])
        workers = tuple(state if known else None for known, state in states)
        return cls(epoch, batch, consumed, base_seed if drawn else None, workers)


def filled(workers: Sequence[bytes | None], num_workers: int) -> list[bytes | None]:
    """The states of all loader workers: those that are not there are as seeded."""
    if len(workers) > num_workers:
        raise ConfigError(
            f"a stream of {len(workers)} loader workers, but num_workers={num_workers}: it must not change"
        )
    return [*workers, *[None] * (num_workers - len(workers))]
