"""What can be found wrong with a job in a moment, before anything of it exists: its tables, its data's place, its functions.

Data are not loaded, and tables only where that takes no time: what is left is found when the task is built.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.clients import read_availability, read_devices
from pliant.fed.config import DataConfig, FedConfig
from pliant.fed.data import datasets, models, partition
from pliant.fed.data.user_functions import find_function, is_function_name
from pliant.fed.tables import read_client_map, read_sizes
from pliant.yaml_source import KeyPath

MOST_BYTES = 16 << 20
"""Tables larger than this are read only once, by the job."""
NUM_DIGITS = 1438
"""To train with."""
SHAPES = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "images": (3, 64, 64), "speech": (1, 32, 32)}
"""Of samples; those of the others are texts."""


def tried(config: FedConfig, folder: Path) -> dict[KeyPath, str]:
    """What is wrong, by the key; paths are absolute, and functions lie beside the file, in `folder`."""
    data, wrong = config.data, dict[KeyPath, str]()

    def check(place: KeyPath, what: Callable[[], object]) -> None:
        try:
            what()
        except ConfigError as error:
            wrong.setdefault(place, str(error))

    if config.devices not in ("synthetic", "equal"):
        check(("devices",), lambda: _small(config.devices, read_devices))
    if config.availability not in ("", "synthetic"):
        check(("availability",), lambda: _small(config.availability, read_availability))
    if data.map:
        check(("data", "map"), lambda: _small(data.map, read_client_map))
    if data.sizes:
        check(("data", "sizes"), lambda: _small(data.sizes, read_sizes))
    with _beside(folder):
        if is_function_name(data.kind):
            check(("data", "kind"), lambda: datasets.check_function(data.kind, data.path))
        else:
            check(("data", "path") if data.path else ("data",), lambda: _there(data))
        if is_function_name(config.model):
            check(("model",), lambda: find_function(config.model, "model", models.OWN, 2))
        elif not is_function_name(data.kind):
            check(("model",), lambda: models.check(config.model, _sample(data.kind)))
    if not wrong:
        check(("data", "clients"), lambda: _enough(data))
    return wrong


def _small(path: str, read: Callable[[Path], object]) -> None:
    if Path(path).stat().st_size <= MOST_BYTES:
        read(Path(path))


def _there(data: DataConfig) -> None:
    path = Path(data.path)
    if data.kind == "fashion-mnist":
        datasets.fashion_files(path if data.path else None)
    elif data.kind == "digits" and importlib.util.find_spec("sklearn") is None:
        raise ConfigError(datasets.NO_DIGITS)
    elif data.kind == "images" and not path.is_dir():
        raise ConfigError(f"{path}: no folder; give one with a folder of images for each class")
    elif data.kind == "speech" and next(path.glob("*/*_nohash_*.wav"), None) is None:
        raise ConfigError(datasets.NOT_THERE.format(path))
    elif data.kind in ("play", "posts") and not path.is_file():
        raise ConfigError(f"{path}: no file; give {'a text' if data.kind == 'play' else 'a CSV of author and text'}")


def _sample(kind: str) -> Tensor:
    return torch.empty(SHAPES[kind]) if kind in SHAPES else torch.empty(80, dtype=torch.int64)


def _enough(data: DataConfig) -> None:
    """Samples for all clients, where it is known how many there are."""
    if data.partition == "natural" or data.sizes:
        return
    if data.kind == "digits":
        partition.check_clients(NUM_DIGITS, data.clients)
    elif data.kind == "fashion-mnist":
        labels = datasets.fashion_files(Path(data.path) if data.path else None)["train-labels-idx1-ubyte"]
        partition.check_clients(datasets.idx_length(labels), data.clients)


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Modules in `folder` can be imported; they are forgotten, as another job's may have the same names."""
    before, path = set(sys.modules), list(sys.path)
    with contextlib.chdir(folder):
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).is_relative_to(folder):
                    del sys.modules[name]
