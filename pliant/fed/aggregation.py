"""Aggregators by name: how a server makes the next model from its clients' updates. The bits do not depend on who computed what.

Updates are added strictly in the order of the clients' numbers, in float64, whenever and from wherever they came. Products
are rounded before they are added, because some processors fuse multiply and add. So neither threads nor the machine change
a bit. Aggregators that take a mean need the memory of one model, however many clients there are.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError, TrainError
from pliant.fed.work import Update, Weights, check_alike, move_tensor, sum_of_squares


class Aggregator(ABC):
    """Base class. A round is `begin`, one `add` per update in the order of clients, and `finish`; `aggregate` does all of it."""

    name: ClassVar[str]
    averages: ClassVar[bool] = True
    """Whether the result is the (weighted) mean of all updates, so that noise on the sum protects each client."""

    def __init__(self) -> None:
        self.left_out: dict[int, str] = {}
        """Clients of the last round whose updates could not be used, with the reason."""
        self._model: Weights | None = None
        self._last: tuple[int, int] | None = None

    def aggregate(self, model: Weights, updates: Iterable[Update]) -> Weights:
        """Return the next model. The order of `updates` makes no difference; nothing given is changed."""
        self.begin(model)
        for update in sorted(updates, key=_order_key):
            self.add(update)
        return self.finish()

    def begin(self, model: Weights) -> None:
        for each in model.all:
            if each.is_complex():
                raise ConfigError("a model with complex parameters cannot be aggregated: hold real and imaginary parts")
        self.left_out, self._model, self._last = {}, model, None
        self._begin()

    def add(self, update: Update) -> None:
        """Add one update, or leave it out if it holds values that are not finite: one such client would ruin the model.

        The update's tensors must not change until `finish`: some aggregators keep them.

        Raises TrainError if it is out of order, the client's second one, or of another model.
        """
        model = self._current_model()
        check_alike(model, update.change, f"the update of client {update.client}")
        if self._last is not None and _order_key(update) <= self._last:
            raise TrainError(f"client {update.client} after client {self._last[0]}: add each once, in ascending order")
        self._last = _order_key(update)
        why = self._why_unusable(update)
        if why:
            self.left_out[update.client] = why
        else:
            self._add(update)

    def finish(self) -> Weights:
        """Return the next model, or the present one if no update could be used."""
        model, self._model = self._current_model(), None
        return self._finish(model)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next round depends on besides the model: strings, numbers, and lists of tensors."""
        if self._model is not None:
            raise TrainError("the state of an aggregator is whole between rounds only: finish this one first")
        return {"aggregator": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if state.get("aggregator") != self.name:
            raise ConfigError(
                f"this is the state of {state.get('aggregator')!r}, not of {self.name!r}: resume with the aggregator it came from"
            )
        self._model, self._last, self.left_out = None, None, {}

    def _why_unusable(self, update: Update) -> str:
        if not (update.samples > 0 and math.isfinite(update.samples)):
            return f"its number of samples is {update.samples}"
        if not all(bool(torch.isfinite(each).all()) for each in update.change.all if each.is_floating_point()):
            return "it holds values that are not finite"
        return ""

    def _current_model(self) -> Weights:
        if self._model is None:
            raise TrainError("no round has begun: call begin(model) first")
        return self._model

    @abstractmethod
    def _begin(self) -> None: ...
    @abstractmethod
    def _add(self, update: Update) -> None: ...
    @abstractmethod
    def _finish(self, model: Weights) -> Weights: ...


def _order_key(update: Update) -> tuple[int, int]:
    return update.client, update.version


class FedAvg(Aggregator):
    """The mean of the clients' models, weighted by their samples (McMahan et al. 2017), or evenly."""

    name = "fed-avg"

    def __init__(self, *, even: bool = False, lr: float = 1.0) -> None:
        """With `lr` other than 1 the server goes only this part of the way."""
        super().__init__()
        check_positive("lr", lr)
        self.even, self.lr = even, lr

    def _begin(self) -> None:
        self._sum: list[Tensor] = []
        self._total = 0.0

    def _add(self, update: Update) -> None:
        self._add_weighted(update, self._weight(update))
        self._total += self._weight(update)

    def _add_weighted(self, update: Update, weight: float) -> None:
        model = self._current_model()
        if not self._sum:
            self._sum = [torch.zeros_like(each, dtype=torch.float64) for each in model.all]
        for total, change in zip(self._sum, update.change.all, strict=True):
            # Two operations: `add_(alpha=)` is fused on some processors.
            total += change.to(total) * weight

    def _weight(self, update: Update) -> float:
        return 1.0 if self.even else update.samples

    def _finish(self, model: Weights) -> Weights:
        if not self._sum:
            return model.clone()
        change = [each / self._total for each in self._sum]
        self._sum = []
        count = len(model.parameters)
        step = self._step(change[:count])
        return Weights(
            [move_tensor(old, new) for old, new in zip(model.parameters, step, strict=True)],
            [move_tensor(old, new) for old, new in zip(model.buffers, change[count:], strict=True)],
        )

    def _step(self, mean: list[Tensor]) -> list[Tensor]:
        """Return the step of the parameters, given the mean of their changes."""
        return mean if self.lr == 1 else [each * self.lr for each in mean]


def check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value}: use a number above 0")


STACK_ELEMENTS = 1 << 24
"""Elements that are sorted at once. Larger tensors are sorted in pieces, to save memory."""


class _Held(Aggregator):
    averages: ClassVar[bool] = False

    def _begin(self) -> None:
        self._updates: list[Update] = []

    def _add(self, update: Update) -> None:
        self._updates.append(update)

    def _finish(self, model: Weights) -> Weights:
        updates, self._updates = self._updates, []
        return self._combine(model, updates) if updates else model.clone()

    @abstractmethod
    def _combine(self, model: Weights, updates: list[Update]) -> Weights:
        """Return the next model; there is at least one update."""


class _Coordinates(_Held):
    """Base class of aggregators that take each coordinate by itself, from its sorted values; parameters and buffers alike."""

    def _combine(self, model: Weights, updates: list[Update]) -> Weights:
        low, high = self._kept(len(updates))

        def new(old: Tensor, changes: list[Tensor]) -> Tensor:
            return move_tensor(old, _middle(old, changes, low, high))

        return Weights(
            [new(old, [each.change.parameters[i] for each in updates]) for i, old in enumerate(model.parameters)],
            [new(old, [each.change.buffers[i] for each in updates]) for i, old in enumerate(model.buffers)],
        )

    @abstractmethod
    def _kept(self, count: int) -> tuple[int, int]:
        """Return the range of sorted values whose mean is taken."""


def _middle(like: Tensor, changes: list[Tensor], low: int, high: int) -> Tensor:
    """Return the mean of the sorted values from `low` to `high` of each coordinate, added up from the lowest."""
    flat = [each.reshape(-1).to(like.device) for each in changes]
    result = torch.empty(like.numel(), dtype=torch.float64, device=like.device)
    piece = max(1, STACK_ELEMENTS // len(flat))
    for begin in range(0, like.numel(), piece):
        ranked = _sort_columns(torch.stack([each[begin : begin + piece] for each in flat]))
        total = torch.zeros(ranked.shape[1], dtype=torch.float64, device=like.device)
        for place in range(low, high):
            total += ranked[place]
        result[begin : begin + piece] = total / (high - low)
    return result.reshape(like.shape)


def _sort_columns(rows: Tensor) -> Tensor:
    """Sort each column. On the CPU NumPy does it: seven times as fast as torch for a thousand rows."""
    if rows.device.type != "cpu":
        return rows.sort(dim=0).values
    plain = rows.to(torch.float32) if rows.dtype in (torch.float16, torch.bfloat16) else rows
    return torch.from_numpy(np.sort(plain.numpy(), axis=0))


class TrimmedMean(_Coordinates):
    """The mean without the share `trim` of values at either end (Yin et al. 2018); tolerates that share of malicious clients."""

    name = "trimmed-mean"

    def __init__(self, *, trim: float = 0.2) -> None:
        super().__init__()
        if not 0 <= trim < 0.5:
            raise ConfigError(f"trim={trim}: use 0 or more, less than 0.5, of the clients at either end")
        self.trim = trim

    def _kept(self, count: int) -> tuple[int, int]:
        # 0.2 of 15 is 3, though 0.2 * 15 may be a little less than that.
        cut = int(self.trim * count + 1e-9)
        return cut, count - cut


class Median(_Coordinates):
    """The middle value; for an even number of updates, the mean of the two in the middle."""

    name = "median"

    def __init__(self) -> None:
        super().__init__()

    def _kept(self, count: int) -> tuple[int, int]:
        return (count - 1) // 2, count // 2 + 1


class Krum(_Held):
    """The update with the nearest neighbours (Blanchard et al. 2017), or the even mean of the `keep` best (multi-Krum)."""

    name = "krum"

    def __init__(self, *, malicious: int = 0, keep: int = 1) -> None:
        """`malicious` is how many malicious clients are tolerated; a round must have 2 malicious + 3 updates."""
        super().__init__()
        if malicious < 0 or keep < 1:
            raise ConfigError(f"malicious={malicious}, keep={keep}: use 0 or more, and 1 or more")
        self.malicious, self.keep = int(malicious), int(keep)
        self.chosen: list[int] = []
        """Clients whose updates made the last model."""

    def check(self, count: int) -> None:
        """Raises ConfigError if this many updates are too few."""
        least = max(2 * self.malicious + 3, self.keep + self.malicious)
        if count < least:
            raise ConfigError(
                f"krum of {count} updates with malicious={self.malicious}, keep={self.keep}: "
                f"needs at least {least} updates; take more clients, or lower these"
            )

    def _combine(self, model: Weights, updates: list[Update]) -> Weights:
        count = len(updates)
        self.check(count)
        distances = squared_distances([each.change.parameters for each in updates])
        nearest = np.sort(distances, axis=1)[:, 1 : count - self.malicious - 1]  # the nearest is the update itself
        best = np.argsort(nearest.sum(axis=1), kind="stable")[: self.keep]  # of equals the lower client
        kept = [updates[i] for i in sorted(best)]
        self.chosen = [each.client for each in kept]
        return FedAvg(even=True).aggregate(model, kept)


def squared_distances(changes: Sequence[Sequence[Tensor]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the distances between all pairs in float64; by products, because differences would take n^2 passes over the model."""
    count = len(changes)
    products = np.zeros((count, count))
    for tensors in zip(*changes, strict=True):
        flat = [each.detach().reshape(-1).cpu() for each in tensors]
        piece = max(1, STACK_ELEMENTS // count)
        for begin in range(0, flat[0].numel(), piece):
            rows = torch.stack([each[begin : begin + piece].to(torch.float64) for each in flat]).numpy()
            products += rows @ rows.T
    own = np.diag(products)
    found: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.maximum(own[:, None] + own[None, :] - 2 * products, 0)
    np.fill_diagonal(found, 0)
    return found


__all__ = [
    "AGGREGATORS", "Aggregator", "FedAdagrad", "FedAdam", "FedAvg", "FedBuff", "FedProx", "FedYogi", "Krum", "Median",
    "QFedAvg", "TrimmedMean", "Update", "Weights", "make_aggregator", "proximal_",
]  # fmt: skip


class FedProx(FedAvg):
    """FedAvg whose clients add `proximal_` to their gradients (Li et al. 2020)."""

    name = "fed-prox"

    def __init__(self, *, mu: float = 0.1, even: bool = False) -> None:
        super().__init__(even=even)
        if not mu >= 0:
            raise ConfigError(f"mu={mu}: use 0 (plain FedAvg) or more")
        self.mu = mu


def proximal_(gradients: Sequence[Tensor], parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> None:
    """Add the gradient of mu/2 |w - w_server|^2 to a client's gradients, in place.

    A step against these gradients goes towards the server's model. Tensors may have a leading dimension of clients that
    `anchors` lack.
    """
    with torch.no_grad():
        for gradient, parameter, anchor in zip(gradients, parameters, anchors, strict=True):
            gradient += (parameter - anchor) * mu


class _Adaptive(FedAvg):
    """FedOpt (Reddi et al. 2021): the server's optimizer takes the mean change for a gradient.

    m and v start at 0 and tau^2, as in the paper, without bias correction; both are kept in float64.
    """

    def __init__(self, *, lr: float, beta1: float, beta2: float, tau: float, even: bool) -> None:
        super().__init__(even=even, lr=lr)
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{name}={value}: use 0 or more, less than 1")
        check_positive("tau", tau)
        self.beta1, self.beta2, self.tau = beta1, beta2, tau
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []

    def _step(self, mean: list[Tensor]) -> list[Tensor]:
        if not self._first:
            self._first = [torch.zeros_like(each) for each in mean]
            self._second = [torch.full_like(each, self.tau**2) for each in mean]
        if [each.shape for each in self._first] != [each.shape for each in mean]:
            raise ConfigError(f"the loaded state of {self.name} is of another model: resume with the same architecture")
        steps = []
        for i, change in enumerate(mean):
            first = self._first[i].to(change) * self.beta1 + change * (1 - self.beta1)
            second = self._next_second(self._second[i].to(change), change * change)
            self._first[i], self._second[i] = first, second
            steps.append(first * self.lr / (second.sqrt() + self.tau))
        return steps

    @abstractmethod
    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """Return the second moment after a step with this squared change."""

    def state_dict(self) -> dict[str, Any]:
        first, second = ([each.clone() for each in part] for part in (self._first, self._second))
        return {**super().state_dict(), "first": first, "second": second}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first = [each.clone() for each in state["first"]]
        self._second = [each.clone() for each in state["second"]]


class FedAdagrad(_Adaptive):
    name = "fed-adagrad"

    def __init__(self, *, lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3, even: bool = False) -> None:
        super().__init__(lr=lr, beta1=beta1, beta2=0.0, tau=tau, even=even)

    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return second + square


class FedAdam(_Adaptive):
    name = "fed-adam"

    def __init__(
        self, *, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, even: bool = False
    ) -> None:
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, tau=tau, even=even)

    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return second * self.beta2 + square * (1 - self.beta2)


class FedYogi(_Adaptive):
    name = "fed-yogi"

    def __init__(
        self, *, lr: float = 1e-2, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, even: bool = False
    ) -> None:
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, tau=tau, even=even)

    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return second - square * torch.sign(second - square) * (1 - self.beta2)


class QFedAvg(FedAvg):
    """Weighs clients by the q-th power of their loss (Li et al. 2020, q-FFL); q = 0 is the even mean."""

    name = "q-fedavg"
    averages = False

    def __init__(self, *, q: float = 1.0, client_lr: float = 0.05) -> None:
        """`client_lr` is the learning rate of the clients' optimizers: 1/L of the paper."""
        super().__init__(even=True)
        if not q >= 0:
            raise ConfigError(f"q={q}: use 0 or more")
        check_positive("client_lr", client_lr)
        self.q, self.client_lr = q, client_lr

    def _why_unusable(self, update: Update) -> str:
        if not (math.isfinite(update.loss) and update.loss >= 0):
            return f"its loss is {update.loss}, and q-FedAvg weighs by it"
        if self.q * math.log(max(update.loss, 1.0)) > 300:
            return f"its loss is {update.loss}, whose power {self.q} is beyond all others"
        return super()._why_unusable(update)

    def _begin(self) -> None:
        super()._begin()
        self._height = 0.0

    def _add(self, update: Update) -> None:
        loss, steep = max(update.loss, 1e-10), 1 / self.client_lr
        square = sum_of_squares(update.change.parameters) * steep**2
        self._height += self.q * loss ** (self.q - 1) * square + steep * loss**self.q
        self._add_weighted(update, loss**self.q)
        self._total += loss**self.q

    def _step(self, mean: list[Tensor]) -> list[Tensor]:
        # `mean` is sum(F^q d) / sum(F^q); the paper's step is L sum(F^q d) / sum(h).
        scale = self._total / self.client_lr / self._height
        return [each * scale for each in mean]


class FedBuff(FedAvg):
    """Asynchronous rounds (Nguyen et al. 2022): the model changes whenever `size` updates have come.

    An update that is s versions late counts 1/sqrt(1+s). The sum is divided by the number of updates, as in the paper, so late
    updates make the step shorter. The order of `offer`, which is that of the virtual clock, decides which updates share a
    buffer. Within a buffer they are added in the order of clients.
    """

    name = "fed-buff"
    averages = False  # late updates count less, and so would their part of the noise

    def __init__(self, *, size: int = 10, max_staleness: int = 5, lr: float = 1.0) -> None:
        super().__init__(even=True, lr=lr)
        if size < 1 or max_staleness < 0:
            raise ConfigError(f"size={size}, max_staleness={max_staleness}: use 1 or more, and 0 or more")
        self.size, self.max_staleness = size, max_staleness
        self.version = 0
        """Version of the present model: how often it has changed."""
        self._waiting: list[Update] = []

    def offer(self, model: Weights, update: Update) -> Weights | None:
        """Return the next model if the buffer is full with this update; None if more are needed, or the update came too late.

        Raises TrainError if the update claims a version that does not exist yet, or is in the buffer already.
        """
        late = self.version - update.version
        if late < 0:
            raise TrainError(f"client {update.client} trained version {update.version}, the newest is {self.version}")
        if any((each.client, each.version) == (update.client, update.version) for each in self._waiting):
            raise TrainError(f"client {update.client} has sent its update of version {update.version} already")
        self.left_out = {}
        why = self._why_unusable(update)
        if why:
            self.left_out[update.client] = why
            return None
        self._waiting.append(update)
        if len(self._waiting) < self.size:
            return None
        ready, self._waiting = self._waiting, []
        return self.aggregate(model, ready)

    def _why_unusable(self, update: Update) -> str:
        late = self.version - update.version
        if late > self.max_staleness:
            return f"it is {late} versions late, and {self.max_staleness} are allowed"
        return super()._why_unusable(update)

    def _weight(self, update: Update) -> float:
        return 1 / math.sqrt(1 + self.version - update.version)

    def _add(self, update: Update) -> None:
        self._add_weighted(update, self._weight(update))
        self._total += 1.0

    def _finish(self, model: Weights) -> Weights:
        new = super()._finish(model)
        self.version += 1
        return new

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "version": self.version,
            "waiting": [(each.client, each.samples, each.loss, each.version) for each in self._waiting],
            "parameters": [tensor.clone() for each in self._waiting for tensor in each.change.parameters],
            "buffers": [tensor.clone() for each in self._waiting for tensor in each.change.buffers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.version, count = int(state["version"]), max(1, len(state["waiting"]))

        def part(name: str, i: int) -> list[Tensor]:
            size = len(state[name]) // count
            return list(state[name][i * size : (i + 1) * size])

        self._waiting = [
            Update(client, Weights(part("parameters", i), part("buffers", i)).clone(), samples, loss, of)
            for i, (client, samples, loss, of) in enumerate(state["waiting"])
        ]


AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind
    for kind in (FedAvg, FedProx, FedYogi, FedAdam, FedAdagrad, QFedAvg, TrimmedMean, Median, Krum, FedBuff)
}


def make_aggregator(name: str, options: Mapping[str, float] | None = None) -> Aggregator:
    """Create the aggregator of that name."""
    kind = AGGREGATORS.get(name)
    if kind is None:
        raise ConfigError(f"aggregator {name!r} is unknown: use one of {', '.join(AGGREGATORS)}")
    known = inspect.signature(kind).parameters
    for option, value in (options or {}).items():
        if option not in known:
            raise ConfigError(f"{name} has no option {option!r}: it has {', '.join(known) or 'none'}")
        wanted = str(known[option].annotation)
        # exact types: the word "False" would be true, and so would be 1
        if not (type(value).__name__ == wanted or (wanted == "float" and type(value) is int)):
            raise ConfigError(f"{name}: {option}={value!r}: use a value of type {wanted}")
    return kind(**(options or {}))
