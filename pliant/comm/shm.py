"""Shared memory between the workers of one host: arenas, and who uses which part of them.

An arena is a memfd: it has no name, so nothing is left behind when its owner is killed. Peers get
its descriptor over their Unix socket and map it. Tensors are handed out from arenas, and their
place is free again as soon as the last tensor on it is gone.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
import weakref

import torch

ALIGNMENT = 64
ARENA_BYTES = 64 << 20


class Arena:
    """A piece of memory that other processes can map. It closes with the last tensor that uses it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.memory = mmap.mmap(fd, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> Arena:
        fd = os.memfd_create("pliant", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def flat(self, offset: int, dtype: torch.dtype, length: int) -> torch.Tensor:
        """`length` elements from `offset` on."""
        return self.bytes[offset : offset + length * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Close the descriptor; the mapping lives as long as tensors look at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedMemory:
    """This worker's arenas. Any thread may allocate; what is freed is used again for the same size."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        # Re-entrant: a garbage collection inside `allocate` may run finalizers that free.
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._used = 0
        self._begins: list[tuple[int, int]] = []

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in shared memory, uninitialised."""
        if length == 0:
            return torch.empty(0, dtype=dtype)
        size = _size_class(length * dtype.itemsize)
        arena, offset = self._take(size)
        # The tensor's storage holds this view, and nothing else does: when it goes, the place is free.
        view = memoryview(self.arenas[arena].memory)[offset : offset + length * dtype.itemsize]
        weakref.finalize(view, self._give_back, size, arena, offset).atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(arena, offset) of a contiguous tensor; None if it lies elsewhere."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, (address, len(self.arenas))) - 1
        if index < 0:
            return None
        begin, arena = self._begins[index]
        if address + tensor.nbytes > begin + self.arenas[arena].size:
            return None
        return arena, address - begin

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def _take(self, size: int) -> tuple[int, int]:
        with self._lock:
            places = self._free.get(size)
            if places:
                return places.pop()
            if not self.arenas or self._used + size > self.arenas[-1].size:
                self._grow(size)
            offset, self._used = self._used, self._used + size
            return len(self.arenas) - 1, offset

    def _grow(self, size: int) -> None:
        arena = Arena.create(max(ARENA_BYTES, size))
        self.arenas.append(arena)  # before it can be found: `locate` takes no lock
        bisect.insort(self._begins, (arena.address, len(self.arenas) - 1))
        self._used = 0

    def _give_back(self, size: int, arena: int, offset: int) -> None:
        with self._lock:
            self._free.setdefault(size, []).append((arena, offset))


def _size_class(num_bytes: int) -> int:
    """Rounded up to an eighth of the power of two below, so that sizes recur and little is wasted."""
    step = max(ALIGNMENT, 1 << max(0, math.floor(math.log2(num_bytes)) - 3))
    return -(-num_bytes // step) * step
