"""Partitions: a data set dealt to clients, each sample to at most one.

Natural partitions come from a column of the data, or from a published map. The others are drawn from a seed alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.fed.tables import ClientMap

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Partition:
    """The samples of each client, as indices from 0 to `num_samples` - 1."""

    names: tuple[str, ...]
    starts: Ints
    """Where in `order` each client's samples begin; one more entry than clients."""
    order: Ints
    num_samples: int
    """Size of the data set."""

    def __len__(self) -> int:
        return len(self.names)

    def of(self, client: int) -> Ints:
        """Return the samples of one client, in a fixed order."""
        return self.order[self.starts[client] : self.starts[client + 1]]

    @property
    def sizes(self) -> Ints:
        return np.diff(self.starts)

    def with_sizes_between(self, least: int = 1, most: int | None = None) -> Partition:
        """Leave out clients with fewer than `least` or more than `most` samples."""
        sizes = self.sizes
        kept = np.flatnonzero((sizes >= least) & (sizes <= (most if most is not None else self.num_samples)))
        if not len(kept):
            found = f"{sizes.min()} to {sizes.max()}"
            raise ConfigError(f"no client has {least} to {most or 'any number of'} samples: they have {found}")
        return _join_parts([self.names[i] for i in kept], [self.of(int(i)) for i in kept], self.num_samples)


def _join_parts(names: Sequence[str], parts: Sequence[Ints], num_samples: int) -> Partition:
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
    return Partition(tuple(names), starts, order, num_samples)


def _number_parts(parts: Sequence[Ints], num_samples: int) -> Partition:
    return _join_parts([str(number) for number in range(len(parts))], parts, num_samples)


def natural(column: Sequence[Hashable]) -> Partition:
    """Make one client of each value of the column (a speaker, a role), in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    codes = np.fromiter((numbers.setdefault(value, len(numbers)) for value in column), dtype=np.int64)
    if not len(codes):
        raise ConfigError("a natural partition of no samples: is the data set empty?")
    order = np.argsort(codes, kind="stable").astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return Partition(tuple(str(value) for value in numbers), starts, order, len(codes))


def iid(num_samples: int, num_clients: int, *, seed: int = 0) -> Partition:
    """Deal samples at random, as evenly as possible."""
    check_clients(num_samples, num_clients)
    shuffled = np.random.default_rng(seed).permutation(num_samples).astype(np.int64)
    return _number_parts(np.array_split(shuffled, num_clients), num_samples)


def by_sizes(num_samples: int, sizes: Ints, *, seed: int = 0) -> Partition:
    """Deal samples at random, `sizes[i]` to client i; they must not sum to more than there is."""
    shuffled = np.random.default_rng(seed).permutation(num_samples).astype(np.int64)
    return _number_parts(np.split(shuffled[: int(sizes.sum())], np.cumsum(sizes)[:-1]), num_samples)


def shards(labels: ArrayLike, num_clients: int, *, per_client: int = 2, seed: int = 0) -> Partition:
    """Sort samples by label, cut them into equal shards, and deal those to clients (McMahan et al. 2017)."""
    values = _check_labels(labels)
    check_clients(len(values), num_clients * per_client, what="shards")
    chance = np.random.default_rng(seed)
    # Shuffled first, so that equal labels are not in the order of their file.
    shuffled = chance.permutation(len(values))
    cut = np.array_split(
        shuffled[np.argsort(values[shuffled], kind="stable")].astype(np.int64), num_clients * per_client
    )
    dealt = chance.permutation(len(cut)).reshape(num_clients, per_client)
    return _number_parts([np.concatenate([cut[i] for i in mine]) for mine in dealt], len(values))


def dirichlet(
    labels: ArrayLike, num_clients: int, alpha: float, *, seed: int = 0, sizes: Ints | None = None
) -> Partition:
    """Deal labels in unequal shares; the smaller `alpha`, the fewer labels a client has.

    Without `sizes`, each label is split among the clients in shares of Dirichlet(alpha), so sizes differ, too, and may be 0.
    With `sizes`, one for each client, each client draws its own shares of labels from Dirichlet(alpha x classes x their
    frequencies), and takes another label if one is used up.
    """
    values = _check_labels(labels)
    check_clients(len(values), num_clients)
    chance = np.random.default_rng(seed)
    pools = [chance.permutation(np.flatnonzero(values == label)).astype(np.int64) for label in np.unique(values)]
    deal = (
        _deal_labels(pools, num_clients, alpha, chance)
        if sizes is None
        else _deal_to_sizes(pools, sizes, alpha, chance)
    )
    return _number_parts(deal, len(values))


def _deal_labels(pools: list[Ints], num_clients: int, alpha: float, chance: np.random.Generator) -> list[Ints]:
    pieces = []
    for shares, pool in zip(chance.dirichlet(np.full(num_clients, alpha), size=len(pools)), pools, strict=True):
        pieces.append(np.split(pool, (np.cumsum(shares)[:-1] * len(pool)).astype(np.int64)))
    return [np.concatenate(hand) for hand in zip(*pieces, strict=True)]


def _deal_to_sizes(pools: list[Ints], sizes: Ints, alpha: float, chance: np.random.Generator) -> list[Ints]:
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    weights = alpha * len(pools) * left / left.sum()
    parts: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(sizes)
    # In a random order: the last client takes what is left, and that should not always be the one of the highest number.
    for client in chance.permutation(len(sizes)):
        share = chance.dirichlet(weights)
        taken = np.zeros(len(pools), dtype=np.int64)
        while (missing := int(sizes[client] - taken.sum())) > 0:
            open_share = np.where(left > taken, share, 0.0)
            if not open_share.sum() > 0:
                open_share = (left - taken).astype(np.float64)
            drawn = chance.multinomial(missing, open_share / open_share.sum())
            taken = np.minimum(taken + drawn, left)
        parts[client] = np.concatenate([pool[n - t : n] for pool, n, t in zip(pools, left, taken, strict=True)])
        left = left - taken
    return parts


def by_map(mapped: ClientMap, samples: Sequence[str]) -> Partition:
    """Return the partition of `samples` by a client map; names that only one of the two has are ignored."""
    owners: dict[str, str] = {}
    for sample, client in zip(mapped.samples, mapped.clients, strict=True):
        if owners.setdefault(sample, client) != client:
            raise ConfigError(f"the client map gives sample {sample!r} to clients {owners[sample]!r} and {client!r}")
    places = np.flatnonzero([sample in owners for sample in samples]).astype(np.int64)
    if not len(places):
        names = f"they are as {samples[0]!r}, and it has names as {next(iter(owners), '')!r}"
        raise ConfigError(f"none of {len(samples)} samples is in the client map: {names}; give the map of these data")
    among = natural([owners[samples[int(i)]] for i in places])
    return Partition(among.names, among.starts, places[among.order], len(samples))


def draw_sizes(table: Ints, num_clients: int, *, seed: int = 0, least: int = 1, most: int | None = None) -> Ints:
    """Draw the sizes of `num_clients` rows of a table, each row once while they last, clipped to the limits."""
    if most is not None and most < least:
        raise ConfigError(f"sizes of {least} to {most}: the first must not be the greater")
    chance = np.random.default_rng(seed)
    rows = np.concatenate([chance.permutation(len(table)) for _ in range(-(-num_clients // len(table)))])[:num_clients]
    drawn: Ints = np.clip(table[rows], least, most).astype(np.int64)
    return drawn


def fit_sizes(sizes: Ints, num_samples: int, *, may_scale: bool) -> Ints:
    """Return sizes that sum to no more than there is: if they may be scaled, smaller ones, each of them 1 at least.

    Raises:
        ConfigError: the sizes sum to more, and may not be scaled.
    """
    if sizes.sum() <= num_samples:
        return sizes
    check_clients(num_samples, len(sizes))
    if not may_scale:
        raise ConfigError(
            f"data.sizes: {len(sizes)} clients would have {sizes.sum()} samples, and there are {num_samples}: use fewer "
            "clients or a smaller data.most, or say `scale_sizes: true` in data, which makes all of them smaller"
        )
    spare = num_samples - len(sizes)
    exact = (sizes - 1) * (spare / max(1, int((sizes - 1).sum())))
    smaller: Ints = (1 + np.floor(exact)).astype(np.int64)
    return smaller


def _check_labels(labels: ArrayLike) -> NDArray[np.generic]:
    values = np.asarray(labels)
    if values.ndim != 1 or not len(values):
        raise ConfigError(f"labels of shape {list(values.shape)}: give one for each sample")
    return values


def check_test_samples(num_samples: int, count: int) -> None:
    """Raise ConfigError if fewer samples are there for testing than shall be used."""
    if count > num_samples:
        raise ConfigError(f"data.test_samples {count}: there are {num_samples}; use 1 to {num_samples}, or 0 for all")


def check_clients(num_samples: int, count: int, what: str = "clients") -> None:
    if count < 1 or count > num_samples:
        raise ConfigError(f"{num_samples} samples for {count} {what}: use 1 to {num_samples} {what}")
