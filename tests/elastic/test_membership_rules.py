"""The membership as values: who trains after each wish and each event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.cluster import BY_PROGRAM, Membership, View, Wanted, Worker
from pliant.elastic.membership import (
    AddWorker,
    ClearView,
    ElasticState,
    FinishNotice,
    LeaveNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    RemoveWorker,
    ResetView,
    ResizeView,
    SettledNotice,
    ViewRequest,
    WorkerNotice,
)
from pliant.errors import CapacityError, ClusterCleared, ConfigError, NotWanted, PliantError, StaleView

A0, A1, A2, A3 = (Worker("10.0.0.1", port) for port in (10000, 10001, 10002, 10003))
B0 = Worker("10.0.0.2", 10000)
RUN_A, RUN_B = Worker("10.0.0.1", 38080), Worker("10.0.0.2", 38080)


def put(*workers: Worker) -> PutView:
    return PutView(View(0, workers, (RUN_A, RUN_B)))


def after(*requests: ViewRequest | WorkerNotice) -> ElasticState:
    """The state after `requests`, from the very beginning."""
    state = ElasticState()
    for request in requests:
        state = state.after(request)
    return state


TWO = (put(A0, A1), ReadyNotice(A0), ReadyNotice(A1))
SETTLED = (*TWO, SettledNotice(A0, 4, 1), SettledNotice(A1, 4, 1))


def test_the_first_membership_waits_for_all() -> None:
    assert after(put(A0, A1)).membership == after(put(A0, A1), ReadyNotice(A1)).membership == Membership()
    assert after(put(A0, A1), ReadyNotice(A1), ReadyNotice(A0)).membership == Membership(1, (A0, A1), wanted=1)


def test_a_newcomer_joins_when_it_is_ready() -> None:
    state = after(*TWO, AddWorker(A2))
    assert state.membership == Membership(1, (A0, A1), wanted=1)
    assert state.membership.missing(state.wanted.view) == (A2,)
    assert state.after(ReadyNotice(A2)).membership == Membership(2, (A0, A1, A2), wanted=2)


def test_a_shrink_takes_effect_at_once_and_is_not_urgent() -> None:
    assert after(*TWO, ResizeView(1)).membership == Membership(2, (A0,), wanted=2)


def test_a_resize_beyond_the_replicas_is_refused_once_they_are_known() -> None:
    known = after(*TWO, SettledNotice(A0, replicas=3))
    assert known.after(ResizeView(3)).wanted.view.size == 3
    with pytest.raises(CapacityError, match="size 4: the job has 3 replicas, .* ask for 3 or fewer"):
        known.after(ResizeView(4))
    with pytest.raises(StaleView):
        known.after(ResizeView(4, expected=7))
    assert after(*TWO, ResizeView(4)).wanted.view.size == 4, "nobody knows how many replicas there will be"
    standing_by = known.after(AddWorker(A2)).after(AddWorker(A3)).after(AddWorker(B0))
    assert standing_by.wanted.view.size == 5, "who is added one by one may stand by"
    assert standing_by.after(ResizeView(4)).wanted.view.size == 4, "a shrink is a shrink"


def test_a_full_replacement_keeps_the_old_until_all_new_are_ready() -> None:
    state = after(*TWO, put(A2, A3), ReadyNotice(A3))
    assert state.membership.members == (A0, A1)
    assert state.after(ReadyNotice(A2)).membership == Membership(2, (A2, A3), wanted=2)
    assert state.after(ReadyNotice(A2)).ready == {A2, A3}


def test_a_member_that_is_wanted_again_needs_not_be_ready_again() -> None:
    assert after(*TWO, put(A0, A2), put(A0, A1)).membership == Membership(1, (A0, A1), wanted=1)
    assert after(*TWO, ResizeView(1), ResizeView(2)).membership.members == (A0,), "A1 had left the membership"


def test_another_order_is_another_membership() -> None:
    assert after(*TWO, put(A1, A0)).membership == Membership(2, (A1, A0), wanted=2)


def test_a_loss_is_urgent_and_takes_the_wish_back() -> None:
    state = after(*TWO, LossNotice(A0, "exit code 1"))
    assert state.membership == Membership(2, (A1,), urgent=2, wanted=2)
    assert state.wanted == Wanted(2, View(2, (A1,), (RUN_A, RUN_B)))
    assert state.after(put(A1, A2)).after(ReadyNotice(A2)).membership == Membership(3, (A1, A2), urgent=2, wanted=3)


def test_a_host_keeps_its_runner_after_a_loss_but_not_after_a_leave() -> None:
    both = (put(A0, B0), ReadyNotice(A0), ReadyNotice(B0))
    lost, left = after(*both, LossNotice(B0)), after(*both, LeaveNotice(B0))
    assert lost.wanted.view == View(2, (A0,), (RUN_A, RUN_B))
    assert left.wanted.view == View(2, (A0,), (RUN_A,))
    assert (lost.membership.urgent, left.membership) == (2, Membership(2, (A0,), wanted=2))


def test_the_loss_of_a_newcomer_that_never_trained_is_not_urgent() -> None:
    state = after(*TWO, AddWorker(A2), LossNotice(A2))
    assert state.membership == Membership(1, (A0, A1), wanted=1)
    assert after(*TWO, put(A0, A2), LossNotice(A2)).membership == Membership(2, (A0,), wanted=3), (
        "A1 goes as was wished, after its step"
    )


def test_a_member_that_is_no_longer_wanted_can_still_be_lost() -> None:
    state = after(*TWO, put(A0, A2), LossNotice(A1))
    assert state.membership == Membership(2, (A0,), urgent=2, wanted=2)
    assert state.wanted.version == 2
    assert state.after(ReadyNotice(A2)).membership.members == (A0, A2)


@pytest.mark.parametrize("end", [ClearView(), ResizeView(0), put(), FinishNotice(), FinishNotice(A0)], ids=str)
def test_the_end_is_over_for_everybody_until_a_reset(end: ViewRequest | WorkerNotice) -> None:
    state = after(*TWO, end)
    assert (state.membership.number, state.membership.members, state.membership.over) == (2, (), True)
    for request in (put(A0), AddWorker(A2), ResizeView(3), RemoveWorker(A0)):
        with pytest.raises(ClusterCleared, match="reset it"):
            state.after(request)
    for event in (LossNotice(A0), LeaveNotice(A1), FinishNotice()):
        assert state.after(event) is state
    fresh = state.after(ResetView())
    assert fresh == ElasticState(Wanted(state.wanted.version + 1), Membership(2, wanted=state.wanted.version + 1))
    assert fresh.after(put(A0)).after(ReadyNotice(A0)).membership.number == 3


@pytest.mark.parametrize("end", [ClearView(), ResizeView(0), put(), FinishNotice()], ids=str)
def test_who_ends_a_job_before_its_last_step_is_named(end: ViewRequest | WorkerNotice) -> None:
    ended = after(*TWO).after(end, by="pliant stop")
    assert ended.membership.ended_by == "pliant stop"
    assert after(*TWO, end).membership.ended_by, "if nobody is named, it is no good end all the same"
    assert ended.after(ResetView()).membership.ended_by == ""
    assert after(*TWO).after(ResizeView(0), by=BY_PROGRAM).membership.ended_by == "", "that was its last step"
    finished = after(*TWO, FinishNotice(A0))
    assert finished.membership.ended_by == ""
    later = finished.after(end, by="pliant stop") if isinstance(end, ClearView | FinishNotice) else finished
    assert later.membership.ended_by == "", "its last step was done before"


def test_a_job_whose_last_worker_leaves_has_not_finished() -> None:
    one = after(*TWO, LeaveNotice(A0))
    assert one.membership.ended_by == ""
    last = one.after(LeaveNotice(A1), by="POST /leave from 127.0.0.1")
    assert last.membership.over
    assert last.membership.ended_by == f"its last worker, {A1}, has left, as after Ctrl-C or a notice of preemption"


def test_a_late_worker_of_a_finished_job_learns_that_it_is_over() -> None:
    assert after(put(A0, A1), ReadyNotice(A0), FinishNotice(A0), ReadyNotice(A1)).membership == Membership(
        0, over=True, wanted=1
    )


def test_a_reset_of_a_running_job_empties_the_membership_under_a_new_number() -> None:
    assert after(*TWO, ResetView()) == ElasticState(Wanted(2), Membership(2, wanted=2))
    assert after(*TWO, ResetView(), put(A0, A1)).membership.members == (), "the same addresses have to be ready again"


def test_nothing_to_finish_is_no_end() -> None:
    assert after(FinishNotice()) == ElasticState()


@pytest.mark.parametrize(
    "before",
    [(), (put(A0),), (*TWO, ResizeView(1)), (*TWO, LossNotice(A1)), (*TWO, ClearView()), (*TWO, put(A0, A2))],
    ids=len,
)
def test_an_unwanted_worker_is_refused(before: tuple[ViewRequest | WorkerNotice, ...]) -> None:
    with pytest.raises(NotWanted, match=r"worker 10\.0\.0\.1:10001 is not in the wanted view .* it must end"):
        after(*before, ReadyNotice(A1))


def test_who_has_the_state_stays_until_a_newcomer_has_it() -> None:
    alone = after(put(A0), ReadyNotice(A0), SettledNotice(A0, 4, 1))
    both = alone.after(put(A0, A1)).after(ReadyNotice(A1))
    assert both.membership.members == (A0, A1)
    wished = both.after(put(A1))
    assert wished.membership.members == (A0, A1), "A1 was listed, but has done no step"
    assert wished.after(SettledNotice(A1, 4)).membership.members == (A1,)


def test_a_full_replacement_keeps_two_holders_until_two_others_have_the_state() -> None:
    old = after(*SETTLED)
    moved = old.after(put(A2, A3)).after(ReadyNotice(A2)).after(ReadyNotice(A3))
    assert moved.membership.members == (A0, A1, A2, A3)
    assert moved.after(LossNotice(A0)).membership.members == (A1,), "no single crash loses the state"
    assert moved.after(SettledNotice(A2, 4)).membership.members == (A0, A1, A2, A3)
    assert moved.after(SettledNotice(A2, 4)).after(SettledNotice(A3, 4)).membership.members == (A2, A3)
    narrow = after(*TWO, SettledNotice(A0, 2, 1), SettledNotice(A1, 2, 1))
    alone = narrow.after(put(A2, A3)).after(ReadyNotice(A2)).after(ReadyNotice(A3))
    assert alone.membership.members == (A0,), "who leaves and may be lost meanwhile goes before others come"
    assert alone.after(SettledNotice(A0, 2, 2)).membership.members == (A0, A2, A3), "room for one"


def test_a_shrink_keeps_nobody() -> None:
    old = after(*TWO, SettledNotice(A0, 4), SettledNotice(A1, 4))
    assert old.after(put(A1)).membership.members == (A1,)
    assert old.after(LeaveNotice(A0)).membership.members == (A1,)


def test_who_takes_leave_stays_if_nobody_else_has_the_state() -> None:
    both = after(put(A0), ReadyNotice(A0), SettledNotice(A0, 4, 1), put(A0, A1), ReadyNotice(A1))
    assert both.after(LeaveNotice(A0)).membership.members == (A0, A1)
    assert both.after(LeaveNotice(A0)).after(SettledNotice(A1, 4)).membership.members == (A1,)


def test_a_notice_is_not_forgotten_while_new_members_enter() -> None:
    """Also if a worker is wanted that never comes."""
    noticed = after(*THREE, AddWorker(A3), LeaveNotice(A1))
    assert (noticed.membership.members, noticed.leaving) == ((A0, A1, A2), {A1})
    assert noticed.after(SettledNotice(A2, 4)).membership.members == (A0, A2)
    assert noticed.after(put(A0, A1, A2, A3)).after(SettledNotice(A2, 4)).membership.members == (A0, A1, A2)


# --- new members ---


THREE = (*SETTLED, AddWorker(A2), ReadyNotice(A2))


def test_a_loss_puts_new_members_off_until_a_step_is_done_without_them() -> None:
    joined = after(*THREE)
    assert (joined.membership.members, joined.newcomers) == ((A0, A1, A2), {A2})
    lost = joined.after(LossNotice(A1))
    assert lost.membership == Membership(3, (A0,), urgent=3, wanted=3, begun=True)
    assert A2 in lost.wanted.workers
    assert A2 in lost.ready
    for early in (SettledNotice(A0, 4), SettledNotice(A0, 4, 2), SettledNotice(A2, 4, 3)):
        assert lost.after(early).membership == lost.membership, "the step of the loss is not done yet"
    assert lost.after(SettledNotice(A0, 4, 3)).membership == Membership(4, (A0, A2), urgent=3, wanted=3, begun=True)


def test_one_that_has_the_state_stays_after_a_loss() -> None:
    state = after(*THREE, SettledNotice(A2, 4), LossNotice(A1))
    assert state.membership == Membership(3, (A0, A2), urgent=3, wanted=3, begun=True)


def test_one_that_was_there_from_the_start_is_no_newcomer_though_it_has_not_reported() -> None:
    state = after(put(A0, A1, A2), *map(ReadyNotice, (A0, A1, A2)), SettledNotice(A0, 4), LossNotice(A2))
    assert (state.membership.members, state.newcomers) == ((A0, A1), frozenset())


def test_one_that_becomes_ready_after_a_loss_waits_for_the_step_too() -> None:
    state = after(*SETTLED, AddWorker(A2), LossNotice(A1), ReadyNotice(A2))
    assert state.membership == Membership(2, (A0,), urgent=2, wanted=3, begun=True)
    assert state.after(SettledNotice(A0, 4, 2)).membership.members == (A0, A2)


def test_those_that_were_put_off_do_not_wait_for_a_replacement_that_starts() -> None:
    state = after(*THREE, LossNotice(A1), AddWorker(A3))
    back = state.after(SettledNotice(A0, 4, 3))
    assert back.membership.members == (A0, A2)
    assert back.after(ReadyNotice(A3)).after(SettledNotice(A2, 4, 4)).membership.members == (A0, A2, A3)
    gone = state.after(RemoveWorker(A2)).after(SettledNotice(A0, 4, 3))
    assert (gone.membership.members, gone.newcomers) == ((A0,), frozenset())


def test_members_that_stand_by_do_not_take_the_place_of_a_lost_one_in_the_middle_of_a_step() -> None:
    start = (put(A0, A1, A2, A3), *map(ReadyNotice, (A0, A1, A2, A3)), SettledNotice(A0, 2, 1), SettledNotice(A1, 2, 1))
    lost = after(*start, LossNotice(A0))
    assert lost.membership.members == (A1,)
    back = lost.after(SettledNotice(A1, 2, 2))
    assert back.membership.members == (A1, A2, A3)
    again = back.after(LossNotice(A1))
    assert again.membership.members == (A2, A3), "nobody else has the state: these begin anew"
    assert again.newcomers == frozenset()
    # One that has stopped to take part has an old state: it is no better than a newcomer.
    moved = after(*start, SettledNotice(A1, 2, 1), put(A0, A2, A1, A3))
    assert moved.settled == {A0}
    assert moved.after(LossNotice(A2)).membership.members == (A0,)


def test_a_second_loss_before_the_step_is_done_puts_them_off_again() -> None:
    four = (put(A0, A1, A2), *map(ReadyNotice, (A0, A1, A2)), *(SettledNotice(each, 4, 1) for each in (A0, A1, A2)))
    state = after(*four, AddWorker(A3), ReadyNotice(A3), LossNotice(A2), LossNotice(A1))
    assert state.membership == Membership(4, (A0,), urgent=4, wanted=4, begun=True)
    assert state.after(SettledNotice(A0, 4, 3)).membership == state.membership
    assert state.after(SettledNotice(A0, 4, 4)).membership.members == (A0, A3)
    assert state.after(LossNotice(A0)).membership.members == (A3,), "with nobody left it begins anew"


def test_new_members_wait_for_a_step_in_the_present_membership() -> None:
    """Else some workers could be in that step already, while others go straight on to the next membership."""
    started = after(*TWO, SettledNotice(A0, 4), AddWorker(A2), ReadyNotice(A2))
    assert started.membership.members == (A0, A1)
    assert started.after(SettledNotice(A1, 4, 1)).membership.members == (A0, A1, A2)
    joining = after(*THREE, AddWorker(A3), ReadyNotice(A3), RemoveWorker(A0))
    assert joining.membership.members == (A0, A1, A2), "A2 has yet to enter it"
    left = joining.after(SettledNotice(A2, 4))
    assert left.membership.members == (A1, A2), "who has the state may go on"
    assert joining.after(SettledNotice(A2, 4, 2)).membership.members == (A1, A2), "first those who leave, then the new"
    assert left.after(SettledNotice(A2, 4, 3)).membership.members == (A1, A2, A3)
    assert joining.after(FinishNotice()).membership.over
    shrunk = after(*SETTLED, RemoveWorker(A1), AddWorker(A2), ReadyNotice(A2))
    assert shrunk.membership == Membership(2, (A0,), wanted=2, begun=True)
    assert shrunk.after(SettledNotice(A0, 4, 1)).membership.members == (A0,)
    assert shrunk.after(SettledNotice(A0, 4, 2)).membership.members == (A0, A2)


def test_of_two_that_have_lost_each_other_the_first_to_say_so_stays() -> None:
    state = after(*TWO, LossNotice(A1, "cut off", A0), LossNotice(A0, "cut off", A1))
    assert state.membership.members == (A0,)
    assert after(*TWO, LossNotice(A1, "gone", A3)).membership.members == (A0, A1), "a stranger's word does not count"


def test_the_loss_of_all_leaves_the_job_open_for_a_replacement() -> None:
    lost = after(*TWO, LossNotice(A0), LossNotice(A1))
    assert lost.membership == Membership(3, (), urgent=3, over=False, wanted=2)
    assert lost.after(LossNotice(A1)) is not None, "a second report changes nothing that matters"
    replaced = lost.after(AddWorker(A2)).after(LossNotice(A1)).after(ReadyNotice(A2))
    assert (replaced.membership.members, replaced.membership.over) == ((A2,), False)
    assert lost.after(ClearView()).membership.over
    assert not lost.membership.begun, "no step was done, so no state is lost"
    begun = after(*SETTLED, LossNotice(A0), LossNotice(A1))
    assert begun.membership.begun
    fresh = begun.after(ResetView()).after(put(A0)).after(ReadyNotice(A0))
    assert (fresh.membership.members, fresh.membership.begun) == ((A0,), False), "the next job has lost nothing"


@pytest.mark.parametrize(
    "membership", [Membership(), Membership(7, (A0, Worker("::1", 1)), 6, False, 9), Membership(3, over=True)], ids=str
)
def test_a_membership_survives_json(membership: Membership) -> None:
    assert Membership.from_json(membership.to_json()) == membership


GOOD = Membership(1, (A0,)).to_json()
BAD = {"Number": (1.0, None, "1"), "Members": (None, "x", [1], {}), "Over": (0, None, "no"), "Urgent": ("",)}


@pytest.mark.parametrize(
    "value", [None, [], 3, {}, *({**GOOD, key: value} for key, values in BAD.items() for value in values)], ids=str
)
def test_what_is_no_membership_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        Membership.from_json(value)


MEMBERS = st.sampled_from([A0, A1, A2, A3, B0])
VIEWS = st.lists(MEMBERS, min_size=1, max_size=4, unique=True).map(lambda workers: put(*workers))
SETTLING = st.builds(SettledNotice, MEMBERS, st.sampled_from([0, 0, 2, 3]), st.integers(0, 12))
EVENTS = st.builds(ReadyNotice, MEMBERS) | st.builds(LossNotice, MEMBERS) | st.builds(LeaveNotice, MEMBERS)
WISHES = (
    VIEWS | st.builds(AddWorker, MEMBERS) | st.builds(RemoveWorker, MEMBERS) | st.builds(ResizeView, st.integers(0, 6))
)
ENDS = st.sampled_from([ClearView(), ResetView(), FinishNotice()])
# Twice, so that most of what happens is that workers become ready.
ANYTHING = st.lists(st.builds(ReadyNotice, MEMBERS) | EVENTS | WISHES | ENDS, max_size=25)


@settings(max_examples=400, deadline=None)
@given(ANYTHING)
def test_whatever_happens_the_membership_keeps_its_word(requests: list[ViewRequest | WorkerNotice]) -> None:
    state, lost = ElasticState(), set[Worker]()
    for request in requests:
        try:
            then = state.after(request)
        except PliantError:
            assert isinstance(request, ReadyNotice | PutView | AddWorker | RemoveWorker | ResizeView)
            continue
        check_step(state, request, then)
        lost = (lost | {request.worker}) if isinstance(request, LossNotice | LeaveNotice) else lost
        lost -= {request.worker} if isinstance(request, ReadyNotice) else set()
        assert lost.isdisjoint(then.membership.members), "who was lost is a member only after it was ready again"
        assert repeated(then, request) == then.membership
        state = then


def check_step(state: ElasticState, request: ViewRequest | WorkerNotice, then: ElasticState) -> None:
    before, membership, view = state.membership, then.membership, then.wanted.view
    assert membership.number == before.number + (membership.members != before.members)
    assert before.urgent <= membership.urgent <= membership.number
    was_loss = isinstance(request, LossNotice) and request.worker in before.members
    assert membership.urgent == (membership.number if was_loss else before.urgent)
    was_finished = isinstance(request, FinishNotice) and state.wanted.view is not None
    assert membership.over == (
        then.wanted.cleared or (before.over and not isinstance(request, ResetView)) or was_finished
    )
    assert not membership.ended_by or membership.over
    assert not (membership.over and membership.members)
    assert then.ready <= {*membership.members, *(view.workers if view else ())}
    if membership.members != before.members:
        gone = {request.worker} if isinstance(request, LossNotice | LeaveNotice) else set()
        remaining = tuple(member for member in before.members if member not in gone)
        all_ready = view is not None and then.ready.issuperset(view.workers)
        assert membership.members == (
            (view.workers if view and all_ready else remaining) if not membership.over and view else ()
        )
        assert membership.wanted == then.wanted.version
    if before.members and not membership.members:
        assert (
            membership.over
            or isinstance(request, ResetView)
            or (isinstance(request, LossNotice | LeaveNotice) and len(before.members) == 1)
        )
    if isinstance(request, ReadyNotice):
        assert view is not None
        assert request.worker in view.workers


def repeated(state: ElasticState, request: ViewRequest | WorkerNotice) -> Membership:
    """The membership after the same request once more; a refusal changes nothing."""
    try:
        return state.after(request).membership
    except PliantError:
        return state.membership


@settings(max_examples=400, deadline=None)
@given(st.lists(st.builds(ReadyNotice, MEMBERS) | SETTLING | EVENTS | WISHES, max_size=30))
def test_whatever_happens_no_new_member_enters_a_step_that_is_done_again(
    requests: list[ViewRequest | WorkerNotice],
) -> None:
    check_walk(ElasticState(), requests)


def check_walk(state: ElasticState, requests: list[ViewRequest | WorkerNotice]) -> None:
    for request in requests:
        before = state
        try:
            state = state.after(request)
        except PliantError:
            continue
        members = state.membership.members
        taking_part = members[: state.replicas or None]
        assert state.settled <= set(taking_part)
        assert state.newcomers <= state.ready - state.settled
        if state.membership.number > before.membership.number:
            is_held = state.membership.urgent > before.membership.urgent or state.stepped < before.membership.number
            in_step = set(before.membership.members[: state.replicas or None]) - (before.newcomers - state.settled)
            assert not is_held or not state.settled or set(taking_part) <= in_step
        if not state.settled:
            assert not state.newcomers, "with no state there is nothing to be new to"
        elif state.stepped == state.membership.number and state.ready.issuperset(state.wanted.workers):
            assert set(members) >= set(state.wanted.workers), "everybody who was put off is back"


def test_without_the_rule_the_walk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticState, "_without_newcomers", lambda self, proposed, urgent: proposed)
    with pytest.raises(AssertionError):
        check_walk(ElasticState(), [*THREE, LossNotice(A1)])
    with pytest.raises(AssertionError):
        check_walk(ElasticState(), [*SETTLED, AddWorker(A2), LossNotice(A1), ReadyNotice(A2)])


@given(st.permutations([A2, A3, B0]), st.lists(MEMBERS, max_size=8))
def test_no_wish_empties_the_membership(arriving: list[Worker], noise: list[Worker]) -> None:
    state = after(*TWO, put(*arriving))
    for worker in [*noise, *arriving]:
        complete = state.ready >= set(arriving)
        assert state.membership.members == (tuple(arriving) if complete else (A0, A1))
        if worker in arriving:
            state = state.after(ReadyNotice(worker))
    assert state.membership == Membership(2, tuple(arriving), wanted=2)
