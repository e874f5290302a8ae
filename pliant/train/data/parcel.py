"""Objects with tensors, from a loader process to its parent: the tensors stay in shared memory.

torch.multiprocessing does this too, but its receiver must call back for each tensor's descriptor, over a new
connection with a handshake (about a millisecond), and a killed process leaves a socket file in /tmp. Here the
descriptors travel with the object. The receiver unpickles, so the other end must be a process of our own.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import UntypedStorage

from pliant.errors import TrainError

_HEADER = struct.Struct("<QI")
_MAX_DESCRIPTORS = 253
"""The most that the kernel lets one message carry (SCM_MAX_FD)."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed object. Owns its shared memory until it is sent."""

    data: bytes
    storages: list[UntypedStorage]


def pack(thing: Any) -> Parcel:
    """Pickle `thing`, with the memory of its tensors moved into shared memory. Raises what pickling raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(thing)
    return Parcel(buffer.getvalue(), pickler.storages)


def send(to: socket.socket, parcel: Parcel) -> None:
    """Send it; raises OSError if nobody receives."""
    descriptors = []
    sizes = []
    for storage in parcel.storages:
        descriptor, size = storage._share_fd_cpu_()
        descriptors.append(descriptor)  # the storage's own; it is closed with it
        sizes.append(size)
    to.sendall(_HEADER.pack(len(parcel.data), len(sizes)))
    for first in range(0, len(descriptors), _MAX_DESCRIPTORS):
        # A byte is needed to carry descriptors.
        socket.send_fds(to, [b"\0"], descriptors[first : first + _MAX_DESCRIPTORS])
    to.sendall(struct.pack(f"<{len(sizes)}Q", *sizes) + parcel.data)


def receive(source: socket.socket) -> Any:
    """The next object; waits for it.

    Raises:
        EOFError: the other end was closed.
        TrainError: this process has too many open files.
    """
    length, count = _HEADER.unpack(_exactly(source, _HEADER.size))
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            expected = min(_MAX_DESCRIPTORS, count - len(descriptors))
            carried, arrived, _, _ = socket.recv_fds(source, 1, expected)
            descriptors += arrived
            if not carried:
                raise EOFError
            if len(arrived) < expected:
                raise TrainError(
                    f"only {len(arrived)} of {expected} descriptors of a batch arrived: this process has too many open "
                    "files. Raise `ulimit -n`, lower prefetch_factor, or do not keep batches"
                )
        sizes = struct.unpack(f"<{count}Q", _exactly(source, 8 * count))
        data = _exactly(source, length)
        return _Unpickler(io.BytesIO(data), _mapped(descriptors, sizes)).load()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)  # the mapping has its own


def _mapped(descriptors: list[int], sizes: tuple[int, ...]) -> list[UntypedStorage]:
    pairs = zip(descriptors, sizes, strict=True)
    return [UntypedStorage._new_shared_fd_cpu(descriptor, size) for descriptor, size in pairs]  # type: ignore[attr-defined]


def _exactly(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = source.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data


class _Pickler(ForkingPickler):
    """Puts a number in place of each piece of CPU memory that tensors are made of."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        # Whoever has chosen files by name (for want of descriptors) gets them.
        self._by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, UntypedStorage) or thing.device.type != "cpu":
            return None
        if not self._by_descriptor or thing.nbytes() == 0:
            return None
        # Tensors that share memory here must share it there; each has its own Python object for it.
        identity = thing._cdata
        if identity not in self._numbers:
            self._numbers[identity] = len(self.storages)
            self.storages.append(thing)
        return self._numbers[identity]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, storages: list[UntypedStorage]) -> None:
        super().__init__(buffer)
        self._storages = storages

    def persistent_load(self, number: int) -> UntypedStorage:
        return self._storages[number]
