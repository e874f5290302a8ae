"""The phases of a worker in a training job: a pure state machine.

The trainer reports what has happened (an event) and does what it is told (an action); nothing else decides what comes
next. A step of the program has one pass or several: in a pass each replica hosted here takes its turn, and then the
gradients of all replicas are summed. Between passes the program's own code runs, once on every worker. Whatever else all
workers do together (a sum of metrics, the end of an epoch) is a pass without turns.

    JOINING ──────► PROGRAM ◄────────────────────────────────────┐
                       │ the program begins a pass               │
                       ▼                                         │
              ┌─────► TURNS ──────► SUMS ──────► CONFIRMING ─────┤
              │                      │ loss          │ loss      │
              │                      ▼               ▼           │
              │                   CHANGING ◄─────────┘           │
              │                   │     │                        │
              └── the turns again ┘     └── the sums are here ───┘

No worker leaves CONFIRMING before all workers have the sums. So after a loss the survivors agree without a copy of the
state: if all of them have the sums of a pass, or one has gone on, the others go on too; else all do its turns again. The
program never notices. Deferred updates have no such guarantee: a step whose sums will never come is taken back, its
outer body runs to its end without effect (TAKEN_BACK), and a survivor that lacks the state fetches it (CATCHING_UP), if
the others are not in the middle of a step by then.
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
    TAKEN_BACK = "finishing a step that does not count"
    CHANGING = "changing the view"
    CATCHING_UP = "fetching the state"
    DONE = "done"
    FAILED = "failed"


# --- events ---


@dataclass(frozen=True, slots=True)
class PassBegun:
    """The program iterates over a step, or wants something of all workers."""

    has_turns: bool = True


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The program has come back from a replica's turn."""


@dataclass(frozen=True, slots=True)
class SumsArrived:
    """The sums, and the messages of all workers, are here. Complaints are the same on every worker."""

    complaint: str = ""
    for_sure: bool = False
    """Nobody has to be asked whether it has them: there is no other worker, or the updates are deferred."""


@dataclass(frozen=True, slots=True)
class AllConfirmed:
    """All workers have the sums."""


@dataclass(frozen=True, slots=True)
class PeerLost:
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
    in_step: bool = False
    """Whether it is in the middle of a step, and so has a state with which no other worker, and no resumed job, can
    begin."""


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
class StateMade:
    """This worker has made the state that the job starts with."""

    passes: int


@dataclass(frozen=True, slots=True)
class StepTakenBack:
    """Deferred sums of the last pass will never come: its step is to be done again from its beginning."""

    why: str


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """The program has left its last epoch."""


Event = (
    PassBegun
    | TurnTaken
    | SumsArrived
    | AllConfirmed
    | PeerLost
    | ChangeAgreed
    | StepAsked
    | ViewEntered
    | StateMade
    | StateFetched
    | StepTakenBack
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
class Fail:
    """Raise an error."""

    why: str
    is_shared: bool = True
    """Whether every worker fails alike; else this one can be replaced."""


Action = TakeTurn | Exchange | Confirm | EnterView | FetchState | RunProgram | Fail


def ranks_behind(reports: Sequence[Report]) -> list[int]:
    """Return the ranks that must fetch the state. Whoever has the sums of the newest pass goes on by itself."""
    newest = max(report.passes for report in reports)
    return [
        rank
        for rank, report in enumerate(reports)
        if report.passes < newest and not (report.has_sums and report.passes == newest - 1)
    ]


class PhaseMachine:
    """Decides what a worker does next."""

    def __init__(self, *, elastic: bool, keeps_start: bool = False) -> None:
        """With `keeps_start` the state with which a step began is kept until its first pass counts."""
        self.phase = Phase.JOINING
        self.passes = -1
        """Passes that count; -1 before there is a state."""
        self.has_sums = False
        """Whether the sums of the present pass are here, though not every worker is known to have them."""
        self.view_agreed: int | None = None
        self._elastic = elastic
        """Whether a lost worker can be survived."""
        self._keeps_start = keeps_start
        self._in_pass = self._has_turns = self._in_body = False
        self._step_began = -1
        """The passes that counted when the program asked for its present step."""
        self._deferred_began = -1
        """The same for the step whose sums were last deferred."""
        self.is_lost = False
        """Whether a worker was lost while the program ran."""
        self._hosted = 0
        self._slot = 0

    @property
    def wants_view(self) -> bool:
        """Whether the next step begins in another view."""
        return self.is_lost or self.view_agreed is not None

    @property
    def report(self) -> Report:
        """This worker's report for the next view."""
        is_beyond = self.passes > self._step_began >= 0
        return Report(self.passes, self.has_sums, in_step=is_beyond or (self._in_body and not self._keeps_start))

    def handle(self, event: Event) -> Action:
        """Return what to do about `event`."""
        match event:
            case PeerLost(why):
                return self._lost(why)
            case StateMade(passes):
                self.passes = passes
                return RunProgram()
            case ChangeAgreed(view):
                self.view_agreed = view
                return RunProgram()
            case StepTakenBack(why):
                return self._take_back(why)
        match self.phase, event:
            case Phase.JOINING | Phase.CHANGING, ViewEntered(reports, hosted):
                return self._entered(reports, hosted)
            case Phase.CATCHING_UP, StateFetched(passes):
                self.passes = self._step_began = passes
                self.has_sums = False
                return self._go_on()
            case Phase.PROGRAM, StepAsked():
                self._step_began, self._in_body = self.passes, False
                return self._change_view() if self.wants_view else RunProgram()
            case Phase.TAKEN_BACK, StepAsked():
                return self._change_view()
            case Phase.PROGRAM, PassBegun(has_turns):
                self._in_pass, self._has_turns, self._in_body = True, has_turns, True
                return self._change_view() if self.is_lost else self._begin_pass()
            case Phase.TAKEN_BACK, PassBegun() | TurnTaken():
                return RunProgram()
            case Phase.TURNS, TurnTaken():
                if self.is_lost:
                    return self._change_view()
                self._slot += 1
                if self._slot < self._hosted:
                    return TakeTurn(self._slot)
                self.phase = Phase.SUMS
                return Exchange()
            case Phase.SUMS, SumsArrived(complaint, for_sure):
                return self._arrived(complaint, for_sure)
            case Phase.CONFIRMING, AllConfirmed():
                return self._count_pass()
            case Phase.PROGRAM, ProgramEnded():
                self.phase = Phase.DONE
                return RunProgram()
        raise AssertionError(f"{event} while {self.phase.value}")

    # --- a worker without others that hosts one replica: what `handle` does there, without a choice ---

    def begin_step_alone(self) -> bool:
        """Do what `StepAsked` does, if the program runs, and its next step begins in this view; else return False."""
        if self.phase is not Phase.PROGRAM or self.is_lost or self.view_agreed is not None:
            return False
        self._step_began, self._in_body = self.passes, False
        return True

    def count_pass_alone(self) -> int:
        """Do what `PassBegun`, `TurnTaken` and `SumsArrived` do in a pass with the only turn, when it is over. Return the
        number of passes that count."""
        self._has_turns = self._in_body = True
        self._slot, self._deferred_began = 1, self._step_began
        self.passes += 1
        return self.passes

    # --- decisions ---

    def _begin_pass(self) -> Action:
        self._slot, self.has_sums = 0, False
        if self._has_turns:
            self.phase = Phase.TURNS
            return TakeTurn(0)
        self.phase = Phase.SUMS
        return Exchange()

    def _arrived(self, complaint: str, for_sure: bool) -> Action:
        if complaint:
            self.phase = Phase.FAILED
            return Fail(complaint)
        if for_sure or not self._elastic:
            self._deferred_began = self._step_began
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
        if self.phase in (Phase.TURNS, Phase.PROGRAM):
            self.is_lost = True  # the program comes back first; without that worker there will be no sums
            return RunProgram()
        if self.phase is Phase.TAKEN_BACK:
            return RunProgram()
        return self._change_view()

    def _take_back(self, why: str) -> Action:
        if not self._elastic:
            self.phase = Phase.FAILED
            return Fail(why)
        self.passes = self._step_began = self._deferred_began
        self.phase, self.view_agreed = Phase.TAKEN_BACK, None
        self._in_pass = self.has_sums = self.is_lost = self._in_body = False
        return RunProgram()

    def _change_view(self) -> Action:
        planned = None if self.is_lost or self.phase is Phase.TAKEN_BACK else self.view_agreed
        self.phase, self.is_lost, self.view_agreed = Phase.CHANGING, False, None
        return EnterView(planned)

    def _entered(self, reports: Sequence[Report], hosted: int) -> Action:
        self._hosted = hosted
        newest = max(report.passes for report in reports)
        if self.passes == newest:
            # Where all have the sums of the present pass, it counts, though nobody could be sure of it before.
            all_have = all(report.has_sums and report.passes == newest for report in reports)
            return self._count_pass() if self.has_sums and all_have else self._go_on()
        if self.has_sums and self.passes == newest - 1:
            return self._count_pass()  # somebody has gone on, so everybody has the sums
        holders = tuple(rank for rank, report in enumerate(reports) if report.passes == newest)
        if self._in_pass or any(reports[rank].in_step for rank in holders):
            self.phase = Phase.FAILED
            why = (
                "the others are in the middle of a step that this worker has not begun with them: it has to be replaced"
            )
            return Fail(why, is_shared=False)
        self.phase = Phase.CATCHING_UP
        return FetchState(holders)

    def _go_on(self) -> Action:
        if self._in_pass:
            return self._begin_pass()
        self.phase = Phase.PROGRAM
        return RunProgram()
