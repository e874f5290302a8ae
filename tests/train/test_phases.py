"""The phases of a worker: single transitions, and random walks of several workers that are lost and join at any moment."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.train import phases
from pliant.train.phases import (
    AllConfirmed,
    Confirm,
    EnterView,
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
    StepAsked,
    SumsArrived,
    TakeTurn,
    TurnTaken,
    ViewEntered,
)


def training(*, elastic: bool = True, hosted: int = 2) -> PhaseMachine:
    machine = PhaseMachine(elastic=elastic)
    assert machine.handle(ViewEntered((Report(-1),), hosted)) == FetchState((0,))
    assert machine.handle(StateFetched(0)) == RunProgram()
    return machine


def after_turns(machine: PhaseMachine, hosted: int = 2) -> PhaseMachine:
    assert machine.handle(PassBegun()) == TakeTurn(0)
    for slot in range(1, hosted):
        assert machine.handle(TurnTaken()) == TakeTurn(slot)
    assert machine.handle(TurnTaken()) == Exchange()
    return machine


def test_a_pass_is_turns_sums_and_a_confirmation() -> None:
    machine = after_turns(training())
    assert machine.handle(SumsArrived()) == Confirm()
    assert machine.report == Report(0, has_sums=True)
    assert machine.handle(AllConfirmed()) == RunProgram()
    assert (machine.phase, machine.passes) == (Phase.PROGRAM, 1)


def test_without_changes_of_workers_nothing_is_confirmed_and_a_loss_is_an_error() -> None:
    machine = after_turns(training(elastic=False))
    assert machine.handle(SumsArrived()) == RunProgram()
    after_turns(machine)
    assert machine.handle(PeerLost("peer 1 is gone")) == Fail("peer 1 is gone")


def test_a_complaint_ends_every_worker() -> None:
    machine = after_turns(training())
    assert machine.handle(SumsArrived("replica 1 had no backward in step 3")) == Fail(
        "replica 1 had no backward in step 3"
    )


@pytest.mark.parametrize(
    ("own", "others", "counts"),
    [
        (False, [Report(0)], False),
        (True, [Report(0)], False),
        (True, [Report(0, has_sums=True)], True),
        (True, [Report(1)], True),
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
    assert machine.phase is Phase.TORN
    assert machine.handle(TurnTaken()) == EnterView()


# --- random walks ---


@dataclass
class Walker:
    """A worker of the walk: its machine, and how often its program has run between passes."""

    name: int
    machine: PhaseMachine = field(default_factory=lambda: PhaseMachine(elastic=True))
    view: int = 0
    action: phases.Action | None = None
    outer: list[int] = field(default_factory=list)
    """The passes after which the program has run, in order."""
    first: int = -1
    """The pass with which this worker began."""


class Walk:
    """Several workers, and a network that may lose messages of those that die."""

    def __init__(self, seed: int, size: int) -> None:
        self.chance = random.Random(seed)
        self.views: dict[int, list[Walker]] = {}
        self.number = 0
        self.names = 0
        self.sent: dict[tuple[int, int, str], set[int]] = {}
        """Who has sent for the exchange or confirmation of a pass in a view."""
        self.living = [self.new_worker() for _ in range(size)]
        self.change_view()

    def new_worker(self) -> Walker:
        self.names += 1
        walker = Walker(self.names)
        walker.action = EnterView()
        return walker

    def change_view(self) -> None:
        self.number += 1
        self.views[self.number] = list(self.living)

    def kill(self) -> None:
        if len(self.living) > 1:
            self.living.remove(self.chance.choice(self.living))
            self.change_view()

    def join(self) -> None:
        self.living.append(self.new_worker())
        self.change_view()

    def run(self, changes: list[str], passes: int) -> None:
        pending = list(changes)
        for _ in range(20_000):
            if all(walker.machine.passes >= passes for walker in self.living):
                return
            if pending and self.chance.random() < 0.02:
                getattr(self, pending.pop())()
            self.advance(self.chance.choice(self.living))
        raise AssertionError("no end: " + "; ".join(f"{w.name} {w.machine.phase} {w.action}" for w in self.living))

    def tell(self, walker: Walker, event: phases.Event) -> None:
        before = walker.machine.passes
        walker.action = walker.machine.handle(event)
        if walker.machine.passes == before + 1 and before >= 0 and isinstance(walker.action, RunProgram):
            walker.outer.append(before)

    def advance(self, walker: Walker) -> None:
        machine, members = walker.machine, self.views.get(walker.view, [])
        is_old = walker.view != self.number
        match walker.action:
            case RunProgram() if machine.phase is Phase.TORN:
                self.tell(walker, TurnTaken())
            case RunProgram():
                self.tell(walker, PassBegun() if self.chance.random() < 0.7 else StepAsked())
            case TakeTurn():
                if is_old and self.chance.random() < 0.2:
                    self.tell(walker, PeerLost(""))
                else:
                    self.tell(walker, TurnTaken())
            case Exchange() | Confirm():
                what = type(walker.action).__name__
                sent = self.sent.setdefault((walker.view, machine.passes, what), set())
                sent.add(walker.name)
                if sent >= {each.name for each in members} and self.chance.random() < 0.5:
                    self.tell(walker, SumsArrived() if what == "Exchange" else AllConfirmed())
                elif is_old and self.chance.random() < 0.3:
                    self.tell(walker, PeerLost(""))
            case EnterView():
                entering = self.views[self.number]
                ready = [each for each in entering if isinstance(each.action, EnterView)]
                if len(ready) == len(entering):
                    reports = tuple(each.machine.report for each in entering)
                    for each in entering:
                        each.view = self.number
                        self.tell(each, ViewEntered(reports, 1 + self.chance.randrange(3)))
            case FetchState(holders):
                source = members[holders[0]]
                passes = source.machine.passes if source is not walker else 0
                walker.first = max(0, passes)
                self.tell(walker, StateFetched(max(0, passes)))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    changes=st.lists(st.sampled_from(["kill", "kill", "join"]), max_size=8),
)
def test_whoever_is_lost_or_joins_every_program_runs_once_after_every_pass(
    seed: int, size: int, changes: list[str]
) -> None:
    walk = Walk(seed, size)
    walk.run(changes, passes=6)
    for walker in walk.living:
        expected = list(range(walker.first, walker.machine.passes))
        assert walker.outer == expected, f"worker {walker.name} began with {walker.first}"
