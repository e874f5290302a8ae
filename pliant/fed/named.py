"""Functions that a user names: `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pliant.errors import ConfigError


def is_named(text: str) -> bool:
    return ":" in text


def function_of(text: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` means; modules beside the program and in the current folder are found.

    Raises:
        ConfigError: there is no such module, or it has no such function; `what` says what it is asked for.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what} {text!r}: {error}; give module:function of a module that can be imported") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{what} {text!r}: {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]
