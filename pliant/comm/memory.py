"""Memory of one worker: arenas shared within the host, and spans of elements in them.

An arena is a memfd: it has no name, so nothing is left behind when its owner is killed. Peers get its descriptor over
their Unix socket and map it. Tensors are allocated from arenas, and their place is free again as soon as the last
tensor on it is gone.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pliant.comm.frames import Place
    from pliant.comm.kernels import PreparedFold
    from pliant.comm.plan import SliceStep

ALIGNMENT = 64
ARENA_BYTES = 64 << 20
PAGE_BYTES = mmap.PAGESIZE
RESERVED_BYTES = 1 << 16
"""Smaller tensors are not allocated from reserved memory."""
POPULATED_BYTES = 16 << 20
"""How much is populated by one call."""
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)  # unlike the methods of mmap, it lets other threads run during a call


# --- shared memory ---


class Arena:
    """A piece of memory that other processes can map. It is unmapped with the last tensor that uses it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.memory = mmap.mmap(fd, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.has_slots = False
        """Whether peers read here what is lent to them (`comm.lending`)."""

    @classmethod
    def create(cls, size: int) -> Arena:
        fd = os.memfd_create("pliant", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def flat(self, offset: int, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Return `length` elements from `offset` on as a flat tensor."""
        return self.bytes[offset : offset + length * dtype.itemsize].view(dtype)

    def populate(self) -> None:
        """Have all pages at once, with what is in them. Kernels before 5.14 cannot, and nothing happens."""
        for begin in range(0, self.size, POPULATED_BYTES):
            length = min(POPULATED_BYTES, self.size - begin)
            place = ctypes.c_void_p(self.address + begin)
            if _libc.madvise(place, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                return

    def close(self) -> None:
        """Close the descriptor; the mapping lives as long as tensors refer to it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedMemory:
    """The arenas of this worker. Any thread may allocate; freed places are reused for the same size."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        # Re-entrant: a garbage collection inside `_allocate` may run finalizers that free.
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._used = 0
        self._reserved: list[tuple[int, int, int]] = []
        """What is left of memory that was set aside: arena, begin and end."""
        self._begins: list[tuple[int, int]] = []

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor in shared memory."""
        if length == 0:
            return torch.empty(0, dtype=dtype)
        size = _size_class(length * dtype.itemsize)
        arena, offset = self._allocate(size)
        # Only the tensor's storage holds this view: when the storage goes, the place is free.
        view = memoryview(self.arenas[arena].memory)[offset : offset + length * dtype.itemsize]
        weakref.finalize(view, self._release, size, arena, offset).atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (arena, offset) of a contiguous tensor; None if it lies elsewhere."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, (address, len(self.arenas))) - 1
        if index < 0:
            return None
        begin, arena = self._begins[index]
        if address + tensor.nbytes > begin + self.arenas[arena].size:
            return None
        return arena, address - begin

    def trim(self) -> None:
        """Give the pages of free places back to the system; they are zero when they are used again.

        Not for memory that is pinned for a GPU, which would not see the new pages.
        """
        with self._lock:
            for size, places in self._free.items():
                for arena, offset in places:
                    begin, end = -(-offset // PAGE_BYTES) * PAGE_BYTES, (offset + size) // PAGE_BYTES * PAGE_BYTES
                    if begin < end:
                        self.arenas[arena].memory.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def _allocate(self, size: int) -> tuple[int, int]:
        with self._lock:
            places = self._free.get(size)
            if places:
                return places.pop()
            for number, (arena, begin, end) in enumerate(self._reserved if size >= RESERVED_BYTES else ()):
                if end - begin >= size:
                    self._reserved[number] = arena, begin + size, end
                    return arena, begin
            if not self.arenas or self._used + size > self.arenas[-1].size:
                self._add_arena(max(ARENA_BYTES, size))
                self._used = 0
            offset, self._used = self._used, self._used + size
            return len(self.arenas) - 1, offset

    def _add_arena(self, size: int) -> None:
        arena = Arena.create(size)
        self.arenas.append(arena)  # before it can be found: `locate` takes no lock
        bisect.insort(self._begins, (arena.address, len(self.arenas) - 1))

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """Set memory aside from which large tensors are allocated later; return it, for the caller to pin. A tensor takes
        up to an eighth more than its size."""
        with self._lock:
            whole = self.empty_arena(num_bytes)
            self._reserved.append((len(self.arenas) - 1, 0, len(whole)))
            return whole

    def empty_arena(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised bytes in an arena of their own, which is never used for anything else."""
        with self._lock:
            size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            self._add_arena(size)
            self._used = size
            return self.arenas[-1].bytes

    def _release(self, size: int, arena: int, offset: int) -> None:
        with self._lock:
            self._free.setdefault(size, []).append((arena, offset))


def _size_class(num_bytes: int) -> int:
    """Round up to a multiple of an eighth of the power of two below, so that sizes recur and little is wasted."""
    step = max(ALIGNMENT, 1 << max(0, math.floor(math.log2(num_bytes)) - 3))
    return -(-num_bytes // step) * step


# --- spans: the memory that a collective works on ---
# Views are cached: a training job asks for the same ranges at every step, and making a view costs more than summing
# a bias.


class Span:
    """A flat run of elements in memory that this process can access, its own or a peer's."""

    __slots__ = ("_bytes", "_cuts", "arena", "cached_fold", "flat", "lasting", "offset", "owner")

    def __init__(self, flat: torch.Tensor, owner: int = -1, arena: int = 0, offset: int = 0) -> None:
        self.flat = flat
        self.owner = owner
        """The rank whose shared memory it is; -1 if it is not shared memory."""
        self.arena = arena
        self.offset = offset
        self.lasting = False
        """Whether this object is kept as long as the engine, so that views on it may be kept, too."""
        self.cached_fold: CachedFold | None = None
        """The last fold in which this span was the last operand."""
        self._cuts: dict[tuple[int, int], torch.Tensor] = {}
        self._bytes: dict[tuple[int, int], memoryview] = {}

    def cut(self, begin: int, end: int) -> torch.Tensor:
        key = (begin, end)
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = self.flat[begin:end]
        return found

    def bytes(self, begin: int, end: int) -> memoryview:
        key = (begin, end)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = bytes_of(self.cut(begin, end))
        return found

    def place(self, begin: int = 0) -> Place:
        return self.owner, self.arena, self.offset + begin * self.flat.dtype.itemsize


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat CPU tensor."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True)
class CachedFold:
    """A fold that can be repeated if the result and all operands lie in the same memory as last time.

    It is kept at the span of its last operand, as long as that operand is received into the same buffer.
    """

    out: Span
    others: list[Span]
    """All operands but the last, and the other destinations of the result."""
    prepared: PreparedFold


class OperandBuffer:
    """Memory into which the operands of one slice are received from one peer.

    It is kept from step to step: making it, and the views on it, costs more than summing a small slice.
    """

    __slots__ = ("bytes", "parts", "scratch", "step")

    def __init__(self, scratch: torch.Tensor) -> None:
        self.scratch = scratch
        self.bytes = bytes_of(scratch)
        self.step: SliceStep | None = None
        """The step for which `parts` was made."""
        self.parts: list[Span] = []
        """The operands in the buffer."""
