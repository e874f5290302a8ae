"""Does the engine move CUDA tensors right, and how fast beside gloo? For a machine with one CUDA GPU.

    PYTHONPATH=. python benchmarks/cuda_engine.py

Several processes share the GPU; each joins a job of the engine and a default group of
torch.distributed on gloo. What the engine sums must equal gloo's sums in bits. Needs torch and numpy
only, ends by itself within four minutes, prints one JSON line last, and exits 1 if anything failed.
`--device cpu` runs all but the streams without a GPU, to test this program itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pliant_repro.profiles import resnet50

from pliant.cluster import View, Worker
from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.group import DeviceGroup
from pliant.comm.engine import Engine
from pliant.elastic.member import Session
from pliant.errors import ConfigError
from pliant.identity import WorkerSpec

LIMIT_S = 225.0
GANG_S = 90.0
ONE, TWO = "127.0.0.1", "127.0.0.2"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MB25 = 25_000_000


class Bench:
    """What the checks need to know, on one rank."""

    def __init__(self, engine: Engine, device: torch.device, repeats: int) -> None:
        self.engine = engine
        self.device = device
        self.repeats = repeats
        self.rank, self.size = engine.rank, engine.size

    def random(self, shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Different on every rank, the same in every run."""
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        sizes = (shape,) if isinstance(shape, int) else shape
        return torch.randn(sizes, generator=generator, dtype=torch.float32).to(dtype).to(self.device)

    def by_gloo(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- checks: an AssertionError is a wrong result; anything else ends the gang ---


def equal_to_gloo(bench: Bench) -> None:
    wrong = []
    for dtype in DTYPES:
        for length in (1, 1000, 2**20 + 1, MB25 // dtype.itemsize):
            tensor = bench.random(length, dtype)
            expected = bench.by_gloo(tensor)
            found = bench.engine.all_reduce(f"equal:{dtype}:{length}", tensor, determinism="exact").wait()
            if found is not tensor or not torch.equal(tensor, expected):
                wrong.append(f"{dtype} x {length}: {int((tensor != expected).sum())} elements differ")
    assert not wrong, f"engine != gloo: {wrong}"


def many_at_once(bench: Bench) -> None:
    """Several in flight, and one name again and again without waiting."""
    tensors = [bench.random(100_000 + i, torch.float32, seed=i) for i in range(20)]
    expected = [bench.by_gloo(tensor) for tensor in tensors]
    handles = [bench.engine.all_reduce(f"many:{i % 4}:{len(t)}", t) for i, t in enumerate(tensors)]
    for handle in reversed(handles):
        handle.wait()
    assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True)), "a sum differs from gloo's"


def side_streams(bench: Bench) -> None:
    """Produced on one stream that is behind, consumed on another right after `wait`."""
    length, total = 1_000_003, bench.size * (bench.size + 1) / 2
    producer, consumer = _stream(bench.device), _stream(bench.device)
    tensor = torch.full((length,), -1.0, device=bench.device)
    torch.cuda.synchronize(bench.device)
    with torch.cuda.stream(producer):
        _sleep(200_000_000)
        tensor.fill_(bench.rank + 1.0)
        handle = bench.engine.all_reduce("streams", tensor)
    with torch.cuda.stream(consumer):
        handle.wait()
        doubled = tensor * 2
    consumer.synchronize()
    assert torch.equal(doubled, torch.full_like(doubled, 2 * total)), f"found {doubled.min()} to {doubled.max()}"


def strides(bench: Bench) -> None:
    for name, tensor in {
        "transposed": bench.random((300, 500), torch.float32).t(),
        "every second": bench.random((1000, 64), torch.float32)[::2, ::2],
        "channels last": bench.random((4, 8, 16, 16), torch.bfloat16).to(memory_format=torch.channels_last),
    }.items():
        expected = bench.by_gloo(tensor)
        bench.engine.all_reduce(f"strides:{name}", tensor).wait()
        assert torch.equal(tensor, expected), f"{name}: the sum differs from gloo's"


def other_collectives(bench: Bench) -> None:
    engine, last = bench.engine, bench.size - 1
    mine = bench.random(70_001, torch.float32)
    everybody = [torch.empty_like(mine) for _ in range(bench.size)]
    dist.all_gather(everybody, mine)
    total = bench.by_gloo(mine)
    received = mine.clone()
    engine.broadcast("broadcast", received, root=last).wait()
    assert torch.equal(received, everybody[last]), "broadcast"
    gathered = engine.all_gather("all_gather", mine).wait()
    assert gathered is not None, "all_gather has a result on every rank"
    assert gathered.device == mine.device, f"all_gather's result is on {gathered.device}"
    assert torch.equal(gathered, torch.stack(everybody)), "all_gather"
    reduced = mine.clone()
    engine.reduce("reduce", reduced, root=last).wait()
    assert torch.equal(reduced, total if bench.rank == last else mine), "reduce"
    at_root = engine.gather("gather", mine, root=0).wait()
    assert (at_root is None) == (bench.rank != 0), "gather has a result on the root only"
    assert at_root is None or torch.equal(at_root, torch.stack(everybody)), "gather"
    largest = mine.clone()
    engine.all_reduce("max", largest, op="max").wait()
    assert torch.equal(largest, torch.stack(everybody).amax(0)), "max"


def contributions(bench: Bench) -> None:
    """Two replicas per rank: the sum of 2P tensors, whatever the number of ranks."""
    parts = [bench.random(50_001, torch.float64, seed=i).mul(1024).round() for i in (1, 2)]
    expected = bench.by_gloo(parts[0] + parts[1])
    out = torch.zeros_like(parts[0])
    bench.engine.all_reduce("parts", out, contributions=parts, parts=[2] * bench.size).wait()
    assert torch.equal(out, expected), "contributions on this device were not summed"


def device_group(bench: Bench) -> None:
    flat = {f"grad{i}": bench.random(1000 * i + 1, torch.float32, seed=i) for i in range(12)}
    flat["strided"] = bench.random((40, 50), torch.float32).t()
    _reduce_by_group(bench, flat, DeviceGroupConfig(backend="gloo", timeout_s=40))


def hierarchical_group(bench: Bench) -> None:
    grads = {f"grad{i}": bench.random(1000 * i + 1, torch.float64, seed=i).mul(1024).round() for i in range(12)}
    _reduce_by_group(bench, grads, DeviceGroupConfig(backend="gloo", hierarchical=True, timeout_s=40))


def _reduce_by_group(bench: Bench, grads: dict[str, torch.Tensor], config: DeviceGroupConfig) -> None:
    """Three iterations, submitted in another order on every rank and produced on a stream of its own."""
    names = list(grads)
    random.Random(bench.rank).shuffle(names)
    with DeviceGroup(bench.engine, grads, config).open() as group:
        for iteration in range(3):
            tensors = {name: grad.clone() for name, grad in grads.items()}
            expected = {name: bench.by_gloo(tensors[name]) for name in sorted(tensors)}
            bench.synchronize()
            with _busy_stream(bench.device):
                handles = [group.all_reduce(name, tensors[name].mul_(1)) for name in names]
            with _busy_stream(bench.device):
                for handle in handles:
                    handle.wait()
                found = {name: tensor + 0 for name, tensor in tensors.items()}
            bench.synchronize()
            wrong = [name for name in names if not torch.equal(found[name], expected[name])]
            assert not wrong, f"iteration {iteration + 1}: {wrong} differ from gloo's sums"
        assert sorted(group.launch_order) == sorted(names), "a launch order of all names"


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _sleep(num_cycles: int) -> None:
    """Have the current stream wait for so many cycles of the GPU."""
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]


@contextmanager
def _busy_stream(device: torch.device) -> Iterator[None]:
    """Another stream than the default one, with work in front; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        _sleep(20_000_000)
        yield


def nccl_is_refused(bench: Bench) -> None:
    """Several workers on one GPU, or none: an error that says so, on every rank."""
    expected = "share GPU" if bench.device.type == "cuda" and dist.is_nccl_available() else "backend='nccl' on"
    said = "nothing"
    try:
        DeviceGroup(bench.engine, {"a": bench.random(3, torch.float32)}).open().close()
    except ConfigError as error:
        said = str(error)
    assert expected in said, f"NCCL with several workers on one GPU: said {said!r}"


def nccl_alone(bench: Bench) -> None:
    """One worker, one GPU: NCCL with nobody else, to see that the group is made, used and closed."""
    for _ in range(2):
        tensors = {f"grad{i}": bench.random(1000 * i + 1, torch.float32, seed=i) for i in range(5)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with DeviceGroup(bench.engine, tensors, DeviceGroupConfig(timeout_s=60)).open() as group:
            for handle in [group.all_reduce(name, tensor) for name, tensor in tensors.items()]:
                handle.wait()
        assert all(torch.equal(tensors[name], before[name]) for name in tensors), "a sum of one is not itself"


def timing(bench: Bench) -> dict[str, Any]:
    """ResNet-50's gradients, one by one: ours and gloo's in turn."""
    grads = [torch.randn(length, device=bench.device) for length in resnet50()]

    def ours() -> None:
        for handle in [bench.engine.all_reduce(f"resnet50:{i}", grad) for i, grad in enumerate(grads)]:
            handle.wait()

    def gloo() -> None:
        for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
            work.wait()

    times: dict[str, list[float]] = {"ours": [], "gloo": []}
    for turn in range(bench.repeats + 1):
        for name, act in (("ours", ours), ("gloo", gloo)):
            torch._foreach_mul_(grads, 0.1)
            bench.synchronize()
            bench.engine.barrier()
            began_s = time.perf_counter()
            act()
            bench.synchronize()
            if turn:
                times[name].append(time.perf_counter() - began_s)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "workers": bench.size,
        "ours": {"median_s": medians["ours"], "iqr_s": _iqr(times["ours"])},
        "peers": {
            "gloo": {
                "median_s": medians["gloo"],
                "iqr_s": _iqr(times["gloo"]),
                "speedup": medians["gloo"] / medians["ours"],
            }
        },
    }


def _iqr(taken: Sequence[float]) -> float:
    if len(taken) < 2:
        return 0.0
    quarters = statistics.quantiles(taken, n=4, method="inclusive")
    return quarters[2] - quarters[0]


# --- processes ---


def specs(hosts: Sequence[str]) -> list[WorkerSpec]:
    """A worker on a free port for each entry of `hosts`."""
    sockets = [socket.create_server((host, 0)) for host in hosts]
    workers = tuple(Worker(host, sock.getsockname()[1]) for host, sock in zip(hosts, sockets, strict=True))
    for sock in sockets:
        sock.close()
    view = View(0, workers, tuple(Worker(host, 1) for host in dict.fromkeys(hosts)))
    return [WorkerSpec(worker=worker, view=view, secret=b"of one benchmark") for worker in workers]


def work(pipe: Connection, rank: int, spec: WorkerSpec, meet: str, checks: Sequence[str], args: Any) -> None:
    """In a process: run the checks, and report each as (name, result or None, error or '')."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    name = "start"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        size = spec.view.size
        store = dist.FileStore(meet, size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        with Session.join(spec) as session:
            bench = Bench(session.engine, device, args.repeats)
            for name in checks:
                try:
                    pipe.send((name, CHECKS[name](bench), ""))
                except AssertionError as error:
                    pipe.send((name, None, f"rank {rank}: {error}"))
            session.engine.barrier(timeout_s=30)
        dist.destroy_process_group()
        pipe.send(("end", None, ""))
    except BaseException:
        pipe.send((name, None, f"rank {rank}: {traceback.format_exc()[-1500:]}"))


CHECKS: dict[str, Callable[[Bench], Any]] = {
    check.__name__: check
    for check in (
        equal_to_gloo,
        many_at_once,
        side_streams,
        strides,
        other_collectives,
        contributions,
        device_group,
        hierarchical_group,
        nccl_is_refused,
        nccl_alone,
        timing,
    )
}


def run(hosts: Sequence[str], checks: Sequence[str], args: Any, deadline_s: float) -> dict[str, Any]:
    """What came of `checks` in a process for each of `hosts`: {"workers", "hosts", "passed", "failed", "timing"}."""
    deadline_s = min(deadline_s, time.monotonic() + GANG_S)
    context = mp.get_context("spawn")
    passed: dict[str, int] = dict.fromkeys([*checks, "end"], 0)
    failed: list[str] = []
    found: dict[str, Any] = {"workers": len(hosts), "hosts": len(set(hosts))}
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank, spec in enumerate(specs(hosts)):
            ours, theirs = context.Pipe()
            meet = str(Path(folder) / "meet")
            process = context.Process(target=work, args=(theirs, rank, spec, meet, checks, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            listening = set(range(len(hosts)))
            while listening:
                ready = wait([pipes[rank] for rank in listening], timeout=max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    failed.append(f"ranks {sorted(listening)} had not finished in time")
                    break
                for rank in [rank for rank in listening if pipes[rank] in ready]:
                    try:
                        name, result, error = pipes[rank].recv()
                    except EOFError:
                        listening.discard(rank)
                        continue
                    if error:
                        failed.append(f"{name}: {error}")
                    else:
                        passed[name] += 1
                    if result is not None and rank == 0:
                        found[name] = result
        finally:
            for process in processes:
                process.join(0 if failed else 5)
                if process.is_alive():
                    process.kill()
                    process.join(5)
    found["passed"] = [name for name in checks if passed[name] == len(hosts)]
    silent = [name for name, count in passed.items() if count < len(hosts)]
    found["failed"] = failed or [f"{name}: not reported by all ranks" for name in silent]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each side")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 3, 4], help="numbers of workers")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"bench": "cuda_engine", "ok": False, "remarks": ["no CUDA device: use --device cpu"]}))
        return 1
    deadline_s = time.monotonic() + LIMIT_S
    cuda = args.device == "cuda"
    basic = ["equal_to_gloo", "many_at_once", *(["side_streams"] if cuda else []), "strides", "other_collectives"]
    basic += ["contributions", "device_group", "nccl_is_refused"]
    runs = [([ONE] * size, [*basic, "timing"]) for size in args.sizes]
    runs += [([ONE, ONE, TWO], [*basic, "hierarchical_group"])]
    if cuda and dist.is_nccl_available():
        runs += [([ONE], ["nccl_alone"])]
    cells = []
    for hosts, checks in runs:
        began_s = time.monotonic()
        cell = run(hosts, checks, args, deadline_s)
        cell["took_s"] = round(time.monotonic() - began_s, 1)
        cells.append(cell)
        print(f"{len(hosts)} workers on {len(set(hosts))} hosts: {cell}", file=sys.stderr, flush=True)
    ok = all(not cell["failed"] for cell in cells)
    print(
        json.dumps(
            {
                "bench": "cuda_engine",
                "args": vars(args),
                "ok": ok,
                "cells": cells,
                "machine": {
                    "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine(),
                    "cpus": os.cpu_count(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
