"""Federated learning: who takes part in a round, what their updates become, the virtual clock, and the processes that train.

The files beside this one are what all of its parts stand on: a job's config, the tensors and units that rounds are about,
what a job has done, and reading the tables of others. What programs import is here, and loads when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.fed.config import FedConfig
    from pliant.fed.data.task import InMemory
    from pliant.fed.rounds.loop import simulate

__all__ = ["FedConfig", "InMemory", "simulate"]
_OWNER_OF = {"FedConfig": "config", "InMemory": "data.task", "simulate": "rounds.loop"}


def __getattr__(name: str) -> object:
    if name in _OWNER_OF:
        return getattr(import_module(f"{__name__}.{_OWNER_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
