"""A job under all policies at once, as a user starts it; then replayed from its record on other numbers of workers."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from command import command
from gang import addresses, specs
from scripted import run_script

from pliant import record
from pliant.launch.plan import RunOptions

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
PROGRAM = """
import hashlib, os, time
import torch, torch.nn.functional as F
import pliant

torch.set_num_threads(1)
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
draw = torch.Generator().manual_seed(2)
inputs = torch.randn(600, 20, generator=draw)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
job = pliant.join(replicas=3, seed=5)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
model, optimizer = job.wrap(net, optimizer)
loader = job.loader(data, batch_size=4)
for epoch in job.epochs(2):
    for step in loader:
        time.sleep(float(os.environ.get("PAUSE_S", 0)))  # so that new workers have time to come
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
state = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
if job.rank == 0:
    print("HASH", job.step, hashlib.sha256(state).hexdigest(), flush=True)
"""
POLICIES = [
    "grow-batch-size:interval=6,warmup=3,threshold=0.01,max_batch=16",
    "scheduled-size:8=3,30=1,50=2",
    "provision:change_step=8",
    "goodput:interval=8",
    "interference",
    "scheduled-batch-size:12=6",
]


def _run(folder: Path, *options: str) -> str:
    done = forked.run([forked.PLIANT, "run", "-q", *options, sys.executable, "train.py"], cwd=folder, timeout=150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return _result(done.stdout)


def _forked(folder: Path, size: int, **adapting: str) -> str:
    """The same with workers that have imported torch already."""
    members = [replace(member, adapting=adapting) for member in specs(addresses("A" * size))]
    return _result("".join(run_script(folder / "train.py", members)))


def _result(output: str) -> str:
    found = re.findall(r"HASH (\d+ \w+)", output)
    assert len(found) == 1, output[-2000:]
    return str(found[0])


def test_all_policies_at_once_and_again_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    asked = [word for policy in POLICIES for word in ("--policy", policy)]
    monkeypatch.setenv("PAUSE_S", "0.05")
    live = _run(tmp_path, "-w", "-np", "2", "-H", "127.0.0.1:4", "--record", "run.jsonl", *asked)
    facts = record.read(tmp_path / "run.jsonl")
    decided = [fact.data["decision"] for fact in facts if fact.kind == "decision"]
    sizes = [each["size"] for each in decided if each["kind"] == "set_batch_size"]
    assert 6 in sizes, "the schedule's"
    assert max(sizes) > 6, "and larger ones, when measured noise and speed say so"
    assert all(each["reason"] for each in decided)
    assert [fact for fact in facts if fact.kind == "view"], "the workers have changed"
    assert "loss" in next(fact for fact in facts if fact.kind == "step").data["values"]
    monkeypatch.delenv("PAUSE_S")
    seen: list[RunOptions] = []
    monkeypatch.setattr("pliant.cli.run._launch", lambda options: seen.append(options) or 0)
    command("run", "--replay", str(tmp_path / "run.jsonl"), str(tmp_path / "train.py"))
    for size in (1, 3):
        assert _forked(tmp_path, size, **seen[0].adapting) == live
    assert _forked(tmp_path, 2) != live, "without the decisions it is another result"
