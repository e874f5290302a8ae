"""Does what the machine of `phases` decides, and tells it what has happened: views, exchanges, lost workers.

When the workers of a job change, each worker enters the new view here, and the state of the job comes to those that lack
it. The program, and whoever runs its steps, only see that an exchange took longer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pliant.comm.handle import Handle
from pliant.errors import CommError, MustBeReplaced, TrainError
from pliant.train.deferred import DeferredUpdates, is_survivable
from pliant.train.phases import (
    Action,
    AllConfirmed,
    Confirm,
    EnterView,
    Event,
    Exchange,
    Fail,
    FetchState,
    PassBegun,
    PeerLost,
    Phase,
    PhaseMachine,
    Report,
    RunProgram,
    StateFetched,
    StateMade,
    StepTakenBack,
    TakeTurn,
    ViewEntered,
    ranks_behind,
)

if TYPE_CHECKING:
    from pliant.elastic.member import Member
    from pliant.train.current_step import CurrentStep
    from pliant.train.job_state import JobState
    from pliant.train.meeting import MeetingWatch
    from pliant.train.outer_code import OuterCode
    from pliant.train.passes import Passes
    from pliant.train.rendezvous import EnteredView, ViewRendezvous
    from pliant.train.replicas import Placement
    from pliant.train.views import WorkerViews

log = logging.getLogger(__name__)


class PhaseDriver:
    """Stands between the program of a worker and its phase machine."""

    def __init__(
        self,
        machine: PhaseMachine,
        member: Member,
        state: JobState,
        rendezvous: ViewRendezvous,
        views: WorkerViews,
        passes: Passes,
        current: CurrentStep,
        outer: OuterCode,
        deferred: DeferredUpdates,
        meetings: MeetingWatch,
    ) -> None:
        self.machine = machine
        self._member, self._state, self._rendezvous, self._views = member, state, rendezvous, views
        self._passes, self._current, self._outer = passes, current, outer
        self._deferred, self._meetings = deferred, meetings
        self.joins_late = False
        """Whether the others have run the program's code before this step already. What this worker does there is
        dropped."""
        self.is_broken = False
        """Whether this worker can do nothing more with the others: it was dismissed, or an error has ended its part."""
        self._fetched: Handle | None = None
        """Is done when all new workers of this view have the state."""

    # --- events and actions ---

    def handle(self, event: Event) -> Action:
        """Report an event to the machine. Where that makes a pass count, keep what it leaves."""
        before = self.machine.passes
        action = self.machine.handle(event)
        if 0 <= before == self.machine.passes - 1 and not isinstance(event, StateFetched):
            self._passes.count()
            # A pass that counts when a view is entered was done in the view before.
            self._views.last_pass_in = self._member.entered if not isinstance(event, ViewEntered) else -1
        return action

    def perform(self, action: Action, exchange: Callable[[], Event] | None = None, place: str = "") -> Action:
        """Do what the machine says until the program goes on, or a turn begins. `exchange` is what the workers do
        together in this pass, and `place` says where that is in the program."""
        try:
            return self._perform_until_the_program(action, exchange, place)
        except BaseException:
            self.is_broken = True
            raise
        finally:
            self._meetings.end()

    def _perform_until_the_program(self, action: Action, exchange: Callable[[], Event] | None, place: str) -> Action:
        while True:
            match action:
                case RunProgram() | TakeTurn():
                    return action
                case EnterView() | Exchange() if not self.wait_for_sums():
                    return RunProgram()  # the step before is taken back
                case EnterView(planned):
                    action = self._enter_view(planned)
                case Exchange():
                    assert exchange is not None, "only a pass has an exchange"
                    self._meetings.begin(self._views.current_engine(), self.machine.passes, place)
                    try:
                        action = self.handle(exchange())
                    except CommError as error:
                        action = self.lost(error)
                case Confirm():
                    try:
                        self._views.current_engine().barrier("confirm")
                        action = self.handle(AllConfirmed())
                    except CommError as error:
                        action = self.lost(error)
                case Fail(why, is_shared):
                    raise (TrainError if is_shared else MustBeReplaced)(why)
                case FetchState():
                    raise AssertionError("a state is fetched where a view is entered")

    def meet(self, exchange: Callable[[], Event], place: str) -> None:
        """Do something together with all workers that needs no turns."""
        self.perform(self.handle(PassBegun(has_turns=False)), exchange, place)

    # --- losses ---

    def lost(self, error: CommError) -> Action:
        """Decide what follows the loss of a worker. Raises other errors, which no new view would cure."""
        if not self._member.elastic or not is_survivable(error):
            raise error
        log.debug("%s while %s", error, self.machine.phase.value)
        self._views.changes.note_loss(self._state.progress.step + 1)
        return self.handle(PeerLost(str(error)))

    @property
    def is_taken_back(self) -> bool:
        """Whether the step in progress does not count: the program runs to its end without effect."""
        return self.machine.phase is Phase.TAKEN_BACK

    def wait_for_sums(self) -> bool:
        """Wait for the sums of the last step that are still on their way; return False if it is taken back instead."""
        self._deferred.flush()
        if self._deferred.lost is not None and self.machine.phase is not Phase.TAKEN_BACK:
            self.take_back()
        return self.machine.phase is not Phase.TAKEN_BACK

    def take_back(self) -> Action:
        """Take back the last step: its sums will never come."""
        error = self._deferred.lost
        assert error is not None, "a sum is lost"
        log.debug("step %d is taken back: %s", self._state.progress.step - 1, error)
        self._views.changes.note_loss(self._state.progress.step + 1)
        for reducer in self._state.reducers:
            reducer.fill_missing()
        return self.handle(StepTakenBack(str(error)))

    # --- views ---

    def join(self) -> None:
        """Enter the job, as a new worker."""
        self._member.on_prepare = self._views.prepare
        self._meetings.await_entry()
        self._rendezvous.report_ready()
        self.perform(EnterView())

    def end_late_joining(self) -> None:
        """Begin to take part with a step: what the program has done before it does not count, as the others had done it
        already."""
        self.joins_late = False
        self._outer.drop()
        self._rendezvous.reload_state()
        self._views.deal()
        self._outer.begin()  # it goes on at once if this epoch has no more steps

    def _enter_view(self, planned: int | None) -> Action:
        old_size, had_view = self._member.size, self._views.engine is not None
        if planned is None and had_view:
            for reducer in self._state.reducers:
                reducer.halt()
        if had_view:
            self._outer.note_draws()
        runs_program = self._outer.is_running or not had_view  # else it takes turns, or evaluates shards
        since_s = self._views.changes.since_s(is_planned=planned is not None)
        entered = self._rendezvous.enter(planned, self._report_and_lend())
        if entered.made_state:
            self.handle(StateMade(self._state.progress.passes))
        placement = self._views.place(entered.engine)
        try:
            action, has_newcomers = self._share_state(entered, placement)
        except CommError as error:
            return self.lost(error)
        finally:
            self._state.lent = {}
        self._fetched = self._rendezvous.report_fetched(entered)
        if not had_view:
            self.joins_late = self._state.progress.in_epoch
        self._views.use(entered, placement)
        if had_view:
            self._views.changes.begin(since_s, old_size, not entered.was_planned)
        if isinstance(action, RunProgram):
            if runs_program:
                self._outer.begin()
            if has_newcomers or (entered.was_planned and self._current.writes_first):
                # The program may change what new workers read.
                return self.await_newcomers() or action
        return action

    def _report_and_lend(self) -> Report:
        """Return this worker's report for the next view. What it lends is the state with which the step in progress began,
        if others can begin with it: the program may have changed tracked objects and options before the first pass."""
        report, start = self.machine.report, self._current.start
        if self._current.step is None or start is None or start.progress.passes != self.machine.passes:
            return report
        self._state.lent = start.to_lend()
        has_written = self._current.has_written()  # parameters are not kept
        return replace(report, in_step=report.in_step or has_written)

    def _share_state(self, entered: EnteredView, placement: Placement) -> tuple[Action, bool]:
        """Take part in giving everybody the newest state. Return what to do next, and whether a worker lacked it."""
        reports = tuple(report.of_phases for report in entered.reports)
        arrived, behind = ViewEntered(reports, len(placement.hosted)), ranks_behind(reports)
        if entered.engine.rank in behind:
            action = self.handle(arrived)
            if isinstance(action, FetchState):
                self._rendezvous.share_state(entered)
                action = self.handle(StateFetched(self._state.progress.passes))
        else:
            if behind:
                self._rendezvous.share_state(entered)
            action = self.handle(arrived)
        return action, bool(behind)

    def await_newcomers(self) -> Action | None:
        """Wait until new workers have the state. Return what to do if a worker is lost meanwhile."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            try:
                fetched.wait()
            except CommError as error:
                return self.lost(error)
        return None
