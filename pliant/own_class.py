"""Classes of the user's own that the command line names: `module:Class`, or `FILE.py:Class`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pliant.errors import ConfigError

Base = TypeVar("Base")


def load_class(place: str, base: type[Base], *, flag: str, remedy: str) -> type[Base]:
    """Import the class at `place`, which must derive from `base`.

    `flag` is what the user gave, for messages; `remedy` says from what to derive the class.

    Raises:
        ConfigError: there is no such module, file or class, or it derives from something else.
    """
    where, _, name = place.rpartition(":")
    try:
        module = _import_file(Path(where), flag) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(f"{flag}: cannot import {where}: {error}") from None
    except ConfigError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{flag}: {where} cannot be imported: {describe(error)}") from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    near = difflib.get_close_matches(name, _classes(module, base), 1)
    hint = f"did you mean {near[0]}?" if near else remedy
    raise ConfigError(f"{flag}: {where} has no policy {name!r}: {hint}")


def describe(error: BaseException) -> str:
    """Return type, text and place of an error of the user's code: `ZeroDivisionError: division by zero (fair.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) or not frames:
        return said
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _classes(module: ModuleType, base: type) -> list[str]:
    mine = inspect.getmembers(module, lambda each: isinstance(each, type) and issubclass(each, base))
    return [name for name, each in mine if each.__module__ == module.__name__]


def _import_file(path: Path, flag: str) -> ModuleType:
    """Import a file as if it were run: it may import its neighbours."""
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no file {path}")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"pliant_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
