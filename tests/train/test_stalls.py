"""Programs whose code hangs under `pliant run`: who is named, who is replaced, and what becomes of the bits."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from forked import PLIANT, Program

from pliant.record import read

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
PROGRAM = """
import ctypes, hashlib, multiprocessing, os, signal, sys, time
from pathlib import Path
import torch, pliant

multiprocessing.set_start_method("fork", force=True)  # the tests' own process has another one
torch.set_num_threads(1)  # as `pliant run` lets workers have
torch.manual_seed(0)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 100

    def __getitem__(self, index):
        if os.path.exists(f"loader-of-{os.getppid()}"):
            time.sleep(1e6)
        return torch.full((4,), index / 100)

def once(moment):
    if sys.argv[1:] != [moment.split("-")[0]]:
        return False
    try:
        os.close(os.open(moment, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    print("stuck", moment, os.getpid(), number, flush=True)
    return True

def hang_in_turn():
    # Nobody hangs before the worker that was lost last is replaced, and all have done some steps in this view.
    moment = (job.view, job.size, job.rank)
    if steps_here < 8:
        return
    if moment == (1, 4, 2) and once("hangs-sleep"):
        time.sleep(1e6)
    if moment == (3, 4, 1) and once("hangs-lock"):
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
    if moment == (5, 4, 1) and once("hangs-loader"):
        Path(f"loader-of-{os.getpid()}").touch()
    if moment == (1, 4, 2) and once("slow-lock"):
        ctypes.PyDLL(None).sleep(3)
    if moment == (1, 4, 1) and steps_here == 20 and once("slow-stop"):
        os.kill(os.getpid(), signal.SIGSTOP)

steps_here = number = 0
if os.environ.get("PLIANT_LOCAL_RANK") == "1" and once("starts-join"):
    time.sleep(1e6)
job = pliant.join(replicas=4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = job.loader(Rows(), batch_size=1, shuffle=True, num_workers=1)
print("began", os.getpid(), flush=True)
view, steps_here, number = 0, 0, 0
for epoch in job.epochs(1):
    for step in loader:
        view, steps_here, number = job.view, steps_here + 1 if job.view == view else 0, step.number
        for x in step:
            hang_in_turn()
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01 if job.size == 4 else 0.1)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("ended", os.getpid(), digest, flush=True)
"""


def end(program: Program) -> tuple[str, str]:
    with contextlib.closing(program):
        stdout, stderr = program.communicate(timeout=100)
        assert program.wait(5) == 0, stderr
    return stdout, stderr


def found(word: str, stdout: str) -> list[str]:
    return [line.partition(f"{word} ")[2] for line in stdout.splitlines() if f"{word} " in line]


def test_hung_code_is_named_and_replaced_and_slow_code_is_left_alone(tmp_path: Path) -> None:
    """Three workers hang one after the other: asleep, with the interpreter lock held, and for want of data. In a second
    job one holds the lock for three times the heartbeat's timeout, and another one is stopped."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    run = [PLIANT, "run", "-q", "-w", "-np", "4"]
    hangs = Program([*run, "--stall-timeout", "2s", "--record", "run.jsonl", program, "hangs"], cwd=tmp_path)
    slow = Program([*run, "--heartbeat-timeout", "1s", program, "slow"], cwd=tmp_path)
    undisturbed = Program([PLIANT, "run", "-q", "-np", "2", program], cwd=tmp_path)
    [expected] = {line.split()[1] for line in found("ended", end(undisturbed)[0])}

    stdout, stderr = end(slow)
    stuck = {moment: pid for moment, pid, _ in map(str.split, found("stuck", stdout))}
    ended = dict(line.split() for line in found("ended", stdout))
    assert set(stuck) == {"slow-lock", "slow-stop"}
    assert set(ended.values()) == {expected}
    assert stuck["slow-lock"] in ended, "it was only slow"
    assert set(found("began", stdout)[:4]) - set(ended) == {stuck["slow-stop"]}, stderr
    assert "all 4/4 local workers finished (1 lost)" in stdout
    assert re.search(r"lost \S+: .*; replacing it now", stderr)

    stdout, stderr = end(hangs)
    stuck = {moment: pid for moment, pid, _ in map(str.split, found("stuck", stdout))}
    steps = {moment: int(number) for moment, _, number in map(str.split, found("stuck", stdout))}
    ended = dict(line.split() for line in found("ended", stdout))
    assert set(stuck) == {"hangs-sleep", "hangs-lock", "hangs-loader"}
    assert set(ended.values()) == {expected}
    assert set(found("began", stdout)[:4]) - set(ended) == set(stuck.values()), "nobody else was replaced"
    assert "all 4/4 local workers finished (3 lost)" in stdout
    asleep, locked, starved = (fact.data for fact in read(tmp_path / "run.jsonl") if fact.kind == "stall")
    assert (asleep["rank"], asleep["what"]) == (2, f"in step {steps['hangs-sleep']}")
    assert "in hang_in_turn" in asleep["stack"][0]
    assert (locked["rank"], locked["what"]) == (1, f"in step {steps['hangs-lock']}")
    assert "in hang_in_turn" in locked["stack"][0]
    assert starved["rank"] == 1
    assert any("in __getitem__" in line for line in starved["stack"])
    for told in (asleep, locked, starved):
        assert f"worker {told['worker']} (rank {told['rank']}) has been {told['what']} for" in stderr
        assert all(line in stderr for line in told["stack"])
        assert re.search(rf"LossNotice {told['worker']} .*stalled {told['what']}: the others have waited 2s", stderr)


def test_one_that_hangs_before_it_joins_is_named_and_replaced(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    run = [PLIANT, "run", "-q", "-w", "-np", "4", "--stall-timeout", "0.8s", program, "starts"]
    stdout, stderr = end(Program(run, cwd=tmp_path))
    [(moment, pid, _)] = map(str.split, found("stuck", stdout))
    ended = dict(line.split() for line in found("ended", stdout))
    assert moment == "starts-join"
    assert len(ended) == 4
    assert pid not in ended
    assert re.search(r"which has not called pliant.join\(\) yet, has done nothing for 4s", stderr), stderr
    assert re.search(r"train.py.* in <module>", stderr)
    assert re.search(r"lost \S+: it did nothing for 8s before its first step .*; replacing it now", stderr)
