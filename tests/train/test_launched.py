"""Training programs under `pliant run`: who they are, what they are called, and who is blamed when they fail."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

import pytest
from forked import PLIANT, Program
from scripted import run_script

from pliant.errors import PROGRAM_EXIT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
PROGRAM = """
import sys
from pathlib import Path
import torch, pliant

job = pliant.join(replicas=3)
told = (job.rank, job.size, job.is_first)
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader(torch.randn(24, 2), batch_size=2)
if sys.argv[1] == "load":
    job.load("nowhere.safetensors")
for epoch in job.epochs(2):
    for step in loader:
        for x in step:
            if sys.argv[1] == "mistake" and step.number == 2:
                optimizer.step()
            loss = model(x).sum()
            if sys.argv[1] == "put":  # on the CPU only a program that asks for it is strict
                torch.use_deterministic_algorithms(True)
                loss = loss.put_(torch.tensor([0]), loss * 2)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 1:
            shown = Path("/proc/self/cmdline").read_text().rstrip(chr(0)), Path("/proc/self/comm").read_text().strip()
            print("found", [told == (job.rank, job.size, job.is_first), *told, *shown], flush=True)
        if sys.argv[1] == "own" and step.number == 2 and job.rank == 1:
            raise ValueError("boom")
"""


def start(folder: Path, *words: str) -> Program:
    return Program([PLIANT, "run", "-q", *words], cwd=folder)


def end(runner: Program) -> tuple[int, str, str]:
    with contextlib.closing(runner):
        stdout, stderr = runner.communicate(timeout=150)
        return runner.wait(5), stdout, stderr


def test_one_worker_is_blamed_for_its_own_failure_and_one_message_tells_of_a_common_one(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(PROGRAM)
    (tmp_path / "alone.py").write_text("print('done')")
    own = start(tmp_path, "--warm", "-np", "2", "-m", "own.train", "own")
    common = start(tmp_path, "-w", "-np", "2", "own/train.py", "mistake")
    alone = start(tmp_path, "-np", "2", "alone.py")
    load = start(tmp_path, "--warm", "-np", "2", "own/train.py", "load")
    put = start(tmp_path, "--warm", "-np", "2", "own/train.py", "put")
    allowed = start(tmp_path, "--warm", "-np", "2", "--allow", "put_", "own/train.py", "put")

    code, _, stderr = end(alone)
    assert code == PROGRAM_EXIT
    assert "without calling pliant.join()" in stderr
    assert "--plain" in stderr

    code, stdout, stderr = end(own)
    assert code == 1, stderr
    found = sorted(re.findall(r"found (\[.*)", stdout))
    assert found == [
        str([True, rank, 2, rank == 0, f"own.train [pliant rank {rank}]", "own.train"]) for rank in range(2)
    ]
    assert re.search(r"\(rank 1\) failed first: exit code 1: ValueError: boom", stderr)
    lines = Counter(re.sub(r"^\S+ ", "", line) for line in stderr.splitlines())
    assert lines["Traceback (most recent call last):"] == 1, stderr
    assert stderr.count("failed first") == 1
    assert stderr.count("this worker ends, too") <= 1

    code, stdout, stderr = end(common)
    assert code == PROGRAM_EXIT, stderr
    assert sorted(re.findall(r"found (\[.*)", stdout)) == [
        str([True, rank, 2, rank == 0, f"own/train.py [pliant rank {rank}]", "train.py"]) for rank in range(2)
    ]
    assert stderr.count("Traceback (most recent call last)") <= 1, stderr
    assert "optimizer.step() in the turn of replica" in stderr
    assert " optimizer.py:" not in stderr, "one line names the program's own place"
    assert "replacing" not in stderr

    code, _, stderr = end(load)
    assert code == PROGRAM_EXIT, stderr
    assert stderr.count("Traceback (most recent call last)") <= 1, stderr
    assert "nowhere.safetensors" in stderr

    code, _, stderr = end(put)
    assert code == PROGRAM_EXIT, stderr
    assert stderr.count("Traceback (most recent call last)") <= 1, stderr
    assert "NotDeterministic: put_ has no deterministic kernel" in stderr
    code, stdout, stderr = end(allowed)
    assert code == 0, stderr
    assert stdout.count("bits not promised: put_ ") == 1


KILLED = """
import hashlib, os, signal, sys
import torch, pliant
from torch.utils.data import TensorDataset

def die_once(moment):
    try:
        os.close(os.open(f"died-{moment}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

is_killed = len(sys.argv) > 1
torch.set_num_threads(1)  # as `pliant run` lets workers have
torch.manual_seed(0)
job = pliant.join(replicas=6)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
data = TensorDataset(torch.randn(48, 4))
loader = job.loader(data, batch_size=4, shuffle=True)
state = job.state(outer=0, totals=[])
for epoch in job.epochs(3):
    for step in loader:
        for (x,) in step:
            if is_killed and job.rank == job.size - 1 and step.number == 1:
                die_once("turn")
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        state.outer += 1
        torch.rand(1)
        if is_killed and job.is_first and step.number == 3:
            die_once("outer")
    model[1].eval()  # dropout stays on
    for number, (x,) in enumerate(job.evaluate(data, 5)):
        if is_killed and job.is_first and epoch == 2 and number == 1:
            die_once("evaluation")
        job.total(loss=model(x).sum(), seen=len(x))
    model[1].train()
    state.totals = [*state.totals, job.total()]
weights = b"".join(each.detach().numpy().tobytes() for each in [*model.parameters(), *model.buffers()])
print("ended", state.outer, state.totals, hashlib.sha256(weights).hexdigest(), flush=True)
"""


def test_killed_in_a_turn_in_the_outer_body_and_in_an_evaluation_the_bits_stay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    killed = start(tmp_path, "-w", "-np", "4", "train.py", "kill")
    [alone] = run_script(tmp_path / "train.py")
    [expected] = re.findall(r"ended (6 .*)", alone)
    code, stdout, stderr = end(killed)
    assert code == 0, stderr
    assert set(re.findall(r"ended (.*)", stdout)) == {expected}, "the outer body ran once per step, with the same bits"
    assert sorted(path.name for path in tmp_path.glob("died-*")) == ["died-evaluation", "died-outer", "died-turn"]
