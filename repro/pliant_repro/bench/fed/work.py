"""What both sides of `pliant bench fed --what simulate` do: the same clients, samples, network and steps.

A client of the peers is the plainest loop that there is: no optimizer object, no loader, gradients by `torch.autograd.grad`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import nn

from pliant.fed.config import DataConfig, FedConfig, LocalConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.datasets import DEBIAN
from pliant.fed.data.task import InMemory, Task
from pliant.fed.local_steps import stream

LOOKALIKE = "pliant_repro.bench.fed.work:lookalike"


def job(
    *, clients: int, participants: int, steps: int, batch_size: int, rounds: int, batching: int | None, seed: int
) -> FedConfig:
    """Random clients, all alike, on Fashion-MNIST where Debian's package is installed, or else on noise of its shape."""
    kind = "fashion-mnist" if DEBIAN.is_dir() else LOOKALIKE
    return FedConfig(
        name="simulate",
        seed=seed,
        data=DataConfig(kind=kind, partition="iid", clients=clients, test_samples=1000),
        model="cnn",
        local=LocalConfig(steps=steps, batch_size=batch_size, lr=0.05),
        participants=participants,
        overcommit=1.0,
        selector="random",  # type: ignore[arg-type]
        devices="equal",
        # the last round is tested, and no more rounds are done than are measured
        rounds=rounds + 1,
        evaluate_every=rounds + 1,
        checkpoint_every=rounds + 1,
        batching=batching,
        device="cpu",
    )


def lookalike() -> tuple[InMemory, InMemory]:
    """Ten kinds of noise, 1 x 28 x 28."""
    draw = torch.Generator().manual_seed(5)
    kinds = torch.randn(10, 1, 28, 28, generator=draw)
    parts = []
    for count in (60_000, 1_000):
        labels = torch.arange(count) % 10
        parts.append(
            InMemory(kinds[labels] + torch.randn(count, 1, 28, 28, generator=draw), labels, tuple("0123456789"))
        )
    return parts[0], parts[1]


@cache
def known(job_json: str) -> tuple[Task, nn.Module]:
    """The task of a job, and a module to train with; once for each process."""
    task = build_task(FedConfig.model_validate_json(job_json))
    return task, task.model()


def train(task: Task, module: nn.Module, client: int, number: int) -> float:
    """One client's part of a round, in `module`; its mean loss."""
    local = task.config.local
    samples = torch.from_numpy(np.asarray(stream(task, client, number, local.steps * local.batch_size)))
    parameters = list(module.parameters())
    total = 0.0
    for batch in torch.split(samples, local.batch_size):
        loss = nn.functional.cross_entropy(module(task.train.inputs(batch.numpy())), task.train.labels[batch])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=local.lr)
        total += float(loss.detach())
    return total / local.steps
