"""The federated part of a story: accuracy over the virtual clock, rounds, and who was picked how often. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pliant.record import Fact
from pliant.ui.series import Series

MOST_ROUNDS_KEPT = 50
"""Whose picks are kept one by one, for the newest rounds."""
OUTCOMES = ("invited", "aggregated", "cut", "lost")


@dataclass(slots=True)
class Federation:
    """What `round` and `test` facts tell."""

    rounds: int = 0
    clock_s: float = 0.0
    accuracy: Series = field(default_factory=Series)
    """In per cent, by hours of the virtual clock, as is the top-5 accuracy."""
    top_5: Series = field(default_factory=Series)
    epsilon: Series = field(default_factory=Series)
    loss: Series = field(default_factory=Series)
    """Of training; by round, as the following."""
    test_loss: Series = field(default_factory=Series)
    duration_s: Series = field(default_factory=Series)
    outcomes: dict[str, Series] = field(default_factory=dict)
    """How many clients were invited, aggregated, cut and lost."""
    picks: Counter[int] = field(default_factory=Counter)
    """How often each client was picked."""
    recent: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """The clients of the newest rounds, by what became of them."""
    target: float | None = None
    """The accuracy that the job is after, in per cent."""

    def tell(self, fact: Fact) -> None:
        """A round, or a test of the model."""
        number = _whole(fact.data.get("round"))
        number = fact.step if number is None else number
        clock_s = _number(fact.data.get("clock_s"))
        self.clock_s = clock_s if clock_s is not None else self.clock_s
        if fact.kind == "test":
            self._test(fact, number)
        else:
            self._round(fact, number)

    def time_to(self, accuracy: float) -> float | None:
        """Hours of the virtual clock until the model was first so good, in per cent; None: it has not been."""
        return next((hour for hour, reached in self.accuracy if reached >= accuracy), None)

    @property
    def best(self) -> float | None:
        return max((reached for _, reached in self.accuracy), default=None)

    def _test(self, fact: Fact, number: int) -> None:
        hour = self.clock_s / 3600
        for name, series, at, scale in (
            ("accuracy", self.accuracy, hour, 100.0),
            ("top_5", self.top_5, hour, 100.0),
            ("epsilon", self.epsilon, hour, 1.0),
            ("loss", self.test_loss, number, 1.0),
        ):
            if (value := _number(fact.data.get(name))) is not None:
                series.add(at, value * scale)

    def _round(self, fact: Fact, number: int) -> None:
        self.rounds = number
        for name, series in (("loss", self.loss), ("duration_s", self.duration_s)):
            if (value := _number(fact.data.get(name))) is not None:
                series.add(number, value)
        for name in OUTCOMES:
            told = fact.data.get(name)
            value = float(len(told)) if isinstance(told, list) else _number(told)
            if value is not None:
                self.outcomes.setdefault(name, Series()).add(number, value)
        clients = {name: _clients(fact.data.get(name)) for name in OUTCOMES}
        self._forget(number)
        self.picks.update(clients["invited"])
        self.recent[number] = clients
        if len(self.recent) > MOST_ROUNDS_KEPT:
            del self.recent[min(self.recent)]

    def _forget(self, number: int) -> None:
        """A job that was begun anew from its checkpoint does rounds once more."""
        again = [each for each in self.recent if each >= number]
        for each in again:
            self.picks.subtract(self.recent.pop(each)["invited"])
        if again:
            self.picks += Counter()  # without those that are at 0


def _clients(value: object) -> tuple[int, ...]:
    items: Iterable[object] = value if isinstance(value, list) else ()
    return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
