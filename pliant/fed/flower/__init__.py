"""Our selection and aggregation as a strategy of Flower, and what its clients report.

The names that an app imports are loaded when they are first used: a client starts without torch.
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
