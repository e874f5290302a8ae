"""Asynchronous rounds: against an oracle that walks through all invitations, and a model folded by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fed_jobs import DAY_S, Table, config_of, loop_of, made_up, watched
from gang import FULL

from pliant.errors import NoClient
from pliant.fed.aggregation import FedBuff
from pliant.fed.config import FedConfig
from pliant.fed.history import Round
from pliant.fed.rounds.loop import FederatedLoop, simulate
from pliant.fed.work import Training, Weights

SLOW = pytest.mark.skipif(not FULL, reason="seconds, for less than its sibling shows: PLIANT_FULL=1")
SIZE, AT_ONCE, OLDEST = 4, 9, 2


def job(folder: Path, table: Table, **more: object) -> FedConfig:
    values = {
        "aggregator": {"kind": "fed-buff", "size": SIZE, "max_staleness": OLDEST},
        "concurrency": AT_ONCE,
        "rounds": 10_000,
        "evaluate_every": 10_000,
        "local": {"steps": 1},
    }
    return config_of(**table.write(folder), **values | more)


def ends(table: Table, client: int, asked_s: float, num_bytes: int, deadline_s: float) -> tuple[float, str]:
    """When an invited client is heard of again, and what has become of it."""
    stay = table.stay(client, asked_s)
    assert stay is not None, f"client {client} is away at {asked_s}"
    done_s = asked_s + table.duration_s(client, samples=8, model_bytes=num_bytes)
    if stay[1] <= min(done_s, asked_s + deadline_s):
        return stay[1], "lost"
    return (done_s, "done") if done_s <= asked_s + deadline_s else (asked_s + deadline_s, "cut")


def check(table: Table, rounds: list[Round], num_bytes: int, deadline_s: float) -> dict[str, int]:
    """Walk through every invitation in the order of time, and say which updates share a buffer."""
    flights = [
        (*ends(table, client, asked_s, num_bytes, deadline_s), client, each.round - 1, asked_s)
        for each in rounds
        for client, asked_s in zip(each.invited, each.asked_s, strict=True)
    ]
    seen = {"lost": 0, "cut": 0, "stale": 0, "late": 0}
    flights.sort(key=lambda each: (each[0], each[2]))
    version, buffer, lost, cut = 0, [], [], []
    for end_s, fate, client, started, _ in flights:
        if version == len(rounds):
            break
        if fate == "done" and version - started <= OLDEST:
            buffer.append((client, started))
            seen["late"] += started < version
        else:
            (lost if fate == "lost" else cut).append(client)
            seen["stale" if fate == "done" else fate] += 1
        if len(buffer) == SIZE:
            told = rounds[version]
            buffer.sort()
            assert told.aggregated == tuple(client for client, _ in buffer)
            assert told.staleness == tuple(version - of for _, of in buffer)
            assert told.clock_s == pytest.approx(end_s, abs=1e-6)
            assert (told.lost, told.cut) == (tuple(sorted(lost)), tuple(sorted(cut)))
            version, buffer, lost, cut = version + 1, [], [], []
    assert version == len(rounds), "every move of the model is explained"
    # At no time too many, and nobody twice.
    moments = sorted([(asked_s, 1, client) for *_, client, _, asked_s in flights]
                     + [(each[0], 0, each[2]) for each in flights])  # fmt: skip
    flying: set[int] = set()
    for _, begins, client in moments:
        if begins:
            assert client not in flying
            flying.add(client)
            assert len(flying) <= AT_ONCE
        else:
            flying.remove(client)
    return seen


@pytest.mark.parametrize(("selector", "days"), [("random", 3), pytest.param("oort", 7, marks=SLOW)])
def test_days_are_what_walking_through_all_invitations_says(selector: str, days: int, tmp_path: Path) -> None:
    table = made_up(60, period_s=2 * DAY_S, seed=7)
    deadline_s = 4000.0
    loop = loop_of(job(tmp_path, table, selector=selector, deadline_s=deadline_s))
    loop.start()
    rounds = []
    while loop.federation.clock_s < days * DAY_S:
        rounds.append(loop.step())
    seen = check(table, rounds, loop.federation.model.num_bytes, deadline_s)
    assert min(seen["lost"], seen["cut"], seen["late"]) > 0, seen


def test_updates_of_models_that_are_too_old_do_not_count(tmp_path: Path) -> None:
    table = made_up(60, period_s=DAY_S, seed=3)
    table.windows = [[(0, DAY_S)]] * 60
    table.compute_ms = [1000 if client % 4 else 20_000 for client in range(60)]
    loop = loop_of(job(tmp_path, table, rounds=30, selector="random"))
    history = loop.run()
    seen = check(table, history.rounds, loop.federation.model.num_bytes, math.inf)
    assert seen["stale"] > 3
    assert max(max(each.staleness) for each in history.rounds) <= OLDEST


def folded(loop: FederatedLoop, rounds: list[Round]) -> Weights:
    """Every model by hand: each client trains alone, from the model that it was given."""
    from pliant.fed.trainer import InProcess

    models = [Weights.of(loop.task.model())]
    buffer = FedBuff(size=SIZE, max_staleness=OLDEST)
    alone = InProcess(loop.task)
    for each in rounds:
        moved = None
        for client, late in zip(each.aggregated, each.staleness, strict=True):
            version = each.round - 1 - late
            unit = Training(version + 1, (client,), (1,), loop.config.lr_in(version + 1))
            (done,) = alone.run(models[version], [unit])
            assert isinstance(done, tuple)
            update = done[0].update
            sent = type(update)(client, update.change, update.samples, update.loss, version)
            moved = buffer.offer(models[-1], sent)
        assert moved is not None
        models.append(moved)
    return models[-1]


def test_the_model_is_the_one_folded_by_hand_and_units_are_as_large_as_can_be(tmp_path: Path) -> None:
    table = made_up(60, period_s=DAY_S, seed=3)
    config = job(tmp_path, table, rounds=12, local={"steps": 1, "lr_decay": 0.9, "decay_rounds": 1})
    loop, workers = watched(config)
    history = loop.run()
    assert any(sum(each.staleness) for each in history.rounds)
    assert all(
        torch.equal(a, b) for a, b in zip(loop.federation.model.all, folded(loop, history.rounds).all, strict=True)
    )
    trained = [each for each in workers.units if isinstance(each, Training)]
    assert len(trained) == 12 * SIZE, "nobody trains in vain"


def test_a_useless_update_takes_no_place_in_the_buffer(tmp_path: Path) -> None:
    table = made_up(60, period_s=DAY_S, seed=3)
    config = job(tmp_path, table, rounds=6, selector="random")
    first = simulate(config).rounds[0].aggregated[0]
    loop, _ = watched(config, frozenset({first}))
    history = loop.run()
    told = history.rounds[0]
    assert set(told.left_out) == {first}
    assert len(told.aggregated) == SIZE + 1
    assert loop.federation.selector.clients.rounds[first] == 0


def test_who_went_away_is_given_the_same_model_again_when_it_is_back(tmp_path: Path) -> None:
    table = Table([1000] * SIZE, [10_000] * SIZE, [[(0, DAY_S)]] * (SIZE - 1) + [[(0, 10), (5000, 9000)]], DAY_S)
    data = {"clients": SIZE, "partition": "iid"}
    config = job(tmp_path, table, data=data, rounds=1, selector="random", participants=SIZE, concurrency=SIZE)
    (told,) = simulate(config).rounds
    assert told.lost == (SIZE - 1,)
    assert told.aggregated == tuple(range(SIZE))
    assert told.asked_s[-2:] == (0.0, 5000.0)


def test_where_too_few_can_come_in_time_the_job_says_so(tmp_path: Path) -> None:
    table = made_up(20, period_s=DAY_S, seed=3)
    data = {"clients": 20, "partition": "iid"}
    with pytest.raises(NoClient, match="a model needs 4 updates, and no more can be had in time"):
        loop_of(job(tmp_path, table, data=data, deadline_s=0.1)).run()
    table.windows = [[(0, 60)] for _ in range(20)]
    table.compute_ms = [10_000] * 20
    with pytest.raises(NoClient, match="go away before they are done"):
        loop_of(job(tmp_path, table, data=data)).run()
