"""An optimizer's step for some of its parameters only, now or later.

The optimizer's own `step` does the work: it is called while it believes that it has just these parameters. Its state is
by parameter, so it stays right. Only optimizers that treat parameters one by one can be used so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

_optimizers: Any = importlib.import_module("torch.optim.optimizer")  # torch hides it behind a name of its own

Groups = list[dict[str, Any]]
"""As `param_groups` has them."""


@dataclass(slots=True, eq=False)
class Deferred:
    """A call of `optimizer.step()` that has not happened yet for some parameters."""

    optimizer: torch.optim.Optimizer
    options: Groups
    """Of each group, as they were at the call: a scheduler may have changed them since."""
    state: Any
    """The optimizer's, at the call: the program may have put another in its place since, for later steps."""

    def apply(self, groups: list[list[Parameter]]) -> None:
        """Let it happen for these parameters, which are of these groups."""
        given = [{**options, "params": group} for options, group in zip(self.options, groups, strict=True)]
        present, self.optimizer.state = self.optimizer.state, self.state
        try:
            with_groups(self.optimizer, given, lambda: _bare_step(self.optimizer))
        finally:
            self.optimizer.state = present


def options_of(optimizer: torch.optim.Optimizer) -> Groups:
    """The options of each group, as they are now."""
    return [_options(group) for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def members_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def with_groups(optimizer: torch.optim.Optimizer, groups: Groups, act: Callable[[], Any]) -> Any:
    """`act` while the optimizer believes these to be its groups. Its state is by parameter, so it stays right."""
    own = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        return act()
    finally:
        optimizer.param_groups = own


def _bare_step(optimizer: torch.optim.Optimizer) -> None:
    """The update alone, without what torch and schedulers have put around `step`: that has happened at the call."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    # Where a compiled function is the first to use a parameter, torch believes that it compiles, and its optimizers compute
    # other bits then.
    compiler: Any = torch.compiler
    compiling, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        function(optimizer)
    finally:
        compiler._is_compiling_flag = compiling


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """What happens to be the mode of whoever uses a parameter first is none of the optimizer's business."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def inseparable(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimizer cannot update one parameter after the other; empty if it can."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return f"{name} is not one of torch's own optimizers, and may need all gradients at once"
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _optimizers._global_optimizer_pre_hooks,
        _optimizers._global_optimizer_post_hooks,
    )
    if any(hooks):
        return f"{name} has step hooks, which expect one step for all parameters"
    known = list(wrappers(type(optimizer).step))
    for function in wrappers(optimizer.step):
        plain = getattr(function, "__func__", function)
        if plain not in known and not any(hasattr(plain, mark) for mark in ("of_pliant", "_wrapped_by_lr_sched")):
            return f"{name}.step was replaced by the program"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    return ""


def wrappers(function: Any) -> Iterator[Any]:
    """A patched method and all that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
