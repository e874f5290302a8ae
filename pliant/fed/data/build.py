"""Builds the task of a federated job from its config: reads samples, deals them to clients, picks malicious clients.

Data, partition, initial model and malicious clients follow from `config.seed`, to the bit.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.config import DataConfig, FedConfig
from pliant.fed.data import datasets, models, partition
from pliant.fed.data.datasets import ImageFiles, SpeechFiles, samples_from_function, speech_commands
from pliant.fed.data.names import check_kind, check_path
from pliant.fed.data.partition import Partition
from pliant.fed.data.task import InMemory, Mask, Samples, Subset, Task, take_samples
from pliant.fed.data.user_functions import is_function_name
from pliant.fed.tables import read_client_map, read_sizes

log = logging.getLogger(__name__)
Pair = tuple[Samples, Samples]
LIARS, SHUFFLE = 1, 2
"""Purposes of random draws; each has its own stream, so that no two uses draw the same numbers."""


def build_task(config: FedConfig) -> Task:
    """Build the task of a job; reads the data."""
    train, test = _samples(config.data)
    if not len(train.labels) or not len(test.labels):
        raise ConfigError(
            f"data {config.data.kind}: {len(train.labels)} samples to train with and {len(test.labels)} to test with; "
            "both are needed"
        )
    if config.data.test_samples:
        partition.check_test_samples(len(test.labels), config.data.test_samples)
        test = take_samples(test, np.arange(config.data.test_samples))
    dealt = _partition(config.data, train, config.seed)
    num_classes, sample = len(train.classes), train.inputs([0])[0]
    made = Task(
        config,
        train,
        test,
        dealt,
        _malicious_clients(config, len(dealt)),
        _shuffle(config.seed, max(1, num_classes)),
        functools.partial(models.make_model, config.model, num_classes, sample),
    )
    if is_function_name(config.model):
        with torch.random.fork_rng(devices=[]):
            models.try_out(config.model, made.model(), num_classes, sample)
    return made


def _malicious_clients(config: FedConfig, num_clients: int) -> Mask:
    chance = np.random.default_rng((config.seed, LIARS))
    mask = np.zeros(num_clients, np.bool_)
    mask[chance.permutation(num_clients)[: round(config.malicious * num_clients)]] = True
    return mask


def _shuffle(seed: int, num_classes: int) -> Tensor:
    """Map each class to the next one in a random cycle of all classes, so that none stays what it is."""
    circle = np.random.default_rng((seed, SHUFFLE)).permutation(num_classes)
    shuffled = np.empty(num_classes, np.int64)
    shuffled[circle] = np.roll(circle, -1)
    return torch.from_numpy(shuffled)


# --- samples ---


def _samples(config: DataConfig) -> Pair:
    check_kind(config)
    check_path(config)
    path = Path(config.path)
    if is_function_name(config.kind):
        return samples_from_function(config.kind, config.path)
    if config.kind == "fashion-mnist":
        return datasets.fashion_mnist(path if config.path else None)
    if config.kind == "digits":
        return digits()
    if config.kind == "images":
        return _images(path, config.map)
    if config.kind == "speech":
        return speech_commands(path)
    return datasets.text_by_role(path) if config.kind == "play" else datasets.text_by_author(path)


def digits() -> tuple[InMemory, InMemory]:
    """Load scikit-learn's 1,797 handwritten digits, 1 x 8 x 8, with mean 0 and deviation 1; every fifth is for testing."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(datasets.NO_DIGITS) from None
    found = load_digits()
    labels = torch.from_numpy(found.target.astype(np.int64))
    images = torch.from_numpy(found.images.astype(np.float32)).unsqueeze(1)
    tests = torch.arange(len(labels)) % 5 == 4
    mean, deviation = float(found.images.mean()), float(found.images.std())
    images = (images - mean) / deviation
    classes = tuple(str(each) for each in range(10))
    return InMemory(images[~tests], labels[~tests], classes), InMemory(images[tests], labels[tests], classes)


def _images(folder: Path, map_path: str) -> Pair:
    """Use the folders train and test (or val) if they exist; otherwise every tenth image is for testing."""
    mapped = read_client_map(Path(map_path)) if map_path else None
    tests = next((folder / name for name in ("test", "val", "validation") if (folder / name).is_dir()), None)
    if tests is None or not (folder / "train").is_dir():
        whole = datasets.image_folder(folder, mapped)
        every = np.arange(len(whole)) % 10 == 9
        return take_samples(whole, np.flatnonzero(~every)), take_samples(whole, np.flatnonzero(every))
    train, test = datasets.image_folder(folder / "train", mapped), datasets.image_folder(tests)
    place = {name: number for number, name in enumerate(train.classes)}
    if strange := [name for name in test.classes if name not in place]:
        raise ConfigError(f"{tests}: class {strange[0]!r} is not among those in {folder / 'train'}; remove it there")
    numbers = torch.tensor([place[name] for name in test.classes])
    return train, ImageFiles(test.paths, numbers[test.labels], train.classes)


# --- whose they are ---


def _partition(config: DataConfig, train: Samples, seed: int) -> Partition:
    most = config.most or None
    if config.partition == "natural":
        whole = _natural(config, train).with_sizes_between(config.least, most)
        return _first(whole, config.clients) if config.clients else whole
    sizes = None
    if config.sizes:
        table = read_sizes(Path(config.sizes))
        drawn = partition.draw_sizes(table, config.clients, seed=seed, least=config.least, most=most)
        sizes = partition.fit_sizes(drawn, len(train.labels), may_scale=config.scale_sizes)
    if config.partition == "iid":
        if sizes is None:
            dealt = partition.iid(len(train.labels), config.clients, seed=seed)
        else:
            dealt = partition.by_sizes(len(train.labels), sizes, seed=seed)
    elif config.partition == "shards":
        if sizes is not None:
            raise ConfigError(f"data.sizes {config.sizes}: shards are of one size; use iid or dirichlet, or no sizes")
        dealt = partition.shards(train.labels, config.clients, per_client=config.per_client, seed=seed)
    else:
        dealt = partition.dirichlet(train.labels, config.clients, config.alpha, seed=seed, sizes=sizes)
    if sizes is not None:
        return dealt
    kept = dealt.with_sizes_between(config.least, most)
    if len(kept) < len(dealt):
        log.info(
            "%d of %d clients have too few or too many samples, and are left out", len(dealt) - len(kept), len(dealt)
        )
    return kept


def _natural(config: DataConfig, train: Samples) -> Partition:
    if config.map and not isinstance(train, ImageFiles | Subset):
        return partition.by_map(read_client_map(Path(config.map)), _names(train))
    if not train.clients:
        raise ConfigError(
            f"data.partition natural: nobody knows whose the samples of {config.kind} are; give data.map, or iid, "
            "dirichlet or shards"
        )
    return partition.natural(train.clients)


def _names(samples: Samples) -> Sequence[str]:
    """Return sample names as a client map has them: the word's folder and the file, or the index of the sample."""
    if isinstance(samples, SpeechFiles):
        return [f"{path.parent.name}/{path.name}" for path in samples.paths]
    return [str(number) for number in range(len(samples.labels))]


def _first(whole: Partition, count: int) -> Partition:
    if count > len(whole):
        raise ConfigError(f"data.clients {count}: the data have {len(whole)}; use 1 to {len(whole)}, or 0 for all")
    starts = whole.starts[: count + 1]
    return Partition(whole.names[:count], starts, whole.order[: int(starts[-1])], whole.num_samples)
