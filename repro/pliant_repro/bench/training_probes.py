"""What the worker processes of a training contest can tell about their training: digests, peak memory, and profiles."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pliant.train import determinism
from pliant_repro.bench import trace_summary

HASH_THREADS = 4


def device_facts(device: str) -> dict[str, object]:
    """Return the name and versions of the device, for the record."""
    if device != "cuda":
        return {"name": device, "torch": torch.__version__}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory_bytes": properties.total_memory, **versions}


def kernel_settings() -> dict[str, str]:
    """Return all settings of torch in this process that choose kernels, or what they cost; to be compared among contenders."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return {**determinism.settings(), "fill_uninitialized_memory": str(fills), "threads": str(torch.get_num_threads())}


# --- digests ---


def digest_state(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> str:
    """Return the SHA-256 of all parameters and of the optimizer's tensors, in the order of the parameters, and of the
    GradScaler if there is one."""
    tensors: list[Tensor] = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [parameter, *(value for _, value in sorted(state.items()) if isinstance(value, Tensor))]
    digest = digest_tensors(tensors)
    if scaler is None:
        return digest
    return hashlib.sha256(f"{digest} {sorted(scaler.state_dict().items())}".encode()).hexdigest()


def digest_buffers(model: nn.Module) -> str:
    return digest_tensors(model.buffers())


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the SHA-256 of each tensor's bytes. Several threads compute them."""

    def digest(tensor: Tensor) -> bytes:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(cast(Any, flat.numpy())).digest()

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return hashlib.sha256(b"".join(threads.map(digest, tensors))).hexdigest()


def digest_steps(loop: Any, count: int) -> dict[str, object]:
    """Train `count` steps, and return digests after each: of parameters and optimizer, and of the buffers."""
    states, buffers = [], []
    for _ in range(count):
        loop.step()
        loop.subject.model.state_dict()  # waits for updates that are still under way
        states.append(digest_state(loop.subject.model, loop.optimizer, loop.scaler))
        buffers.append(digest_buffers(loop.subject.model))
    return {"states": states, "buffers": buffers, "losses": loop.take_losses()}


# --- memory ---


def peak_memory(loop: Any, count: int, *, cuda: bool) -> dict[str, object]:
    """Train `count` steps, and return the peak meanwhile: of what was allocated on the device, or if there is none, of the
    memory in which this process lies, with what it shares."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(count):
        loop.step()
    if cuda:
        torch.cuda.synchronize()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peak = reserved = _status_bytes("VmHWM")
    return {"peak_bytes": peak, "reserved_bytes": reserved, "gradient_bytes": loop.subject.num_bytes}


def sent_and_shared(job: Any) -> dict[str, object]:
    """Return the bytes that this worker has sent to other hosts in the present view, and the shared memory that it has
    touched: from which operands are sent on CPUs, and into which those of others are received."""
    engine = job._run.trainer.views.engine
    return {"wire_bytes": 0 if engine is None else engine.wire_bytes, "shared_bytes": _status_bytes("RssShmem")}


def _status_bytes(name: str) -> int:
    """Return a number of bytes that the kernel knows of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


# --- profiles ---


def profile_steps(loop: Any, count: int, *, cuda: bool, save_as: str = "") -> dict[str, object]:
    """Profile `count` steps twice: without Python's call stacks, which cost time themselves, and with them.

    With `save_as`, keep the traces as SAVE_AS.light.json and SAVE_AS.python.json, in the format of chrome://tracing.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    found: dict[str, object] = {}
    for kind, stacks in (("light", False), ("python", True)):
        loop.step()
        _wait(cuda)
        with torch.profiler.profile(activities=activities, with_stack=stacks) as profiler:
            begun_s = time.perf_counter()
            for _ in range(count):
                loop.step()
            issued_s = time.perf_counter() - begun_s
            _wait(cuda)
            done_s = time.perf_counter() - begun_s
        with tempfile.TemporaryDirectory() as folder:
            path = Path(f"{save_as}.{kind}.json") if save_as else Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        times = {"step_s": done_s / count, "host_s": issued_s / count}
        found[kind] = {**times, **trace_summary.summarise(events, count)}
    return found


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
