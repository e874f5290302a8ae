"""`replicas=None`: a replica per worker, whatever their number. Another experiment, but no sample is lost in it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from gang import free_port

PROGRAM = """
import json, time, torch, pliant
from torch import nn
from torch.nn import functional as F

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, index):
        return torch.full((4,), float(index)), index

torch.manual_seed(1)
torch.set_num_threads(1)
job = pliant.join()
net = nn.Linear(4, 2)
model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), 1e-6))
loader = job.loader(Rows(), batch_size=2, shuffle=True)
scheduler = job.track("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9))
for epoch in job.epochs(2):
    for step in loader:
        for x, index in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(0.02)  # a model of some size
        print(json.dumps([epoch, step.number, job.size, job.replicas, index.tolist()]), flush=True)
"""


@pytest.mark.processes
def test_samples_are_dealt_anew_to_the_workers_there_are(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    port = free_port("127.0.0.1")
    command = [str(Path(sys.executable).with_name("pliant")), "run", "-q", "-w", "-np", "1", "-H", "127.0.0.1:3"]
    command += ["-port-range", f"{port}-{port + 40}", "--resize-schedule", "20:3,120:2", str(script)]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True) as runner:
        out, err = runner.communicate(timeout=100)
    assert runner.returncode == 0, err[-2000:]
    rows = [json.loads(found) for found in re.findall(r"\] (\[\d+, .*\])$", out, re.MULTILINE)]
    assert {size for _, _, size, _, _ in rows} >= {1, 3}, "the job never grew"
    assert all(size == replicas for _, _, size, replicas, _ in rows)
    for epoch in (0, 1):
        used = [index for found, _, _, _, indices in rows if found == epoch for index in indices]
        assert set(used) == set(range(240)), "a sample was lost"
        assert len(used) <= 240 + 3 * 3, "more samples came twice than fill up the last batches"
