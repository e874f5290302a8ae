"""The state of all clients as arrays, and the base class of selectors. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pliant.errors import CheckpointError, ConfigError, NoClient

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
"""Indices of clients in the arrays of a population."""
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Numbers = Sequence[float] | npt.NDArray[Any]
State = dict[str, Any]
"""Plain values and arrays of numbers. Lists may stand for arrays, so JSON can carry it."""

LEAST_WEIGHT = 1e-9
"""Share of the greatest weight that every weight has at least: no candidate is without a chance."""
PLAUSIBLE = (1e-9, 1e30)
"""Range of plausible durations, utilities and losses. Sums of values in it stay finite."""


class Population:
    """What is known about every client. Each field is an array, in the order in which clients were registered."""

    FIELDS = ("duration_s", "size", "utility", "loss", "last_round", "cut_round", "rounds")

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self.duration_s: Floats = np.empty(0)
        """Seconds of one round: a hint at first, then as measured; NaN if unknown."""
        self.size: Floats = np.empty(0)
        """Number of samples; NaN if unknown."""
        self.utility: Floats = np.empty(0)
        """Statistical utility when the client last took part."""
        self.loss: Floats = np.empty(0)
        """Mean loss when the client last took part; NaN if unknown."""
        self.last_round = np.empty(0, np.int32)
        """Round in which the client last took part, from 1; 0 if it never did."""
        self.cut_round = np.empty(0, np.int32)
        """Round in which the client was last picked and did not finish; 0 if that never happened."""
        self.rounds = np.empty(0, np.int32)
        """Number of rounds that the client was picked for and finished."""
        self._order: Places | None = None
        """Indices by ascending id; None if the ids are 0, 1, 2, ... and need no search."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def explored(self) -> Mask:
        return self.last_round > 0

    def add(self, ids: Ids) -> Places:
        """Add clients that are new; return the indices of all given ones."""
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
        """Return the indices of these clients."""
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
    """Return the indices of the `num` greatest values, ascending; of equals the first ones.

    `argpartition` is not used, because its choice among equals depends on the machine.
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
    """Return the `num`-th greatest value, counted from 1."""
    return float(np.partition(values, len(values) - num)[len(values) - num])


def sample(rng: np.random.Generator, weights: Floats, num: int) -> Places:
    """Draw `num` indices without replacement, with probabilities proportional to the weights; ascending.

    The first `num` of exponential clocks with these rates are such draws (Efraimidis & Spirakis 2006).
    """
    rates = np.maximum(weights, LEAST_WEIGHT * weights.max(initial=0.0))
    rates = rates if rates.max(initial=0.0) > 0 else np.ones_like(weights)
    return greatest(-rng.standard_exponential(len(rates)) / rates, num)


def ids_of(clients: Numbers, *, unique: bool = True) -> Ids:
    """Return client ids as an array; raises ConfigError if they are no whole numbers, or one is listed twice."""
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
    """Return one number for each of `num` clients as an array; raises ConfigError if there are more or fewer."""
    if values is None:
        return None
    given = np.asarray(values, np.float64)
    if given.shape != (num,):
        raise ConfigError(f"{name} has {given.size} values for {num} clients: give one for each")
    return given


def replace_implausible(values: Floats | None, *, zero: bool, otherwise: float) -> Floats | None:
    """Replace values that clients cannot have by `otherwise`."""
    if values is None:
        return None
    inside = (values >= PLAUSIBLE[0]) & (values <= PLAUSIBLE[1])
    return np.where(inside | (values == 0) if zero else inside, values, otherwise)


class PopulationSelector(ABC):
    """Base class of selectors. It keeps the state of all clients; a subclass only chooses.

    `round` is the number of selections so far; during a selection it is the number of the round, from 1.
    """

    KIND = ""

    def __init__(self, *, seed: int = 0) -> None:
        self.clients = Population()
        self.round = 0
        self.figures: dict[str, float | int] = {}
        """Figures about the last selection, for the record."""
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def register(self, clients: Numbers, *, duration_s: Numbers | None = None, size: Numbers | None = None) -> None:
        """Add clients, or update what is known about them; nothing is forgotten.

        `duration_s` is an estimate of how long a round takes each of them; NaN if unknown.
        """
        ids = ids_of(clients)
        durations = values_of("duration_s", duration_s, len(ids))
        sizes = values_of("size", size, len(ids))
        for name, values in (("duration_s", durations), ("size", sizes)):
            if values is not None and (wrong := (values < PLAUSIBLE[0]) | (values > PLAUSIBLE[1])).any():
                raise ConfigError(f"{name}={values[wrong][0]:g} of client {ids[wrong][0]}: use a number above 0")
        places = self.clients.add(ids)
        if durations is not None:
            self.clients.duration_s[places] = durations
        if sizes is not None:
            self.clients.size[places] = sizes

    def feedback(
        self,
        clients: Numbers,
        *,
        utility: Numbers | None = None,
        loss: Numbers | None = None,
        duration_s: Numbers | None = None,
        finished: Sequence[bool] | Mask | None = None,
    ) -> None:
        """Report the results of participants of the present round, in any order.

        A client that has not `finished` (cut, lost, failed) counts as not having taken part, and its duration as a lower bound.
        Values come from clients, which may be broken or hostile: an impossible utility counts as 0, an impossible loss or
        duration as unknown.
        """
        ids = ids_of(clients)
        places = self.clients.places(ids)
        order = np.argsort(places)  # the order of arrival must not matter
        done = np.ones(len(ids), np.bool_) if finished is None else np.asarray(finished, np.bool_)
        if done.shape != ids.shape:
            raise ConfigError(f"finished has {done.size} values for {len(ids)} clients: give one for each")
        durations = replace_implausible(values_of("duration_s", duration_s, len(ids)), zero=False, otherwise=np.nan)
        utilities = replace_implausible(values_of("utility", utility, len(ids)), zero=True, otherwise=0.0)
        losses = replace_implausible(values_of("loss", loss, len(ids)), zero=True, otherwise=np.nan)
        if durations is not None:
            # fmax ignores NaN
            known = np.where(done, durations, np.fmax(durations, self.clients.duration_s[places]))
            told = ~np.isnan(known)
            self.clients.duration_s[places[told]] = known[told]
        self.clients.cut_round[places[~done]] = max(self.round, 1)
        took_part = order[done[order]]
        at = places[took_part]
        self.clients.last_round[at] = max(self.round, 1)
        self.clients.rounds[at] += 1
        if losses is not None:
            self.clients.loss[at] = losses[took_part]
        if utilities is not None:
            self.clients.utility[at] = self._stored_utility(at, utilities[took_part])

    def select(self, num: int, feasible: Numbers | None = None, *, remaining_s: Numbers | None = None) -> Ids:
        """Pick the participants of the next round, in the order of registration: `num` clients, or all that may be picked.

        `feasible` are the clients that are available: ids, or one bool per registered client; None: all. `remaining_s` is how
        long each registered client will stay available; only some selectors use it.

        Raises:
            NoClient: nobody can be picked now. Nothing has changed, so `select` may be called again later.
        """
        if num < 1:
            raise ConfigError(f"num={num}: pick 1 client or more")
        stay_s = values_of("remaining_s", remaining_s, len(self.clients))
        eligible = self._eligible(self._feasible(feasible))
        self.round += 1
        self.figures = {"round": self.round, "eligible": len(eligible)}
        picked = np.sort(self._choose(min(num, len(eligible)), num, eligible, stay_s))
        self.figures["picked"] = len(picked)
        return self.clients.ids[picked]

    def state_dict(self) -> State:
        """Return everything that later selections depend on."""
        return {
            "kind": self.KIND,
            "settings": self._settings(),
            "round": self.round,
            "rng": self._rng.bit_generator.state,
            "clients": self.clients.state_dict(),
            "more": self._extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another selector. Raises CheckpointError if its kind or a setting is another."""
        if state["kind"] != self.KIND:
            raise CheckpointError(f"the checkpoint's selector is {state['kind']!r}, this one is {self.KIND!r}")
        for name, value in self._settings().items():
            if (theirs := state["settings"][name]) != value:
                raise CheckpointError(f"{name}={value!r}, but the checkpoint's selector has {theirs!r}: use the same")
        self.clients.load_state_dict(state["clients"])
        self.round = int(state["round"])
        self._rng.bit_generator.state = state["rng"]
        self._load_extra_state(state["more"])

    def _feasible(self, feasible: Numbers | None) -> Mask:
        """Return `feasible` as one bool per registered client."""
        if feasible is None:
            return np.ones(len(self.clients), np.bool_)
        given = np.asarray(feasible)
        if given.dtype != np.bool_:
            mask = np.zeros(len(self.clients), np.bool_)
            mask[self.clients.places(ids_of(given, unique=False))] = True
            return mask
        if given.shape != (len(self.clients),):
            raise ConfigError(f"feasible has {given.size} bools for {len(self.clients)} clients: give one for each")
        return given

    def _eligible(self, feasible: Mask) -> Places:
        """Return the feasible clients that may be picked; changes nothing."""
        found = np.flatnonzero(feasible)
        if not len(found):
            raise NoClient(f"none of the {len(self.clients)} clients can be reached: wait until one is there")
        return found

    @abstractmethod
    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        """Choose exactly `num` of the eligible clients, in any order."""

    def _stored_utility(self, at: Places, utility: Floats) -> Floats:
        """Return the utilities to store for clients that took part."""
        return utility

    def _settings(self) -> State:
        return {}

    def _extra_state(self) -> State:
        """Return the state of a subclass beyond the population."""
        return {}

    def _load_extra_state(self, more: Mapping[str, Any]) -> None:
        assert not more, "this selector keeps nothing else"


def statistical_utility(losses: Numbers) -> float:
    """Return |B| * sqrt(mean of squared losses), Oort's measure of what a client's data can teach.

    `losses` has one entry per sample, each taken before the update that the sample takes part in. NaN or infinite losses
    make it NaN.
    """
    values = np.asarray(losses, np.float64).ravel()
    return float(values.size * np.sqrt(float(np.square(values).sum()) / values.size)) if values.size else 0.0


def mean_of(losses: Numbers) -> float:
    """Return the mean loss in float64; 0 if there are none."""
    values = np.asarray(losses, np.float64).ravel()
    return float(values.sum()) / values.size if values.size else 0.0


def finite(figures: Mapping[str, float | int]) -> dict[str, float | int | None]:
    """Replace infinite figures by None, for the record."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
