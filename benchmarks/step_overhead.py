"""The cost of a step's bookkeeping: a training loop of pliant beside the same loop in plain PyTorch, in one process.

    python benchmarks/step_overhead.py                        # N = 1 and N = 4, a tiny model and one with many small tensors
    pliant run -np 1 python benchmarks/step_overhead.py       # the same as a worker of a job
    python benchmarks/step_overhead.py --replicas 1 --model tiny --profile

The models compute next to nothing, so what is left is overhead. Both loops take turns in blocks of steps, and the shortest
block of each counts: other programs on the machine only make blocks longer. With N replicas the plain loop accumulates the
gradients of N batches.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import pliant
from pliant.machine import machine


def build(name: str, device: torch.device) -> torch.nn.Module:
    """Return a model of few or of many small tensors, with or without buffers and dropout."""
    layers: dict[str, list[torch.nn.Module]] = {
        "tiny": [torch.nn.Linear(8, 8)],
        "many": [torch.nn.Linear(8, 8) for _ in range(50)],
        "norm": [each for _ in range(25) for each in (torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))],
        "dropout": [torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)],
    }
    torch.manual_seed(0)
    return torch.nn.Sequential(*layers[name]).to(device)


def measure(name: str, replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step of both loops, in the shortest block."""
    device = torch.device(args.device)
    data = TensorDataset(torch.randn(args.block * (args.blocks + 1) * 4 * replicas, 8))
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    plain, ours = build(name, device), build(name, device)
    plain_optimizer, optimizer = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, ours))
    batches = iter(DataLoader(data, batch_size=4))

    def run_plain(steps: int) -> float:
        began_s = time.perf_counter()
        for _ in range(steps):
            for (x,) in itertools.islice(batches, replicas):
                plain(x.to(device)).sum().backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        wait()
        return time.perf_counter() - began_s

    times: dict[str, list[float]] = {"plain": [], "pliant": []}
    profile = cProfile.Profile()
    with pliant.join(replicas=replicas, **args.options) as job:
        ours, optimizer = job.wrap(ours, optimizer)
        loader = job.loader(data, batch_size=4)
        for _ in job.epochs(1):
            began_s = time.perf_counter()
            for step in loader:
                for (x,) in step:
                    ours(x.to(device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (step.number + 1) % args.block == 0:
                    wait()
                    profile.disable()
                    times["pliant"].append(time.perf_counter() - began_s)
                    times["plain"].append(run_plain(args.block))
                    if args.profile and len(times["plain"]) > 1:
                        profile.enable()
                    began_s = time.perf_counter()
    profile.disable()
    if args.profile:
        stats = pstats.Stats(profile)
        stats.sort_stats("tottime").print_stats(args.profile)
    plain_s, ours_s = (min(each[1:]) / args.block for each in (times["plain"], times["pliant"]))
    return {"model": name, "replicas": replicas, "plain_s": plain_s, "pliant_s": ours_s, "overhead_s": ours_s - plain_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", nargs="+", default=["tiny", "many", "norm"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--block", type=int, default=100, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--options", type=json.loads, default={}, help="more options of pliant.join, as JSON")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="ROWS", help="profile the loop, and show so many rows"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for name in args.model:
        for replicas in args.replicas:
            cell = measure(name, replicas, args)
            cells.append(cell)
            plain_us, ours_us = cell["plain_s"] * 1e6, cell["pliant_s"] * 1e6
            print(
                f"{name}, N = {replicas}: plain {plain_us:.0f} us, pliant {ours_us:.0f} us, more by {ours_us - plain_us:.0f} us",
                flush=True,
            )
    if args.json:
        arguments = {**vars(args), "json": str(args.json)}
        args.json.write_text(
            json.dumps({"bench": "step_overhead", "args": arguments, "cells": cells, "machine": machine()}) + "\n"
        )


if __name__ == "__main__":
    main()
