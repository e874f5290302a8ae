"""How long a worker takes to hand its state to new ones on the same host, and what the lender's own work feels of it.

    OUT=. python benchmarks/state_device.py --device cuda     # one GPU, from the repository's root, about a minute
    OUT=. python benchmarks/state_device.py --device cpu --readers 1

One process has the state of GPT-2 with AdamW (1.5 GB), and works (matrix products, or on the CPU nothing); others fetch it into
tensors of their own, all at the same time. Every change is a new view. Memory is pinned before the first one, as in a job that
runs, but may not be ready for it. It needs torch and numpy only, writes $OUT/state_device.json, and ends with exit code 1 if
the bytes that arrive are wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from pliant.cluster import View, Worker  # noqa: E402
from pliant.comm.engine import EngineConfig  # noqa: E402
from pliant.comm.mesh import MeshConfig  # noqa: E402
from pliant.comm.transport import Transport  # noqa: E402

LAYER = (768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768, 768, 768)
SIZES = (50304 * 768, 1024 * 768, *LAYER * 12, 768, 768)
"""The parameters of GPT-2 124M."""
LIMIT_S = 80.0


def make_state(device: str, value: float) -> list[torch.Tensor]:
    """Return parameters and both moments, and a counter for each parameter on the host, as AdamW keeps them."""
    made = [torch.full((size,), value, device=device) for size in SIZES for _ in range(3)]
    for number, tensor in enumerate(made):
        tensor[: 1 << 10] += number
    return [*made, *(torch.tensor(value) for _ in SIZES)]


def work(device: str, stop: threading.Event, times_s: list[float]) -> None:
    """Do steps of many small kernels until told to stop."""
    if device == "cpu":
        return
    matrix = torch.rand(2048, 2048, device=device)
    while not stop.is_set():
        began_s = time.perf_counter()
        for _ in range(40):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)


def run(rank: int, workers: tuple[Worker, ...], device: str, repeat: int, found: Any) -> None:
    state = make_state(device, 1.0 if rank == 0 else 0.0)
    expected = make_state(device, 1.0) if rank else state
    hosts = tuple(Worker(host, 1) for host in dict.fromkeys(worker.host for worker in workers))
    rows: dict[str, Any] = {
        "rank": rank,
        "bytes": sum(each.nbytes for each in state),
        "fetch_s": [],
        "lend_s": [],
        "ok": True,
    }
    with Transport(workers[rank], MeshConfig(secret=b"bench"), EngineConfig()).open() as transport:
        transport.connect(workers, 0, timeout_s=LIMIT_S)
        transport.reserve(pins=device == "cuda")
        times_s: list[float] = []
        stop = threading.Event()
        beside = threading.Thread(target=work, args=(device, stop, times_s))
        if rank == 0:
            beside.start()
        for number in range(repeat):
            began_s = time.perf_counter()
            if rank == 0:
                transport.lend(f"{number}:", state)
                rows["lend_s"].append(time.perf_counter() - began_s)
            engine = transport.enter(View(number, workers, hosts))
            engine.barrier("entered")
            if rank == 0:
                quiet = len(times_s)
            began_s = time.perf_counter()
            if rank:
                engine.fetch([0], f"{number}:", state).wait()
                rows["fetch_s"].append(time.perf_counter() - began_s)
                rows["ok"] = rows["ok"] and all(map(torch.equal, state, expected))
                for tensor in state:
                    tensor.zero_()
            engine.barrier("fetched", timeout_s=LIMIT_S)
            if rank == 0:
                rows.setdefault("steps_meanwhile_s", []).append(times_s[quiet:])
                transport.reclaim("")
        if rank == 0:
            stop.set()
            beside.join()
            rows["median_step_s"] = statistics.median(times_s) if times_s else 0.0
            rows["copied_bytes"] = transport.lending.num_copied_bytes
            rows["socket_bytes"] = sum(link.sent_bytes for link in transport.connections.links.values())
    found.put(rows)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    cells = []
    for readers in options.readers:
        workers = tuple(Worker("127.0.0.1", 23460 + 10 * readers + rank) for rank in range(readers + 1))
        found = context.Queue()
        started = [
            context.Process(target=run, args=(rank, workers, options.device, options.repeat, found))
            for rank in range(readers + 1)
        ]
        for process in started:
            process.start()
        rows = sorted((found.get(timeout=LIMIT_S) for _ in started), key=lambda each: each["rank"])
        for process in started:
            process.join(timeout=10)
            process.kill()
        slowest = [max(times) for times in zip(*(row["fetch_s"] for row in rows[1:]), strict=True)]
        cells.append({"readers": readers, "rows": rows, "slowest_s": slowest})
        lender = rows[0]
        meanwhile = [seconds for times in lender["steps_meanwhile_s"] for seconds in times]
        print(
            f"{readers} readers, {lender['bytes'] / 1e9:.2f} GB: first {1e3 * slowest[0]:.0f} ms, then "
            f"{', '.join(f'{1e3 * seconds:.0f}' for seconds in slowest[1:])} ms; lending takes "
            f"{1e3 * max(lender['lend_s']):.1f} ms; the lender's steps: median {1e3 * lender['median_step_s']:.1f} ms, "
            f"longest meanwhile {1e3 * max(meanwhile, default=0.0):.1f} ms; through sockets "
            f"{lender['socket_bytes'] / 1e3:.0f} kB; equal bytes: {all(row['ok'] for row in rows)}"
        )
    out = Path(os.environ.get("OUT", "."), "state_device.json")
    out.write_text(json.dumps({"bench": "state_device", "args": vars(options), "cells": cells}, indent=1) + "\n")
    return 0 if all(row["ok"] for cell in cells for row in cell["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
