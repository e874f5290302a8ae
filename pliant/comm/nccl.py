"""All-reduce of device tensors by torch's own process group (NCCL, or gloo), in one agreed launch order.

Where every worker has a GPU of its own, NCCL moves gradients faster than anything that goes through
the host. It needs one launch order on all ranks: tensors are held until their turn has come
(`comm.launch_order`) and are launched by one dedicated thread. The engine does all the agreeing.

The sum is the library's: fixed for a view, but not in the engine's exact order. In the hierarchical
variant it is host-wise: the ranks of each host first, then the hosts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial

import torch
from torch._C import _distributed_c10d as c10d

from pliant.comm.alarm import Alarm
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.launch_order import Action, Agreed, LaunchOrder, Release, Settle, Submitted, check_equal, listed
from pliant.comm.torch_group import OPS, BackendName, Rendezvous, TorchGroup, check_gpus, gpu_of, problem_of
from pliant.errors import CommError, ConfigError, EngineClosed, Mismatch

log = logging.getLogger(__name__)

EXPLAIN_S = 1.0
"""When torch's group fails, the engine is given this long to say which worker was lost: torch does not know."""
STUCK_S = 1.0
"""How long `close` waits for threads of a group that has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroupConfig:
    """How a device group behaves; equal on all ranks except for the timeouts."""

    backend: BackendName = "nccl"
    """`nccl`: one CUDA device per worker. `gloo`: tensors on the host or on any CUDA device."""
    hierarchical: bool = False
    """Reduce within the host by torch's group, between the hosts by the engine, and broadcast within the host."""
    op: str = "sum"
    """sum, min, max or prod."""
    name: str = "device"
    """Distinguishes groups that live on one engine at the same time."""
    timeout_s: float = 300.0
    """How long a collective, and the making of the group, may take."""
    linger_s: float = 5.0
    """How long `close` waits for the other ranks to close as well."""

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo"):
            raise ConfigError(f"backend={self.backend!r} is unknown: use 'nccl' or 'gloo'")
        if self.op not in OPS:
            raise ConfigError(f"op={self.op!r} is unknown: use one of {', '.join(OPS)}")
        if self.timeout_s <= 0 or self.linger_s < 0:
            raise ConfigError(f"timeout_s={self.timeout_s:g}, linger_s={self.linger_s:g}: use positive numbers")


class _Request:
    """One tensor on its way."""

    __slots__ = ("buffer", "crossed", "handle", "name", "ready", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor, group: DeviceGroup) -> None:
        self.name = name
        self.tensor = tensor
        self.buffer = tensor.detach()
        """What torch works on: the tensor itself, or a contiguous copy of it."""
        # When it is ready: after what the submitter has queued, later after what the launching thread has.
        self.ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        self.handle = Handle(name, group, self)
        self.crossed: Future[Handle | None] = Future()
        """Hierarchical: the all-reduce between the hosts, on their first ranks."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What a thread shall do next, and the work of torch's that it is about."""

    do: Callable[[], None]
    work: c10d.Work | None = None


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
        self._engine = engine
        self._described = {name: _describe(tensor) for name, tensor in tensors.items()}
        self._devices = sorted({tensor.device for tensor in tensors.values()}, key=str)
        self._order = LaunchOrder(list(tensors))
        self._channel = ""
        """What this group's names on the engine begin with."""
        self._lock = threading.Lock()
        self._held: dict[str, deque[_Request]] = {name: deque() for name in tensors}
        self._unfinished: set[_Request] = set()
        self._reduced: list[_Request] = []
        self._ordering: Handle | None = None
        self._opened = self._closing = False
        self._broken: Exception | None = None
        self._alarmed = threading.Event()
        self._alarm: Alarm | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: TorchGroup | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        """For each device one stream to launch from and one to wait for results."""
        self._todo: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
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
        self._agree()
        try:
            self._alarm = Alarm(self._engine, self._channel, self._break)
            self._alarm.open()
            self._rendezvous = Rendezvous(self._engine, self._channel, self.timeout_s)
            self._rendezvous.open()
            self._group = self._connect(self._rendezvous)
            for device in self._devices:
                if device.type == "cuda":
                    self._streams[device] = (_stream(device), _stream(device))
        except Exception as error:
            self._break(error)
            self.close()
            raise
        for todo, what in ((self._todo, "launch"), (self._launched, "finish")):
            thread = threading.Thread(
                target=self._run, args=(todo,), name=f"pliant-{what}-{self._engine.rank}", daemon=True
            )
            self._users += 1
            thread.start()
            self._threads.append(thread)
        self._opened = True
        return self

    def _agree(self) -> None:
        """See that all ranks mean the same and can do it, and find a name for this group."""
        config = self.config
        mine = {
            "token": secrets.token_hex(8),
            "settings": [config.backend, config.hierarchical, config.op],
            "problem": problem_of(config.backend, self._devices),
            "gpu": gpu_of(config.backend, self._devices),
            "tensors": self._described,
        }
        said = self._engine.all_gather_bytes(
            f"device-group:{config.name}", json.dumps(mine).encode(), timeout_s=self.timeout_s
        )
        ranks = [json.loads(words) for words in said]
        for rank, found in enumerate(ranks):
            if found["settings"] != ranks[0]["settings"]:
                raise Mismatch(
                    f"(backend, hierarchical, op) is {ranks[0]['settings']} on rank 0, but {found['settings']} on "
                    f"rank {rank}: make the group alike on all ranks"
                )
        check_equal([found["tensors"] for found in ranks])
        for rank, found in enumerate(ranks):
            if found["problem"]:
                worker = self._engine.view.workers[rank]
                raise ConfigError(f"backend={config.backend!r} on {worker} (rank {rank}): {found['problem']}")
        check_gpus([found["gpu"] for found in ranks])
        self._channel = f"device-group:{config.name}:{ranks[0]['token']}"

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
        if self._broken is None:
            self._part()
        for thread, todo in zip(self._threads, (self._todo, self._launched), strict=False):
            todo.put(None)
            thread.join(STUCK_S if self._broken is not None else self.config.linger_s)
            if thread.is_alive():
                log.warning("%s still waits for a peer; it ends with the peer or at its timeout", thread.name)
        if self._broken is None and self._group is not None:
            self._group.close()
        self._fail_unfinished(EngineClosed("the device group was closed while this was in progress"))
        if self._alarm is not None:
            self._alarm.close(STUCK_S)
        self._leave()

    def _leave(self) -> None:
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
            self._break(EngineClosed(f"the device group was closed without the others: {error}"))

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
        try:
            self._check(name, tensor)
            request = _Request(name, tensor, self)
            with self._lock:
                if self._broken is not None:
                    raise self._broken
                actions = self._order.handle(Submitted(name))
                self._held[name].append(request)
                self._unfinished.add(request)
                self._act(actions)
        except Mismatch as error:
            self._break(error)
            raise
        return request.handle

    @property
    def launch_order(self) -> tuple[str, ...]:
        """The order in which this group launches now; sorted in the first iteration."""
        with self._lock:
            return self._order.order

    def hurry(self) -> None:
        """Nothing waits here that could be hurried."""

    def missing(self, handle: Handle) -> tuple[str, ...]:
        with self._lock:
            lacking = self._order.lacking
        if lacking:
            return (f"this rank to submit {listed(lacking)}",)
        return (f"the other ranks in torch's {self.config.backend} group",)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if not self._opened or self._closing:
            raise EngineClosed("the device group is not open: use it inside `with DeviceGroup(...).open() as group`")
        expected, found = self._described.get(name), _describe(tensor)
        if expected is not None and found != expected:
            raise Mismatch(
                f"{name!r} is {found}, but the ranks agreed on {expected}: make a new group for other shapes"
            )
        if tensor.device not in self._devices:
            raise Mismatch(
                f"{name!r} is on {tensor.device}, but the group was made for {listed([str(device) for device in self._devices])}"
            )

    def _act(self, actions: list[Action]) -> None:
        """Hand to the launching thread what has its turn; under the lock, so that the order is kept."""
        for action in actions:
            match action:
                case Release(name):
                    self._todo.put(_Step(partial(self._launch, self._held[name].popleft())))
                case Settle(arrival):
                    self._todo.put(_Step(partial(self._settle, arrival)))

    # --- the launching thread ---

    def _run(self, todo: queue.SimpleQueue[_Step | None]) -> None:
        """Do what comes until None does; after a failure, only see to it that nothing is left in torch's hands."""
        while (step := todo.get()) is not None:
            try:
                if self._broken is None:
                    step.do()
                elif step.work is not None:
                    step.work.wait()
            except CommError as error:
                self._break(error)
            except Exception as error:
                if not self._alarmed.wait(EXPLAIN_S):
                    kind = type(error).__name__
                    self._break(CommError(f"torch's {self.config.backend} group failed here ({kind}): {error}"))
        self._leave()

    def _settle(self, arrival: tuple[str, ...]) -> None:
        """Take over the order in which rank 0 submitted its first iteration."""
        order = self._exchange(arrival).wait(self.timeout_s)
        assert order is not None, "a broadcast has a result on every rank"
        with self._lock:
            self._act(self._order.handle(Agreed(tuple(self._order.names[index] for index in order.tolist()))))

    def _exchange(self, order: tuple[str, ...]) -> Handle:
        """Rank 0's `order` for all, as positions in the sorted names; every rank takes part once, even in a failure."""
        with self._lock:
            if self._ordering is None:
                position = {name: index for index, name in enumerate(self._order.names)}
                positions = torch.tensor([position[name] for name in order], dtype=torch.int32)
                self._ordering = self._engine.broadcast(f"{self._channel}:order", positions)
            return self._ordering

    def _launch(self, request: _Request) -> None:
        with self._on_stream(request, 0) as stream:
            if stream is not None and request.ready is not None:
                stream.wait_event(request.ready)
            request.buffer = request.buffer.contiguous()
            request.ready = None if stream is None else stream.record_event()
            if not self.config.hierarchical:
                assert self._group is not None, "a flat group has torch's"
                work = self._group.all_reduce(request.buffer)
                self._launched.put(_Step(partial(self._finish, request, work), work))
                return
            reduced = self._group.reduce(request.buffer) if self._group is not None else None
        self._launched.put(_Step(partial(self._cross, request, reduced), reduced))
        self._reduced.append(request)
        if len(self._reduced) == len(self._order.names):
            for complete in self._reduced:
                self._spread(complete)
            self._reduced = []

    def _spread(self, request: _Request) -> None:
        """Broadcast within the host.

        All broadcasts of an iteration follow all its reductions, so that one communicator sees one order,
        whichever of the sums between hosts is ready first.
        """
        with self._on_stream(request, 0) as stream:
            if self._engine.rank in self._engine.cross_ranks:
                crossing = request.crossed.result(self.timeout_s)
                if crossing is not None:
                    crossing.wait(self.timeout_s)
            work = self._group.broadcast(request.buffer) if self._group is not None else None
            request.ready = None if stream is None else stream.record_event()
        self._launched.put(_Step(partial(self._finish, request, work), work))

    # --- the finishing thread ---

    def _cross(self, request: _Request, reduced: c10d.Work | None) -> None:
        """When the host's sum is there, add those of the other hosts."""
        with self._on_stream(request, 1) as stream:
            self._await(request, reduced, stream)
            masters = self._engine.cross_ranks
            crossing = None
            if self._engine.rank in masters and len(masters) > 1:
                name = f"{self._channel}:{request.name}"
                crossing = self._engine.all_reduce(name, request.buffer, op=self.config.op, ranks=masters)
        request.crossed.set_result(crossing)

    def _finish(self, request: _Request, work: c10d.Work | None) -> None:
        done = None
        with self._on_stream(request, 1) as stream:
            self._await(request, work, stream)
            if request.buffer.data_ptr() != request.tensor.data_ptr():
                request.tensor.detach().copy_(request.buffer)
            if stream is not None:
                done = stream.record_event()
        if done is None:
            self._end(request, None)
            return
        # Until then the request keeps the memory, which the allocator knows to be in use on another stream only.
        done.synchronize()
        self._end(request, partial(_wait_for, request.tensor.device, done))

    def _await(self, request: _Request, work: c10d.Work | None, stream: torch.cuda.Stream | None) -> None:
        """Have `stream` wait for what the launching thread did last; on the host, and for gloo, this thread waits."""
        if stream is not None and request.ready is not None:
            stream.wait_event(request.ready)
        if work is not None:
            work.wait()

    def _end(self, request: _Request, after: Callable[[], None] | None) -> None:
        with self._lock:
            if request not in self._unfinished:
                return
            self._unfinished.discard(request)
        request.handle.finish(request.tensor, after)

    @contextlib.contextmanager
    def _on_stream(self, request: _Request, which: int) -> Iterator[torch.cuda.Stream | None]:
        """Queue work on this group's own stream for the tensor's device: 0 to launch, 1 to finish; None on the host."""
        streams = self._streams.get(request.tensor.device)
        if streams is None:
            yield None
            return
        with torch.cuda.stream(streams[which]):
            yield streams[which]

    # --- failing ---

    def _break(self, error: Exception) -> None:
        """Something has gone wrong here or elsewhere: fail all that waits, and see that the others know."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
        self._alarmed.set()
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
            request.handle.fail(error)
            with contextlib.suppress(InvalidStateError):  # the sum between the hosts had begun
                request.crossed.set_exception(error)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _wait_for(device: torch.device, done: torch.cuda.Event) -> None:
    torch.cuda.current_stream(device).wait_event(done)
