"""The model, and the digits of each client."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pliant.fed.data import partition

NUM_TEST = 297


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


def test_set() -> tuple[Tensor, Tensor]:
    inputs, labels = digits()
    return inputs[-NUM_TEST:], labels[-NUM_TEST:]


def share_of(client: int, num_clients: int, seed: int) -> tuple[Tensor, Tensor]:
    """A real client would read its own files; here all digits are dealt, a few classes to each client."""
    inputs, labels = digits()
    dealt = partition.dirichlet(labels[:-NUM_TEST].numpy(), num_clients, alpha=0.3, seed=seed)
    mine = torch.as_tensor(dealt.of(client))
    return inputs[mine], labels[mine]


def accuracy(model: nn.Module) -> tuple[float, float]:
    """And the loss, on digits that no client has."""
    inputs, labels = test_set()
    with torch.no_grad():
        outputs = model(inputs)
    right = (outputs.argmax(1) == labels).float().mean()
    return float(right), float(nn.functional.cross_entropy(outputs, labels))
