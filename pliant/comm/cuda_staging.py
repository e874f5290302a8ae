"""Copies of CUDA tensors to pinned host memory and back, so that collectives can work on them beside the compute.

The copies run on a stream of their own and wait for the user's stream by events, so they block neither the user's
thread nor the engine's. The host memory is the worker's shared memory itself, registered with CUDA, so nothing is
copied twice between the workers of a host.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pliant.comm.memory import Arena, SharedMemory
    from pliant.comm.operations import Operation


log = logging.getLogger(__name__)


class CudaStaging:
    """One copying thread, and one stream per device."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._pinned: set[int] = set()
        self._mapped: weakref.WeakSet[Arena] = weakref.WeakSet()
        """The memory of peers that was pinned here, or could not be."""
        self._pinning = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pliant-cuda", daemon=True)
        self._thread.start()

    def submit(self, source: torch.Tensor, operation: Operation, begin: Callable[[], None]) -> None:
        """Copy `source` to the memory of the operation once the work queued so far has produced it, then call `begin`."""
        ready = torch.cuda.current_stream(source.device).record_event()
        self._todo.put(lambda: self._copy_in(source, operation, ready, begin))

    def finish(self, target: torch.Tensor, staging: torch.Tensor, write: bool, operation: Operation) -> None:
        """Copy the result back, then finish the handle; the stream of a waiting thread waits for the copy."""
        self._todo.put(lambda: self._copy_out(target, staging, write, operation))

    def call_after(
        self, event: torch.cuda.Event, act: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> None:
        """Call `act` on the copying thread when the device has reached `event`; `on_error` if the device has failed."""

        def wait_and_act() -> None:
            try:
                event.synchronize()
            except Exception as error:
                on_error(error)
            else:
                act()

        self._todo.put(wait_and_act)

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join(timeout=10)
        for arena in self._pinned:
            _runtime().cudaHostUnregister(self._memory.arenas[arena].address)

    def _run(self) -> None:
        while (call := self._todo.get()) is not None:
            call()

    def _copy_in(
        self, source: torch.Tensor, operation: Operation, ready: torch.cuda.Event, begin: Callable[[], None]
    ) -> None:
        try:
            staging = operation.out.flat
            self.pin(staging)
            stream = self._stream(source.device)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                staging.copy_(source.detach().reshape(-1), non_blocking=True)
            stream.synchronize()
            begin()
        except Exception as error:
            operation.handle.fail(error)

    def _copy_out(self, target: torch.Tensor, staging: torch.Tensor, write: bool, operation: Operation) -> None:
        try:
            if not write:
                operation.handle.finish(operation.result)
                return
            stream = self._stream(target.device)
            with torch.cuda.stream(stream):
                target.detach().copy_(staging.view(target.shape), non_blocking=True)
                copied = stream.record_event()
            target.record_stream(stream)
            # The staging memory must outlive the copy, which has only been queued.
            copied.synchronize()
            operation.handle.finish(
                operation.result, lambda: torch.cuda.current_stream(target.device).wait_event(copied)
            )
        except Exception as error:
            operation.handle.fail(error)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def pin(self, flat: torch.Tensor) -> None:
        """Register the arena of a tensor with CUDA; do nothing if the tensor is not in shared memory. Thread-safe."""
        place = self._memory.locate(flat)
        with self._pinning:
            if place is None or place[0] in self._pinned:
                return
            arena = self._memory.arenas[place[0]]
            arena.populate()  # else CUDA does it, and every call of the other threads waits for it: 0.4 ms per MB
            torch.cuda.check_error(int(_runtime().cudaHostRegister(arena.address, arena.size, 0)))
            self._pinned.add(place[0])

    def pin_mapped(self, arena: Arena) -> None:
        """Register memory of a peer that is mapped here, until it is unmapped. Thread-safe.

        Where that is not possible, copies from it are only slower.
        """
        with self._pinning:
            if arena in self._mapped:
                return
            self._mapped.add(arena)
            address = arena.address
            arena.populate()
            outcome = int(_runtime().cudaHostRegister(address, arena.size, 0))
            if outcome:
                log.debug("memory of a peer cannot be pinned: error %d", outcome)
                with contextlib.suppress(RuntimeError):  # else the next kernel of this thread would report the error
                    torch.zeros(1, device="cuda")
            else:
                weakref.finalize(arena, _runtime().cudaHostUnregister, address).atexit = False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
