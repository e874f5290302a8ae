"""A state that many lack reaches them through each other, also when one of them, or the one that has it, dies meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path
from unittest import mock

import pytest
from golden import golden
from stage import new_workers, staged
from subject import Fault, Task, compare

from pliant.train import rendezvous
from pliant.train.rendezvous import MemberReport, ViewRendezvous, _holders

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

    def report(step: int, stays: bool = True) -> MemberReport:
        return MemberReport(step, 100, "program", {}, stays)

    def decide(reports: list[MemberReport], rank: int) -> str:
        engine = mock.Mock(rank=rank, size=len(reports))
        way = ViewRendezvous.__new__(ViewRendezvous)
        way._member, way._trainer, way.has_state = mock.Mock(), mock.Mock(averaging=None), False
        way._state = mock.Mock()
        asked.clear()
        with (
            mock.patch.object(rendezvous, "relay_state", lambda *args: asked.append(("relay", args[1]))),
            mock.patch.object(rendezvous, "fetch_state", lambda *args: asked.append(("fetch", len(args[1])))),
        ):
            way._obtain_state(engine, reports, _holders(reports))
        return asked[0][0] if asked else ""

    start = [report(0), report(-1), report(-1), report(-1)]
    assert [decide(start, rank) for rank in range(4)] == ["relay"] * 4
    most_have_it = [report(5), report(5), report(5), report(-1)]
    assert [decide(most_have_it, rank) for rank in range(4)] == ["", "", "", "fetch"]
    two_have_it = [report(4), report(5), report(-1), report(5), report(-1)]
    assert [decide(two_have_it, rank) for rank in range(5)] == ["relay", "relay", "relay", "", "relay"]
    trains_on = [report(5, stays=False), report(-1), report(-1), report(-1)]
    assert [decide(trains_on, rank) for rank in range(4)] == ["", "fetch", "fetch", "fetch"]
