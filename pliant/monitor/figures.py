"""One worker's figures of one step, in a fixed number of bytes: they travel with the next step's row. Pure."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one worker has measured in one step; zeros where there was none yet."""

    step_s: float = 0.0
    """From the end of the step before to the end of this one."""
    compute_s: float = 0.0
    """In the program's own code, for all replicas hosted here."""
    wait_s: float = 0.0
    """Waiting for sums and for other workers."""
    comm_bytes: float = 0.0
    """What the collectives of this step carried."""
    comm_busy_s: float = 0.0
    """From the first of them to the end of the last."""
    egress_bytes_per_s: float = 0.0
    """What went out to other workers, over the step."""
    stalled_s: float = 0.0
    """How long the longest wait that was called a stall has lasted."""

    _PACKED: ClassVar[struct.Struct] = struct.Struct("<7d")
    SIZE: ClassVar[int] = _PACKED.size

    @property
    def comm_bytes_per_s(self) -> float:
        """The throughput of the strategy in use."""
        return self.comm_bytes / self.comm_busy_s if self.comm_busy_s > 0 else 0.0

    def pack(self) -> bytes:
        return self._PACKED.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Figures:
        """What `pack` has made; more bytes may follow."""
        step_s, compute_s, wait_s, comm_bytes, comm_busy_s, egress, stalled_s = cls._PACKED.unpack_from(data)
        return cls(
            step_s=step_s,
            compute_s=compute_s,
            wait_s=wait_s,
            comm_bytes=comm_bytes,
            comm_busy_s=comm_busy_s,
            egress_bytes_per_s=egress,
            stalled_s=stalled_s,
        )
