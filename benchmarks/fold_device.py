"""Whether sets of gradients are scaled and added on a GPU as on the CPU, bit by bit, and what that costs.

Run it where a GPU is: `python benchmarks/fold_device.py`. On a machine without one it runs on the CPU, to be tried.
"""

from __future__ import annotations

import sys
import time

import torch

from pliant.train.bucket_layout import BucketItem, rebuilt_layout
from pliant.train.gradient_folds import SetAdder, make_fold

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parameters(device: torch.device, scale: int) -> list[torch.nn.Parameter]:
    chance = torch.Generator().manual_seed(1)
    shapes = [(768, 3072), (3072,), (50257 // scale, 768), (768,), (64, 64, 3, 3), (1,), ()] * 4
    made = []
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, generator=chance)
        value = value.to([torch.float32, torch.bfloat16][number // 7 % 2])
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        made.append(torch.nn.Parameter(value.to(device)))
    return made


def pinned(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(length, dtype=dtype, pin_memory=DEVICE.type == "cuda")


def main() -> int:
    wrong = 0
    here, there = parameters(DEVICE, 1), parameters(torch.device("cpu"), 1)
    items = [BucketItem((p.dtype, p.device), p.numel() * p.element_size()) for p in here]
    layout = rebuilt_layout(items, list(reversed(range(len(items)))))
    for replicas in (3, 4, 6):
        chance = torch.Generator().manual_seed(replicas)
        sets = [[torch.randn(p.shape, generator=chance).to(p.dtype) for p in there] for _ in range(replicas)]
        expected: dict[str, list[torch.Tensor]] = {}
        for order in ("tree", "ddp"):
            for memory in (None, pinned):
                totals = {}
                for of in (there, here):
                    fold, adder = make_fold(order, of, layout, replicas, memory), SetAdder(of)
                    began_s = time.perf_counter()
                    for each in sets:
                        gradients = [
                            torch.empty_like(p).copy_(g) if p.dim() == 4 else g.to(p.device, copy=True)
                            for p, g in zip(of, each, strict=True)
                        ]
                        adder.scale(gradients, 1 / replicas)
                        fold.add(gradients)
                    totals[of[0].device.type] = [total.detach().cpu() for total in fold.take_sum()]
                    took_s = time.perf_counter() - began_s
                found = totals[DEVICE.type]
                expected.setdefault(order, totals["cpu"])
                same = all(torch.equal(a, b) for a, b in zip(found, expected[order], strict=True))
                wrong += not same
                where = "host" if memory else "device"
                print(f"N = {replicas}, {order}, {where}: {'ok' if same else 'OTHER BITS'} ({took_s * 1e3:.0f} ms)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
