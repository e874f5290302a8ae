"""Many changes and deaths at random, and two changes where others expect one: nothing committed is lost."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest
from gang import FULL, left_behind
from golden import golden
from stage import ALL, Stage, new_workers, spec_of, staged, view_of
from storm import SHAPES, check
from subject import REPLACED_EXIT, Task, compare, history

from pliant.cluster import Worker
from pliant.errors import ClusterCleared

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

LONG = "conv-long"
STEPS_PER_EPOCH = 25


def test_a_member_that_never_trained_inherits_the_job(tmp_path: Path) -> None:
    """Two changes between two steps: the view in between, which no step was done in, is all that the two share."""
    first, second = new_workers(2)
    with staged(Task(program="conv", replicas=4, epochs=4, journal=""), tmp_path) as stage:
        stage.change([first])
        stage.advance(3)
        stage.want([first, second])
        stage.until(lambda: stage.client.membership().members == (first, second))
        stage.want([second])
        assert stage.client.membership().members == (first, second), "only the first one has the state"
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden("conv", 4, 4))
        assert history([stage.actor(second).journal]).commits, "the second one never trained"


@pytest.mark.skipif(not FULL, reason="minutes of random changes: PLIANT_FULL=1")
@pytest.mark.timeout(1500)
def test_a_storm_of_changes_and_kills(tmp_path: Path) -> None:
    """Random views and random deaths."""
    epochs, changes, kills = 40, 200, 50
    task = Task(program=LONG, replicas=4, epochs=epochs, journal="")
    chance = random.Random(5)
    oracle = golden(LONG, 4, epochs)
    with staged(task, tmp_path, checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_every=5) as stage:
        stage.replaces = True
        stage.change(new_workers(2))
        events = ["change"] * changes + ["kill"] * kills
        chance.shuffle(events)
        for number, event in enumerate(events):
            stage.open_gate(max(stage.allowed, len(oracle) * (number + 1) // (len(events) + 1)))
            _happen(stage, event, chance)
            if number % 2:
                stage.until_step(min(stage.allowed, len(oracle)), 120)
            if not stage.running:
                break  # the job was over before the last changes
        stage.open_gate(ALL)
        stage.until_over(120)
        # Whoever is killed, or leaves, may have committed a step that the others had to do again: to the same bits.
        # If all that have the state are gone at once, the newest checkpoint counts.
        compare(stage.history, oracle, repeats=6 * kills + changes)
        for epoch in range(epochs):
            steps = oracle[STEPS_PER_EPOCH * epoch : STEPS_PER_EPOCH * (epoch + 1)]
            consumed = sorted(sample for step in steps for samples in step.samples for sample in samples)
            assert consumed == list(range(200)), "the oracle itself has lost or repeated a sample"
        # One that has just got the state when another is killed may have to be replaced.
        assert {actor.exit_code for actor in stage.actors} <= {0, REPLACED_EXIT, -signal.SIGKILL}
        dead = [actor for actor in stage.actors if actor.exit_code == -signal.SIGKILL]
        assert kills // 2 <= len(dead) <= kills, "a worker may have left just before it was to be killed"
        specs = [spec_of(actor.worker, view_of([actor.worker])) for actor in stage.actors]
        assert left_behind(specs, [actor.pid for actor in stage.actors]) == []


def _happen(stage: Stage, event: str, chance: random.Random) -> None:
    """Change the view at random, keeping somebody who trains; or kill somebody, while there is somebody else."""
    if event == "kill":
        while len(stage.holders) < 2:
            view = stage.client.get()
            if view is not None and view.size < 2:
                stage.client.add_worker(new_workers(1)[0])
            stage.open_gate(max(stage.allowed, stage.step + 1))  # newcomers are let in between two steps
            stage.tend()
            if not stage.running:
                return  # the last steps were done while we waited for somebody to kill
        with contextlib.suppress(ProcessLookupError):  # it has left meanwhile
            stage.kill(chance.choice(stage.holders))
        stage.tend(0.2)
        return
    members = stage.holders
    if not members:
        return  # all that had the state are gone, and others begin with the newest checkpoint
    keep = chance.sample(members, chance.randint(1, len(members)))
    view = [*keep, *new_workers(chance.randint(0, 4 - min(4, len(keep))))]
    chance.shuffle(view)
    stage.want(view)


@pytest.mark.skipif(not FULL, reason="minutes of random requests: PLIANT_FULL=1")
@pytest.mark.timeout(900)
def test_a_storm_of_requests_from_outside(tmp_path: Path) -> None:
    """Any list of workers every 300 ms, in any order, with one of those who train in it."""
    epochs, rounds = 40, 200
    chance = random.Random(6)
    oracle = golden(LONG, 4, epochs)
    with staged(Task(program=LONG, replicas=4, epochs=epochs, journal=""), tmp_path) as stage:
        stage.change(new_workers(1))
        spare: list[Worker] = []
        for number in range(rounds):
            stage.open_gate(max(stage.allowed, len(oracle) * (number + 1) // (rounds + 1)))
            members = stage.client.membership().members  # some of them may not have trained yet
            spare = [*spare, *new_workers(1)][-4:]
            free = [worker for worker in spare if worker not in members and worker not in _ended(stage)]
            view = [chance.choice(members), *chance.sample(free, chance.randint(0, min(3, len(free))))]
            chance.shuffle(view)
            with contextlib.suppress(ClusterCleared):
                stage.want(view)
            deadline_s = time.monotonic() + 0.3
            while time.monotonic() < deadline_s:
                stage.tend(0.05)
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, oracle, repeats=rounds)
        assert {actor.exit_code for actor in stage.actors} == {0}
        specs = [spec_of(actor.worker, view_of([actor.worker])) for actor in stage.actors]
        assert left_behind(specs, [actor.pid for actor in stage.actors]) == []


@pytest.mark.skipif(not FULL, reason="minutes of random changes: PLIANT_FULL=1")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_storm_over_programs_of_many_shapes(shape: str, tmp_path: Path) -> None:
    """Several passes, evaluations in the outer body, streams, priority; the whole job is told to end, or killed, and
    resumed in between."""
    check(shape, 1, tmp_path)


def _ended(stage: Stage) -> set[Worker]:
    """Whose turn is over: a worker that has been there once does not come back under its name."""
    return {actor.worker for actor in stage.actors}
