"""Shared memory between the workers of one host: arenas, and who uses which part of them.

An arena is a memfd: it has no name, so nothing is left behind when its owner is killed. Peers get
its descriptor over their Unix socket and map it. Tensors are handed out from arenas, and their
place is free again as soon as the last tensor on it is gone.

What this worker lets others fetch: copies of named tensors, the last few versions of each, or tensors themselves.

Memory that a collective works on: runs of elements that this process can reach, and where operands land.

Views are kept: a training job asks for the same ranges at every step, and making a view costs more than
summing a bias. Who may use which memory when is not known here.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pliant.comm.frames import Place
    from pliant.comm.kernels import Recipe
    from pliant.comm.plan import Step

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


WINDOW = 3


class Store:
    """Named flat CPU tensors. Saving copies, so the original may change at once; publishing does not."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._latest: dict[str, torch.Tensor] = {}
        self._versions: dict[str, OrderedDict[int, torch.Tensor]] = {}
        self._published: dict[str, torch.Tensor] = {}

    def save(self, name: str, tensor: torch.Tensor, version: int | None) -> None:
        """Keep a copy; with a version, the oldest beyond the window is forgotten."""
        copy = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        with self._lock:
            self._latest[name] = copy
            if version is not None:
                versions = self._versions.setdefault(name, OrderedDict())
                versions[version] = copy
                versions.move_to_end(version)
                while len(versions) > self._window:
                    versions.popitem(last=False)

    def publish(self, name: str, flat: torch.Tensor) -> None:
        """Let others read this very memory under a name, until it is unpublished."""
        with self._lock:
            self._published[name] = flat

    def unpublish(self, prefix: str) -> None:
        """Forget what was published under names that begin so."""
        with self._lock:
            for name in [name for name in self._published if name.startswith(prefix)]:
                del self._published[name]

    def get(self, name: str, version: int | None) -> torch.Tensor | None:
        """What was saved last, or under this version; None if there is nothing."""
        with self._lock:
            if version is None:
                found = self._published.get(name)
                return self._latest.get(name) if found is None else found
            versions = self._versions.get(name)
            return versions.get(version) if versions is not None else None


class Span:
    """A flat run of elements in memory that this process can reach, its own or a peer's."""

    __slots__ = ("_bytes", "_cuts", "arena", "flat", "folded", "lasting", "offset", "owner")

    def __init__(self, flat: torch.Tensor, owner: int = -1, arena: int = 0, offset: int = 0) -> None:
        self.flat = flat
        self.owner = owner
        """Whose shared memory it is; -1 where it is no shared memory."""
        self.arena = arena
        self.offset = offset
        self.lasting = False
        """Whether this very object is kept for as long as the engine, so that views on it may be, too."""
        self.folded: Folded | None = None
        """How it was folded with others the last time."""
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
    """The memory of a flat CPU tensor."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True)
class Folded:
    """A fold as it was done last: good for the next time if result and operands lie in the same places. The last
    operand has it, as long as it lands in the same place."""

    out: Span
    others: list[Span]
    """All operands but the last, and the other places where the result goes."""
    recipe: Recipe


class Landing:
    """Memory into which the operands of one slice are received from one peer, kept from step to step: making it, and
    the views on it, costs more than adding a small slice up."""

    __slots__ = ("bytes", "parts", "scratch", "step")

    def __init__(self, scratch: torch.Tensor) -> None:
        self.scratch = scratch
        self.bytes = bytes_of(scratch)
        self.step: Step | None = None
        """What they were operands of the last time."""
        self.parts: list[Span] = []
        """The operands in it, for that step."""
