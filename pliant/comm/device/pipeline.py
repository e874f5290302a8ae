"""Device tensors on their way through torch's group: one thread launches them, in the order it is given, one finishes.

Two threads, because waiting for one tensor must not delay the launch of the next. In the hierarchical
variant the host's sum goes on to the engine between the two, and comes back. In which order tensors are
launched, and what a failure means, is `group`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch._C import _distributed_c10d as c10d

from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.torch_group import TorchGroup
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle, HandleOwner
from pliant.errors import CommError

log = logging.getLogger(__name__)

EXPLAIN_S = 1.0
"""When torch's group fails, the engine is given this long to say which worker was lost: torch does not know."""


class Request:
    """One tensor on its way."""

    __slots__ = ("buffer", "crossed", "handle", "name", "ready", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor, patron: HandleOwner) -> None:
        self.name = name
        self.tensor = tensor
        self.buffer = tensor.detach()
        """What torch works on: the tensor itself, or a contiguous copy of it."""
        # When it is ready: after what the submitter has queued, later after what the launching thread has.
        self.ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        self.handle = Handle(name, patron, self)
        self.crossed: Future[Handle | None] = Future()
        """Hierarchical: the all-reduce between the hosts, on their first ranks."""

    def fail(self, error: Exception) -> None:
        self.handle.fail(error)
        with contextlib.suppress(InvalidStateError):  # the sum between the hosts had begun
            self.crossed.set_exception(error)


class Owner(Protocol):
    """Whose requests they are; called on either thread."""

    broken: threading.Event
    """Set when something has failed, here or elsewhere."""

    def fail(self, error: Exception) -> None:
        """Something has gone wrong here."""

    def finish(self, request: Request, after: Callable[[], None] | None) -> None:
        """The result is on the device; `after` has the current stream wait for it."""

    def leave(self) -> None:
        """A thread has ended, and never uses torch's group again."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What a thread shall do next, and the work of torch's that it is about."""

    do: Callable[[], None]
    work: c10d.Work | None = None


class Pipeline:
    """The two threads of one device group. `group` is torch's; None where a host has a single rank to reduce."""

    def __init__(
        self,
        engine: Engine,
        config: DeviceGroupConfig,
        channel: str,
        group: TorchGroup | None,
        devices: Sequence[torch.device],
        num_names: int,
        owner: Owner,
    ) -> None:
        self._engine = engine
        self._config = config
        self._channel = channel
        self._group = group
        self._num_names = num_names
        self._owner = owner
        # For each device one stream to launch from and one to wait for results.
        self._streams = {device: (_stream(device), _stream(device)) for device in devices if device.type == "cuda"}
        self._reduced: list[Request] = []
        """Hierarchical: what was reduced within the host in this iteration."""
        self._launching: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._finishing: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(tasks,), name=f"pliant-{what}-{engine.rank}", daemon=True)
            for tasks, what in ((self._launching, "launch"), (self._finishing, "finish"))
        ]

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def launch(self, request: Request) -> None:
        """Launch this after all that was handed over before."""
        self.call(partial(self._launch, request))

    def call(self, act: Callable[[], None]) -> None:
        """Have the launching thread do something else at this point of the order."""
        self._launching.put(_Task(act))

    def close(self, timeout_s: float) -> None:
        """End when all is done; waits at most so long for each thread."""
        for thread, tasks in zip(self._threads, (self._launching, self._finishing), strict=True):
            tasks.put(None)
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("%s still waits for a peer; it ends with the peer or at its timeout", thread.name)

    def _run(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        """Do what comes until None does; after a failure, only see to it that nothing is left in torch's hands."""
        while (task := tasks.get()) is not None:
            try:
                if not self._owner.broken.is_set():
                    task.do()
                elif task.work is not None:
                    task.work.wait()
            except CommError as error:
                self._owner.fail(error)
            except Exception as error:
                if not self._owner.broken.wait(EXPLAIN_S):
                    kind = type(error).__name__
                    self._owner.fail(CommError(f"torch's {self._config.backend} group failed here ({kind}): {error}"))
        self._owner.leave()

    # --- the launching thread ---

    def _launch(self, request: Request) -> None:
        with self._on_stream(request, 0) as stream:
            if stream is not None and request.ready is not None:
                stream.wait_event(request.ready)
            request.buffer = request.buffer.contiguous()
            request.ready = None if stream is None else stream.record_event()
            if not self._config.hierarchical:
                assert self._group is not None, "a flat group has torch's"
                work = self._group.all_reduce(request.buffer)
                self._finishing.put(_Task(partial(self._finish, request, work), work))
                return
            reduced = self._group.reduce(request.buffer) if self._group is not None else None
        self._finishing.put(_Task(partial(self._cross, request, reduced), reduced))
        self._reduced.append(request)
        if len(self._reduced) == self._num_names:
            for complete in self._reduced:
                self._spread(complete)
            self._reduced = []

    def _spread(self, request: Request) -> None:
        """Broadcast within the host.

        All broadcasts of an iteration follow all its reductions, so that one communicator sees one order,
        whichever of the sums between hosts is ready first.
        """
        with self._on_stream(request, 0) as stream:
            if self._engine.rank in self._engine.cross_ranks:
                crossing = request.crossed.result(self._config.timeout_s)
                if crossing is not None:
                    crossing.wait(self._config.timeout_s)
            work = self._group.broadcast(request.buffer) if self._group is not None else None
            request.ready = None if stream is None else stream.record_event()
        self._finishing.put(_Task(partial(self._finish, request, work), work))

    # --- the finishing thread ---

    def _cross(self, request: Request, reduced: c10d.Work | None) -> None:
        """When the host's sum is there, add those of the other hosts."""
        with self._on_stream(request, 1) as stream:
            self._await(request, reduced, stream)
            masters = self._engine.cross_ranks
            crossing = None
            if self._engine.rank in masters and len(masters) > 1:
                name = f"{self._channel}:{request.name}"
                crossing = self._engine.all_reduce(name, request.buffer, op=self._config.op, ranks=masters)
        request.crossed.set_result(crossing)

    def _finish(self, request: Request, work: c10d.Work | None) -> None:
        done = None
        with self._on_stream(request, 1) as stream:
            self._await(request, work, stream)
            if request.buffer.data_ptr() != request.tensor.data_ptr():
                request.tensor.detach().copy_(request.buffer)
            if stream is not None:
                done = stream.record_event()
        if done is None:
            self._owner.finish(request, None)
            return
        # Until then the request keeps the memory, which the allocator knows to be in use on another stream only.
        done.synchronize()
        self._owner.finish(request, partial(_wait_for, request.tensor.device, done))

    def _await(self, request: Request, work: c10d.Work | None, stream: torch.cuda.Stream | None) -> None:
        """Have `stream` wait for what the launching thread did last; on the host, and for gloo, this thread waits."""
        if stream is not None and request.ready is not None:
            stream.wait_event(request.ready)
        if work is not None:
            work.wait()

    @contextlib.contextmanager
    def _on_stream(self, request: Request, which: int) -> Iterator[torch.cuda.Stream | None]:
        """Queue work on this group's own stream for the tensor's device: 0 to launch, 1 to finish; None on the host."""
        streams = self._streams.get(request.tensor.device)
        if streams is None:
            yield None
            return
        with torch.cuda.stream(streams[which]):
            yield streams[which]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _wait_for(device: torch.device, done: torch.cuda.Event) -> None:
    torch.cuda.current_stream(device).wait_event(done)
