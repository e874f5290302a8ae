"""Base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pliant.errors import CheckpointError, ConfigError, NoClient

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


class Selector(Protocol):
    """Picks the participants of a round; `selectors.make` knows all kinds by their names."""

    def register(self, clients: Numbers, *, duration_s: Numbers | None = None, size: Numbers | None = None) -> None: ...

    def feedback(
        self,
        clients: Numbers,
        *,
        utility: Numbers | None = None,
        loss: Numbers | None = None,
        duration_s: Numbers | None = None,
        finished: Sequence[bool] | Mask | None = None,
    ) -> None: ...

    def select(self, num: int, feasible: Numbers | None = None, *, remaining_s: Numbers | None = None) -> Ids: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PopulationSelector(ABC):
    """The part of a selector that keeps the books; a kind of selector says only whom it would choose.

    `round` is the number of selections so far; during one it is the number of the round being selected, from 1.
    """

    KIND = ""

    def __init__(self, *, seed: int = 0) -> None:
        self.clients = Population()
        self.round = 0
        self.figures: dict[str, float | int] = {}
        """About the last selection, for the record."""
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def register(self, clients: Numbers, *, duration_s: Numbers | None = None, size: Numbers | None = None) -> None:
        """Make clients known, or say something new of known ones; nothing is forgotten.

        `duration_s` is a hint of how long a round takes them; NaN where there is none.

        Raises:
            ConfigError: an id that is no whole number or is there twice, a duration or a size that cannot be.
        """
        ids = ids_of(clients)
        durations = values_of("duration_s", duration_s, len(ids))
        sizes = values_of("size", size, len(ids))
        for name, values in (("duration_s", durations), ("size", sizes)):
            if values is not None and (wrong := (values < BELIEVED[0]) | (values > BELIEVED[1])).any():
                raise ConfigError(
                    f"{name}={values[wrong][0]:g} of client {ids[wrong][0]}: use a number above 0, or NaN if unknown"
                )
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
        """What participants of the present round brought, in any order.

        Who has not `finished` (cut, lost, failed) has brought nothing and has not taken part; its duration counts as "at
        least so long". Values come from clients, who may be broken or hostile: a utility that is no number, negative or
        beyond belief counts as 0, such a loss or duration as unknown.
        """
        ids = ids_of(clients)
        places = self.clients.places(ids)
        order = np.argsort(places)  # the order of arrival must not matter
        done = np.ones(len(ids), np.bool_) if finished is None else np.asarray(finished, np.bool_)
        if done.shape != ids.shape:
            raise ConfigError(f"finished has {done.size} values for {len(ids)} clients: give one for each")
        durations = believed(values_of("duration_s", duration_s, len(ids)), zero=False, otherwise=np.nan)
        utilities = believed(values_of("utility", utility, len(ids)), zero=True, otherwise=0.0)
        losses = believed(values_of("loss", loss, len(ids)), zero=True, otherwise=np.nan)
        if durations is not None:
            # fmax: a NaN loses against any number
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
            self.clients.utility[at] = self._heard(at, utilities[took_part])

    def select(self, num: int, feasible: Numbers | None = None, *, remaining_s: Numbers | None = None) -> Ids:
        """The participants of the next round, in the order of registration: `num` of them, or all that may be picked.

        `feasible` are the clients that can be reached now: their ids, or one bool per registered client; None: all.
        `remaining_s` says of every registered client how long it will stay; only some selectors look at it.

        Raises:
            NoClient: nobody can be picked now; nothing has changed, so it can be asked again later.
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
        """Everything that later picks depend on."""
        return {
            "kind": self.KIND,
            "settings": self._settings(),
            "round": self.round,
            "rng": self._rng.bit_generator.state,
            "clients": self.clients.state_dict(),
            "more": self._more(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another selector of the same settings was.

        Raises:
            CheckpointError: it was of another kind, had other settings, or the state is damaged.
        """
        try:
            if state["kind"] != self.KIND:
                raise CheckpointError(f"the checkpoint's selector is {state['kind']!r}, this one is {self.KIND!r}")
            for name, value in self._settings().items():
                if state["settings"][name] != value:
                    raise CheckpointError(
                        f"{name}={value!r}, but the checkpoint's selector has {state['settings'][name]!r}: "
                        "resume with the same settings"
                    )
            self.clients.load_state_dict(state["clients"])
            self.round = int(state["round"])
            self._rng.bit_generator.state = state["rng"]
            self._load_more(state["more"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"no state of a selector ({error!r}): the checkpoint is damaged") from None

    def _feasible(self, feasible: Numbers | None) -> Mask:
        """As one bool per registered client."""
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
        """Who of the feasible may be picked; changes nothing."""
        found = np.flatnonzero(feasible)
        if not len(found):
            raise NoClient(f"none of the {len(self.clients)} clients can be reached: wait until one is there")
        return found

    @abstractmethod
    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        """Exactly `num` of the eligible, in any order."""

    def _heard(self, at: Places, utility: Floats) -> Floats:
        """The utilities to remember of clients that took part."""
        return utility

    def _settings(self) -> State:
        return {}

    def _more(self) -> State:
        """What a kind of selector keeps beside the population."""
        return {}

    def _load_more(self, more: Mapping[str, Any]) -> None:
        if more:
            raise ConfigError(
                f"a state with {', '.join(map(repr, more))}, which this selector does not keep: load its own"
            )


def statistical_utility(losses: Numbers, size: float | None = None) -> float:
    """|B| * sqrt(mean of squared losses): what a client can teach, from every sample of its first pass.

    `losses` are per sample, each taken before the update that the sample takes part in. `size` is |B|, where that is
    not the number of losses: a client that has trained on a part of its data. NaN or infinite losses make it NaN.
    """
    squares = np.square(np.asarray(losses, np.float64))
    if not squares.size:
        return 0.0
    return float((squares.size if size is None else size) * np.sqrt(squares.mean()))


class LossMeter:
    """The same from losses that come batch by batch, without keeping them."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = self._squares = 0.0

    def add(self, losses: Numbers) -> None:
        values = np.asarray(losses, np.float64).ravel()
        self.count += values.size
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    def utility(self, size: float | None = None) -> float:
        if not self.count:
            return 0.0
        return float((self.count if size is None else size) * np.sqrt(self._squares / self.count))
