"""Training with sums on a process group of torch: here gloo with CPU tensors, with GPUs the same code on NCCL."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from golden import TREE, golden
from stage import ALL, new_workers, run_fixed, staged
from subject import Fault, History, Task, compare, differing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

EPOCHS = {3: 2, 4: 4, 6: 3}
"""By N, as other tests have them."""
NEXT_STEP_S = 3.0
"""Between the last step before a loss and the next one. Without an abort the group would wait for half an hour."""


def task_of(program: str, replicas: int, journal: str, order: str = "ddp", **more: object) -> Task:
    more = {"tampering": "sums_on_gloo", **more}
    return Task(
        program=program, replicas=replicas, epochs=EPOCHS[replicas], journal=journal, adapting={"order": order}, **more
    )  # type: ignore[arg-type]


def used_group(found: History) -> bool:
    """Whether each worker has done its last step of every view with the group, as far as it has done more than one."""
    last: dict[tuple[int, int], dict[str, object]] = {}
    counts: dict[tuple[int, int], int] = {}
    for commit in sorted(found.commits, key=lambda each: each["step"]):
        if commit["size"] > 1:
            key = commit["view"], commit["rank"]
            last[key], counts[key] = commit, counts.get(key, 0) + 1
    return any(count > 1 for count in counts.values()) and all(last[key]["in_group"] for key in last if counts[key] > 1)


@pytest.mark.parametrize(
    "blocks", [((2, 2), (4, 2)), ((1, 2, 1), (1, 2, 3)), ((1, 1, 1, 1), (2, 2, 1, 1))], ids=["2", "3", "4"]
)
def test_groups_have_the_bits_of_ddp_and_of_the_tree(blocks: Sequence[tuple[int, ...]], tmp_path: Path) -> None:
    tasks = [
        task_of("conv", sum(placed), str(tmp_path / f"{order}{sum(placed)}"), order, blocks=placed)
        for placed in blocks
        for order in ("ddp", "tree")
    ]
    for task, found in zip(tasks, run_fixed(tasks, len(blocks[0])), strict=True):
        prefix = TREE if task.adapting["order"] == "tree" else ""
        compare(found, golden(prefix + "conv", task.replicas, task.epochs))
        assert used_group(found), task.journal


PROGRAMS = (
    "transformer",
    "accumulating",
    "unused",
    "channels-last",
    "bfloat16",
    "kept-gradients",
    "two-passes",
    "skipping",
    "leaving",
)


def test_what_programs_do_beyond_the_plain_loop(tmp_path: Path) -> None:
    tasks = [task_of(name, 3, str(tmp_path / name)) for name in PROGRAMS]
    for task, found in zip(tasks, run_fixed(tasks, 2), strict=True):
        compare(found, golden(task.program, 3, 2))
        assert used_group(found), task.program


def test_another_order_of_additions_has_other_bits(tmp_path: Path) -> None:
    """A control."""
    task = task_of("conv", 4, str(tmp_path / "journal"), tampering="sums_on_gloo_in_another_order")
    [found] = run_fixed([task], 3, timeout_s=60)
    assert differing(found, golden("conv", 4, EPOCHS[4]))


@pytest.mark.parametrize(("moment", "rank"), [("backward", 1), ("summed", 0)])
def test_a_worker_is_killed(moment: str, rank: int, tmp_path: Path) -> None:
    workers = new_workers(3)
    with staged(task_of("conv", 4, ""), tmp_path) as stage:
        stage.replaces = True
        stage.faults[workers[rank]] = Fault(moment, 5)
        stage.want(workers)
        stage.until_over()
        compare(stage.history, golden("conv", 4, EPOCHS[4]), repeats=1)
        assert used_group(stage.history)
        codes = sorted(actor.exit_code or 0 for actor in stage.actors)
        assert codes == [-signal.SIGKILL, *[0] * (len(codes) - 1)]
        times = sorted({commit["step"]: commit["at_s"] for commit in stage.history.commits}.items())
        gap_s = max(after[1] - before[1] for before, after in itertools.pairwise(times) if 4 <= before[0] <= 6)
        assert gap_s < NEXT_STEP_S


def test_workers_come_and_go(tmp_path: Path) -> None:
    names = dict(zip("abcd", new_workers(4), strict=True))
    with staged(task_of("conv", 4, "", "tree"), tmp_path) as stage:
        for view in ("ab", "abcd", "bcd", "c"):
            stage.change([names[letter] for letter in view])
            if view != "c":
                stage.advance(stage.step + 1)
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden(TREE + "conv", 4, EPOCHS[4]))
        assert used_group(stage.history)
        assert {actor.exit_code for actor in stage.actors} == {0}
