"""What parameters and optimizers were before updates that may have to be taken back.

Only what is updated before all sums of its step are here has to be kept; `crossing` says which that is, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from pliant.train.priority.partial_step import Groups, options_of


@dataclass(slots=True)
class Before:
    """A parameter and its optimizer state before an update that may have to be taken back."""

    parameter: Parameter
    values: torch.Tensor
    states: list[tuple[torch.optim.Optimizer, dict[str, Any] | None]]


class Kept:
    """The way back to where a step began."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._before: list[Before] = []
        self._states: list[tuple[torch.optim.Optimizer, Any]] = []
        """The optimizers' whole states, as objects: the program may put another in its place."""
        self._options: list[tuple[torch.optim.Optimizer, Groups]] = []
        """Of all groups, when backward was over."""

    def begin(self) -> None:
        """Backward is over: what is updated from now on may have to be taken back."""
        self.clear()
        self._options = [(optimizer, options_of(optimizer)) for optimizer in self._optimizers]

    def keep_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer steps now, with this state."""
        self._states.append((optimizer, optimizer.state))

    def keep(self, parameter: Parameter) -> None:
        """As it is, with whatever optimizers know of it: it may be updated at once, or by the program itself."""
        states = []
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter)
            kept = None if state is None else {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
            }  # fmt: skip
            states.append((optimizer, kept))
        self._before.append(Before(parameter, parameter.detach().clone(), states))

    def put_back(self) -> None:
        """Everything is as it was when backward was over."""
        for optimizer, state in self._states:
            optimizer.state = state
        with torch.no_grad():
            for before in reversed(self._before):
                before.parameter.copy_(before.values)
                for optimizer, of_parameter in before.states:
                    if of_parameter is None:
                        optimizer.state.pop(before.parameter, None)
                    else:
                        optimizer.state[before.parameter] = of_parameter
        for optimizer, groups in self._options:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        self.clear()

    def clear(self) -> None:
        """Nothing has to be taken back any more."""
        self._before.clear()
        self._states.clear()
        self._options.clear()
