"""The order in which gradients are added: the bits of the tree on any workers, and refusals of another order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import TREE as IN_TREE
from golden import golden
from stage import ALL, new_workers, run_fixed, staged
from subject import Fault, Task, compare

import pliant
from pliant.errors import CheckpointError, ConfigError
from pliant.train.assembly import default_order

TREE = Task(program="conv", replicas=6, epochs=3, journal="", adapting={"order": "tree"})


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("sync", ["fifo", "priority"])
def test_workers_of_two_hosts_have_the_bits_of_the_tree(sync: str, tmp_path: Path) -> None:
    slicing: dict[str, Any] = {"slice_bytes": 2048} if sync == "priority" else {}
    task = replace(TREE, journal=str(tmp_path / "journal"), sync=sync, **slicing)
    [found] = run_fixed([task], 4, hosts=("127.0.0.1", "127.0.0.2"))
    compare(found, golden(IN_TREE + "conv", 6, 3))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_the_tree_outlives_changes_and_losses(tmp_path: Path) -> None:
    """6 replicas on 1, then 4, then 3 workers, one of which is killed and replaced."""
    first, second, third, fourth = new_workers(4)
    with staged(TREE, tmp_path) as stage:
        stage.replaces = True
        stage.faults[third] = Fault("backward", 6)
        stage.change([first])
        stage.change([first, second, third, fourth])
        stage.change([second, third, fourth])
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, golden(IN_TREE + "conv", 6, 3), repeats=1)
        assert sorted(actor.exit_code != 0 for actor in stage.actors) == [False] * 4 + [True], "one was killed"


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_two_replicas_have_the_same_bits_in_both_orders() -> None:
    assert [step.digest for step in golden("conv", 2, 2)] == [step.digest for step in golden(IN_TREE + "conv", 2, 2)]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_worker_with_another_order_is_refused_with_both_names(tmp_path: Path) -> None:
    first, other = new_workers(2)
    with staged(TREE, tmp_path) as stage:
        stage.changes[other] = {"adapting": {"order": "ddp"}}
        stage.change([first])
        stage.want([first, other])
        stage.until(lambda: stage.client.membership().members == (first, other))
        stage.open_gate(ALL)
        with pytest.raises(Exception, match=r"added in the order 'ddp'.* here, .*added in the order 'tree'"):
            stage.until_over(60)


# --- settings ---


def train(path: Path | None = None, replicas: int = 3, record: str = "", **options: Any) -> list[torch.Tensor]:
    """Train three steps on values whose sums depend on the order; save after the first, or go on from `path`."""
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    with pliant.join(replicas=replicas, seed=5, record=record, **options) as job:
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if path is not None and path.exists():
            job.load(str(path))
        for step in job.steps(3):
            if path is not None and step.number == 0:
                job.save(str(path))
            for _ in step:
                model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_a_checkpoint_keeps_its_order(tmp_path: Path) -> None:
    saved = tmp_path / "tree.safetensors"
    expected = train(saved, order="tree")
    assert all(map(torch.equal, train(saved, order="tree"), expected))
    for order in ("ddp", None):
        with pytest.raises(
            CheckpointError, match=r"of its 3 replicas in the order 'tree', this one in the order 'ddp'.*--order tree"
        ):
            train(saved, order=order)
    old = Path(__file__).parent / "job-0.1.safetensors"
    with pytest.raises(CheckpointError, match=r"in the order 'ddp', this one in the order 'tree'.*join\(order='ddp'\)"):
        train(old, order="tree")
    two = tmp_path / "two.safetensors"
    assert all(map(torch.equal, train(two, replicas=2, order="tree"), train(two, replicas=2, order="ddp")))


def test_the_order_shows_in_the_bits_and_in_the_record(tmp_path: Path) -> None:
    found = {}
    for order in ("ddp", "tree"):
        facts = tmp_path / f"{order}.jsonl"
        found[order] = train(replicas=6, order=order, record=str(facts))
        started = [fact for fact in map(json.loads, facts.read_text().splitlines()) if fact["kind"] == "start"]
        assert [fact["order"] for fact in started] == [order]
    assert not torch.equal(found["ddp"][0], found["tree"][0])
    assert torch.equal(found["ddp"][0], train(replicas=6)[0])


class Twins(torch.nn.Module):
    """Backward leaves the gradients of both parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(2, 3))
        self.second = torch.nn.Parameter(torch.ones(3, 2))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return ((self.first.view(-1) + self.second.view(-1)) ** 3 * factor).sum()


@pytest.mark.parametrize("order", ["ddp", "tree"])
def test_gradients_that_share_memory_are_scaled_once(order: Any) -> None:
    factors = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    expected = 12 * factors[0] * 0.5 + 12 * factors[1] * 0.5
    model = Twins()
    with pliant.join(replicas=2, order=order) as job:
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for step in job.steps(2):
            for replica in step:
                model(factors[replica]).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad.view(-1), expected), step.number
            optimizer.zero_grad()


def test_the_default_follows_the_device() -> None:
    assert default_order(torch.device("cpu")) == "ddp"
    assert default_order(torch.device("cuda", 1)) == "tree"


def test_an_unknown_order_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="order='fast' is unknown: use one of 'ddp', 'tree'"):
        pliant.join(replicas=2, order="fast")
