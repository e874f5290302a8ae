"""Facts about this machine, as every measured result states them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

Json = dict[str, object]


def machine() -> Json:
    """Return the processor, memory and versions of this machine."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "mpi4py": _version("mpi4py"),
        "pliant": _version("pliant"),
    }


def _field(path: Path, key: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key) and ":" in line), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
