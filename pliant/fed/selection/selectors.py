"""Selectors of participants by name: Oort (OSDI'21), random, fastest, power of choice and REFL. Pure.

Oort picks clients by what they teach and how fast they are:

    utility(i) = min(U_i, clip) + sqrt(0.1 ln R / L_i)          U_i: `statistical_utility`; L_i: last round of i
    score(i)   = utility(i) * (T / t_i)^alpha where t_i > T     T: the preferred duration of a round
    score(i)   = (1 - f) score(i) + f (most rounds of any client - rounds of i)

Of K participants, (1 - e)K are exploited: drawn by score from all clients with a score of at least `cut_off_util` times
that of the (1 - e)K-th best. The others were never tried before, and fast ones are preferred. e decays. The pacer raises T
when rounds teach less. Clients that took part `blacklist_rounds` times are left out.

The presets `paper`, `artifact` and `fedscale` are those of the paper and of the two programs that implement it. What the paper
leaves open is as in its artifact. `balanced`, the default, is FedScale's with a higher floor of e: clients that were never
tried before are nine of ten participants at first, and never less than half while there are any, because a model that always
hears the same few clients fits those. Where the programs differ from the paper, there is a setting; where they crash, any
number of clients works. A client that was cut has neither taught nor taken part, but its speed is known.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pliant.errors import ConfigError, NoClient
from pliant.fed.config import DEFAULT_PRESET
from pliant.fed.selection.base import (
    Floats,
    Mask,
    Places,
    PopulationSelector,
    State,
    greatest,
    kth_greatest,
    sample,
)
from pliant.yaml_source import validation_messages

FLAT, JUMP = 0.1, 5.0
"""Thresholds of the artifact's pacer: a relative change below the first is flat; one above the second lowers T."""
MOST_POINTS = 10.0
"""Limit of the pacer's step W * K, in percent of the clients. The paper has many clients; with few, one step would reach all."""
NOISY_LEAST = 1e-2
"""The least utility that noise leaves."""


Share = Annotated[float, Field(ge=0, le=1)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AtLeast1 = Annotated[float, Field(ge=1)]


class OortConfig(BaseModel):
    """Settings of Oort. The names are the artifact's, the defaults the paper's."""

    # Strict: the word "False" is not true.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    exploration_factor: Share = 0.9
    """e of the first round: the share of participants that were never tried before."""
    exploration_decay: Share = 0.98
    """e is multiplied by this from round to round."""
    exploration_min: Share = 0.2
    sample_window: AtLeast1 = 5.0
    """Clients to explore are drawn from this many times as many, the best by `explore_by`."""
    explore_by: Literal["speed", "size"] = "speed"
    """speed: by 1/duration (paper); size: by number of samples, less if slow (artifact)."""
    round_penalty: AtLeast0 = 2.0
    """alpha; 0 ignores durations."""
    round_s: Annotated[float, Field(gt=0)] | None = None
    """T at first, in seconds; None: by `round_threshold`."""
    round_threshold: Annotated[float, Field(ge=0)] = 10.0
    """T at first, as the percentage of clients that are not slower; 100 or more: no limit."""
    pacer: Literal["falling", "flat"] = "falling"
    """falling: T grows when W rounds taught less than the W before, and is kept in seconds (paper); flat: the percentile grows
    when the utility of exploited clients is flat, and shrinks on a jump (artifact).
    """
    pacer_step: Annotated[int, Field(ge=1)] = 20
    """W: the number of rounds between two decisions of the pacer."""
    pacer_delta: AtLeast0 | None = None
    """By how many percent of the clients T is raised; None: by W times the number picked, at most 10 %; 0: never."""
    clip_bound: Share = 0.95
    """Utilities are clipped at this quantile."""
    cut_off_util: Share = 0.95
    """Candidates have at least this share of the score of the last client wanted."""
    pool: AtLeast1 = 1.0
    """The last client wanted is the (1 - e)K-th best times this."""
    normalise: bool = False
    """Whether utilities are scaled to 0..1, so that they compare with the uncertainty, which is below 1 (artifact)."""
    blacklist_rounds: int = 10
    """A client that took part this often is not picked any more; -1: no limit."""
    blacklist_max_len: Share = 0.3
    """At most this share of all clients is left out: the ones that took part most."""
    fairness: Share = 0.0
    """f: 0 uses utility alone, 1 lets all clients take part equally often."""
    noise_factor: AtLeast0 = 0.0
    """Reported utilities get normal noise with this many times their mean as deviation."""

    @field_validator("blacklist_rounds")
    @classmethod
    def _not_zero(cls, rounds: int) -> int:
        if rounds < 1 and rounds != -1:
            raise ValueError(f"{rounds}: use 1 or more, or -1 to leave nobody out")
        return rounds


PAPER = OortConfig()
ARTIFACT = OortConfig(
    exploration_decay=0.95, explore_by="size", pacer="flat", pacer_delta=5.0, clip_bound=0.98, cut_off_util=0.7,
    normalise=True, blacklist_rounds=-1,
)  # fmt: skip
FEDSCALE = ARTIFACT.model_copy(update={
    "exploration_decay": 0.98, "exploration_min": 0.3, "round_threshold": 30.0, "clip_bound": 0.9, "cut_off_util": 0.05,
    "pool": 10.0,
})  # fmt: skip
BALANCED = FEDSCALE.model_copy(update={"exploration_min": 0.5})
PRESETS = {"balanced": BALANCED, "paper": PAPER, "artifact": ARTIFACT, "fedscale": FEDSCALE}


def staleness(round_number: int, last_round: npt.NDArray[Any]) -> Floats:
    """Return the bonus for clients that have not taken part for long: sqrt(0.1 ln R / L)."""
    found: Floats = np.sqrt(0.1 * np.log(round_number) / last_round)
    return found


def penalty(duration_s: Floats, round_s: float, alpha: float) -> Floats:
    """Return (T/t)^alpha for clients slower than T, 1 for others and for those of unknown speed."""
    if alpha == 0 or round_s == float("inf"):
        return np.ones_like(duration_s)
    found: Floats = np.fmin(round_s / duration_s, 1.0) ** alpha
    return found


def clip_utilities(utility: Floats, bound: float, *, normalise: bool = False) -> Floats:
    """Clip utilities at their quantile `bound`; `normalise` scales them to 0..1.

    The quantile is taken of positive utilities, as in the artifact. The artifact's scale ends at the greatest utility, so that
    one outlier makes all others equal; this one ends at the quantile.
    """
    positive = utility[utility > 0]
    if not len(positive):
        return np.zeros_like(utility)
    top = float(np.partition(positive, at := min(int(len(positive) * bound), len(positive) - 1))[at])
    capped: Floats = np.minimum(utility, top)
    if not normalise:
        return capped
    bottom = 0.999 * float(positive.min())
    return np.maximum((capped - bottom) / max(top - bottom, 1e-4), 0.0)


class Oort(PopulationSelector):
    """Oort's training selector."""

    KIND = "oort"

    def __init__(self, config: OortConfig = BALANCED, *, seed: int = 233) -> None:
        super().__init__(seed=seed)
        self.config = config
        self.percentile = config.round_threshold
        """T as a percentile; changed by the `flat` pacer."""
        self.preferred_s: float | None = config.round_s
        """T in seconds, as the `falling` pacer keeps it; None before the first round."""
        self._taught: list[float] = []
        """Utility of each of the last 2W rounds."""
        self._sum, self._count = 0.0, 0
        """Sum and number of the utilities of the present round that the pacer uses."""
        self._exploited: Places = np.empty(0, np.intp)
        """Clients of the present round that were picked for their score."""

    def exploration(self, rounds_before: int) -> float:
        """Return e after `rounds_before` rounds."""
        config = self.config
        floor = min(config.exploration_min, config.exploration_factor)
        return max(config.exploration_factor * config.exploration_decay**rounds_before, floor)

    def blacklist(self) -> Mask:
        """Return one bool per registered client: whether it has taken part often enough."""
        often: Mask = self.clients.rounds >= self.config.blacklist_rounds
        if self.config.blacklist_rounds < 0:
            often[:] = False
        most = int(self.config.blacklist_max_len * len(self.clients))
        if np.count_nonzero(often) <= most:
            return often
        left_out = np.zeros_like(often)
        left_out[greatest(self.clients.rounds.astype(np.float64), most)] = True
        return left_out & often

    def scores(self, places: Places, round_s: float) -> Floats:
        """Return the scores of tried clients. A client that was only ever cut gets the mean utility of the others."""
        config, known = self.config, self.clients
        last_round = known.last_round[places]
        heard = last_round > 0
        found = clip_utilities(known.utility[places], config.clip_bound, normalise=config.normalise)
        if not heard.all():
            found[~heard] = found[heard].mean() if heard.any() else 0.0
            last_round = np.where(heard, last_round, known.cut_round[places])
        found += staleness(self.round, last_round)
        found *= penalty(known.duration_s[places], round_s, config.round_penalty)
        if config.fairness:
            rounds = known.rounds[places]
            found = (1 - config.fairness) * found + config.fairness * (rounds.max(initial=0) - rounds)
        return found

    def _eligible(self, feasible: Mask) -> Places:
        left_out = self.blacklist()
        found = np.flatnonzero(feasible & ~left_out)
        if not len(found):
            super()._eligible(feasible)
            raise NoClient(
                f"the {np.count_nonzero(feasible)} clients that can be reached have all taken part "
                f"{self.config.blacklist_rounds} times: wait for others, or raise blacklist_rounds"
            )
        return found

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        self._pace(asked)
        round_s = self._round_s()
        # A client that was cut has been tried; otherwise the slowest would be explored for ever.
        tried = self.clients.explored[eligible] | (self.clients.cut_round[eligible] > 0)
        known, fresh = eligible[tried], eligible[~tried]
        share = self.exploration(self.round - 1)
        # 1e-9: 10 * (1 - 0.9) is a little less than 1
        exploit = min(int(num * (1 - share) + 1e-9), len(known))
        explore = min(num - exploit, len(fresh))
        self._exploited = self._exploit(known, num - explore, round_s)
        new = self._explore(fresh, explore, round_s)
        self.figures |= {
            "exploration": share, "round_s": round_s, "exploited": len(self._exploited), "explored": len(new),
            "blacklisted": int(np.count_nonzero(self.blacklist())),
        }  # fmt: skip
        return np.concatenate([self._exploited, new])

    def _exploit(self, known: Places, num: int, round_s: float) -> Places:
        if not num:
            return np.empty(0, np.intp)
        scores = self.scores(known, round_s)
        last_wanted = kth_greatest(scores, min(int(self.config.pool * num), len(scores)))
        admitted = np.flatnonzero(scores >= min(self.config.cut_off_util * last_wanted, kth_greatest(scores, num)))
        return known[admitted[sample(self._rng, scores[admitted], num)]]

    def _explore(self, fresh: Places, num: int, round_s: float) -> Places:
        if not num:
            return np.empty(0, np.intp)
        duration_s = _fill_with_median(self.clients.duration_s[fresh])
        if self.config.explore_by == "speed":
            weights = 1 / duration_s
        else:
            weights = _fill_with_median(self.clients.size[fresh]) * penalty(
                duration_s, round_s, self.config.round_penalty
            )
        first = greatest(weights, int(self.config.sample_window * num))
        return fresh[first[sample(self._rng, weights[first], num)]]

    def _round_s(self) -> float:
        """Return T of this round."""
        if self.config.pacer == "flat" and self.config.round_s is None:
            return self._percentile_s()
        if self.preferred_s is None:
            self.preferred_s = self._percentile_s()
        return self.preferred_s

    def _percentile_s(self) -> float:
        """Return T by the percentile; no limit from 100 % on."""
        known = self._known_s()
        if self.percentile >= 100 or not len(known):
            return float("inf")
        at = int(len(known) * self.percentile / 100)
        return float(np.partition(known, at)[at])

    def _known_s(self) -> Floats:
        durations = self.clients.duration_s
        return durations[~np.isnan(durations)]

    def _pace(self, asked: int) -> None:
        """Add the utility of the last round, and every W rounds compare the last W with the W before."""
        before, step = self.round - 1, self.config.pacer_step
        if not before:
            return
        brought = self._sum if self.config.pacer == "falling" else self._sum / max(self._count, 1)
        self._taught = [*self._taught, brought][-2 * step :]
        self._sum, self._count = 0.0, 0
        if before < 2 * step or before % step or self.config.pacer_delta == 0:
            return
        then, now = sum(self._taught[:step]), sum(self._taught[step:])
        if self.config.pacer == "falling":
            if then > now:
                self._relax(asked)
        elif abs(now - then) <= FLAT * then:
            self.percentile = min(100.0, self.percentile + self._points(asked))
        elif abs(now - then) >= JUMP * then:
            self.percentile = max(points := self._points(asked), self.percentile - points)

    def _points(self, asked: int) -> float:
        """Return by how many percent of the clients T is raised."""
        if self.config.pacer_delta is not None:
            return self.config.pacer_delta
        return min(MOST_POINTS, 100 * self.config.pacer_step * asked / max(len(self.clients), 1))

    def _relax(self, asked: int) -> None:
        """Raise T to cover more clients than it does now."""
        round_s, known = self._round_s(), self._known_s()
        if not len(known):
            return
        more = max(1, round(self._points(asked) / 100 * len(known)))
        at = min(int(np.count_nonzero(known <= round_s)) - 1 + more, len(known) - 1)
        self.preferred_s = max(round_s, float(np.partition(known, at)[at]))

    def _stored_utility(self, at: Places, utility: Floats) -> Floats:
        if self.config.noise_factor:
            self.clients.utility[at] = utility
            scale = self.config.noise_factor * float(self.clients.utility[self.clients.explored].mean())
            utility = np.maximum(utility + self._rng.normal(0.0, scale, len(at)), NOISY_LEAST)
        seen = utility if self.config.pacer == "falling" else utility[np.isin(at, self._exploited)]
        self._sum += float(seen.sum())
        self._count += len(seen)
        return utility

    def _settings(self) -> State:
        return self.config.model_dump()

    def _extra_state(self) -> State:
        return {
            "percentile": self.percentile, "preferred_s": self.preferred_s, "taught": list(self._taught),
            "sum": self._sum, "count": self._count, "exploited": self._exploited.copy(),
        }  # fmt: skip

    def _load_extra_state(self, more: Mapping[str, Any]) -> None:
        self.percentile = float(more["percentile"])
        self.preferred_s = None if more["preferred_s"] is None else float(more["preferred_s"])
        self._taught = [float(value) for value in more["taught"]]
        self._sum, self._count = float(more["sum"]), int(more["count"])
        self._exploited = np.array(more["exploited"], np.intp)


def _fill_with_median(values: Floats) -> Floats:
    """Replace unknown values by the median; by ones if all are unknown."""
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    known = values[~unknown]
    return np.where(unknown, np.median(known) if len(known) else 1.0, values)


MOST_TIMES_LONGER = 10
"""PyramidFL's limit on how many times longer a client trains than asked."""


class Random(PopulationSelector):
    """Picks feasible clients with equal chances."""

    KIND = "random"

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        return eligible[sample(self._rng, np.ones(len(eligible)), num)]


class Fastest(PopulationSelector):
    """Picks the fastest clients; those of unknown speed last, and of equals the first registered."""

    KIND = "fastest"

    def _choose(self, num: int, asked: int, eligible: Places, remaining_s: Floats | None) -> Places:
        speed = 1 / self.clients.duration_s[eligible]
        return eligible[greatest(np.nan_to_num(speed, nan=0.0), num)]


class PowerOfChoice(PopulationSelector):
    """Draws `factor` * num candidates by size, and picks those with the greatest loss.

    The loss is that of the client's last participation (rpow-d: nothing is computed for clients that are not picked), or its
    utility per sample if it reported none. Clients without any report go first.
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
        # Candidates are in the order of registration, which must not decide among equals.
        order = self._rng.permutation(len(drawn))
        return drawn[order[greatest(loss[order], num)]]

    def _settings(self) -> State:
        return {"factor": self.factor}


class Refl(PopulationSelector):
    """REFL: picks clients that will be unavailable soonest but can finish, and none again within `rest_rounds` rounds.

    How long clients stay is a prediction (`remaining_s` of `select`) that is right with probability `accuracy`; if it is wrong,
    it is that of another client. Without a prediction, and among equals, chance decides. Clients that rest or would leave
    before they finish are picked only if the others do not suffice.
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
        """Return the indices of the `num` least values; of equals any."""
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


def local_steps(steps: int, duration_s: Floats, compute_s: Floats, *, round_s: float) -> npt.NDArray[np.int64]:
    """Return how many local steps each participant makes to finish about when the slowest does (PyramidFL).

    Steps are multiplied by min(10, floor(spare time / time of a step) / steps) + 1. `duration_s` is a participant's whole
    round, `compute_s` the part spent on steps; `round_s` is when the round ends.
    """
    # the time of a step is rounded: 0.3 s of spare time have room for three steps of 0.1 s
    more = np.floor(np.maximum(round_s - duration_s, 0.0) / (compute_s / steps) + 1e-9)
    times_longer = np.minimum(MOST_TIMES_LONGER, more / steps)
    return np.floor(steps * (times_longer + 1) + 1e-9).astype(np.int64)


KINDS: Mapping[str, Callable[..., PopulationSelector]] = {
    kind.KIND: kind for kind in (Random, Fastest, PowerOfChoice, Refl)
}
NAMES = (*KINDS, Oort.KIND)


def make_selector(name: str, *, seed: int = 233, **options: float | str | None) -> PopulationSelector:
    """Create the selector of that name. Options of `oort`: `preset`, and the fields of `OortConfig`."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"selector {name}: seed={seed!r}: use a whole number of 0 or more")
    if name == Oort.KIND:
        return Oort(oort_config(**options), seed=seed)
    if name not in KINDS:
        raise ConfigError(f"selector {name!r} is unknown: use one of {', '.join(NAMES)}")
    _refuse_unknown(name, options, set(KINDS[name](seed=0)._settings()))
    return KINDS[name](seed=seed, **options)


def oort_config(preset: object = DEFAULT_PRESET, **options: float | str | None) -> OortConfig:
    """Return the settings of a preset with some of them changed."""
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is unknown: use one of {', '.join(PRESETS)}")
    _refuse_unknown(Oort.KIND, options, {*OortConfig.model_fields, "preset"})
    try:
        return OortConfig.model_validate({**PRESETS[str(preset)].model_dump(), **options})
    except ValidationError as error:
        raise ConfigError("; ".join(validation_messages(error, OortConfig).values())) from None


def _refuse_unknown(name: str, options: Mapping[str, object], known: set[str]) -> None:
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            rest = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known)) or 'no options'}"
            raise ConfigError(f"selector {name}: {option!r} is unknown; {rest}")
