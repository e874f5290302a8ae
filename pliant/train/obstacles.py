"""Modules of a model that rule out time-slicing, repeatable results on CUDA, or mixed kinds of GPUs.

A model is examined without running it, and each module that is in the way is reported with the reason and the remedy.

To find collectives and matrix products, the bytecode is read: that of a module's own methods, of its hooks, and of the
functions that they call. Names are resolved to what they mean there. So no source file is needed, and `dist.all_reduce` is
found under whatever name it was imported. What is looked up at run time only (getattr, a dict of functions) is not found.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

import numpy as np
import torch
from torch import nn

from pliant.errors import Unsliceable

COLLECTIVES = ("all_reduce", "allreduce", "all_gather", "allgather", "all_to_all", "alltoall", "barrier", "broadcast",
               "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")  # fmt: skip
PRODUCTS = ("addbmm", "addmm", "baddbmm", "bilinear", "bmm", "einsum", "linear", "matmul", "mm", "mv", "tensordot",
            "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
            "conv_transpose3d", "multi_head_attention_forward")  # fmt: skip
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_PRODUCT_MODULES = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.TransformerEncoderLayer)

# Their backward on CUDA uses atomics, and torch has no other (torch.use_deterministic_algorithms lists them).
_ATOMIC = (nn.AvgPool3d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.MaxPool3d, nn.AdaptiveMaxPool2d,
           nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d,
           nn.ReflectionPad1d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad3d, nn.CTCLoss)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A module that is in the way."""

    module: str
    """Its name in the model; empty for the model itself."""
    type: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.type}): {self.why}; {self.remedy}"


def obstacles(model: nn.Module) -> list[Obstacle]:
    """Return what keeps replicas from taking turns on this model with the bits they would have alone."""
    return _scan(model, lambda module: [*_about_module(module), *_about_tensors(module), *_about_calls(module)])


def nondeterministic(model: nn.Module) -> list[Obstacle]:
    """Return modules that are known to have no deterministic kernel on CUDA, from their types alone: what functions call
    is not seen. `trial.find_operators` runs a step and sees all. CPUs have few such modules."""
    return _scan(model, _about_atomics)


def hetero(model: nn.Module) -> list[Obstacle]:
    """Return modules that compute other bits on GPUs of another kind. On CPUs D2 pins these operations."""
    return _scan(model, _about_vendors)


def check(model: nn.Module) -> None:
    """Raise Unsliceable with everything that rules out time-slicing."""
    found = obstacles(model)
    if found:
        lines = "".join(f"\n  {each}" for each in found)
        raise Unsliceable(f"replicas cannot take turns on {type(model).__name__}:{lines}")


_Finding = tuple[str, str]
"""The reason, and the remedy."""


def _scan(model: nn.Module, look: Callable[[nn.Module], list[_Finding] | Iterator[_Finding]]) -> list[Obstacle]:
    return [
        Obstacle(name, type(module).__name__, why, remedy)
        for name, module in model.named_modules()
        for why, remedy in look(module)
    ]


def _about_module(module: nn.Module) -> Iterator[_Finding]:
    homes = [kind.__module__ for kind in type(module).__mro__]
    if isinstance(module, nn.SyncBatchNorm):
        yield (
            "sums its statistics over all ranks in the middle of forward, so no replica can finish before the others begin",
            "use nn.BatchNorm1d/2d/3d, whose buffers are treated as DDP treats them",
        )
    elif any(home.startswith(("torch.nn.parallel.", "torch.distributed.")) for home in homes):
        yield "distributes the model by itself", "give the bare model to job.wrap (what was passed to this wrapper)"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        yield "has sparse gradients, which cannot be summed here", "use sparse=False"
    for name, value in vars(module).items():
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            yield (
                f"draws from a generator of its own ({name}), which all replicas would share",
                "draw from the default generator of torch, numpy or random: each replica has its own state of those",
            )


def _about_tensors(module: nn.Module) -> Iterator[_Finding]:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if nn.parameter.is_lazy(tensor):
            yield f"{name} has no shape yet", "run one batch through the model before job.wrap"
        elif tensor.is_meta:
            yield f"{name} is on the meta device and has no memory", "build the model on a real device"
        elif tensor.layout is not torch.strided:
            yield f"{name} is not dense ({tensor.layout})", "use a dense tensor"
        elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            yield (
                f"{name} is a {type(tensor).__name__}, which is no plain tensor",
                "give the undistributed model to job.wrap",
            )
        elif tensor.is_complex() and tensor.requires_grad:
            yield (
                f"{name} is complex, and the sum of complex gradients follows another order",
                "keep real and imaginary part in a real parameter, and use torch.view_as_complex in forward",
            )


def _about_calls(module: nn.Module) -> Iterator[_Finding]:
    for use in references_of(module):
        if _is_collective(use):
            yield (
                f"calls {use.name} ({use.where}): a collective between replicas that take turns would wait for ever",
                "compute it from this replica's own data, or after the loop over the step with job.all_reduce",
            )


def _is_collective(use: CodeReference) -> bool:
    home, _, name = use.name.rpartition(".")
    return home.startswith("torch.distributed") and any(stem in name.lower() for stem in COLLECTIVES)


def _about_atomics(module: nn.Module) -> Iterator[_Finding]:
    # In strict mode torch has another way for the other modes, and computes a pool of one element as a mean.
    interpolates = isinstance(module, nn.Upsample) and module.mode in ("linear", "bicubic")
    if isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d):
        size = module.output_size
        if set(size if isinstance(size, tuple) else (size,)) == {1}:
            return
    bag = isinstance(module, nn.EmbeddingBag) and module.mode == "max"
    if isinstance(module, _ATOMIC) or interpolates or bag:
        yield (
            "on CUDA its backward adds in an order that changes from run to run, and torch has no other kernel",
            "replace it (a mean over dimensions for pooling, bilinear for interpolation), allow it (bits not promised), or train on CPUs",
        )


def _about_vendors(module: nn.Module) -> Iterator[_Finding]:
    remedy = "use GPUs of one kind, or CPUs under D2"
    if isinstance(module, _CONVOLUTIONS):
        yield "cuDNN chooses a convolution by the kind of GPU", remedy
    elif isinstance(module, _RECURRENT):
        yield "cuDNN's recurrent kernels depend on the kind of GPU", remedy
    elif isinstance(module, _PRODUCT_MODULES):
        yield "cuBLAS chooses a matrix product by the kind of GPU", remedy
    else:
        found = next((use for use in references_of(module) if use.name.rpartition(".")[2] in PRODUCTS), None)
        if found is not None:
            yield f"{found.name.lstrip('.')} ({found.where}) is a vendor's kernel, chosen by the kind of GPU", remedy


# --- the bytecode ---


MAX_CALLS_DEEP = 8
_KNOWN_PACKAGES = {"torch", "numpy", "builtins"} | set(sys.stdlib_module_names)
"""Packages whose functions are known and not examined."""


@dataclass(frozen=True, slots=True)
class CodeReference:
    """Something that the code refers to."""

    name: str
    """Where it is defined: torch.distributed.all_reduce, or just .matmul for a method of an unknown object."""
    where: str
    """file:line"""


def references_of(module: nn.Module) -> list[CodeReference]:
    """Return what this module's own code refers to, without that of its submodules."""
    found: dict[CodeReference, None] = {}
    seen: set[CodeType] = set()
    for function in _functions(module):
        for use in _references_of_function(function, seen, 0):
            found.setdefault(use)
    return list(found)


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    kinds = [kind for kind in type(module).__mro__ if kind is not nn.Module and _package(kind) not in _KNOWN_PACKAGES]
    own = [kind for kind in kinds if not _is_library(kind)]
    for kind in own:
        yield from (function for _, function in _methods(kind))
    if len(own) < len(kinds):
        yield from _reached_by_forward(kinds)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in getattr(module, name, {}).values():
            if (function := _as_function(hook)) is not None:
                yield function
    if (function := _as_function(vars(module).get("forward"))) is not None:  # replaced on the instance
        yield function


def _is_library(kind: type) -> bool:
    """Return whether the class was installed. Then it may have methods besides forward that nobody calls (to save
    itself with a barrier, for example). Of the program's own classes every method counts, because its loop may call
    any."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _reached_by_forward(kinds: Sequence[type]) -> Iterator[FunctionType]:
    """Yield forward, and all methods whose name its code mentions, directly or not."""
    methods: dict[str, list[FunctionType]] = {}
    for kind in kinds:
        for name, function in _methods(kind):
            methods.setdefault(name, []).append(function)
    pending, reached = ["forward", "__call__"], set()
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        for function in methods.get(name, ()):
            yield function
            pending += _names_in(function.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(kind).items():
        value = value.fget if isinstance(value, property) else value
        function = _as_function(value)
        if function is not None and name != "__init__":  # which runs once, before training
            yield name, function


def _as_function(value: object) -> FunctionType | None:
    """Return the Python function inside of methods, partials and decorators; None if there is none."""
    for _ in range(MAX_CALLS_DEEP):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            break
    return value if isinstance(value, FunctionType) else None


def _package(value: object) -> str:
    return (getattr(value, "__module__", None) or "").split(".")[0]


def _references_of_function(function: FunctionType, seen: set[CodeType], depth: int) -> Iterator[CodeReference]:
    names: dict[str, object] = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from _references_in_code(function.__code__, names, seen, depth)


def _references_in_code(
    code: CodeType, names: dict[str, object], seen: set[CodeType], depth: int
) -> Iterator[CodeReference]:
    if code in seen or depth > MAX_CALLS_DEEP:
        return
    seen.add(code)
    for name, target, line in _references(code, names):
        yield CodeReference(name, f"{code.co_filename}:{line}")
        if (
            isinstance(target, type)
            and issubclass(target, torch.autograd.Function)
            and _package(target) not in _KNOWN_PACKAGES
        ):
            for _, method in _methods(target):
                yield from _references_of_function(method, seen, depth + 1)
        elif (called := _as_function(target)) is not None and _package(called) not in _KNOWN_PACKAGES:
            yield from _references_of_function(called, seen, depth + 1)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a lambda, a comprehension, a function within
            yield from _references_in_code(constant, names, seen, depth)


def _references(code: CodeType, names: dict[str, object]) -> Iterator[tuple[str, object, int]]:
    """Yield every chain a.b.c in the code: its name, its value if that is known, and its line."""
    local: dict[str, object] = {}  # what is imported within the function
    package, imported = "", None
    current: tuple[str, object] | None = None
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None:
            line = instruction.positions.lineno or line
        what, value = instruction.opname, instruction.argval
        if what in ("LOAD_ATTR", "LOAD_METHOD"):
            if current is not None and isinstance(current[1], type):
                yield (*current, line)  # a class, too, is used: Function.apply calls its forward
            current = _attribute(current, value)
            continue
        if current is not None:
            yield (*current, line)
            current = None
        if what == "IMPORT_NAME":
            package, imported = value, None
        elif what == "IMPORT_FROM":  # also for `import a.b as c`
            imported = getattr(sys.modules.get(package), value, sys.modules.get(package))
        elif what == "STORE_FAST" and package:
            local[value] = imported or sys.modules.get(package.split(".")[0])
            package = package if imported else ""
        elif what in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF") and value in names:
            current = (_name_of(names[value], value), names[value])
        elif what.startswith("LOAD_FAST") and value in local:
            current = (_name_of(local[value], value), local[value])
        elif what == "BINARY_OP" and instruction.argrepr in ("@", "@="):
            yield ".matmul", None, line
    if current is not None:
        yield (*current, line)


def _attribute(owner: tuple[str, object] | None, name: str) -> tuple[str, object]:
    # Only of modules and classes: elsewhere an attribute may be a property, which would run.
    if owner is not None and isinstance(owner[1], (ModuleType, type)):
        value = getattr(owner[1], name, None)
        return _name_of(value, f"{owner[0]}.{name}"), value
    return f".{name}", None


def _name_of(value: object, fallback: str) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, (type, FunctionType)) or (callable(value) and isinstance(module, str)):
        return f"{module}.{name or fallback}"
    return fallback
