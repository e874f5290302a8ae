"""Parameters whose next value is on its way, and optimizer steps for single parameters.

While the sum of a parameter's gradients is under way, its class is `Pending`, and torch calls us whenever anything uses
it. Whoever uses it (a layer of the next forward, `state_dict`, a print) waits for this one parameter and goes on with an
ordinary one. So tied weights, functional use and branches need no special care. Compiled or scripted code is not covered.

The optimizer's own `step` updates single parameters: it is called while its groups hold just these. This needs an
optimizer that treats parameters one by one. `UndoLog` keeps what is needed to undo such updates.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from pliant.comm.handle import Handle

if TYPE_CHECKING:
    from pliant.train.deferred import DeferredUpdates

_Tensor: Any = torch.Tensor
_READ_GRADIENT = _Tensor.grad.__get__
_METADATA = frozenset(
    getattr(found, "__get__", found) if not callable(found) else found
    for found in (
        getattr(_Tensor, name, None)  # some exist in some versions of torch only
        for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda", "is_cpu", "is_sparse",
            "is_meta", "is_quantized", "is_nested", "names", "itemsize", "nbytes", "is_mps", "is_xpu", "grad_fn",
            "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "output_nr", "size", "dim", "numel",
            "nelement", "ndimension", "stride", "element_size", "is_contiguous", "storage_offset", "is_floating_point",
            "is_complex", "is_signed", "get_device", "__len__", "register_hook", "is_pinned", "is_shared",
            "register_post_accumulate_grad_hook", "__hash__",
        )
    )
    if found is not None
)  # fmt: skip
"""Attributes of a parameter that can be read without using its values."""


_owners: dict[int, tuple[DeferredUpdates, int]] = {}
"""The owner of each pending parameter, and its index there, by id. (An attribute would be pickled with the parameter.)
"""


class Pending(Parameter):
    """A parameter whose next value is on its way. Whatever uses it waits for that."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _READ_GRADIENT and isinstance(args[0], Pending) and id(args[0]) in _owners:
            owner, index = _owners[id(args[0])]
            owner.gradient_is_read(index)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _complete_all(args)
        if kwargs:
            _complete_all(list(kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def suspend_parameter(parameter: Parameter, owner: DeferredUpdates, index: int) -> None:
    """Make every use of this parameter ask its owner first."""
    _owners[id(parameter)] = (owner, index)
    parameter.__class__ = Pending


def release_parameter(parameter: Parameter) -> None:
    """Make it an ordinary parameter again."""
    if isinstance(parameter, Pending):
        parameter.__class__ = Parameter  # type: ignore[assignment]
    _owners.pop(id(parameter), None)


def _complete_all(values: Any) -> None:
    """Make all pending parameters among these values ready."""
    for value in values:
        if isinstance(value, Pending):
            owner = _owners.get(id(value))
            if owner is None:
                release_parameter(value)  # a copy, which has its own values
            else:
                owner[0].use(owner[1])
        elif isinstance(value, list | tuple):
            _complete_all(value)
        elif isinstance(value, dict):
            _complete_all(value.values())


# --- steps for single parameters ---


_optimizers: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the module behind a class
ParameterGroups = list[dict[str, Any]]
"""Groups in the form of `param_groups`."""


@dataclass(slots=True, eq=False)
class DeferredStep:
    """A call of `optimizer.step()` that is still to be done for some parameters."""

    optimizer: torch.optim.Optimizer
    options: ParameterGroups
    """The options of each group at the call. A scheduler may have changed them since."""
    state: Any
    """The optimizer's state at the call. The program may have replaced it since, for later steps."""

    def apply(self, groups: list[list[Parameter]]) -> None:
        """Do the step for these parameters of each group."""
        given = [{**options, "params": group} for options, group in zip(self.options, groups, strict=True)]
        present, self.optimizer.state = self.optimizer.state, self.state
        try:
            with_groups(self.optimizer, given, lambda: _bare_step(self.optimizer))
        finally:
            self.optimizer.state = present


def options_of(optimizer: torch.optim.Optimizer) -> ParameterGroups:
    """Return copies of the options of each group."""
    return [_copy_options(group) for group in optimizer.param_groups]


def _copy_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's options, or of a parameter's state."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def members_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def with_groups(optimizer: torch.optim.Optimizer, groups: ParameterGroups, act: Callable[[], Any]) -> Any:
    """Call `act` while the optimizer has these groups."""
    own = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        return act()
    finally:
        optimizer.param_groups = own


def _bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the update alone, without what torch and schedulers have put around `step`: that ran at the call."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    # If a compiled function is the first to use a parameter, torch believes that it compiles, and its optimizers would
    # compute other bits.
    compiler: Any = torch.compiler
    compiling, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        function(optimizer)
    finally:
        compiler._is_compiling_flag = compiling


@contextlib.contextmanager
def default_modes() -> Iterator[None]:
    """Set the modes that an optimizer expects, whatever the modes of the code that uses a parameter first."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def why_inseparable(optimizer: torch.optim.Optimizer) -> str:
    """Return why this optimizer cannot update parameters one by one; empty if it can."""
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
    """Yield a patched method and all that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


# --- undo ---


SavedParameter = tuple[Parameter, torch.Tensor, list[dict[str, Any] | None]]
"""A parameter, its values and its state in each optimizer before an update that may have to be undone."""


class UndoLog:
    """Restores parameters and optimizers to the beginning of a step.

    Only what is updated before all sums of its step have arrived has to be saved.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._saved: list[SavedParameter] = []
        self._states: list[tuple[torch.optim.Optimizer, Any]] = []
        """The optimizers' states as objects: the program may replace them."""
        self._options: list[tuple[torch.optim.Optimizer, ParameterGroups]] = []
        """The options of all groups when backward was over."""

    def begin(self) -> None:
        """Begin a step: what is updated from now on may have to be undone."""
        self.clear()
        self._options = [(optimizer, options_of(optimizer)) for optimizer in self._optimizers]

    def save_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the state object with which the optimizer steps now."""
        self._states.append((optimizer, optimizer.state))

    def save(self, parameter: Parameter) -> None:
        """Save a parameter with its optimizer state: it may be updated at once, or changed by the program."""
        states: list[dict[str, Any] | None] = []
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter)
            states.append(None if state is None else _copy_options(state))
        self._saved.append((parameter, parameter.detach().clone(), states))

    def restore(self) -> None:
        """Restore everything as it was when backward was over."""
        for optimizer, state in self._states:
            optimizer.state = state
        with torch.no_grad():
            for parameter, values, states in reversed(self._saved):
                parameter.copy_(values)
                for optimizer, of_parameter in zip(self._optimizers, states, strict=True):
                    if of_parameter is None:
                        optimizer.state.pop(parameter, None)
                    else:
                        optimizer.state[parameter] = of_parameter
        for optimizer, groups in self._options:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        self.clear()

    def clear(self) -> None:
        """Forget everything: nothing has to be undone any more."""
        self._saved.clear()
        self._states.clear()
        self._options.clear()


@dataclass(slots=True, eq=False)
class PendingSum:
    """Parameters whose sums come with one collective."""

    handle: Handle
    members: list[tuple[int, torch.Tensor | None]]
    """The index of each parameter, and where its sum will be; None if no replica has used it."""
