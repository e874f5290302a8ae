"""Pickles of others, read without running anything in them: plain values and OrderedDict, and no other name."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

from pliant.errors import ConfigError


def read_pickle(path: Path) -> object:
    """What the file holds: dictionaries, lists, strings, numbers.

    Raises:
        ConfigError: there is no such file, it is no pickle, or it wants to call something.
    """
    try:
        with path.open("rb") as file:
            found: object = _Plain(file, path).load()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a file that you have") from None
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle fails in more ways than its module lists
        raise ConfigError(f"{path}: not a pickle, or damaged ({type(error).__name__}: {error})") from None
    return found


class _Plain(pickle.Unpickler):
    def __init__(self, file: object, path: Path) -> None:
        super().__init__(file)  # type: ignore[arg-type]
        self._path = path

    def find_class(self, module: str, name: str) -> type[OrderedDict[object, object]]:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise ConfigError(
            f"{self._path}: this pickle wants {module}.{name}; only plain values and OrderedDict are read, "
            "because a pickle can run anything: save it again without that"
        )
