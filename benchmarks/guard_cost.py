"""The cost of the guard: time of a checksum of the whole state, beside the time of a training step.

    python benchmarks/guard_cost.py                              # ResNet-18, a small network and a language model on the CPU
    python benchmarks/guard_cost.py --device cuda --json FILE

The guard compares every 100 steps by default, so a hundredth of a checksum is its cost per step. The goal is 0.2 % of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "repro")]

import torch  # noqa: E402
from pliant_repro import zoo  # noqa: E402

from pliant.machine import machine  # noqa: E402
from pliant.train.context import DataPosition, ReplicaContext, seeded_rng  # noqa: E402
from pliant.train.guard import EVERY, Guard  # noqa: E402
from pliant.train.replicas import ModelBuffers  # noqa: E402

GOAL = 0.002
REPLICAS = 4


def best_s(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest time of a call: other programs on the machine only make it longer."""
    times = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_s)
    return min(times[1:])


def measure(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the times of a step of one replica and of a checksum, in seconds."""
    network, model = zoo.network(name), zoo.build(name, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    samples = zoo.ReadyBatches(network.kind, network.size, network.batch, device, classes=network.classes)
    inputs, targets = samples.__getitems__(list(range(network.batch)))

    def step() -> None:
        zoo.compute_loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step_s = best_s(step, repeats, device)
    buffers = ModelBuffers([model])
    contexts = [ReplicaContext(seeded_rng(replica), DataPosition()) for replica in range(REPLICAS)]
    state: Any = SimpleNamespace(
        models=[model], optimizers=[optimizer], tracked={}, buffers=buffers, first_buffers=buffers.save(), averaging=None,
        replicas=SimpleNamespace(contexts=contexts, num_loader_workers=0), adaptation=SimpleNamespace(is_active=False),
    )  # fmt: skip
    checksum_s = best_s(Guard(state).checksum, repeats, device)
    held = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    num_bytes = sum(tensor.nbytes for tensor in [*model.state_dict().values(), *held])
    cost = checksum_s / EVERY / step_s
    return {
        "network": name, "megabytes": num_bytes / 1e6, "tensors": len(held) + len(model.state_dict()),
        "step_s": step_s, "checksum_s": checksum_s, "us_per_mb": checksum_s / num_bytes * 1e12, "cost": cost,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", default=["resnet18", "small", "transformer"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [measure(name, torch.device(args.device), args.repeats) for name in args.networks]
    for cell in cells:
        print(
            f"{cell['network']}: {cell['megabytes']:.1f} MB in {cell['tensors']} tensors, checksum {cell['checksum_s'] * 1e3:.2f} ms "
            f"({cell['us_per_mb']:.0f} us per MB), step {cell['step_s'] * 1e3:.1f} ms: {cell['cost']:.4%} of a step"
        )
    found = {
        "bench": "guard_cost", "args": {**vars(args), "json": str(args.json)}, "ours": {"cells": cells}, "peers": {},
        "bound": GOAL, "machine": machine() | {"device": args.device}, "ok": all(cell["cost"] < GOAL for cell in cells), "remarks": [],
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(not found["ok"])


if __name__ == "__main__":
    main()
