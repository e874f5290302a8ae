"""Copies of a model's parameters in flat memory, to be summed over the workers or fetched by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from pliant.comm.engine import Engine
from pliant.train.gradients.layout import Item, first_layout


@dataclass(slots=True, eq=False)
class Copies:
    """Copies of some parameters, side by side in flat memory."""

    flat: torch.Tensor
    parameters: list[torch.Tensor]
    views: list[torch.Tensor]

    def take(self) -> None:
        torch._foreach_copy_(self.views, self.parameters)

    def draw(self, weight: float) -> None:
        """Draw the parameters towards what is here."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            other = view.to(parameter.device)
            if other.dtype == parameter.dtype:
                parameter.lerp_(other, weight)
            else:
                parameter.copy_(parameter.to(other.dtype).lerp_(other, weight))


def copies_to_sum(parameters: Sequence[Parameter], engine: Engine) -> list[Copies]:
    """In pieces like those of gradients, so that the first is under way while the next is copied."""
    kinds = [(_summed_as(parameter.dtype), parameter.device) for parameter in parameters]
    items = [Item(kind, p.numel() * kind[0].itemsize) for p, kind in zip(parameters, kinds, strict=True)]
    made = []
    for indices in first_layout(items, find_unused=True).buckets:
        dtype, device = kinds[indices[0]]
        members = [parameters[index] for index in indices]
        length = sum(parameter.numel() for parameter in members)
        flat = torch.empty(length, dtype=dtype, device=device) if device.type != "cpu" else engine.empty(length, dtype)
        made.append(Copies(flat, list(members), _cut(flat, members)))
    return made


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    """A mean of models in 8 or 11 bits would move them further than many a gradient."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def copies_to_fetch(parameters: Sequence[Parameter]) -> Copies:
    """As one run of bytes: whoever fetches it has a model of one step."""
    members = sorted(parameters, key=lambda parameter: -parameter.element_size())  # so that each is aligned
    flat = torch.empty(sum(parameter.nbytes for parameter in members), dtype=torch.uint8)
    views, offset = [], 0
    for parameter in members:
        views.append(flat[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape))
        offset += parameter.nbytes
    return Copies(flat, list(members), views)


def _cut(flat: torch.Tensor, parameters: Sequence[Parameter]) -> list[torch.Tensor]:
    views, offset = [], 0
    for parameter in parameters:
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    return views
