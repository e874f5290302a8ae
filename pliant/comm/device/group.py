"""Named all-reduces of device tensors by torch's own process group (NCCL, or gloo), in one agreed launch order.

Where every worker has a GPU of its own, NCCL moves gradients faster than anything that goes through
the host. It needs one launch order on all ranks: tensors are held until their turn has come
(`launch_order`) and then go through a `pipeline`. The engine does all the agreeing.

The sum is the library's: fixed for a view, but not in the engine's exact order. In the hierarchical
variant it is host-wise: the ranks of each host first, then the hosts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from pliant.comm.device.agreement import agree
from pliant.comm.device.alarm import Alarm
from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.launch_order import Action, Agreed, LaunchOrder, Release, Settle, Submitted, listed
from pliant.comm.device.pipeline import Pipeline, Request
from pliant.comm.device.torch_group import Rendezvous, TorchGroup
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError, EngineClosed, Mismatch

log = logging.getLogger(__name__)

STUCK_S = 1.0
"""How long `close` waits for threads of a group that has failed."""


class DeviceGroup:
    """Named all-reduces of the same tensors at every iteration, launched in the same order on all ranks.

    `tensors` says which names there are and what each looks like; all of them are reduced once in every
    iteration, from any thread and in any order. Submit all of an iteration before waiting for the first:
    a tensor may have to wait for its turn, and in the hierarchical variant all wait for the last.

    A group belongs to the view of its engine: after a view change, close it and make another.

    `with DeviceGroup(engine, dict(model.named_parameters())).open() as group: ...`
    """

    def __init__(self, engine: Engine, tensors: Mapping[str, torch.Tensor], config: DeviceGroupConfig | None = None):
        self.config = config or DeviceGroupConfig()
        self.timeout_s = self.config.timeout_s
        self.broken = threading.Event()
        """Whether something has failed: nothing is reduced any more."""
        self._engine = engine
        self._described = {name: _describe(tensor) for name, tensor in tensors.items()}
        self._devices = sorted({tensor.device for tensor in tensors.values()}, key=str)
        self._order = LaunchOrder(list(tensors))
        self._channel = ""
        """What this group's names on the engine begin with."""
        self._lock = threading.Lock()
        self._held: dict[str, deque[Request]] = {name: deque() for name in tensors}
        self._unfinished: set[Request] = set()
        self._ordering: Handle | None = None
        self._closing = False
        self._why: Exception | None = None
        """What has failed."""
        self._alarm: Alarm | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: TorchGroup | None = None
        self._pipeline: Pipeline | None = None
        """There once the group is open."""
        self._users = 1
        """Who may still be inside torch's group: the threads, and whoever closes."""

    # --- lifetime ---

    def open(self) -> DeviceGroup:
        """Meet the other ranks, all of which call this; use the result in a `with`, or close it.

        Raises:
            ConfigError: the backend cannot be used on some rank; on every rank, with the remedy.
            Mismatch: the ranks have different tensors or settings; on every rank.
            CommError: somebody did not come.
        """
        self._channel = agree(self._engine, self.config, self._described, self._devices)
        try:
            self._alarm = Alarm(self._engine, self._channel, self.fail)
            self._alarm.open()
            self._rendezvous = Rendezvous(self._engine, self._channel, self.timeout_s)
            self._rendezvous.open()
            self._group = self._connect(self._rendezvous)
            pipeline = Pipeline(
                self._engine, self.config, self._channel, self._group, self._devices, len(self._order.names), self
            )
        except Exception as error:
            self.fail(error)
            self.close()
            raise
        self._users += pipeline.num_threads
        pipeline.start()
        self._pipeline = pipeline
        return self

    def _connect(self, rendezvous: Rendezvous) -> TorchGroup | None:
        """torch's group of all ranks, or of this host's; None where a host has a single rank to reduce."""
        ranks = tuple(range(self._engine.size))
        if self.config.hierarchical:
            ranks = tuple(self._engine.local_ranks)
            if len(ranks) == 1:
                return None
        return rendezvous.group(self.config.backend, ranks, self.config.op)

    def close(self) -> None:
        """Wait for the other ranks to close too, `linger_s` at most, and end. What still waits fails with EngineClosed.

        If a worker has died, or anything has failed, nobody is waited for.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._why is None:
            self._part()
        if self._pipeline is not None:
            self._pipeline.close(self.config.linger_s if self._why is None else STUCK_S)
        if self._why is None and self._group is not None:
            self._group.close()
        self._fail_unfinished(EngineClosed("the device group was closed while this was in progress"))
        if self._alarm is not None:
            self._alarm.close(STUCK_S)
        self.leave()

    def leave(self) -> None:
        """Drop torch's group with its last user: dropping waits for what is in flight, and `close` must not."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if self._group is not None:
            self._group.drop()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _part(self) -> None:
        """Meet the others once more: a rank that tears down its half early can disturb a peer that has not finished."""
        token = torch.zeros(1, dtype=torch.uint8)
        try:
            self._engine.all_reduce(f"{self._channel}:close", token, op="max").wait(self.config.linger_s)
        except CommError as error:
            log.info("rank %d closes its device group alone: %s", self._engine.rank, error)
            self.fail(EngineClosed(f"the device group was closed without the others: {error}"))

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- submitting ---

    def all_reduce(self, name: str, tensor: torch.Tensor) -> Handle:
        """Reduce `tensor` over all ranks, in place; returns at once.

        `wait` returns when the result is on the device, and has the current CUDA stream wait for it. If the
        collective fails, the tensor is undefined.

        Raises:
            Mismatch: `name` is not one of this group's, was already submitted in this iteration, or looks
                different from what was agreed on. The other ranks are told, because they would wait in vain.
            EngineClosed: the group is not open.
            CommError: something has failed before; make another group.
        """
        if self._pipeline is None or self._closing:
            raise EngineClosed("the device group is not open: use it inside `with DeviceGroup(...).open() as group`")
        try:
            self._check(name, tensor)
            request = Request(name, tensor, self)
            with self._lock:
                if self._why is not None:
                    raise self._why
                actions = self._order.handle(Submitted(name))
                self._held[name].append(request)
                self._unfinished.add(request)
                self._act(actions, self._pipeline)
        except Mismatch as error:
            self.fail(error)
            raise
        return request.handle

    @property
    def launch_order(self) -> tuple[str, ...]:
        """The order in which this group launches now; sorted in the first iteration."""
        with self._lock:
            return self._order.order

    def wake(self) -> None:
        """Nothing waits here that could be hurried."""

    def missing(self, handle: Handle) -> tuple[str, ...]:
        with self._lock:
            lacking = self._order.lacking
        if lacking:
            return (f"this rank to submit {listed(lacking)}",)
        return (f"the other ranks in torch's {self.config.backend} group",)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        expected, found = self._described.get(name), _describe(tensor)
        if expected is not None and found != expected:
            raise Mismatch(
                f"{name!r} is {found}, but the ranks agreed on {expected}: make a new group for other shapes"
            )
        if tensor.device not in self._devices:
            raise Mismatch(
                f"{name!r} is on {tensor.device}, but the group was made for {listed([str(device) for device in self._devices])}"
            )

    # --- the order ---

    def _act(self, actions: list[Action], pipeline: Pipeline) -> None:
        """Hand to the launching thread what has its turn; under the lock, so that the order is kept."""
        for action in actions:
            match action:
                case Release(name):
                    pipeline.launch(self._held[name].popleft())
                case Settle(arrival):
                    pipeline.call(partial(self._settle, arrival, pipeline))

    def _settle(self, arrival: tuple[str, ...], pipeline: Pipeline) -> None:
        """Take over the order in which rank 0 submitted its first iteration; on the launching thread."""
        order = self._exchange(arrival).wait(self.timeout_s)
        assert order is not None, "a broadcast has a result on every rank"
        with self._lock:
            agreed = Agreed(tuple(self._order.names[index] for index in order.tolist()))
            self._act(self._order.handle(agreed), pipeline)

    def _exchange(self, order: tuple[str, ...]) -> Handle:
        """Rank 0's `order` for all, as positions in the sorted names; every rank takes part once, even in a failure."""
        with self._lock:
            if self._ordering is None:
                position = {name: index for index, name in enumerate(self._order.names)}
                positions = torch.tensor([position[name] for name in order], dtype=torch.int32)
                self._ordering = self._engine.broadcast(f"{self._channel}:order", positions)
            return self._ordering

    # --- the end of a request, good or bad ---

    def finish(self, request: Request, after: Callable[[], None] | None) -> None:
        """The result is on the device; by the pipeline."""
        with self._lock:
            if request not in self._unfinished:
                return
            self._unfinished.discard(request)
        request.handle.finish(request.tensor, after)

    def fail(self, error: Exception) -> None:
        """Something has gone wrong here or elsewhere: fail all that waits, and see that the others know."""
        with self._lock:
            if self._why is not None:
                return
            self._why = error
        self.broken.set()
        self._fail_unfinished(error)
        if self._alarm is not None:
            self._alarm.tell(error)
            with contextlib.suppress(CommError):  # whoever waits for the order shall not wait for us
                self._exchange(self._order.names)
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # what could not be ended ends at its own timeout
                self._group.abort()

    def _fail_unfinished(self, error: Exception) -> None:
        with self._lock:
            victims, self._unfinished = self._unfinished, set()
        for request in victims:
            request.fail(error)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
