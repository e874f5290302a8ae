"""How parameters lie side by side in a flat tensor: each in the order that it has in its own memory, as in DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cut(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Each parameter's view of a flat tensor, in the memory order of the parameter, as DDP lays them out."""
    views, offset = [], 0
    for parameter in parameters:
        if _is_dense(parameter):
            views.append(flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset))
        else:
            views.append(flat[offset : offset + parameter.numel()].view(parameter.size()))
        offset += parameter.numel()
    return views


def in_memory_order(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a flat tensor, in the order in which the parameter lies in memory."""
    if not _is_dense(parameter) or gradient.is_sparse:
        return gradient.to_dense().reshape(-1) if gradient.is_sparse else gradient.reshape(-1)
    flat = torch.empty(parameter.numel(), dtype=gradient.dtype, device=gradient.device)
    if gradient.stride() == parameter.stride():
        return gradient.as_strided((parameter.numel(),), (1,))
    flat.as_strided(parameter.size(), parameter.stride()).copy_(gradient)
    return flat


def _is_dense(parameter: torch.nn.Parameter) -> bool:
    """Whether its elements fill a run of memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
