"""What a program declares before it trains, with the checks of each declaration: models, optimizers, data, state, a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pliant.comm.order import Order
from pliant.errors import ConfigError, TrainError
from pliant.train import determinism, obstacles
from pliant.train.adaptation import AdaptationSettings
from pliant.train.context import RngState
from pliant.train.events import Progress
from pliant.train.feeder import Feeder
from pliant.train.guard import EVERY
from pliant.train.optim import AveragingOptimizer, find_averaging
from pliant.train.replicas import Blocks, Replicas
from pliant.train.wrapping import (
    StateNamespace,
    as_list,
    check_epoch,
    check_optimizers,
    device_of,
    trainable_parameters,
)

_STATE = "job.state"
"""The name under which the program's own state is tracked."""


@dataclass(slots=True)
class JobSettings:
    """What `pliant.join` was given."""

    replicas: int | None
    level: determinism.Level
    blocks: Blocks | None = None
    seed: int | None = None
    sync: str = "fifo"
    slice_bytes: int | None = None
    in_flight_bytes: int | None = None
    adapting: AdaptationSettings = field(default_factory=AdaptationSettings)
    gradients: str = "device"
    """Where a worker with several replicas keeps the gradients of a GPU between turns: "device" or "host"."""
    verify: int = EVERY
    allow: tuple[str, ...] = ()
    """Operators that may run without a deterministic kernel."""
    order: Order | None = None
    """How gradients are added; None for the default of the device."""


@dataclass(slots=True)
class Wrapped:
    """What the program has given to `job.wrap`."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    averaging: AveragingOptimizer | None
    find_unused: bool
    cap_bytes: int | None
    sync_buffers: bool


@dataclass(slots=True)
class Declared:
    """What the program has declared so far."""

    tracked: dict[str, Any] = field(default_factory=dict)
    wrapped: Wrapped | None = None
    data: tuple[Feeder, Replicas] | None = None
    make_feeder: Callable[[], Feeder] | None = None
    """Makes another feeder like that of `data`, for the warm-up of a new worker; None if that is not possible."""
    rank_seed: tuple[int, RngState] | None = None
    """The seed of replica 0, and the random state right after it was set."""
    load_path: str = ""
    """The checkpoint to start from; `auto` for the newest of the job's own."""
    first: Progress = field(default_factory=Progress)
    """Where the program begins, if it starts the job without such a checkpoint."""

    def wrap(
        self,
        model: object,
        optimizer: object,
        level: determinism.Level,
        *,
        find_unused: bool,
        bucket_cap_mb: float | None,
        sync_buffers: bool,
    ) -> None:
        """Take these models and optimizers, one of each or lists of them, and pin the determinism of their device."""
        if self.wrapped is not None:
            raise TrainError("job.wrap was called twice: give it all models and optimizers at once, as lists")
        models = as_list(model, torch.nn.Module, "torch.nn.Module")
        optimizers = as_list(optimizer, torch.optim.Optimizer, "torch.optim.Optimizer")
        if not models:
            raise ConfigError("job.wrap got an empty list of models: there is nothing to train")
        if bucket_cap_mb is not None and not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
            raise ConfigError(f"job.wrap(bucket_cap_mb={bucket_cap_mb!r}): use a number of MiB above 0, as in DDP")
        for each in models:
            obstacles.check(each)
        parameters = [found for each in models for found in trainable_parameters(each)]
        check_optimizers(optimizers, parameters)
        device = device_of(models, is_free=level == "D0")
        if device.type != "cpu":
            determinism.pin(level, device)
        averaging = find_averaging(optimizers)
        if averaging is not None and len(models) > 1:
            raise ConfigError(
                f"{averaging.describe()} can average one model, but job.wrap got {len(models)}: put them into one module, or use "
                "a plain torch optimizer"
            )
        cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        self.wrapped = Wrapped(models, optimizers, averaging, find_unused, cap_bytes, sync_buffers)

    def use_feeder(self, feeder: Feeder, replicas: Replicas, make_again: Callable[[], Feeder] | None) -> None:
        """Take the batches of each replica from `feeder`; `make_again` makes another such feeder."""
        check_epoch(replicas)
        self.data, self.make_feeder = (feeder, replicas), make_again

    def track(self, name: str, thing: Any) -> None:
        """Make `thing` part of the job's state."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TrainError(
                f"job.track({name!r}): a {type(thing).__name__} has no state_dict and load_state_dict: give it both, or keep its "
                "values in job.state(...)"
            )
        if name in self.tracked:
            there = type(self.tracked[name]).__name__
            raise TrainError(f"job.track({name!r}): a {there} is tracked under this name already: use another name")
        self.tracked[name] = thing

    def add_state(self, values: dict[str, Any]) -> StateNamespace:
        """Return a namespace with these values that is part of the job's state."""
        if _STATE in self.tracked:
            raise TrainError("job.state was called before: give it all values at once")
        self.tracked[_STATE] = made = StateNamespace(values)
        return made
