"""The wrappers that `job.wrap` and `job.track` put around the program's own objects, and the checks before that.

The wrapped methods of optimizers, schedulers and scalers run once per step, whatever the number of replicas hosted here.
While sums are on their way, they also keep the program from seeing or changing half of a step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from pliant.errors import ConfigError, TrainError, Unsliceable
from pliant.train.deferred import hidden_uses, watch_state
from pliant.train.gradient_probe import GradientProbe
from pliant.train.gradients import GradientReducer
from pliant.train.optim import AveragingOptimizer
from pliant.train.pending import wrappers
from pliant.train.replicas import Replicas

if TYPE_CHECKING:
    from pliant.train.trainer import Trainer


NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]


def trainable_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that get gradients, with their names; raise ConfigError if there are none."""
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not found:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
    return found


def check_epoch(replicas: Replicas) -> None:
    """Raise ConfigError if an epoch does not have a single batch."""
    if replicas.num_batches == 0:
        raise ConfigError(
            f"{replicas.num_samples} samples give {replicas.count} replicas not one batch of "
            f"{replicas.loading.batch_size}: use a smaller batch_size, or drop_last=False"
        )


def describe_program(parameters: NamedParameters, replicas: Replicas, *, follows_view: bool) -> str:
    """Describe what must be the same on all workers: replicas, parameters, samples."""
    shapes = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in parameters]).encode()
    digest = hashlib.sha256(shapes).hexdigest()[:12]
    count = "a replica per worker" if follows_view else f"{replicas.count} replicas"
    samples = f"{replicas.num_samples} samples by {replicas.loading.batch_size}"
    return f"{count}, {len(parameters)} parameters ({digest}), {samples}"


def why_no_priority(model: torch.nn.Module, averaging: AveragingOptimizer | None) -> str:
    """Return why the sums of this program must travel by `fifo`; empty if they need not."""
    return hidden_uses(model) if averaging is None else f"{averaging.describe()} averages models"


def make_probe(
    monitors: dict[str, int],
    gradients: GradientReducer,
    optimizers: Sequence[torch.optim.Optimizer],
    averaging: AveragingOptimizer | None,
) -> GradientProbe | None:
    """Return the probe for these monitors; None without monitors.

    Raises:
        ConfigError: the optimizer averages models, so gradients are not summed.
    """
    if not monitors:
        return None
    if averaging is not None:
        raise ConfigError(
            f"{averaging.describe()} leaves gradients where they are, but {', '.join(monitors)} compares them with their "
            "sum: do not watch it here"
        )
    return GradientProbe(
        gradients.parameters,
        optimizers,
        noise_scale=monitors.get("noise_scale", 0),
        variance=monitors.get("variance", 0),
    )


# --- wrapped methods ---


_ONCE_PER_STEP = ("step", "update", "update_parameters", "unscale_")
"""Methods of tracked objects that belong to the step and not to a replica."""
Running: TypeAlias = "Callable[[], Trainer]"
"""Returns the trainer, or raises TrainError if the program is not training."""


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, running: Running, trainer_of: Callable[[], Trainer | None]
) -> None:
    """Make `step` run in the last turn only, and, with deferred updates, for each parameter when its sum has arrived."""
    original, original_zero = optimizer.step, optimizer.zero_grad

    @functools.wraps(original)
    def step(_: torch.optim.Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        if closure is not None:
            raise Unsliceable(
                f"{type(optimizer).__name__}.step(closure) computes several gradients per step, for which the "
                "replicas would have to take turns inside of it: use an optimizer without a closure"
            )
        trainer = running()
        turn = trainer.turn
        if turn is None:
            return original(**kwargs)
        if trainer.torn is not None:
            return None
        if not turn.done:
            raise TrainError(
                "optimizer.step() before the gradients of this replica are complete: call backward() on a loss of "
                "this batch first, the last one of an accumulation outside of job.no_sync()"
            )
        if not trainer.may_commit:
            return None
        with _scaled_rates(optimizer, trainer.adaptation.learning_rate_factor):
            if trainer.deferred.is_deferring:
                watch_state(optimizer, trainer.deferred)
                return trainer.deferred.step(optimizer, original, **kwargs)
            return original(**kwargs)

    @functools.wraps(original_zero)
    def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        trainer = trainer_of()
        if trainer is not None and trainer.deferred.is_pending:
            trainer.deferred.zero_grad(optimizer, original_zero, set_to_none)
            return
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            original_zero(set_to_none=set_to_none)

    step.of_pliant = True  # type: ignore[attr-defined]
    # Bound methods, as before: LR schedulers that are made later look for their functions.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


@contextlib.contextmanager
def _scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates by the policies' factor for the time of a step. Schedulers and checkpoints only ever
    see the program's own rates."""
    if factor == 1.0:
        yield
        return
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    own = [group["lr"] for group in groups]
    for group, rate in zip(groups, own, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, own, strict=True):
            group["lr"] = rate


def wrap_tracked(name: str, thing: Any, trainer_of: Callable[[], Trainer | None]) -> None:
    """Give `thing` a class of its own whose methods run once per step. Methods on the object itself would become part
    of its state, because the state_dict of a scheduler is its __dict__."""
    kind = type(thing)
    methods = {
        method: _once_per_step(name, getattr(kind, method), trainer_of)
        for method in _ONCE_PER_STEP
        if callable(getattr(kind, method, None))
    }
    try:
        thing.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
    except TypeError as error:
        raise TrainError(f"track({name!r}): a {kind.__name__} cannot be wrapped ({error})") from None


def _once_per_step(
    name: str, original: Callable[..., Any], trainer_of: Callable[[], Trainer | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(thing: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = trainer_of()
        if trainer is None:
            return original(thing, *args, **kwargs)
        if not trainer.may_commit:
            return None
        if trainer.deferred.is_pending:
            if isinstance(thing, LRScheduler):
                # A scheduler's state is small and independent of parameters: save it in case the step is torn.
                trainer.save_tracked(name, thing, copy.deepcopy(thing.state_dict()))
            else:
                trainer.deferred.warn_once(
                    f"sync: {name!r} (a {type(thing).__name__}) is updated in every step: all sums are waited for before, so "
                    "priority cannot help"
                )
                if not trainer.wait_for_sums():
                    return None
        return original(thing, *args, **kwargs)

    return guarded


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], parameters: NamedParameters) -> None:
    """Raise ConfigError or Unsliceable if a job cannot use these optimizers."""
    known = {id(parameter) for _, parameter in parameters}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"{type(optimizer).__name__} is not an optimizer: give one, or a list of them")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsliceable("LBFGS needs a closure that computes several gradients per step: use another optimizer")
        for group in optimizer.param_groups:
            if any(parameter.requires_grad and id(parameter) not in known for parameter in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} updates a parameter that is not in the model: its gradient would not be "
                    "summed over the replicas. Put all modules into one, such as torch.nn.ModuleList"
                )


def check_tracked(optimizers: Sequence[torch.optim.Optimizer], tracked: dict[str, Any]) -> None:
    """Raise TrainError if a scheduler that is not tracked changes an optimizer."""
    known = {id(each.optimizer) for each in tracked.values() if isinstance(each, LRScheduler)}
    for optimizer in optimizers:
        inner = optimizer.inner if isinstance(optimizer, AveragingOptimizer) else optimizer
        steps = [*wrappers(optimizer.step), *wrappers(inner.step)]
        scheduled = any(getattr(f, "_wrapped_by_lr_sched", False) for f in steps)
        if scheduled and not known & {id(optimizer), id(inner)}:
            raise TrainError(
                f"an LR scheduler changes {type(optimizer).__name__}, but the job does not know it: a new worker would "
                "begin with another learning rate. Add `job.track('scheduler', scheduler)`"
            )


def refuse_untracked_scalers(tracked: dict[str, Any], trainer_of: Callable[[], Trainer | None]) -> Callable[[], None]:
    """Raise TrainError when a GradScaler that is not tracked is updated. It would be updated once per turn, so the
    result would depend on the placement. Returns a function that undoes this."""
    original = torch.amp.GradScaler.update

    @functools.wraps(original)
    def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = trainer_of()
        if trainer is not None and trainer.turn is not None and not any(t is scaler for t in tracked.values()):
            raise TrainError(
                "this GradScaler is not part of the job: add `job.track('scaler', scaler)` before job.epochs"
            )
        return original(scaler, *args, **kwargs)

    torch.amp.GradScaler.update = update  # type: ignore[assignment,method-assign]

    def undo() -> None:
        torch.amp.GradScaler.update = original  # type: ignore[method-assign]

    return undo
