"""Samples that a user's own function returns: as `datasets.Samples`, or as pairs of inputs and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.data.datasets import InMemory, Samples
from pliant.fed.named import called, fitting, users_own

PARTS = ("labels", "classes", "clients", "inputs")
"""What `Samples` has."""
MOST_CLASSES = 1_000_000
TAKES = "it is called with nothing"
TAKES_PATH = "it is called with data.path"
RETURNS = "return training and test samples, each (inputs, labels) or an InMemory"


def own_samples(kind: str, path: str) -> tuple[Samples, Samples]:
    """What `module:function` gives, called with the path where there is one.

    Raises:
        ConfigError: the function is not there, fails, or gives something else; one line names it and what is wanted.
    """
    what = f"data.kind {kind!r}"
    made = called(kind, "data.kind", *_given(path))
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ConfigError(f"{what} gave {_shape(made)}: {RETURNS}")
    with users_own(f"{what} gave samples that cannot be used"):
        if all(_is_pair(each) for each in made):
            return _wrapped(what, made)
        return _checked(what, "train", made[0]), _checked(what, "test", made[1])


def check_function(kind: str, path: str) -> None:
    """Raises ConfigError where the function is not there, or cannot be called so; it is not."""
    fitting(kind, "data.kind", *_given(path))


def _given(path: str) -> tuple[str, ...]:
    """The contract, and what the function is called with."""
    return (f"{TAKES_PATH}: {RETURNS}", path) if path else (f"{TAKES}: {RETURNS}",)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and not isinstance(given[0], str)


def _wrapped(what: str, made: Sequence[Any]) -> tuple[InMemory, InMemory]:
    inputs = [_inputs(what, each[0]) for each in made]
    raw = [np.asarray(each[1].cpu() if isinstance(each[1], Tensor) else each[1]) for each in made]
    if any(each.dtype.kind in "US" for each in raw):
        names = sorted({str(name) for each in raw for name in each.ravel().tolist()})
        place = {name: number for number, name in enumerate(names)}
        raw = [np.array([place[str(name)] for name in each.ravel().tolist()]).reshape(each.shape) for each in raw]
        labels, classes = [_labels(what, each) for each in raw], tuple(names)
    else:
        labels = [_labels(what, each) for each in raw]
        most = max((int(each.max()) for each in labels if each.numel()), default=-1)
        if most >= MOST_CLASSES:
            raise ConfigError(f"{what}: a label is {most}: number the classes from 0")
        classes = tuple(str(number) for number in range(most + 1))
    for part, data, told in zip(("train", "test"), inputs, labels, strict=True):
        if len(data) != len(told):
            raise ConfigError(f"{what}: {part} has {len(data)} inputs and {len(told)} labels: give one for each")
    return InMemory(inputs[0], labels[0], classes), InMemory(inputs[1], labels[1], classes)


def _inputs(what: str, given: Any) -> Tensor:
    found = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    if found.dim() < 2:
        raise ConfigError(f"{what}: inputs of shape {list(found.shape)}: the first dimension counts the samples")
    if found.dtype == torch.uint8:
        return found.float() / 255  # pixels, as everybody scales them
    if found.dtype in (torch.int16, torch.int32, torch.int64):
        return found.long()  # codes of a text
    return found.float()


def _labels(what: str, given: Any) -> Tensor:
    if given.dtype.kind not in "iufb" or given.ndim not in (1, 2):
        raise ConfigError(
            f"{what}: labels of type {given.dtype} and shape {list(given.shape)}: give a number or name for each sample"
        )
    whole = given.astype(np.int64)
    if not np.array_equal(whole, given) or (whole < 0).any():
        wrong = given.ravel()[np.flatnonzero((whole != given) | (whole < 0))[0]]
        raise ConfigError(f"{what}: a label is {wrong}: number the classes from 0")
    return torch.from_numpy(whole)


def _checked(what: str, part: str, given: Any) -> Samples:
    if missing := [name for name in PARTS if not hasattr(given, name)]:
        raise ConfigError(f"{what}: its {part} samples are {_shape(given)}, without {missing[0]!r}: {RETURNS}")
    labels, num_classes = given.labels, len(given.classes)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() not in (1, 2):
        raise ConfigError(f"{what}: its {part} labels are {_shape(labels)}: give a tensor of whole numbers")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigError(
            f"{what}: its {part} labels are {int(labels.min())} to {int(labels.max())}, and there are {num_classes} "
            "classes: number them from 0, with a name for each"
        )
    if given.clients and len(given.clients) != len(labels):
        raise ConfigError(f"{what}: {part} has {len(given.clients)} clients for {len(labels)} labels: one for each")
    if len(labels) and not isinstance(given.inputs([0]), Tensor):
        raise ConfigError(f"{what}: inputs([0]) of its {part} samples gives no tensor: return one of these samples")
    return cast(Samples, given)


def _shape(value: object) -> str:
    """What it is, in a word or two."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    return type(value).__name__
