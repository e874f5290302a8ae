"""A job that is told to end stops between two steps; resumed, or begun with a loss, it has the bits of a quiet one."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import gang, say
from stage import new_workers, spec_of, view_of
from torch.utils.data import TensorDataset

import pliant
from pliant.cluster import ClusterSnapshot
from pliant.elastic.client import ConfigClient
from pliant.elastic.member import Member
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ViewChanged
from pliant.train.checkpoint import load_checkpoint
from pliant.train.rendezvous import ViewRendezvous

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
STEPS = 8
"""In two epochs."""
Place = tuple[str, int]
"""Where in the program the job is told to end: what comes next, and in which step."""


class Interruption:
    """Ends the job at a place of its program. All workers know of it before they go on."""

    def __init__(self, job: Any, at: Place | None, then: str) -> None:
        self._job, self._at, self._then = job, at, then

    def __call__(self, *here: Any) -> None:
        if self._at != here:
            return
        self._at = None
        if self._job.is_first:
            self._job.resize(0)
        member = self._job._run.member
        _wait_until(lambda: member.over and member.prepared > member.entered)  # so all say so in the next exchange
        if self._then == "dies" and self._job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._then == "dawdles" and self._job.rank == 1:
            _wait_for_sigterm()


def _wait_for_sigterm() -> None:
    """As a worker whose step takes long: it only comes back to the job after the runner has lost its patience."""
    handle, seen = signal.getsignal(signal.SIGTERM), []
    assert callable(handle)

    def handler(*args: Any) -> None:
        handle(*args)
        seen.append(args)

    signal.signal(signal.SIGTERM, handler)
    say("dawdling")
    _wait_until(lambda: bool(seen))


def _wait_until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline_s, "nobody has told this worker"
        time.sleep(0.005)


def train(rank: int, environ: dict[str, str], sync: str, at: Place | None, then: str) -> tuple[str, list[int]]:
    """In a worker: return the digest of all that the program has at its end; and the steps that it did."""
    for name in [name for name in os.environ if name.startswith("PLIANT_")]:
        del os.environ[name]
    os.environ.update(environ)
    if then == "as 0.1":
        _end_at_once()
    if then == "dies before the first state is here" and rank == 3:
        ViewRendezvous._check = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    done: list[int] = []
    try:
        return _train(sync, at, then, done), done
    except SystemExit as left:
        return f"left with {left.code}", done


def _end_at_once() -> None:
    """End wherever a worker is, and write the state that is there."""
    original = Member._on_change

    def abort(member: Member, snapshot: ClusterSnapshot) -> None:
        if snapshot.membership.over:
            member.transport.abort(ViewChanged("the job is over"))
            member.transport._call(lambda: None)  # wait until the engine's thread has done it
        original(member, snapshot)

    Member._on_change = abort  # type: ignore[method-assign]
    ViewRendezvous._end_job = lambda self, own, is_agreed: self._before_end(True)  # type: ignore[method-assign]


def _train(sync: str, at: Place | None, then: str, done: list[int]) -> str:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )
    data = TensorDataset(torch.randn(48, 4))
    with pliant.join(replicas=6, sync=sync) as job:
        before = Interruption(job, at, then)
        model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        scheduler = job.track("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        loader = job.loader(data, batch_size=2, shuffle=True)
        state = job.state(epochs=[], begun=[], totals=[])
        for epoch in job.epochs(2):
            state.epochs.append(epoch)
            for step in loader:
                state.begun.append(step.number)
                torch.rand(1)
                before("pass", step.number)
                for (x,) in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                before("second pass", step.number)
                if sync == "fifo":
                    for (x,) in step:
                        (model(x) - 1).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
                for (x,) in job.evaluate(data, 5):
                    before("evaluation", step.number)
                    job.total(loss=model(x).sum().item())
                state.totals.append(job.total())
                done.append(step.number)
        digest = hashlib.sha256(repr((vars(state), scheduler.state_dict(), optimizer.state_dict())).encode())
        for tensor in [*net.parameters(), *net.buffers()]:
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()


Ending = tuple[str, list[int]]


def run(folder: Path, sync: str, at: Place | None, then: str = "ends", size: int = 2) -> list[Ending]:
    """Run the job, or go on with it, until it ends; return how each worker did that was not killed."""
    with ConfigServer(ServerConfig(port=0, open=True)).running() as server, ConfigClient(server.url) as client:
        view = client.put(view_of(new_workers(size)))
        place = {"checkpoint_dir": str(folder), "checkpoint_every": 3, "resume": "auto"}
        specs = [spec_of(each, view, elastic=True, config_server=server.url, **place) for each in view.workers]
        with gang(train, [(spec.to_environ(), sync, at, then) for spec in specs]) as workers:
            if then == "dawdles":
                assert workers.hear(1) == "dawdling"
                for rank in range(size):
                    workers.kill(rank, signal.SIGTERM)
            return workers.results(ranks=range(size - 1) if then.startswith("dies") else None)


def newest(folder: Path) -> int:
    return load_checkpoint(folder).step


def go_on(folder: Path, sync: str, expected: Ending) -> None:
    """Resume on three workers, and compare with a job that was not interrupted."""
    begin = newest(folder)
    for found in run(folder, sync, None, size=3):
        assert found == (expected[0], list(range(begin, STEPS)))


@pytest.mark.parametrize("sync", ["fifo", "priority"])
def test_a_job_that_was_told_to_end_anywhere_goes_on_with_the_same_bits(sync: str, tmp_path: Path) -> None:
    with gang(train, [({}, sync, None, "")]) as alone:
        [expected] = alone.results()
    assert expected[1] == list(range(STEPS))
    begin = 0
    # After the last pass of a step the workers agree in the next one. One of these ends is that of an epoch.
    for at, ends in [(("pass", 0), 1), (("evaluation", 1), 3), (("second pass", 3), 4 if sync == "fifo" else 5)]:
        for found in run(tmp_path, sync, at):
            assert found == ("left with 0", list(range(begin, ends)))
        begin = newest(tmp_path)
        assert begin == ends
    go_on(tmp_path, sync, expected)


@pytest.mark.parametrize("then", ["dies", "dawdles"])
def test_nothing_is_written_in_the_middle_of_a_step(then: str, tmp_path: Path) -> None:
    """A worker dies after the job was told to end; or is so slow that the runner wants it to end at once."""
    with gang(train, [({}, "fifo", None, "")]) as alone:
        [expected] = alone.results()
    endings = run(tmp_path, "fifo", ("second pass", 4), then)
    assert endings[0] == ("left with 0", [0, 1, 2, 3])
    assert newest(tmp_path) == 3, "the last one that was due"
    go_on(tmp_path, "fifo", expected)


def test_a_loss_while_the_first_state_is_handed_out_makes_nobody_late(tmp_path: Path) -> None:
    """What the program does before its first step counts on all workers, as if there had been no loss."""
    with gang(train, [({}, "fifo", None, "")]) as alone:
        [expected] = alone.results()
    for found in run(tmp_path, "fifo", None, "dies before the first state is here", size=4):
        assert found == expected


def test_a_checkpoint_of_the_middle_of_a_step_would_change_the_bits(tmp_path: Path) -> None:
    with gang(train, [({}, "fifo", None, "")]) as alone:
        [expected] = alone.results()
    run(tmp_path, "fifo", ("second pass", 2), "as 0.1")
    assert newest(tmp_path) == 2, "the step that was torn does not count"
    with pytest.raises(AssertionError):
        go_on(tmp_path, "fifo", expected)
