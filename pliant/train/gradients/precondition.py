"""What Adam divides gradients by: with it, the noise scale is that of the updates which Adam makes of them.

The denominators are those of the last update, for a step's parts and for its sum alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.errors import ConfigError


class Denominators:
    """sqrt(v) + eps of each parameter, from the state of the optimizers; nothing where they are not like Adam."""

    def __init__(self, owners: Sequence[tuple[torch.optim.Optimizer, dict[str, Any]] | None], parameters: Any) -> None:
        self._owners, self._parameters = owners, parameters
        self.are_used = any(owner is not None for owner in owners)

    @classmethod
    def of(
        cls,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.nn.Parameter],
        wanted: bool | None,
    ) -> Denominators:
        """Raises ConfigError if they are wanted of an optimizer that has none."""
        alike = bool(optimizers) and all(_is_adam(optimizer) for optimizer in optimizers)
        if wanted and not alike:
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
            raise ConfigError(f"adam=True, but {names} keeps no running mean of squares: leave it out")
        owners: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        if alike and wanted is not False:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    owners |= {id(parameter): (optimizer, group) for parameter in group["params"]}
        return cls([owners.get(id(parameter)) for parameter in parameters], parameters)

    def of_parameter(self, index: int, like: torch.Tensor) -> torch.Tensor | None:
        """Flat, in the memory order of the parameter; None if there is none, as before the first update."""
        owner = self._owners[index]
        if owner is None:
            return None
        optimizer, group = owner
        parameter = self._parameters[index]
        state = optimizer.state.get(parameter, {})
        squares = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if squares is None:
            return None
        correction = 1 - group["betas"][1] ** float(state["step"])
        dense = squares.stride() == parameter.stride()
        flat = squares.as_strided((squares.numel(),), (1,)) if dense else squares.reshape(-1)
        found: torch.Tensor = (flat.to(like) / correction).sqrt_().add_(group["eps"])
        # What has never had a gradient would be divided by eps alone, and nothing else would count beside it.
        return found.masked_fill_(flat == 0, torch.inf)


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    name = type(optimizer).__name__
    return name in ("Adam", "AdamW", "NAdam", "RAdam") and all(
        {"betas", "eps"} <= group.keys() for group in optimizer.param_groups
    )
