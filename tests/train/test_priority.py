"""Priority sync: whatever travels first, and whenever a parameter is updated, the bits are those of stock DDP.

Workers on three loopback addresses talk to each other through TCP, as hosts would. Each set of workers does many tasks,
because processes cost more than steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gang import FULL, Failed
from stage import run_fixed
from subject import History, Task, compare_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
CROSSING = (
    "conv", "lstm", "wide", "two-optimizers", "frozen", "unused", "channels-last", "bfloat16", "own-buffers",
    "adamw", "accumulating-4", "tied-unclipped", "nesterov",
)  # fmt: skip
"""Programs that let the next forward begin before all sums are there."""
STOPPING = ("accumulating", "scaled", "saving", "evaluating", *(("transformer", "tied") if FULL else ()))
"""Programs that need all sums in every step: they clip, or look at everything."""
UNUSUAL = ("kept-gradients", "kept-and-cleared-first", "two-passes", "skipping", "leaving")
"""Programs of which some steps need all sums."""
SOME = ("conv", "unused", "accumulating-4", "nesterov")


def _tasks(folder: Path, names: Sequence[str], sync: str, replicas: int = 3, **more: Any) -> list[Task]:
    settings = {"slice_bytes": 4096, "epochs": 2, **more}
    label = "-".join([sync, *(str(value) for value in more.values())]).replace("/", "_")
    return [
        Task(program=name, replicas=replicas, journal=str(folder / f"{name}-{label}"), sync=sync, **settings)
        for name in names
    ]


def _crossed(found: History) -> float:
    """The share of steps, without a view's first, whose sums were not all waited for."""
    return sum(1.0 for each in found.commits if each["crossed"]) / (len(found.commits) - 3)


def test_what_programs_do(tmp_path: Path) -> None:
    """One replica per worker, all over TCP; slices of 4 KiB, and not more in flight than one."""
    tasks = _tasks(tmp_path, CROSSING + STOPPING + UNUSUAL, "priority", in_flight_bytes=4096)
    for sync in ("slicing", "baseline"):
        tasks += _tasks(tmp_path, CROSSING + STOPPING if FULL else SOME, sync)
    tasks += _tasks(tmp_path, SOME if FULL else ["conv"], "fifo")
    found = run_fixed(tasks, 3, hosts=HOSTS, timeout_s=120)
    compare_all(tasks, found)
    for task, each in zip(tasks, found, strict=True):
        if task.program in UNUSUAL:
            continue
        expected = 1.0 if task.program in CROSSING and task.sync != "fifo" else 0.0
        assert _crossed(each) == expected, f"{task.program}, {task.sync}: {_crossed(each):.2f} of the steps crossed"


def test_blocks_of_replicas(tmp_path: Path) -> None:
    """Several replicas take turns on a worker; on one host and on two."""
    names = ("adamw", "unused", "nesterov", *(CROSSING[:9] if FULL else ()))
    tasks = [
        task
        for blocks in ((2, 1), (1, 2))
        for sync in ("priority", "slicing")
        for task in _tasks(tmp_path, names, sync, blocks=blocks)
    ]
    for hosts in (HOSTS, HOSTS[:1]) if FULL else (HOSTS,):
        compare_all(tasks, run_fixed(tasks, 2, hosts=hosts))


def test_four_workers_on_three_hosts(tmp_path: Path) -> None:
    """Two of them share the memory of their host, the others do not."""
    tasks = [
        task
        for sync in ("priority", "slicing", "baseline", "auto")
        for name, epochs in (("conv", 4), ("adamw", 3), ("lstm", 3))
        if FULL or (name == "adamw") == (sync == "priority")
        for task in _tasks(tmp_path, [name], sync, 4, epochs=epochs)
        if FULL or name != "lstm"
    ]
    compare_all(tasks, run_fixed(tasks, 4, hosts=HOSTS))


def test_one_host(tmp_path: Path) -> None:
    """Where all memory is shared."""
    tasks = [
        task for sync in ("priority", "baseline") for task in _tasks(tmp_path, CROSSING if FULL else SOME[1:], sync)
    ]
    compare_all(tasks, run_fixed(tasks, 3))


def test_changes_of_slices_in_mid_run(tmp_path: Path) -> None:
    """The first worker changes its mind again and again: the others follow at the same step. And some dawdle."""
    tasks = _tasks(tmp_path, ["conv", "nesterov", "adamw"], "priority", slice_bytes=None, tampering="fickle")
    tasks += _tasks(tmp_path, ["conv", "adamw"], "auto", slice_bytes=None, tampering="wavering")
    tasks += _tasks(tmp_path, ["dawdling"], "priority", in_flight_bytes=4096)
    found = run_fixed(tasks, 3, hosts=HOSTS)
    compare_all(tasks, found, {"dawdling": "conv"})
    for task, each in zip(tasks, found, strict=True):
        sizes = {(commit["mode"], commit["slice_bytes"]) for commit in each.commits}
        if task.tampering == "fickle":
            assert {size for _, size in sizes} >= {4096, 8192, 65536}
        if task.tampering == "wavering":
            assert {mode for mode, _ in sizes} == {"fifo", "priority"}


def test_baseline_takes_one_replica_per_worker(tmp_path: Path) -> None:
    [task] = _tasks(tmp_path, ["conv"], "baseline", blocks=(2, 1))
    with pytest.raises(Failed, match="as many workers as replicas"):
        run_fixed([task], 2)
