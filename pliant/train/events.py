"""Progress of a job, and the events that programs can listen to: `job.on_commit` and `job.on_view_change`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Progress:
    """Progress of the job: epoch, steps committed in it, steps committed in total, passes."""

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    passes: int = 0
    """Everything that all workers have done together so far: the sums of a step, a sum of metrics."""
    in_epoch: bool = False
    """Whether the program's code before the first step of this epoch has run. If a worker begins with this progress, what
    it does there does not count."""

    def set(self, other: Progress) -> None:
        """Take over another progress."""
        self.epoch, self.epoch_step, self.step, self.passes = other.epoch, other.epoch_step, other.step, other.passes
        self.in_epoch = other.in_epoch


class StepCommitted(NamedTuple):
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
    """What the turns of this step logged, and what the program passed to `job.report`."""
    leaves_epoch: bool = False
    """Whether the program has left the loop over the epoch's steps by `break`."""


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A change of the workers, as one that stayed saw it."""

    step: int
    """The first step of the new view."""
    old_size: int
    new_size: int
    pause_s: float
    """Time from the end of the old view's last step to the first batch of the new view."""
    lost: bool
    """Whether a step was torn by the loss of a worker."""
    repeated: int = 0
    """Steps that this worker had begun and repeats."""


@dataclass(slots=True)
class Listeners:
    """Who is told about the steps and the views of a job: records, checkpoints, benchmarks."""

    commit: list[Callable[[StepCommitted], None]] = field(default_factory=list)
    """Called after each step."""
    view: list[Callable[[ViewChange], None]] = field(default_factory=list)
    want_values: bool = False
    """Whether one of them may read `StepCommitted.values`. If none does, nobody waits for figures on a GPU."""
    _occasional: list[tuple[int, Callable[[StepCommitted], None]]] = field(default_factory=list)
    """The job's own listeners, with the number of steps after which each wants to be called."""
    last_called: int = 0
    next_call: int = 0
    """The steps after which those were last called, and are called next. Nobody has to be told about the steps between."""

    def add_occasional(self, listener: Callable[[StepCommitted], None], every: int = 0) -> None:
        """Call `listener` after each step whose number is a multiple of `every` (0: after none of them), and after the step
        in which `wake` was called. It may be called after other steps, too."""
        self._occasional.append((every, listener))
        self.wake()

    def wake(self) -> None:
        """Call the occasional listeners after the next step that is committed."""
        self.next_call = 0

    def tell(self, event: StepCommitted) -> None:
        """Tell those that want to know about this step."""
        if not self.last_called < event.step < self.next_call:
            steps = [(event.step // every + 1) * every for every, _ in self._occasional if every]
            self.last_called, self.next_call = event.step, min(steps, default=sys.maxsize)
            for _, listener in self._occasional:
                listener(event)
        for listener in self.commit:
            listener(event)

    def add(self, listener: Callable[[StepCommitted], None]) -> None:
        """Add a listener for committed steps that may read their values."""
        self.commit.append(listener)
        self.want_values = True


class ViewChanges:
    """The changes of view so far. A change has ended when the first batch of the new view is in hand."""

    def __init__(self, listeners: list[Callable[[ViewChange], None]]) -> None:
        self.seen: list[ViewChange] = []
        self.step_ended_s = 0.0
        """When the last step ended, by time.monotonic()."""
        self._lost_s, self._steps_begun = 0.0, 0
        """When a worker was last lost, and the steps begun by then, the torn one included."""
        self._listeners = listeners
        """Called with each change when it has ended."""
        self._ending: tuple[float, int, bool] | None = None

    def note_loss(self, steps_begun: int) -> None:
        """A worker is lost, after so many steps were begun."""
        self._lost_s, self._steps_begun = time.monotonic(), steps_begun

    def since_s(self, *, is_planned: bool) -> float:
        """Return when a change that comes now has begun: with the end of a step, or with a loss."""
        return (self.step_ended_s or time.monotonic()) if is_planned else self._lost_s

    def begin(self, since_s: float, old_size: int, lost: bool) -> None:
        self._ending = (since_s, old_size, lost)

    @property
    def is_ending(self) -> bool:
        """Whether a change has begun and not ended."""
        return self._ending is not None

    def end(self, step: int, new_size: int) -> None:
        """End the change: the first batch of the new view is in hand."""
        assert self._ending is not None, "begin() comes first"
        (since_s, old_size, lost), self._ending = self._ending, None
        repeated = max(0, self._steps_begun - step) if lost else 0
        change = ViewChange(step, old_size, new_size, time.monotonic() - since_s, lost, repeated)
        self.seen.append(change)
        for listener in self._listeners:
            listener(change)
