"""What is known of very many clients, as arrays with one place per client; and drawing from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pliant.errors import CheckpointError, ConfigError

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
"""Where clients are in the arrays of a population."""
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Numbers = Sequence[float] | npt.NDArray[Any]
State = dict[str, Any]
"""Plain values, and arrays of numbers; lists in the place of arrays are as good, so JSON can carry it."""

LEAST_WEIGHT = 1e-9
"""Of the greatest weight: nobody in a pool has no chance at all, and a pool of zeros is drawn from evenly."""
BELIEVED = (1e-9, 1e30)
"""Durations, and positive utilities and losses, outside of this are nobody's; and sums of those inside stay finite."""


class Population:
    """What is known of every client; each field is an array, in the order in which the clients were registered."""

    FIELDS = ("duration_s", "size", "utility", "loss", "last_round", "cut_round", "rounds")

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self.duration_s: Floats = np.empty(0)
        """Of one round: a hint at first, then as measured. NaN where nothing is known."""
        self.size: Floats = np.empty(0)
        """Samples that it has; NaN where nobody said."""
        self.utility: Floats = np.empty(0)
        """Statistical utility when it last took part."""
        self.loss: Floats = np.empty(0)
        """Mean loss when it last took part; NaN if unknown."""
        self.last_round = np.empty(0, np.int32)
        """The round in which it last took part, counted from 1; 0 if it never did."""
        self.cut_round = np.empty(0, np.int32)
        """The round in which it was last picked and did not finish; 0 if that never happened."""
        self.rounds = np.empty(0, np.int32)
        """How many rounds it has taken part in: picked and finished, not cut."""
        self._order: Places | None = None
        """Places by ascending id; None where the ids are 0, 1, 2, ... and need no search."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def explored(self) -> Mask:
        return self.last_round > 0

    def add(self, ids: Ids) -> Places:
        """The places of these clients, new ones at the end."""
        new = ids[~np.isin(ids, self.ids)] if len(self) else ids
        if len(new):
            self.ids = np.concatenate([self.ids, new])
            for name, value in (("duration_s", np.nan), ("size", np.nan), ("utility", 0.0), ("loss", np.nan)):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(len(new), value)]))
            for name in ("last_round", "cut_round", "rounds"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(len(new), np.int32)]))
            self._index()
        return self.places(ids)

    def places(self, ids: Ids) -> Places:
        """Where these clients are.

        Raises:
            ConfigError: one of them was never registered.
        """
        if self._order is None:
            there = (ids >= 0) & (ids < len(self))
            found = ids
        else:
            at = np.minimum(np.searchsorted(self.ids, ids, sorter=self._order), max(len(self) - 1, 0))
            found = self._order[at] if len(self) else at
            there = self.ids[found] == ids if len(self) else np.zeros(len(ids), np.bool_)
        if not there.all():
            raise ConfigError(f"client {ids[~there][0]} is unknown: register it before it is named")
        return found.astype(np.intp, copy=False)

    def _index(self) -> None:
        dense = np.array_equal(self.ids, np.arange(len(self)))
        self._order = None if dense else np.argsort(self.ids, kind="stable")

    def state_dict(self) -> State:
        return {"ids": self.ids.copy(), **{name: getattr(self, name).copy() for name in self.FIELDS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        arrays = {name: np.array(state[name], getattr(self, name).dtype) for name in ("ids", *self.FIELDS)}
        if any(array.shape != arrays["ids"].shape for array in arrays.values()):
            raise CheckpointError("the selector's arrays differ in length: the checkpoint is damaged")
        for name, array in arrays.items():
            setattr(self, name, array)
        self._index()


def greatest(values: Floats, num: int) -> Places:
    """Places of the `num` greatest values, ascending; of equals the first ones.

    By the value of the last one admitted and not by `argpartition`, whose choice among equals depends on the machine.
    """
    if num >= len(values):
        return np.arange(len(values))
    if num <= 0:
        return np.empty(0, np.intp)
    least = kth_greatest(values, num)
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)
    return np.sort(np.concatenate([above, equal[: num - len(above)]]))


def kth_greatest(values: Floats, num: int) -> float:
    """The `num`-th greatest value, counted from 1."""
    return float(np.partition(values, len(values) - num)[len(values) - num])


def sample(rng: np.random.Generator, weights: Floats, num: int) -> Places:
    """Places of `num` draws without replacement, each with probability ~ weight among those not drawn yet; ascending.

    The `num` first of exponential clocks with these rates are such draws (Efraimidis & Spirakis 2006): no sum has to
    be 1, and zeros need no special case.
    """
    rates = np.maximum(weights, LEAST_WEIGHT * weights.max(initial=0.0))
    rates = rates if rates.max(initial=0.0) > 0 else np.ones_like(weights)
    return greatest(-rng.standard_exponential(len(rates)) / rates, num)


def ids_of(clients: Numbers, *, unique: bool = True) -> Ids:
    """Clients as they were named; ConfigError where that is no list of whole numbers, or one is there twice."""
    given = np.asarray(clients)
    if not given.size:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ConfigError(f"clients of type {given.dtype}, {given.ndim} dimensions: give a list of whole numbers")
    if given.dtype.kind == "u" and int(given.max()) > np.iinfo(np.int64).max:
        raise ConfigError(f"client {given.max()}: use ids below 2^63")
    ids = given.astype(np.int64, copy=False)
    if unique and len(ids) > 1:
        ordered = np.sort(ids)
        if (twice := ordered[1:] == ordered[:-1]).any():
            raise ConfigError(f"client {ordered[1:][twice][0]} is named twice: name each once")
    return ids


def values_of(name: str, values: Numbers | None, num: int) -> Floats | None:
    """One number for each of `num` clients; ConfigError where it is not."""
    if values is None:
        return None
    given = np.asarray(values, np.float64)
    if given.shape != (num,):
        raise ConfigError(f"{name} has {given.size} values for {num} clients: give one for each")
    return given


def believed(values: Floats | None, *, zero: bool, otherwise: float) -> Floats | None:
    """What clients said, with `otherwise` in the place of what cannot be."""
    if values is None:
        return None
    inside = (values >= BELIEVED[0]) & (values <= BELIEVED[1])
    return np.where(inside | (values == 0) if zero else inside, values, otherwise)
