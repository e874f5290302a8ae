"""pliant: PyTorch training on machines that come and go, with a result that does not change by one bit."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["AdaptiveSGD", "Job", "Left", "PairAveraging", "SynchronousAveraging", "__version__", "join"]

if TYPE_CHECKING:
    from pliant.train.job import Job, Left, join
    from pliant.train.optim import AdaptiveSGD, PairAveraging, SynchronousAveraging


def __getattr__(name: str) -> object:
    """What training programs use is loaded when it is first asked for: the command line starts without torch."""
    if name in ("Job", "Left", "join"):
        from pliant.train import job

        return getattr(job, name)
    if name in ("AdaptiveSGD", "PairAveraging", "SynchronousAveraging"):
        from pliant.train import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")
