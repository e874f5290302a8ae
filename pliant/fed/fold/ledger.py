"""What a federated job gives away of its clients: updates made private, and the account of it.

With a trusted server and `random` selection, a round counts at the rate at which clients are drawn; who is drawn is then a
secret that chance keeps. In all other cases only the rounds of the client that took part most often count, each with rate 1:
guided selection looks at the clients, and a server that is not trusted knows whom it has asked. The account covers the models;
what guided selection is told (`noise_factor` of `oort`) and the losses in the record are not models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pliant.errors import CheckpointError
from pliant.fed.choice.population import Ids
from pliant.fed.config import FedConfig
from pliant.fed.fold.aggregation import Aggregator
from pliant.fed.fold.privacy import Accountant, Privacy
from pliant.fed.updates import Update


class Ledger:
    """Of a job that promises nothing, it does nothing."""

    def __init__(self, config: FedConfig, num_clients: int, aggregator: Aggregator) -> None:
        """Raises ConfigError where noise would not cover what the aggregator does."""
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

    def private(self, update: Update, *, round_number: int, participants: int) -> Update:
        """The update as the aggregator may see it."""
        if self._privacy is None:
            return update
        return self._privacy.privatised(update, round_number=round_number, participants=participants)

    def account(self, clients: Ids, *, rate: float) -> None:
        """A model has been made of these clients' updates; `rate` is with which chance each was asked."""
        if self._privacy is None or not len(clients):
            return
        np.add.at(self._took_part, clients, 1)
        if self._drawn:
            self._accountant.add(rate=rate, noise_multiplier=self._privacy.noise_multiplier)

    @property
    def epsilon(self) -> float | None:
        """Of all models so far; None: nothing is promised."""
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
