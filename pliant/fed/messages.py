"""Messages between the coordinator of a federated job and its workers, and the connection that carries them.

A message is a JSON object with a `type`, and a payload of raw bytes for tensors. Nothing is ever unpickled. The layout of
a model travels with it once. The changes that come back lie in the layout that follows from it, so a result is a line or
two of numbers and raw bytes. Tensors that are read share memory with the payload: nothing is copied.

    worker                                coordinator
                                   <-     welcome: the job's config
    ready: fingerprint of its task ->
                                   <-     model, unit, cancel
    result, failed, leave          ->
                                   <-     over, refused
    beat                           <->    beat
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.errors import CommError, TrainError
from pliant.fed.work import Evaluation, Score, Trained, Training, Unit, UnitResult, Update, Weights

if TYPE_CHECKING:
    from pliant.channel import Channel
    from pliant.fed.data.task import Task

log = logging.getLogger(__name__)

PURPOSE = "federated worker"
"""What a worker tells the coordinator's port in the handshake that it is."""
ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, as torch aligns its own: kernels then compute the same bits."""
TYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                 torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


# --- the connection ---


class FedMessage(NamedTuple):
    """A message as it was received."""

    type: str
    body: dict[str, Any]
    payload: Tensor | None


class Connection:
    """A channel with a sending thread. Messages are queued; when there is nothing to send, a heartbeat is sent."""

    def __init__(self, channel: Channel, silence_s: float) -> None:
        """The other side counts as lost when it has sent nothing for `silence_s`."""
        self._silence_s = silence_s
        self._channel = channel
        self._channel.allocate = _aligned_memory
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Tensor | None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="pliant-fed-send", daemon=True)
        self._sender.start()

    def set_silence(self, silence_s: float) -> None:
        """Change after how much silence the other side counts as lost; heartbeats follow from it."""
        self._silence_s = silence_s
        self.send("beat")

    def allow(self, payload_bytes: int) -> None:
        """Accept payloads of up to this size; at first, none."""
        self._channel.max_payload_bytes = payload_bytes

    def send(self, type_: str, body: dict[str, Any] | None = None, payload: Tensor | None = None) -> None:
        """Queue a message. If the connection is lost, nothing happens: the receiving side notices."""
        self._outgoing.put(({"type": type_, **(body or {})}, payload))

    def receive(self) -> FedMessage | None:
        """Wait for the next message that is not a heartbeat; None if the connection was closed.

        Raises CommError if the other side is silent or lost, or sent what is no message.
        """
        while True:
            try:
                message = self._channel.receive(timeout_s=self._silence_s)
            except TimeoutError:
                raise Silent(f"silent for {self._silence_s:g} s") from None
            if message is None:
                return None
            type_ = message.body.get("type")
            if not isinstance(type_, str):
                raise CommError("it sent a message without a type: install one version everywhere")
            if type_ != "beat":
                payload = torch.frombuffer(message.payload, dtype=torch.uint8) if len(message.payload) else None
                return FedMessage(type_, message.body, payload)

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`. Nothing can be sent after it."""
        self._outgoing.put(None)
        self._sender.join(timeout_s)

    def close(self) -> None:
        """End the connection at once."""
        self._outgoing.put(None)
        self._channel.close()
        self._sender.join(1.0)

    def _send_all(self) -> None:
        while True:
            try:
                item = self._outgoing.get(timeout=min(1.0, self._silence_s / 4))
            except queue.Empty:
                item = {"type": "beat"}, None
            if item is None:
                return
            body, payload = item
            try:
                self._channel.send(body, b"" if payload is None or not payload.numel() else payload.numpy().data)
            except CommError:
                return  # whoever receives on this channel notices, and says why
            del item, body, payload  # a model may be large, and the next message far away


class Silent(CommError):
    """The other side has sent nothing for too long. It may live: stopped, or cut off."""


def _aligned_memory(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8).numpy().data


# --- models ---


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Type and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorLayout:
    """How the tensors of `Weights` lie in a payload: one after the other, each aligned."""

    parameters: tuple[TensorSlot, ...]
    buffers: tuple[TensorSlot, ...]

    @classmethod
    def of(cls, weights: Weights) -> TensorLayout:
        return cls(
            tuple(TensorSlot(each.dtype, tuple(each.shape)) for each in weights.parameters),
            tuple(TensorSlot(each.dtype, tuple(each.shape)) for each in weights.buffers),
        )

    @cached_property
    def change(self) -> TensorLayout:
        """The layout of the changes that `Weights.change_to` returns."""

        def changed(specs: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
            return tuple(
                each if each.dtype.is_floating_point else TensorSlot(torch.int64, each.shape) for each in specs
            )

        return TensorLayout(changed(self.parameters), changed(self.buffers))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Where each tensor begins and ends."""
        found, offset = [], 0
        for spec in self.parameters + self.buffers:
            found.append((offset, offset + spec.num_bytes))
            offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        return found

    @cached_property
    def num_bytes(self) -> int:
        return -(-self.places[-1][1] // ALIGNMENT) * ALIGNMENT if self.places else 0

    def to_json(self) -> list[list[list[Any]]]:
        return [
            [[str(spec.dtype).removeprefix("torch."), *spec.shape] for spec in specs]
            for specs in (self.parameters, self.buffers)
        ]

    @classmethod
    def from_json(cls, value: object) -> TensorLayout:
        """Raises CommError if `value` is not what `to_json` returns."""
        try:
            parameters, buffers = (
                tuple(TensorSlot(TYPES[name], tuple(map(int, shape))) for name, *shape in specs)
                for specs in value  # type: ignore[attr-defined]
            )
        except (TypeError, ValueError, KeyError) as error:
            raise CommError(f"the layout of a model is damaged: {error!r}") from None
        if any(size < 0 for spec in parameters + buffers for size in spec.shape):
            raise CommError("the layout of a model is damaged: a size below zero")
        return cls(parameters, buffers)

    def write(self, weights: Weights, payload: Tensor, begin: int = 0) -> None:
        """Copy `weights` into the payload; gaps become zeros, so that equal weights are equal bytes."""
        end = begin
        for tensor, (first, last) in zip(weights.all, self.places, strict=True):
            payload[end : begin + first].zero_()
            payload[begin + first : begin + last].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            end = begin + last
        payload[end : begin + self.num_bytes].zero_()

    def read(self, payload: Tensor, begin: int = 0) -> Weights:
        """Return the weights that lie there, in the same memory."""
        tensors = [
            payload[begin + first : begin + last].view(spec.dtype).view(spec.shape)
            for spec, (first, last) in zip(self.parameters + self.buffers, self.places, strict=True)
        ]
        return Weights(tensors[: len(self.parameters)], tensors[len(self.parameters) :])


def pack_model(weights: Weights) -> tuple[TensorLayout, Tensor]:
    """Return a model as layout and payload. Raises TrainError if one of its tensors has a type that cannot be sent."""
    layout = TensorLayout.of(weights)
    unknown = {spec.dtype for spec in layout.parameters + layout.buffers} - set(TYPES.values())
    if unknown:
        raise TrainError(f"tensors of {unknown.pop()} do not travel: use one of {', '.join(TYPES)}")
    payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.write(weights, payload)
    return layout, payload


def unpack_model(layout: TensorLayout, payload: Tensor | None) -> Weights:
    """Raises CommError if the payload has another size than the layout."""
    payload = torch.empty(0, dtype=torch.uint8) if payload is None else payload
    if payload.numel() != layout.num_bytes:
        raise CommError(f"a model of {layout.num_bytes} bytes came as {payload.numel()}")
    return layout.read(payload)


def fingerprint(task: Task) -> str:
    """Return a digest of what must be equal on all workers: who owns which samples, the labels, the initial model."""
    digest = hashlib.sha256()
    for array in (task.sizes, task.partition.order, task.train.labels.numpy(), task.test.labels.numpy()):
        digest.update(np.ascontiguousarray(array).tobytes())
    layout, payload = pack_model(Weights.of(task.model()))
    digest.update(json.dumps(layout.to_json()).encode())
    digest.update(payload.numpy().data)
    return digest.hexdigest()


# --- units and results ---


def unit_to_json(unit: Unit) -> dict[str, Any]:
    if isinstance(unit, Evaluation):
        return {"begin": unit.begin, "end": unit.end}
    return {"round": unit.round_number, "clients": unit.clients, "steps": unit.steps, "lr": unit.lr}


def unit_from_json(value: dict[str, Any]) -> Unit:
    """Raises CommError if `value` is not what `unit_to_json` returns."""
    try:
        if "begin" in value:
            return Evaluation(int(value["begin"]), int(value["end"]))
        clients, steps = tuple(map(int, value["clients"])), tuple(map(int, value["steps"]))
        return Training(int(value["round"]), clients, steps, float(value["lr"]))
    except (TypeError, ValueError, KeyError) as error:
        raise CommError(f"a unit is damaged: {error!r}") from None


def result_bytes(unit: Unit, layout: TensorLayout) -> int:
    """Return the size of the payload of a unit's result."""
    return layout.change.num_bytes * len(unit.clients) if isinstance(unit, Training) else 0


def result_to_json(result: UnitResult, model: TensorLayout) -> tuple[dict[str, Any], Tensor | None]:
    """Return a unit's result as body and payload. Raises TrainError if a change does not fit `model`."""
    if isinstance(result, Score):
        return {"score": [result.samples, result.correct, result.correct_in_5, result.loss]}, None
    layout = model.change
    payload = torch.empty(layout.num_bytes * len(result), dtype=torch.uint8)
    for place, each in enumerate(result):
        _check_change(each.update, layout)
        layout.write(each.update.change, payload, place * layout.num_bytes)
    figures = [[t.update.client, t.update.samples, t.update.loss, t.update.version, t.utility] for t in result]
    return {"trained": figures}, payload


def _check_change(update: Update, layout: TensorLayout) -> None:
    if TensorLayout.of(update.change) != layout:
        raise TrainError(f"the change of client {update.client} has tensors of other shapes or types than the model's")


def result_from_json(body: dict[str, Any], payload: Tensor | None, unit: Unit, model: TensorLayout) -> UnitResult:
    """Raises CommError if this is not a result of `unit`."""
    num_bytes = 0 if payload is None else payload.numel()
    if num_bytes != result_bytes(unit, model):
        raise CommError(f"a result has {num_bytes} bytes instead of {result_bytes(unit, model)}")
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
