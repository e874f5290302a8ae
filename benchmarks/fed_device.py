"""Federated clients on one device: how many per second one after the other, and how many in batches.

    python benchmarks/fed_device.py cuda      # a machine with one GPU
    python benchmarks/fed_device.py cpu       # the same on one core, to test this program itself

Prints one JSON: clients per second in turn and for each batch (medians of runs that take turns), for the layers of many models
and for `torch.func.vmap`; whether two runs have the same bits; and how far the batched result is from the one in turn, relative to
the change. A client does 10 steps of 20 images of 28 x 28 with a model of 45 thousand parameters.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import InMemory
from pliant.fed.local_steps import BatchedTrainer
from pliant.fed.trainer import ClientTrainer
from pliant.fed.work import Trained, Training, Weights

CLIENTS = 512
STEPS = 10
REPEATS = 5
BATCHES = {"cuda": (1, 4, 16, 64, 128, 256), "cpu": (1, 4, 8, 16)}
COMPARED = 16
WANTED = 10.0


def pictures() -> tuple[InMemory, InMemory]:
    """Make ten patterns with noise: no file is needed, and something can be learned."""
    chance = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 1, 28, 28, generator=chance)
    labels = torch.randint(0, 10, (60_000,), generator=chance)
    images = patterns[labels] + 2 * torch.randn(60_000, 1, 28, 28, generator=chance)
    classes = tuple(str(each) for each in range(10))
    return InMemory(images[:50_000], labels[:50_000], classes), InMemory(images[50_000:], labels[50_000:], classes)


def apart(one: tuple[Trained, ...], other: tuple[Trained, ...]) -> list[float]:
    """Return the distance of each client's two changes, relative to their length."""
    found = []
    for mine, theirs in zip(one, other, strict=True):
        a, b = (torch.cat([each.flatten().double() for each in got.update.change.all]) for got in (mine, theirs))
        found.append(float((a - b).norm() / a.norm()))
    return found


def closeness(one: tuple[Trained, ...], other: tuple[Trained, ...]) -> dict[str, float]:
    """Summarise the distances.

    Some of very many activations are so near to 0 that rounding decides whether they count; their client then takes another
    path. So most clients are apart by rounding only, and a few by more.
    """
    found = apart(one, other)
    return {
        "median": statistics.median(found),
        "largest": max(found),
        "part_within_1e-4": sum(each < 1e-4 for each in found) / len(found),
    }


def main(device: str) -> None:
    torch.set_num_threads(1)
    config = {"data": {"kind": "fed_device:pictures", "clients": CLIENTS}, "model": "cnn", "local": {"steps": STEPS}}
    task = build_task(FedConfig.model_validate(config))
    by_layers, by_functions = ClientTrainer(task, device=device), ClientTrainer(task, device=device)
    by_functions.together = BatchedTrainer(task, by_functions.module, None)
    start = Weights.of(task.model())

    def run(clients: int, trainer: ClientTrainer) -> tuple[Trained, ...]:
        done = trainer.run(start, Training(1, tuple(range(clients)), (STEPS,) * clients, 0.05))
        assert isinstance(done, tuple)
        return done

    def in_turn(clients: int) -> tuple[Trained, ...]:
        units = (Training(1, (client,), (STEPS,), 0.05) for client in range(clients))
        return tuple(each for unit in units for each in by_layers.run(start, unit))  # type: ignore[union-attr]

    ways: dict[str, tuple[int, Callable[[], object]]] = {"in turn": (8, lambda: in_turn(8))}
    for size in BATCHES[device]:
        if size > 1:
            ways[f"layers {size}"] = size, lambda size=size: run(size, by_layers)
            ways[f"vmap {size}"] = size, lambda size=size: run(size, by_functions)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, (clients, work) in ways.items():
            began = time.perf_counter()
            work()
            if repeat:  # the first time, kernels are loaded
                rates[name].append(clients / (time.perf_counter() - began))
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    largest = max(BATCHES[device])
    alone = in_turn(COMPARED)
    report = {
        "bench": "fed_device",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread",
        "torch": torch.__version__,
        "clients_per_s": medians,
        "speedup": round(max(medians.values()) / medians["in turn"], 2),
        "wanted": WANTED if device == "cuda" else None,
        "same_bits": {
            "in turn": not any(apart(alone, in_turn(COMPARED))),
            "layers": not any(apart(run(largest, by_layers), run(largest, by_layers))),
            "vmap": not any(apart(run(largest, by_functions), run(largest, by_functions))),
        },
        "apart_from_in_turn": {
            "layers": closeness(alone, run(largest, by_layers)[:COMPARED]),
            "vmap": closeness(alone, run(largest, by_functions)[:COMPARED]),
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if sys.argv[1:] not in (["cuda"], ["cpu"]):
        sys.exit("give the device: cuda or cpu")
    main(sys.argv[1])
