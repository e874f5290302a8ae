"""The phases of a worker: single transitions, and random walks of several workers that are lost, join and leave at any moment.

In the walks the rules of `elastic.membership` play the config server.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.cluster import Membership, View, Worker
from pliant.elastic.membership import (
    AddWorker,
    ClearView,
    ElasticState,
    FinishNotice,
    LeaveNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    SettledNotice,
)
from pliant.train import phases
from pliant.train.phases import (
    AllConfirmed,
    ChangeAgreed,
    Confirm,
    EnterView,
    Exchange,
    Fail,
    FetchState,
    PassBegun,
    PeerLost,
    Phase,
    PhaseMachine,
    ProgramEnded,
    Report,
    RunProgram,
    StateFetched,
    StateMade,
    StepAsked,
    StepTakenBack,
    SumsArrived,
    TakeTurn,
    TurnTaken,
    ViewEntered,
    ranks_behind,
)

BEGUN = "the others are in the middle of a step that this worker has not begun with them: it has to be replaced"


# --- single transitions ---


def training(*, elastic: bool = True, hosted: int = 2) -> PhaseMachine:
    machine = PhaseMachine(elastic=elastic)
    assert machine.handle(StateMade(0)) == RunProgram()
    assert machine.handle(ViewEntered((Report(0), Report(-1)), hosted)) == RunProgram()
    assert machine.handle(StepAsked()) == RunProgram()
    return machine


def after_turns(machine: PhaseMachine, hosted: int = 2) -> PhaseMachine:
    assert machine.handle(PassBegun()) == TakeTurn(0)
    for slot in range(1, hosted):
        assert machine.handle(TurnTaken()) == TakeTurn(slot)
    assert machine.handle(TurnTaken()) == Exchange()
    return machine


def after_pass(machine: PhaseMachine, *, for_sure: bool = True) -> PhaseMachine:
    action = after_turns(machine).handle(SumsArrived(for_sure=for_sure))
    assert (action if for_sure else machine.handle(AllConfirmed())) == RunProgram()
    return machine


def test_the_sums_of_an_earlier_pass_are_not_those_of_the_present_one() -> None:
    machine = after_pass(training())
    machine.handle(PassBegun(has_turns=False))
    assert machine.handle(SumsArrived()) == Confirm()
    machine.handle(PeerLost(""))
    reports = (machine.report, Report(0, has_sums=True))
    assert machine.handle(ViewEntered(reports, 1)) == Exchange(), "once more, with the other"


def test_a_pass_is_turns_sums_and_a_confirmation() -> None:
    machine = after_turns(training())
    assert machine.handle(SumsArrived()) == Confirm()
    assert machine.report == Report(0, has_sums=True, in_step=True)
    assert machine.handle(AllConfirmed()) == RunProgram()
    assert (machine.phase, machine.passes) == (Phase.PROGRAM, 1)
    assert machine.handle(PassBegun(has_turns=False)) == Exchange(), "a second pass of the step, without turns"
    assert machine.handle(SumsArrived(for_sure=True)) == RunProgram(), "nobody else is there to be asked"
    assert machine.report == Report(2, in_step=True)
    assert machine.handle(StepAsked()) == RunProgram()
    assert machine.report == Report(2)
    assert machine.handle(ProgramEnded()) == RunProgram()
    assert machine.phase is Phase.DONE


def test_a_new_worker_fetches_the_state() -> None:
    machine = PhaseMachine(elastic=True)
    assert machine.handle(ViewEntered((Report(7), Report(-1), Report(7)), 1)) == FetchState((0, 2))
    assert machine.handle(StateFetched(7)) == RunProgram()
    assert machine.passes == 7


def test_without_changes_of_workers_nothing_is_confirmed_and_a_loss_is_an_error() -> None:
    machine = after_turns(training(elastic=False))
    assert machine.handle(SumsArrived()) == RunProgram()
    after_turns(machine)
    assert machine.handle(PeerLost("peer 1 is gone")) == Fail("peer 1 is gone")
    machine = after_pass(training(elastic=False))
    assert machine.handle(StepTakenBack("peer 1 is gone")) == Fail("peer 1 is gone")


def test_a_complaint_ends_every_worker() -> None:
    machine = after_turns(training())
    assert machine.handle(SumsArrived("replica 1 had no backward in step 3")) == Fail(
        "replica 1 had no backward in step 3"
    )


def test_a_planned_change_waits_for_the_next_step_and_a_loss_cancels_it() -> None:
    machine = after_turns(training())
    assert machine.handle(ChangeAgreed(5)) == RunProgram()
    machine.handle(SumsArrived(for_sure=True))
    assert machine.handle(PassBegun(has_turns=False)) == Exchange(), "the step is not over"
    machine.handle(SumsArrived(for_sure=True))
    assert machine.handle(StepAsked()) == EnterView(5)
    assert machine.handle(ViewEntered((machine.report,), 1)) == RunProgram()
    after_turns(machine, hosted=1).handle(ChangeAgreed(6))
    assert machine.handle(PeerLost("")) == EnterView()


@pytest.mark.parametrize(
    ("own", "others", "counts"),
    [
        (False, [Report(0)], False),
        (True, [Report(0)], False),
        (True, [Report(0, has_sums=True)], True),
        (True, [Report(1, in_step=True)], True),
        (True, [Report(0, has_sums=True), Report(-1)], False),
    ],
)
def test_after_a_loss_the_pass_counts_if_all_have_the_sums_or_one_has_gone_on(
    own: bool, others: list[Report], counts: bool
) -> None:
    machine = after_turns(training())
    if own:
        machine.handle(SumsArrived())
    assert machine.handle(PeerLost("")) == EnterView()
    action = machine.handle(ViewEntered((machine.report, *others), 3))
    assert action == (RunProgram() if counts else TakeTurn(0))
    assert machine.passes == int(counts)


def test_a_loss_that_is_noticed_in_a_turn_waits_for_the_program() -> None:
    machine = training()
    machine.handle(PassBegun())
    assert machine.handle(PeerLost("")) == RunProgram()
    assert machine.phase is Phase.TURNS
    assert machine.handle(TurnTaken()) == EnterView()
    machine = after_pass(training())
    assert machine.handle(PeerLost("")) == RunProgram()
    assert machine.handle(PassBegun()) == EnterView()
    assert machine.handle(ViewEntered((machine.report, Report(1)), 1)) == TakeTurn(0), "the pass was to begin"


@pytest.mark.parametrize("moment", ["outer body", "turn", "exchange"])
def test_a_step_that_is_taken_back_runs_to_its_end_without_effect(moment: str) -> None:
    machine = after_pass(training())
    machine.handle(StepAsked())
    if moment != "outer body":
        machine.handle(PassBegun())
    if moment == "exchange":
        machine.handle(TurnTaken())
        assert machine.handle(TurnTaken()) == Exchange()
    assert machine.handle(StepTakenBack("w1 is lost")) == RunProgram()
    assert (machine.phase, machine.passes) == (Phase.TAKEN_BACK, 0)
    for event in (TurnTaken(), PassBegun(), PassBegun(has_turns=False), PeerLost("w1"), StepTakenBack("again")):
        assert machine.handle(event) == RunProgram()
    assert machine.report == Report(0)
    assert machine.handle(StepAsked()) == EnterView()


def test_one_that_has_taken_a_step_back_fetches_it_unless_the_others_are_in_the_middle_of_one() -> None:
    for others, expected in (
        ([Report(0)], RunProgram()),
        ([Report(1), Report(0)], FetchState((1,))),
        (
            [Report(2, in_step=True)],
            Fail(BEGUN, is_shared=False),
        ),
    ):
        machine = after_pass(training())
        machine.handle(StepTakenBack(""))
        machine.handle(StepAsked())
        assert machine.handle(ViewEntered((machine.report, *others), 1)) == expected


def test_one_that_is_left_behind_in_a_pass_has_to_be_replaced() -> None:
    machine = after_turns(training())
    machine.handle(PeerLost(""))
    action = machine.handle(ViewEntered((machine.report, Report(2)), 1))
    assert isinstance(action, Fail)
    assert machine.phase is Phase.FAILED


def test_who_is_behind() -> None:
    assert ranks_behind([Report(3), Report(3, has_sums=True), Report(-1), Report(2)]) == [2, 3]
    assert ranks_behind([Report(3, has_sums=True), Report(4), Report(2, has_sums=True)]) == [2]
    assert ranks_behind([Report(-1), Report(-1)]) == []


def test_what_cannot_be_is_refused() -> None:
    machine = training()
    machine.handle(PassBegun())
    with pytest.raises(AssertionError, match="while taking turns"):
        machine.handle(AllConfirmed())


# --- random walks ---


Program = Sequence[Sequence[bool]]
"""For each step, whether each of its passes has turns."""


@dataclass(eq=False)
class Walker:
    """A worker of the walk, and what its program has done."""

    worker: Worker
    machine: PhaseMachine
    action: phases.Action = field(default_factory=EnterView)
    members: tuple[Worker, ...] = ()
    """The members of its view that take part."""
    view: int = -1
    known: int = 0
    """The newest membership that it is prepared for."""
    reported: int = -1
    last_pass_in: int = -1
    """The views in which it has reported a step, and done its last pass."""
    state: list[int] = field(default_factory=list)
    """The passes after which its program has run."""
    in_step: bool = False
    hosted: int = 0
    turns: int = 0
    is_pending: bool = False
    """Whether the sums of the last pass are still on their way."""
    entering: int = -1
    """The membership whose reports it waits for."""
    planned: bool = False
    awaits: bool = False
    """Whether it waits until all members of its view have the state."""
    was_put_off: bool = False
    """Whether a membership between the last two that it has entered was without it."""
    outbox: list[SettledNotice] = field(default_factory=list)


class Walk:
    """Several workers, a config server, and a network that may lose the messages of those that die."""

    def __init__(
        self,
        seed: int,
        size: int,
        program: Program,
        *,
        replicas: int = 0,
        defers: bool = False,
        make: type[PhaseMachine] = PhaseMachine,
    ) -> None:
        self.chance = random.Random(seed)
        program = [*program, [False]]  # the job ends when all have done the last step
        self.program = [has_turns for step in program for has_turns in step]
        self.boundaries = {sum(map(len, program[:number])) for number in range(len(program) + 1)}
        self.replicas, self.defers, self.make = replicas, defers, make
        self.ports = itertools.count(10000)
        self.living: list[Walker] = []
        self.dead: list[Worker] = []
        """Those whose loss the server has yet to hear of."""
        self.done: list[Walker] = []
        self.ended: list[Walker] = []
        """Those that have left a job that was told to end."""
        self.at_end: dict[int, set[Worker]] = {}
        """Who has come to the end that was agreed on, in each view."""
        self.failures: list[str] = []
        self.early: set[Worker] = set()
        """Members of the times in which the server knew of nobody with the state: they may have to be replaced."""
        self.sent: dict[tuple[int, int, str], dict[Worker, tuple[bool, int]]] = {}
        """Who has taken part in an exchange or confirmation: whether it had turns, and the newest membership prepared."""
        self.reports: dict[int, dict[Worker, tuple[Report, list[int]]]] = {}
        """The reports of those who enter a membership, and their states."""
        self.fetched: dict[int, set[Worker]] = {}
        """Who has the state, in each view."""
        self.memberships: dict[int, Membership] = {}
        self.starts: set[int] = set()
        """The memberships in which the job has begun, because nobody had the state."""
        self.server = ElasticState()
        first = [self.new_worker() for _ in range(size)]
        self.tell_server(PutView(View(0, tuple(first), (Worker("10.0.0.1", 1),))))
        for worker in first:
            self.tell_server(ReadyNotice(worker))

    def new_worker(self) -> Worker:
        worker = Worker("10.0.0.1", next(self.ports))
        self.living.append(Walker(worker, self.make(elastic=True, keeps_start=self.defers)))
        return worker

    def tell_server(
        self, request: PutView | AddWorker | ReadyNotice | SettledNotice | LossNotice | LeaveNotice | ClearView
    ) -> None:
        known = self.server.settled
        self.server = self.server.after(request)
        if not known or not self.server.settled:
            self.early.update(self.latest.members)
        self.memberships[self.server.membership.number] = self.server.membership

    @property
    def latest(self) -> Membership:
        return self.server.membership

    # --- what happens ---

    def kill(self) -> None:
        if len(self.living) > 1:
            self.end(self.chance.choice(self.living))

    def join(self) -> None:
        if not self.latest.over and len(self.living) < 7:
            worker = self.new_worker()
            self.tell_server(AddWorker(worker))
            self.tell_server(ReadyNotice(worker))

    def leave(self) -> None:
        wanted = [each for each in self.living if each.worker in self.server.wanted.workers]
        if len(wanted) > 1 and not self.latest.over:
            self.tell_server(LeaveNotice(self.chance.choice(wanted).worker))

    def clear(self) -> None:
        if not self.latest.over:
            self.tell_server(ClearView())

    def end(self, walker: Walker) -> None:
        """A worker dies, or ends with an error."""
        self.living.remove(walker)
        self.dead.append(walker.worker)

    def report_losses(self) -> None:
        """Do the runners' work."""
        worker = self.dead.pop(0)
        self.tell_server(LossNotice(worker))
        if not {each.worker for each in self.living}.intersection(self.server.wanted.workers):
            self.join()
            self.tell_server(LossNotice(worker))

    def run(self, changes: Sequence[str]) -> None:
        pending = list(changes)
        for _ in range(30_000):
            if self.dead and (not self.living or self.chance.random() < 0.2):
                self.report_losses()
            if not self.living:
                return
            if pending and self.chance.random() < 0.03:
                getattr(self, pending.pop())()
            self.advance(self.chance.choice(self.living))
        raise AssertionError(
            f"no end: {self.latest} "
            + "; ".join(f"{w.worker.port} {w.machine.phase.name} {w.action} view {w.view}" for w in self.living)
        )

    # --- a worker ---

    def handle(self, walker: Walker, event: phases.Event) -> None:
        before = walker.machine.passes
        walker.action = walker.machine.handle(event)
        after = walker.machine.passes
        if isinstance(event, StepTakenBack):
            assert after in self.boundaries, "half of a step is taken back"
            assert self.boundaries.isdisjoint(walker.state[after + 1 :]), "more than a step is taken back"
            del walker.state[after:]
            walker.is_pending = False
        elif after == before + 1 and not isinstance(event, StateFetched | StateMade):
            assert len(walker.state) == before, "the program runs a second time after the same pass"
            walker.state.append(before)
            walker.in_step = walker.in_step and after not in self.boundaries
            walker.last_pass_in = walker.view if not isinstance(event, ViewEntered) else -1
        match walker.action:
            case Fail(why, _):
                assert why == BEGUN, "an error without a cause"
                if not (self.defers or walker.was_put_off):
                    assert before < 0, "a worker that has the state is left behind"
                    assert walker.worker in self.early, "a worker is let in where it cannot begin"
                self.failures.append(why)
                self.end(walker)
            case TakeTurn(slot):
                assert slot < walker.hosted, "more turns than replicas"
                walker.turns = slot

    def advance(self, walker: Walker) -> None:
        if self.chance.random() < 0.5:
            walker.known = self.latest.number
        if walker.outbox and self.chance.random() < 0.3:
            self.tell_server(walker.outbox.pop(0))
        if walker.is_pending and not self.resolve(walker, must=isinstance(walker.action, Exchange | EnterView)):
            return
        match walker.action:
            case RunProgram() if walker.awaits:
                if self.fetched[walker.view].issuperset(walker.members):
                    walker.awaits = False
                elif self.chance.random() < 0.3 and self.is_broken(walker):
                    walker.awaits = walker.in_step = False  # it asks for its step once more
                    self.handle(walker, PeerLost(""))
            case RunProgram():
                self.run_program(walker)
            case TakeTurn():
                lost = self.chance.random() < 0.1 and self.is_broken(walker)
                self.handle(walker, PeerLost("") if lost else TurnTaken())
            case Exchange() | Confirm():
                self.communicate(walker, type(walker.action).__name__)
            case EnterView(planned):
                self.enter(walker, planned)

    def run_program(self, walker: Walker) -> None:
        machine, passes = walker.machine, walker.machine.passes
        if machine.phase is Phase.TAKEN_BACK:
            walker.in_step = False
            odd: phases.Event = PassBegun() if self.chance.random() < 0.5 else TurnTaken()
            self.handle(walker, odd if self.chance.random() < 0.3 else StepAsked())
        elif machine.phase is Phase.TURNS:
            self.handle(walker, TurnTaken())  # a loss was noticed in this turn
        elif passes >= len(self.program):
            if self.resolve(walker, must=True):
                self.handle(walker, ProgramEnded())
                self.living.remove(walker)
                self.done.append(walker)
                self.server = self.server.after(FinishNotice())
        elif passes in self.boundaries and not walker.in_step:
            if walker.reported != walker.last_pass_in == walker.view:
                walker.reported = walker.view
                walker.outbox.append(SettledNotice(walker.worker, self.replicas, walker.view))
            walker.in_step = True
            self.handle(walker, StepAsked())
        else:
            has_turns = self.program[passes]
            if has_turns or self.resolve(walker, must=True):
                self.handle(walker, PassBegun(has_turns=has_turns))

    def is_broken(self, walker: Walker) -> bool:
        """Whether a collective of its view may fail."""
        there = {each.worker for each in self.living if max(each.view, each.entering) <= walker.view}
        return self.latest.urgent > walker.view or not there.issuperset(walker.members)

    def resolve(self, walker: Walker, *, must: bool) -> bool:
        """Wait for sums that are still on their way; return False if it waits on, or they will never come."""
        if not walker.is_pending:
            return True
        if not must and self.chance.random() < 0.7:
            return True
        if self.chance.random() < 0.5 and self.is_broken(walker):
            self.handle(walker, StepTakenBack("a sum is lost"))
            return False
        walker.is_pending = False
        return True

    def communicate(self, walker: Walker, what: str) -> None:
        machine = walker.machine
        has_turns = self.program[machine.passes]
        if what == "Exchange" and has_turns:
            assert walker.turns == walker.hosted - 1, "a replica has not had its turn"
        sent = self.sent.setdefault((walker.view, machine.passes, what), {})
        sent.setdefault(walker.worker, (has_turns, walker.known))
        if sent.keys() >= set(walker.members) and self.chance.random() < 0.7:
            if what == "Confirm":
                self.handle(walker, AllConfirmed())
                return
            prepared = {number for _, number in sent.values()}
            if has_turns and len(prepared) == 1 and min(prepared) > walker.view:
                machine.handle(ChangeAgreed(min(prepared)))
            is_deferred = self.defers and has_turns and len(walker.members) > 1
            self.handle(walker, SumsArrived(for_sure=is_deferred or len(walker.members) == 1))
            walker.is_pending = is_deferred
        elif self.chance.random() < 0.3 and self.is_broken(walker):
            self.handle(walker, PeerLost(""))

    def enter(self, walker: Walker, planned: int | None) -> None:
        latest = self.latest
        if latest.over:
            self.end_job(walker, planned)
            return
        if walker.entering < 0:
            is_planned = planned is not None and planned == latest.number  # else another has come meanwhile
            if not is_planned and latest.number <= max(walker.view, planned or 0):
                return
            members = latest.members[: self.replicas or None]
            if walker.worker not in members:
                self.stand_by(walker, latest)
                return
            walker.entering, walker.planned = latest.number, is_planned
            own = (walker.machine.report, list(walker.state))
            self.reports.setdefault(latest.number, {})[walker.worker] = own
        if latest.number != walker.entering and not walker.planned:
            walker.view, walker.entering = walker.entering, -1
            return
        entered = self.memberships[walker.entering]
        members = entered.members[: self.replicas or None]
        reports = self.reports[walker.entering]
        if not walker.planned and not reports.keys() >= set(members):
            return
        self.use_view(walker, members, [reports[worker] for worker in members] if not walker.planned else [])

    def stand_by(self, walker: Walker, latest: Membership) -> None:
        if walker.worker in latest.members:
            return
        is_wanted = walker.worker in self.server.wanted.workers
        if walker.machine.passes >= 0 and is_wanted and latest.urgent > walker.view:
            self.failures.append("put off with the state")
            self.end(walker)
        elif walker.machine.passes >= 0 or not is_wanted:
            self.leave_job(walker)

    def end_job(self, walker: Walker, planned: int | None) -> None:
        """Leave a job that is over: where all have agreed on it, when all are there."""
        if self.server.wanted.cleared and walker.machine.passes >= 0:
            if planned == self.latest.number:
                there = self.at_end.setdefault(walker.view, set())
                there.add(walker.worker)
                if not there.issuperset(walker.members) and not (self.chance.random() < 0.3 and self.is_broken(walker)):
                    return
            if not walker.machine.report.in_step:  # else no checkpoint is written
                assert walker.machine.passes in self.boundaries, "a checkpoint of the middle of a step"
                assert walker.state == list(range(walker.machine.passes)), "a checkpoint of another moment"
                self.ended.append(walker)
        self.leave_job(walker)

    def leave_job(self, walker: Walker) -> None:
        self.living.remove(walker)
        is_put_off = self.latest.urgent > walker.view
        # A worker that is told to leave, and is the last one with the state, may finish while others have begun anew.
        is_beaten = len(self.starts) > 1 and bool(self.done)
        if walker.machine.passes >= 0 and walker.worker in self.server.wanted.workers and not (is_put_off or is_beaten):
            assert walker.machine.passes >= len(self.program) - 1, "the job has ended without it"

    def use_view(self, walker: Walker, members: tuple[Worker, ...], found: Sequence[tuple[Report, list[int]]]) -> None:
        rank = members.index(walker.worker)
        reports = [report for report, _ in found] or [walker.machine.report]
        between = (self.memberships.get(number) for number in range(walker.view + 1, walker.entering))
        walker.was_put_off = walker.view >= 0 and any(
            walker.worker not in each.members[: self.replicas or None] for each in between if each
        )
        walker.view, walker.members, walker.entering = walker.entering, members, -1
        if max(report.passes for report in reports) < 0:
            reports[0] = Report(0)
            self.starts.add(walker.view)
            if rank == 0:
                walker.state = []
                self.handle(walker, StateMade(0))
        walker.hosted = self.chance.randint(1, 3)
        self.handle(walker, ViewEntered(tuple(reports), walker.hosted))
        if isinstance(walker.action, FetchState):
            holder = members[walker.action.holders[0]]
            if all(each.worker != holder for each in self.living) and self.chance.random() < 0.5:
                self.handle(walker, PeerLost(""))
                return
            passes = reports[walker.action.holders[0]].passes
            assert passes in self.boundaries, "a worker begins in the middle of a step"
            walker.state = list(found[walker.action.holders[0]][1])
            assert walker.state == list(range(passes)), "the state of another moment"
            walker.in_step = False
            self.handle(walker, StateFetched(passes))
        if walker in self.living:
            self.fetched.setdefault(walker.view, set()).add(walker.worker)
            walker.awaits = bool(ranks_behind(reports)) and isinstance(walker.action, RunProgram)
            if not walker.planned:
                walker.outbox.append(SettledNotice(walker.worker, self.replicas))


PASSES = st.lists(st.booleans(), min_size=1, max_size=3)
PROGRAMS = st.lists(PASSES, min_size=3, max_size=5)
DEFERRING = st.lists(st.sampled_from([[True], [True], [False, True], [True, False]]), min_size=3, max_size=6)
CHANGES = st.lists(st.sampled_from(["kill", "kill", "join", "join", "leave"]), max_size=10)
SEEDS, SIZES = st.integers(0, 2**32), st.integers(1, 5)


def walk(seed: int, size: int, program: Program, changes: Sequence[str], **options: object) -> Walk:
    made = Walk(seed, size, program, **options)  # type: ignore[arg-type]
    made.run(changes)
    for walker in made.done:
        assert walker.state == list(range(len(made.program)))
    assert made.done or made.failures or "clear" in changes, "nobody has come to the end"
    return made


@settings(max_examples=300, deadline=None)
@given(seed=SEEDS, size=SIZES, program=PROGRAMS, changes=CHANGES, replicas=st.sampled_from([0, 0, 2, 3]))
def test_whoever_is_lost_joins_or_leaves_every_program_runs_once_after_every_pass(
    seed: int, size: int, program: Program, changes: list[str], replicas: int
) -> None:
    walk(seed, size, program, changes, replicas=replicas)


@settings(max_examples=300, deadline=None)
@given(seed=SEEDS, size=SIZES, program=DEFERRING, changes=CHANGES, replicas=st.sampled_from([0, 0, 2, 3]))
def test_steps_that_are_taken_back_are_done_again_by_all_or_fetched(
    seed: int, size: int, program: Program, changes: list[str], replicas: int
) -> None:
    walk(seed, size, program, changes, replicas=replicas, defers=True)


@settings(max_examples=200, deadline=None)
@given(seed=SEEDS, size=SIZES, program=PROGRAMS, defers=st.booleans(), changes=CHANGES)
def test_a_job_that_is_told_to_end_ends_between_steps(
    seed: int, size: int, program: Program, defers: bool, changes: list[str]
) -> None:
    """Without other changes all workers end at the same step, with a state of which a checkpoint can be written."""
    program = [[True]] * 3 if defers else program
    walk(seed, size, program, ["clear", *changes], defers=defers)
    made = walk(seed, size, program, ["clear"], defers=defers)
    if not made.done and any(walker.machine.passes > 0 for walker in made.ended):
        assert len(made.ended) == size
        assert len({walker.machine.passes for walker in made.ended}) == 1


# --- negative controls: the walks notice what is missing ---


class WithoutConfirmation(PhaseMachine):
    """Goes on as soon as its own sums are here."""

    def _arrived(self, complaint: str, for_sure: bool) -> phases.Action:
        return super()._arrived(complaint, True)


class WithoutBoundaries(PhaseMachine):
    """Lets others fetch its state in the middle of a step."""

    @property
    def report(self) -> Report:
        return Report(self.passes, self.has_sums)


def is_caught(program: Program, changes: Sequence[str], **options: object) -> bool:
    for seed in range(SEEDS_TRIED):
        try:
            walk(seed, 4, program, changes, **options)
        except AssertionError:
            return True
    return False


SEEDS_TRIED = 200
STORM = ["kill", "join", "leave", "kill", "join"]


def test_the_walks_notice_a_machine_without_the_confirmation() -> None:
    program = [[True, True], [True], [True, False]]
    assert is_caught(program, STORM, make=WithoutConfirmation)
    assert not is_caught(program, STORM)


def test_the_walks_notice_workers_that_begin_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    program = [[True, False]] * 4
    assert is_caught(program, STORM, make=WithoutBoundaries, defers=True)
    assert not is_caught(program, STORM, defers=True)
    monkeypatch.setattr(ElasticState, "_without_newcomers", lambda self, proposed, urgent: proposed)
    assert is_caught([[True, True]] * 4, STORM)


def test_the_walks_notice_a_job_that_ends_in_the_middle_of_a_step() -> None:
    program = [[True, False, True]] * 3
    assert is_caught(program, ["clear", "kill"], make=WithoutBoundaries)
    assert not is_caught(program, ["clear", "kill"])
