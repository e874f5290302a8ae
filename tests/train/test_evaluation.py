"""An evaluation gives the same bits on any number of workers, also if some are lost meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gang
import pytest
import torch

import pliant
from pliant.comm.engine import Engine
from pliant.comm.transport import loopback_engines
from pliant.errors import TrainError
from pliant.train.context import seeded_rng
from pliant.train.evaluation import ShardedEvaluation, run_on_replicas
from pliant.train.replicas import place_replicas

SHARDS = 6
STATES = {replica: seeded_rng(replica).to_bytes() for replica in range(SHARDS)}
DATA = torch.rand(29, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e3


class Shares:
    """The part of a trainer that an evaluation uses. Replica r leaves its shard with the generators of seed r."""

    is_taken_back = False

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rank, self.size = engine, engine.rank, engine.size
        self.replicas = SimpleNamespace(count=SHARDS)
        self.hosted: Sequence[int] = place_replicas(SHARDS, engine.size, engine.rank).hosted
        self.begun: list[int] = []
        self.ended: dict[int, bytes] = {}
        self.answer: Callable[[list[bytes]], list[bytes]] = lambda rows: rows

    def begin_shards(self, what: str) -> None:
        assert not self.begun

    def begin_shard(self, replica: int) -> None:
        self.begun.append(replica)

    def end_shard(self, replica: int) -> bytes:
        assert replica == self.begun[-1]
        return STATES[replica]

    def end_shards(self, left: dict[int, bytes]) -> None:
        self.ended = left

    def share_of(self, shards: Sequence[int]) -> list[int]:
        return [shard for shard in shards if shard in self.hosted]

    def together(self, ask: Callable[[Engine], Any], alone: Callable[[], Any], place: str) -> Any:
        return self.answer(ask(self.engine) if self.size > 1 else alone())


def evaluate(shares: Shares, data: torch.Tensor = DATA) -> dict[str, float]:
    evaluation = ShardedEvaluation(shares, data, {"batch_size": 2})  # type: ignore[arg-type]
    for batch in evaluation:
        assert evaluation.is_running
        evaluation.total({"total": batch.sum(), "seen": len(batch)})
    assert not evaluation.is_running
    return evaluation.totals


def on_workers(size: int) -> list[tuple[dict[str, float], Shares]]:
    with loopback_engines([f"host{number}" for number in range(size)]) as engines, ThreadPoolExecutor(size) as pool:
        shares = [Shares(engine) for engine in engines]
        totals = [each.result(timeout=30) for each in [pool.submit(evaluate, one) for one in shares]]
        return list(zip(totals, shares, strict=True))


def expected() -> dict[str, float]:
    """Each shard by itself, batch by batch, then the shards in their order."""
    total = 0.0
    for shard in range(SHARDS):
        part = torch.zeros((), dtype=torch.float64)
        samples = DATA[shard::SHARDS]
        for begin in range(0, len(samples), 2):
            part = part + samples[begin : begin + 2].sum()
        total += float(part)
    return {"total": total, "seen": 29.0}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_totals_have_the_same_bits_on_any_number_of_workers(size: int) -> None:
    for totals, shares in on_workers(size):
        assert totals == expected()
        assert shares.begun == list(shares.hosted)
        assert shares.ended == STATES


def test_another_order_of_adding_would_be_noticed() -> None:
    assert float(DATA.sum()) != expected()["total"]


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_a_lost_worker_are_dealt_to_the_others(rank: int) -> None:
    """Three of four are left: shards 2 and 3 were evaluated by the one that was lost."""
    with loopback_engines(["here"]) as [engine]:
        shares = Shares(engine)
        shares.hosted = range(2)
        others: dict[int, list[Any]] = {}
        alone = Shares(engine)
        alone.answer = lambda rows: [
            others.update({shard: [shard, figures, state] for shard, figures, state in json.loads(row)}) or row
            for row in rows
        ]
        assert evaluate(alone) == expected()
        asked: list[list[int]] = []

        def answer(rows: list[bytes]) -> list[bytes]:
            asked.append([shard for shard, _, _ in json.loads(rows[0])])
            shares.hosted = range(3 * rank, 3 * rank + 3)
            elsewhere = [4, 5] if len(asked) == 1 else [4, 5, 3 - rank]
            return [*rows, json.dumps([others[shard] for shard in elsewhere]).encode()]

        shares.answer = answer
        shares.together = lambda ask, alone, place: answer(alone())  # type: ignore[method-assign]
        assert evaluate(shares) == expected()
        assert shares.begun == [0, 1, 2 + rank]
        assert asked == [[0, 1], [0, 1, 2 + rank]]


def test_shards_without_samples_and_wrong_figures() -> None:
    with loopback_engines(["here"]) as [engine]:
        assert evaluate(Shares(engine), DATA[:2])["seen"] == 2.0
        evaluation = ShardedEvaluation(Shares(engine), DATA, {"batch_size": 5})  # type: ignore[arg-type]
        batches = iter(evaluation)
        evaluation.total({"scores": next(batches)})
        with pytest.raises(TrainError, match=r"job\.total\(scores=.*a number, or a tensor with one element"):
            next(batches)
        assert not evaluation.is_running


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_function_runs_once_for_each_replica(size: int) -> None:
    with loopback_engines([f"host{number}" for number in range(size)]) as engines, ThreadPoolExecutor(size) as pool:
        shares = [Shares(engine) for engine in engines]

        def ask(each: Shares) -> list[Any]:
            return run_on_replicas(each, lambda replica: {"row": DATA[replica::SHARDS], "n": replica}, draws=True)  # type: ignore[arg-type]

        for found in [each.result(timeout=30) for each in [pool.submit(ask, one) for one in shares]]:
            assert [each["n"] for each in found] == [*range(SHARDS)]
            assert all(torch.equal(each["row"], DATA[each["n"] :: SHARDS]) for each in found)
        assert [each.begun for each in shares] == [list(each.hosted) for each in shares]
        assert all(each.ended == STATES for each in shares)


def train(folder: Path, *, looks: bool, resume: str = "") -> dict[str, Any]:
    """Train a small model with three replicas; some programs look at all batches of a step before its pass."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    seen: list[list[float]] = []
    with pliant.join(replicas=3) as job:
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(torch.utils.data.TensorDataset(torch.rand(24, 4)), batch_size=2, seed=3)
        if resume:
            job.load(resume)
        for _ in job.epochs(1):
            for step in loader:
                if looks:
                    for (x,) in step:
                        step.log(total=x.sum())
                        step.no_backward()
                    assert step["total"] > 0
                    assert all(parameter.grad is None for parameter in model.parameters())
                for (x,) in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.on_replicas(lambda _: torch.rand(5), draws=False)
                seen.append(job.on_replicas(lambda replica: replica + float(torch.rand(()))))
                torch.rand(3)  # a checkpoint of this step knows of it
                if step.number == 1 and not resume:
                    job.save(str(folder / "second.safetensors"))
    return {"model": model.state_dict(), "seen": seen}


def test_a_pass_without_backward_and_draws_outside_of_turns_change_no_bit(tmp_path: Path) -> None:
    """With a resumed job: its checkpoint has what was drawn after the pass of its step."""
    plain, looking = train(tmp_path, looks=False), train(tmp_path, looks=True)
    resumed = train(tmp_path, looks=False, resume=str(tmp_path / "second.safetensors"))
    assert len(plain["seen"]) == 4
    assert [int(value) for value in plain["seen"][0]] == [0, 1, 2]
    assert looking["seen"] == plain["seen"]
    assert resumed["seen"] == plain["seen"][2:]
    for name, tensor in plain["model"].items():
        assert torch.equal(tensor, looking["model"][name])
        assert torch.equal(tensor, resumed["model"][name])


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample draws from the generator of the process that loads it."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1) + index


def _of_rank(rank: int) -> list[float]:
    """What a DDP rank draws that evaluates its shard in every step, before the forward."""
    torch.manual_seed(5)
    found: list[float] = []
    sampler = torch.utils.data.DistributedSampler(Noisy(), 3, rank, seed=3)
    shard = torch.utils.data.Subset(Noisy(), range(rank, 18, 3))
    for number, batch in enumerate(torch.utils.data.DataLoader(Noisy(), batch_size=2, sampler=sampler)):
        found += [float(batch.sum()), float(torch.rand(1))]
        for batch in torch.utils.data.DataLoader(shard, batch_size=4):
            found += [float(batch.sum()), float(torch.randn(1))]
        if rank == 0 and number == 1:
            found += [float(torch.rand(1))]
        found += [float(torch.rand(1)), float(torch.rand(1))]
    return found


def test_batches_are_loaded_before_what_the_outer_body_draws_and_evaluates() -> None:
    found: dict[int, list[float]] = {replica: [] for replica in range(3)}
    torch.manual_seed(5)
    with pliant.join(replicas=3) as job:
        model = torch.nn.Linear(1, 1)
        torch.manual_seed(5)
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(Noisy(), batch_size=2, seed=3)
        for _ in job.epochs(1):
            for step in loader:
                outer, evaluated = float(torch.rand(1)), []
                for batch in job.evaluate(Noisy(), batch_size=4):
                    evaluated += [float(batch.sum()), float(torch.randn(1))]
                first = [job.on_first(lambda: float(torch.rand(1)))] if step.index == 1 else []
                last = float(torch.rand(1))
                for x in step:
                    found[step.replica] += [float(x.sum()), outer]
                    found[step.replica] += evaluated[4 * step.replica : 4 * step.replica + 4]
                    found[step.replica] += first if step.replica == 0 else []
                    found[step.replica] += [last, float(torch.rand(1))]
                    model(x).sum().backward()
                optimizer.step()
    expected = [_of_rank(rank) for rank in range(3)]
    # Here the outer body draws once for all, from the generator of replica 0.
    for replica in (1, 2):
        for step in range(3):
            for place in (1, 6):
                expected[replica][8 * step + place] = found[replica][8 * step + place]
    assert found == dict(enumerate(expected))


class Drifting(torch.nn.Module):
    """Its buffer changes in every forward, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.line(x - self.mean)


@pytest.mark.parametrize("sync_buffers", [True, False])
def test_each_shard_begins_with_the_buffers_of_its_replica_and_training_goes_on_with_those_it_leaves(
    sync_buffers: bool,
) -> None:
    """As with DDP: a rank evaluates with the buffers that it has, and the buffers of rank 0 are sent with the next forward."""
    data, seen = torch.arange(12.0).view(12, 1), list[float]()
    with pliant.join(replicas=3) as job:
        model = Drifting()
        model, _ = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_buffers=sync_buffers)
        loader = job.loader(data, batch_size=2, shuffle=False)
        for _ in job.epochs(1):
            for x in job.evaluate(data, batch_size=2):
                model(x)
                seen.append(float(model.mean))
            first = float(model.mean)
            for step in loader:
                for x in step:
                    seen.append(float(model.mean))
                    model(x).sum().backward()
                break

    def after(shard: int) -> list[float]:
        mean, found = torch.zeros(1), []
        for batch in data[shard::3].split(2):
            mean = 0.9 * mean + 0.1 * batch.mean()
            found.append(float(mean))
        return found

    ends = [after(shard)[-1] for shard in range(3)]
    assert seen[:6] == [value for shard in range(3) for value in after(shard)]
    assert first == ends[0]
    assert seen[6:] == ([ends[0]] * 3 if sync_buffers else ends)


def _evaluate_until_killed(rank: int) -> None:
    """Send the number of the loader process, and wait in the evaluation."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it has no children
    with loopback_engines(["here"]) as [engine]:
        options = {"batch_size": 1, "num_workers": 1, "multiprocessing_context": "fork"}
        for batch in ShardedEvaluation(Shares(engine), OwnProcess(), options):  # type: ignore[arg-type]
            gang.say(int(batch))
            gang.listen()


class OwnProcess:
    """A dataset whose samples are the number of the process that loads them."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_loader_processes_of_an_evaluation_die_with_their_worker() -> None:
    """They have its connections: while they live, the others do not notice that it is lost. (By itself torch notices that
    a parent is gone after 5 s.)"""
    with gang.gang(_evaluate_until_killed, [()]) as workers:
        loader = Path(f"/proc/{workers.hear(0)}")
        assert loader.exists()
        killed_s = workers.kill(0)
        while loader.exists() and (loader / "stat").read_text().split()[2] != "Z":
            assert time.monotonic() - killed_s < 3, "it outlives its worker"
            time.sleep(0.01)
