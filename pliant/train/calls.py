"""What a module calls when it runs, as far as its code tells without running it.

Reads the bytecode of a module's own methods, of its hooks, and of the functions that they call, and resolves the
names in it to what they mean there. So it needs no source file, and sees `dist.all_reduce` under whatever name it
was imported. What is looked up at run time only (getattr, a dict of functions) stays unseen.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import nn

MAX_CALLS_DEEP = 8
_STRANGERS = {"torch", "numpy", "builtins"} | set(sys.stdlib_module_names)
"""Packages whose functions are not looked into; what they are called is known."""


@dataclass(frozen=True, slots=True)
class Use:
    """Something that the code refers to."""

    name: str
    """Where it is defined: torch.distributed.all_reduce, or just .matmul for a method of something unknown."""
    where: str
    """file:line"""


def uses(module: nn.Module) -> list[Use]:
    """What this module's own code refers to; not what its submodules do."""
    found: dict[Use, None] = {}
    seen: set[CodeType] = set()
    for function in _functions(module):
        for use in _uses_of(function, seen, 0):
            found.setdefault(use)
    return list(found)


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    kinds = [kind for kind in type(module).__mro__ if kind is not nn.Module and _package(kind) not in _STRANGERS]
    own = [kind for kind in kinds if not _is_library(kind)]
    for kind in own:
        yield from _methods(kind)
    if len(own) < len(kinds):
        yield from _reached_by_forward(kinds)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in getattr(module, name, {}).values():
            if (function := _as_function(hook)) is not None:
                yield function
    if (function := _as_function(vars(module).get("forward"))) is not None:  # replaced on the instance
        yield function


def _is_library(kind: type) -> bool:
    """Whether it was installed: then it may do much beside forward (save itself with a barrier, say) that nobody calls.
    Of the program's own classes every method counts, because its loop may call any of them."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _reached_by_forward(kinds: Sequence[type]) -> Iterator[FunctionType]:
    """forward, and all methods that have a name which the code of one of these mentions."""
    methods: dict[str, list[FunctionType]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            value = value.fget if isinstance(value, property) else value
            if (function := _as_function(value)) is not None:
                methods.setdefault(name, []).append(function)
    pending, reached = ["forward", "__call__"], set()
    while pending:
        name = pending.pop()
        if name in reached or name == "__init__":
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


def _methods(kind: type) -> Iterator[FunctionType]:
    for name, value in vars(kind).items():
        if name == "__init__":
            continue  # runs once, before training
        value = value.fget if isinstance(value, property) else value
        if (function := _as_function(value)) is not None:
            yield function


def _as_function(value: object) -> FunctionType | None:
    """The Python function inside of methods, partials and decorators; None if there is none."""
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


def _uses_of(function: FunctionType, seen: set[CodeType], depth: int) -> Iterator[Use]:
    names: dict[str, object] = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from _uses_in(function.__code__, names, seen, depth)


def _uses_in(code: CodeType, names: dict[str, object], seen: set[CodeType], depth: int) -> Iterator[Use]:
    if code in seen or depth > MAX_CALLS_DEEP:
        return
    seen.add(code)
    for name, target, line in _references(code, names):
        yield Use(name, f"{code.co_filename}:{line}")
        if (
            isinstance(target, type)
            and issubclass(target, torch.autograd.Function)
            and _package(target) not in _STRANGERS
        ):
            for method in _methods(target):
                yield from _uses_of(method, seen, depth + 1)
        elif (called := _as_function(target)) is not None and _package(called) not in _STRANGERS:
            yield from _uses_of(called, seen, depth + 1)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a lambda, a comprehension, a function within
            yield from _uses_in(constant, names, seen, depth)


def _references(code: CodeType, names: dict[str, object]) -> Iterator[tuple[str, object, int]]:
    """Every chain a.b.c in the code: its name, what it is if that is known, and its line."""
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
