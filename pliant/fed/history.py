"""The history of a federated job: its rounds, and the tests of its model on the virtual clock. Pure values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MANY = 2**63


@dataclass(frozen=True, slots=True)
class Round:
    """One round; for asynchronous jobs, what happened until the model changed. Clients are in ascending order."""

    round: int
    """Number of the round, from 1."""
    begin_s: float
    """When the clients were invited; later than the last round's end if nobody was available."""
    clock_s: float
    """When the round ended."""
    invited: tuple[int, ...]
    aggregated: tuple[int, ...]
    cut: tuple[int, ...]
    """Clients that did not finish in time; for asynchronous jobs, also those whose model was too old."""
    lost: tuple[int, ...]
    """Clients that became unavailable before they finished."""
    left_out: Mapping[int, str]
    """Aggregated clients whose update could not be used, with the reason."""
    loss: float | None
    """Mean, over the aggregated clients, of the loss of the model that they were given on their own samples."""
    lr: float
    there: int
    """Number of clients that could have been invited."""
    malicious: int
    """Number of malicious clients among the aggregated."""
    selector: Mapping[str, float | int | None]
    """Figures of the selector about its choice."""
    client_s: tuple[float, ...] = ()
    """Seconds that each aggregated client took."""
    staleness: tuple[int, ...] = ()
    """For asynchronous jobs, how many versions late the update of each aggregated client was."""
    asked_s: tuple[float, ...] = ()
    """For asynchronous jobs, when each client was invited; otherwise it is the beginning of the round."""

    @property
    def duration_s(self) -> float:
        return self.clock_s - self.begin_s

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"duration_s": self.duration_s, "picked": len(self.invited)}
        return {name: value for name, value in found.items() if value or name not in ("staleness", "asked_s")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        """Raises ValueError with the name and value that is wrong."""
        values: dict[str, Any] = {name: whole(data, name) for name in ("round", "there", "malicious")}
        values |= {name: number(data, name) for name in ("begin_s", "clock_s", "lr")}
        values |= {name: _list(data, name, whole) for name in ("invited", "aggregated", "cut", "lost", "staleness")}
        values |= {name: _list(data, name, number) for name in ("client_s", "asked_s")}
        selector, left_out = _mapping(data, "selector"), _mapping(data, "left_out")
        return cls(
            **values,
            loss=number_or_none(data, "loss"),
            selector={name: number_or_none(selector, name) for name in selector},
            left_out={_client(client): str(why) for client, why in left_out.items()},
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One test of the model."""

    round: int
    clock_s: float
    accuracy: float
    """Share of test samples whose class the model finds."""
    top_5: float
    loss: float | None
    epsilon: float | None = None
    """Privacy that has been spent so far; None if the job gives no guarantee."""

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.epsilon is None:
            del found["epsilon"]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """Raises ValueError with the name and value that is wrong."""
        return cls(
            whole(data, "round"),
            number(data, "clock_s"),
            number(data, "accuracy"),
            number(data, "top_5"),
            number_or_none(data, "loss"),
            number_or_none(data, "epsilon"),
        )


@dataclass(slots=True)
class History:
    """All rounds and tests of a job."""

    points: list[Point] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    why: str = ""
    """Why the job ended: `rounds`, `target`, or `stopped`; empty while it runs."""

    def time_to(self, accuracy: float) -> float | None:
        """Return the seconds on the virtual clock until a test reached this accuracy; None if none did."""
        return next((each.clock_s for each in self.points if each.accuracy >= accuracy), None)

    def rounds_to(self, accuracy: float) -> int | None:
        return next((each.round for each in self.points if each.accuracy >= accuracy), None)

    @property
    def best(self) -> Point | None:
        """The test with the greatest accuracy; the first of equals; None before the first test."""
        return max(self.points, key=lambda each: each.accuracy, default=None)

    @property
    def final(self) -> Point | None:
        return self.points[-1] if self.points else None


def number(data: Mapping[Any, Any], name: Any) -> float:
    """Return a finite number from parsed JSON; raises ValueError if it is none."""
    found = data.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= sys.float_info.max:
        raise ValueError(f"{name} is {found!r:.40}, and not a number")
    return found


def number_or_none(data: Mapping[Any, Any], name: Any) -> float | None:
    return None if data.get(name) is None else number(data, name)


def whole(data: Mapping[Any, Any], name: Any) -> int:
    found = data.get(name)
    if type(found) is not int or not -MANY <= found < MANY:
        raise ValueError(f"{name} is {found!r:.40}, and not a whole number")
    return found


def _list(data: Mapping[str, Any], name: str, kind: Callable[[Mapping[Any, Any], Any], Any]) -> tuple[Any, ...]:
    found = data.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"{name} is {found!r:.40}, and not a list")
    one = f"one of {name}"
    return tuple(kind({one: each}, one) for each in found)


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r:.40}, and not an object")
    return found


def _client(given: str) -> int:
    if not (given.isascii() and given.isdecimal()) or len(given) > len(str(MANY)):
        raise ValueError(f"left_out has {given!r:.40}, which is no client")
    return int(given)
