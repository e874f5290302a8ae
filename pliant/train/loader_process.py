"""A loader process: it is the w-th loader worker of every replica that its worker hosts, in turn.

The loader workers that one process stands for differ in their random state only. It is kept per *track*: a track is opened
with a base seed (and, for a replica that has come from another worker, a state to continue from), advanced by every batch,
and dropped when it is no longer needed. There is one copy of the dataset per process.

Batches go to the parent as pickles whose tensors stay in shared memory, and their descriptors travel with the pickle.
torch.multiprocessing would open a connection with a handshake for each tensor, which takes about a millisecond.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import UntypedStorage
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from pliant.child import die_with
from pliant.errors import LoaderFailed
from pliant.train.context import RngState, capture_rng, restore_rng
from pliant.train.replica_copies import OwnGenerators
from pliant.train.replica_stream import ReplicaStream, StreamEnd, StreamOptions, StreamResume

parent_ends: set[Connection[Any, Any] | socket.socket] = set()
"""The parent's ends of all pipes to loader processes. A forked process closes its copies, which would keep others open.
"""


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """What every loader process needs to make batches."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    batches: bool = True
    """If false, the dataset gives whole batches."""
    streams: StreamOptions | None = None
    """How to iterate over an iterable dataset; None for a map-style one."""
    is_shared: bool = False
    """Whether several replicas share the dataset."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch, or the error it met, and the random state of its loader worker after it."""

    track: int
    batch: int
    data: Any
    """A `StreamEnd` after the last batch of a stream."""
    state: bytes
    size: int = 1
    """The samples in it."""
    start: bytes | None = None
    """With the first batch of a stream: the state with which its epoch began."""
    kept: bytes | None = None
    """The state of a stream after this batch, if it has one to load."""

    def take(self) -> Any:
        """Return the batch, or raise what the dataset raised, with the traceback of the loader process."""
        if isinstance(self.data, ExceptionWrapper):
            self.data.reraise()  # type: ignore[no-untyped-call]
        return self.data


@dataclass(frozen=True, slots=True)
class OpenTrack:
    track: int
    base_seed: int
    state: bytes | None


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Make the copy of a replica's stream for this loader worker."""

    track: int
    base_seed: int
    replica: int
    resume: StreamResume | None
    """Where it continues; None: at its beginning."""


@dataclass(frozen=True, slots=True)
class BeginStream:
    """Begin another epoch of a stream, under another track."""

    track: int
    before: int


@dataclass(frozen=True, slots=True)
class LoadBatch:
    track: int
    batch: int
    indices: Any
    """None for a stream, which gives its next batch."""


@dataclass(frozen=True, slots=True)
class DropTrack:
    track: int


Message = OpenTrack | OpenStream | BeginStream | LoadBatch | DropTrack


def wrap_exception(where: str) -> ExceptionWrapper:
    """Wrap the exception being handled, so that the parent can raise it with its type and traceback."""
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def fetch_batch(dataset: Any, collate_fn: Callable[[Any], Any], indices: Any, batches: bool = True) -> Any:
    """Return the batch of these samples. A dataset with `__getitems__` is asked once for all of them. If `batches` is
    false, `indices` is one index, and the dataset gives a whole batch for it."""
    if not batches:
        return collate_fn(dataset[indices])
    if getattr(dataset, "__getitems__", None):
        return collate_fn(dataset.__getitems__(indices))
    return collate_fn([dataset[index] for index in indices])


def run_loader_process(
    spec: LoaderSpec,
    worker: int,
    parent: int,
    tie: bool,
    tasks: Connection[Any, Any],
    results: socket.socket,
) -> None:
    """Run a loader process until its parent ends it."""
    _detach(parent, tie)
    torch.set_num_threads(1)
    inbox = _MessageReader(tasks)
    workers: _LoaderWorkers | _StreamWorkers
    workers = _LoaderWorkers(spec, worker) if spec.streams is None else _StreamWorkers(spec, worker, spec.streams)
    while (message := inbox.get()) is not None:
        match message:
            case OpenTrack() | OpenStream() | BeginStream():
                workers.open(message)
            case LoadBatch() if inbox.is_wanted(message.track):
                try:
                    send_shared(results, _pack_batch(workers.load(message)))
                except OSError:
                    return  # the parent has closed its end, or is gone
            case DropTrack():
                workers.drop(message.track)


def _pack_batch(loaded: LoadedBatch) -> SharedMessage:
    try:
        return pack_shared(loaded)
    except Exception:
        problem = wrap_exception("while a batch was pickled, to be sent from the loader process")
        return pack_shared(replace(loaded, data=problem))


def _detach(parent: int, tie: bool) -> None:
    """Undo what a forked process has inherited from the training program, and tie its life to the parent's."""
    if tie:
        die_with(parent)
    signal.set_wakeup_fd(-1)  # it would wake the parent
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for connection in parent_ends:
        connection.close()
    parent_ends.clear()


class _MessageReader:
    """The messages to a loader process.

    A thread reads them at once. So the parent never waits for a process that waits for the parent to take a batch, and
    a drop takes effect before the loads that it overtakes.
    """

    def __init__(self, tasks: Connection[Any, Any]) -> None:
        self._tasks = tasks
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        threading.Thread(target=self._read, name="pliant-inbox", daemon=True).start()

    def get(self) -> Message | None:
        """Return the next message; None at the end."""
        message = self._messages.get()
        return None if self._ended else message

    def is_wanted(self, track: int) -> bool:
        return track in self._wanted

    _ended = False

    def _read(self) -> None:
        message = None
        while not self._ended:
            try:
                message = self._tasks.recv()
            except (EOFError, OSError):
                message = None
            match message:
                case OpenTrack() | OpenStream():
                    self._wanted.add(message.track)
                case BeginStream():  # what was requested before is still loaded: the stream goes on from there
                    self._wanted.add(message.track)
                case DropTrack():
                    self._wanted.discard(message.track)
                case None:
                    self._ended = True
            self._messages.put(message)


@dataclass(frozen=True, slots=True)
class _SeededWorker:
    """A loader worker before its first batch."""

    state: RngState
    failure: ExceptionWrapper | None


class _LoaderWorkers:
    """The loader workers that one process stands for, by track."""

    def __init__(self, spec: LoaderSpec, worker: int) -> None:
        self._spec, self._worker = spec, worker
        self._states: dict[int, RngState] = {}
        self._seeds: dict[int, int] = {}
        self._beginnings: dict[int, _SeededWorker] = {}
        self._own_generators: OwnGenerators | None = None

    def open(self, message: Message) -> None:
        """Make a loader worker with the given state."""
        assert isinstance(message, OpenTrack), "tracks of map-style datasets"
        self._seeds[message.track] = message.base_seed
        self._introduce(message.track)
        # Only the first loader worker with a base seed is really initialised, so `worker_init_fn` is not called again
        # for every epoch of a persistent loader, nor for batches that are loaded again.
        if message.base_seed not in self._beginnings:
            self._beginnings[message.base_seed] = self._begin(message.base_seed)
        self._states[message.track] = (
            self._beginnings[message.base_seed].state if message.state is None else RngState.from_bytes(message.state)
        )

    def _begin(self, base_seed: int) -> _SeededWorker:
        """Do what torch's loader worker does before its first batch."""
        _seed_worker(base_seed, self._worker)
        failure = None
        if self._spec.worker_init_fn is not None:
            try:
                self._spec.worker_init_fn(self._worker)
            except Exception:
                failure = wrap_exception(f"in worker_init_fn of loader process {self._worker}")
        return _SeededWorker(capture_rng(), failure)

    def load(self, message: LoadBatch) -> LoadedBatch:
        track = message.track
        self._introduce(track)
        restore_rng(self._states[track])
        data: Any = self._beginnings[self._seeds[track]].failure
        if data is None:
            try:
                data = self._fetch(message.indices)
            except Exception:
                data = wrap_exception(f"in loader process {self._worker}")
        state = self._states[track] = capture_rng()
        size = len(message.indices) if self._spec.batches else 1
        return LoadedBatch(track, message.batch, data, state.to_bytes(), size)

    def _fetch(self, indices: Any) -> Any:
        spec = self._spec
        if spec.is_shared and self._own_generators is None:  # after `worker_init_fn`, which may have made some
            self._own_generators = OwnGenerators(dataset=spec.dataset, collate_fn=spec.collate_fn)
        data = fetch_batch(spec.dataset, spec.collate_fn, indices, spec.batches)
        if self._own_generators is not None:
            self._own_generators.check()
        return data

    def drop(self, track: int) -> None:
        self._states.pop(track, None)
        self._seeds.pop(track, None)

    def _introduce(self, track: int) -> None:
        """Make `torch.utils.data.get_worker_info` describe the loader worker of this track."""
        _introduce(self._worker, self._spec.num_workers, self._seeds[track], self._spec.dataset)


def _seed_worker(base_seed: int, worker: int) -> None:
    """Seed the generators as torch's loader worker does."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def _introduce(worker: int, num_workers: int, base_seed: int, dataset: Any) -> None:
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=num_workers, seed=base_seed + worker, dataset=dataset
    )


@dataclass(slots=True)
class _StreamWorker:
    """The loader worker of one replica: its stream and its random state."""

    base_seed: int
    stream: ReplicaStream
    state: RngState
    start: bytes | None
    """The state with which the epoch began, until it is sent."""
    failure: ExceptionWrapper | None = None


class _StreamWorkers:
    """The loader workers that one process stands for, by track: each has its own copy of an iterable dataset."""

    def __init__(self, spec: LoaderSpec, worker: int, options: StreamOptions) -> None:
        self._spec, self._worker, self._options = spec, worker, options
        self._tracks: dict[int, _StreamWorker] = {}

    def open(self, message: Message) -> None:
        if isinstance(message, BeginStream):
            found = self._tracks[message.track] = self._tracks.pop(message.before)
            self._introduce(found)
            restore_rng(found.state)
            self._try(found, lambda: found.stream.begin())
            return
        assert isinstance(message, OpenStream), "tracks of iterable datasets"
        stream = ReplicaStream(self._spec.dataset, message.replica, self._options, self._spec.collate_fn)
        found = self._tracks[message.track] = _StreamWorker(message.base_seed, stream, capture_rng(), None)
        self._try(found, lambda: self._begin(found, message.resume))

    def _begin(self, found: _StreamWorker, resume: StreamResume | None) -> None:
        """Do what torch's loader worker does before its first batch; or continue where the stream was left."""
        found.stream.make()
        self._introduce(found)
        _seed_worker(found.base_seed, self._worker)
        if self._spec.worker_init_fn is not None:
            self._spec.worker_init_fn(self._worker)
        if resume is not None:
            found.stream.resume(resume)
        for _ in range(resume.unused if resume is not None else 0):
            with contextlib.suppress(Exception):  # it is thrown away
                found.stream.fetch()
        if resume is None or resume.is_over:
            found.stream.begin()

    def _try(self, found: _StreamWorker, action: Callable[[], None]) -> None:
        try:
            action()
            found.start = found.stream.start
        except Exception:
            found.failure = wrap_exception(f"in loader process {self._worker}")
        found.state = capture_rng()

    def load(self, message: LoadBatch) -> LoadedBatch:
        found = self._tracks[message.track]
        self._introduce(found)
        restore_rng(found.state)
        data: Any = found.failure
        if data is None:
            try:
                data = found.stream.fetch()
            except StopIteration:
                data = StreamEnd()
            except Exception:
                data = wrap_exception(f"in loader process {self._worker}")
        state = found.state = capture_rng()
        kept = found.stream.save() if found.failure is None else None
        start, found.start = found.start, None
        return LoadedBatch(message.track, message.batch, data, state.to_bytes(), found.stream.size, start, kept)

    def drop(self, track: int) -> None:
        self._tracks.pop(track, None)

    def _introduce(self, found: _StreamWorker) -> None:
        _introduce(self._worker, self._spec.num_workers, found.base_seed, found.stream.dataset)


# --- batches in shared memory ---


_HEADER = struct.Struct("<QI")
_MAX_DESCRIPTORS = 253
"""The most descriptors that the kernel lets one message carry (SCM_MAX_FD)."""


@dataclass(frozen=True, slots=True)
class SharedMessage:
    """A pickled object. Owns its shared memory until it is sent."""

    data: bytes
    storages: list[UntypedStorage]


def pack_shared(thing: Any) -> SharedMessage:
    """Pickle `thing`, with the memory of its tensors moved into shared memory. Raises what pickling raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(thing)
    return SharedMessage(buffer.getvalue(), pickler.storages)


def send_shared(to: socket.socket, message: SharedMessage) -> None:
    """Send it; raises OSError if nobody receives."""
    descriptors = []
    sizes = []
    for storage in message.storages:
        descriptor, size = storage._share_fd_cpu_()
        descriptors.append(descriptor)  # the storage's own; it is closed with it
        sizes.append(size)
    to.sendall(_HEADER.pack(len(message.data), len(sizes)))
    for first in range(0, len(descriptors), _MAX_DESCRIPTORS):
        # At least one byte is needed to carry descriptors.
        socket.send_fds(to, [b"\0"], descriptors[first : first + _MAX_DESCRIPTORS])
    to.sendall(struct.pack(f"<{len(sizes)}Q", *sizes) + message.data)


def receive_shared(source: socket.socket) -> Any:
    """Wait for the next object. It is unpickled, so the other end must be our own process.

    Raises:
        EOFError: the other end was closed.
        LoaderFailed: this process has too many open files.
    """
    length, count = _HEADER.unpack(_receive_exactly(source, _HEADER.size))
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            expected = min(_MAX_DESCRIPTORS, count - len(descriptors))
            carried, arrived, _, _ = socket.recv_fds(source, 1, expected)
            descriptors += arrived
            if not carried:
                raise EOFError
            if len(arrived) < expected:
                raise LoaderFailed(
                    f"only {len(arrived)} of {expected} descriptors of a batch arrived: this process has too many open "
                    "files. Raise `ulimit -n`, lower prefetch_factor, or do not keep batches"
                )
        sizes = struct.unpack(f"<{count}Q", _receive_exactly(source, 8 * count))
        data = _receive_exactly(source, length)
        return _Unpickler(io.BytesIO(data), _map_storages(descriptors, sizes)).load()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)  # the mapping has its own


def _map_storages(descriptors: list[int], sizes: tuple[int, ...]) -> list[UntypedStorage]:
    pairs = zip(descriptors, sizes, strict=True)
    return [UntypedStorage._new_shared_fd_cpu(descriptor, size) for descriptor, size in pairs]  # type: ignore[attr-defined]


def _receive_exactly(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = source.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data


class _Pickler(ForkingPickler):
    """Replaces each CPU storage of a tensor by a number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        # A program may have chosen files by name, for want of descriptors.
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
