"""No monitor changes a bit of training: all digests are still those of stock DDP, and records say the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden import golden
from stage import ALL, new_workers, run_fixed, staged
from subject import Task, compare, compare_all

from pliant import record

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

PROGRAMS = ("conv", "adamw", "unused")


def _tasks(folder: Path, size: int, sync: str) -> list[Task]:
    return [
        Task(
            program=name,
            replicas=3,
            epochs=2,
            journal=str(folder / f"{name}-{sync}-{size}"),
            sync=sync,
            slice_bytes=4096,
            adapting={
                "monitor": {"noise_scale": 1, "variance": 2},
                "record": str(folder / f"{name}-{sync}-{size}.jsonl"),
            },
        )
        for name in PROGRAMS
    ]


def _noise(folder: Path, name: str, sync: str, size: int) -> list[float | None]:
    facts = record.read(str(folder / f"{name}-{sync}-{size}.jsonl"))
    return [fact.data.get("noise_scale") for fact in facts if fact.kind == "step"]


def test_the_bits_are_ddps(tmp_path: Path) -> None:
    for size, syncs in ((1, ("fifo",)), (3, ("fifo", "priority"))):
        tasks = [task for sync in syncs for task in _tasks(tmp_path, size, sync)]
        compare_all(tasks, run_fixed(tasks, size, timeout_s=100))
    for name in PROGRAMS:
        alone = _noise(tmp_path, name, "fifo", 1)
        assert any(value is not None for value in alone), f"{name}: nothing was measured"
        for sync in ("fifo", "priority"):
            together = _noise(tmp_path, name, sync, 3)
            assert {*together} <= {*alone, None}, f"{name}, {sync}: other estimates than of one worker"


def test_monitors_go_on_through_changes_of_workers(tmp_path: Path) -> None:
    """A newcomer knows what was measured before it came; one that leaves, or dies, takes nothing with it."""
    a, b, c, d = new_workers(4)
    path = tmp_path / "record.jsonl"
    adapting = {"monitor": {"noise_scale": 1, "variance": 1}, "record": str(path)}
    task = Task(program="conv", replicas=3, epochs=2, journal="", adapting=adapting)
    with staged(task, tmp_path) as stage:
        stage.change([a])
        stage.change([a, b, c])
        stage.change([c, d])
        stage.kill(c)
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden("conv", 3, 2), repeats=1)
    told = {
        fact.step: fact.data["variance"]
        for fact in record.read(path)
        if fact.kind == "step" and "variance" in fact.data
    }
    assert len(set(told.values())) >= len(golden("conv", 3, 2)) - 8, "only what was under way at a change is missing"
