"""Packages that pliant can use: whether each is installed, and how to install it.

The required versions are those of pliant's own metadata. Nothing is imported, because that may take seconds.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata

DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Distribution names of modules that are named differently."""

USES = {
    "torchvision": "ResNet and its data sets in the benches",
    "sklearn": "the digits of `pliant demo`",
    "matplotlib": "figures",
    "nicegui": "the page of `pliant dash`",
    "ray": "jobs on a Ray cluster (`pliant run --on ray`)",
    "flwr": "Flower: our selection as its strategy, and its simulation as a peer",
    "transformers": "BERT and the like in experiments, and Hugging Face's Trainer",
    "accelerate": "Hugging Face's Trainer on a job of ours",
    "tensorboard": "`pliant run --tensorboard`",
}
"""Optional packages, and what each is used for."""

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(\[[^]]*\])?\s*\(?([^;)]*)\)?")


@dataclass(frozen=True, slots=True)
class Package:
    """A package, with the required and the installed version."""

    module: str
    version: str | None
    """Installed version; None if it is not installed, empty if it is unknown."""
    wanted: str
    """Requirement for pip, such as `ray>=2.40`."""

    @property
    def remedy(self) -> str:
        return f"pip install '{self.wanted}'"


def package(module: str) -> Package:
    """Look for a package without importing it."""
    name = DISTRIBUTIONS.get(module, module)
    wanted = _wanted().get(name.lower(), name)
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook may block it
        is_there = False
    if not is_there:
        return Package(module, None, wanted)
    try:
        return Package(module, metadata.version(name), wanted)
    except metadata.PackageNotFoundError:
        return Package(module, "", wanted)


def absent(error: ModuleNotFoundError) -> Package | None:
    """Return the package that an import did not find; None if pliant does not know it, so that the error may be ours."""
    module = (error.name or "").partition(".")[0]
    known = {
        *USES,
        "torch",
        "numpy",
        "scipy",
        "safetensors",
        "filelock",
        "yaml",
        "pydantic",
        "starlette",
        "uvicorn",
        "httpx",
    }
    return package(module) if module in known else None


def _wanted() -> dict[str, str]:
    """Return the requirements of the installed pliant by package name."""
    try:
        lines = metadata.requires("pliant") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        if (matched := _REQUIREMENT.match(line)) is not None and matched[1].lower() != "pliant":
            found[matched[1].lower()] = f"{matched[1]}{matched[2] or ''}{matched[3].strip()}"
    return found
