"""Operators without a deterministic kernel: which module called one, which of them the user allows, and how to list all.

In strict mode torch raises an error where it has no deterministic kernel for an operator. The error names a C++ function.
Training pays nothing for a better message: only when the error has come, `explain` reads its traceback, and for a backward
also the graph of the loss, and says which module of the model it was.

An allowed operator runs with strict mode off, and only for the time of its own kernel. torch's warn-only mode is no
substitute: in it the kernels of attention are not deterministic.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant.errors import ConfigError, NotDeterministic

_ALERT = re.compile(r"(\w+(?: [\w ]+?)?) does not have a deterministic implementation")
_DEVICES = ("CPU", "CUDA")
_NOISE = {"", "out", "forward", "kernel"}
_OTHER_NAMES = {"embeddingbagbackward": "embeddingbagdensebackward"}
"""Operators whose alert has another name than the operator: both without underscores."""


def alert_of(error: BaseException) -> str:
    """Return the name that torch gives to the operator without a deterministic kernel; empty if it is another error."""
    # The error of a model that is compiled has it somewhere in the middle.
    found = _ALERT.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found is not None else ""


def operator_name(alert: str) -> str:
    """Return the name of an operator as users write it: `median` for torch's `median CUDA with indices output`."""
    first = alert.split()[0].removeprefix("aten::").partition(".")[0] if alert.strip() else ""
    return first if f"aten::{first}" in _all_operators() else "_".join(_words(first))


def _words(name: str) -> list[str]:
    words: list[str] = []
    for word in name.replace("unpooling", "unpool").split("_"):
        if words and word in ("cuda", "gpu", "cpu"):
            break  # embedding_bag_backward_cuda_max: what follows is a variant
        if word not in _NOISE:
            words.append(word)
    return words


def _key(name: str) -> str:
    key = "".join(_words(name)).lower()
    return _OTHER_NAMES.get(key, key)


@functools.cache
def _all_operators() -> frozenset[str]:
    """Return the names of all of torch's own operators, without overloads."""
    return frozenset(
        name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    )


# --- operators that the user allows ---


def check_allowed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of allowed operators in their usual form, sorted.

    Raises:
        ConfigError: torch has no operator of such a name.
    """
    if isinstance(names, str):
        raise ConfigError(f"allow={names!r}: use a list of operators, such as [{names!r}]")
    found = set()
    for name in names:
        if not isinstance(name, str) or not _overloads(name):
            raise ConfigError(
                f"allow={name!r}: torch has no such operator: use the name that the error or `pliant doctor` shows, such "
                "as put_ or grid_sampler_2d_backward"
            )
        found.add(operator_name(name))
    return tuple(sorted(found))


def _overloads(name: str) -> list[str]:
    """Return the operators with an own kernel, such as `aten::put_`, that a name stands for."""
    if not name.strip():
        return []
    key = _key(name.split()[0].removeprefix("aten::").partition(".")[0])
    return [
        each
        for each in torch._C._dispatch_get_all_op_names()
        if each.startswith("aten::")
        and _key(each.removeprefix("aten::").partition(".")[0]) == key
        and any(torch._C._dispatch_has_kernel_for_dispatch_key(each, device) for device in _DEVICES)
    ]


_lifted_kernels: dict[tuple[str, str], tuple[Any, int]] = {}
"""The libraries of replaced kernels by operator and device, and how many times each is allowed now."""


def allow(names: Iterable[str]) -> Callable[[], None]:
    """Let these operators run in strict mode although they have no deterministic kernel. Returns what ends this.

    Their kernels are replaced with a call of the same kernel in which strict mode is off. So every other operator keeps
    its deterministic kernel, and costs what it did; a call of an allowed operator costs some microseconds more.
    """
    wanted = [
        (name, device)
        for name in dict.fromkeys(each for given in names for each in _overloads(given))
        for device in _DEVICES
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, device)
    ]
    for each in wanted:
        library, times = _lifted_kernels.get(each) or (_replace_kernel(*each), 0)
        _lifted_kernels[each] = library, times + 1

    def disallow() -> None:
        for each in wanted:
            library, times = _lifted_kernels.pop(each)
            if times > 1:
                _lifted_kernels[each] = library, times - 1
            else:
                library._destroy()

    return disallow


def _replace_kernel(name: str, device: str) -> torch.library.Library:
    """Replace the kernel of an operator with one that lifts strict mode, for as long as the returned library exists."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernel = torch.library.get_kernel(name, device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*[Oo]verriding a previously registered kernel")
        lifted = _lifted(kernel)
        library.impl(name[6:], lifted, device, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _lifted(kernel: Any) -> Callable[..., Any]:
    """Return a kernel that runs another one with strict mode off."""

    def run(keys: Any, *arguments: Any, **options: Any) -> Any:
        with _strict_mode_off():
            return kernel.call_boxed(keys, *arguments, **options)

    return run


@contextlib.contextmanager
def _strict_mode_off() -> Iterator[None]:
    was_on, warned = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=warned)


# --- the error ---


def explain(error: BaseException, models: Sequence[nn.Module]) -> NotDeterministic | None:
    """Return an error that names the operator, the module that called it and what to do; None for any other error."""
    alert = alert_of(error)
    if not alert:
        return None
    name = operator_name(alert)
    place = _place_in_forward(error.__traceback__, models) or _place_in_backward(error.__traceback__, alert, models)
    return NotDeterministic(
        f"{name} has no deterministic kernel here, so equal bits cannot be promised ({place or 'called by the program itself'}). "
        f'Use another operator there, or accept it with pliant.join(allow=["{name}"]) or `pliant run --allow {name}`: the job '
        'says "bits not promised" then. With determinism="D0" no bits are promised across changes of workers, and torch is '
        "free. `pliant doctor FILE.py:FUNCTION --device cuda` lists all such operators of a model"
    )


def _named_modules(models: Sequence[nn.Module]) -> dict[int, tuple[str, nn.Module]]:
    """Return the modules by their id, with their names in the model: `1:blocks.3` in the second of several models."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for number, model in enumerate(models):
        prefix = f"{number}:" if len(models) > 1 else ""
        for name, module in model.named_modules():
            found.setdefault(id(module), (prefix + name, module))
    return found


def _title(name: str, module: nn.Module) -> str:
    return f"{name or 'the model itself'} ({type(module).__name__})"


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _place_in_forward(trace: TracebackType | None, models: Sequence[nn.Module]) -> str:
    """Return the innermost module of the model whose method was running; empty if none was."""
    modules, place = _named_modules(models), ""
    for frame in _frames(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in modules:
            place = f"called by {_title(*modules[id(owner)])}"
    return place


def _place_in_backward(trace: TracebackType | None, alert: str, models: Sequence[nn.Module]) -> str:
    """Return the module whose backward was running; empty if none was.

    A node of the graph does not know its module. But torch numbers the nodes in the order of forward and runs them
    backwards, so the node is the last one with the name of the operator; and nodes that use parameters show which modules
    ran before and after it.
    """
    outputs: Sequence[torch.Tensor] = ()
    node: Any = None
    for frame in _frames(trace):
        if frame.f_code.co_name == "_engine_run_backward":
            outputs = frame.f_locals.get("t_outputs", ())
        elif outputs and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            node = first if hasattr(first, "next_functions") else node  # the ctx of an autograd.Function
    if not outputs:
        return ""
    graph = _graph_of(outputs)
    if node is None:
        wanted = _key(alert.split()[0]).removesuffix("backward")
        named = [each for each in graph if _key(re.sub(r"Backward\d*$", "", each.name())) == wanted]
        node = max(named, key=lambda each: each._sequence_nr(), default=None)
    if node is None:
        return "called in a backward"
    return _describe_place(node._sequence_nr(), alert, _uses_of_parameters(graph, models), models)


def _graph_of(outputs: Sequence[torch.Tensor]) -> list[Any]:
    seen: dict[Any, None] = {}
    pending = [each.grad_fn for each in outputs if each.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            pending += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def _uses_of_parameters(graph: Sequence[Any], models: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return the numbers of all nodes that use a parameter, with the id of its module, in the order of forward."""
    owners = {
        id(parameter): key
        for key, (_, module) in _named_modules(models).items()
        for parameter in module.parameters(recurse=False)
    }
    uses = [
        (node._sequence_nr(), owners[id(leaf.variable)])
        for node in graph
        for leaf, _ in node.next_functions
        if leaf is not None and id(getattr(leaf, "variable", None)) in owners
    ]
    return sorted(uses)


def _describe_place(number: int, alert: str, uses: Sequence[tuple[int, int]], models: Sequence[nn.Module]) -> str:
    """Return which module has made the node with this number, as exactly as it can be known."""
    modules = _named_modules(models)
    order = {key: index for index, key in enumerate(modules)}
    at = bisect(uses, (number, 0))
    before = uses[at - 1][1] if at else None
    after = uses[at][1] if at < len(uses) else None
    like = [
        key for key, (_, module) in modules.items() if _key(alert.split()[0]).startswith(type(module).__name__.lower())
    ]
    begin, end = order[before] if before is not None else -1, order[after] if after is not None else len(order)
    between = [key for key in like if begin < order[key] < end]
    if len(found := like if len(like) == 1 else between) == 1:
        return f"called in the backward of {_title(*modules[found[0]])}"
    if before is None or after is None:
        known = [
            f"{word} {_title(*modules[key])}" for word, key in (("after", before), ("before", after)) if key is not None
        ]
        return ", ".join(["called in a backward", *known])
    names = modules[before][0], modules[after][0]
    parent = ".".join(_common(name.split(".") for name in names))
    inside = next((module for name, module in modules.values() if name == parent), None)
    title = _title(parent, inside) if inside is not None else "the models"
    between_them = f", after {names[0]} and before {names[1]}" if names != (parent, parent) else ""
    return f"called in the backward of {title}{between_them}"


def _common(paths: Iterable[list[str]]) -> list[str]:
    """Return what the paths begin with."""
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


# --- all of them, for `pliant doctor` ---


@dataclass(frozen=True, slots=True)
class FoundOperator:
    """A call of an operator that has no deterministic kernel."""

    operator: str
    module: str
    """The name of the module in the model; empty for the model itself, or for the program."""
    type: str
    """The class of the module; empty for the program."""
    direction: str
    """`forward` or `backward`."""


class OperatorSearch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a step in strict mode and notes every operator that has no deterministic kernel, with the module that called
    it. The operators found run with strict mode off, so that the step goes on. It is slow, and meant for one step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[FoundOperator, None] = {}
        self._modules = _named_modules([model])
        self._stack: list[int] = []
        self._makers: dict[int, int] = {}
        """The number of each node in the graph, with the id of the module in whose forward it was made."""
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Any:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._stack.append(id(module))

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            continue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node: Any = torch._C._current_autograd_node()
        if node is None and self._stack:
            # The node of this operator was made just before its kernel is called.
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._makers.setdefault(number, self._stack[-1])
        try:
            return function(*args, **(kwargs or {}))
        except RuntimeError as error:
            alert = alert_of(error)
            if not alert:
                raise
            self._note(alert, node)
        with _strict_mode_off():
            return function(*args, **(kwargs or {}))

    def _note(self, alert: str, node: Any) -> None:
        """Add a finding. `node` is the node of the graph that runs now; None in a forward."""
        recomputed = self._stack[-1] if self._stack else None  # a checkpointed module runs its forward in a backward
        key = recomputed if node is None or recomputed is not None else self._makers.get(node._sequence_nr())
        name, module = self._modules.get(key, ("", None)) if key is not None else ("", None)
        kind = type(module).__name__ if module is not None else ""
        direction = "forward" if node is None else "backward"
        self.found.setdefault(FoundOperator(operator_name(alert), name, kind, direction))
