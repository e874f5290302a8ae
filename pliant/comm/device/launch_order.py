"""One launch order for all ranks: the rule by which named tensors are released to a device library.

Libraries such as NCCL match collectives by the order in which they are launched, so two ranks that
launch in different orders wait for each other for ever. Gradients, however, become ready in an order
of their own on every rank. This is the linear executor of KungFu (OSDI'20): tensors are submitted by
name in any order, and each is held until its turn has come.

The turns of the first iteration are the sorted names, which all ranks know. The order in which
rank 0 submitted them then becomes the order from the second iteration on, because that is close to
the order in which they are ready everywhere. An iteration is over when every name has been submitted
once. Pure: events in, actions out; whoever drives it carries rank 0's order to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pliant.errors import ConfigError, Mismatch

NAMED_IN_ERRORS = 4
"""How many names an error message lists before it only counts them."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """This rank has `name` ready."""

    name: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """Rank 0's arrival order of the first iteration has come."""

    order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The turn of `name` has come: launch it now."""

    name: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The first iteration is over. Bring rank 0's `arrival` to all ranks and answer with `Agreed`."""

    arrival: tuple[str, ...]


Event = Submitted | Agreed
Action = Release | Settle


class LaunchOrder:
    """When each name of each iteration may be launched, on one rank.

    All ranks must be made with the same names (`check_equal`). Then all ranks get the same releases in
    the same order, whatever the order of their submissions.

    Raises:
        ConfigError: no names, or a name twice.
    """

    def __init__(self, names: Collection[str]) -> None:
        twice = [name for name, count in Counter(names).items() if count > 1]
        if not names or twice:
            raise ConfigError(
                f"{listed(twice)} given twice: every tensor needs a name of its own"
                if twice
                else "no names were given: name at least one tensor"
            )
        self.names = tuple(sorted(names))
        self._known = frozenset(names)
        self._order: Sequence[str] | None = self.names
        """Whose turn it is in the iteration that is being released; None until rank 0's order has come."""
        self._settled = len(self.names) == 1
        self._arrived: dict[str, None] = {}
        """What was submitted in the iteration that is being filled, in order of arrival."""
        self._held: Counter[str] = Counter()
        self._filling = self._releasing = 1
        self._turn = 0

    @property
    def iteration(self) -> int:
        """The iteration that is being submitted, from 1."""
        return self._filling

    @property
    def settled(self) -> bool:
        """Whether the order is now the one that stays."""
        return self._settled

    @property
    def order(self) -> tuple[str, ...]:
        """The order of the iteration that is being released; the sorted names until rank 0's has come."""
        return self.names if self._order is None else tuple(self._order)

    @property
    def lacking(self) -> tuple[str, ...]:
        """What this rank has not submitted of an iteration that it has begun."""
        return tuple(name for name in self.names if name not in self._arrived) if self._arrived else ()

    def handle(self, event: Event) -> list[Action]:
        """What follows from `event`, in this order.

        Raises:
            Mismatch: a name that is not one of those agreed on, a name twice in one iteration, or an order
                of other names. Nothing has changed then.
        """
        match event:
            case Submitted(name):
                return self._submit(name)
            case Agreed(order):
                return self._agree(order)

    def _submit(self, name: str) -> list[Action]:
        if name in self._arrived:
            raise Mismatch(
                f"iteration {self._filling}: {name!r} was submitted again before {listed(self.lacking)}: every "
                "name must be submitted once in every iteration; make a new group if the names have changed"
            )
        if name not in self._known:
            raise Mismatch(
                f"iteration {self._filling}: {name!r} is not one of the {len(self.names)} names that the ranks "
                "agreed on: name all tensors when the group is made"
            )
        self._arrived[name] = None
        self._held[name] += 1
        actions = self._release()
        if len(self._arrived) == len(self.names):
            if self._filling == 1 and not self._settled:
                actions.append(Settle(tuple(self._arrived)))
            self._arrived = {}
            self._filling += 1
        return actions

    def _agree(self, order: tuple[str, ...]) -> list[Action]:
        if tuple(sorted(order)) != self.names:
            raise Mismatch(f"rank 0 launches other names than this rank: {difference(self.names, order)}")
        if self._settled or self._filling == 1:
            raise Mismatch("an order came although none was asked for: it is agreed once, after the first iteration")
        self._order, self._settled = order, True
        return self._release()

    def _release(self) -> list[Action]:
        actions: list[Action] = []
        while self._order is not None and self._held[self._order[self._turn]]:
            name = self._order[self._turn]
            self._held[name] -= 1
            actions.append(Release(name, self._releasing))
            self._turn += 1
            if self._turn == len(self.names):
                self._turn = 0
                self._releasing += 1
                if not self._settled:
                    self._order = None
        return actions


def check_equal(described: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks, each with a description for each of its names, mean the same tensors.

    Raises:
        Mismatch: which names are missing where, or described differently.
    """
    first = described[0]
    for rank, other in enumerate(described):
        if set(other) != set(first):
            raise Mismatch(
                f"rank 0 and rank {rank} have different names: {difference(tuple(first), tuple(other), rank)}; "
                "all ranks must name the same tensors"
            )
        for name in first:
            if other[name] != first[name]:
                raise Mismatch(
                    f"{name!r} is {first[name]} on rank 0, but {other[name]} on rank {rank}: one name must mean "
                    "the same on all ranks"
                )


def difference(mine: Collection[str], theirs: Collection[str], rank: int = 0) -> str:
    """Which names only one of the two has, in words."""
    only = (sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine)))
    words = [f"rank {rank} lacks {listed(only[0])}"] if only[0] else []
    if only[1]:
        words.append(f"rank {rank} also has {listed(only[1])}")
    return " and ".join(words) or f"rank {rank} has the same names, some of them twice"


def listed(names: Sequence[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:NAMED_IN_ERRORS])
    more = len(names) - NAMED_IN_ERRORS
    return f"{shown} and {more} more" if more > 0 else shown
