"""What the engines of one worker have in common in all views: memory, stored tensors, connections, thread, GPU copies."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from pliant.cluster import Worker
from pliant.comm.connections import Connections
from pliant.comm.cuda import CudaStage
from pliant.comm.reactor import Reactor
from pliant.comm.shm import SharedMemory
from pliant.comm.store import Store
from pliant.comm.transport.poller import Poller


class Workshop:
    """Made once per worker, used by one engine after the other."""

    def __init__(self, me: Worker, *, heartbeat_timeout_s: float, linger_s: float) -> None:
        self.memory = SharedMemory()
        self.store = Store()
        poller = Poller()
        self.connections = Connections(me, poller, heartbeat_timeout_s=heartbeat_timeout_s)
        self.reactor = Reactor(self.connections, poller, linger_s=linger_s)
        self._cuda: CudaStage | None = None
        self._making = threading.Lock()

    def stage(self) -> CudaStage:
        """What copies CUDA tensors; the memory that it has pinned stays so over views."""
        with self._making:
            if self._cuda is None:
                self._cuda = CudaStage(self.memory)
            return self._cuda

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in memory that the workers of this host share."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return self.memory.empty(math.prod(sizes), dtype).view(sizes)

    def close(self) -> None:
        """Send what is still queued, say goodbye and end. Handles that still wait fail with EngineClosed."""
        self.reactor.close()
        with self._making:
            if self._cuda is not None:
                self._cuda.close()
            self._cuda = None
        self.memory.close()
