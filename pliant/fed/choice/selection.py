"""Who takes part in the next round: what all selectors have in common. Pure.

A selector is told which clients there are (`register`), what the last participants brought (`feedback`), and answers
with the participants of the next round (`select`). It never looks at a clock, a trace or a model: who can be reached now
is an argument, and every duration is in seconds, hints and measurements alike, so that they can be compared.

All of a selector's knowledge is in arrays with one place per client, and all of its chance in one generator of its own.
Both are in `state_dict()`: a selector that loads it goes on with the picks that the other would have made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pliant.errors import CheckpointError, ConfigError, NoClient
from pliant.fed.choice.population import (
    BELIEVED,
    Floats,
    Ids,
    Mask,
    Numbers,
    Places,
    Population,
    State,
    believed,
    ids_of,
    values_of,
)


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
