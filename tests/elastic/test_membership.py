"""The wanted view as values: what a request leads to, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.cluster import Host, PortRange, View, Wanted, Worker
from pliant.elastic.membership import (
    MAX_WORKERS,
    AddWorker,
    ClearView,
    Limits,
    PutView,
    RemoveWorker,
    ResetView,
    ResizeView,
    ViewRequest,
    next_wanted,
    resized,
)
from pliant.errors import CapacityError, ClusterCleared, ConfigError, InvalidView, NoView, PliantError, StaleView

A0, A1, A2 = (Worker("10.0.0.1", port) for port in (10000, 10001, 10002))
B0, B1 = (Worker("10.0.0.2", port) for port in (10000, 10001))
RUN_A, RUN_B = Worker("10.0.0.1", 38080), Worker("10.0.0.2", 38080)
TWO = View(0, (A0, B0), (RUN_A, RUN_B))


def after(*requests: ViewRequest) -> Wanted:
    """The state after `requests`, from the very beginning."""
    wanted = Wanted()
    for request in requests:
        wanted = next_wanted(wanted, request)
    return wanted


def test_the_version_counts_changes_and_survives_a_reset() -> None:
    assert after(PutView(TWO)) == Wanted(1, View(1, (A0, B0), (RUN_A, RUN_B)))
    assert after(PutView(TWO), PutView(TWO), ResetView()) == Wanted(3, None)
    assert after(PutView(TWO), PutView(TWO), ResetView(), PutView(TWO)).version == 4


@pytest.mark.parametrize(
    ("before", "request_"),
    [((), ResetView()), ((PutView(TWO), ClearView()), ClearView()), ((PutView(TWO),), ResizeView(2))],
    ids=["reset", "clear", "resize"],
)
def test_what_is_so_already_is_no_change(before: tuple[ViewRequest, ...], request_: ViewRequest) -> None:
    wanted = after(*before)
    assert next_wanted(wanted, request_) is wanted


@pytest.mark.parametrize(
    "request_",
    [PutView(TWO, 7), ResetView(7), ClearView(7), AddWorker(A1, 7), RemoveWorker(A0, 7), ResizeView(3, 7)],
    ids=lambda request_: type(request_).__name__,
)
def test_every_request_can_be_compare_and_set(request_: ViewRequest) -> None:
    with pytest.raises(StaleView, match="version 7 was expected, but the server is at 1"):
        after(PutView(TWO), request_)


def test_a_view_made_from_an_older_one_is_stale() -> None:
    wanted = after(PutView(TWO), PutView(TWO))
    stale = View(1, (A0,), (RUN_A,))
    with pytest.raises(StaleView):
        next_wanted(wanted, PutView(stale))
    assert next_wanted(wanted, PutView(stale, expected=2)).version == 3
    assert next_wanted(wanted, PutView(View(2, (A0,), (RUN_A,)))).version == 3


@pytest.mark.parametrize("stop", [ClearView(), PutView(View(0, (), (RUN_A,))), ResizeView(0)], ids=str)
@pytest.mark.parametrize(
    "request_",
    [PutView(TWO), AddWorker(A1), RemoveWorker(A0), ResizeView(2)],
    ids=lambda request_: type(request_).__name__,
)
def test_a_cleared_cluster_stays_closed_until_a_reset(stop: ViewRequest, request_: ViewRequest) -> None:
    wanted = after(PutView(TWO), stop)
    assert wanted.cleared
    with pytest.raises(ClusterCleared, match="reset it"):
        next_wanted(wanted, request_)
    assert next_wanted(next_wanted(wanted, ResetView()), PutView(TWO)).version == 4


@pytest.mark.parametrize("request_", [RemoveWorker(A0), ResizeView(2)], ids=str)
def test_nothing_to_change_before_the_first_view(request_: ViewRequest) -> None:
    with pytest.raises(NoView, match="PUT one first"):
        after(request_)


def test_a_worker_brings_and_takes_its_hosts_runner() -> None:
    wanted = after(AddWorker(A0), AddWorker(B0), AddWorker(A1))
    assert wanted.view == View(3, (A0, B0, A1), (RUN_A, RUN_B))
    assert next_wanted(wanted, RemoveWorker(A0)).view == View(4, (B0, A1), (RUN_A, RUN_B))
    assert next_wanted(wanted, RemoveWorker(B0)).view == View(4, (A0, A1), (RUN_A,))
    assert after(AddWorker(A0), RemoveWorker(A0)).cleared


@pytest.mark.parametrize(
    ("request_", "reason"),
    [(AddWorker(A0), "listed twice"), (AddWorker(RUN_A), "listed twice"), (RemoveWorker(A2), "not in view 1")],
    ids=str,
)
def test_impossible_members_are_refused(request_: ViewRequest, reason: str) -> None:
    with pytest.raises(InvalidView, match=reason):
        after(PutView(TWO), request_)


def test_a_shrink_drops_the_tail() -> None:
    view = View(1, (A0, B0, A1, B1), (RUN_A, RUN_B))
    assert resized(view, 3) == (A0, B0, A1)
    assert resized(view, 0) == ()


def test_growth_goes_to_the_emptiest_host_and_its_smallest_free_port() -> None:
    view = View(0, (A0, A2, B0), (RUN_A, RUN_B))
    assert resized(view, 6) == (A0, A2, B0, B1, A1, Worker("10.0.0.2", 10002))
    assert resized(View(0, (), (RUN_A, RUN_B)), 3) == (A0, B0, A1)


def test_a_port_that_was_just_left_is_not_given_away_at_once() -> None:
    before = after(PutView(View(0, (A0, A1), (RUN_A,))))
    newcomer = next_wanted(next_wanted(before, ResizeView(1)), ResizeView(2)).view
    assert newcomer is not None
    assert newcomer.workers[1].port not in (10000, 10001)


def test_growth_keeps_to_slots_and_ports() -> None:
    view = View(0, (A0, B0), (RUN_A, Worker("10.0.0.2", 10001)))
    slots = Limits(hosts=(Host("10.0.0.1", 1), Host("10.0.0.2", 3)), ports=PortRange(10000, 10009))
    assert resized(view, 4, slots)[2:] == (Worker("10.0.0.2", 10002), Worker("10.0.0.2", 10003))
    with pytest.raises(CapacityError, match=r"size 5: the 2 hosts of the view hold 4 workers \(ports 10000-10009\)"):
        resized(view, 5, slots)
    with pytest.raises(CapacityError, match="hold 3 workers"):
        resized(view, 9, Limits(ports=PortRange(10000, 10001)))


@pytest.mark.parametrize("size", [-1, MAX_WORKERS + 1, 10**40])
def test_absurd_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        after(PutView(TWO), ResizeView(size))


def test_ten_thousand_workers_are_placed_evenly() -> None:
    runners = tuple(Worker(f"10.0.{high}.{low}", 38080) for high in range(4) for low in range(250))
    workers = resized(View(1, (), runners), MAX_WORKERS)
    assert {workers.count(worker) for worker in workers[:10]} == {1}
    assert sum(worker.host == "10.0.3.249" for worker in workers) == 10


MEMBERS = st.builds(Worker, st.sampled_from(["10.0.0.1", "10.0.0.2", "::1"]), st.integers(10000, 10003))
EXPECTED = st.none() | st.integers(0, 6)
VIEWS = st.lists(MEMBERS, max_size=4, unique=True).map(
    lambda workers: View(0, tuple(workers), tuple(Worker(host, 38080) for host in sorted({w.host for w in workers})))
)
REQUESTS = st.one_of(
    st.builds(PutView, VIEWS, EXPECTED),
    st.builds(ResetView, EXPECTED),
    st.builds(ClearView, EXPECTED),
    st.builds(AddWorker, MEMBERS, EXPECTED),
    st.builds(RemoveWorker, MEMBERS, EXPECTED),
    st.builds(ResizeView, st.integers(-1, 8), EXPECTED),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(REQUESTS, max_size=12))
def test_whatever_is_asked_the_version_never_goes_back_and_the_view_carries_it(requests: list[ViewRequest]) -> None:
    wanted = Wanted()
    for request in requests:
        try:
            then = next_wanted(wanted, request)
        except PliantError:
            continue
        assert then is wanted or then.version == wanted.version + 1
        assert then.view is None or then.view.number == then.version
        assert not (wanted.cleared and then is not wanted) or isinstance(request, ResetView)
        wanted = then


@given(VIEWS.filter(lambda view: view.size > 0), st.integers(0, 9))
def test_a_resize_keeps_the_first_ranks(view: View, size: int) -> None:
    workers = resized(view, size)
    assert len(set(workers)) == len(workers) == size
    kept = min(size, view.size)
    assert workers[:kept] == view.workers[:kept]
    assert set(workers).isdisjoint(view.runners)
