"""The other selectors, and all of them by name. Pure.

random            everybody alike: what a federation without a selector does
fastest           the least durations
power-of-choice   of a few drawn by size, those with the greatest loss when last heard (Cho et al. 2020, rpow-d)
refl              who will be gone soonest, and has rested (Abdelmoniem et al., EuroSys'23)
oort              `oort.Oort`, with one of its presets

`local_steps` is PyramidFL's rule: participants that would wait for the slowest one train longer instead.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from pliant.errors import ConfigError
from pliant.fed.choice.oort import Oort, OortConfig, preset
from pliant.fed.choice.population import Floats, Numbers, Places, State, greatest, kth_greatest, sample
from pliant.fed.choice.selection import PopulationSelector

MOST_TIMES_LONGER = 10
"""PyramidFL lets nobody train more than this many times longer than asked."""


class Random(PopulationSelector):
    """Everybody who is feasible, with equal chances."""

    KIND = "random"

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        return eligible[sample(self._rng, np.ones(len(eligible)), num)]


class Fastest(PopulationSelector):
    """The fastest, always; those of unknown speed last, and of equals the first registered."""

    KIND = "fastest"

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        speed = 1 / self.clients.duration_s[eligible]
        return eligible[greatest(np.nan_to_num(speed, nan=0.0), num)]


class PowerOfChoice(PopulationSelector):
    """`factor` * num candidates, drawn by size; of these the ones with the greatest loss.

    A client's loss is the one it had when it last took part (rpow-d: nothing is computed for those not picked), or, if
    it told none, its utility per sample. Who was never heard goes before all others.
    """

    KIND = "power-of-choice"

    def __init__(self, *, factor: float = 2.0, seed: int = 0) -> None:
        super().__init__(seed=seed)
        if not 1 <= factor < math.inf:
            raise ConfigError(f"factor={factor}: draw 1 candidate or more for each one picked")
        self.factor = factor

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        size = np.nan_to_num(self.clients.size, nan=1.0)
        drawn = eligible[sample(self._rng, size[eligible], math.ceil(self.factor * num))]
        loss = self.clients.loss[drawn]
        loss = np.where(np.isnan(loss), self.clients.utility[drawn] / size[drawn], loss)
        loss[~self.clients.explored[drawn]] = np.inf
        # candidates are told in the order of registration: equals must not be picked by it
        order = self._rng.permutation(len(drawn))
        return drawn[order[greatest(loss[order], num)]]

    def _settings(self) -> State:
        return {"factor": self.factor}


class Refl(PopulationSelector):
    """Those first who will be away soonest, as long as they can finish; nobody again within `rest_rounds` rounds.

    How long clients stay is a prediction (`remaining_s` of `select`), which is right with probability `accuracy`: where
    it is wrong, it is that of somebody else. Without one, and among equals, chance decides. Those at rest, and those who
    would be gone before they are done, are picked only where the others do not suffice.
    """

    KIND = "refl"

    def __init__(self, *, rest_rounds: int = 5, accuracy: float = 1.0, seed: int = 0) -> None:
        super().__init__(seed=seed)
        if rest_rounds < 0:
            raise ConfigError(f"rest_rounds={rest_rounds}: use 0 or more")
        if not 0 <= accuracy <= 1:
            raise ConfigError(f"accuracy={accuracy}: use a probability, from 0 to 1")
        self.rest_rounds, self.accuracy = rest_rounds, accuracy

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        last = self.clients.last_round[eligible]
        rests = (last > 0) & (self.round - last <= self.rest_rounds)
        if remaining_s is None:
            stays_s, late = np.zeros(len(eligible)), np.zeros(len(eligible), np.bool_)
        else:
            stays_s = self._predicted(np.nan_to_num(remaining_s[eligible], nan=np.inf))
            late = self.clients.duration_s[eligible] > stays_s
        picked: list[Places] = []
        for group in (~rests & ~late, ~rests & late, rests & ~late, rests & late):
            there = np.flatnonzero(group)
            found = there[self._least(stays_s[there], num)]
            picked.append(eligible[found])
            num -= len(found)
        return np.concatenate(picked)

    def _predicted(self, stays_s: Floats) -> Floats:
        wrong = self._rng.random(len(stays_s)) >= self.accuracy
        return np.where(wrong, self._rng.permutation(stays_s), stays_s)

    def _least(self, values: Floats, num: int) -> Places:
        """Places of the `num` least values; of equals any."""
        if num >= len(values):
            return np.arange(len(values))
        if not num:
            return np.empty(0, np.intp)
        last = -kth_greatest(-values, num)
        below, equal = np.flatnonzero(values < last), np.flatnonzero(values == last)
        drawn = sample(self._rng, np.ones(len(equal)), num - len(below))
        return np.concatenate([below, equal[drawn]])

    def _settings(self) -> State:
        return {"rest_rounds": self.rest_rounds, "accuracy": self.accuracy}


def local_steps(
    steps: int, duration_s: Numbers, compute_s: Numbers, *, round_s: float | None = None, beta: float = 1.0
) -> npt.NDArray[np.int64]:
    """How many local steps each participant makes, so that it is done about when the slowest is.

    Steps are multiplied by min(10, beta * floor(spare time / time of a step) / steps) + 1; none makes fewer than asked.
    `duration_s` is all of a participant's round, `compute_s` the part of it that goes into its steps; `round_s` is when
    the round ends, by default when the slowest is done.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: use 1 or more")
    if not 0 <= beta < math.inf:
        raise ConfigError(f"beta={beta}: use 0 or more")
    took_s, computed_s = np.asarray(duration_s, np.float64), np.asarray(compute_s, np.float64)
    if took_s.shape != computed_s.shape or not (computed_s > 0).all() or not (took_s >= computed_s).all():
        raise ConfigError(
            "duration_s and compute_s: give both for each participant, above 0, the first not the smaller"
        )
    if not took_s.size:
        return np.empty(0, np.int64)
    ends_s = float(took_s.max()) if round_s is None else round_s
    # a step's time is rounded: 0.3 s of spare time have room for three steps of 0.1 s
    more = np.floor(np.maximum(ends_s - took_s, 0.0) / (computed_s / steps) + 1e-9)
    times_longer = np.minimum(MOST_TIMES_LONGER, beta * more / steps)
    return np.floor(steps * (times_longer + 1) + 1e-9).astype(np.int64)


KINDS: Mapping[str, Callable[..., PopulationSelector]] = {
    kind.KIND: kind for kind in (Random, Fastest, PowerOfChoice, Refl)
}
NAMES = (*KINDS, Oort.KIND)


def make(name: str, *, seed: int = 233, **options: float | str | None) -> PopulationSelector:
    """The selector of that name. Options of `oort`: `preset`, and the names of `OortConfig`.

    Raises:
        ConfigError: an unknown name or option, or a value that cannot be.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"selector {name}: seed={seed!r}: use a whole number of 0 or more")
    if name == Oort.KIND:
        base = preset(str(options.pop("preset", "paper")))
        known = {field.name for field in fields(OortConfig)}
        _refuse_unknown(name, options, {*known, "preset"})
        return Oort(replace(base, **options), seed=seed)  # type: ignore[arg-type]
    if name not in KINDS:
        raise ConfigError(f"selector {name!r} is unknown: use one of {', '.join(NAMES)}")
    _refuse_unknown(name, options, set(KINDS[name](seed=0)._settings()))
    return KINDS[name](seed=seed, **options)


def _refuse_unknown(name: str, options: Mapping[str, object], known: set[str]) -> None:
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            rest = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known)) or 'no options'}"
            raise ConfigError(f"selector {name}: {option!r} is unknown; {rest}")
