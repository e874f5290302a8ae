"""A training loop of accelerate as an elastic job: the batches come as accelerate deals them to N processes.

    job = pliant.join(replicas=4)
    model, optimizer = job.wrap(model, optimizer)
    loader = prepare_loader(job, DataLoader(dataset, batch_size=8, shuffle=True), gradient_accumulation_steps=2)
    for epoch in job.epochs(3):
        for step in loader:
            for batches in step:                    # two batches; fewer in the last step of an epoch
                for x, y in accumulate(job, batches):
                    (loss_of(model(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

docs/accelerate-and-fabric.md shows a whole program. The result has the bits of the same loop with
`accelerator.prepare` on N processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import pliant
from pliant.errors import ConfigError
from pliant.integrations.rank_loader import Order, RankLoader, drawn_order, seeded_order
from pliant.train.job_data import Loader
from pliant.train.sampling import LoaderOptions

T = TypeVar("T")


def prepare_loader(
    job: pliant.Job,
    loader: DataLoader[Any],
    *,
    gradient_accumulation_steps: int = 1,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
) -> Loader:
    """Return the loader of a job with the batches that `accelerator.prepare(loader)` gives each of N processes.

    Call it where the program calls `accelerator.prepare`, because both draw a seed there. A turn gets a list of
    `gradient_accumulation_steps` batches, on the CPU. The other arguments are those of accelerate's
    DataLoaderConfiguration.

    Raises:
        ConfigError: the samples of this loader cannot be dealt to replicas.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ConfigError(
            f"prepare_loader: a DataLoader of {type(loader.dataset).__name__} without batches of samples: give a map-style "
            "dataset (with __len__ and __getitem__) and a batch_size, or use job.loader"
        )
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.sampler) not in (RandomSampler, SequentialSampler):
        names = f"{type(batches).__name__} of {type(getattr(batches, 'sampler', None)).__name__}"
        raise ConfigError(
            f"prepare_loader: a {names}: use shuffle=True or False, or job.loader for a sampler of your own"
        )
    dataset: Any = loader.dataset
    feeder = RankLoader(
        dataset,
        LoaderOptions(
            batch_size=batches.batch_size,
            drop_last=batches.drop_last,
            sampler_drop_last=batches.drop_last,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            generator=loader.generator,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        ),
        job.replicas,
        _order_of(batches.sampler, len(dataset), data_seed, use_seedable_sampler=use_seedable_sampler),
        gradient_accumulation_steps,
        has_set_epoch=use_seedable_sampler,
    )
    return job.use_feeder(feeder, feeder.replicas)


def _order_of(sampler: Any, length: int, data_seed: int | None, *, use_seedable_sampler: bool) -> Order | None:
    if isinstance(sampler, SequentialSampler):
        return None
    if sampler.replacement or sampler.num_samples != length:
        raise ConfigError(
            f"prepare_loader: RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples}): use "
            "shuffle=True instead, or job.loader with this sampler"
        )
    if use_seedable_sampler:
        return seeded_order(length, torch.initial_seed() if data_seed is None else data_seed)
    if sampler.generator is not None:
        raise ConfigError(
            "prepare_loader: a DataLoader with generator=...: leave it out, or use use_seedable_sampler=True"
        )
    return drawn_order(length, int(torch.empty((), dtype=torch.int64).random_().item()))


def accumulate(job: pliant.Job, batches: Sequence[T]) -> Iterator[T]:
    """Yield the batches of a turn. Only the backward of the last one sums gradients over all replicas."""
    for batch in batches[:-1]:
        with job.no_sync():
            yield batch
    yield batches[-1]
