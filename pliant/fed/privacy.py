"""Differential privacy of clients: clips updates, adds noise, and computes the epsilon that all rounds have spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.errors import CheckpointError, ConfigError
from pliant.fed.aggregation import Aggregator
from pliant.fed.config import FedConfig
from pliant.fed.selection.base import Ids
from pliant.fed.work import Update, Weights, sum_of_squares

ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(12, 64), *range(64, 257, 8), 512, 1024)
"""Orders of Rényi divergence: fractions matter if much privacy is spent, large orders if little is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """How updates are made private before they are aggregated.

    Noise may make a running variance negative: use models whose normalisation keeps none (group norm, layer norm).
    """

    clip: float = 3.0
    """Greatest L2 norm of an update, over all parameters and floating buffers."""
    noise_multiplier: float = 1.0
    """Standard deviation of the noise in units of `clip`; 0: clipping only, which gives no guarantee."""
    where: Literal["server", "client"] = "server"
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.clip > 0 and math.isfinite(self.clip)):
            raise ConfigError(f"clip={self.clip}: use a length above 0")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ConfigError(f"noise_multiplier={self.noise_multiplier}: use 0 or more")
        if self.where not in ("server", "client"):
            raise ConfigError(f"where={self.where!r}: use server or client")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: use 0 or more")

    def check(self, aggregator: Aggregator) -> None:
        """Refuse an aggregator whose result the server's noise does not protect.

        Raises:
            ConfigError: it does not average all updates, or not evenly.
        """
        if self.where == "server" and not aggregator.averages:
            raise ConfigError(
                f"{aggregator.name} is no mean of all updates, so noise on their sum does not make it private: "
                "use where=client, or fed-avg, fed-yogi, ..."
            )

    def privatise(self, update: Update, *, round_number: int, participants: int) -> Update:
        """Return the update clipped, with its noise, and with the same weight as every other.

        `participants` is how many updates the round aggregates.
        """
        if participants < 1:
            raise ConfigError(f"participants={participants}: a private round has 1 or more")
        change, _ = clip_change(update.change, self.clip)
        deviation = self.clip * self.noise_multiplier
        if self.where == "server":
            deviation /= math.sqrt(participants)
        chance = generator(self.seed, round_number, update.client)
        return replace(update, change=_with_noise(change, deviation, chance), samples=1.0)


def clip_change(change: Weights, bound: float) -> tuple[Weights, float]:
    """Scale a change to a norm of at most `bound`; return it and its norm before.

    A change that is not finite becomes zero, because the bound must hold for whatever a client sends. Integers do not change:
    they cannot be scaled, and would reveal something.
    """
    floating = [each for each in change.all if each.is_floating_point()]
    length = math.sqrt(sum_of_squares(floating))
    # A little less than needed: the products are rounded to the tensors' own type, and must not exceed the bound.
    scale = bound / length * (1 - _slack(floating)) if length > bound else 1.0

    def part(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not math.isfinite(length):
            return torch.zeros_like(tensor)
        return (tensor.to(torch.float64) * scale).to(tensor.dtype) if scale < 1 else tensor

    return Weights([part(each) for each in change.parameters], [part(each) for each in change.buffers]), length


def _slack(tensors: list[Tensor]) -> float:
    return max((torch.finfo(each.dtype).eps for each in tensors), default=0.0)


def generator(seed: int, round_number: int, client: int) -> np.random.Generator:
    """Return the random generator of one client in one round; no two of them overlap."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, round_number, client]))


def _with_noise(change: Weights, deviation: float, chance: np.random.Generator) -> Weights:
    def noisy(tensor: Tensor) -> Tensor:
        if deviation == 0 or not tensor.is_floating_point():
            return tensor
        noise = torch.from_numpy(chance.standard_normal(tuple(tensor.shape))).to(tensor.device)
        return (tensor.to(torch.float64) + noise * deviation).to(tensor.dtype)

    return Weights([noisy(each) for each in change.parameters], [noisy(each) for each in change.buffers])


def sampled_gaussian_rdp(rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Rényi divergence of one round whose participants are drawn at `rate` (Mironov, Talwar, Zhang 2019).

    log E[(1 - q + q exp((2z - 1) / 2 sigma^2))^a] / (a - 1), z ~ N(0, sigma^2), by the trapezoidal rule: for such integrands
    it converges faster than any power of the step, and needs no series for fractional orders.
    """
    if rate == 0:
        return 0.0
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


@dataclass(slots=True)
class Accountant:
    """Computes what all rounds so far have revealed about any one client.

    Rates below 1 amplify privacy only if each client takes part by chance alone, independently. Guided selection looks at the
    clients: count only the rounds of the client that took part most often, each with rate 1.
    """

    orders: tuple[float, ...] = ORDERS
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.orders or min(self.orders) <= 1:
            raise ConfigError(f"orders={self.orders}: each must be above 1")
        if not len(self.total):
            self.total = np.zeros(len(self.orders))

    def add(self, *, rate: float, noise_multiplier: float, rounds: int = 1) -> None:
        """Add `rounds` rounds with participants drawn at `rate`."""
        if not 0 <= rate <= 1:
            raise ConfigError(f"rate={rate}: use the share of clients that take part, 0 to 1")
        if not noise_multiplier >= 0 or rounds < 0:
            raise ConfigError(f"noise_multiplier={noise_multiplier}, rounds={rounds}: use 0 or more")
        if rounds:
            each = [sampled_gaussian_rdp(rate, noise_multiplier, order) for order in self.orders]
            self.total = self.total + rounds * np.array(each)

    def epsilon(self, delta: float, *, classic: bool = False) -> float:
        """Return the epsilon for this delta; infinite without noise.

        By Canonne, Kamath and Steinke (2020); with `classic` by Mironov (2017), looser, as in older publications.
        """
        if not 0 < delta < 1:
            raise ConfigError(f"delta={delta}: use a probability, less than one over the number of clients")
        if not self.total.any():
            return 0.0
        found = math.inf
        for order, divergence in zip(self.orders, self.total, strict=True):
            if classic:
                more = -math.log(delta) / (order - 1)
            else:
                more = math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
            found = min(found, divergence + more)
        return max(0.0, float(found))

    def state_dict(self) -> dict[str, list[float]]:
        return {"orders": list(self.orders), "total": self.total.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        orders, total = state.get("orders"), state.get("total")
        if not orders or not total or len(orders) != len(total):
            raise ConfigError("the accountant's state is damaged: its orders and its totals do not match")
        self.orders, self.total = tuple(orders), np.array(total, dtype=np.float64)


class PrivacyBudget:
    """The privacy of one job: makes updates private and accounts for them. Does nothing if the job has no privacy config."""

    def __init__(self, config: FedConfig, num_clients: int, aggregator: Aggregator) -> None:
        """Raises ConfigError if noise would not protect what the aggregator does."""
        self._settings = config.privacy
        self._privacy: Privacy | None = None
        self._drawn = config.selector.kind == "random"
        self._accountant = Accountant()
        self._took_part = np.zeros(num_clients, np.int64)
        if config.privacy is not None:
            where = config.privacy.where
            self._drawn = self._drawn and where == "server"
            self._privacy = Privacy(
                clip=config.privacy.clip,
                noise_multiplier=config.privacy.noise_multiplier,
                where=where,
                seed=config.seed,
            )
            self._privacy.check(aggregator)

    def privatise_update(self, update: Update, *, round_number: int, participants: int) -> Update:
        """Return the update as the aggregator may see it."""
        if self._privacy is None:
            return update
        return self._privacy.privatise(update, round_number=round_number, participants=participants)

    def account(self, clients: Ids, *, rate: float) -> None:
        """Account for a model made of these clients' updates; each was invited with probability `rate`."""
        if self._privacy is None or not len(clients):
            return
        np.add.at(self._took_part, clients, 1)
        if self._drawn:
            self._accountant.add(rate=rate, noise_multiplier=self._privacy.noise_multiplier)

    @property
    def epsilon(self) -> float | None:
        """Epsilon of all models so far; None if the job has no privacy config."""
        if self._settings is None:
            return None
        if self._drawn:
            return self._accountant.epsilon(self._settings.delta)
        alone = Accountant()
        alone.add(rate=1.0, noise_multiplier=self._settings.noise_multiplier, rounds=int(self._took_part.max()))
        return alone.epsilon(self._settings.delta)

    def state_dict(self) -> dict[str, Any]:
        return {"accountant": self._accountant.state_dict(), "took_part": self._took_part.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        took_part = np.array(state["took_part"], np.int64)
        if took_part.shape != self._took_part.shape:
            raise CheckpointError(
                f"the checkpoint is of {len(took_part)} clients, and there are {len(self._took_part)}: use the same data"
            )
        self._took_part = took_part
        self._accountant.load_state_dict(state["accountant"])
