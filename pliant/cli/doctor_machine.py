"""Checks of `pliant doctor` on this machine. Each check yields findings, also for what cannot be imported.

Nothing here needs root, and nothing stays behind.
"""

from __future__ import annotations

import errno
import importlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pliant.cli import extras
from pliant.cluster import DEFAULT_RUNNER_PORT, PortRange

State = Literal["ok", "warn", "missing"]
SHM = Path("/dev/shm")
LITTLE_SHM = 1 << 30
"""Shared memory below this size is too little for loader processes and NCCL; containers have 64 MiB by default."""
FEW_PORTS = 64
SERVERS = {
    "pliant run": DEFAULT_RUNNER_PORT,
    "pliant config-server": 9100,
    "pliant serve": 9200,
    "pliant dash": 9300,
}
"""Default ports of the servers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    what: str
    state: State
    """`warn`: a part of pliant does not work; `missing`: pliant does not work, or not as promised."""
    found: str
    remedy: str = ""
    """Command that helps."""


def examine(replicas: int) -> Iterator[Finding]:
    """Run all checks, one after the other."""
    torch, why = _imported("torch")
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("torch", lambda: _torch(torch, why)),
        ("CUDA", lambda: _cuda(torch)),
        ("NCCL", lambda: _nccl(torch)),
        ("bits", lambda: _bits(torch, replicas)),
        ("memory", _memory),
        ("sockets", _sockets),
        ("ports", _ports),
        ("programs", _programs),
        ("packages", _packages),
    ]
    for what, look in looks:
        try:
            yield from look()
        except Exception as error:  # a machine may be broken in unforeseen ways
            yield Finding(what, "warn", f"could not be looked at: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def _imported(module: str) -> tuple[Any, str]:
    """Return the module, or None and the reason."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:
        return None, _one_line(error)


# --- software ---


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "apt-get install python3.11, and make the virtual environment with it"
    yield Finding("python", "ok" if good else "missing", platform.python_version(), remedy)


def _torch(torch: Any, why: str) -> Iterator[Finding]:
    package = extras.package("torch")
    if torch is None:
        yield Finding("torch", "missing", why, package.remedy)
    else:
        yield Finding("torch", "ok", str(torch.__version__))


def _cuda(torch: Any) -> Iterator[Finding]:
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch else []
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if devices:
        yield Finding("CUDA", "ok", f"{', '.join(devices)}; CUDA {torch.version.cuda}")
    elif not has_driver:
        found = "no GPU, or no driver for it: jobs train on the CPU"
        yield Finding("CUDA", "warn", found, "nvidia-smi  # must list the GPU, once its driver is installed")
    elif torch is None or torch.version.cuda is None:
        remedy = f"pip install --force-reinstall '{extras.package('torch').wanted}'"
        yield Finding("CUDA", "warn", "there is a GPU, but this torch was built without CUDA", remedy)
    else:
        found = (
            f"there is a driver, but torch sees no GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
        )
        yield Finding("CUDA", "warn", found, "unset CUDA_VISIBLE_DEVICES; nvidia-smi")


def _nccl(torch: Any) -> Iterator[Finding]:
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Finding("NCCL", "ok", ".".join(str(part) for part in torch.cuda.nccl.version()))
    elif torch is not None and not torch.cuda.device_count():
        yield Finding("NCCL", "ok", "not in this torch; without GPUs nothing needs it")
    else:
        remedy = f"pip install --force-reinstall '{extras.package('torch').wanted}'"
        yield Finding("NCCL", "warn", "not in this torch: sums of GPUs go through the host's memory", remedy)


def _bits(torch: Any, replicas: int) -> Iterator[Finding]:
    if torch is None:
        yield Finding("D1", "missing", "equal bits cannot be tried without torch", extras.package("torch").remedy)
        return
    from pliant.train import determinism

    folded = determinism.self_check(replicas, thorough=True)
    remedy = "" if folded.ok else f"pip install '{extras.package('torch').wanted}'  # one that sums as gloo's ring does"
    state: State = "ok" if folded.ok else "missing"
    mine = determinism.fingerprint()
    machine = f"{mine.cpu_model}, {mine.cpu_isa}; torch uses {mine.cpu_capability}, {mine.num_threads} threads"
    yield Finding("D0", "ok", "the same machines give the same bits")
    yield Finding("D1", state, f"any number of workers gives the same bits: {folded.detail}", remedy)
    yield Finding("D2", state, f"so do other machines, with `pliant run --determinism D2` ({machine})", remedy)


def _programs() -> Iterator[Finding]:
    ssh = shutil.which("ssh")
    yield Finding(
        "ssh", "ok" if ssh else "warn", ssh or "not found: needed by `pliant run --ssh`",
        "" if ssh else "apt-get install openssh-client",
    )  # fmt: skip


def _packages() -> Iterator[Finding]:
    for module, use in extras.USES.items():
        package = extras.package(module)
        if package.version is None:
            yield Finding(module, "warn", f"not installed; {use}", package.remedy)
        else:
            yield Finding(module, "ok", f"{package.version or 'installed'}; {use}")


# --- the machine ---


def _memory() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("cores", "ok", f"{len(os.sched_getaffinity(0))}, memory {memory / 2**30:.1f} GiB")
    yield _tried(
        "memfd", _try_memfd, "memory that workers of one host share", "uname -r  # Linux 3.17 or newer is needed"
    )
    try:
        about = os.statvfs(SHM)
    except OSError as error:
        yield Finding("shm", "warn", f"{SHM}: {error.strerror}; loader processes need it", f"mount -t tmpfs shm {SHM}")
        return
    size, free = about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail
    little = min(size, free) < LITTLE_SHM
    found = f"{size / 2**30:.2f} GiB at {SHM}, {free / 2**30:.2f} GiB free"
    remedy = f"sudo mount -o remount,size=8G {SHM}  # in Docker: docker run --shm-size 8g" if little else ""
    yield Finding(
        "shm", "warn" if little else "ok", found + ("; loader processes may need more" if little else ""), remedy
    )


def _tried(what: str, attempt: Callable[[], None], use: str, remedy: str) -> Finding:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return Finding(what, "missing", str(error), remedy)
    return Finding(what, "ok", use)


def _try_memfd() -> None:
    os.close(os.memfd_create("pliant-doctor", os.MFD_CLOEXEC))


def _try_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract address


def _sockets() -> Iterator[Finding]:
    yield _tried("abstract sockets", _try_abstract_socket, "workers of one host meet there", "uname  # Linux is needed")


def _ports() -> Iterator[Finding]:
    taken = [f"{port} of `{name}`" for name, port in SERVERS.items() if not _is_free(port)]
    ports = PortRange()
    free, total = sum(_is_free(port) for port in range(ports.begin, ports.end + 1)), len(ports)
    if free < min(FEW_PORTS, total):
        found = f"{free} of {total} in {ports} are free; each worker needs one"
        yield Finding("ports", "warn", found, "pliant run -port-range 20000-21000 ...")
    elif taken:
        remedy = "ss -ltnp  # shows who has it; or choose another with --port"
        yield Finding("ports", "warn", f"in use: {', '.join(taken)}; {free} of {total} in {ports} are free", remedy)
    else:
        servers = ", ".join(str(port) for port in SERVERS.values())
        yield Finding("ports", "ok", f"{free} of {total} in {ports} are free, and {servers}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
