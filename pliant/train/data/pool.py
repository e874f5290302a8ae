"""The loader processes of one worker: W of them, whatever the number of replicas that it hosts.

They end with their parent, however it ends, and answer to nobody else: Ctrl-C and the handlers of the
training program are not for them. What they do is in `loader_process`; which batch is loaded when is decided in `feeder`.
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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.errors import TrainError
from pliant.train.data import parcel
from pliant.train.data.loader_process import Drop, Load, Loaded, Open, Recipe, caught, parent_ends, serve

_GRACE_S = 2.0
"""How long a loader process may take to end by itself."""


class Pool:
    """W running loader processes."""

    def __init__(self, recipe: Recipe, context: BaseContext | str | None, *, pin: bool, timeout_s: float) -> None:
        """Start them. `timeout_s` is for the wait for one batch; 0: for ever."""
        # torch.multiprocessing has taught the pickler of every context to put tensors into shared memory.
        self._context = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._tasks: list[Connection[Any, Any]] = []
        self._results: list[socket.socket] = []
        self._pinner: _Pinner | None = None
        try:
            for worker in range(recipe.num_workers):
                self._start(recipe, worker)
            if pin:
                self._pinner = _Pinner(self._results)
        except BaseException:
            self.close()
            raise

    def _start(self, recipe: Recipe, worker: int) -> None:
        task_reader, task_writer = self._context.Pipe(duplex=False)
        result_reader, result_writer = socket.socketpair()
        parent_ends.update((task_writer, result_reader))
        self._tasks.append(task_writer)
        self._results.append(result_reader)
        # The kernel ties the life of a process to the thread that forked it, so only the main thread may ask for that,
        # and not where somebody else forks for us.
        tie = threading.current_thread() is threading.main_thread() and self._context.get_start_method() != "forkserver"
        process = self._context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(recipe, worker, os.getpid(), tie, task_reader, result_writer),
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
        """Seed the loader workers of `track`; those with a state go on from there."""
        for worker in range(len(self._processes)):
            self._send(worker, Open(track, base_seed, states[worker] if worker < len(states) else None))

    def load(self, track: int, batch: int, indices: list[int]) -> None:
        """Ask for a batch; the batches of a track and loader worker must be asked for in their order."""
        self._send(batch % len(self._processes), Load(track, batch, indices))

    def drop(self, track: int) -> None:
        """Forget a track, with what it has not loaded yet."""
        for worker in range(len(self._processes)):
            self._send(worker, Drop(track))

    def _send(self, worker: int, message: Open | Load | Drop) -> None:
        try:
            self._tasks[worker].send(message)
        except OSError as error:
            raise self._dead(worker) from error

    def receive(self, batch: int) -> list[Loaded]:
        """Wait for the process that loads `batch`, or for any if memory is pinned; bring along what others have ready.

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
            arrived = [_receive(each, reader) for each, reader in enumerate(self._results) if reader in readable]
            if not arrived and sentinel in woken:
                raise self._dead(worker)
        for each in arrived:
            if isinstance(each, _Lost):
                if isinstance(each.error, EOFError | ConnectionError):
                    raise self._dead(each.worker) from each.error
                raise each.error
        if not arrived:
            raise TrainError(
                f"loader process {worker} (pid {self.pids[worker]}) gave no batch in timeout_s={self._timeout_s:g}: "
                "look at what its dataset waits for, or raise timeout_s"
            )
        return [each for each in arrived if isinstance(each, Loaded)]

    def _dead(self, worker: int) -> TrainError:
        """What to raise when nothing can be sent to or read from a process."""
        process = self._processes[worker]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return TrainError(
            f"loader process {worker} (pid {process.pid}) {how} while it was loading: if nobody killed it, "
            "look for the out-of-memory killer in `dmesg` and lower num_workers, prefetch_factor or batch_size"
        )

    def close(self) -> None:
        """End the processes and free what they hold; may be called twice."""
        if self._pinner is not None:
            self._pinner.close()
        for writer in self._tasks:
            with contextlib.suppress(OSError):
                writer.send(None)
        # One that waits to hand over a batch is woken by the end of its pipe.
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
class _Lost:
    """Nothing more can be read from this process."""

    worker: int
    error: Exception


def _receive(worker: int, reader: socket.socket) -> Loaded | _Lost:
    try:
        loaded: Loaded = parcel.receive(reader)
    except Exception as error:  # in the pinning thread, nobody would hear of it; in any case `Pool.receive` raises it
        return _Lost(worker, error)
    return loaded


class _Pinner:
    """A thread that receives from all loader processes and copies batches into pinned memory."""

    def __init__(self, results: Sequence[socket.socket]) -> None:
        self._readers = {reader: worker for worker, reader in enumerate(results)}
        self._arrived: queue.SimpleQueue[Loaded | _Lost] = queue.SimpleQueue()
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._device = torch.accelerator.current_device_index()
        self._thread = threading.Thread(target=self._run, name="pliant-pin", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None) -> list[Loaded | _Lost]:
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=timeout_s))
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copies must not take the cores of the training
        torch.accelerator.set_device_index(self._device)
        while True:
            for reader in wait([*self._readers, self._stop_reader]):
                if reader is self._stop_reader:
                    return
                assert isinstance(reader, socket.socket), f"waited for {reader!r}"
                loaded = _receive(self._readers[reader], reader)
                if isinstance(loaded, _Lost):
                    del self._readers[reader]
                elif not isinstance(loaded.data, ExceptionWrapper):
                    loaded = Loaded(loaded.track, loaded.batch, _pinned(loaded.data), loaded.state)
                self._arrived.put(loaded)

    def close(self) -> None:
        self._stop_writer.close()
        self._thread.join()
        self._stop_reader.close()


def _pinned(data: Any) -> Any:
    try:
        return pin_memory(data)  # type: ignore[no-untyped-call]
    except Exception:
        return caught("while the batch was copied into pinned memory")
