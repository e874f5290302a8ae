"""The aggregators by name: FedAvg and those that build on its mean; those that survive liars are in `robust`."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pliant.errors import ConfigError, TrainError
from pliant.fed.fold.aggregation import Aggregator, FedAvg, check_positive, tensors_of
from pliant.fed.fold.robust import Krum, Median, TrimmedMean
from pliant.fed.updates import Update, Weights, sum_of_squares

__all__ = [
    "AGGREGATORS", "Aggregator", "FedAdagrad", "FedAdam", "FedAvg", "FedBuff", "FedProx", "FedYogi", "Krum", "Median",
    "QFedAvg", "TrimmedMean", "Update", "Weights", "make", "proximal_",
]  # fmt: skip


class FedProx(FedAvg):
    """FedAvg's mean; its clients add `proximal_` to their gradients (Li et al. 2020)."""

    name = "fed-prox"

    def __init__(self, *, mu: float = 0.1, even: bool = False) -> None:
        super().__init__(even=even)
        if not mu >= 0:
            raise ConfigError(f"mu={mu}: use 0 (plain FedAvg) or more")
        self.mu = mu


def proximal_(gradients: Sequence[Tensor], parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> None:
    """Add the gradient of mu/2 |w - w_server|^2 to a client's gradients, in place.

    A step against these gradients goes *towards* the server's model. Tensors may have a leading dimension of clients
    that `anchors` lack.
    """
    with torch.no_grad():
        for gradient, parameter, anchor in zip(gradients, parameters, anchors, strict=True):
            gradient += (parameter - anchor) * mu


class _Adaptive(FedAvg):
    """FedOpt (Reddi et al. 2021): the mean change is taken for a gradient by the server's optimizer.

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
        """The second moment after a step whose squared change this is."""

    def state_dict(self) -> dict[str, object]:
        first, second = ([each.clone() for each in part] for part in (self._first, self._second))
        return {**super().state_dict(), "first": first, "second": second}

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        self._first = [each.clone() for each in tensors_of(state, "first")]
        self._second = [each.clone() for each in tensors_of(state, "second")]


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
    """Clients with a high loss count more, by its q-th power (Li et al. 2020, q-FFL); q = 0 is the even mean."""

    name = "q-fedavg"
    averages = False

    def __init__(self, *, q: float = 1.0, client_lr: float = 0.05) -> None:
        """`client_lr` is that of the clients' optimizers: 1/L of the paper."""
        super().__init__(even=True)
        if not q >= 0:
            raise ConfigError(f"q={q}: use 0 or more")
        check_positive("client_lr", client_lr)
        self.q, self.client_lr = q, client_lr

    def _useless(self, update: Update) -> str:
        if not (math.isfinite(update.loss) and update.loss >= 0):
            return f"its loss is {update.loss}, and q-FedAvg weighs by it"
        if self.q * math.log(max(update.loss, 1.0)) > 300:
            return f"its loss is {update.loss}, whose power {self.q} is beyond all others"
        return super()._useless(update)

    def _begin(self) -> None:
        super()._begin()
        self._height = 0.0

    def _add(self, update: Update) -> None:
        loss, steep = max(update.loss, 1e-10), 1 / self.client_lr
        square = sum_of_squares(update.change.parameters) * steep**2
        self._height += self.q * loss ** (self.q - 1) * square + steep * loss**self.q
        self._fold(update, loss**self.q)
        self._total += loss**self.q

    def _step(self, mean: list[Tensor]) -> list[Tensor]:
        # `mean` is sum(F^q d) / sum(F^q); the paper's step is L sum(F^q d) / sum(h).
        scale = self._total / self.client_lr / self._height
        return [each * scale for each in mean]


class FedBuff(FedAvg):
    """Asynchronous rounds (Nguyen et al. 2022): the server moves whenever `size` updates have come.

    An update that is s versions late counts 1/sqrt(1+s); the sum is divided by the number of updates, as in the paper,
    so late ones make the step shorter. Which updates share a buffer follows from the order of `offer`: that of the
    virtual clock. Within a buffer they are folded in the order of clients.
    """

    name = "fed-buff"
    averages = False  # the late count less, and so would their part of the noise

    def __init__(self, *, size: int = 10, max_staleness: int = 5, lr: float = 1.0) -> None:
        super().__init__(even=True, lr=lr)
        if size < 1 or max_staleness < 0:
            raise ConfigError(f"size={size}, max_staleness={max_staleness}: use 1 or more, and 0 or more")
        self.size, self.max_staleness = size, max_staleness
        self.version = 0
        """Of the present model: how often it has moved."""
        self._waiting: list[Update] = []

    def offer(self, model: Weights, update: Update) -> Weights | None:
        """The next model, if the buffer is full with this update; None: it waits for more, or came too late to count.

        Raises:
            TrainError: the update claims a version that does not exist yet, or waits in the buffer already.
        """
        late = self.version - update.version
        if late < 0:
            raise TrainError(f"client {update.client} trained version {update.version}, the newest is {self.version}")
        if any((each.client, each.version) == (update.client, update.version) for each in self._waiting):
            raise TrainError(f"client {update.client} has sent its update of version {update.version} already")
        self.left_out = {}
        why = self._useless(update)
        if why:
            self.left_out[update.client] = why
            return None
        self._waiting.append(update)
        if len(self._waiting) < self.size:
            return None
        ready, self._waiting = self._waiting, []
        return self.aggregate(model, ready)

    def _useless(self, update: Update) -> str:
        late = self.version - update.version
        if late > self.max_staleness:
            return f"it is {late} versions late, and {self.max_staleness} are allowed"
        return super()._useless(update)

    def _weight(self, update: Update) -> float:
        return 1 / math.sqrt(1 + self.version - update.version)

    def _share(self, update: Update) -> float:
        return 1.0

    def _finish(self, model: Weights) -> Weights:
        new = super()._finish(model)
        self.version += 1
        return new

    def state_dict(self) -> dict[str, object]:
        return {
            **super().state_dict(),
            "version": self.version,
            "waiting": [(each.client, each.samples, each.loss, each.version) for each in self._waiting],
            "parameters": [tensor.clone() for each in self._waiting for tensor in each.change.parameters],
            "buffers": [tensor.clone() for each in self._waiting for tensor in each.change.buffers],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        version, waiting = state.get("version"), state.get("waiting")
        if not isinstance(version, int) or not isinstance(waiting, list):
            raise ConfigError("the state of fed-buff has no version or no buffer: it is damaged, or of another version")
        parts = [_dealt(tensors_of(state, name), len(waiting)) for name in ("parameters", "buffers")]
        self.version = version
        self._waiting = [
            Update(client, Weights(parameters, buffers), samples, loss, of)
            for (client, samples, loss, of), parameters, buffers in zip(waiting, *parts, strict=True)
        ]


def _dealt(tensors: list[Tensor], hands: int) -> list[list[Tensor]]:
    each = len(tensors) // hands if hands else 0
    if each * hands != len(tensors):
        raise ConfigError(f"the state of fed-buff has {len(tensors)} tensors for {hands} updates: it is damaged")
    return [[tensor.clone() for tensor in tensors[i * each : (i + 1) * each]] for i in range(hands)]


AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind
    for kind in (FedAvg, FedProx, FedYogi, FedAdam, FedAdagrad, QFedAvg, TrimmedMean, Median, Krum, FedBuff)
}


def make(name: str, options: Mapping[str, float] | None = None) -> Aggregator:
    """The aggregator of that name, its options by theirs.

    Raises:
        ConfigError: no such aggregator, an option it does not have, or a value that makes no sense.
    """
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
