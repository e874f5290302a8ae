"""Workers die at any moment: survivors stay the processes they are, and the bits stay those of stock DDP."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gang import FULL
from golden import golden
from stage import ALL, Stage, new_workers, staged
from subject import Fault, Task, compare, history

from pliant.errors import GIVEN_UP_EXIT
from pliant.train.checkpoint import load_checkpoint, newest_checkpoint, run_in
from pliant.train.checkpoint_file import Checkpoint, CheckpointImage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

EPOCHS = 4  # of 5 steps
CONV = Task(program="conv", replicas=4, epochs=EPOCHS, journal="")
KILLS = [
    ("forward", 0, 7),
    ("backward", 1, 7),
    ("summed", 0, 0),
    ("committed", 0, 4),
    ("summed", 2, 7),
    ("backward", 0, 9),
    ("outer", 1, 3),
]
"""Each moment once in the first four."""
MORE_KILLS = [(moment, rank, step) for moment in ("forward", "backward", "summed", "outer", "committed") for rank in (0, 2) for step in (0, 1, 4, 5)]  # fmt: skip


@pytest.mark.parametrize(("moment", "rank", "step"), KILLS + MORE_KILLS * FULL, ids=str)
def test_a_worker_is_killed(moment: str, rank: int, step: int, tmp_path: Path) -> None:
    workers = new_workers(3)
    with staged(CONV, tmp_path) as stage:
        stage.replaces = True
        stage.faults[workers[rank]] = Fault(moment, step)
        stage.want(workers)
        stage.until_over()
        _check(stage, dead=1)
        survivors = [stage.actor(worker) for index, worker in enumerate(workers) if index != rank]
        assert all(actor.exit_code == 0 for actor in survivors), "a survivor was not the same process to the end"


def test_two_are_killed_at_once(tmp_path: Path) -> None:
    workers = new_workers(4)
    with staged(CONV, tmp_path) as stage:
        stage.replaces = True
        stage.faults = {workers[0]: Fault("backward", 6), workers[2]: Fault("backward", 6)}
        stage.want(workers)
        stage.until_over()
        _check(stage, dead=2)


def test_one_is_killed_while_the_others_settle(tmp_path: Path) -> None:
    """Rank 1 dies in a step; rank 0 dies when it has just entered the view without it."""
    workers = new_workers(4)
    with staged(CONV, tmp_path) as stage:
        stage.faults = {workers[1]: Fault("backward", 6), workers[0]: Fault("settling", 6)}
        stage.want(workers)
        stage.until_over()
        _check(stage, dead=2)


@pytest.mark.parametrize("whose", ["newcomer", "survivor"])
def test_one_is_killed_while_a_newcomer_is_let_in(whose: str, tmp_path: Path) -> None:
    first, second, new = new_workers(3)
    with staged(CONV, tmp_path) as stage:
        # A newcomer has no state yet when it settles.
        stage.faults = {new: Fault("settling", -1)} if whose == "newcomer" else {first: Fault("settling", 1)}
        stage.open_gate(3)
        stage.want([first, second])
        stage.until_step(3)
        stage.want([first, second, new])
        stage.until(lambda: stage.client.membership().members == (first, second, new))
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage, dead=1)


def test_the_only_one_loses_a_newcomer_before_their_first_step(tmp_path: Path) -> None:
    """It goes on alone to the end, and waits for nobody there."""
    first, new = new_workers(2)
    with staged(CONV, tmp_path) as stage:
        stage.faults = {new: Fault("settling", -1)}
        stage.open_gate(3)
        stage.want([first])
        stage.until_step(3)
        stage.want([first, new])
        stage.until(lambda: stage.client.membership().members == (first, new))
        stage.open_gate(ALL)
        stage.until_over(20)
        _check(stage, dead=1)


def test_one_that_is_silent_is_lost(tmp_path: Path) -> None:
    workers = new_workers(3)
    # On a busy machine the two others may get no processor for a second, and must not lose each other.
    with staged(CONV, tmp_path, heartbeat_timeout_s=2.0) as stage:
        stage.faults[workers[0]] = Fault("forward", 6, signal.SIGSTOP)
        stage.want(workers)
        stage.open_gate(10)
        stage.until(lambda: set(stage.client.membership().members) == set(workers[1:]))
        stage.kill(workers[0], signal.SIGCONT)
        stage.until(lambda: not stage.actor(workers[0]).is_running)
        assert stage.actor(workers[0]).exit_code == GIVEN_UP_EXIT, "its runner starts another"
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden("conv", 4, EPOCHS), repeats=1)
        assert [actor.exit_code for actor in stage.actors] == [GIVEN_UP_EXIT, 0, 0]


def test_one_is_killed_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    """The torn file does not count: whoever resumes uses the one before it."""
    folder = tmp_path / "checkpoints"
    workers = new_workers(2)
    with staged(CONV, tmp_path, checkpoint_dir=str(folder), checkpoint_every=3) as stage:
        stage.faults[workers[0]] = Fault("saving", 6)
        stage.want(workers)
        stage.until_over()
        _check(stage, dead=1)
        newest = newest_checkpoint(folder)
        assert newest is not None
        assert load_checkpoint(newest).step == 18


def test_everybody_is_killed(tmp_path: Path) -> None:
    """More at once than there are copies: the job goes on from its last checkpoint, and not from that of another run."""
    folder = tmp_path / "checkpoints"
    foreign = Checkpoint(step=99, epoch=9, num_replicas=4, meta={"run": "another"})
    CheckpointImage(foreign, into=None).write(folder / "step-000000099.safetensors")
    first, second, third = new_workers(3)
    with staged(CONV, tmp_path, checkpoint_dir=str(folder), checkpoint_every=3) as stage:
        stage.want([first, second])
        stage.open_gate(8)
        stage.until_step(8)
        stage.until(lambda: newest_checkpoint(folder, run=run_in(str(folder))) is not None)
        stage.client.add_worker(third)  # a view without anybody ends the job
        stage.kill(first)
        stage.kill(second)
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage, dead=2, repeats=5)
        resumed = min(commit["step"] for commit in history([stage.actor(third).journal]).commits)
        assert resumed in (3, 6), f"resumed at step {resumed}, which no checkpoint was written after"


@pytest.mark.parametrize("every", [3, 0], ids=["checkpoints", "no checkpoint"])
def test_the_only_one_with_the_state_dies_while_a_newcomer_fetches_it(every: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints") if every else ""
    first, new = new_workers(2)
    with staged(CONV, tmp_path, checkpoint_dir=folder, checkpoint_every=every) as stage:
        stage.faults[first] = Fault("settling", 4)
        stage.open_gate(4)
        stage.want([first])
        stage.until_step(4)
        stage.until(lambda: not every or newest_checkpoint(folder) is not None)
        stage.want([first, new])
        stage.until(lambda: stage.client.membership().members == (first, new))
        stage.open_gate(ALL)
        stage.until_over()
        resumed = min(commit["step"] for commit in history([stage.actor(new).journal]).commits)
        _check(stage, dead=1, repeats=10)
        if not every:
            assert resumed == 0, "without a checkpoint the job begins again"
        else:  # the first one trains on until the other is there, and may write another checkpoint
            last = max(commit["step"] for commit in history([stage.actor(first).journal]).commits)
            assert resumed in (last // every * every, last // every * every - every), "the newest checkpoint counts"
            assert resumed >= every


def _check(stage: Stage, dead: int, repeats: int | None = None) -> None:
    compare(stage.history, golden("conv", 4, EPOCHS), repeats=dead if repeats is None else repeats)
    codes = [actor.exit_code for actor in stage.actors]
    assert sorted(code for code in codes if code) == [-signal.SIGKILL] * dead
