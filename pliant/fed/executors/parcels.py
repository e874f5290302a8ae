"""Models, units and results as bodies and payloads of frames (`wire`), and back.

A model's `TensorLayout` travels with it once; the changes that come back lie in the layout that follows from it, so a result is
numbers of a line or two and raw bytes. What is read shares memory with what was received: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pliant.errors import CommError, TrainError
from pliant.fed.work import Evaluation, Score, Trained, Training, Unit, UnitResult, Update, Weights, check_alike

ALIGNMENT = 64
"""As torch aligns its own memory: what is computed from tensors must not depend on where they came from."""
TYPES = {
    str(each).removeprefix("torch."): each
    for each in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorLayout:
    """How the tensors of `Weights` lie in a payload: one after the other, each aligned."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]

    @classmethod
    def of(cls, weights: Weights) -> TensorLayout:
        return cls(
            tuple(Slot(each.dtype, tuple(each.shape)) for each in weights.parameters),
            tuple(Slot(each.dtype, tuple(each.shape)) for each in weights.buffers),
        )

    @cached_property
    def change(self) -> TensorLayout:
        """Of `Weights.change_to`."""

        def changed(slots: Sequence[Slot]) -> tuple[Slot, ...]:
            return tuple(slot if slot.dtype.is_floating_point else Slot(torch.int64, slot.shape) for slot in slots)

        return TensorLayout(changed(self.parameters), changed(self.buffers))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Where each tensor begins and ends."""
        found, offset = [], 0
        for slot in self.parameters + self.buffers:
            found.append((offset, offset + slot.num_bytes))
            offset += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
        return found

    @cached_property
    def num_bytes(self) -> int:
        return -(-self.places[-1][1] // ALIGNMENT) * ALIGNMENT if self.places else 0

    def to_json(self) -> list[list[list[Any]]]:
        return [
            [[str(slot.dtype).removeprefix("torch."), *slot.shape] for slot in slots]
            for slots in (self.parameters, self.buffers)
        ]

    @classmethod
    def from_json(cls, value: object) -> TensorLayout:
        try:
            parameters, buffers = (
                tuple(Slot(TYPES[name], tuple(map(int, shape))) for name, *shape in slots)
                for slots in value  # type: ignore[attr-defined]
            )
        except (TypeError, ValueError, KeyError) as error:
            raise CommError(f"the layout of a model is damaged: {error!r}") from None
        if any(size < 0 for slot in parameters + buffers for size in slot.shape):
            raise CommError("the layout of a model is damaged: a size below zero")
        return cls(parameters, buffers)

    def write(self, weights: Weights, payload: Tensor, begin: int = 0) -> None:
        """Put `weights` there; gaps become zeros, so that equal weights are equal bytes."""
        end = begin
        for tensor, (first, last) in zip(weights.all, self.places, strict=True):
            payload[end : begin + first].zero_()
            payload[begin + first : begin + last].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            end = begin + last
        payload[end : begin + self.num_bytes].zero_()

    def read(self, payload: Tensor, begin: int = 0) -> Weights:
        """The weights that lie there, in the same memory."""
        tensors = [
            payload[begin + first : begin + last].view(slot.dtype).view(slot.shape)
            for slot, (first, last) in zip(self.parameters + self.buffers, self.places, strict=True)
        ]
        return Weights(tensors[: len(self.parameters)], tensors[len(self.parameters) :])


def packed(weights: Weights) -> tuple[TensorLayout, Tensor]:
    """A model as layout and payload.

    Raises:
        TrainError: one of its tensors is of a type that does not travel.
    """
    layout = TensorLayout.of(weights)
    strange = {slot.dtype for slot in layout.parameters + layout.buffers} - set(TYPES.values())
    if strange:
        raise TrainError(f"tensors of {strange.pop()} do not travel: use one of {', '.join(TYPES)}")
    payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.write(weights, payload)
    return layout, payload


def unpacked(layout: TensorLayout, payload: Tensor | None) -> Weights:
    payload = torch.empty(0, dtype=torch.uint8) if payload is None else payload
    if payload.numel() != layout.num_bytes:
        raise CommError(f"a model of {layout.num_bytes} bytes came as {payload.numel()}")
    return layout.read(payload)


def unit_to_json(unit: Unit) -> dict[str, Any]:
    if isinstance(unit, Evaluation):
        return {"begin": unit.begin, "end": unit.end}
    return {"round": unit.round_number, "clients": unit.clients, "steps": unit.steps, "lr": unit.lr}


def unit_from_json(value: dict[str, Any]) -> Unit:
    try:
        if "begin" in value:
            return Evaluation(int(value["begin"]), int(value["end"]))
        clients, steps = tuple(map(int, value["clients"])), tuple(map(int, value["steps"]))
        return Training(int(value["round"]), clients, steps, float(value["lr"]))
    except (TypeError, ValueError, KeyError) as error:
        raise CommError(f"a unit is damaged: {error!r}") from None


def done_bytes(unit: Unit, layout: TensorLayout) -> int:
    """The payload of a unit's result."""
    return layout.change.num_bytes * len(unit.clients) if isinstance(unit, Training) else 0


def done_to_json(done: UnitResult, model: TensorLayout) -> tuple[dict[str, Any], Tensor | None]:
    """A unit's result.

    Raises:
        TrainError: a change is not one of `model`.
    """
    if isinstance(done, Score):
        return {"score": [done.samples, done.correct, done.correct_in_5, done.loss]}, None
    layout = model.change
    payload = torch.empty(layout.num_bytes * len(done), dtype=torch.uint8)
    for place, each in enumerate(done):
        _check(each.update, layout)
        layout.write(each.update.change, payload, place * layout.num_bytes)
    figures = [[t.update.client, t.update.samples, t.update.loss, t.update.version, t.utility] for t in done]
    return {"trained": figures}, payload


def _check(update: Update, layout: TensorLayout) -> None:
    if TensorLayout.of(update.change) != layout:
        expected = Weights(
            [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in layout.parameters],
            [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in layout.buffers],
        )
        check_alike(expected, update.change, f"the change of client {update.client}")
        raise TrainError(f"the change of client {update.client} has tensors of other types than the model's")


def done_from_json(body: dict[str, Any], payload: Tensor | None, unit: Unit, model: TensorLayout) -> UnitResult:
    """Raises CommError where this is not a result of `unit`."""
    num_bytes = 0 if payload is None else payload.numel()
    if num_bytes != done_bytes(unit, model):
        raise CommError(f"a result has {num_bytes} bytes instead of {done_bytes(unit, model)}")
    try:
        if isinstance(unit, Evaluation):
            samples, correct, in_5, loss = body["score"]
            return Score(int(samples), int(correct), int(in_5), float(loss))
        figures = body["trained"]
        clients = tuple(int(each[0]) for each in figures)
        if clients != unit.clients:
            raise CommError(f"a result is of clients {clients[:5]} instead of {unit.clients[:5]}")
        layout = model.change
        whole = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        return tuple(
            Trained(
                Update(int(c), layout.read(whole, i * layout.num_bytes), float(samples), float(loss), int(version)),
                float(utility),
            )
            for i, (c, samples, loss, version, utility) in enumerate(figures)
        )
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise CommError(f"a result is damaged: {error!r}") from None
