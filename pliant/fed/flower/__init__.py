"""A real federation: our selection and aggregation as a strategy of Flower's, and what its clients tell us.

What an app imports is here, and loads when it is asked for: a client starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.fed.flower.client import introduction, metrics
    from pliant.fed.flower.strategy import Guided

__all__ = ["Guided", "introduction", "metrics"]
_OWNER_OF = {"Guided": "strategy", "introduction": "client", "metrics": "client"}


def __getattr__(name: str) -> object:
    if name in _OWNER_OF:
        return getattr(import_module(f"{__name__}.{_OWNER_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
