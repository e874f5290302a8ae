"""A job under `pliant serve` that adapts: its policy decides on the batch, the scheduler on the workers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import forked
import pytest
from serving_process import serving

PROGRAM = """
import hashlib, torch
import torch.nn.functional as F
from torch import nn
import pliant

torch.set_num_threads(1)
torch.manual_seed(1)
points = torch.randn(600, 16)
labels = (points[:, :4] + torch.randn(600, 4)).argmax(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
with pliant.join(replicas=2) as job:
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = job.loader(torch.utils.data.TensorDataset(points, labels), batch_size=4, shuffle=True)
    for epoch in job.epochs(4):
        for step in loader:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if job.is_first:
        print("hash", hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest())
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_goodput_grows_the_batch_and_leaves_workers_to_the_scheduler(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    with serving(tmp_path / "state", "--devices", "cpu=2", "--interval", "300ms") as server:
        policies = ["goodput:interval=10,max_batch=64", "scheduled-size:6=2,12=1,13=2"]
        server.submit("adapts", [], program=str(program), replicas=2, policy=policies)
        server.finished("adapts")
        [found] = re.findall(r"hash (\w+)", server.output("adapts"))
    record = tmp_path / "state" / "jobs" / "adapts" / "record.jsonl"
    facts = [json.loads(line) for line in record.read_text().splitlines()]
    decided = [fact["decision"]["kind"] for fact in facts if fact["kind"] == "decision"]
    assert "set_batch_size" in decided
    assert "resize" not in decided
    refused = [fact for fact in facts if fact["kind"] == "refused"]
    assert {fact["policy"] for fact in refused} == {"ScheduledSize"}
    assert all("the scheduler of `pliant serve` decides on workers" in fact["why"] for fact in refused)

    def alone(*options: str | Path) -> str:
        done = forked.run([forked.PLIANT, "run", "-q", "-np", "1", *options, program], cwd=tmp_path, timeout=60)
        assert done.returncode == 0, done.stderr
        [printed] = re.findall(r"hash (\w+)", done.stdout)
        return str(printed)

    assert alone("--replay", record) == found, "the same decisions have the same bits"
    assert alone() != found, "control: without them the bits are others"
