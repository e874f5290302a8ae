"""Who trains now: the roll, and how it follows the wanted view.

Pure values and functions: no I/O, no clock. The wanted view (`elastic.membership`) says who shall
train; the roll says who does. A wish becomes the roll when all its workers are ready, so that
nobody who trains ever waits for somebody who starts; a loss changes it at once. Workers that are to leave
stay as long as the others depend on them for the job's state.
`Membership` is all that the config server keeps, and `Membership.after` is its only rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from pliant.cluster import View, Worker
from pliant.elastic.membership import NO_LIMITS, Clear, Limits, RemoveWorker, Request, Reset, Wanted
from pliant.errors import ClusterCleared, ConfigError, NotWanted

KEPT_HOLDERS = 2
"""While newcomers have not got the state, so many of those who have it stay."""


@dataclass(frozen=True, slots=True)
class Roll:
    """The numbered list of the workers that train now."""

    number: int = 0
    """Counts changes of the members, over all jobs of a server; 0: nobody has been ready yet."""
    members: tuple[Worker, ...] = ()
    """Who trains; the order gives the ranks."""
    urgent: int = 0
    """The highest number that came from the loss of a member: who is in an older roll drops its step at once."""
    over: bool = False
    """The job has ended: everybody stops, and nothing but a reset is accepted."""
    wanted: int = 0
    """Version of the wanted view when this roll was made."""

    def to_json(self) -> dict[str, object]:
        return {
            "Number": self.number,
            "Members": [member.to_json() for member in self.members],
            "Urgent": self.urgent,
            "Over": self.over,
            "Wanted": self.wanted,
        }

    @classmethod
    def from_json(cls, value: object) -> Roll:
        """The roll that `value` describes; ConfigError if it describes none."""
        if not isinstance(value, Mapping):
            raise ConfigError(f'a roll is an object with "Number" and "Members", not {value!r:.60}')
        members, over = value.get("Members"), value.get("Over")
        if not isinstance(members, Sequence) or isinstance(members, str) or not isinstance(over, bool):
            raise ConfigError(f'{value!r:.200} is no roll: "Members" is a list, and "Over" is true or false')
        number, urgent, wanted = (_count(value, key) for key in ("Number", "Urgent", "Wanted"))
        return cls(number, tuple(Worker.from_json(member) for member in members), urgent, over, wanted)


def _count(value: Mapping[object, object], key: str) -> int:
    count = value.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f'"{key}" of a roll is {count!r:.60}: it must be a whole number from 0')
    return count


@dataclass(frozen=True, slots=True)
class Ready:
    """`worker` can train as soon as it is a member. Refused where nobody wants it any more."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Settled:
    """`worker` has done a step with the others, and so has the state of the job.

    Of a roll that is longer than `replicas`, only so many take part; 0 means all.
    """

    worker: Worker
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """`worker` died or fell silent: it is no longer wanted, and the others drop the step they shared with it.

    Its host keeps its runner, which may start another worker there.
    """

    worker: Worker
    reason: str = ""
    by: Worker | None = None
    """Which worker says so; what one says that is off the roll itself does not count. None: a runner."""


@dataclass(frozen=True, slots=True)
class Left:
    """`worker` takes its leave, as after a spot notice: it is no longer wanted, but its last step counts."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Finished:
    """The program has run to its end: everybody stops."""


Event = Ready | Settled | Lost | Left | Finished


@dataclass(frozen=True, slots=True)
class Membership:
    """What the config server keeps: who shall train, who does, and who could."""

    wanted: Wanted = field(default_factory=Wanted)
    roll: Roll = field(default_factory=Roll)
    ready: frozenset[Worker] = frozenset()
    """Workers that are up; each of them is wanted or a member."""
    settled: frozenset[Worker] = frozenset()
    """Members that have the state of the job."""
    replicas: int = 0
    """How many of the members take part; 0: all."""

    @classmethod
    def of(cls, wanted: Wanted) -> Membership:
        """The state of a server that has heard of `wanted`, and of no worker yet."""
        return cls(wanted, Roll(over=wanted.cleared, wanted=wanted.version))

    @property
    def finished(self) -> bool:
        """Whether the job has run to its end, rather than been told to stop."""
        return self.roll.over and not self.wanted.cleared

    def after(self, request: Request | Event, limits: Limits = NO_LIMITS) -> Membership:
        """The state that `request` leads to: this one if all is as asked already.

        Raises (and nothing has changed):
            NotWanted: a worker is ready that is not in the wanted view.
            ClusterCleared: the job has ended; only a reset opens the next.
            StaleView, NoView, InvalidView, CapacityError, ConfigError: as `Wanted.after`.
        """
        match request:
            case Ready(worker):
                return self._with(worker)
            case Settled(worker, replicas):
                return self._knowing(worker, replicas)
            case Lost(_, _, by) if by is not None and by not in self.roll.members:
                return self  # of two that have lost each other, the first to say so stays
            case Lost(worker) | Left(worker):
                return self._without(worker, lost=isinstance(request, Lost))
            case Finished():
                return self if self.wanted.view is None or self.roll.over else self._moved(self.wanted, over=True)
            case Reset():
                wanted = self.wanted.after(request)
                return self if wanted is self.wanted else Membership(wanted, self._turned((), False, wanted))
        if self.finished and not isinstance(request, Clear):
            raise ClusterCleared(
                f"the job has finished (version {self.wanted.version}), its view is closed: reset it before the next job"
            )
        wanted = self.wanted.after(request, limits)
        return self if wanted is self.wanted else self._moved(wanted)

    def _with(self, worker: Worker) -> Membership:
        if worker not in _workers(self.wanted):
            why = "the job was told to stop" if self.wanted.cleared else "it was removed, or never added"
            raise NotWanted(
                f"worker {worker} is not in the wanted view (version {self.wanted.version}): {why}; it must end"
            )
        return self if self.roll.over or worker in self.ready else self._moved(self.wanted, {*self.ready, worker})

    def _without(self, worker: Worker, *, lost: bool) -> Membership:
        is_wanted, is_member = worker in _workers(self.wanted), worker in self.roll.members
        if self.roll.over or not (is_wanted or is_member):
            return self
        wanted = self.wanted
        if lost and _workers(wanted) == (worker,):
            # Without anybody wanted the job would be over. It stays listed, though not ready, until its runner asks for
            # another in its place and reports it lost again, or clears the view.
            return self._moved(wanted, self.ready - {worker}, gone=worker, urgent=is_member)
        if is_wanted:
            wanted = wanted.after(RemoveWorker(worker))
            if lost and self.wanted.view is not None and wanted.view is not None:
                wanted = replace(wanted, view=replace(wanted.view, runners=self.wanted.view.runners))
        if lost:
            return self._moved(wanted, self.ready - {worker}, gone=worker, urgent=is_member)
        return self._moved(wanted, leaving=worker)

    def _knowing(self, worker: Worker, replicas: int) -> Membership:
        if worker not in self.roll.members or worker in self.settled:
            return self
        known = replace(self, settled=self.settled | {worker}, replicas=replicas)
        return known._moved(self.wanted)

    def _moved(
        self,
        wanted: Wanted,
        ready: frozenset[Worker] | set[Worker] | None = None,
        *,
        gone: Worker | None = None,
        leaving: Worker | None = None,
        urgent: bool = False,
        over: bool = False,
    ) -> Membership:
        """This state with another `wanted` and `ready`, and the roll that follows from them."""
        ready = self.ready if ready is None else ready
        over = over or wanted.cleared
        members = () if over else self._members(wanted, ready, gone, leaving)
        known = {*members, *_workers(wanted)}
        return Membership(
            wanted,
            self._turned(members, over, wanted, urgent),
            frozenset(known.intersection(ready)),
            self.settled.intersection(members),
            self.replicas,
        )

    def _members(
        self, wanted: Wanted, ready: Set[Worker], gone: Worker | None, leaving: Worker | None
    ) -> tuple[Worker, ...]:
        """Who trains from now on: those wanted once all are ready, and with newcomers as many of those that have
        the state as it takes for no single crash to lose it. They come first, for the end of a long roll stands by."""
        current = tuple(member for member in self.roll.members if member != gone)
        if ready >= set(_workers(wanted)):
            members = _workers(wanted)
        else:
            members = tuple(member for member in current if member != leaving)
        holders = [member for member in current if member in self.settled]
        if not members or self.settled.issuperset(members):
            return members
        room = max(1, self.replicas - 1) if self.replicas else KEPT_HOLDERS
        missing = min(KEPT_HOLDERS, len(holders), room) - len(self.settled.intersection(members))
        keepers = [holder for holder in holders if holder not in members]
        keepers.sort(key=lambda holder: holder == leaving)
        return (*keepers[: max(0, missing)], *members)

    def _turned(self, members: tuple[Worker, ...], over: bool, wanted: Wanted, urgent: bool = False) -> Roll:
        """The roll with these members: the same one if nothing is different about it."""
        if (members, over) == (self.roll.members, self.roll.over):
            return self.roll
        number = self.roll.number + (members != self.roll.members)
        return Roll(number, members, number if urgent else self.roll.urgent, over, wanted.version)


def _workers(wanted: Wanted) -> tuple[Worker, ...]:
    return wanted.view.workers if wanted.view else ()


def missing(view: View | None, roll: Roll) -> tuple[Worker, ...]:
    """Workers of `view` that do not train yet."""
    return tuple(worker for worker in (view.workers if view else ()) if worker not in roll.members)
