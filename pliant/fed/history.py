"""The history of a federated job: its rounds, and the tests of its model on the virtual clock. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Round:
    """One round; for asynchronous jobs, what happened until the model changed. Clients are in ascending order."""

    round: Whole
    """Number of the round, from 1."""
    begin_s: Number
    """When the clients were invited; later than the last round's end if nobody was available."""
    clock_s: Number
    """When the round ended."""
    invited: tuple[Whole, ...]
    aggregated: tuple[Whole, ...]
    cut: tuple[Whole, ...]
    """Clients that did not finish in time; for asynchronous jobs, also those whose model was too old."""
    lost: tuple[Whole, ...]
    """Clients that became unavailable before they finished."""
    left_out: Mapping[int, str]
    """Aggregated clients whose update could not be used, with the reason."""
    loss: Number | None
    """Mean, over the aggregated clients, of the loss of the model that they were given on their own samples."""
    lr: Number
    there: Whole
    """Number of clients that could have been invited."""
    malicious: Whole
    """Number of malicious clients among the aggregated."""
    selector: Mapping[str, Whole | Number | None]
    """Figures of the selector about its choice."""
    client_s: tuple[Number, ...] = ()
    """Seconds that each aggregated client took."""
    staleness: tuple[Whole, ...] = ()
    """For asynchronous jobs, how many versions late the update of each aggregated client was."""
    asked_s: tuple[Number, ...] = ()
    """For asynchronous jobs, when each client was invited; otherwise it is the beginning of the round."""
    client_loss: tuple[Number | None, ...] = ()
    """Loss of the model that each aggregated client was given on its own samples; empty in jobs with privacy."""
    known: Whole = 0
    """Number of clients that are known so far, where it grows (on Flower); otherwise 0: it is in the record's start."""

    @property
    def duration_s(self) -> float:
        return self.clock_s - self.begin_s

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"duration_s": self.duration_s, "picked": len(self.invited)}
        return {name: value for name, value in found.items() if value or name not in _OPTIONAL}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        """Raises ValueError with the name and value that is wrong."""
        return _parse(_ROUND, data)


@dataclass(frozen=True, slots=True)
class Point:
    """One test of the model."""

    round: Whole
    clock_s: Number
    accuracy: Number
    """Share of test samples whose class the model finds."""
    top_5: Number
    loss: Number | None
    epsilon: Number | None = None
    """Privacy that has been spent so far; None if the job gives no guarantee."""

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.epsilon is None:
            del found["epsilon"]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """Raises ValueError with the name and value that is wrong."""
        return _parse(_POINT, data)


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


_OPTIONAL = ("staleness", "asked_s", "client_loss", "known")
"""Fields of a round that are left out while they are empty."""
_ROUND, _POINT = TypeAdapter(Round), TypeAdapter(Point)


def _parse(adapter: TypeAdapter[T], data: object) -> T:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))} is {first['input']!r:.40}: {first['msg']}") from None
