"""Federated learning: selection of clients, aggregation of their updates, a virtual clock, and the processes that train.

The names that programs import are loaded when they are first used.
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
