"""What `job.wrap` and `job.track` do to the program's own objects, and the checks before that.

An optimizer gets hooks: its step belongs after the loop over a step, and takes the learning rates that policies decide.
Only while updates are deferred (`sync="priority"`) its methods are replaced: they then keep the program from seeing or
changing half of a step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from pliant.errors import ConfigError, TrainError, Unsliceable
from pliant.train.deferred import DeferredUpdates, gate_state, hidden_uses, watch_state
from pliant.train.gradient_probe import GradientProbe
from pliant.train.gradients import GradientReducer
from pliant.train.optim import AveragingOptimizer
from pliant.train.pending import wrappers
from pliant.train.replicas import Replicas

if TYPE_CHECKING:
    from pliant.train.current_step import CurrentStep

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]
MOST_NAMES_CHARS = 500
"""Longer lists of names are described by a digest."""


def whole_number(what: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int; raise ConfigError if it is no whole number, or below `least`. `what` shows it to the user."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise ConfigError(f"{what}: use a whole number{'' if least is None else f', {least} or more'}")
    return number


def as_list(given: Any, kind: type[Any], what: str) -> list[Any]:
    """Return one thing or a sequence of them as a list. Raises ConfigError if one of them is not of this kind."""
    found = list(given) if isinstance(given, Sequence) else [given]
    for each in found:
        if not isinstance(each, kind):
            raise ConfigError(
                f"job.wrap: a {type(each).__name__} is no {what}. Write job.wrap(model, optimizer), or give it a list of models "
                "and a list of optimizers"
            )
    return found


def trainable_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that get gradients, with their names; raise ConfigError if there are none."""
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not found:
        raise ConfigError(
            f"the {type(model).__name__} has no parameter that requires a gradient: there is nothing to train"
        )
    return found


def device_of(models: Sequence[torch.nn.Module], *, is_free: bool = False) -> torch.device:
    """Return the device of a job: the GPU that its models are on, or else the device of the first parameter. Its generator
    is switched between replicas, beside those of the host.

    Raises:
        Unsliceable: the models are on several GPUs, and the job is not `is_free` to have any bits.
    """
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return choose_device([tensor.device for tensor in tensors], is_free=is_free)


def choose_device(devices: Sequence[torch.device], *, is_free: bool = False) -> torch.device:
    """Return what `device_of` returns for models with tensors on these devices."""
    gpus = sorted({str(device) for device in devices if device.type == "cuda"})
    if len(gpus) > 1 and not is_free:
        raise Unsliceable(
            f"the models of a worker are on {len(gpus)} GPUs ({', '.join(gpus)}), but the random state of a replica has the "
            "generator of one: what is drawn on the others, as in dropout, would depend on the number of workers. Put all "
            "models of a worker on one GPU, or use determinism='D0', which promises no bits there"
        )
    return next((device for device in devices if device.type == "cuda"), devices[0])


def check_epoch(replicas: Replicas) -> None:
    """Raise ConfigError if an epoch does not have a single batch."""
    if not replicas.loading.is_dealt:
        if replicas.steps == 0:
            raise ConfigError("the sampler or dataset has no whole batch: use a smaller batch_size, or drop_last=False")
        return
    if replicas.num_batches == 0:
        raise ConfigError(
            f"{replicas.num_samples} samples are too few for a batch of {replicas.loading.batch_size} for each of "
            f"{replicas.count} replicas: use a smaller batch_size, or drop_last=False"
        )


class StateNamespace:
    """The program's own state, as attributes; made by `job.state`."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).clear()
        vars(self).update(state)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __repr__(self) -> str:
        return "state(" + ", ".join(f"{name}={value!r}" for name, value in vars(self).items()) + ")"


def describe_program(
    parameters: Sequence[NamedParameters], replicas: Replicas, order: str, *, follows_view: bool
) -> str:
    """Describe what must be the same on all workers: replicas and their order, the parameters of each model, samples."""
    shapes = repr([(name, tuple(p.shape), str(p.dtype)) for each in parameters for name, p in each]).encode()
    digest = hashlib.sha256(shapes).hexdigest()[:12]
    count = "a replica per worker" if follows_view else f"{replicas.count} replicas"
    samples = f"{replicas.num_samples} samples in batches of {replicas.loading.batch_size}"
    return f"{count} added in the order {order!r}, {sum(map(len, parameters))} parameters ({digest}), {samples}"


def describe_names(names: Iterable[str]) -> str:
    """Return names in alphabetical order; of many only how many there are, and a digest, since the text is sent to all workers
    in a message of fixed size."""
    text = ", ".join(sorted(names))
    if len(text) <= MOST_NAMES_CHARS:
        return text
    return f"{text.count(', ') + 1} objects ({hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]})"


def why_no_priority(
    models: Sequence[torch.nn.Module], averaging: AveragingOptimizer | None, tracked: dict[str, Any]
) -> str:
    """Return why the sums of this program must travel by `fifo`; empty if they need not."""
    if averaging is not None:
        return f"{averaging.describe()} averages models"
    if len(models) > 1:
        return f"there are {len(models)} models"
    for name, thing in tracked.items():
        if not isinstance(thing, LRScheduler | StateNamespace):
            return f"{name!r} (a {type(thing).__name__}) uses the gradients or parameters of every step at once"
    return hidden_uses(models[0])


def make_probe(
    monitors: dict[str, int],
    reducers: Sequence[GradientReducer],
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
            f"{', '.join(monitors)} needs gradients that are summed over the workers, but {averaging.describe()} averages "
            "models instead: leave out these monitors"
        )
    if len(reducers) > 1:
        raise ConfigError(
            f"{', '.join(monitors)} can be monitored for one model, but job.wrap got {len(reducers)}: leave out these monitors"
        )
    return GradientProbe(
        reducers[0].parameters,
        optimizers,
        noise_scale=monitors.get("noise_scale", 0),
        variance=monitors.get("variance", 0),
    )


# --- optimizers ---


OnOuterCode: TypeAlias = Callable[[str], None]
"""Raises TrainError if something is called where it does not belong."""


class LearningRates(Protocol):
    """What policies decide about learning rates."""

    learning_rate_factor: float


def hook_optimizer(optimizer: torch.optim.Optimizer, current: CurrentStep, rates: LearningRates) -> Callable[[], None]:
    """Make `step` refuse a closure and the wrong place, and use the learning rates that policies decide. Returns a
    function that removes the hooks."""
    scaled = contextlib.ExitStack()
    hooks: list[RemovableHandle] = []

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs:
            _refuse_closure(optimizer, *args[1:], kwargs.get("closure"))
        if current.turn is not None or current.left_early:
            current.check_outer("optimizer.step()")
        if (factor := rates.learning_rate_factor) != 1.0:
            if len(hooks) == 1:
                hooks.append(optimizer.register_step_post_hook(lambda *_: scaled.close()))
            scaled.enter_context(_scaled_rates(optimizer, factor))

    hooks.append(optimizer.register_step_pre_hook(before))

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def _refuse_closure(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if any(argument is not None for argument in arguments):
        raise Unsliceable(
            f"{type(optimizer).__name__}.step(closure) computes several gradients per step, for which the "
            "replicas would have to take turns inside of it: use an optimizer without a closure"
        )


@contextlib.contextmanager
def _scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates by the policies' factor for the time of a step. Schedulers and checkpoints only ever
    see the program's own rates."""
    groups = [group for group in optimizer.param_groups if factor != 1.0 and group.get("lr") is not None]
    own = [group["lr"] for group in groups]
    for group, rate in zip(groups, own, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, own, strict=True):
            group["lr"] = rate


def defer_optimizer(
    optimizer: torch.optim.Optimizer,
    deferred: DeferredUpdates,
    check_outer: OnOuterCode,
    is_taken_back: Callable[[], bool],
    rate_factor: Callable[[], float],
) -> None:
    """Make `step` update each parameter when its sum has arrived, and `zero_grad` clear it after that. (Hooks would not
    do: a step is then made of several.)"""
    original, original_zero = optimizer.step, optimizer.zero_grad

    @functools.wraps(original)
    def step(_: torch.optim.Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        _refuse_closure(optimizer, closure)
        check_outer("optimizer.step()")
        if is_taken_back():
            return None
        with _scaled_rates(optimizer, rate_factor()):
            if not deferred.is_deferring:
                return original(**kwargs)
            watch_state(optimizer, deferred)
            return deferred.step(optimizer, original, **kwargs)

    @functools.wraps(original_zero)
    def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if deferred.is_pending:
            deferred.zero_grad(optimizer, original_zero, set_to_none)
            return
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            original_zero(set_to_none=set_to_none)

    step.of_pliant = True  # type: ignore[attr-defined]
    # Bound methods, as before: LR schedulers that are made later look for their functions.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    gate_state(optimizer, deferred)


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], parameters: NamedParameters) -> None:
    """Raise ConfigError or Unsliceable if a job cannot use these optimizers."""
    known = {id(parameter) for _, parameter in parameters}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsliceable("LBFGS needs a closure that computes several gradients per step: use another optimizer")
        for group in optimizer.param_groups:
            if any(parameter.requires_grad and id(parameter) not in known for parameter in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} updates a parameter that is in no model of the job: its gradient would not "
                    "be summed over the replicas. Give job.wrap all models, as a list"
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


def refuse_untracked_scalers(tracked: dict[str, Any]) -> Callable[[], None]:
    """Raise TrainError when a GradScaler that is not tracked is updated: a new worker would have another scale. Returns
    a function that undoes this."""
    original = torch.amp.GradScaler.update

    @functools.wraps(original)
    def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(thing is scaler for thing in tracked.values()):
            raise TrainError(
                "this GradScaler is not part of the job: add `job.track('scaler', scaler)` before job.epochs"
            )
        return original(scaler, *args, **kwargs)

    torch.amp.GradScaler.update = update  # type: ignore[assignment,method-assign]

    def undo() -> None:
        torch.amp.GradScaler.update = original  # type: ignore[method-assign]

    return undo
