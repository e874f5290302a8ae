"""Differential privacy of clients: clips updates, adds noise, and computes the epsilon that all rounds have spent.

Noise may make a running variance negative: use models whose normalisation keeps none (group norm, layer norm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pliant.errors import CheckpointError, ConfigError
from pliant.fed.aggregation import Aggregator
from pliant.fed.config import FedConfig, PrivacyConfig
from pliant.fed.selection.base import Floats, Ids
from pliant.fed.work import Update, Weights, sum_of_squares

ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(12, 64), *range(64, 257, 8), 512, 1024)
"""Orders of Rényi divergence: fractions matter if much privacy is spent, large orders if little is."""


def privatise(update: Update, privacy: PrivacyConfig, *, seed: int, round_number: int, participants: int) -> Update:
    """Return the update clipped, with its noise, and with the same weight as every other.

    `participants` is how many updates the round aggregates. The noise follows from seed, round and client; no two of
    these draw the same numbers.
    """
    deviation = privacy.clip * privacy.noise_multiplier
    if privacy.where == "server":
        deviation /= math.sqrt(participants)
    chance = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, round_number, update.client]))

    def noisy(tensor: Tensor) -> Tensor:
        if deviation == 0 or not tensor.is_floating_point():
            return tensor
        noise = torch.from_numpy(chance.standard_normal(tuple(tensor.shape))).to(tensor.device)
        return (tensor.to(torch.float64) + noise * deviation).to(tensor.dtype)

    return replace(update, change=clip_change(update.change, privacy.clip).map(noisy), samples=1.0)


def clip_change(change: Weights, bound: float) -> Weights:
    """Scale a change to an L2 norm of at most `bound`, over all parameters and floating buffers.

    A change that is not finite becomes zero, because the bound must hold for whatever a client sends. Integers become
    zero, too: they cannot be scaled, and would reveal something.
    """
    floating = [each for each in change.all if each.is_floating_point()]
    length = math.sqrt(sum_of_squares(floating))
    # A little less than needed: the products are rounded to the tensors' own type, and must not exceed the bound.
    slack = max((torch.finfo(each.dtype).eps for each in floating), default=0.0)
    scale = bound / length * (1 - slack) if length > bound else 1.0

    def part(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not math.isfinite(length):
            return torch.zeros_like(tensor)
        return (tensor.to(torch.float64) * scale).to(tensor.dtype) if scale < 1 else tensor

    return change.map(part)


def sampled_gaussian_rdp(rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Rényi divergence of one round whose participants are drawn at `rate` (Mironov, Talwar, Zhang 2019).

    log E[(1 - q + q exp((2z - 1) / 2 sigma^2))^a] / (a - 1), z ~ N(0, sigma^2), by the trapezoidal rule: for such integrands
    it converges faster than any power of the step, and needs no series for fractional orders.
    """
    if noise_multiplier == 0:
        return math.inf
    variance = noise_multiplier**2
    if rate == 1:
        return order / (2 * variance)
    # The integrand has mass around 0 and around z = order; its poles are pi sigma^2 away from the real line.
    step = min(noise_multiplier / 8, variance / 2)
    z = np.arange(-14 * noise_multiplier, order + 14 * noise_multiplier + step, step)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * variance))
    logs = order * ratio - z**2 / (2 * variance)
    top = float(logs.max())
    area = math.log(float(np.exp(logs - top).sum()) * step) - 0.5 * math.log(2 * math.pi * variance)
    return max(0.0, (top + area) / (order - 1))


def round_divergences(rate: float, noise_multiplier: float) -> Floats:
    """Return the Rényi divergence of one round for each of `ORDERS`; those of several rounds add up."""
    return np.array([sampled_gaussian_rdp(rate, noise_multiplier, order) for order in ORDERS])


def epsilon_of(divergences: Floats, delta: float) -> float:
    """Return the epsilon for this delta (Canonne, Kamath and Steinke 2020); infinite without noise."""
    if not divergences.any():
        return 0.0
    found = math.inf
    for order, divergence in zip(ORDERS, divergences, strict=True):
        more = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        found = min(found, float(divergence) + more)
    return max(0.0, found)


class PrivacyBudget:
    """The privacy of one job: makes updates private and accounts for them. Does nothing if the job has no privacy config.

    Drawing participants by chance alone amplifies privacy. Guided selection looks at the clients, and noise that each
    client adds does not cover the others: there, the rounds of the client that took part most often count in full.
    """

    def __init__(self, config: FedConfig, num_clients: int, aggregator: Aggregator) -> None:
        """Raises ConfigError if noise would not protect what the aggregator does."""
        self._privacy, self._seed = config.privacy, config.seed
        self._is_drawn = config.selector.kind == "random" and (not self._privacy or self._privacy.where == "server")
        self._divergences: Floats = np.zeros(len(ORDERS))
        self._took_part = np.zeros(num_clients, np.int64)
        if self._privacy and self._privacy.where == "server" and not aggregator.averages:
            raise ConfigError(
                f"{aggregator.name} is no mean of all updates, so noise on their sum does not make it private: "
                "use where=client, or fed-avg, fed-yogi, ..."
            )

    def privatise_update(self, update: Update, *, round_number: int, participants: int) -> Update:
        """Return the update as the aggregator may see it."""
        if self._privacy is None:
            return update
        return privatise(update, self._privacy, seed=self._seed, round_number=round_number, participants=participants)

    def account(self, clients: Ids, *, rate: float) -> None:
        """Account for a model made of these clients' updates; each was invited with probability `rate`."""
        if self._privacy is None or not len(clients):
            return
        np.add.at(self._took_part, clients, 1)
        if self._is_drawn:
            self._divergences = self._divergences + round_divergences(rate, self._privacy.noise_multiplier)

    @property
    def epsilon(self) -> float | None:
        """Epsilon of all models so far; None if the job has no privacy config."""
        if self._privacy is None:
            return None
        spent, rounds = self._divergences, int(self._took_part.max())
        if rounds and not self._is_drawn:
            spent = rounds * round_divergences(1.0, self._privacy.noise_multiplier)
        return epsilon_of(spent, self._privacy.delta)

    def state_dict(self) -> dict[str, Any]:
        accountant = {"orders": list(ORDERS), "total": self._divergences.tolist()}
        return {"accountant": accountant, "took_part": self._took_part.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        took_part = np.array(state["took_part"], np.int64)
        divergences = np.array(state["accountant"]["total"], np.float64)
        if took_part.shape != self._took_part.shape:
            raise CheckpointError(f"the checkpoint is of {len(took_part)} clients, not {len(self._took_part)}")
        if divergences.shape != self._divergences.shape:
            raise CheckpointError("the checkpoint's account of privacy is damaged")
        self._took_part, self._divergences = took_part, divergences
