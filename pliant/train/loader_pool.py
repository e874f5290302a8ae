"""The pool of loader processes, and what all loaders that use one have in common.

The pool has W processes, whatever the number of replicas. They end with their parent, however it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.errors import LoaderFailed, TrainError
from pliant.train.context import DataPosition
from pliant.train.loader_process import (
    BeginStream,
    DropTrack,
    LoadBatch,
    LoadedBatch,
    LoaderSpec,
    Message,
    OpenStream,
    OpenTrack,
    parent_ends,
    receive_shared,
    run_loader_process,
    wrap_exception,
)
from pliant.train.replica_stream import StreamResume
from pliant.train.sampling import LoaderOptions

_GRACE_S = 2.0
"""How long a loader process may take to end by itself."""


class LoaderPool:
    """W running loader processes."""

    def __init__(self, spec: LoaderSpec, context: BaseContext | str | None, *, pin: bool, timeout_s: float) -> None:
        """Start the processes. `timeout_s` limits the wait for one batch; 0: forever."""
        # torch.multiprocessing has registered shared memory for tensors with the pickler of every context.
        self._context = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._tasks: list[Connection[Any, Any]] = []
        self._results: list[socket.socket] = []
        self._pinner: _Pinner | None = None
        try:
            for worker in range(spec.num_workers):
                self._start(spec, worker)
            if pin:
                self._pinner = _Pinner(self._results)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: LoaderSpec, worker: int) -> None:
        task_reader, task_writer = self._context.Pipe(duplex=False)
        result_reader, result_writer = socket.socketpair()
        parent_ends.update((task_writer, result_reader))
        self._tasks.append(task_writer)
        self._results.append(result_reader)
        # The kernel ties the life of a process to the thread that forked it. So only the main thread may ask for that,
        # and not if another process forks for us.
        tie = threading.current_thread() is threading.main_thread() and self._context.get_start_method() != "forkserver"
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_loader_process,
            args=(spec, worker, os.getpid(), tie, task_reader, result_writer),
            name=f"pliant-loader-{worker}",
            daemon=True,
        )
        try:
            process.start()
        finally:
            task_reader.close()
            result_writer.close()
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def open(self, track: int, base_seed: int, states: Sequence[bytes | None]) -> None:
        """Seed the loader workers of `track`; those with a state continue from it."""
        for worker in range(len(self._processes)):
            self._send(worker, OpenTrack(track, base_seed, states[worker] if worker < len(states) else None))

    def load(self, track: int, batch: int, indices: Any) -> None:
        """Request a batch. The batches of a track and loader worker must be requested in order."""
        self._send(batch % len(self._processes), LoadBatch(track, batch, indices))

    def drop(self, track: int) -> None:
        """Drop a track, with what it has not loaded yet."""
        for worker in range(len(self._processes)):
            self._send(worker, DropTrack(track))

    def open_stream(self, track: int, base_seed: int, replica: int, resumes: Sequence[StreamResume | None]) -> None:
        """Make a replica's copies of an iterable dataset, one in each process, and continue each where it was left."""
        for worker, resume in enumerate(resumes):
            self._send(worker, OpenStream(track, base_seed, replica, resume))

    def begin_stream(self, track: int, before: int) -> None:
        """Begin another epoch of the stream of track `before`, under another track."""
        for worker in range(len(self._processes)):
            self._send(worker, BeginStream(track, before))

    def _send(self, worker: int, message: Message) -> None:
        try:
            self._tasks[worker].send(message)
        except OSError as error:
            raise self._dead(worker) from error

    def receive(self, batch: int) -> list[LoadedBatch]:
        """Wait for the process that loads `batch`, or for any if memory is pinned; return all batches that are ready.

        Raises:
            TrainError: a process has died, or `timeout_s` have passed.
        """
        worker = batch % len(self._processes)
        if self._pinner is not None:
            arrived = self._pinner.receive(self._timeout_s or None)
        else:
            sentinel = self._processes[worker].sentinel
            woken = wait([self._results[worker], sentinel], self._timeout_s or None)
            readable = wait(self._results, 0)
            arrived = [_receive_batch(each, reader) for each, reader in enumerate(self._results) if reader in readable]
            if not arrived and sentinel in woken:
                raise self._dead(worker)
        for each in arrived:
            if isinstance(each, _LostProcess):
                if isinstance(each.error, EOFError | ConnectionError):
                    raise self._dead(each.worker) from each.error
                raise each.error
        if not arrived:
            raise LoaderFailed(
                f"loader process {worker} (pid {self.pids[worker]}) gave no batch in timeout={self._timeout_s:g} s: "
                "look at what its dataset waits for, or raise timeout"
            )
        return [each for each in arrived if isinstance(each, LoadedBatch)]

    def _dead(self, worker: int) -> TrainError:
        """Return the error for a process that cannot be written to or read from."""
        process = self._processes[worker]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return LoaderFailed(
            f"loader process {worker} (pid {process.pid}) {how} while it was loading: if nobody killed it, "
            "look for the out-of-memory killer in `dmesg` and lower num_workers, prefetch_factor or batch_size"
        )

    def close(self) -> None:
        """End the processes and free what they hold. May be called twice."""
        if self._pinner is not None:
            self._pinner.close()
        for writer in self._tasks:
            with contextlib.suppress(OSError):
                writer.send(None)
        # A process that waits to send a batch is woken by the end of its pipe.
        ends: list[Connection[Any, Any] | socket.socket] = [*self._tasks, *self._results]
        for end in ends:
            end.close()
            parent_ends.discard(end)
        deadline_s = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._tasks, self._results, self._processes = [], [], []


@dataclass(frozen=True, slots=True)
class _LostProcess:
    """A process from which nothing more can be read."""

    worker: int
    error: Exception


def _receive_batch(worker: int, reader: socket.socket) -> LoadedBatch | _LostProcess:
    try:
        loaded: LoadedBatch = receive_shared(reader)
    except Exception as error:  # `LoaderPool.receive` raises it
        return _LostProcess(worker, error)
    return loaded


class _Pinner:
    """A thread that receives from all loader processes and copies batches into pinned memory."""

    def __init__(self, results: Sequence[socket.socket]) -> None:
        self._readers = {reader: worker for worker, reader in enumerate(results)}
        self._arrived: queue.SimpleQueue[LoadedBatch | _LostProcess] = queue.SimpleQueue()
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._device = torch.accelerator.current_device_index()
        self._thread = threading.Thread(target=self._run, name="pliant-pin", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None) -> list[LoadedBatch | _LostProcess]:
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=timeout_s))
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copies must not take cores from training
        torch.accelerator.set_device_index(self._device)
        while True:
            for reader in wait([*self._readers, self._stop_reader]):
                if reader is self._stop_reader:
                    return
                assert isinstance(reader, socket.socket), f"waited for {reader!r}"
                loaded = _receive_batch(self._readers[reader], reader)
                if isinstance(loaded, _LostProcess):
                    del self._readers[reader]
                elif not isinstance(loaded.data, ExceptionWrapper):
                    loaded = replace(loaded, data=_pinned(loaded.data))
                self._arrived.put(loaded)

    def close(self) -> None:
        self._stop_writer.close()
        self._thread.join()
        self._stop_reader.close()


def _pinned(data: Any) -> Any:
    try:
        return pin_memory(data)  # type: ignore[no-untyped-call]
    except Exception:
        return wrap_exception("while the batch was copied into pinned memory")


# --- a loader with a pool ---

Hosted = TypeVar("Hosted")


class PooledLoader(ABC, Generic[Hosted]):
    """The replicas that a loader hosts, their epoch, and its loader processes. Use it in a `with`, or `close` it."""

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._collate = options.collate_fn or (default_collate if options.batches else default_convert)
        self._pin = options.pin_memory and torch.cuda.is_available()
        self._hosted: dict[int, Hosted] = {}
        self._pool: LoaderPool | None = None
        self._epoch: int | None = None
        # The draws would come from one generator here, but from N equal ones in N processes.
        self._generator = None if options.generator is None else options.generator.get_state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The pids of the running loader processes."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """End the loader processes. May be called twice."""
        self._hosted = {}
        self._stop()

    def _enter_epoch(self, streams: Mapping[int, DataPosition]) -> bool:
        """Go to the epoch of these positions; return whether it is another than before. Loader processes end with an epoch
        unless they are persistent."""
        epochs = {stream.epoch for stream in streams.values()}
        if len(epochs) > 1:
            raise AssertionError(f"replicas in different epochs: {sorted(epochs)}")
        if not epochs or epochs == {self._epoch}:
            return False
        (self._epoch,) = epochs
        if not self._options.persistent_workers:
            self._stop()
        return True

    def _hosted_replica(self, replica: int) -> Hosted:
        try:
            return self._hosted[replica]
        except KeyError:
            hosted = ", ".join(map(str, self._hosted)) or "none"
            raise AssertionError(f"replica {replica} is not hosted here (hosted: {hosted})") from None

    @abstractmethod
    def _loader_spec(self) -> LoaderSpec:
        """Return what the loader processes load, and how."""

    def _running_pool(self) -> LoaderPool:
        if self._pool is None:
            options = self._options
            self._pool = LoaderPool(
                self._loader_spec(), options.multiprocessing_context, pin=self._pin, timeout_s=options.timeout
            )
        return self._pool

    def _stop(self) -> None:
        """End the loader processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
