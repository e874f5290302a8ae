"""Models and data for the ports, small enough that a whole training takes a fraction of a second.

Each port is a pair of programs: `NAME_ddp.py` for stock DistributedDataParallel, and `NAME.py` for pliant. Both import
what they train from here, so that their difference is what a port changes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

VOCABULARY, BLOCK = 17, 6


def text(length: int, seed: int = 0) -> Tensor:
    """Return random tokens."""
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


class GPT(nn.Module):
    """One layer of a transformer with tied embeddings and dropout."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.mix, self.grow, self.shrink = nn.Linear(width, 3 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)  # fmt: skip
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found = self.dropout(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
        queries, keys, values = self.mix(self.norm(found)).chunk(3, dim=-1)
        found = found + F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        found = found + self.dropout(self.shrink(F.gelu(self.grow(self.norm(found)))))
        return F.cross_entropy(self.head(found).flatten(0, 1).float(), targets.flatten())


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of a text, each with the same block one token later."""

    def __init__(self, length: int = 30, seed: int = 0) -> None:
        self.data = text(length + BLOCK, seed)

    def __len__(self) -> int:
        return len(self.data) - BLOCK

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.data[index : index + BLOCK + 1]
        return piece[:-1], piece[1:]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Random pictures of three classes; with `augment` each is flipped, shifted and made noisy at random."""

    def __init__(self, length: int = 20, seed: int = 0, *, augment: bool = False) -> None:
        self.data = torch.randn(length, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.data[index]
        if self.augment:
            picture = picture.flip(-1) if torch.rand(1) < 0.5 else picture
            picture = picture.roll(random.randrange(3), -1) + 0.1 * torch.randn(picture.shape)
        return picture, index % 3


class Stream(IterableDataset[tuple[Tensor, int]]):
    """The part of a stream of pictures that belongs to one rank, with noise."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        pictures = Pictures(24)
        for index in range(self.rank, len(pictures) // self.num_ranks * self.num_ranks, self.num_ranks):
            yield pictures[index][0] + 0.1 * torch.randn(1, 6, 6), index % 3


class Net(nn.Module):
    """A convolution with batch norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures)


class Generator(nn.Sequential):
    """Noise to pictures."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 12), nn.BatchNorm1d(12, 0.8), nn.LeakyReLU(0.2), nn.Linear(12, 36), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        return super().forward(noise).view(-1, 1, 6, 6)


class Discriminator(nn.Sequential):
    """Pictures to one number each."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))


def digest(*things: Any) -> str:
    """Return the SHA-256 of models, optimizers, schedulers, scalers, tensors and numbers."""
    digested = hashlib.sha256()
    for thing in things:
        _digest(digested, thing.module if isinstance(thing, DistributedDataParallel) else thing)
    return digested.hexdigest()


def _digest(digested: Any, thing: Any) -> None:
    if hasattr(thing, "state_dict"):
        thing = thing.state_dict()
    if isinstance(thing, Tensor):
        tensor = thing.detach().contiguous()
        digested.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digested.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(thing, dict):
        for key in sorted(thing, key=str):
            digested.update(str(key).encode())
            _digest(digested, thing[key])
    elif isinstance(thing, list | tuple):
        for each in thing:
            _digest(digested, each)
    else:
        digested.update(repr(thing).encode())
