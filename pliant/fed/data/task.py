"""The task of a federated job: samples, which client owns which of them, the model, and the loss.

`data.build.build_task` makes a `Task` from a config alone. Every process of a job therefore has the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.data.partition import Ints, Partition

Numbers = Sequence[int] | NDArray[np.int64]
Mask = NDArray[np.bool_]


class Samples(Protocol):
    """A data set as training and partitioning need it."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def clients(self) -> tuple[str, ...]:
        """The natural owner of each sample; empty if the data set has none."""
        ...

    def inputs(self, samples: Numbers) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Samples that lie in memory, all of one shape."""

    data: Tensor
    """Inputs; the first dimension counts the samples."""
    labels: Tensor
    """Class of each sample, as an index into `classes`."""
    classes: tuple[str, ...]
    """Names of the classes."""
    clients: tuple[str, ...] = ()
    """Owner of each sample, for natural partitions; empty if samples have no owner."""

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, samples: Numbers) -> Tensor:
        return self.data[torch.as_tensor(np.asarray(samples, dtype=np.int64))]


@dataclass(frozen=True, slots=True)
class Subset:
    """Some samples of a data set that is read from files on demand."""

    whole: Samples
    kept: Ints

    @property
    def labels(self) -> Tensor:
        return self.whole.labels[torch.from_numpy(self.kept)]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.whole.classes

    @property
    def clients(self) -> tuple[str, ...]:
        owners = self.whole.clients
        return tuple(owners[i] for i in self.kept) if owners else ()

    def inputs(self, samples: Numbers) -> Tensor:
        return self.whole.inputs(self.kept[np.asarray(samples, dtype=np.int64)])


def take_samples(samples: Samples, kept: Ints) -> Samples:
    """Return the data set reduced to the samples with these indices."""
    if not isinstance(samples, InMemory):
        return Subset(samples, kept.astype(np.int64))
    at = torch.from_numpy(kept.astype(np.int64))
    clients = tuple(samples.clients[i] for i in kept) if samples.clients else ()
    return InMemory(samples.data[at], samples.labels[at], samples.classes, clients)


@dataclass(frozen=True)
class Task:
    """Everything that is trained and tested on. Clients are numbered from 0, as in the partition."""

    config: FedConfig
    train: Samples
    test: Samples
    partition: Partition
    malicious: Mask
    """True for clients that train on wrong labels."""
    shuffle: Tensor
    """The class that a malicious client uses in place of each class; never the class itself."""
    make_model: Callable[[], nn.Module]
    """Creates the model with parameters from torch's default generator."""

    @property
    def sizes(self) -> Ints:
        return self.partition.sizes

    @property
    def num_clients(self) -> int:
        return len(self.partition)

    @property
    def num_classes(self) -> int:
        return len(self.train.classes)

    @property
    def num_test(self) -> int:
        return len(self.test.labels)

    def model(self) -> nn.Module:
        """Return the initial model, on the CPU; every process gets the same bits."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return self.make_model()

    def labels(self, client: int, samples: Numbers) -> Tensor:
        """Return the labels of `samples` as this client has them: wrong ones if it is malicious."""
        true = self.train.labels[torch.as_tensor(np.asarray(samples, dtype=np.int64))]
        return self.shuffle[true] if self.malicious[client] else true

    @staticmethod
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each sample; for texts, the mean over the sample's characters."""
        if outputs.dim() > labels.dim() + 1 or labels.dim() > 2:
            raise ConfigError(
                f"a model's output of shape {list(outputs.shape)} for labels {list(labels.shape)}: "
                "give one score for each class, for each label"
            )
        if labels.dim() == 2:
            return F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return F.cross_entropy(outputs, labels, reduction="none")
