"""Aggregators that some clients may lie to: coordinate by coordinate without the extremes, or by whom others resemble.

They know nothing of samples, because a liar would claim many. All of a round's updates are held until its end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.fold.aggregation import Aggregator, FedAvg
from pliant.fed.updates import Update, Weights, moved

STACK_ELEMENTS = 1 << 24
"""Sorted at once; larger tensors go in pieces, so that a thousand clients need no thousandfold memory twice."""


class _Held(Aggregator):
    averages: ClassVar[bool] = False

    def _begin(self) -> None:
        self._updates: list[Update] = []

    def _add(self, update: Update) -> None:
        self._updates.append(update)

    def _finish(self, model: Weights) -> Weights:
        updates, self._updates = self._updates, []
        return self._combined(model, updates) if updates else model.clone()

    @abstractmethod
    def _combined(self, model: Weights, updates: list[Update]) -> Weights:
        """The next model; there is at least one update."""


class _Coordinates(_Held):
    """Each coordinate by itself, from its sorted values: parameters and buffers alike."""

    def _combined(self, model: Weights, updates: list[Update]) -> Weights:
        low, high = self._kept(len(updates))

        def new(old: Tensor, changes: list[Tensor]) -> Tensor:
            return moved(old, _middle(old, changes, low, high))

        return Weights(
            [new(old, [each.change.parameters[i] for each in updates]) for i, old in enumerate(model.parameters)],
            [new(old, [each.change.buffers[i] for each in updates]) for i, old in enumerate(model.buffers)],
        )

    @abstractmethod
    def _kept(self, count: int) -> tuple[int, int]:
        """The range of sorted places whose mean is taken."""


def _middle(like: Tensor, changes: list[Tensor], low: int, high: int) -> Tensor:
    """The mean of the values at places `low` to `high` of each coordinate, added up from the lowest."""
    flat = [each.reshape(-1).to(like.device) for each in changes]
    result = torch.empty(like.numel(), dtype=torch.float64, device=like.device)
    piece = max(1, STACK_ELEMENTS // len(flat))
    for begin in range(0, like.numel(), piece):
        ranked = _ranked(torch.stack([each[begin : begin + piece] for each in flat]))
        total = torch.zeros(ranked.shape[1], dtype=torch.float64, device=like.device)
        for place in range(low, high):
            total += ranked[place]
        result[begin : begin + piece] = total / (high - low)
    return result.reshape(like.shape)


def _ranked(rows: Tensor) -> Tensor:
    """Each column sorted. In memory by NumPy: seven times as fast as torch for a thousand rows."""
    if rows.device.type != "cpu":
        return rows.sort(dim=0).values
    plain = rows.to(torch.float32) if rows.dtype in (torch.float16, torch.bfloat16) else rows
    return torch.from_numpy(np.sort(plain.numpy(), axis=0))


class TrimmedMean(_Coordinates):
    """The mean without the `trim` part of the values at either end (Yin et al. 2018): bears that part of liars."""

    name = "trimmed-mean"

    def __init__(self, *, trim: float = 0.2) -> None:
        super().__init__()
        if not 0 <= trim < 0.5:
            raise ConfigError(f"trim={trim}: use 0 or more, less than 0.5, of the clients at either end")
        self.trim = trim

    def _kept(self, count: int) -> tuple[int, int]:
        # 0.2 of 15 is 3, though 0.2 * 15 may be a little less than that.
        cut = int(self.trim * count + 1e-9)
        return cut, count - cut


class Median(_Coordinates):
    """The middle value; of an even number, the mean of the two in the middle."""

    name = "median"

    def __init__(self) -> None:
        super().__init__()

    def _kept(self, count: int) -> tuple[int, int]:
        return (count - 1) // 2, count // 2 + 1


class Krum(_Held):
    """The update with the nearest neighbours (Blanchard et al. 2017), or the even mean of the `keep` best (multi-Krum)."""

    name = "krum"

    def __init__(self, *, malicious: int = 0, keep: int = 1) -> None:
        """`malicious` is how many liars are borne; a round must have 2 malicious + 3 updates."""
        super().__init__()
        if malicious < 0 or keep < 1:
            raise ConfigError(f"malicious={malicious}, keep={keep}: use 0 or more, and 1 or more")
        self.malicious, self.keep = int(malicious), int(keep)
        self.chosen: list[int] = []
        """The clients whose updates made the last model."""

    def check(self, count: int) -> None:
        """Raises ConfigError where so many updates are too few."""
        least = max(2 * self.malicious + 3, self.keep + self.malicious)
        if count < least:
            raise ConfigError(
                f"krum of {count} updates with malicious={self.malicious}, keep={self.keep}: "
                f"needs at least {least} updates; take more clients, or lower these"
            )

    def _combined(self, model: Weights, updates: list[Update]) -> Weights:
        count = len(updates)
        self.check(count)
        distances = squared_distances([each.change.parameters for each in updates])
        nearest = np.sort(distances, axis=1)[:, 1 : count - self.malicious - 1]  # the very nearest is itself
        best = np.argsort(nearest.sum(axis=1), kind="stable")[: self.keep]  # of equals the lower client
        kept = [updates[i] for i in sorted(best)]
        self.chosen = [each.client for each in kept]
        return FedAvg(even=True).aggregate(model, kept)


def squared_distances(changes: Sequence[Sequence[Tensor]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Between all pairs, in float64; by products, because differences would take n^2 passes over the model."""
    count = len(changes)
    products = np.zeros((count, count))
    for tensors in zip(*changes, strict=True):
        flat = [each.detach().reshape(-1).cpu() for each in tensors]
        piece = max(1, STACK_ELEMENTS // count)
        for begin in range(0, flat[0].numel(), piece):
            rows = torch.stack([each[begin : begin + piece].to(torch.float64) for each in flat]).numpy()
            products += rows @ rows.T
    own = np.diag(products)
    found: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.maximum(own[:, None] + own[None, :] - 2 * products, 0)
    np.fill_diagonal(found, 0)
    return found
