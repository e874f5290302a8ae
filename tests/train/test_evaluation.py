"""An evaluation gives the same bits on any number of workers, also if some are lost meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pliant.comm.engine import Engine
from pliant.comm.transport import loopback_engines
from pliant.errors import TrainError
from pliant.train.context import RngState, seeded_rng
from pliant.train.evaluation import ShardedEvaluation
from pliant.train.replicas import place_replicas

SHARDS = 6
STATES = {replica: seeded_rng(replica) for replica in range(SHARDS)}
DATA = torch.rand(29, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e3


class Shares:
    """The part of a trainer that an evaluation uses. Replica r leaves its shard with the generators of seed r."""

    is_taken_back = False

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rank, self.size = engine, engine.rank, engine.size
        self.replicas = SimpleNamespace(count=SHARDS)
        self.hosted: Sequence[int] = place_replicas(SHARDS, engine.size, engine.rank).hosted
        self.begun: list[int] = []
        self.ended: dict[int, RngState] = {}
        self.answer: Callable[[list[bytes]], list[bytes]] = lambda rows: rows

    def begin_shards(self) -> None:
        assert not self.begun

    def begin_shard(self, replica: int) -> None:
        self.begun.append(replica)

    def end_shard(self) -> RngState:
        return STATES[self.begun[-1]]

    def end_shards(self, states: dict[int, RngState]) -> None:
        self.ended = states

    def together(self, ask: Callable[[Engine], Any], alone: Callable[[], Any]) -> Any:
        return self.answer(ask(self.engine) if self.size > 1 else alone())


def evaluate(shares: Shares, data: torch.Tensor = DATA) -> dict[str, float]:
    evaluation = ShardedEvaluation(shares, data, {"batch_size": 2})  # type: ignore[arg-type]
    for batch in evaluation:
        assert evaluation.is_running
        evaluation.add({"total": batch.sum(), "seen": len(batch)})
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
        shares.hosted, shares.rank, shares.size = range(2), rank, 1
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
            shares.size = 2
            elsewhere = [4, 5] if len(asked) == 1 else [4, 5, 3 - rank]
            return [*rows, json.dumps([others[shard] for shard in elsewhere]).encode()]

        shares.answer = answer
        shares.together = lambda ask, alone: answer(alone())  # type: ignore[method-assign]
        assert evaluate(shares) == expected()
        assert shares.begun == [0, 1, 2 + rank]
        assert asked == [[0, 1], [0, 1, 2 + rank]]


def test_shards_without_samples_and_wrong_figures() -> None:
    with loopback_engines(["here"]) as [engine]:
        assert evaluate(Shares(engine), DATA[:2])["seen"] == 2.0
        evaluation = ShardedEvaluation(Shares(engine), DATA, {"batch_size": 5})  # type: ignore[arg-type]
        batches = iter(evaluation)
        evaluation.add({"scores": next(batches)})
        with pytest.raises(TrainError, match=r"job\.total\(scores=.*a number, or a tensor with one element"):
            next(batches)
        assert not evaluation.is_running
