"""Training in this process: one client, many clients, evaluation, and the measured batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant.errors import ConfigError, TrainError
from pliant.fed import trainer
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.local_steps import stream
from pliant.fed.selection.base import statistical_utility
from pliant.fed.trainer import ClientTrainer, InProcess, resolve_device
from pliant.fed.work import Evaluation, Trained, Training, Weights, evaluation_units, training_units


def task_of(**given: object) -> Task:
    return build_task(FedConfig.model_validate({"data": {"kind": "digits", "clients": 20}, "model": "mlp", **given}))


def load_weights(task: Task) -> Weights:
    return Weights.of(task.model())


def trained(task: Task, client: int = 3, steps: int = 10, lr: float = 0.05, round_number: int = 1) -> Trained:
    done = ClientTrainer(task).run(load_weights(task), Training(round_number, (client,), (steps,), lr))
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
    size = config.batch_size
    losses: list[float] = []
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
    start, (oracle, losses) = load_weights(task), plain(task, 3, 10, 0.05)
    result = trained(task)
    for ours, theirs in zip(result.update.change.all, start.change_to(Weights.of(oracle)).all, strict=True):
        assert torch.equal(ours, theirs)
    size = int(task.sizes[3])
    assert result.utility == pytest.approx(statistical_utility(losses[:size]), rel=1e-12)
    assert result.update.loss == pytest.approx(float(np.mean(losses[:size])), rel=1e-12)
    assert (result.update.client, result.update.samples) == (3, size)
    assert not torch.equal(result.update.change.parameters[0], trained(task, lr=0.04).update.change.parameters[0])


def test_fed_prox_is_in_every_step_and_pulls_towards_the_servers_model() -> None:
    distances = []
    for mu in (0.0, 1.0, 10.0):
        task = task_of(aggregator={"kind": "fed-prox", "mu": mu})
        change = trained(task).update.change
        oracle, _ = plain(task, 3, 10, 0.05, mu)
        for ours, theirs in zip(change.all, load_weights(task).change_to(Weights.of(oracle)).all, strict=True):
            assert torch.equal(ours, theirs)
        distances.append(sum(float(each.square().sum()) for each in change.parameters))
    assert distances[0] > distances[1] > distances[2]


def test_fed_prox_has_its_own_mu_where_none_is_given() -> None:
    assert ClientTrainer(task_of(aggregator="fed-prox")).mu == 0.1
    assert ClientTrainer(task_of(aggregator="fed-avg")).mu == 0.0


def test_malicious_clients_train_on_permuted_labels() -> None:
    task = task_of(malicious=0.25)
    liars = np.flatnonzero(task.malicious)
    assert len(liars) == 5
    samples = task.partition.of(int(liars[0]))
    true = task.train.labels[torch.from_numpy(samples)]
    assert not (task.labels(int(liars[0]), samples) == true).any()
    assert sorted(task.shuffle.tolist()) == list(range(10))
    honest = int(np.flatnonzero(~task.malicious)[0])
    assert torch.equal(task.labels(honest, samples), true)
    oracle, _ = plain(task, int(liars[0]), 3, 0.05)
    change = trained(task, client=int(liars[0]), steps=3).update.change
    assert torch.equal(change.parameters[0], load_weights(task).change_to(Weights.of(oracle)).parameters[0])


def test_a_stream_is_passes_over_the_clients_samples() -> None:
    task = task_of()
    own = task.partition.of(5)
    long = stream(task, 5, 2, 3 * len(own) - 4)
    for begin in (0, len(own)):
        assert sorted(long[begin : begin + len(own)]) == sorted(own)
    assert len(set(long[2 * len(own) :])) == len(own) - 4
    assert np.array_equal(long[:30], stream(task, 5, 2, 30))
    assert not np.array_equal(long[:30], stream(task, 5, 3, 30))
    other = build_task(task.config.model_copy(update={"seed": 1, "data": task.config.data}))
    assert not np.array_equal(long[:30], stream(other, 5, 2, 30))


def test_only_what_was_seen_in_the_first_pass_counts() -> None:
    """A client with more samples than it trains on: each of its losses counts, and |B| is how many it has seen."""
    task = task_of(local={"batch_size": 5})
    _, losses = plain(task, 3, 4, 0.05)
    assert len(losses) < task.sizes[3]
    assert trained(task, steps=4).utility == pytest.approx(statistical_utility(losses), rel=1e-12)


def test_the_test_set_in_parts_adds_up() -> None:
    task = task_of()
    trainer, model = ClientTrainer(task), load_weights(task)
    whole = trainer.run(model, Evaluation(0, task.num_test))
    parts = [trainer.run(model, unit) for unit in evaluation_units(task.num_test, size=100)]
    assert not isinstance(whole, tuple)
    added = parts[0]
    for each in parts[1:]:
        added = added + each  # type: ignore[operator]
    outputs = task.model().eval()(task.test.inputs(range(task.num_test)))
    labels = task.test.labels
    assert not isinstance(added, tuple)
    for score in (whole, added):
        assert (score.samples, score.correct) == (task.num_test, int((outputs.argmax(1) == labels).sum()))
        assert score.correct_in_5 == int((outputs.topk(5).indices == labels[:, None]).sum())
        assert score.loss == pytest.approx(F.cross_entropy(outputs, labels, reduction="sum").item(), rel=1e-5)


def test_in_process_answers_in_the_units_order_and_leaves_the_callers_torch_as_it_was() -> None:
    task = task_of()
    model = load_weights(task)
    units = [Training(1, (c,), (2,), 0.05) for c in (2, 0, 7)] + evaluation_units(task.num_test, size=200)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    done = list(InProcess(build_task(task.config)).run(model, units))
    assert [each[0].update.client for each in done[:3] if isinstance(each, tuple)] == [2, 0, 7]
    assert len(done) == len(units)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    first = done[0]
    again = next(InProcess(task).run(model, units[:1]))
    assert isinstance(first, tuple)
    assert isinstance(again, tuple)
    assert torch.equal(first[0].update.change.parameters[0], again[0].update.change.parameters[0])


def test_units_and_devices_that_cannot_be_are_named() -> None:
    trainer = ClientTrainer(task_of())
    model = load_weights(trainer.task)
    with pytest.raises(TrainError, match="client 20 of 20"):
        trainer.run(model, Training(1, (20,), (2,), 0.05))
    with pytest.raises(TrainError, match="steps"):
        trainer.run(model, Training(1, (1, 2), (2, 0), 0.05))
    with pytest.raises(TrainError, match="test samples"):
        trainer.run(model, Evaluation(0, 10_000))
    with pytest.raises(TrainError, match="not the server's model"):
        trainer.run(Weights(model.parameters[:1], []), Training(1, (1,), (2,), 0.05))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use cpu"):
            resolve_device("cuda")
    assert resolve_device("cpu").type == "cpu"


class Changing(nn.Module):
    """Uses another layer in every second pass."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers, self.count = nn.ModuleList(nn.Linear(64, classes) for _ in range(2)), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layers[self.count % 2](inputs.flatten(1))


class Frozen(nn.Module):
    """Has a layer that does not learn, and one that is not used."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.still, self.head, self.unused = nn.Linear(64, 16), nn.Linear(16, classes), nn.Linear(2, 2)
        self.still.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.still(inputs.flatten(1))))


def test_parameters_that_do_not_learn_or_are_not_used_stay() -> None:
    task = task_of(model=f"{__name__}:Frozen", local={"momentum": 0.5, "weight_decay": 0.1})
    oracle, _ = plain(task, 3, 10, 0.05)
    for ours, theirs in zip(
        trained(task).update.change.all, load_weights(task).change_to(Weights.of(oracle)).all, strict=True
    ):
        assert torch.equal(ours, theirs)
    with pytest.raises(TrainError, match="other parameters in each step"):
        trained(task_of(model=f"{__name__}:Changing"))


def test_the_smallest_that_is_nearly_the_fastest_is_taken() -> None:
    assert trainer.best({1: 10, 4: 19.2, 8: 20, 16: 15}) == 4
    assert trainer.best({1: 10, 4: 12, 8: 20, 16: 20.5}) == 8


def test_what_is_no_faster_is_not_taken() -> None:
    assert trainer.best({1: 10, 4: 10.5, 8: 9}) == 1
    assert trainer.best({1: 10}) == 1


def test_candidates_cut_a_round_into_units_for_four() -> None:
    assert trainer.candidates(500, 20, "cpu", 4) == (3, 5)
    assert trainer.candidates(500, 100, "cpu", 4) == (3, 5, 9, 13)
    assert all(
        len(training_units(range(100), [1] * 100, round_number=1, lr=1, batching=b)) % 4 == 0 for b in (5, 9, 13)
    )
    assert trainer.candidates(500, 4, "cpu", 4) == ()
    assert trainer.candidates(500, 20, "cpu", 2) == (2, 5, 10)
    assert trainer.candidates(500, 100, "cuda", 4) == (4, 16, 32, 64)


def test_a_measurement_answers_with_a_candidate() -> None:
    given = {"data": {"kind": "digits", "clients": 10}, "participants": 20, "model": "logistic"}
    assert trainer.choose_batching(build_task(FedConfig.model_validate(given)), limit_s=0.5) in range(1, 11)
    looking = build_task(FedConfig.model_validate({**given, "model": "test_batched_training:Plain"}))
    assert trainer.choose_batching(looking) == 1
    few = build_task(FedConfig.model_validate({**given, "participants": 2}))
    assert trainer.choose_batching(few) == 1
