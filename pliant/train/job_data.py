"""The data of a job: the loader that its program iterates over, and the feeder behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pliant.train.feeder import Feeder, ReplicaLoader
from pliant.train.replicas import Replicas
from pliant.train.sampling import LoaderOptions, num_steps
from pliant.train.step import Step
from pliant.train.stream_loader import StreamLoader
from pliant.train.wrapping import whole_number


class Loader:
    """The data loader of a job: yields its steps. Iterate over it inside of `job.epochs`, and over each step inside of
    that."""

    def __init__(
        self, feeder: Callable[[], Feeder], replicas: Replicas, begin_loop: Callable[[], Iterator[Step]]
    ) -> None:
        """`feeder` returns where the batches come from now, and `begin_loop` an iterator over the steps of the present
        epoch."""
        self._feeder, self._replicas, self._begin_loop = feeder, replicas, begin_loop

    def __iter__(self) -> Iterator[Step]:
        return self._begin_loop()

    def __len__(self) -> int:
        """Return the number of steps in an epoch, at the present batch size.

        Raises:
            TypeError: it is not known, because the sampler or the iterable dataset has no `__len__`.
        """
        replicas = self._replicas
        if not replicas.loading.is_dealt and replicas.steps is None:
            what = "IterableDataset" if replicas.loading.stream else "sampler"
            raise TypeError(f"len(loader): the number of steps is not known, because the {what} has no __len__")
        return replicas.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Use the order of samples of this epoch. Call it before the loop over the loader.

        Samples that are dealt as by DistributedSampler use the order of the job's epoch by default. Samplers and datasets
        of the replicas' own get the call where they have a `set_epoch`.
        """
        self._feeder().set_epoch(whole_number(f"loader.set_epoch({epoch!r})", epoch, 0))


def make_feeder(
    dataset: Any, options: LoaderOptions, count: int, *, repeats: bool, notify: Callable[[str], None]
) -> tuple[Feeder, Replicas]:
    """Return what gives `count` replicas their batches, and the replicas themselves.

    Args:
        repeats: whether batches may have to be given again, because the job is elastic.
    """
    if options.is_dealt:
        replicas = Replicas(count, len(dataset), options)
    else:
        replicas = Replicas(count, 0, options, num_steps(dataset, options))
    if options.stream:
        return StreamLoader(dataset, options, repeats=repeats, notify=notify), replicas
    return ReplicaLoader(dataset, options, count), replicas
