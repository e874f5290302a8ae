"""Who takes part in `bench allreduce`, and how each is started: ours, torch's gloo, Open MPI, and memory itself.

Everyone gets the same tensors, one thread per process for arithmetic, and one process per rank;
in a lab, the ranks are spread over its hosts.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.identity import WorkerSpec
from pliant_repro.bench.contest import Job, Starter
from pliant_repro.bench.worker import Task
from pliant_repro.lab.hosts import INTERFACE, Lab

PEERS = ("gloo", "openmpi")
_MPI_TYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What all contenders of a contest have in common."""

    num_workers: int
    sizes: tuple[int, ...]
    folder: Path
    """For sockets, logs and tasks; short-lived and private."""
    parallel: bool = False
    dtype: str = "float32"
    determinism: Literal["exact", "fast"] = "exact"
    lab: Lab | None = None

    def host_of(self, rank: int) -> int:
        """The lab's host that `rank` runs on: contiguous blocks."""
        num_hosts = self.lab.num_hosts if self.lab is not None else 1
        return rank * num_hosts // self.num_workers

    def address_of(self, rank: int) -> str:
        return self.lab.addresses[self.host_of(rank)] if self.lab is not None else "127.0.0.1"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each rank's host."""
        return tuple(self.address_of(rank) for rank in range(self.num_workers))


def gloo(ground: Ground) -> Job:
    """torch.distributed on gloo. The ranks meet through a file; nothing but tensors is on the wire later."""
    return _workers(ground, "gloo", [{}] * ground.num_workers)


def memory(ground: Ground) -> Job:
    """All ranks copying memory at the same time: the bound on one host."""
    return _workers(ground, "copy", [{}] * ground.num_workers)


def pliant(ground: Ground, strategy: str, name: str = "pliant") -> Job:
    """This package's engine."""
    environs, sockets = identities(ground, strategy)
    return _workers(ground, "pliant", environs, sockets, name)


def identities(ground: Ground, strategy: str) -> tuple[list[dict[str, str]], list[socket.socket]]:
    """For each rank of a job of ours: the environment that says who it is, and the socket that it listens on.

    The sockets are made here and inherited, so no port can be taken in between.
    """
    sockets = [_listening(ground, rank) for rank in range(ground.num_workers)]
    members = tuple(
        Worker(host, listener.getsockname()[1]) for host, listener in zip(ground.hosts, sockets, strict=True)
    )
    runners = tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in dict.fromkeys(ground.hosts))
    view = View(0, members, runners)
    secret = secrets.token_bytes(32)
    environs = [
        WorkerSpec(worker=member, view=view, secret=secret, strategy=strategy, listen_fd=listener.fileno()).to_environ()
        for member, listener in zip(members, sockets, strict=True)
    ]
    return environs, sockets


def openmpi(ground: Ground, *, yielding: bool) -> Job:
    """Open MPI under mpirun; `yielding` gives the processor away while it waits, which helps where ranks share cores."""
    name = "openmpi-yield" if yielding else "openmpi"
    task = _task(ground, "openmpi", name)
    settings = ["--mca", "mpi_yield_when_idle", "1"] if yielding else []
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ground.num_workers), *settings]

    def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, sys.executable, "-m", "pliant_repro.bench.worker", str(task)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environ({}, ground),
        )

    return Job(name, ground.num_workers, [start], ground.folder / f"{name}.sock")


def why_no_openmpi(ground: Ground) -> str:
    """Why Open MPI cannot take part; empty where it can."""
    if ground.lab is not None:
        return "openmpi skipped: between hosts it needs a launcher (ssh), which a lab does not have"
    if shutil.which("mpirun") is None:
        return "openmpi skipped: `mpirun` not found; apt-get install openmpi-bin"
    if importlib.util.find_spec("mpi4py") is None:
        return "openmpi skipped: mpi4py not found; pip install 'pliant[bench]'"
    if ground.dtype not in _MPI_TYPES:
        return f"openmpi skipped: MPI has no {ground.dtype}"
    return ""


def _task(ground: Ground, side: str, name: str) -> Path:
    path = ground.folder / f"{name}.json"
    Task(
        side=side,
        sizes=ground.sizes,
        num_workers=ground.num_workers,
        control=str(ground.folder / f"{name}.sock"),
        store=str(ground.folder / f"{name}.store"),
        parallel=ground.parallel,
        dtype=ground.dtype,
        determinism=ground.determinism,
    ).write(path)
    return path


def _workers(
    ground: Ground,
    side: str,
    environs: Sequence[Mapping[str, str]],
    sockets: Sequence[socket.socket] = (),
    name: str = "",
) -> Job:
    name = name or side
    return processes(ground, name, "pliant_repro.bench.worker", _task(ground, side, name), environs, sockets)


def processes(
    ground: Ground,
    name: str,
    module: str,
    task: Path,
    environs: Sequence[Mapping[str, str]],
    sockets: Sequence[socket.socket] = (),
) -> Job:
    """A contender of one process per rank: `python -m MODULE TASK RANK`; it is to connect to FOLDER/NAME.sock."""

    def starter(rank: int) -> Starter:
        def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", module, str(task), str(rank)]
            if ground.lab is not None:
                argv = ground.lab.exec_argv(ground.host_of(rank), argv)
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environ(environs[rank], ground),
                pass_fds=[sockets[rank].fileno()] if sockets else [],
            )
            if sockets:
                sockets[rank].close()
            return child

        return start

    starters = [starter(rank) for rank in range(ground.num_workers)]
    return Job(name, ground.num_workers, starters, ground.folder / f"{name}.sock")


def launcher(argv: Sequence[str], sockets: Sequence[socket.socket] = ()) -> Starter:
    """One process that starts all ranks itself; it inherits `sockets`, which are closed here."""

    def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_environ(),
            pass_fds=[each.fileno() for each in sockets],
        )
        for each in sockets:
            each.close()
        return child

    return start


def _listening(ground: Ground, rank: int) -> socket.socket:
    address = ground.address_of(rank)
    if ground.lab is None:
        return socket.create_server((address, 0))
    return ground.lab.call(ground.host_of(rank), lambda: socket.create_server((address, 0)))


def clean_environ() -> dict[str, str]:
    """Ours, with one arithmetic thread, and without a trace of a job that this bench may run in."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PLIANT_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _environ(extra: Mapping[str, str], ground: Ground) -> dict[str, str]:
    interface = INTERFACE if ground.lab is not None else "lo"
    return {**clean_environ(), "GLOO_SOCKET_IFNAME": interface, **extra}
