"""Names of the kinds of data, models and aggregators that a config may name, and whether a name is one. Imports no torch.

A job file with a wrong name is thus refused at once; importing torch takes longer than reading the file.
"""

from __future__ import annotations

from pliant.errors import ConfigError
from pliant.fed.config import DataConfig
from pliant.fed.data.user_functions import is_function_name

KINDS = ("fashion-mnist", "digits", "images", "speech", "play", "posts")
NEED_PATH = KINDS[2:]
"""Kinds of data that have no default location."""
IMAGES = ("cnn", "cnn-bn")
TEXTS = ("lstm", "transformer")
THEIRS = ("resnet18", "resnet34", "shufflenet_v2_x2_0", "mobilenet_v2")
"""Models of torchvision."""
FLAT = ("mlp", "logistic")
MODELS = (*IMAGES, *FLAT, *TEXTS, *THEIRS)
AGGREGATORS = (
    "fed-avg", "fed-prox", "fed-yogi", "fed-adam", "fed-adagrad", "q-fedavg", "trimmed-mean", "median", "krum", "fed-buff",
)  # fmt: skip


def check_kind(config: DataConfig) -> None:
    """Raise ConfigError if there is no such kind of data."""
    if not is_function_name(config.kind) and config.kind not in KINDS:
        raise ConfigError(f"data.kind {config.kind!r:.60} is unknown: use {', '.join(KINDS)}, or module:function")


def check_path(config: DataConfig) -> None:
    """Raise ConfigError if data of this kind need a path, and have none."""
    if config.kind in NEED_PATH and not config.path:
        raise ConfigError(f"data.path is empty: {config.kind} data lie in a file or folder of yours, so give its path")


def check_model(name: str) -> None:
    """Raise ConfigError if there is no such model."""
    if not is_function_name(name) and name not in MODELS:
        raise ConfigError(f"model {name!r:.60} is unknown: use {', '.join(MODELS)}, or module:function")


def check_aggregator(name: str) -> None:
    """Raise ConfigError if there is no such aggregator."""
    if name not in AGGREGATORS:
        raise ConfigError(f"aggregator {name!r:.60} is unknown: use one of {', '.join(AGGREGATORS)}")
