"""How a server folds its clients' updates into the next model, with bits that do not depend on who computed what.

Updates are folded strictly in the order of the clients' numbers, whenever and from wherever they came, in float64.
Products are rounded before they are added: whether a multiply-add is fused depends on the processor. So neither threads
nor the machine change a bit. What is a mean keeps one model's worth of memory, however many clients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from pliant.errors import ConfigError, TrainError
from pliant.fed.updates import Update, Weights, check_alike, moved


class Aggregator(ABC):
    """A round is `begin`, an `add` for each update in the order of clients, and `finish`; or `aggregate` for all at once."""

    name: ClassVar[str]
    averages: ClassVar[bool] = True
    """Whether the result is the (weighted) mean of all updates, to which noise on the sum means what it says."""

    def __init__(self) -> None:
        self.left_out: dict[int, str] = {}
        """Clients of the last round whose updates could not be used, and why."""
        self._model: Weights | None = None
        self._last: tuple[int, int] | None = None

    def aggregate(self, model: Weights, updates: Iterable[Update]) -> Weights:
        """The next model. The order of `updates` makes no difference; nothing given is changed."""
        self.begin(model)
        for update in sorted(updates, key=_place):
            self.add(update)
        return self.finish()

    def begin(self, model: Weights) -> None:
        for each in model.all:
            if each.is_complex():
                raise ConfigError("a model with complex parameters cannot be aggregated: hold real and imaginary parts")
        self.left_out, self._model, self._last = {}, model, None
        self._begin()

    def add(self, update: Update) -> None:
        """Fold one update, or leave it out where it holds what is no number: one such client would ruin all.

        Its tensors must stay as they are until `finish`: some aggregators hold them.

        Raises:
            TrainError: not in the order of clients, twice the same one, or tensors of another model.
        """
        model = self._begun()
        check_alike(model, update.change, f"the update of client {update.client}")
        if self._last is not None and _place(update) <= self._last:
            raise TrainError(f"client {update.client} after client {self._last[0]}: add each once, in ascending order")
        self._last = _place(update)
        why = self._useless(update)
        if why:
            self.left_out[update.client] = why
        else:
            self._add(update)

    def finish(self) -> Weights:
        """The next model; the present one, if no update could be used."""
        model, self._model = self._begun(), None
        return self._finish(model)

    def state_dict(self) -> dict[str, object]:
        """All that the next round depends on beside the model: strings, numbers, and lists of tensors."""
        if self._model is not None:
            raise TrainError("the state of an aggregator is whole between rounds only: finish this one first")
        return {"aggregator": self.name}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from there.

        Raises:
            ConfigError: it is the state of another aggregator.
        """
        if state.get("aggregator") != self.name:
            raise ConfigError(
                f"this is the state of {state.get('aggregator')!r}, not of {self.name!r}: resume with the aggregator it came from"
            )
        self._model, self._last, self.left_out = None, None, {}

    def _useless(self, update: Update) -> str:
        if not (update.samples > 0 and math.isfinite(update.samples)):
            return f"its number of samples is {update.samples}"
        if not all(bool(torch.isfinite(each).all()) for each in update.change.all if each.is_floating_point()):
            return "it holds values that are not finite"
        return ""

    def _begun(self) -> Weights:
        if self._model is None:
            raise TrainError("no round has begun: call begin(model) first")
        return self._model

    @abstractmethod
    def _begin(self) -> None: ...
    @abstractmethod
    def _add(self, update: Update) -> None: ...
    @abstractmethod
    def _finish(self, model: Weights) -> Weights: ...


def _place(update: Update) -> tuple[int, int]:
    return update.client, update.version


class FedAvg(Aggregator):
    """The mean of the clients' models, weighted by their samples (McMahan et al. 2017), or evenly."""

    name = "fed-avg"

    def __init__(self, *, even: bool = False, lr: float = 1.0) -> None:
        """With `lr` other than 1 the server goes that part of the way."""
        super().__init__()
        check_positive("lr", lr)
        self.even, self.lr = even, lr

    def _begin(self) -> None:
        self._sum: list[Tensor] = []
        self._total = 0.0

    def _add(self, update: Update) -> None:
        self._fold(update, self._weight(update))
        self._total += self._share(update)

    def _fold(self, update: Update, weight: float) -> None:
        model = self._begun()
        if not self._sum:
            self._sum = [torch.zeros_like(each, dtype=torch.float64) for each in model.all]
        for total, change in zip(self._sum, update.change.all, strict=True):
            # Two operations: `add_(alpha=)` is one on some processors.
            total += change.to(total) * weight

    def _weight(self, update: Update) -> float:
        return 1.0 if self.even else update.samples

    def _share(self, update: Update) -> float:
        """What the update adds to the divisor."""
        return self._weight(update)

    def _finish(self, model: Weights) -> Weights:
        if not self._sum:
            return model.clone()
        change = [each / self._total for each in self._sum]
        self._sum = []
        count = len(model.parameters)
        step = self._step(change[:count])
        return Weights(
            [moved(old, new) for old, new in zip(model.parameters, step, strict=True)],
            [moved(old, new) for old, new in zip(model.buffers, change[count:], strict=True)],
        )

    def _step(self, mean: list[Tensor]) -> list[Tensor]:
        """How far the parameters go, given the mean of their changes."""
        return mean if self.lr == 1 else [each * self.lr for each in mean]


def tensors_of(state: dict[str, object], name: str) -> list[Tensor]:
    found = state.get(name)
    if not isinstance(found, list) or not all(isinstance(each, Tensor) for each in found):
        raise ConfigError(
            f"the aggregator's state has no list of tensors {name!r}: it is damaged, or of another version"
        )
    return found


def check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value}: use a number above 0")
