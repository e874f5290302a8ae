"""A new worker warms up alone before the others count on it: nobody waits for it, and nothing that it does there counts."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import run_script
from simulated import EAGER, Arrival, Notes, World, differences
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from pliant.train.context import capture_rng
from pliant.train.job import Job
from pliant.train.shadow import Shadow, Unknown

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]
PLIANT = str(Path(sys.executable).with_name("pliant"))


# --- what a program sees in the shadow ---


class Counting(IterableDataset[torch.Tensor]):
    """A stream with a state."""

    def __init__(self, replica: int) -> None:
        self.replica, self.place = replica, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 8:
            self.place += 1
            yield torch.tensor([float(self.replica), self.place / 8, 1.0])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def state_of(job: Job) -> Any:
    """All that a step may change: references."""
    trainer = job._run.trainer
    assert trainer is not None, "the job runs"
    read = {**trainer.state.read(), "buffers": trainer.state.buffers.save()}
    gradients = [each.grad for each in trainer.state.models[0].parameters()]
    modes = [module.training for module in trainer.state.models[0].modules()]
    return read, gradients, modes, capture_rng().to_bytes()


def test_what_happens_in_the_shadow_is_alone_and_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream, a tracked average, two passes, an evaluation and all calls that need the others: in the shadow each has
    an answer, and afterwards everything is as before, whatever the program has done to it."""
    seen: list[Any] = []
    ran_on_first: list[int] = []
    before: list[Any] = []
    originals = Shadow.__init__, Shadow.close

    def program(job: Job, notes: Notes) -> None:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.25), nn.Linear(4, 1))
        model, optimizer = job.wrap(model, torch.optim.Adam(model.parameters(), lr=0.1))
        loader = job.loader(lambda replica: Counting(replica), batch_size=2)
        average = job.track("average", copy.deepcopy(model))
        state = job.state(best=9.9, steps=0)
        validation = TensorDataset(torch.randn(30, 3))

        def open_shadow(shadow: Shadow, *args: Any) -> None:
            before.append(copy.deepcopy(state_of(job)))
            originals[0](shadow, *args)

        def close_shadow(shadow: Shadow) -> None:
            changed = differences(state_of(job), before[0])
            originals[1](shadow)
            seen.append((len(changed), differences(state_of(job), before[0])))

        monkeypatch.setattr(Shadow, "__init__", open_shadow)
        monkeypatch.setattr(Shadow, "close", close_shadow)
        for epoch in job.epochs(3):
            model.train()
            job.report(loss=1.0)
            if job.in_shadow:
                loader.set_epoch(17)
            for index, step in enumerate(loader):
                assert index == step.index
                for x in step:
                    if job.in_shadow:
                        seen.append((step.replica, job.replica, job.hosted, x.tolist()))
                    step.keep(x=x)
                    loss = model(x).square().mean()
                    loss.backward()
                    step.log(loss=loss)
                for _ in step:
                    loss = model(step.kept["x"]).square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.5)
                state.steps += 1
                notes["losses", step.number, job.in_shadow] = step["loss"]
                if step.index == 0:
                    first = job.on_first(lambda number=step.number: ran_on_first.append(number) or {"loss": 1.0})
                    state.best = min(state.best, first["loss"])
                if job.in_shadow:
                    answers = job.all_reduce(3.0, "max"), job.gather("me"), job.on_replicas(lambda replica: replica)
                    seen.append((epoch, step.number, job.is_first, answers, math.isnan(first["loss"])))
                    job.save("nowhere")
            model.eval()
            batches = [job.total(sum=model(x).sum().detach()) for [x] in job.evaluate(validation, 2)]
            seen.extend([(len(batches), list(job.total()))] if job.in_shadow else [])
        notes["steps"] = state.steps

    world = World(program, 2, schedule=EAGER, events=[Arrival(5)])
    world.run()
    alone = World(program, 1)
    alone.run()
    batch = [[2.0, 0.125, 1.0], [2.0, 0.25, 1.0]]
    assert seen[0] == (2, 2, range(2, 3), batch)
    assert seen[1] == (0, 0, False, (3.0, ["me"], [2, 2, 2]), True)
    assert seen[2] == (1, ["sum"])
    num_changed, left = seen[3]
    assert num_changed > 10, "the negative control: the step in the shadow has changed all kinds of things"
    assert left == []
    new = world.actors[2]
    assert len(new.commits) > 5, "it was let in"
    assert new.commits == list(range(new.commits[0], 13)), "no listener has heard of the step in the shadow"
    assert sorted(set(ran_on_first)) == [0, 4, 8]
    assert [(k, v) for k, v in new.notes.items() if k[-1] is not True and alone.actors[0].notes[k] != v] == []
    for actor in world.actors:
        assert differences(actor.state, alone.actors[0].state) == []


def test_an_answer_that_only_the_others_know_is_no_number_and_has_no_items_of_its_own() -> None:
    answer = Unknown()
    assert math.isnan(answer["loss"]["train"])
    assert not answer["loss"] < 1.0
    assert f"{answer[0]:.3f}" == "nan"
    with pytest.raises(TypeError, match="not iterable"):
        list(answer)  # type: ignore[call-overload]


# --- nobody waits for a new worker, however long it takes ---


SLOW = """
import hashlib, os, signal, sys, time
from pathlib import Path
import torch, pliant
from torch.utils.data import TensorDataset

how, is_new = (sys.argv[1:] or ["alone"])[0], True
BLOCKED, GO = Path(f"{how}.blocked"), Path(f"{how}.go")

def wait_for(is_there):
    deadline_s = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.002)

def die_once():
    try:
        os.close(os.open(f"{how}.died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def slow_start(step):
    # Stands for minutes of compilation in the first turn of a process.
    global is_new
    if is_new and (job.in_shadow or step.number):
        if how == "cold":
            assert not job.in_shadow, "so it is started again without a warm-up"
        BLOCKED.write_text(str(step.number))
        wait_for(GO.exists)
    is_new = False

torch.set_num_threads(1)
torch.manual_seed(0)
job = pliant.join(replicas=6)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(net, torch.optim.AdamW(net.parameters(), lr=0.1))
scheduler = job.track("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9))
data = TensorDataset(torch.randn(240, 4))
loader = job.loader(data, batch_size=4, shuffle=True, num_workers=int(how != "alone"))
state = job.state(outer=0, totals=[])
job.on_commit(lambda event: event.rank == 0 and print("commit", event.step, event.num_workers, time.monotonic(), flush=True))
for epoch in job.epochs(4):
    model.train()
    for number, step in enumerate(loader):
        assert number == step.index, (number, step.index)
        if how != "alone" and not job.in_shadow:
            if how == "killed" and step.number == 3 and job.rank == 1:
                die_once()
            if how != "cold" and step.number == 4:
                wait_for(BLOCKED.exists)
            if how != "cold" and step.number == 24 and job.is_first:
                GO.touch()
            if step.number == (4 if how == "cold" else 28) and job.size < (2 if how == "killed" else 3):
                wait_for(lambda: job.prepared_view > job.view)
        for (x,) in step:
            slow_start(step)
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state.outer += 1
        torch.rand(1)
    model.eval()
    for (x,) in job.evaluate(data, 20):
        job.total(loss=model(x).sum(), seen=len(x))
    state.totals = [*state.totals, job.total()]
weights = b"".join(each.detach().numpy().tobytes() for each in [*model.parameters(), *model.buffers()])
print("ended", state.outer, state.totals, hashlib.sha256(weights).hexdigest(), flush=True)
"""


@pytest.mark.processes
def test_the_others_train_on_while_a_new_worker_warms_up_however_long_it_takes(tmp_path: Path) -> None:
    """A new worker, and one in place of a killed one, stay in their first turn until the others have done 20 steps more.
    The negative control begins without a warm-up: the others can do no step before it has left its first turn."""
    (tmp_path / "train.py").write_text(SLOW)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(how: str, *words: str) -> subprocess.Popen[str]:
        command = [PLIANT, "run", "-q", "-w", "-np", "2", *words, "train.py", how]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    runners = {"grown": start("grown", "--resize-schedule", "2:3"), "killed": start("killed")}
    [alone] = run_script(tmp_path / "train.py")
    [expected] = re.findall(r"ended (40 .*)", alone)
    found = {how: runner.communicate(timeout=120) for how, runner in runners.items()}
    cold = start("cold", "--resize-schedule", "2:3")
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "cold.blocked").exists():
        assert cold.poll() is None, cold.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    went_s = time.monotonic()
    (tmp_path / "cold.go").touch()
    runners["cold"], found["cold"] = cold, cold.communicate(timeout=60)
    sizes = {}
    for how, (stdout, stderr) in found.items():
        assert runners[how].returncode == 0, stderr
        assert set(re.findall(r"ended (.*)", stdout)) == {expected}, how
        commits = re.findall(r"commit (\d+) (\d) (\S+)", stdout)
        sizes[how] = [int(size) for _, size, _ in commits]
        assert [int(step) for step, _, _ in commits] == list(range(1, 41))
        assert ("it is started again without a warm-up" in stderr) == (how == "cold"), stderr
    assert set(sizes["grown"][:24]) == {2}, "it was not counted before it was warm"
    assert set(sizes["grown"][30:]) == {3}
    assert set(sizes["killed"][4:24]) == {1}, "the survivor went on alone"
    assert set(sizes["killed"][30:]) == {2}
    blocked = int((tmp_path / "cold.blocked").read_text())
    times_s = [float(at_s) for _, _, at_s in re.findall(r"commit (\d+) (\d) (\S+)", found["cold"][0])]
    assert times_s[blocked] > went_s, "nobody could do this step before"
