"""Functions of the user, named as `module:function`: finds and calls them, and turns their errors into one line."""

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
_FOREIGN = ("<", *(f"{_PATHS[name]}/" for name in ("stdlib", "purelib", "platlib")), f"{Path(__file__).parents[2]}/")
"""Code below these paths is not the user's: Python's, installed packages', and ours."""


def is_function_name(text: str) -> bool:
    return ":" in text


def find_function(text: str, key: str, contract: str, *arguments: object) -> Callable[..., Any]:
    """Import `module:function` and check that it can be called with `arguments`.

    Modules in the current folder are found, too. `key` is the config's key and `contract` what the function must take and
    return, both for messages.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = "give module:function of a module that can be imported"
        raise ConfigError(f"{key} {text!r}: {error}; {hint}, as one beside the job's file") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} {text!r}: {module_name} cannot be imported: {_describe(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key} {text!r}: {module_name} has no function {name!r}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{key} {text!r}: {error}; {contract}") from None
    except ValueError:
        pass  # a function written in C may have no signature
    return function  # type: ignore[no-any-return]


def call_function(text: str, key: str, contract: str, *arguments: object) -> Any:
    """Call `module:function` with `arguments`; raises ConfigError if it cannot be found or fails."""
    function = find_function(text, key, contract, *arguments)
    with user_code_errors(f"{key} {text!r} failed"):
        return function(*arguments)


@contextlib.contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """Raise what the user's code raises within the block as a ConfigError of one line."""
    try:
        yield
    except PliantError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {_describe(error)}") from None


def _describe(error: BaseException) -> str:
    """Return the exception in one line, with the last line of the user's code that it came through."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (at {error.filename}:{error.lineno})"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_FOREIGN)]
    return f"{text} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else text
