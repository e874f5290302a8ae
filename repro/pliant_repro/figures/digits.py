"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, most to train on, the rest held out.

`launch.save_digits` writes them to a file once, because importing scikit-learn takes seconds that new workers shall not spend.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUM_TRAIN, BATCH_SIZE = 1536, 32
"""Images that the demo trains on, and batch size of each of its replicas."""
NUM_SMALL, NUM_VARIANTS, SPLIT_SEED = 1024, 4, 5
"""Images that `read_in_batches` trains on, how often it varies each image that is held out, and the seed of its split."""
Sample = tuple[Tensor, Tensor]


def load(path: str) -> Sample:
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["images"]).unsqueeze(1), torch.from_numpy(file["labels"])


class AugmentedDigits:
    """Images that are moved, dimmed and made noisy whenever they are read, by three random generators."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        down, right = np.random.randint(0, 3, size=2)
        moved = F.pad(self._images[index], (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        dimmed = moved * random.uniform(0.8, 1.2)
        return dimmed + 0.1 * torch.randn(dimmed.shape), self._labels[index]


def augmented(path: str) -> tuple[AugmentedDigits, Sample]:
    """Return the digits to train on, and the images and labels that are held out."""
    images, labels = load(path)
    return AugmentedDigits(images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


class BatchedDigits:
    """Digits that are varied by whole batches: on a CPU, reading one by one would cost more than training."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        return vary(self._images[index : index + 1])[0], self._labels[index]

    def __getitems__(self, indices: list[int]) -> Sample:
        return vary(self._images[indices]), self._labels[indices]


def vary(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Move each image by up to a pixel each way, dim it and add noise."""
    count = len(images)
    rows, columns = (torch.arange(8) + each for each in torch.randint(0, 3, (2, count, 1), generator=generator))
    padded = F.pad(images, (1, 1, 1, 1))
    moved = padded[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
    bright = 0.9 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)
    return moved * bright + 0.05 * torch.randn(moved.shape, generator=generator)


def read_in_batches(path: str) -> tuple[BatchedDigits, Sample]:
    """Return digits to train on and variants of those that are held out, the same in every run."""
    images, labels = load(path)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:NUM_SMALL], order[NUM_SMALL:].repeat(NUM_VARIANTS)
    held_out = vary(images[test], torch.Generator().manual_seed(SPLIT_SEED)), labels[test]
    return BatchedDigits(images[train], labels[train]), held_out
