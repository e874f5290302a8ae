"""The program's loops over epochs and steps: how they are left, and what is written and resumed between steps."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import pliant
from pliant.errors import TrainError
from pliant.train.job import Job

pytestmark = pytest.mark.timeout(60)

# --- jobs of one worker with three replicas ---

EPOCHS, STEPS = 3, 4


class Run:
    """A job whose program draws, counts and decays its learning rate before, in and after its loop over the loader."""

    def __init__(self, folder: Path, *, save_at: str = "", stop_at: str = "", resume: str = "") -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.file = str(folder / f"{save_at.replace(' ', '-')}.safetensors")
        with pliant.join(replicas=3) as job:
            self.job = job
            self.model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            loader = job.loader(torch.utils.data.TensorDataset(torch.rand(STEPS * 6, 4)), batch_size=2)
            scheduler = job.track("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
            self.state = job.state(history=[])
            if resume:
                job.load(resume)
            for epoch in job.epochs(EPOCHS):
                self._note("before", epoch, save_at)
                for step in loader:
                    for (x,) in step:
                        model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self._note("in", step.number, save_at)
                    if stop_at == f"in {step.number}":
                        break
                self._note("after", epoch, save_at)
                scheduler.step()
                if stop_at == f"after {epoch}":
                    break
            if save_at == "end":
                job.save(self.file)
        self.facts = self.state.history, scheduler.last_epoch, torch.get_rng_state().sum().item()

    def _note(self, where: str, number: int, save_at: str) -> None:
        self.state.history.append((where, number, float(torch.rand(()))))
        if save_at == f"{where} {number}":
            self.job.save(self.file)

    def same_as(self, other: Run) -> bool:
        pairs = zip(self.model.state_dict().values(), other.model.state_dict().values(), strict=True)
        return self.facts == other.facts and all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("save_at", ["before 0", "before 1", "in 5", "in 7", "after 1", "after 2"])
def test_a_job_resumed_from_any_place_does_everything_once(tmp_path: Path, save_at: str) -> None:
    """Also what it does before and after the loop over the loader."""
    whole = Run(tmp_path, save_at=save_at)
    assert len(whole.state.history) == EPOCHS * (STEPS + 2)
    assert Run(tmp_path, resume=whole.file).same_as(whole)


def test_a_program_that_stops_early_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    whole = Run(tmp_path)
    stopped = Run(tmp_path, stop_at="after 1", save_at="end")
    assert len(stopped.state.history) == 2 * (STEPS + 2)
    assert Run(tmp_path, resume=stopped.file).same_as(whole)
    assert not stopped.same_as(whole)


def test_a_break_ends_the_training_and_an_error_does_not(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def run(leave: Callable[[], Any], **more: Any) -> tuple[bool, list[int]]:
        model, committed = torch.nn.Linear(2, 1), list[int]()
        with contextlib.suppress(Stop), pliant.join(replicas=3) as job:
            model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            job.on_commit(lambda event: committed.append(event.step))
            for step in job.steps(5):
                for _ in step:
                    model(torch.ones(2)).sum().backward()
                if step.number == 2 and leave():
                    break
                optimizer.step()
        return job._run.is_finished, committed

    def fail() -> None:
        raise Stop

    assert run(lambda: True) == (True, [1, 2, 3])
    assert run(fail) == (False, [1, 2]), "a step that an error has left is not committed: it would be in a checkpoint"
    assert run(lambda: False) == (True, [1, 2, 3, 4, 5])


def test_a_job_has_one_loop_over_epochs() -> None:
    model = torch.nn.Linear(2, 1)
    with pliant.join(replicas=3) as job:
        job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.loader(torch.rand(12, 2), batch_size=2)
        for _ in job.epochs(2):
            break
        with pytest.raises(TrainError, match=r"job\.epochs: the training has ended"):
            next(job.epochs(4))


def test_an_evaluation_that_is_left_early_has_no_totals() -> None:
    model, data = torch.nn.Linear(2, 1), torch.rand(12, 2)
    with pliant.join(replicas=3) as job:
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        drawn = []
        for step in job.steps(2):
            for batch in job.evaluate(data, 1):
                torch.rand(len(batch))
                job.total(seen=len(batch))
                if step.number == 0:
                    break
            if step.number == 0:
                with pytest.raises(TrainError, match=r"job\.evaluate that was left early"):
                    job.total()
            else:
                assert job.total() == {"seen": 12}
            drawn.append(torch.rand(()))
            for _ in step:
                drawn.append(torch.rand(()))
                model(data).sum().backward()
            optimizer.step()
        assert len({float(each) for each in drawn[1:4]}) == 1, (
            "draws outside of turns move the generators of all replicas"
        )
        assert drawn[0] != drawn[1]


def test_an_error_in_a_break_is_raised_where_the_job_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where that is the end of the program, it is the exit code."""

    def fail() -> None:
        raise TrainError("the workers differ")

    def begin(*, is_kept: bool = False) -> Job:
        model = torch.nn.Linear(2, 1)
        job = pliant.join(replicas=3)
        job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = job.steps(3)
        for _ in steps:
            monkeypatch.setattr(job._run.need_trainer(), "finish", fail)
            break
        if is_kept:
            kept.append(steps)
        return job

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    kept: list[Any] = []
    monkeypatch.setattr(os, "_exit", end)
    for is_kept in (False, True):
        with pytest.raises(Ended, match="1"):
            begin(is_kept=is_kept)._run._end_program()
        assert capsys.readouterr().err.count("TrainError: the workers differ") == 1
    with pytest.raises(TrainError, match="the workers differ"), begin():
        pass
    with pytest.raises(ZeroDivisionError), begin():
        print(1 / 0)


# --- launched jobs ---

EARLY = """
import hashlib, os, signal, sys, time
import torch, pliant
from torch.utils.data import TensorDataset
from pliant.cluster import Worker
from pliant.elastic.client import ConfigClient
from pliant.identity import worker_spec

how = sys.argv[1]
torch.manual_seed(0)
job = pliant.join(replicas=3, sync="priority" if how == "grow" else "fifo")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
data = TensorDataset(torch.randn(72, 4))
loader = job.loader(data, batch_size=4)
state = job.state(history=[])
if how == "resume":
    job.load("middle.safetensors")

def die_once():
    try:
        os.close(os.open("died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def grow():
    # To a worker for each replica, and one that stands by.
    spec = worker_spec()
    with ConfigClient(spec.config_server, spec.token) as client:
        workers = client.resize(3).workers
        client.add_worker(Worker(workers[0].host, max(each.port for each in workers) + 1))

for epoch in job.epochs(9):
    state.history.append(epoch)
    for (x,) in job.evaluate(data, 8):  # with dropout
        job.total(loss=model(x).sum(), seen=len(x))
    state.history.append(job.total())
    for step in loader:
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if how == "alone" and step.number == 3:
            job.save("middle.safetensors")
        if how == "grow" and job.size == 1 and step.number == 3:
            grow()
            deadline_s = time.monotonic() + 60
            while job.prepared_view <= job.view and time.monotonic() < deadline_s:
                time.sleep(0.01)
        if how == "grow" and (epoch, step.index, job.rank) == (1, 2, 1):
            die_once()
    if epoch == 2:
        break
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("ended", state.history, step["loss"], hashlib.sha256(weights).hexdigest(), flush=True)
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_newcomers_resumed_workers_and_those_that_stand_by_end_where_the_program_stops_early(tmp_path: Path) -> None:
    """They join in mid-epoch, where code before the loop over the loader has run already. One worker is killed in its
    loop, and others take over its replicas."""
    (tmp_path / "train.py").write_text(EARLY)

    start = functools.partial(forked.run, cwd=tmp_path, timeout=100)
    alone = start([sys.executable, "train.py", "alone"])
    resumed = start([forked.PLIANT, "run", "-q", "--warm", "-np", "2", "train.py", "resume"])
    [expected] = re.findall(r"ended (\[.*)", alone.stdout)
    assert re.findall(r"ended (\[.*)", resumed.stdout) == [expected] * 2, resumed
    grown = start([forked.PLIANT, "run", "-q", "-w", "-np", "1", "train.py", "grow"])
    assert grown.returncode == 0, grown
    assert (tmp_path / "died").exists(), grown
    assert set(re.findall(r"ended (\[.*)", grown.stdout)) == {expected}, grown
