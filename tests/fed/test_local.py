"""One client's training held against a plain loop of torch, bit for bit; and what it says of its losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant.fed.config import FedConfig
from pliant.fed.feed import stream
from pliant.fed.local import Trainer
from pliant.fed.selection import statistical_utility
from pliant.fed.task import Task, build
from pliant.fed.updates import Weights
from pliant.fed.work import Trained, Training


def task_of(**given: object) -> Task:
    return build(FedConfig.model_validate({"data": {"kind": "digits", "clients": 20}, "model": "mlp", **given}))


def weights_of(task: Task) -> Weights:
    return Weights.of(task.model())


def trained(task: Task, client: int = 3, steps: int = 10, lr: float = 0.05, round_number: int = 1) -> Trained:
    done = Trainer(task).run(weights_of(task), Training(round_number, (client,), (steps,), lr))
    assert isinstance(done, tuple)
    return done[0]


def plain(task: Task, client: int, steps: int, lr: float, mu: float = 0.0) -> tuple[nn.Module, list[float]]:
    """The same with nothing but torch; the losses are those of the whole stream."""
    config, model = task.config.local, task.model()
    before = [each.detach().clone() for each in model.parameters()]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    size, losses = config.batch_size, []
    samples = stream(task, client, 1, steps * size)
    torch.set_num_threads(1)
    for at in range(0, len(samples), size):
        batch = samples[at : at + size]
        each = F.cross_entropy(model(task.train.inputs(batch)), task.labels(client, batch), reduction="none")
        losses += each.tolist()
        optimizer.zero_grad()
        each.mean().backward()
        for parameter, anchor in zip(model.parameters(), before, strict=True):
            if mu and parameter.grad is not None:
                parameter.grad += (parameter.detach() - anchor) * mu
        optimizer.step()
    return model, losses


SETTINGS = [
    pytest.param({"optimizer": "sgd"}, "cnn", id="sgd"),
    pytest.param({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}, "cnn", id="momentum"),
    pytest.param({"optimizer": "adamw", "weight_decay": 0.01}, "cnn", id="adamw"),
    pytest.param({"optimizer": "sgd"}, "cnn-bn", id="batch-norm"),
]


@pytest.mark.parametrize(("local", "model"), SETTINGS)
def test_a_client_trains_as_a_plain_loop_does_to_the_bit(local: dict[str, object], model: str) -> None:
    task = task_of(local=local, model=model)
    start, (oracle, losses) = weights_of(task), plain(task, 3, 10, 0.05)
    result = trained(task)
    for ours, theirs in zip(result.update.change.all, start.change_to(Weights.of(oracle)).all, strict=True):
        assert torch.equal(ours, theirs)
    size = int(task.sizes[3])
    assert result.utility == pytest.approx(statistical_utility(losses[:size]), rel=1e-12)
    assert result.update.loss == pytest.approx(float(np.mean(losses[:size])), rel=1e-12)
    assert (result.update.client, result.update.samples) == (3, size)
    assert not torch.equal(result.update.change.parameters[0], trained(task, lr=0.04).update.change.parameters[0])
