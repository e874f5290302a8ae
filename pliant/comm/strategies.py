"""Which strategy a collective takes: the same on every rank, though strategies change while collectives are in flight.

Pure. After a change, what any rank had submitted before it still takes the old strategy everywhere; so a
rank that lagged behind goes on with the old one until it has caught up, channel by channel. That the
ranks ask for the same, and how far each has come, is brought here by `comm.engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pliant.comm.choice import parse
from pliant.comm.plan import Spec, Strategy
from pliant.comm.transport.wire import TAGGED, channel_tag
from pliant.errors import ConfigError

Counts = Mapping[bytes, int]
"""For each channel, by its tag: how many collectives were submitted."""


class Strategies:
    """The strategies of one rank, one after the other; their numbers are the same on every rank."""

    def __init__(self, first: Strategy) -> None:
        self._all = [first]
        self._late: dict[bytes, list[tuple[int, int]]] = {}
        """Channels on which this rank lagged behind at a change: (collectives before, number of the strategy)."""

    def __getitem__(self, number: int) -> Strategy:
        return self._all[number]

    @property
    def latest(self) -> int:
        """The number of the strategy that collectives submitted from now on use, where this rank does not lag behind."""
        return len(self._all) - 1

    def number_for(self, spec: Spec, seq: int) -> int:
        """The number of the strategy that this collective takes, on every rank."""
        if self._late:
            tag = channel_tag(spec.channel)
            for before, number in self._late.get(tag, ()):
                if seq < before:
                    return number
            self._late.pop(tag, None)
        return len(self._all) - 1

    def change(self, wanted: Strategy, mine: Counts, furthest: Counts) -> None:
        """Take `wanted` from now on; this rank has submitted `mine`, the furthest one `furthest`."""
        for tag, count in furthest.items():
            if count > mine.get(tag, 0):
                self._late.setdefault(tag, []).append((count, self.latest))
        self._all.append(wanted)


def checked(strategy: str | Sequence[int] | Strategy, hosts: Sequence[str]) -> Strategy:
    """What was asked for, a name or everybody's father, as a strategy that these hosts can have.

    Raises:
        ConfigError: no such strategy, or no tree over these hosts.
    """
    wanted = strategy if isinstance(strategy, Strategy) else parse(strategy)
    # One that was made before may be of another view; it falls back where it does not fit.
    if wanted is not strategy and wanted.name == "FOREST" and len(wanted.forest) != len(hosts):
        raise ConfigError(
            f"forest {list(wanted.forest)} has {len(wanted.forest)} entries, but there are {len(hosts)} ranks"
        )
    wanted.topologies(hosts, exact=False)
    return wanted


def pack_counts(counts: Counts) -> bytes:
    return b"".join(TAGGED.pack(tag, count) for tag, count in counts.items())


def furthest(packed: Iterable[bytes]) -> dict[bytes, int]:
    """For each channel, what the furthest rank has submitted."""
    most: dict[bytes, int] = {}
    for counts in packed:
        for tag, count in TAGGED.iter_unpack(counts):
            most[tag] = max(most.get(tag, 0), count)
    return most
