"""A state that many lack reaches them through each other, also when one of them, or the one that has it, dies meanwhile."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from golden import golden
from stage import new_workers, staged
from subject import Fault, Task, compare

from pliant.cluster import Membership, Worker
from pliant.comm.transport import loopback_transports, view_of
from pliant.errors import MustBeReplaced, WorkerLost
from pliant.train import rendezvous, state_tree
from pliant.train.determinism import fingerprint
from pliant.train.events import Progress
from pliant.train.job_state import JobState
from pliant.train.phases import Report
from pliant.train.rendezvous import EnteredView, Left, MemberReport, ViewRendezvous, fetch_state, lend_state
from pliant.train.state_sign import StateSign
from pliant.train.wrapping import describe_names

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
TASK = Task(program="nesterov", replicas=4, epochs=3, journal="")


@pytest.mark.parametrize("rank", [2, 0])
def test_a_job_starts_though_one_dies_while_the_state_is_passed_on(rank: int, tmp_path: Path) -> None:
    """Rank 2 when it has seen who has the state, and rank 0 when it has made it: the others then wait for it in vain."""
    workers = new_workers(4, HOSTS)
    with staged(TASK, tmp_path) as stage:
        stage.replaces = True
        stage.faults[workers[rank]] = Fault("settling", -1)
        stage.want(workers)
        stage.until_over()
        compare(stage.history, golden("nesterov", 4, 3))
        codes = [actor.exit_code for actor in stage.actors]
        assert [code for code in codes if code] == [-signal.SIGKILL]


def test_many_who_lack_it_do_not_ask_one() -> None:
    """The table of who takes part: the first holder, and all who lack the state, unless somebody trains on meanwhile."""
    asked: list[tuple[str, int]] = []

    def report(passes: int, stays: bool = True, has_sums: bool = False) -> MemberReport:
        return MemberReport(passes, has_sums, False, 100, "program", {}, stays)

    def decide(reports: list[MemberReport], rank: int, hosts: tuple[str, ...] = HOSTS) -> str:
        engine = mock.Mock(rank=rank, size=len(reports), view=mock.Mock(hosts=[*hosts, *hosts]))
        way = ViewRendezvous.__new__(ViewRendezvous)
        way._member, way._state, way.has_state, way._is_torn = mock.Mock(), mock.Mock(averaging=None), False, False
        way._own = None
        asked.clear()
        with (
            mock.patch.object(rendezvous, "relay_state", lambda *args: asked.append(("relay", args[1]))),
            mock.patch.object(rendezvous, "fetch_state", lambda *args: asked.append(("fetch", len(args[1])))),
        ):
            way.share_state(EnteredView(engine, reports, announces=False, was_planned=False))
        return asked[0][0] if asked else ""

    start = [report(0), report(-1), report(-1), report(-1)]
    assert [decide(start, rank) for rank in range(4)] == ["relay"] * 4
    assert [decide(start, rank, HOSTS[:1] * 4) for rank in range(4)] == ["", "fetch", "fetch", "fetch"], "on one host"
    most_have_it = [report(5), report(5), report(5), report(-1)]
    assert [decide(most_have_it, rank) for rank in range(4)] == ["", "", "", "fetch"]
    two_have_it = [report(4), report(5), report(-1), report(5), report(-1)]
    assert [decide(two_have_it, rank) for rank in range(5)] == ["relay", "relay", "relay", "", "relay"]
    trains_on = [report(5, stays=False), report(-1), report(-1), report(-1)]
    assert [decide(trains_on, rank) for rank in range(4)] == ["", "fetch", "fetch", "fetch"]
    goes_on_itself = [report(5), report(4, has_sums=True), report(-1)]
    assert [decide(goes_on_itself, rank) for rank in range(3)] == ["", "", "fetch"]


def test_who_is_not_a_member_any_more_stands_by_leaves_or_is_replaced() -> None:
    me, other = Worker("10.0.0.1", 10000), Worker("10.0.0.1", 10001)
    way = ViewRendezvous.__new__(ViewRendezvous)

    def decide(membership: Membership, *, has_state: bool, is_wanted: bool, was_listed: bool = True) -> None:
        way._member = mock.Mock(me=me, is_wanted=is_wanted, entered=3)
        way.has_state, way._was_listed = has_state, was_listed
        way._check_dropped(membership)

    lost, resized = Membership(5, (other,), urgent=5), Membership(5, (other,), urgent=2)
    decide(lost, has_state=False, is_wanted=True)
    decide(resized, has_state=False, is_wanted=False, was_listed=False)
    decide(Membership(5, (other, me), urgent=5), has_state=True, is_wanted=True)
    with pytest.raises(MustBeReplaced, match=r"10\.0\.0\.1:10000 had just got the state .* its runner starts another"):
        decide(lost, has_state=True, is_wanted=True)
    for has_state in (True, False):
        with pytest.raises(Left):
            decide(lost, has_state=has_state, is_wanted=False)
    with pytest.raises(Left):
        decide(resized, has_state=True, is_wanted=True)


def test_a_state_is_lent_until_the_next_view_is_entered() -> None:
    """Whoever still fetches it in the old view would find nothing, and end, though the next membership will take it in."""
    me, other = Worker("10.0.0.1", 10000), Worker("10.0.0.1", 10001)
    stored: dict[str, list[torch.Tensor]] = {}
    transport = mock.Mock(lend=stored.__setitem__)
    transport.reclaim = lambda prefix: [stored.pop(name) for name in list(stored) if name.startswith(prefix)]
    member = mock.Mock(me=me, transport=transport, view_of=lambda found: mock.Mock(size=2, workers=found.members))
    way = ViewRendezvous(member, mock.Mock(), "", mock.Mock(), "D1", mock.Mock(), mock.Mock())
    way._state.read.return_value = {"tracked": {}, "model": torch.ones(2)}
    way._fingerprint.to_json.return_value = {}
    way.has_state = True
    way._engine = member.enter.return_value = mock.Mock(view=mock.Mock(workers=(me,)), rank=0)
    way._enter(Membership(1, (me, other)), True, Report(0))
    assert {name.split(":")[1] for name in stored} == {"1"}
    member.enter.side_effect = WorkerLost(str(other), 1, "it is gone")
    with pytest.raises(WorkerLost):
        way._enter(Membership(12, (me, other)), False, Report(0))
    assert "state:1:tensors" in stored, "this worker is still in view 1"
    member.enter.side_effect = None
    way._enter(Membership(13, (me, other)), True, Report(0))
    assert {name.split(":")[1] for name in stored} <= {"13"}


def test_a_report_travels() -> None:
    report = MemberReport(7, True, False, 123, "3 replicas", {"cpu": "x"}, True)
    assert MemberReport.from_bytes(report.to_bytes().ljust(8192)) == report


def test_a_report_has_room_for_any_number_of_tracked_objects() -> None:
    names = [f"ünïque {number}" for number in range(3000)]
    program, own = f"{'x' * 300}, tracks {describe_names(names)}", fingerprint().to_json()
    assert len(MemberReport(7, True, False, 123, program, own, True).to_bytes()) < rendezvous.REPORT_BYTES
    longest = describe_names(["ü" * 249, "ï" * 249])
    assert longest == f"{'ï' * 249}, {'ü' * 249}"
    assert (
        len(MemberReport(7, True, False, 123, f"{'x' * 300}{longest}", own, True).to_bytes()) < rendezvous.REPORT_BYTES
    )
    assert describe_names(names) != describe_names(names[1:])


# --- a state that arrives in its place ---


class Doubled(torch.nn.Linear):
    """A module whose state_dict is not its memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state_dict[f"{prefix}weight"] / 2)


def job_state(seed: int, *, steps: int) -> JobState:
    """Return the state of a job whose program has done some steps."""
    torch.manual_seed(seed)
    convolution = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(4), torch.nn.Flatten(), Doubled(16, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + seed))
    for _ in range(steps):
        model(torch.randn(3, 4, 4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    progress = Progress(1, 2, 3, 4, True)
    replicas = mock.Mock(contexts=[], num_loader_workers=0)
    adaptation = mock.Mock()
    adaptation.state_dict.return_value = {}
    return JobState([model], [optimizer], {}, replicas, [], adaptation, progress)


def tensors_of(state: JobState) -> list[torch.Tensor]:
    _, tensors = state_tree.flatten([state.models[0].state_dict(), state.optimizers[0].state_dict()["state"]])
    return [each.clone() for each in tensors]


@pytest.mark.parametrize("steps", [0, 1], ids=["cold", "warm"])
def test_a_state_arrives_in_the_parameters_themselves(steps: int) -> None:
    """Also in those of the optimizer, if it has done a step in the shadow. What the program does to it is noticed."""
    with loopback_transports(view_of("AA").workers) as made:
        engines = [transport.enter(view_of("AA", 3)) for transport in made]
        theirs, ours = job_state(1, steps=2), job_state(2, steps=steps)
        theirs.models[0][1].running_mean.fill_(7.0)  # type: ignore[index, union-attr]
        theirs.use_first_buffers(theirs.buffers.save())
        offered = lend_state(mock.Mock(transport=made[0]), 3, theirs.read())
        assert made[0].lending.num_copied_bytes == 0
        own = ours.own_tensors()
        assert ("models.0.0.weight", (0, 2, 3, 1)) in own, "channels_last"
        assert ("models.0.3.weight", ()) not in own, "it was made for the state_dict"
        assert (("optimizers.0.state.0.exp_avg", (0, 2, 3, 1)) in own) == bool(steps)
        places = {name: each.data_ptr() for name, each in ours.models[0].named_parameters()}
        state = cast(dict[str, Any], fetch_state(engines[1], [0], offered, own))
        assert torch.equal(ours.models[0][0].weight, theirs.models[0][0].weight), "it is there before it is loaded"
        ours.load(state, in_place=True)
        assert all(map(torch.equal, tensors_of(ours), tensors_of(theirs)))
        assert places == {name: each.data_ptr() for name, each in ours.models[0].named_parameters()}
        ours.optimizers[0].param_groups[0]["lr"] = 9.0
        assert ours.reload()
        assert ours.optimizers[0].param_groups[0]["lr"] == 0.2
        ours.load(state, in_place=True)
        ours.models[0][0].weight.data.clamp_(-0.1, 0.1)  # behind the back of autograd
        assert not ours.reload(), "there is no copy of it"


def test_an_untouched_state_is_not_loaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shadow's optimizer has left is used again, and tensors that nobody has touched are neither read nor loaded.
    Each change of them is noticed."""
    theirs, ours = job_state(1, steps=2), job_state(2, steps=1)
    snapshot = job_state(3, steps=0).optimizers[0].state_dict()
    moments = {each["exp_avg"].data_ptr() for each in ours.optimizers[0].state.values()}
    ours.keep_memory()
    ours.optimizers[0].load_state_dict(snapshot)
    assert not ours.optimizers[0].state
    with loopback_transports(view_of("AA").workers) as made:
        engines = [transport.enter(view_of("AA", 3)) for transport in made]
        offered = lend_state(mock.Mock(transport=made[0]), 3, theirs.read())
        state = cast(dict[str, Any], fetch_state(engines[1], [0], offered, ours.own_tensors()))
    ours.load(state, in_place=True)
    model, optimizer = ours.models[0], ours.optimizers[0]
    assert {each["exp_avg"].data_ptr() for each in optimizer.state.values()} == moments
    assert all(map(torch.equal, tensors_of(ours), tensors_of(theirs)))
    loads: list[object] = []
    monkeypatch.setattr(type(optimizer), "load_state_dict", lambda _, saved: loads.append(saved))
    monkeypatch.setattr("pliant.train.state_sign.checksum_of", lambda parts: loads.append(parts))
    ours.show_first_buffers()
    model[1].running_mean.fill_(3.0)  # type: ignore[index, union-attr, operator]
    assert ours.reload()
    assert not loads
    assert all(map(torch.equal, tensors_of(ours), tensors_of(theirs))), "buffers are loaded"
    monkeypatch.undo()
    first = model[0].weight  # type: ignore[index]
    assert isinstance(first, torch.nn.Parameter)
    moment = optimizer.state[first]["exp_avg"]

    def change(number: int) -> None:
        with torch.no_grad():
            first[0, 0, 0, 0] += number

    touches: list[Callable[[], object]] = [
        lambda: change(1),
        lambda: first.data.mul_(0.5),
        lambda: setattr(first, "data", first.data.clone()),
        lambda: moment.add_(1.0),
        lambda: optimizer.state[first].update(exp_avg=moment.clone()),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[first].update(more=1),
    ]
    for touch in touches:
        ours.load(state, in_place=True)
        touch()
        assert not ours.reload()
    ours.is_guarded = False
    ours.load(state, in_place=True)
    optimizer.state[first]["exp_avg"].data[0, 0, 0, 0] += 1.0
    assert not ours.reload(), "without a guard every byte counts"


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [(math.nan, float("nan"), True), (0.5, 0.5, True), (0.0, -0.0, False), (1, 1.0, False), (1, True, False)],
)
def test_numbers_of_optimizers_are_compared_by_their_bits(before: float, after: float, is_same: bool) -> None:
    """A number that is not equal to itself is no reason to fetch a state twice."""
    parameter = torch.nn.Parameter(torch.full((3,), math.nan))
    model, optimizer = torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"best": before, "seen": [before]}
    sign = StateSign([model], [optimizer])
    optimizer.state[parameter] = {"best": after, "seen": [after]}
    assert sign.is_same(StateSign([model], [optimizer])) == is_same
