"""torch's own process groups, found through the engine: no environment variable, no default group.

Rank 0 opens a TCPStore on its worker's address and tells the others by an engine broadcast. The
group is a bare backend object (ProcessGroupNCCL, ProcessGroupGloo), which torch.distributed does not
register anywhere, so it neither meets nor needs the default group of the user's program.

torch's store and its connections carry no secret: use this on a network where only the job's hosts
can reach each other. The store listens on the worker's address alone, under a prefix that only the
job knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pliant.comm.engine import Engine
from pliant.errors import CommError, ConfigError, EngineClosed

BackendName = Literal["nccl", "gloo"]

OPS = {
    "sum": c10d.ReduceOp.SUM,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
    "prod": c10d.ReduceOp.PRODUCT,
}
ADDRESS_BYTES = 1024
"""The address of the store travels in a message of this length."""
TEARDOWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _Backend(Protocol):
    """What torch's stubs leave out of `Backend`."""

    def allreduce(self, tensors: list[torch.Tensor], opts: c10d.AllreduceOptions) -> c10d.Work: ...
    def reduce(self, tensors: list[torch.Tensor], opts: c10d.ReduceOptions) -> c10d.Work: ...
    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions) -> c10d.Work: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class TorchGroup:
    """Collectives of some ranks of a view by torch. Made by `Rendezvous.group`; the root is always the first of them."""

    def __init__(self, backend: c10d.Backend, op: str) -> None:
        self._backend: _Backend | None = cast(_Backend, backend)
        self._op = c10d.ReduceOp(OPS[op])

    def all_reduce(self, tensor: torch.Tensor) -> c10d.Work:
        options = c10d.AllreduceOptions()
        options.reduceOp = self._op
        return self._open().allreduce([tensor], options)

    def reduce(self, tensor: torch.Tensor) -> c10d.Work:
        """Into the first rank's `tensor`; the others' are then undefined."""
        options = c10d.ReduceOptions()
        options.reduceOp = self._op
        options.rootRank = 0
        return self._open().reduce([tensor], options)

    def broadcast(self, tensor: torch.Tensor) -> c10d.Work:
        """From the first rank to all."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        return self._open().broadcast([tensor], options)

    def close(self) -> None:
        """End in good order: every rank has finished."""
        self._open().shutdown()

    def abort(self) -> None:
        """End what is in flight. gloo cannot: there it ends when the peer's connection does, or at its timeout."""
        if self._backend is not None:
            self._backend.abort()

    def drop(self) -> None:
        """Give back connections and threads; waits for what is still in flight."""
        self._backend = None

    def _open(self) -> _Backend:
        if self._backend is None:
            raise EngineClosed("torch's group is closed")
        return self._backend


class Rendezvous:
    """Where the ranks of a view meet for torch's groups: a store on rank 0's address. Every rank opens it."""

    def __init__(self, engine: Engine, name: str, timeout_s: float) -> None:
        self._engine = engine
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._store: c10d.Store | None = None
        self._server: c10d.Store | None = None

    def open(self) -> None:
        """Open the store on rank 0 and connect to it.

        Raises:
            CommError: rank 0 could not listen, or could not be reached.
        """
        host = self._engine.view.workers[0].host
        answer = self._listen(host) if self._engine.rank == 0 else {}
        message = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8)
        if answer:
            data = json.dumps(answer).encode()[:ADDRESS_BYTES]
            message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._engine.broadcast(f"{self._name}:store", message).wait(self._timeout.total_seconds())
        found = json.loads(bytes(message.numpy()).rstrip(b"\0"))
        if "error" in found:
            raise CommError(f"rank 0 could not open a store on {host} for torch's group: {found['error']}")
        try:
            store = self._server or c10d.TCPStore(
                host, found["port"], is_master=False, timeout=self._timeout, wait_for_workers=False
            )
        except (RuntimeError, OSError) as error:
            raise CommError(f"torch's store on {host}:{found['port']} cannot be reached: {error}") from error
        self._store = c10d.PrefixStore(found["prefix"], store)

    def _listen(self, host: str) -> dict[str, str | int]:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind(address)
                sock.listen(1024)
                port: int = sock.getsockname()[1]
                self._server = c10d.TCPStore(
                    host,
                    port,
                    is_master=True,
                    timeout=self._timeout,
                    wait_for_workers=False,
                    # From here on the store owns the descriptor.
                    master_listen_fd=sock.detach(),
                )
        except (RuntimeError, OSError) as error:
            return {"error": str(error)[:200]}
        return {"port": port, "prefix": secrets.token_hex(16)}

    def group(self, backend: BackendName, ranks: Sequence[int], op: str) -> TorchGroup:
        """The group of `ranks`, of which this is one; all of them call this.

        Raises:
            CommError: they did not all come, or torch could not connect them.
        """
        assert self._store is not None, "opened before"
        store = c10d.PrefixStore(f"{ranks[0]}", self._store)
        me = ranks.index(self._engine.rank)
        try:
            if backend == "gloo":
                return TorchGroup(self._gloo(store, me, len(ranks)), op)
            return TorchGroup(self._nccl(store, me, len(ranks)), op)
        except RuntimeError as error:
            raise CommError(f"torch's {backend} group of ranks {list(ranks)} could not be made: {error}") from error

    def _gloo(self, store: c10d.Store, rank: int, size: int) -> c10d.Backend:
        host = self._engine.view.workers[self._engine.rank].host
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # torch would ask the host name for an address; the view already says which one the others can reach.
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._timeout
        return c10d.ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: c10d.Store, rank: int, size: int) -> c10d.Backend:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with _survive_errors():
            return c10d.ProcessGroupNCCL(store, rank, size, options)

    def close(self) -> None:
        """Forget the store. On rank 0 this ends it for everybody."""
        self._store = self._server = None


@contextlib.contextmanager
def _survive_errors() -> Iterator[None]:
    """Have a group that is made meanwhile report failures instead of ending the process.

    By default torch's watchdog takes the whole process down when a peer of an NCCL group dies; here the
    survivors go on. torch offers this as an environment variable only, which it reads in the constructor.
    """
    if TEARDOWN in os.environ:
        yield
        return
    os.environ[TEARDOWN] = "0"
    try:
        yield
    finally:
        del os.environ[TEARDOWN]


def problem_of(backend: BackendName, devices: Sequence[torch.device]) -> str:
    """Why this worker cannot use `backend` for tensors on `devices`, and what helps; empty if it can."""
    other = "use backend='gloo', or the engine's own all_reduce"
    if backend == "gloo":
        return "" if dist.is_gloo_available() else f"torch {torch.__version__} has no gloo: use the engine's all_reduce"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL: install a CUDA build of torch, or {other}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: check the driver and CUDA_VISIBLE_DEVICES, or {other}"
    if any(device.type != "cuda" for device in devices):
        return f"NCCL takes CUDA tensors only, but there are some on {_listed(devices)}: move them to a GPU, or {other}"
    if len(set(devices)) > 1:
        return f"there are tensors on {_listed(devices)}: NCCL takes one GPU per worker; use one of them, or {other}"
    return ""


def _listed(devices: Sequence[torch.device]) -> str:
    return ", ".join(sorted({str(device) for device in devices}))


def gpu_of(backend: BackendName, devices: Sequence[torch.device]) -> str:
    """The identity of the GPU that NCCL would use here; empty where that does not matter."""
    if backend != "nccl" or problem_of(backend, devices):
        return ""
    return str(torch.cuda.get_device_properties(devices[0]).uuid)


def check_gpus(gpus: Sequence[str]) -> None:
    """Check that no two ranks share a GPU; an empty string is none.

    Raises:
        ConfigError: they do; says which ranks, and the remedy.
    """
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in gpus[:rank]:
            raise ConfigError(
                f"backend='nccl': ranks {gpus.index(gpu)} and {rank} share GPU {gpu}, and NCCL takes one worker per "
                "GPU: start fewer workers (-np), or use backend='gloo', or the engine's own all_reduce"
            )
