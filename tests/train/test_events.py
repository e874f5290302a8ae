"""Programs can listen to committed steps."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import pliant
from pliant.train.events import StepCommitted


def test_each_committed_step_is_told_once_whatever_the_number_of_replicas(one_thread: None) -> None:
    heard: list[StepCommitted] = []
    with pliant.join(replicas=2) as job:
        job.on_commit(heard.append)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        data = TensorDataset(torch.randn(16, 2))
        model, optimizer, loader = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)
        for _ in job.epochs(2):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).sum().backward()
                if job.step:
                    job.report(loss=job.step)
                optimizer.step()
        assert [buffer.shape for buffer in job.committed_buffers] == [(3,), (3,), ()]
    assert [(each.step, each.epoch, each.epoch_step) for each in heard] == [(1, 0, 1), (2, 0, 2), (3, 1, 1), (4, 1, 2)]
    assert [dict(each.values) for each in heard] == [{}, {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    assert all(0 < each.compute_s < each.duration_s for each in heard)
    assert {(each.rank, each.num_workers) for each in heard} == {(0, 1)}
