"""Events of a running job that programs can listen to: `job.on_commit` and `job.on_view_change`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step that all replicas have done, as one worker saw it.

    With sync="priority" some sums of the step may still be on their way. If a worker is lost before they arrive, the
    step does not count after all: it is done again, and a second event with the same number follows.
    """

    step: int
    """Steps committed so far, this one included."""
    epoch: int
    epoch_step: int
    """Steps committed in this epoch, this one included."""
    num_workers: int
    rank: int
    """The rank of this worker."""
    duration_s: float
    """Time from the start of the step to its commit."""
    compute_s: float
    """The part of `duration_s` in which the replicas hosted here ran their forward and backward passes."""
    values: Mapping[str, float]
    """What the program passed to `job.report` in this step."""
