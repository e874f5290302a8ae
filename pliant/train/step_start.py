"""The state with which a step began, for a step that may have to be taken back.

With deferred updates a worker goes on before all sums of its last step are here. If they never come, the step is done again
from its beginning, here and on workers that fetch the state of its beginning. Parameters and optimizer states are kept by
`DeferredUpdates`, which knows the few that were changed; everything else is kept here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pliant.train.context import ReplicaContext
from pliant.train.events import Progress
from pliant.train.job_state import JobState
from pliant.train.pending import ParameterGroups, options_of
from pliant.train.replicas import Tensors


@dataclass(frozen=True, slots=True)
class StepStart:
    """What the program may change in a step, as it was when the step began."""

    progress: Progress
    contexts: list[ReplicaContext]
    buffers: Tensors
    """Those of replica 0."""
    adaptation: dict[str, Any]
    tracked: dict[str, Any]
    options: list[ParameterGroups]
    """The options of each optimizer's groups: the program may change them before its first pass."""
    gradients: list[Sequence[torch.Tensor | None] | None] = field(default_factory=list)
    """With which the turns of each reducer began."""

    @classmethod
    def of(cls, state: JobState) -> StepStart:
        """Return copies of all that may change."""
        return cls(
            replace(state.progress),
            state.replicas.contexts,
            state.first_buffers,
            copy.deepcopy(state.adaptation.state_dict()) if state.adaptation.is_active else {},
            {name: copy.deepcopy(each.state_dict()) for name, each in state.tracked.items()},
            [options_of(optimizer) for optimizer in state.optimizers],
        )

    def to_lend(self) -> dict[str, Any]:
        """Return what a worker that fetches the state gets in place of the present one."""
        return {
            "tracked": self.tracked,
            "buffers": self.buffers,
            "contexts": self.contexts,
            "options": self.options,
            "adaptation": self.adaptation,
        }

    def restore(self, state: JobState) -> None:
        """Go back to this state."""
        state.progress.set(self.progress)
        state.replicas.contexts = self.contexts
        state.use_first_buffers(self.buffers)
        if self.adaptation:
            state.adaptation.load_state_dict(self.adaptation)
        for reducer, gradients in zip(state.reducers, self.gradients, strict=True):
            reducer.carry(gradients)
        for name, saved in self.tracked.items():
            state.tracked[name].load_state_dict(saved)
        for optimizer, groups in zip(state.optimizers, self.options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
