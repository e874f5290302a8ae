"""A config server that has lost its state, or keeps another job's: it is told of the job by those who know it, or not obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import until
from serving import A0, A1, A2, ONE, RUN_A, TWO, serving

from pliant.cluster import ClusterSnapshot, Membership, View, Worker
from pliant.elastic.client import ConfigFollower, ConfigSender
from pliant.elastic.membership import (
    SKIPPED_NUMBERS,
    AddWorker,
    ElasticState,
    LeaveNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    ResizeView,
    RestoreNotice,
    SettledNotice,
    ViewRequest,
    WorkerNotice,
)
from pliant.errors import OtherJob, PliantError

THREE = View(0, (A0, A1, A2), (RUN_A,))


def after(*requests: ViewRequest | WorkerNotice, of: ElasticState | None = None) -> ElasticState:
    state = of or ElasticState(id="job")
    for request in requests:
        state = state.after(request)
    return state


def settled(worker: Worker) -> tuple[WorkerNotice, ...]:
    """What a worker reports again after a restore."""
    return SettledNotice(worker, 4, 1), ReadyNotice(worker)


TRAINING = (PutView(TWO), ReadyNotice(A0), ReadyNotice(A1), SettledNotice(A0, 4, 1), SettledNotice(A1, 4, 1))
JOINING = (*TRAINING, AddWorker(A2), ReadyNotice(A2))


def test_an_empty_server_takes_up_the_job_and_leaves_out_numbers() -> None:
    known = after(*TRAINING).snapshot
    restored = ElasticState(id="new").after(RestoreNotice(known))
    assert (restored.snapshot, restored.ready) == (replace(known, restored=1), {A0, A1})
    assert restored.after(RestoreNotice(known)) is restored, "who comes second changes nothing"
    lost = after(LossNotice(A1), *settled(A0), of=restored)
    assert lost.membership == Membership(2 + SKIPPED_NUMBERS, (A0,), urgent=2 + SKIPPED_NUMBERS, wanted=18, begun=True)
    assert (lost.wanted.version, lost.wanted.workers) == (2 + SKIPPED_NUMBERS, (A0,))


def test_nobody_comes_or_goes_before_it_is_known_again_who_has_the_state() -> None:
    before = after(*JOINING)
    restored = ElasticState(id="new").after(RestoreNotice(before.snapshot))
    waiting = after(LossNotice(A1, "gone"), ResizeView(1), *settled(A0), of=restored)
    assert waiting.membership == before.membership, "A2 has not been heard"
    lost = waiting.after(ReadyNotice(A2))
    assert lost.membership.members == (A0,), "A2 has yet to fetch the state"
    assert lost.membership.urgent == lost.membership.number
    assert after(LossNotice(A2), of=waiting).membership.members == (A0,), "who is lost is not waited for"
    again = after(*settled(A0), *settled(A1), ReadyNotice(A2), of=restored)
    for name in ("ready", "settled", "replicas", "newcomers", "stepped", "membership", "wanted"):
        assert getattr(again, name) == getattr(before, name), name


def test_only_an_empty_server_takes_up_another_job() -> None:
    known = after(*TRAINING).snapshot
    other = after(PutView(ONE), of=ElasticState(id="other"))
    with pytest.raises(OtherJob, match="keeps the state of another job .*give each job a server of its own"):
        other.after(RestoreNotice(known))
    begun_with_a_view = replace(after(PutView(ONE), of=ElasticState(id="other")), first=1)
    assert begun_with_a_view.after(RestoreNotice(known)).membership == known.membership, "nobody has asked it yet"
    with pytest.raises(OtherJob):
        begun_with_a_view.after(ReadyNotice(A0)).after(RestoreNotice(known))


def test_of_a_job_that_is_over_or_has_not_begun_nothing_has_to_be_kept() -> None:
    fresh = ElasticState(id="new").snapshot
    assert fresh.has_kept(ClusterSnapshot())
    assert not fresh.has_kept(after(*TRAINING).snapshot)
    assert fresh.has_kept(after(*TRAINING, ResizeView(0)).snapshot)


def test_the_newest_of_what_several_know_counts() -> None:
    """One of them has seen a loss, another one a wish that came after a restore without it."""
    early, late = after(*TRAINING), after(*TRAINING, LossNotice(A1))
    restored = ElasticState(id="new").after(RestoreNotice(early.snapshot))
    wished = restored.after(AddWorker(A2))
    both = wished.after(RestoreNotice(late.snapshot))
    assert (both.wanted, both.membership) == (wished.wanted, late.membership)
    assert both.snapshot.has_kept(late.snapshot)
    assert both.snapshot.has_kept(wished.snapshot)
    lost = after(LossNotice(A0), *settled(A1), of=restored)
    assert lost.after(RestoreNotice(late.snapshot)) is lost, "it has gone further"
    assert lost.snapshot.has_kept(late.snapshot)


# --- whatever happens ---


@dataclass
class World:
    """A server that forgets, and those who follow it."""

    server: ElasticState = field(default_factory=lambda: ElasticState(id="0"))
    known: list[ClusterSnapshot] = field(default_factory=lambda: [ClusterSnapshot()] * 3)
    written: list[ElasticState] = field(default_factory=list)
    members: dict[int, tuple[Worker, ...]] = field(default_factory=dict)
    views: dict[int, tuple[Worker, ...]] = field(default_factory=dict)

    def poll(self, who: int) -> None:
        known, latest = self.known[who], self.server.snapshot
        if not latest.has_kept(known):
            self.server = self.server.after(RestoreNotice(known))
            latest = self.server.snapshot
        assert latest.has_kept(known), "what somebody knows does not go back"
        assert self.members.setdefault(latest.membership.number, latest.membership.members) == latest.membership.members
        assert self.views.setdefault(latest.wanted.version, latest.wanted.workers) == latest.wanted.workers
        self.known[who] = latest

    def poll_all(self, first: int) -> None:
        for turn in range(len(self.known)):
            self.poll((first + turn) % len(self.known))


WORKERS = st.sampled_from(THREE.workers)
REQUESTS = (
    st.builds(ReadyNotice, WORKERS)
    | st.builds(ReadyNotice, WORKERS)
    | st.builds(LossNotice, WORKERS)
    | st.builds(LeaveNotice, WORKERS)
    | st.builds(SettledNotice, WORKERS, st.just(2), st.integers(0, 40))
    | st.builds(AddWorker, WORKERS)
    | st.builds(ResizeView, st.integers(1, 3))
)
FOLLOWERS = st.integers(0, 2)
BETWEEN = st.lists(REQUESTS | st.tuples(st.just("poll"), FOLLOWERS), max_size=12)
LOSSES = st.lists(st.tuples(BETWEEN, st.sampled_from(["forgets", "goes back"]), FOLLOWERS, BETWEEN), max_size=4)


@settings(max_examples=300, deadline=None)
@given(LOSSES)
def test_however_often_a_server_forgets_no_number_means_two_things(
    rounds: list[tuple[list[object], str, int, list[object]]],
) -> None:
    world = World()
    world.server = after(PutView(THREE), *map(ReadyNotice, THREE.workers), of=world.server)
    for number, (before, how, first, then) in enumerate(rounds, 1):
        world.poll_all(0)  # all reach the server between two losses of its state
        saved = world.server
        happen(world, before)
        if world.server.membership.over:
            return  # of that nothing has to be kept
        world.server = ElasticState(id=str(number)) if how == "forgets" else saved.recovered()
        world.poll(first)
        happen(world, then)
        world.poll_all(first)
        world.poll_all(first)
        if world.server.membership.over:
            return
        assert world.server.id == "0"
        assert {each.tag for each in world.known} == {world.server.snapshot.tag}


def happen(world: World, things: list[object]) -> None:
    for thing in things:
        match thing:
            case ("poll", int(who)):
                world.poll(who)
            case _:
                with_refusals(world, thing)  # type: ignore[arg-type]


def with_refusals(world: World, request: ViewRequest | WorkerNotice) -> None:
    try:
        world.server = world.server.after(request)
    except PliantError:
        return


# --- real servers ---


@contextmanager
def following(url: str, known: ClusterSnapshot) -> Iterator[tuple[list[ClusterSnapshot], ConfigSender]]:
    """What a follower has handed over, and a sender of the same job."""
    seen: list[ClusterSnapshot] = []
    follower = ConfigFollower(url, "", seen.append)
    follower.start(known)
    with closing(ConfigSender(url, "")) as sender:
        sender.job = known.id
        try:
            yield seen, sender
        finally:
            follower.stop()


def test_a_server_that_comes_back_empty_is_told_of_the_job() -> None:
    with ExitStack() as stack:
        with serving() as (server, client):
            client.put(TWO)
            client.ready(A0)
            client.ready(A1)
            known = client.snapshot()
            seen, sender = stack.enter_context(following(server.url, known))
        lost = sender.submit(lambda to: to.lost(A1, "gone"))  # while the server is away
        with serving(port=server.port) as (_, client):
            assert lost.result(20).members == (A0, A1)
            membership = client.ready(A0)  # as a worker reports again
            assert (membership.members, membership.urgent) == ((A0,), membership.number)
            until(lambda: seen and seen[-1].membership == membership)
            assert (client.snapshot().id, seen[0].restored) == (known.id, 1)


def test_a_server_of_another_job_is_not_obeyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = str(tmp_path / "other")
    with serving(state=state) as (_, client):
        other = client.put(ONE)
    with ExitStack() as stack:
        with serving(state=str(tmp_path / "ours")) as (server, client):
            client.put(TWO)
            known = client.snapshot()
            seen, sender = stack.enter_context(following(server.url, known))
        with serving(port=server.port, state=state) as (_, client):
            resized = sender.submit(lambda to: to.resize(1))
            until(lambda: "keeps the state of another job" in caplog.text and "is for; trying again" in caplog.text)
            client.resize(2)
            assert (client.get(), seen) == (replace(other, number=2, workers=client.get().workers), [])
            assert not resized.done()
        with serving(port=server.port, state=str(tmp_path / "ours")) as (_, client):
            assert resized.result(20).workers == (A0,)
            until(lambda: seen and seen[-1].wanted.workers == (A0,))
    assert caplog.text.count("keeps the state of another job") == 1, "said once"
