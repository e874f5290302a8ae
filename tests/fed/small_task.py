"""A federated task that takes milliseconds, with a gate at which training can be held: for workers that tests start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from pliant.fed.data.task import InMemory

CLASSES = ("a", "b", "c", "d")
_gate: Path | None = None


def samples(folder: str = "") -> tuple[InMemory, InMemory]:
    """Four clouds of points. As long as `folder`/gate is there, no model moves on in this process."""
    global _gate
    _gate = Path(folder) / "gate" if folder else None
    chance = torch.Generator().manual_seed(7)
    labels = torch.arange(600) % len(CLASSES)
    data = torch.randn(600, 16, generator=chance) + torch.randn(len(CLASSES), 16, generator=chance)[labels]
    return InMemory(data[:400], labels[:400], CLASSES), InMemory(data[400:], labels[400:], CLASSES)


class Gated(nn.Module):
    """A small network; whoever waits in it has left a file with the number of its process.

    In double precision, as the fold is: so the order in which updates are added shows in the bits.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, num_classes)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and _gate is not None and _gate.exists():
            _gate.with_name(f"held-{os.getpid()}").touch()
            while _gate.exists():
                time.sleep(0.005)  # pacing a poll; the test that shut the gate opens it
        outputs: Tensor = self.layers(inputs.double())
        return outputs


def model(num_classes: int) -> nn.Module:
    return Gated(num_classes)


def dying(num_classes: int) -> nn.Module:
    """Whoever trains this is killed, as by the kernel when memory is short."""

    class Dying(Gated):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                os.kill(os.getpid(), 9)
            return super().forward(inputs)

    return Dying(num_classes)


def failing(num_classes: int) -> nn.Module:
    class Failing(Gated):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                raise ZeroDivisionError("this model divides by zero")
            return super().forward(inputs)

    return Failing(num_classes)
