"""pliant: PyTorch training on machines that come and go, with a result that does not change by one bit."""

import random
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.adapt import (
        Decision,
        Observation,
        Policy,
        ProbeLinks,
        Resize,
        SetBatchSize,
        SetLearningRate,
        SetTopology,
    )
    from pliant.train.job import Job
    from pliant.train.joining import join
    from pliant.train.optim import AdaptiveSGD, PairAveraging, SynchronousAveraging
    from pliant.train.rendezvous import Left

__version__ = "0.2.0.dev0"
__all__ = [
    "AdaptiveSGD",
    "Decision",
    "Job",
    "Left",
    "Observation",
    "PairAveraging",
    "Policy",
    "ProbeLinks",
    "Resize",
    "SetBatchSize",
    "SetLearningRate",
    "SetTopology",
    "SynchronousAveraging",
    "__version__",
    "join",
]
_OWNERS = {
    "Job": "pliant.train.job",
    "Left": "pliant.train.rendezvous",
    "join": "pliant.train.joining",
    **dict.fromkeys(("AdaptiveSGD", "PairAveraging", "SynchronousAveraging"), "pliant.train.optim"),
}
"""The modules of the names above that are not in `pliant.adapt`."""


def __getattr__(name: str) -> object:
    """What training programs use is loaded when it is first asked for: the command line starts without torch."""
    if name in __all__:
        state = (
            random.getstate()
        )  # the program may have seeded it, and some libraries draw from it when they are imported
        try:
            return getattr(import_module(_OWNERS.get(name, "pliant.adapt")), name)
        finally:
            random.setstate(state)
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")
