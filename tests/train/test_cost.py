"""What a step costs does not depend on how many replicas a worker hosts: one hook, nothing to send, one pool of loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pliant
from pliant.comm.engine import Engine
from pliant.train import determinism
from pliant.train.determinism import SelfCheck


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((16,), float(index)), torch.tensor(index % 2)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_a_worker_that_hosts_all_replicas_sends_nothing_and_has_one_hook(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[str] = []
    hooks: list[list[int]] = []
    original = Engine.all_reduce

    def counted(engine: Engine, name: str, *args: Any, **kwargs: Any) -> Any:
        sums.append(name)
        return original(engine, name, *args, **kwargs)

    monkeypatch.setattr(Engine, "all_reduce", counted)
    with pliant.join(replicas=replicas) as job:
        net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), 0.1), bucket_cap_mb=0.01)
        loader = job.loader(Rows(), batch_size=4, num_workers=2)
        for _ in job.epochs(1):
            for step in loader:
                hooks.append([])
                for x, y in step:
                    functional.cross_entropy(model(x), y).backward()
                    hooks[-1].append(sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()))
                    assert all((p.grad is None) == (replicas > 1) for p in net.parameters())
                assert all(p.grad is not None for p in net.parameters())
                optimizer.step()
                optimizer.zero_grad()
                assert len(job._run.trainer.feeder.pids) == 2, "one pool, whatever the number of replicas"
    assert sums == []
    first, *others = hooks
    assert first == [1] if replicas == 1 else [6] + [1] * (replicas - 1), "the order of replica 0's gradients is found"
    assert all(each == [int(replicas > 1)] * replicas for each in others)


@pytest.mark.parametrize("ok", [True, False])
def test_a_job_proves_at_its_start_that_torch_sums_as_it_does(
    ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def check(num_replicas: int) -> SelfCheck:
        asked.append(num_replicas)
        return SelfCheck(ok, "another order")

    monkeypatch.setattr(determinism, "self_check", check)
    with pliant.join(replicas=3) as job:
        net = nn.Linear(16, 2)
        job.wrap(net, torch.optim.SGD(net.parameters(), 0.1))
        job.loader(Rows(), batch_size=4)
        next(iter(job.epochs(1)))
    assert asked == [3]
    assert ("(only D0 holds): another order" in capsys.readouterr().out) is not ok
