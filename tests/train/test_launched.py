"""Training programs under `pliant run`: who they are, what they are called, and who is blamed when they fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import PLIANT, Program
from patience import open_gate, until
from scripted import run_script

from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import GIVEN_UP, PROGRAM_EXIT

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


SERVER_KILLED = """
import hashlib, os, sys, time
import torch, pliant
from pathlib import Path

torch.set_num_threads(1)
torch.manual_seed(0)
job = pliant.join(replicas=4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = job.loader(torch.randn(32, 4), batch_size=4, shuffle=True)
gate, victim = Path("gate"), Path("victim")
for epoch in job.epochs(4):
    for step in loader:
        for x in step:
            if sys.argv[1:] and step.number == 2 and not gate.exists():
                if job.rank == 1:
                    victim.write_text(str(os.getpid()))
                while job.rank == 1 and not gate.exists():
                    time.sleep(0.01)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.is_first:
            print("step", step.number, time.monotonic(), flush=True)
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("ended", hashlib.sha256(weights).hexdigest(), flush=True)
"""


def test_the_config_server_and_a_worker_are_killed_at_once_and_the_bits_stay(tmp_path: Path) -> None:
    with killed_in_step_2(tmp_path) as (runner, worker):
        children = [task.read_text() for task in Path(f"/proc/{runner.pid}/task").glob("*/children")]
        [server] = [
            int(child)
            for child in " ".join(children).split()
            if b"pliant.launch.job_server" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(server, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
    assert "the config server has ended (killed by SIGKILL" in ended_as_alone(runner, tmp_path)


def test_a_config_server_that_comes_back_empty_is_told_of_the_job_and_the_bits_stay(tmp_path: Path) -> None:
    server = ConfigServer(ServerConfig(port=0, open=True))
    with server.running(), killed_in_step_2(tmp_path, "-config-server", server.url) as (runner, worker):
        server.stop()
        assert server.wait(10)
        os.kill(worker, signal.SIGKILL)
    with ConfigServer(ServerConfig(port=server.port, open=True)).running():
        assert f"config server {server.url} was told who trains" in ended_as_alone(runner, tmp_path)


@contextlib.contextmanager
def killed_in_step_2(folder: Path, *words: str) -> Iterator[tuple[Program, int]]:
    """Yield a runner and its second worker, which stands still in step 2 and is killed in the block."""
    (folder / "train.py").write_text(SERVER_KILLED)
    runner = start(folder, "-w", "-np", "2", *words, "train.py", "kill")
    victim = folder / "victim"
    yield runner, int(until(lambda: victim.exists() and victim.read_text(), "the step"))
    (folder / "gate").write_text(str(time.monotonic()))


def ended_as_alone(runner: Program, folder: Path) -> str:
    """Wait for the end of the job, which has the bits of one worker and went on within 3 s; return what the runner has said."""
    [alone] = run_script(folder / "train.py")
    code, stdout, stderr = end(runner)
    assert code == 0, stderr
    assert set(re.findall(r"ended (.*)", stdout)) == set(re.findall(r"ended (.*)", alone))
    committed_s = {int(step): float(at_s) for step, at_s in re.findall(r"step (\d+) (\S+)", stdout)}
    assert committed_s[2] - float((folder / "gate").read_text()) < 3, (
        "the loss is settled as soon as the server is back"
    )
    assert "(1 lost)" in stdout
    return stderr


PREEMPTED = """
import hashlib, os, sys, time
from pathlib import Path
has_torch = "torch" in sys.modules
import torch, pliant

torch.set_num_threads(1)  # as `pliant run` lets workers have
torch.manual_seed(0)
job = pliant.join(replicas=4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = job.loader(torch.randn(STEPS * 4, 4), batch_size=1, shuffle=True)
for epoch in job.epochs(1):
    for step in loader:
        for x in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "gated" in sys.argv and not job.in_shadow:
            Path(f"up-{os.getpid()}-{has_torch}").touch()
            if job.is_first:
                with open("steps", "a") as file:
                    file.write(".")
            while int(Path("gate").read_text()) <= step.number:
                time.sleep(0.002)
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("ended", hashlib.sha256(weights).hexdigest(), flush=True)
"""


def test_workers_and_the_warm_process_are_killed_again_and_again(tmp_path: Path) -> None:
    steps, kills = 1000, 20
    (tmp_path / "train.py").write_text(PREEMPTED.replace("STEPS", str(steps)))
    gate, opened = tmp_path / "gate", itertools.count(1)
    open_gate(gate, 1)
    runner = start(tmp_path, "-w", "-np", "2", "train.py", "gated")

    def workers(count: int) -> list[int]:
        """The processes of all members so far, the oldest first; the job goes on until there are so many."""

        def came() -> list[Path]:
            found = sorted(tmp_path.glob("up-*"), key=lambda path: path.stat().st_mtime_ns)
            if len(found) < count:
                open_gate(gate, min(next(opened), steps - 1))
            return found if len(found) >= count else []

        return [int(path.name.split("-")[1]) for path in until(came, f"member {count}")]

    def warm_process() -> int:
        for child in Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if any(word.endswith("/warm.py") for word in Path(f"/proc/{child}/cmdline").read_text().split("\0")):
                    return int(child)
        return 0

    for number in range(kills):
        pids = workers(number + 2)
        if number in (3, 11):
            before = warm_process()
            os.kill(before, signal.SIGKILL)
            until(lambda before=before: warm_process() not in (0, before), "another warm process")  # type: ignore[misc]
        os.kill(pids[number], signal.SIGKILL)
    assert len(set(workers(kills + 2))) == kills + 2

    runner.send_signal(signal.SIGSTOP)  # the workers do not need it
    done = (tmp_path / "steps").stat().st_size
    open_gate(gate, next(opened) + 20)
    until(lambda: (tmp_path / "steps").stat().st_size >= done + 20, "steps without the runner")
    runner.send_signal(signal.SIGCONT)
    open_gate(gate, steps)
    code, stdout, stderr = end(runner)
    [alone] = run_script(tmp_path / "train.py")
    assert code == 0, stderr
    assert re.findall(r"ended (.*)", stdout) == re.findall(r"ended (.*)", alone) * 2
    lost = re.findall(r"lost 127\.0\.0\.1\.\d+: (.*); (.*)", stderr)
    assert [then for _, then in lost] == ["replacing it now"] * kills, stderr
    # The others may notice its end before its runner does.
    assert {why for why, _ in lost} <= {"killed by SIGKILL", GIVEN_UP}, stderr
    assert stderr.count("was killed: workers go on, and another one is started") == 2
    assert f"all 2/2 local workers finished ({kills} lost)" in stdout


HOPELESS = """
import sys
import torch, pliant

class Odd:
    pass

def check(step):
    if step.number == 7:
        raise ValueError(f"no sense in {Odd()}")

job = pliant.join(replicas=2)
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader(torch.randn(24, 2), batch_size=1)
for epoch in job.epochs(2):
    for step in loader:
        for x in step:
            model(x).sum().backward()
        if sys.argv[1] == "raise":
            check(step)
        elif step.number == 7:
            sys.exit(9)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("how", "expected"), [("raise", 1), ("exit", 9)])
def test_an_error_that_comes_again_at_the_same_step_ends_the_job(tmp_path: Path, how: str, expected: int) -> None:
    (tmp_path / "train.py").write_text(HOPELESS)
    runner = start(tmp_path, "-w", "-np", "1", "train.py", how)
    code, _, stderr = end(runner)
    assert code == expected, stderr
    assert stderr.count("; replacing it ") == 2, stderr
    assert f"the same error at step 7, 3 times in a row: exit code {expected}" in stderr
    if how == "raise":
        assert stderr.count("ValueError: no sense in <__main__.Odd object at 0x") == 4, "one of them is shown once more"
        assert re.findall(r'^  +File ".*train.py", line (\d+), in check$', stderr, re.M), stderr
