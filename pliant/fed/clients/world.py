"""The clients' side of the virtual clock: how long a job's clients take, and when they are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pliant.fed.choice.population import Floats, Ids
from pliant.fed.clients.availability import Availability, Presence, read_availability
from pliant.fed.clients.availability import synthetic as synthetic_availability
from pliant.fed.clients.devices import PASSES, Devices, read_devices, synthetic_devices
from pliant.fed.config import FedConfig

EQUAL = (41.0, 6075.0)
"""ms per sample and kbit/s: the middle of FedScale's table."""
DEVICES, PRESENCE, SELECTION = 3, 4, 5
"""What a seed is drawn for, so that no two uses draw the same numbers: fast clients must not be the large ones by chance."""


def seed_for(seed: int, purpose: int) -> int:
    """A seed of its own for each purpose of a job's seed."""
    return int(np.random.SeedSequence((seed, purpose)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True, slots=True)
class World:
    """One device, and one pattern of presence, for each client."""

    devices: Devices
    availability: Availability
    batch_size: int
    model_bytes: int
    """What travels each way."""
    passes: float = PASSES

    @classmethod
    def of(cls, config: FedConfig, num_clients: int, model_bytes: int) -> World:
        """As the config says; reads the tables that it names.

        Raises:
            ConfigError: a table is not there, or is none.
        """
        return cls(
            _devices(config, num_clients),
            _availability(config, num_clients),
            config.local.batch_size,
            config.model_bytes or model_bytes,
            PASSES * config.clock_factor,
        )

    def __len__(self) -> int:
        return len(self.devices)

    def round_s(self, steps: int | Ids, clients: Ids | slice = slice(None)) -> Floats:
        """Seconds that a round of so many local steps takes each client."""
        return self.devices.round_s(
            np.asarray(steps) * self.batch_size,
            down_bytes=self.model_bytes,
            up_bytes=self.model_bytes,
            passes=self.passes,
            clients=clients,
        )

    def compute_s(self, steps: int, clients: Ids) -> Floats:
        """The part of it that goes into the steps."""
        return self.devices.round_s(
            steps * self.batch_size, down_bytes=0, up_bytes=0, passes=self.passes, clients=clients
        )

    def at(self, now_s: float) -> Presence:
        return self.availability.at(now_s)


def _devices(config: FedConfig, num_clients: int) -> Devices:
    if config.devices == "synthetic":
        return synthetic_devices(num_clients, seed=seed_for(config.seed, DEVICES))
    if config.devices == "equal":
        compute_ms, kbps = (np.full(num_clients, each) for each in EQUAL)
        return Devices(compute_ms, kbps, kbps, "all alike")
    return read_devices(Path(config.devices)).for_clients(num_clients)


def _availability(config: FedConfig, num_clients: int) -> Availability:
    if not config.availability:
        return Availability.always(num_clients)
    if config.availability == "synthetic":
        return synthetic_availability(num_clients, seed=seed_for(config.seed, PRESENCE))
    return read_availability(Path(config.availability)).for_clients(num_clients)
