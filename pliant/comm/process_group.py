"""The process group of torch that sums gradients on the devices of a view: NCCL between GPUs, gloo in tests.

A group belongs to one view. A thread makes it beside training, sums on it, and ends it. The engine has noticed a lost worker
long before the group would: whatever the group still has to do fails at that moment, and the group is aborted.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from pliant.comm.group_sum import GroupOrder, GroupPlan, fold, pack, plan_of
from pliant.comm.handle import Handle
from pliant.errors import CommError, ConfigError, EngineClosed

if TYPE_CHECKING:
    from pliant.comm.engine import Engine

log = logging.getLogger(__name__)

GroupBackend = Literal["", "nccl", "gloo"]
SETTING = "PLIANT_SUM_GROUP"
"""The environment variable that overrides the choice: `off`, or `gloo` for tests without GPUs. For developers."""
MAKE_S = 120.0
"""How long the workers of a view have to make their group. They train without it meanwhile."""
WORK_S = 1800.0
"""The limit of the group itself for one collective. A lost worker ends it much earlier."""
NOTICE_S = 2.0
"""How long an error of the group waits for the engine to say which worker is lost. Both notice it at about the same time."""
POLL_S = 50e-6
"""The interval at which a thread that waits for a device looks whether the sum is there."""


# --- which group ---


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """What one worker says before a group is made."""

    backend: GroupBackend
    """The backend that it could use; empty for none."""
    device: str = ""
    """The identity of its GPU."""
    version: str = ""
    """The version of the backend."""
    reason: str = ""
    """Why it can use none."""

    @classmethod
    def of(
        cls, device: torch.device, *, encrypted: bool = False, environ: Mapping[str, str] = os.environ
    ) -> GroupOffer:
        """Return what this worker can offer. `encrypted`: what workers send each other must not travel in the clear.

        Raises:
            ConfigError: the environment asks for something unknown.
        """
        asked = environ.get(SETTING, "")
        if asked not in ("", "off", "gloo"):
            raise ConfigError(f"{SETTING}={asked}: use off or gloo, or leave it unset")
        if asked == "off":
            return cls("", reason=f"{SETTING}=off")
        if asked == "gloo":
            return cls("gloo")
        if device.type != "cuda":
            return cls("", reason="the gradients are not on a GPU")
        if encrypted:
            return cls("", reason="NCCL does not encrypt what it sends, and the job uses TLS")
        if not dist.is_nccl_available():
            return cls("", reason="this torch has no NCCL")
        properties = torch.cuda.get_device_properties(device)
        return cls("nccl", str(properties.uuid), ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def choose_backend(offers: Sequence[GroupOffer]) -> tuple[GroupBackend, str]:
    """Return the backend that all workers can use together, or none with the reason."""
    for offer in offers:
        if not offer.backend:
            return "", offer.reason
    backend = offers[0].backend
    if any(offer.backend != backend for offer in offers):
        return "", "the workers have different backends"
    if len({offer.version for offer in offers}) > 1:
        return "", "the workers have different versions of NCCL"
    if backend == "nccl" and len({offer.device for offer in offers}) < len(offers):
        return "", "some workers share a GPU"
    return backend, ""


# --- making a group of torch ---


@contextlib.contextmanager
def _opened_store(engine: Engine) -> Iterator[Store]:
    """Yield a key-value store of torch that all ranks of the view use. The first one serves it, at its own address."""
    timeout = datetime.timedelta(seconds=MAKE_S)
    host = engine.view.workers[0].host
    if engine.rank == 0:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
        engine.all_gather_bytes("group:store", str(port).encode(), timeout_s=MAKE_S)
    else:
        port = int(engine.all_gather_bytes("group:store", b"", timeout_s=MAKE_S)[0])
        store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    yield store


def _new_group(backend: GroupBackend, store: Store, engine: Engine, device: torch.device) -> Any:
    """Return a new group of torch with all ranks of the view."""
    limit = datetime.timedelta(seconds=WORK_S)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=engine.view.workers[engine.rank].host)]
        options._timeout = limit
        return dist.ProcessGroupGloo(store, engine.rank, engine.size, options)
    with _without_teardown():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = dist.ProcessGroupNCCL(store, engine.rank, engine.size, options)
        group.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def _without_teardown() -> Iterator[None]:
    """Make groups that leave it to us what happens after a loss. By default torch's watchdog ends the whole process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --- sums ---


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One sum that was submitted."""

    handle: Handle
    plan: GroupPlan
    operands: Sequence[torch.Tensor]
    received: torch.Tensor
    total: torch.Tensor
    """Memory of `plan.padded_length` elements for the sum."""
    ready: torch.cuda.Event | None
    """CUDA: recorded when the operands are complete."""


class SumGroup:
    """Sums flat tensors over all workers of a view, on a process group of torch.

    `start` makes the group in a thread. Once `is_ready` on every worker, which they have to tell each other, all may call
    `sum`, in the same order. When a worker is lost, or this one leaves the view, all open sums fail.
    """

    def __init__(self, engine: Engine, device: torch.device, offer: GroupOffer) -> None:
        self.is_ready = False
        """Whether this worker could sum now."""
        self.reason = ""
        """Why there will be no group."""
        self.num_sums = 0
        """Sums that were submitted so far."""
        self.backend: GroupBackend = ""
        self._engine, self._device, self._offer = engine, device, offer
        self._group: Any = None
        self._error: Exception | None = None
        """Why nothing is summed any more."""
        self._ended = threading.Event()
        """Set with the error."""
        self._open: set[Handle] = set()
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name="pliant-group", daemon=True)
        self._aborting: threading.Thread | None = None

    def start(self) -> None:
        """Begin to make the group; return at once."""
        self._thread.start()
        self._engine.add_torn_callback(self._fail)

    def close(self) -> None:
        """End the group; return at once. Sums that are still open fail."""
        self._fail(EngineClosed("the process group was closed while this was in progress"))

    def join(self, timeout_s: float) -> bool:
        """Wait until the group's threads have ended; return whether they have. If they are still in torch's code when the
        interpreter ends, the process is aborted."""
        deadline_s = time.monotonic() + timeout_s
        for thread in (self._thread, self._aborting):
            if thread is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread is not None and thread.is_alive() for thread in (self._thread, self._aborting))

    def sum(self, name: str, operands: Sequence[torch.Tensor], blocks: tuple[int, ...], order: GroupOrder) -> Handle:
        """Sum flat tensors over all replicas, of which rank r hosts `blocks[r]`; return at once.

        `operands` are this worker's, as `group_sum.operands_of_block` lists them; they must not change before the sum is
        there. `wait` returns the sum, in new memory on the device. All workers must call this in the same order.

        Raises:
            CommError: from `wait`, if a worker is lost.
        """
        first = operands[0]
        plan = plan_of(order, blocks, first.numel(), first.element_size())
        handle = Handle(name, self._engine, None)
        task = _Task(
            handle,
            plan,
            operands,
            first.new_empty(sum(plan.receive_splits(self._engine.rank))),
            first.new_empty(plan.padded_length),
            torch.cuda.current_stream(first.device).record_event() if first.is_cuda else None,
        )
        with self._lock:
            error = self._error
            if error is None:
                self._open.add(handle)
        if error is not None:
            handle.fail(error)
            return handle
        self.num_sums += 1
        self._todo.put(task)
        return handle

    # --- the end ---

    def _fail(self, error: Exception) -> None:
        """Fail all open sums, and all later ones; abort the group. Any thread may call this, and it does not block."""
        with self._lock:
            if self._error is not None:
                return
            # Set before the group is aborted: what an aborted collective leaves in memory is never taken for a sum.
            self._error = error
            self.is_ready = False
            failed, group = list(self._open), self._group
            self._open.clear()
        for handle in failed:
            handle.fail(error)
        self._ended.set()
        self._todo.put(None)
        self._abort(group)

    def _abort(self, group: Any) -> None:
        """Abort a group of NCCL, in a thread of its own because that may take a while. One of gloo ends when its sockets
        close: those of a worker that has died, then those of workers whose sums have failed for that."""
        if group is None or self.backend != "nccl":
            return

        def abort() -> None:
            with contextlib.suppress(Exception):
                group.abort()

        self._aborting = threading.Thread(target=abort, name="pliant-group-abort", daemon=True)
        self._aborting.start()

    def _finish(self, handle: Handle, total: torch.Tensor, after: Callable[[], None] | None) -> None:
        with self._lock:
            is_open = handle in self._open
            self._open.discard(handle)
        if is_open:
            handle.finish(total, after)

    # --- on the group's thread ---

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with self._on_stream():
                if self._make():
                    while self._sum_next():
                        pass
        except CommError as error:
            self.reason = str(error)
            self._fail(error)
        except Exception as error:  # whatever torch raises
            if not self._ended.wait(NOTICE_S):
                self.reason = str(error)
                log.warning(
                    "%s: the process group failed: %s", self._engine.view.workers[self._engine.rank], self.reason
                )
            self._fail(
                CommError(f"the process group failed: {error}. With {SETTING}=off sums go through the host's memory")
            )
        finally:
            self._group = None

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _make(self) -> bool:
        """Make the group; return False if not all workers of the view can have one."""
        engine = self._engine
        said = engine.all_gather_bytes("group:offers", json.dumps(asdict(self._offer)).encode(), timeout_s=MAKE_S)
        backend, self.reason = choose_backend([GroupOffer(**json.loads(each)) for each in said])
        if not backend:
            log.debug("gradients are summed through the host: %s", self.reason)
            return False
        self.backend = backend
        with _opened_store(engine) as store:
            group = _new_group(backend, store, engine, self._device)
            with self._lock:
                torn, self._group = self._error is not None, group
            if torn:
                self._abort(group)
                return False
            self._warm_up(group)
            engine.barrier("group:made", timeout_s=MAKE_S)  # the store is not needed any more
        with self._lock:
            self.is_ready = self._error is None
        log.debug("gradients are summed with %s", backend)
        return True

    def _warm_up(self, group: Any) -> None:
        """Let the group make its connections, by one exchange of each kind."""
        size = self._engine.size
        sent, received = (torch.zeros(size, device=self._device) for _ in range(2))
        group.alltoall_base(received, sent, [1] * size, [1] * size).wait()
        group._allgather_base(received, sent[:1]).wait()
        if self._stream is not None:
            self._wait_for_device(self._stream.record_event())

    def _sum_next(self) -> bool:
        """Do the next sum; return False if there will be none."""
        task = self._todo.get()
        if task is not None:
            self._sum(task)
        return task is not None

    def _sum(self, task: _Task) -> None:
        group, plan, rank = self._group, task.plan, self._engine.rank
        if self._stream is not None:
            self._stream.wait_event(task.ready)  # type: ignore[arg-type]
            for each in (*task.operands, task.received, task.total):
                each.record_stream(self._stream)
        packed = pack(plan, rank, task.operands)
        group.alltoall_base(task.received, packed, plan.receive_splits(rank), plan.send_splits(rank)).wait()
        own = task.total[rank * plan.shard_length : (rank + 1) * plan.shard_length]
        fold(plan, rank, task.received, own[: plan.shard_size(rank)])
        group._allgather_base(task.total, own).wait()
        after = None
        if self._stream is not None:
            done = self._stream.record_event()
            after = lambda: self._wait_for_device(done)  # noqa: E731
        self._finish(task.handle, task.total[: plan.length], after)

    def _wait_for_device(self, done: torch.cuda.Event) -> None:
        """Wait until the device has reached `done`. A collective that hangs there ends with the error of the view."""
        while not done.query():  # type: ignore[no-untyped-call]
            if self._error is not None:
                break
            time.sleep(POLL_S)
        if self._error is not None:
            raise self._error
