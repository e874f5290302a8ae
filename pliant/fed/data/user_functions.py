"""Functions that a user names, `module:function`: found, called, and their mistakes told in one line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pliant.errors import ConfigError, PliantError

_PATHS = sysconfig.get_paths()
NOT_THEIRS = tuple(str(Path(_PATHS[name])) for name in ("stdlib", "purelib", "platlib"))
OURS = str(Path(__file__).parents[1])


def is_function_name(text: str) -> bool:
    return ":" in text


def function_of(text: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` means; modules beside the program and in the current folder are found.

    Raises:
        ConfigError: there is no such module, it fails, or it has no such function; `what` is the config's key.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = "give module:function of a module that can be imported"
        raise ConfigError(f"{what} {text!r}: {error}; {hint}, as one beside the job's file") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} {text!r}: {module_name} cannot be imported: {_told(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{what} {text!r}: {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def find_function(text: str, what: str, contract: str, *given: object) -> Callable[..., Any]:
    """The function, which can be called with `given`; `contract` says what it must take and return.

    Raises:
        ConfigError: it is not there, or takes something else.
    """
    function = function_of(text, what)
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise ConfigError(f"{what} {text!r}: {error}; {contract}") from None
    except ValueError:
        pass  # one written in C may not say what it takes
    return function


def call_function(text: str, what: str, contract: str, *given: object) -> Any:
    """What it makes of `given`.

    Raises:
        ConfigError: as above, or it fails.
    """
    function = find_function(text, what, contract, *given)
    with user_code_errors(f"{what} {text!r} failed"):
        return function(*given)


@contextlib.contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """What the user's code raises within the block becomes one line.

    Raises:
        ConfigError: it failed; with the exception, and the line of it.
    """
    try:
        yield
    except PliantError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {_told(error)}") from None


def _told(error: BaseException) -> str:
    """The exception in one line, and the last line of the user's own that it came through."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (at {error.filename}:{error.lineno})"
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    return f"{said} (at {theirs[-1].filename}:{theirs[-1].lineno})" if theirs else said


def _is_theirs(path: str) -> bool:
    return not path.startswith(("<", *(f"{folder}/" for folder in (*NOT_THEIRS, OURS))))
