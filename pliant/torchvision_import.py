"""Imports torchvision beside any torch, also one that its library was not compiled for.

The wheel from PyPI is compiled for a torch with CUDA. Beside a torch for CPUs its library cannot be loaded. Classifiers do
not need that library, but the import does.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from pliant.errors import ConfigError

MISSING = (
    ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ("qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
)
"""Operators that torchvision registers with torch when it is imported, whether its library was loaded or not."""


def import_torchvision() -> ModuleType:
    """Import torchvision, whichever torch it was compiled for. Call it also before a library that imports torchvision
    itself.

    Raises:
        ConfigError: it is not installed.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("torchvision is not installed: `pip install 'pliant[examples]'`")
    _declare_missing(Path(found.submodule_search_locations[0]))
    return importlib.import_module("torchvision")


def _declare_missing(folder: Path) -> None:
    """Declare the operators of torchvision's library if it cannot be loaded. They cannot be called then."""
    for library in sorted(folder.glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            continue  # compiled for another torch
    for name, schema in MISSING:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
