"""A cheap sign of whether a program has touched parameters and optimizer states since they were loaded."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pliant.train.state_parts import StatePart, checksum_of

SAMPLE = 64
"""The most elements of a parameter that are compared."""


class StateSign:
    """What parameters and optimizer states were like at one moment, without a copy of them.

    Tensors count how often they were written to, but not what is written through `.data` (or `.numpy()`). So some elements
    of each parameter are compared as well; that finds what programs usually do there. The guard finds the rest in the first
    step of the view: it compares everything, and ends the job with an error. Where there is no guard, pass `is_thorough`:
    then all bytes are read here.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_thorough: bool = False,
    ) -> None:
        parameters = [parameter for model in models for parameter in model.parameters()]
        states = [optimizer.state for optimizer in optimizers]
        self._writes = [_sign(parameters), *(_sign(list(state.values())) for state in states)]
        self._samples = _samples(parameters)
        self._checksum = 0
        if is_thorough:
            tensors = [*parameters, *_tensors([list(state.values()) for state in states])]
            self._checksum = checksum_of(StatePart("", "", tensor) for tensor in tensors)

    def is_same(self, other: StateSign) -> bool:
        return (
            self._writes == other._writes
            and self._checksum == other._checksum
            and len(self._samples) == len(other._samples)
            and all(map(torch.equal, self._samples, other._samples))
        )


def _sign(value: Any) -> Any:
    """Return what changes when a tensor in `value` is replaced or written to, or when a number is changed."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value._version
    if isinstance(value, Mapping):
        return [(key, _sign(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_sign(each) for each in value]
    if isinstance(value, float):  # by its bits: NaN is not equal to itself, but 0.0 is to -0.0
        return struct.pack("<d", value)
    return (type(value), value) if isinstance(value, int | str | None) else repr(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _samples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return bytes of some elements of each tensor, from all over its memory: one tensor for each device and type."""
    found: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        size = tensor.numel()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        if 0 < size <= room:
            count = min(size, SAMPLE)
            found[tensor.device, tensor.dtype].append(tensor.detach().as_strided((count,), (size // count,)))
    return [torch.cat(samples).view(torch.uint8) for samples in found.values()]
