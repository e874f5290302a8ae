"""Synchronous SGD on several workers is SGD with their batches in one: the loss curves are the same."""

from __future__ import annotations

import os

import pytest
import torch
from gang import gang, run
from stage import new_workers, spec_of, view_of
from torch import nn

import pliant

WORKERS, BATCH, STEPS, EPOCHS = 4, 8, 200, 10
SAMPLES = WORKERS * BATCH * STEPS // EPOCHS


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))


def _data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SAMPLES, 20, generator=generator)
    labels = (inputs @ torch.randn(20, 5, generator=generator)).argmax(1)
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, labels)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)


def _train(_: int, environ: dict[str, str]) -> list[tuple[float, list[int]]]:
    """In a worker: each step's loss and samples."""
    os.environ.update(environ)
    found = []
    with pliant.join(replicas=WORKERS) as job:
        net = _model()
        model, optimizer, loader = job.wrap(net, _sgd(net), _data(), batch_size=BATCH, shuffle=True)
        for _ in job.epochs(EPOCHS):
            for samples, inputs, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                found.append((loss.item(), samples.tolist()))
    return found


def _train_large(_: int, batches: list[list[int]]) -> list[float]:
    """In a process of its own: each step's loss, with these batches."""
    model, (_, inputs, labels) = _model(), _data().tensors
    optimizer, losses = _sgd(model), []
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_four_workers_have_the_loss_curve_of_one_with_the_large_batch() -> None:
    view = view_of(new_workers(WORKERS))
    with gang(_train, [(spec_of(worker, view).to_environ(),) for worker in view.workers]) as workers:
        steps = list(zip(*workers.results(60), strict=True))
    batches = [[sample for _, samples in step for sample in samples] for step in steps]
    assert len(batches) == STEPS
    assert all(len(set(batch)) == WORKERS * BATCH for batch in batches)
    ours = [sum(loss for loss, _ in step) / WORKERS for step in steps]
    [theirs] = run(_train_large, 1, batches)
    assert ours[-1] < 0.5 * ours[0], "nothing was learnt"
    assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) <= 1e-6
