"""The sides of `pliant bench fed --what simulate`: the job of all of them, ours, and a bare loop; Flower's is `fed_flower`."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pliant.errors import LaunchError
from pliant.fed.config import DataConfig, FedConfig, LocalConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.datasets import DEBIAN
from pliant.fed.data.task import InMemory, Task
from pliant.fed.local_steps import stream
from pliant.machine import Json

SEED = 7
STEPS, BATCH_SIZE = 10, 20
"""Local steps of a client in a round, and samples of a step."""
START_S = 120.0


def make_job(clients: int, participants: int, rounds: int) -> FedConfig:
    """Make a job of random clients, all alike, on Fashion-MNIST if Debian's package is installed, else on noise."""
    after_all = rounds + 2  # no round is tested or saved, and no more rounds are done than are measured
    kind = "fashion-mnist" if DEBIAN.is_dir() else f"{__name__}:lookalike"
    return FedConfig(
        name="simulate",
        seed=SEED,
        data=DataConfig(kind=kind, partition="iid", clients=clients, test_samples=1000),
        model="cnn",
        local=LocalConfig(steps=STEPS, batch_size=BATCH_SIZE, lr=0.05),
        participants=participants,
        overcommit=1.0,
        selector="random",  # type: ignore[arg-type]
        devices="equal",
        rounds=after_all,
        evaluate_every=after_all,
        checkpoint_every=after_all,
        device="cpu",
    )


def lookalike() -> tuple[InMemory, InMemory]:
    """Make ten kinds of noise, 1 x 28 x 28."""
    draw = torch.Generator().manual_seed(5)
    kinds = torch.randn(10, 1, 28, 28, generator=draw)
    parts = []
    for count in (60_000, 1_000):
        labels = torch.arange(count) % 10
        images = kinds[labels] + torch.randn(count, 1, 28, 28, generator=draw)
        parts.append(InMemory(images, labels, tuple("0123456789")))
    return parts[0], parts[1]


@cache
def task_and_module(job_json: str) -> tuple[Task, nn.Module]:
    """Return the task of a job and a module to train with; made once in each process."""
    task = build_task(FedConfig.model_validate_json(job_json))
    return task, task.model()


def train_client(task: Task, module: nn.Module, client: int, number: int) -> float:
    """Do one client's part of a round in `module`, in the plainest loop that there is, and return its mean loss."""
    local = task.config.local
    samples = torch.from_numpy(np.asarray(stream(task, client, number, local.steps * local.batch_size)))
    parameters = list(module.parameters())
    total = 0.0
    for batch in torch.split(samples, local.batch_size):
        outputs = module(task.train.inputs(batch.numpy()))
        loss = torch.nn.functional.cross_entropy(outputs, task.train.labels[batch])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=local.lr)
        total += float(loss.detach())
    return total / local.steps


def simulate_ours(config: FedConfig, rounds: int, folder: str) -> Json:
    """Measure rounds of a coordinator with one worker for each core."""
    from pliant.fed.rounds.loop import FederatedLoop
    from pliant.fed.rounds.storage import JobRecorder
    from pliant.fed.workers import coordinator_with_workers

    cores = len(os.sched_getaffinity(0))
    with coordinator_with_workers(config, cores, log=Path(folder) / "workers.log") as pool:
        pool.wait_for(cores, START_S)
        loop = FederatedLoop(config, build_task(config), pool, JobRecorder())
        loop.start()
        seconds = []
        for _ in range(rounds):
            begun_s = time.perf_counter()
            done = loop.step()
            seconds.append(time.perf_counter() - begun_s)
            if len(done.aggregated) != config.participants:
                raise LaunchError(f"{len(done.aggregated)} of {config.participants} clients took part in a round")
        return {"seconds": seconds, "batching": loop.batching, "workers": cores}


def simulate_bare(config: FedConfig, rounds: int) -> Json:
    """Measure rounds of one client after the other in this process."""
    torch.set_num_threads(1)
    task, module = task_and_module(config.model_dump_json())
    start = {name: each.clone() for name, each in module.state_dict().items()}
    seconds = []
    for number in range(1, rounds + 1):
        begun_s = time.perf_counter()
        for client in range(config.participants):
            module.load_state_dict(start)
            train_client(task, module, client, number)
        seconds.append(time.perf_counter() - begun_s)
    return {"seconds": seconds}
