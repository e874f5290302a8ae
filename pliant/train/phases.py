"""The phases of a worker in a training job: a pure state machine.

The trainer reports what has happened (an event) and does what it is told (an action); nothing else decides what comes
next. A step of the program has one pass or several: in a pass each replica hosted here takes its turn, and then the
gradients of all replicas are summed. Between passes the program's own code runs, once on every worker.

    JOINING ──────► PROGRAM ◄────────────────────────────────────┐
                       │ the program begins a pass               │
                       ▼                                         │
              ┌─────► TURNS ──────► SUMS ──────► CONFIRMING ─────┤
              │         │ loss       │ loss          │ loss      │
              │         ▼            ▼               ▼           │
              │        TORN ───► CHANGING ◄──────────┘           │
              │                   │     │                        │
              └── the turns again ┘     └── the sums are here ───┘

No worker leaves CONFIRMING before all workers have the sums. So after a loss the survivors agree without a copy of the
state: if all of them have the sums of a pass, or one has gone on, the others go on too; else all do its turns again. The
program never notices. Deferred updates have no such guarantee: a survivor that lacks sums fetches the state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Phase(enum.Enum):
    """What a worker does now."""

    JOINING = "joining"
    PROGRAM = "running the program between passes"
    TURNS = "taking turns"
    SUMS = "waiting for sums"
    CONFIRMING = "waiting until all workers have the sums"
    TORN = "torn: finishing a turn that does not count"
    CHANGING = "changing the view"
    CATCHING_UP = "fetching the state"
    LEAVING = "leaving"
    DONE = "done"
    FAILED = "failed"


# --- events ---


@dataclass(frozen=True, slots=True)
class PassBegun:
    """The program iterates over a step."""


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The program has come back from a replica's turn."""


@dataclass(frozen=True, slots=True)
class SumsArrived:
    """The sums, and the messages of all workers, are here. Complaints are the same on every worker."""

    complaint: str = ""
    deferred: bool = False
    """Sums are still on their way, and each is waited for where it is used."""


@dataclass(frozen=True, slots=True)
class AllConfirmed:
    """All workers have the sums."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker of the view is lost."""

    why: str


@dataclass(frozen=True, slots=True)
class ChangeAgreed:
    """All workers are prepared for this view: they enter it before the next step."""

    view: int


@dataclass(frozen=True, slots=True)
class StepAsked:
    """The program asks for its next step."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says when it enters a view."""

    passes: int
    """The passes it has done; -1 without a state."""
    has_sums: bool = False
    """Whether it also has the sums of the next pass."""


@dataclass(frozen=True, slots=True)
class ViewEntered:
    """All workers of a new view have reported."""

    reports: tuple[Report, ...]
    hosted: int
    """How many replicas this worker hosts now."""


@dataclass(frozen=True, slots=True)
class StateFetched:
    """This worker has the state of the others."""

    passes: int


@dataclass(frozen=True, slots=True)
class StepUndone:
    """The last pass was undone, because its deferred sums will never come."""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This worker is no longer part of the job, or the job is over."""

    why: str


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """The program has left its last epoch."""


Event = (
    PassBegun
    | TurnTaken
    | SumsArrived
    | AllConfirmed
    | WorkerLost
    | ChangeAgreed
    | StepAsked
    | ViewEntered
    | StateFetched
    | StepUndone
    | Dismissed
    | ProgramEnded
)


# --- actions ---


@dataclass(frozen=True, slots=True)
class TakeTurn:
    """Give the program the batch of the replica in this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send what the step leaves for the next one, and wait for all sums."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell all workers that the sums are here, and wait for theirs."""


@dataclass(frozen=True, slots=True)
class EnterView:
    """Enter this view, or else the next one that there is."""

    planned: int | None = None


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch the state from these ranks."""

    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunProgram:
    """Return to the program."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End this worker in good order."""

    why: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise an error."""

    why: str


Action = TakeTurn | Exchange | Confirm | EnterView | FetchState | RunProgram | Leave | Fail


class PhaseMachine:
    """Decides what a worker does next."""

    def __init__(self, *, elastic: bool) -> None:
        self.phase = Phase.JOINING
        self.passes = -1
        """Passes that count; -1 before there is a state."""
        self.has_sums = False
        """Whether the sums of the present pass are here, though not every worker is known to have them."""
        self.view_agreed: int | None = None
        self._elastic = elastic
        """Whether a lost worker can be survived."""
        self._in_pass = False
        self._hosted = 0
        self._slot = 0

    @property
    def report(self) -> Report:
        """This worker's report for the next view."""
        return Report(self.passes, self.has_sums)

    def handle(self, event: Event) -> Action:
        """Return what to do about `event`."""
        match event:
            case WorkerLost(why):
                return self._lost(why)
            case Dismissed(why) if self.phase in (Phase.JOINING, Phase.CHANGING, Phase.CATCHING_UP):
                self.phase = Phase.LEAVING
                return Leave(why)
            case ChangeAgreed(view):
                self.view_agreed = view
                return RunProgram()
        match self.phase, event:
            case Phase.JOINING | Phase.CHANGING, ViewEntered(reports, hosted):
                return self._entered(reports, hosted)
            case Phase.CATCHING_UP, StateFetched(passes):
                self.passes, self.has_sums = passes, False
                return self._go_on()
            case Phase.PROGRAM, StepAsked():
                if self.view_agreed is None:
                    return RunProgram()
                self.phase = Phase.CHANGING
                return EnterView(self.view_agreed)
            case Phase.PROGRAM, PassBegun():
                self._in_pass = True
                return self._take_turns()
            case Phase.TURNS, TurnTaken():
                self._slot += 1
                if self._slot < self._hosted:
                    return TakeTurn(self._slot)
                self.phase = Phase.SUMS
                return Exchange()
            case Phase.TORN, TurnTaken():
                self.phase = Phase.CHANGING
                return EnterView()
            case Phase.SUMS, SumsArrived(complaint, deferred):
                return self._arrived(complaint, deferred)
            case Phase.CONFIRMING, AllConfirmed():
                return self._count_pass()
            case Phase.PROGRAM | Phase.CHANGING, StepUndone():
                self.passes -= 1
                return RunProgram()
            case Phase.PROGRAM, ProgramEnded():
                self.phase = Phase.DONE
                return RunProgram()
        raise AssertionError(f"{event} while {self.phase.value}")

    def _take_turns(self) -> Action:
        self.phase, self._slot, self.has_sums = Phase.TURNS, 0, False
        return TakeTurn(0)

    def _arrived(self, complaint: str, deferred: bool) -> Action:
        if complaint:
            self.phase = Phase.FAILED
            return Fail(complaint)
        if deferred or not self._elastic:
            return self._count_pass()
        self.phase, self.has_sums = Phase.CONFIRMING, True
        return Confirm()

    def _count_pass(self) -> Action:
        self.phase, self._in_pass, self.has_sums = Phase.PROGRAM, False, False
        self.passes += 1
        return RunProgram()

    def _lost(self, why: str) -> Action:
        if not self._elastic:
            self.phase = Phase.FAILED
            return Fail(why)
        self.view_agreed = None
        if self.phase is Phase.TURNS:
            self.phase = Phase.TORN  # noticed in the middle of a turn: the program has to come back first
            return RunProgram()
        if self.phase in (Phase.TORN, Phase.PROGRAM):
            return RunProgram()  # it will be noticed again
        self.phase = Phase.CHANGING
        return EnterView()

    def _entered(self, reports: Sequence[Report], hosted: int) -> Action:
        self._hosted, self.view_agreed = hosted, None
        newest = max(report.passes for report in reports)
        holders = tuple(rank for rank, report in enumerate(reports) if report.passes == newest)
        if newest < 0:  # the job begins: the first worker makes the state
            holders = (0,)
        if self.passes == newest >= 0:
            # Where all have the sums of the present pass, it counts, though nobody could be sure of it before. A new
            # worker has none, and begins with the turns of this pass.
            all_have = all(report.has_sums for report in reports)
            return self._count_pass() if self._in_pass and self.has_sums and all_have else self._go_on()
        if self.has_sums and self.passes == newest - 1:
            return self._count_pass()  # somebody has gone on, so everybody has the sums
        self.phase = Phase.CATCHING_UP
        return FetchState(holders)

    def _go_on(self) -> Action:
        if self._in_pass:
            return self._take_turns()
        self.phase = Phase.PROGRAM
        return RunProgram()
