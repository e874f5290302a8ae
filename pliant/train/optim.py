"""Optimizers that average models instead of gradients: SMA, AD-PSGD, and SMA that turns into synchronous SGD.

Each wraps one of torch's optimizers, which applies the worker's own gradient. So every worker has a model of its own and
hosts one replica. The trainer calls `begin` before a step, for what can travel while the program computes, and `wait` with
the rest of the exchange. The program's `step()` averages and then applies the gradient.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError, ConfigError, Unsliceable
from pliant.train.bucket_layout import BucketItem, first_layout

if TYPE_CHECKING:
    from pliant.train.gradients import GradientReducer


log = logging.getLogger(__name__)
_SAVED = "model of a pair"
"""The name of a worker's model in its store."""


class AveragingOptimizer(torch.optim.Optimizer, ABC):
    """Base class: an optimizer in the place of another, with its groups, state and hooks."""

    _step_supports_amp_scaling = False  # a scaler would call this optimizer, not the inner one

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The base constructor is not called: `optimizer` has all that it would make.
        name = type(self).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{name}({optimizer!r:.60}): give one of torch's optimizers, as {name}(torch.optim.SGD(...))"
            )
        if isinstance(optimizer, AveragingOptimizer):
            raise ConfigError(f"{name} around {type(optimizer).__name__}: models can be averaged in one way only")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsliceable(f"{name} around LBFGS, which needs a closure that is called several times: use another")
        self.inner = optimizer
        self._detach()

    def _detach(self) -> None:
        """Be no part of a job, as after construction. A copy begins like this."""
        self._parameters: list[Parameter] = []
        self._engine: Engine | None = None

    # --- in the place of the other ---

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._detach()

    def __repr__(self) -> str:
        return f"{self.describe()} of {self.inner!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        """Average with the models that have arrived, then apply the gradient."""
        with torch.no_grad():
            self._average()
        result = self.inner.step() if closure is None else self.inner.step(closure)
        with torch.no_grad():
            self._after_step()
        return result

    # --- for the trainer ---

    @abstractmethod
    def describe(self) -> str:
        """Describe what must be the same on all workers."""

    def attach(self, gradients: GradientReducer, equalise: Callable[[], None]) -> None:
        """Become the optimizer of a job: gradients are not summed. `equalise` gives all workers the state of the first."""
        gradients.disable_sums()

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Use this engine from now on: rank r hosts `blocks[r]` replicas. The model is here already."""
        if max(blocks) > 1:
            raise ConfigError(
                f"{type(self).__name__} keeps a model in each worker, so each has one replica, but {sum(blocks)} replicas "
                f"are on {len(blocks)} workers: use pliant.join(replicas=None), or as many workers as replicas"
            )
        self._engine = engine
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @abstractmethod
    def begin(self, step: int) -> None:
        """Send what can be sent at the start of a step. Raises CommError if a worker is lost."""

    def wait(self) -> None:
        """Wait for what the step needs. Raises CommError if it cannot be had."""

    def before_load(self, step: int) -> None:
        """Prepare to load a state of this step."""

    @abstractmethod
    def _average(self) -> None:
        """Move the model towards the others'."""

    def _after_step(self) -> None:
        """Run after the gradient has been applied."""


class SynchronousAveraging(AveragingOptimizer):
    """SMA (EA-SGD): move the model by `alpha` towards the mean of all workers' models, then apply the own gradient.

    The mean is that of the models at the start of the step. They are summed while the program computes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, alpha: float = 0.1) -> None:
        super().__init__(optimizer)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
            raise ConfigError(f"{type(self).__name__}: alpha={alpha!r} must be above 0 and at most 1; 0.1 is usual")
        self.alpha = float(alpha)

    def _detach(self) -> None:
        super()._detach()
        self._copies: list[ParameterCopies] = []
        self._under_way: list[Handle] = []
        self._is_here = False
        """Whether the sums of this step's models have arrived, and are not used yet."""
        self._num_summed = 1
        self._copies_engine: Engine | None = None
        """The engine whose memory the copies are in."""
        self._retired: list[tuple[Engine, list[ParameterCopies]]] = []

    def describe(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha:g})"

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        if self._engine is not None and self._engine.may_be_written_to:
            self._retired.append((self._engine, self._copies))  # a worker that is only silent may still write there
        super().enter_view(engine, blocks)
        self._under_way, self._copies_engine = [], None
        if not self._is_here:  # else they are sums of the view before, whose last pass counts
            self._copies = []

    def begin(self, step: int) -> None:
        self._is_here = False
        for handle in self._under_way:  # of a dropped step, whose memory is needed
            handle.wait()
        self._under_way = []
        engine = self._engine
        assert engine is not None, "enter_view() comes first"
        if engine.size == 1:
            return
        if self._copies_engine is not engine:
            self._copies, self._copies_engine = copies_to_sum(self._parameters, engine), engine
        with torch.no_grad():
            for number, copies in enumerate(self._copies):
                copies.copy_parameters()
                self._under_way.append(engine.all_reduce(f"model:{number}", copies.flat, order="ddp"))

    def wait(self) -> None:
        waiting, self._under_way = self._under_way, []
        for handle in waiting:
            handle.wait()
        self._is_here = bool(waiting)
        self._num_summed = self._engine.size if self._engine is not None else 1

    def _average(self) -> None:
        if self._is_here:
            self._is_here = False
            for copies in self._copies:
                copies.flat.div_(self._num_summed)
                copies.pull_parameters(self.alpha)


class AdaptiveSGD(SynchronousAveraging):
    """SMA in the first `change_step` steps, synchronous SGD after that. In between all workers get the first one's
    whole state, optimizer included, so their models are the same to the bit from there on."""

    def __init__(self, optimizer: torch.optim.Optimizer, change_step: int, alpha: float = 0.1) -> None:
        super().__init__(optimizer, alpha)
        if isinstance(change_step, bool) or not isinstance(change_step, int) or change_step < 0:
            raise ConfigError(f"AdaptiveSGD: change_step={change_step!r} must be a number of steps, 0 or more")
        self.change_step = change_step

    def _detach(self) -> None:
        super()._detach()
        self._gradients: GradientReducer | None = None
        self._could_sum = False
        self._equalise: Callable[[], None] = lambda: None

    def describe(self) -> str:
        return f"AdaptiveSGD(change_step={self.change_step}, alpha={self.alpha:g})"

    def attach(self, gradients: GradientReducer, equalise: Callable[[], None]) -> None:
        self._gradients, self._could_sum, self._equalise = gradients, gradients.wanted, equalise
        super().attach(gradients, equalise)

    def begin(self, step: int) -> None:
        if step < self.change_step:
            super().begin(step)
            return
        if step == self.change_step and self._engine is not None and self._engine.size > 1:
            # Also when this step is repeated after a loss: it depends on nothing but the step.
            self._equalise()
        gradients = self._gradients
        if gradients is not None and gradients.wanted != self._could_sum:
            gradients.wanted = self._could_sum
            gradients.use_layout(None)

    def before_load(self, step: int) -> None:
        """A new worker gets the layout of the sums with the state, and must know that there are sums."""
        if self._gradients is not None:
            self._gradients.wanted = self._could_sum and step > self.change_step


class PairAveraging(AveragingOptimizer):
    """AD-PSGD: in each step take the mean of the own model and that of one random worker, then apply the own gradient.

    The other's model is fetched while the program computes, and is of whichever step that worker has saved last. If it
    cannot be had (the worker is new and has saved none yet, or is lost), the step goes without it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
        super().__init__(optimizer)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"PairAveraging: seed={seed!r} must be a whole number")
        self.seed = seed
        self.peer: int | None = None
        """The rank whose model the last step was averaged with; None without one."""

    def _detach(self) -> None:
        super()._detach()
        self._asked: tuple[int, Handle] | None = None
        self._saved: ParameterCopies | None = None
        """Where the model is put together to be saved."""
        self._fetched: ParameterCopies | None = None

    def describe(self) -> str:
        return f"PairAveraging(seed={self.seed})"

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        super().enter_view(engine, blocks)
        self._asked = self._saved = self._fetched = None
        with torch.no_grad():
            self._after_step()

    def begin(self, step: int) -> None:
        engine, asked = self._engine, self._asked
        assert engine is not None, "enter_view() comes first"
        if asked is not None and not asked[1].done:
            self._fetched = None  # it may still arrive, and must not overwrite the next model
        self._asked = None
        if engine.size > 1:
            if self._fetched is None:
                self._fetched = copies_to_fetch(self._parameters)
            peer = peer_of(engine.rank, engine.size, step, self.seed)
            self._asked = peer, engine.request(peer, _SAVED, self._fetched.flat)

    def _average(self) -> None:
        asked, self._asked, self.peer = self._asked, None, None
        if asked is None or self._fetched is None:
            return
        peer, handle = asked
        try:
            handle.wait()
        except CommError as error:
            log.debug("a step without the model of rank %d: %s", peer, error)
            if not handle.done:
                self._fetched = None
            return
        self._fetched.pull_parameters(0.5)
        self.peer = peer

    def _after_step(self) -> None:
        """Save the model for those who will ask for it."""
        if self._engine is not None and self._engine.size > 1:
            if self._saved is None:
                self._saved = copies_to_fetch(self._parameters)
            self._saved.copy_parameters()
            self._engine.save(_SAVED, self._saved.flat)


def peer_of(rank: int, size: int, step: int, seed: int) -> int:
    """Return another rank, each equally likely. The program's random generators are not used."""
    label = f"{seed}:{step}:{rank}".encode()
    found = int.from_bytes(hashlib.sha256(label).digest()[:8]) % (size - 1)
    return found + (found >= rank)


def find_averaging(optimizers: Sequence[torch.optim.Optimizer]) -> AveragingOptimizer | None:
    """Return the optimizer that averages models, if there is one. Raises ConfigError if it is not the only optimizer."""
    found = [optimizer for optimizer in optimizers if isinstance(optimizer, AveragingOptimizer)]
    if found and len(optimizers) > 1:
        raise ConfigError(
            f"{type(found[0]).__name__} beside another optimizer: give job.wrap one optimizer, with a group of parameters "
            "for each rate"
        )
    return found[0] if found else None


# --- copies of models ---


@dataclass(slots=True, eq=False)
class ParameterCopies:
    """Copies of some parameters, side by side in flat memory."""

    flat: torch.Tensor
    parameters: list[torch.Tensor]
    views: list[torch.Tensor]

    def copy_parameters(self) -> None:
        torch._foreach_copy_(self.views, self.parameters)

    def pull_parameters(self, weight: float) -> None:
        """Move the parameters towards these copies by `weight`."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            other = view.to(parameter.device)
            if other.dtype == parameter.dtype:
                parameter.lerp_(other, weight)
            else:
                parameter.copy_(parameter.to(other.dtype).lerp_(other, weight))


def copies_to_sum(parameters: Sequence[Parameter], engine: Engine) -> list[ParameterCopies]:
    """Make copies in pieces like the buckets of gradients, so that the first is sent while the next is copied."""
    kinds = [(_summed_as(parameter.dtype), parameter.device) for parameter in parameters]
    items = [BucketItem(kind, p.numel() * kind[0].itemsize) for p, kind in zip(parameters, kinds, strict=True)]
    made = []
    for indices in first_layout(items, find_unused=True).buckets:
        dtype, device = kinds[indices[0]]
        members = [parameters[index] for index in indices]
        length = sum(parameter.numel() for parameter in members)
        flat = torch.empty(length, dtype=dtype, device=device) if device.type != "cpu" else engine.empty(length, dtype)
        pieces = flat.split([parameter.numel() for parameter in members])  # type: ignore[no-untyped-call]
        views = [piece.view(parameter.shape) for piece, parameter in zip(pieces, members, strict=True)]
        made.append(ParameterCopies(flat, list(members), views))
    return made


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in: a mean of models in 8 or 11 bits would move them further than many a gradient."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def copies_to_fetch(parameters: Sequence[Parameter]) -> ParameterCopies:
    """Make one run of bytes: whoever fetches it has a model of a single step."""
    members = sorted(parameters, key=lambda parameter: -parameter.element_size())  # so that each is aligned
    flat = torch.empty(sum(parameter.nbytes for parameter in members), dtype=torch.uint8)
    pieces = flat.split([parameter.nbytes for parameter in members])  # type: ignore[no-untyped-call]
    views = [piece.view(p.dtype).view(p.shape) for piece, p in zip(pieces, members, strict=True)]
    return ParameterCopies(flat, list(members), views)
