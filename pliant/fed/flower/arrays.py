"""A model as Flower sends it, and as our aggregators take it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from pliant.errors import ConfigError
from pliant.fed.updates import Weights


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrays of a model: names, shapes and types, in their order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[torch.dtype, ...]
    buffers: frozenset[str]

    @classmethod
    def of(cls, arrays: ArrayRecord, buffers: Collection[str] = ()) -> Layout:
        """`buffers` are the names of those that are no parameters; arrays that are not of floats never are.

        Raises:
            ConfigError: there are no arrays, or a name of a buffer is not among them.
        """
        if not arrays:
            raise ConfigError("initial_arrays holds no arrays: give ArrayRecord(model.state_dict())")
        for name in buffers:
            if name not in arrays:
                raise ConfigError(f"buffer {name!r} is not among the arrays: use names of model.named_buffers()")
        values = {name: torch.from_numpy(np.array(each.numpy())) for name, each in arrays.items()}
        whole = {name for name, each in values.items() if not each.is_floating_point()}
        return cls(
            tuple(values),
            tuple(tuple(each.shape) for each in values.values()),
            tuple(each.dtype for each in values.values()),
            frozenset(buffers) | whole,
        )

    def fault(self, arrays: ArrayRecord) -> str:
        """What makes them another model's, without looking at a value; empty: nothing."""
        if set(arrays) != set(self.names):
            odd = sorted(set(arrays) ^ set(self.names))[0]
            return f"array {odd!r} is {'missing' if odd in self.names else 'not of this model'}"
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(arrays[name].shape) != shape:
                return f"array {name!r} is {list(arrays[name].shape)} instead of {list(shape)}"
        return ""

    def weights(self, arrays: ArrayRecord) -> Weights:
        """Their values, in the model's types. They must have no `fault`."""
        # copied: what NumPy has read of a message cannot be written to, and torch warns of that
        tensors = {
            name: torch.from_numpy(np.array(arrays[name].numpy())).to(kind)
            for name, kind in zip(self.names, self.types, strict=True)
        }
        return Weights(
            [each for name, each in tensors.items() if name not in self.buffers],
            [each for name, each in tensors.items() if name in self.buffers],
        )

    def arrays(self, weights: Weights) -> ArrayRecord:
        """The other way: all of them, in the model's order."""
        parameters, buffers = iter(weights.parameters), iter(weights.buffers)
        found = {name: next(buffers if name in self.buffers else parameters) for name in self.names}
        return ArrayRecord({name: Array(each.cpu().numpy()) for name, each in found.items()})
