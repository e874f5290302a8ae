"""A job whose disk is full for a while: it trains on to the same bits, and goes on to write when there is room again."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from forked import PLIANT, Program
from full_disk import small_disk
from patience import open_gate, until

from pliant.record import read
from pliant.train.checkpoint import newest_checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
PROGRAM = """
import hashlib, sys, time
from pathlib import Path
import torch, pliant

gate = Path(sys.argv[1])
torch.manual_seed(1)
job = pliant.join(replicas=2)
model = torch.nn.Linear(4, 2)
model, optimizer = job.wrap(model, torch.optim.Adam(model.parameters()))
loader = job.loader(torch.randn(240, 4), batch_size=2)
for epoch in job.epochs(1):
    for step in loader:
        while int(gate.read_text()) <= step.number:
            time.sleep(0.01)
        for x in step:
            model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"worker {job.rank} at step {step.number}", "." * 400, flush=True)  # 25 of them do not fit into a page
        if job.is_first:
            Path(sys.argv[2]).write_text(str(step.number + 1))
if job.is_first:
    weights = torch.cat([each.flatten() for each in model.parameters()])
    Path(sys.argv[2]).write_text("end " + hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.root
def test_a_full_disk_costs_data_and_not_the_job(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    (tmp_path / "train.py").write_text(PROGRAM)
    alone = start(tmp_path, "alone", "-np", "1")
    with small_disk(tmp_path / "disk", "256k") as disk:
        write = [
            "--record",
            "disk/record.jsonl",
            "--tensorboard",
            "disk/board",
            "-logdir",
            "disk/logs",
            "-logfile",
            "disk/log",
        ]
        write += ["--checkpoint-dir", "disk/saved", "--checkpoint-every", "5", "--state-file", "disk/state.json"]
        runner = start(tmp_path, "full", "-w", "-np", "1", "-H", "127.0.0.1:2", *write)
        steps(tmp_path, "full", 20)
        disk.fill()
        steps(tmp_path, "full", 30)
        subprocess_resize(tmp_path, 2)
        steps(tmp_path, "full", 45)
        disk.free()
        steps(tmp_path, "full", 60)
        with contextlib.closing(runner):
            _, errors = runner.communicate(timeout=60)
            assert runner.wait(5) == 0, errors
        facts = read(disk.path / "record.jsonl")
        [gap] = [fact for fact in facts if fact.kind == "gap"]
        written = [fact.step for fact in facts if fact.kind == "step"]
        assert written[:20] == list(range(1, 21))
        assert written[-10:] == list(range(51, 61))
        assert gap.data["why"] == "No space left on device"
        assert facts[-1].kind == "end"
        logs = "".join(path.read_text() for path in (disk.path / "logs").iterdir())
        shown = re.sub(r"\.{400}", "...", logs)
        assert re.search(r"\n\[\d+ lines? lost: no space left on device\]\nworker 0 at step \d+ \.{3}\n", shown), shown
        saved = newest_checkpoint(disk.path / "saved")
        assert saved is not None
        assert saved.name == "step-000000060.safetensors"
        assert json.loads((disk.path / "state.json").read_text())["version"] >= 2
    with contextlib.closing(alone):
        steps(tmp_path, "alone", 60)
        assert alone.wait(60) == 0, alone.communicate(5)
    digests = {name: (tmp_path / f"{name}.step").read_text() for name in ("alone", "full")}
    assert digests["full"] == digests["alone"]
    assert digests["full"].startswith("end ")
    assert len(re.findall(r"cannot write record", errors)) <= 2, "one warning per writer and minute"
    assert "Traceback" not in errors, errors


def start(folder: Path, name: str, *words: str) -> Program:
    open_gate(folder / f"{name}.gate", 0)
    (folder / f"{name}.step").write_text("0")
    return Program([PLIANT, "run", *words, "train.py", f"{name}.gate", folder / f"{name}.step"], cwd=folder)


def steps(folder: Path, name: str, count: int) -> None:
    """Let the job do so many steps."""
    open_gate(folder / f"{name}.gate", count)
    shown = folder / f"{name}.step"
    until(lambda: (text := shown.read_text()) and (text.startswith("end") or int(text) >= count), f"step {count}", 60)


def subprocess_resize(folder: Path, size: int) -> None:
    with contextlib.closing(Program([PLIANT, "resize", str(size), "--no-wait"], cwd=folder)) as command:
        assert command.wait(30) == 0, command.communicate(5)
