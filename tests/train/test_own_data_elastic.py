"""Samplers and streams of the replicas' own go with them to other workers: the bits are those of stock DDP."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from golden import golden
from programs import OWN_DATA
from stage import ALL, new_workers, staged
from subject import Fault, Task, compare

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
EPOCHS = 5  # of 4 steps


@pytest.mark.parametrize("program", OWN_DATA)
def test_own_data_move_with_their_replicas(program: str, tmp_path: Path) -> None:
    """The job grows, shrinks, has its first worker killed in a step, and gets another one for it."""
    first, second, third, fourth = new_workers(4)
    with staged(Task(program=program, replicas=3, epochs=EPOCHS, journal=""), tmp_path) as stage:
        stage.faults[second] = Fault("backward", 9)
        stage.change([first])
        stage.change([second, first, third])
        stage.advance(4)  # the next change is agreed in the last step of an epoch
        stage.change([second, third])
        stage.open_gate(11)
        stage.until_step(11)
        stage.change([third, fourth])
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden(program, 3, EPOCHS), repeats=1)
        assert [actor.exit_code for actor in stage.actors if actor.exit_code] == [-signal.SIGKILL]
