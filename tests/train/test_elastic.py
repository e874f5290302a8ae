"""Workers come and go while the job trains: the bits stay those of stock DDP, and no sample is lost or repeated."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from gang import FULL
from golden import golden
from stage import ALL, Stage, new_workers, staged
from subject import Task, compare, history

from pliant.cluster import Worker
from pliant.errors import REFUSED_EXIT
from pliant.train.job_control import WorkerRequests

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

EPOCHS = 4
STEPS_PER_EPOCH = 5
CHANGES = {
    "1 -> 4 -> 2 -> 3": ["a", "abcd", "bc", "bce"],
    "another first": ["abc", "dbc", "ebc"],
    "all but one are new": ["abcd", "efcg"],
    "another order": ["abcd", "dcba", "bd", "db"],
}
MORE_CHANGES = {
    "all but one, twice": ["abc", "dec", "def", "hif"],
    "up and down": ["a", "ab", "a", "ab", "abc", "ab", "b", "ba"],
    "more workers than replicas": ["ab", "abcdef", "cdef", "abcdef"],
}


@pytest.mark.parametrize("views", [*CHANGES.values(), *(MORE_CHANGES.values() if FULL else ())], ids="-".join)
def test_views_change_and_bits_do_not(views: Sequence[str], tmp_path: Path) -> None:
    """Each change is at another place in the epoch, one of them at its end."""
    names = dict(zip("abcdefghi", new_workers(9), strict=True))
    task = Task(program="conv", replicas=4, epochs=EPOCHS, journal="")
    with staged(task, tmp_path) as stage:
        for view in views:
            stage.change([names[letter] for letter in view])
            if stage.step == 1:
                stage.advance(STEPS_PER_EPOCH - 1)  # the first change is agreed in the last step of an epoch
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage, EPOCHS)
        seen = _views_seen(stage, names)
        # In between there may be one with those who stay until the newcomers have the state.
        assert [view for view in seen if view in {each[:4] for each in views}] == [view[:4] for view in views], seen


@pytest.mark.parametrize("program", ["transformer", *(("lstm", "conv-loaders") if FULL else ())])
def test_scheduler_clipping_and_loaders_move_with_the_replicas(program: str, tmp_path: Path) -> None:
    epochs = 2 if program == "conv-loaders" else 3
    first, second, third = new_workers(3)
    with staged(Task(program=program, replicas=4, epochs=epochs, journal=""), tmp_path) as stage:
        stage.change([first])
        stage.change([second, first, third])
        stage.change([third])
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage, epochs, program)


def test_a_worker_with_a_notice_leaves_after_its_step(tmp_path: Path) -> None:
    first, second, third = new_workers(3)
    with staged(Task(program="conv", replicas=4, epochs=EPOCHS, journal=""), tmp_path) as stage:
        stage.change([first, second, third])
        stage.kill(first, signal.SIGTERM)
        stage.until(lambda: stage.client.membership().members == (second, third))
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage, EPOCHS)
        steps = [len(history([stage.actor(worker).journal]).commits) for worker in (first, second, third)]
        assert steps[0] < steps[1] == steps[2] == EPOCHS * STEPS_PER_EPOCH


def test_a_second_notice_ends_a_worker_at_once_with_the_code_of_its_signal() -> None:
    """Its runner must not take it for one that has finished."""
    left, has_state = [], True
    member = SimpleNamespace(leave=lambda: left.append("asked"))
    requests = WorkerRequests(member, {}, lambda: has_state, print)  # type: ignore[arg-type]
    requests._leave(signal.SIGTERM, None)
    assert (left, requests.exits_at_once) == (["asked"], False)
    with pytest.raises(SystemExit) as again:
        requests._leave(signal.SIGTERM, None)
    assert (left, requests.exits_at_once, again.value.code) == (["asked"], True, 143)
    has_state = False
    with pytest.raises(SystemExit) as early:
        WorkerRequests(member, {}, lambda: has_state, print)._leave(signal.SIGTERM, None)  # type: ignore[arg-type]
    assert (left, early.value.code) == (["asked"], 143)


def test_a_cleared_job_ends_well(tmp_path: Path) -> None:
    workers = new_workers(2)
    with staged(Task(program="conv", replicas=4, epochs=EPOCHS, journal=""), tmp_path) as stage:
        stage.change(workers)
        stage.client.clear()
        stage.open_gate(ALL)
        stage.until_over()
        assert [actor.exit_code for actor in stage.actors] == [0, 0]
        assert stage.step < EPOCHS * STEPS_PER_EPOCH


def test_a_worker_that_would_change_bits_is_refused(tmp_path: Path) -> None:
    """It computes with another number of threads. The others go on without it."""
    first, second, other = new_workers(3)
    with staged(Task(program="conv", replicas=4, epochs=EPOCHS, journal=""), tmp_path) as stage:
        stage.changes[other] = {"threads": 2}
        stage.replaces = True
        stage.change([first, second])
        stage.want([first, other, second])
        stage.until(lambda: stage.client.membership().members == (first, other, second))
        stage.open_gate(ALL)
        stage.until_over()
        assert [actor.exit_code for actor in stage.actors] == [0, 0, REFUSED_EXIT]
        compare(stage.history, golden("conv", 4, EPOCHS))


def _check(stage: Stage, epochs: int, name: str = "conv", replicas: int = 4) -> None:
    compare(stage.history, golden(name, replicas, epochs))
    assert {actor.exit_code for actor in stage.actors} == {0}, "a worker did not end well"


def _views_seen(stage: Stage, names: dict[str, Worker]) -> list[str]:
    """Which workers committed steps together, one after the other."""
    ranks: dict[int, dict[int, str]] = {}
    letters = {worker: letter for letter, worker in names.items()}
    for actor in stage.actors:
        for commit in history([actor.journal]).commits:
            ranks.setdefault(commit["view"], {})[commit["rank"]] = letters[actor.worker]
    return ["".join(found[rank] for rank in sorted(found)) for _, found in sorted(ranks.items())]


SLOW_TO_END = """
import time, torch, pliant
from pliant.comm.engine import Engine
from pliant.errors import ViewChanged

job = pliant.join(replicas=2)
net = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = job.loader(torch.randn(8, 2), batch_size=2)
plain, passed = Engine.barrier, []

def late(engine, name):
    plain(engine, name)
    passed.append(name)
    # As on a busy machine: the news that the job is over come before it has passed the last barrier.
    if passed[-2:] == ["finish", "confirm"] and engine.rank == 0:
        while not job._run.member.over:
            time.sleep(0.01)
        raise ViewChanged("the job is over")

Engine.barrier = late
for epoch in job.epochs(1):
    for step in loader:
        for x in step:
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained by", job.rank, job.step, flush=True)
"""


def test_a_worker_that_hears_of_the_end_before_it_has_passed_the_barrier_finishes_its_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_TO_END)
    done = forked.run([forked.PLIANT, "run", "-q", "-w", "-np", "2", "train.py"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"trained by (\d \d)", done.stdout)) == ["0 2", "1 2"]
