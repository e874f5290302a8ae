"""A step of the training loop as the program sees it: an iteration over its turns, and the figures that they logged.

What all workers learn of a turn travels in a row of fixed size: what the replica did, and its figures.
"""

from __future__ import annotations

import gc
import math
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from pliant.errors import MustBeReplaced, TrainError
from pliant.train import state_tree

if TYPE_CHECKING:
    from pliant.train.shadow import Shadow
    from pliant.train.trainer import Trainer

MAX_FIGURES = 8
MAX_NAMES = 96
"""The figures that a turn may log, and the bytes of their names: they travel in a fixed room."""


OWN_COUNTER = "A counter of the program's own begins at 0 on a new worker: use step.index, step.number or job.state"
"""The usual cause if workers are at different places of the program."""


class Outcome(IntEnum):
    """What a replica did in its turn."""

    NOTHING = 0
    SUMMED = 1
    SKIPPED = 2
    PASSED_OVER = 3
    """The program has left the step (`continue`, `break`) without a loop over it."""
    NO_DATA = 4
    """Its data have ended."""
    LOGGED = 5
    """It has only looked at its batch, and logged figures (`step.no_backward`)."""


_TURN = struct.Struct(f"<BII?B{MAX_NAMES}s{MAX_FIGURES}d")
"""The outcome, a bit for each model that got gradients, a bit for each that had some before, whether values are kept for
the next pass, the number of figures, their names, their values."""
TURN_BYTES = _TURN.size


@dataclass(slots=True)
class Turn:
    """One replica's turn in a step."""

    replica: int
    slot: int
    is_last: bool
    outcome: Outcome = Outcome.NOTHING
    models: int = 0
    """A bit for each model that got gradients."""
    had_gradients: int = 0
    """A bit for each model that had gradients of earlier passes, to which this turn has added."""
    figures: dict[str, Figure] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    """Values for this replica's turn in the next pass of the step."""

    def log(self, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            self.figures[name] = figure_of(name, value)
        names = ", ".join(self.figures)
        if len(self.figures) > MAX_FIGURES:
            raise TrainError(
                f"step.log: {len(self.figures)} figures ({names}), but {MAX_FIGURES} travel with a step at most: log fewer, or "
                "use job.report after the loop over the step for values that all workers know"
            )
        if bad := [name for name in figures if "," in name]:
            raise TrainError(f"step.log: {bad[0]!r}: use a name without a comma")
        if len(names.encode()) > MAX_NAMES:
            raise TrainError(f"step.log: the names {names} have more than {MAX_NAMES} bytes: use shorter ones")

    @property
    def row(self) -> TurnRow:
        """What is known of this turn. Nobody waits for its figures."""
        figures = {name: self.figures[name] for name in sorted(self.figures)}
        return TurnRow(self.outcome, self.models, self.had_gradients, bool(self.kept), figures)

    def pack(self) -> bytes:
        """Return what all workers learn of this turn."""
        names = sorted(self.figures)
        values = [float(self.figures[name]) for name in names]
        padding = [0.0] * (MAX_FIGURES - len(values))
        return _TURN.pack(
            self.outcome,
            self.models,
            self.had_gradients,
            bool(self.kept),
            len(values),
            ",".join(names).encode().ljust(MAX_NAMES),
            *values,
            *padding,
        )


class DeviceFigure:
    """A figure on its way from a GPU. Whoever reads it waits for it, so that a program that only logs need not wait for the
    device in every step."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = value.to("cpu", non_blocking=True)  # in pinned memory
        self._has_come = torch.cuda.current_stream(value.device).record_event()

    def __float__(self) -> float:
        self._has_come.synchronize()
        return float(self._host)


Figure = float | DeviceFigure


def figure_of(name: str, value: Any) -> Figure:
    """Return the value that a figure has now.

    Raises:
        TrainError: it is no number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach()
        return DeviceFigure(value) if value.is_cuda else float(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"step.log({name}={value!r:.60}): a figure is a number, or a tensor with one element"
        ) from error


@dataclass(frozen=True, slots=True)
class TurnRow:
    """What is known of a replica's turn on every worker."""

    outcome: Outcome
    models: int
    had_gradients: int
    keeps: bool
    figures: Mapping[str, Figure]

    @classmethod
    def from_bytes(cls, data: bytes) -> TurnRow:
        outcome, models, had_gradients, keeps, count, names, *values = _TURN.unpack(data)
        figures = dict(zip(names.decode().strip().split(","), values, strict=False)) if count else {}
        return cls(Outcome(outcome), models, had_gradients, keeps, figures)


def complaint_about(rows: Sequence[TurnRow], step: int) -> str:
    """Return what is wrong with the turns of a pass, in the order of replicas; empty if nothing is. The answer is the
    same on every worker."""
    outcomes = [row.outcome for row in rows]
    for replica, outcome in enumerate(outcomes):
        if outcome is Outcome.NOTHING:
            return (
                f"replica {replica} ended its turn of step {step} without a backward() whose gradients are summed: call it "
                "on a loss of this turn, or step.skip() where a replica contributes nothing. A loader yields steps: write "
                "`for step in loader:`, and `for x, y in step:` in it"
            )
    for rare, what in (
        (
            Outcome.NO_DATA,
            "the data of replica {one} ended before step {step}, but those of replica {other} did not: the samplers or "
            "streams of all replicas must give equally many batches",
        ),
        (
            Outcome.PASSED_OVER,
            "the worker of replica {one} left step {step} without a loop over it (continue or break), but that of replica "
            "{other} did not: all workers must do the same. " + OWN_COUNTER,
        ),
        (
            Outcome.LOGGED,
            "replica {one} called step.no_backward() in a loop over step {step}, but replica {other} did not: all replicas must "
            "do the same",
        ),
    ):
        if rare in outcomes and set(outcomes) != {rare}:
            one, other = outcomes.index(rare), next(i for i, each in enumerate(outcomes) if each is not rare)
            return what.format(one=one, other=other, step=step)
    summed = {row.models for row in rows if row.outcome is Outcome.SUMMED}
    if len(summed) > 1:
        first = next(row.models for row in rows if row.outcome is Outcome.SUMMED)
        other = next(i for i, row in enumerate(rows) if row.outcome is Outcome.SUMMED and row.models != first)
        return (
            f"the backward of replica {other} in step {step} reached other models than those of the replicas before it: "
            "every turn of a loop over the step must call backward() on the same models"
        )
    added = [
        (replica, row.had_gradients & row.models) for replica, row in enumerate(rows) if row.outcome is Outcome.SUMMED
    ]
    for replica, models in added:
        if models != added[0][1]:
            return (
                f"the replicas {added[0][0]} and {replica} differ in step {step} in whether they add to gradients of earlier "
                "steps: let all workers clear gradients at the same places"
            )
    logged = [(replica, row) for replica, row in enumerate(rows) if row.figures or row.outcome is Outcome.SUMMED]
    for replica, row in logged:
        if set(row.figures) != set(logged[0][1].figures):
            return (
                f"replicas {logged[0][0]} and {replica} logged different figures in step {step} "
                f"({', '.join(logged[0][1].figures) or 'none'}; {', '.join(row.figures) or 'none'}): "
                "step.log takes the same names in every turn"
            )
    return ""


def means_of(rows: Sequence[TurnRow]) -> dict[str, float]:
    """Return the mean of each figure over the replicas that logged it, added in the order of replicas."""
    means = {}
    for name in next((row.figures for row in rows if row.figures), {}):
        total, count = 0.0, 0
        for row in rows:
            if row.figures:
                total, count = total + float(row.figures[name]), count + 1
        means[name] = total / count
    return means


class Step:
    """One step of the job.

    Iterate over it for the turns of the replicas that this worker hosts: each turn gets its replica's batch, random
    state and buffers. After the loop `.grad` holds the average over all replicas, as DDP leaves it. A second iteration
    is a second synchronised backward of the same step, with the same batches.
    """

    def __init__(
        self, trainer: Trainer | Shadow, number: int, epoch: int, index: int, *, is_shadow: bool = False
    ) -> None:
        self._trainer = trainer
        self.is_shadow = is_shadow
        """Whether a new worker only warms up in this step, which does not count."""
        self.number = number
        """The number of steps before this one, in the whole job."""
        self.epoch = epoch
        self.index = index
        """The number of steps before this one in its epoch."""
        self._means: dict[str, float] = {}
        self._unread: list[Sequence[TurnRow]] = []
        """The turns of each pass whose figures nobody has read yet."""

    def add_figures(self, rows: Sequence[TurnRow]) -> None:
        """Add the figures that the turns of a pass have logged, in the order of replicas."""
        if any(row.figures for row in rows):
            self._unread.append(rows)

    @property
    def means(self) -> dict[str, float]:
        """The means of all figures that were logged."""
        for rows in self._unread:
            self._means |= means_of(rows)
        self._unread = []
        return self._means

    @property
    def replica(self) -> int:
        """The replica whose turn it is."""
        return self._trainer.current.running_turn("step.replica").replica

    def __iter__(self) -> Iterator[Any]:
        return self._trainer.turns(self)

    def log(self, **figures: Any) -> None:
        """Log figures of this replica's turn, such as its loss. `step["loss"]` is their mean over all replicas."""
        self._trainer.current.running_turn("step.log").log(figures)

    def skip(self) -> None:
        """Let this replica contribute nothing: zeros in place of its gradients."""
        self._trainer.skip_turn("step.skip()", Outcome.SKIPPED)

    def no_backward(self) -> None:
        """Take this turn without a backward: it looks at its batch, logs and keeps values. All replicas must do the same
        in this pass. `step[name]` is known afterwards, before the step's next pass."""
        self._trainer.skip_turn("step.no_backward()", Outcome.LOGGED)

    def keep(self, **values: Any) -> None:
        """Keep copies of values of this replica's turn, such as noise or generated images, for its turn in the next loop
        over this step. Another worker may host the replica then: tensors (without their graph), numbers, and lists and dicts of
        them can travel."""
        turn = self._trainer.current.running_turn("step.keep")
        copies = tree_map_only(torch.Tensor, lambda each: each.detach().clone(), values)
        state_tree.flatten(copies, "step.keep")  # refuses what could not travel, also where nothing has to
        turn.kept.update(copies)

    @property
    def kept(self) -> dict[str, Any]:
        """Copies of what this replica has kept in earlier loops over this step."""
        current = self._trainer.current
        kept = current.kept_by(current.running_turn("step.kept").replica)
        copies: dict[str, Any] = tree_map_only(torch.Tensor, torch.Tensor.clone, kept)  # the turn may be taken again
        return copies

    def __getitem__(self, name: str) -> float:
        """Return the mean of a logged figure over all replicas; the same on every worker. In a step that is taken back,
        which runs to its end without effect, it is not a number."""
        try:
            return self.means[name]
        except KeyError:
            if self._trainer.is_taken_back:
                return math.nan
            if not isinstance(name, str):
                raise TrainError(
                    f"step[{name!r}]: a step is no batch. Write `for x, y in step:` around forward and backward"
                ) from None
            known = ", ".join(self.means) or "nothing (figures are known after the loop over the step)"
            raise TrainError(f"step[{name!r}]: the turns of this step have logged {known}") from None


class Steps:
    """An iterator over steps. Where it begins in the middle of an epoch, as on a new worker or in a resumed job,
    `enumerate` of it counts on from there: `for i, step in enumerate(loader)` then has `i == step.index` everywhere."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._is_counting = False
        self._counted: int | None = 0
        """The steps that were yielded so far; None once that no longer matters."""

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if self._is_counting:
            return None
        step = next(self._steps)
        if step.is_shadow:
            self._counted = 1
        elif self._counted is not None:
            self._count_on(step.index - self._counted)
            self._counted = None
        return step

    def close(self) -> None:
        """Leave the loop over the steps, as `break` does."""
        if isinstance(self._steps, Generator):
            self._steps.close()

    def _count_on(self, steps: int) -> None:
        """Move the counters that count this iterator's steps: each counts what `next` returns to it."""
        if not steps:
            return
        counters = [each for each in gc.get_referrers(self) if type(each) is enumerate]
        if counters and steps < 0:
            raise MustBeReplaced(
                "this worker has warmed up for a job that begins again: another counts its steps from 0"
            )
        self._is_counting = True
        for counter in counters:
            for _ in range(steps):
                next(counter)
        self._is_counting = False
