"""What the live scheduler decides to do: values, to be written down first and then done. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Start:
    """Start the job's next run on these devices."""

    job: str
    devices: dict[str, int]


@dataclass(frozen=True, slots=True)
class Resize:
    """Tell the job's runner to have these devices."""

    job: str
    devices: dict[str, int]


@dataclass(frozen=True, slots=True)
class Drop:
    """Kill the workers of the job that are on devices it shall not have."""

    job: str


@dataclass(frozen=True, slots=True)
class End:
    """End the job's run, in good order or at once."""

    job: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Write down what was decided, or has happened; everything else is to be kept, too, before it is done."""

    job: str
    what: str
    why: str
    devices: dict[str, int] = field(default_factory=dict)


Action = Start | Resize | Drop | End | Note
