"""Priority sync: whatever travels first, and whenever a parameter is updated, the bits are those of stock DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden import golden
from subject import Task, compare, run_fixed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

VARIANTS = (
    "conv", "lstm", "transformer", "wide", "accumulating", "scaled", "two-optimizers", "frozen", "unused", "tied",
    "channels-last", "bfloat16", "own-buffers",
)  # fmt: skip


@pytest.mark.parametrize("sync", ["priority", "baseline", "slicing"])
def test_what_programs_do(sync: str, tmp_path: Path) -> None:
    tasks = [
        Task(program=name, replicas=3, epochs=2, journal=str(tmp_path / name), sync=sync, slice_bytes=4096)
        for name in VARIANTS
    ]
    found = dict(zip(VARIANTS, run_fixed(tasks, 3), strict=True))
    wrong = {}
    for name in VARIANTS:
        try:
            compare(found[name], golden(name, 3, 2))
        except AssertionError as error:
            wrong[name] = str(error)
        print(name, sum(each["crossed"] for each in found[name].commits), len(found[name].commits))
    assert not wrong
