"""Where the time of a real job's steps goes, and whom its workers wait for: by its record, in `pliant top` as on the page."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from command import command
from forked import PLIANT, Program

from pliant import record

PROGRAM = """
import time
import torch, pliant

torch.set_num_threads(1)
job = pliant.join(replicas=2)
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader(torch.randn(180, 2), batch_size=2)
for epoch in job.epochs(1):
    for step in loader:
        slow, in_turn = ((0, True), (1, True), (1, False))[step.number // 15]
        for x in step:
            if job.rank == slow and in_turn:
                time.sleep(0.05)
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == slow and not in_turn:
            time.sleep(0.05)
"""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_who_is_slow_is_named_and_where_the_time_goes(tmp_path: Path) -> None:
    """First the one worker is slow, then the other, then that one outside of its turns."""
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("run", "-q", "-np", "2", "--record", "record.jsonl", "train.py")
    with contextlib.closing(Program([PLIANT, *words], cwd=tmp_path)) as runner:
        _, errors = runner.communicate(timeout=100)
        assert runner.wait(5) == 0, errors
    steps = [fact.data for fact in record.read(tmp_path / "record.jsonl") if fact.kind == "step"]
    assert len(steps) == 45
    assert "slowest" not in steps[0], "figures travel with the next step"
    for part, slow, in_turn in ((steps[2:15], 0, True), (steps[17:30], 1, True), (steps[32:], 1, False)):
        [(rank, times)] = Counter(each["slowest"] for each in part).most_common(1)
        assert rank == slow
        assert times >= 10
        assert median(each["slowest_s"] for each in part) >= 0.05
        assert median(each["wait_s"] for each in part) >= 0.02, "the mean of one that waits and one that does not"
        turns_s = median(each["compute_s"] for each in part)
        assert turns_s >= 0.025 if in_turn else turns_s < 0.02
    shown = command("top", str(tmp_path), "--once").stdout
    assert "waiting for other workers" in shown
    assert "rank 1 (" in shown
    (job,) = json.loads(command("top", str(tmp_path), "--json").stdout)["jobs"]
    assert {"compute_s", "wait_s", "slowest", "slowest_s"} <= set(job["figures"])
