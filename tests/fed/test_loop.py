"""Rounds of real jobs: who is aggregated and who is cut, windows of a simulated week, what selector and account are told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from fed_jobs import DAY_S, Table, config_of, loop_of, made_up, state_of, task_of, watched

from pliant.errors import ConfigError, NoClient
from pliant.fed.aggregation import make_aggregator
from pliant.fed.config import FedConfig
from pliant.fed.privacy import epsilon_of, round_divergences
from pliant.fed.rounds.loop import simulate
from pliant.fed.trainer import InProcess
from pliant.fed.work import Training, Weights, training_units


@pytest.mark.parametrize("selector", ["oort", "random"])
def test_in_a_week_nobody_is_asked_outside_its_window_nor_counts_whose_window_closed(
    selector: str, tmp_path: Path
) -> None:
    table = made_up(60, period_s=3 * DAY_S, seed=5)
    config = config_of(
        **table.write(tmp_path),
        selector=selector,
        rounds=10_000,
        evaluate_every=10_000,
        local={"steps": 1},
        participants=5,
    )
    loop = loop_of(config)
    loop.start()
    num_bytes = loop.federation.model.num_bytes
    asked = counted = lost = 0
    while loop.federation.clock_s < 7 * DAY_S:
        done = loop.step()
        ends: dict[int, float] = {}
        for client in done.invited:
            stay = table.stay(client, done.begin_s)
            assert stay is not None, f"client {client} is away at {done.begin_s}"
            ends[client] = done.begin_s + table.duration_s(client, samples=8, model_bytes=num_bytes)
            assert (client in done.aggregated) <= (ends[client] < stay[1])
            assert (client in done.lost) <= (ends[client] >= stay[1])
        came = sorted(ends[client] for client in done.aggregated)
        assert all(end <= done.clock_s + 1e-6 for end in came)
        if len(came) == config.participants:
            assert done.clock_s == pytest.approx(came[-1])
        asked, counted, lost = asked + len(done.invited), counted + len(came), lost + len(done.lost)
    assert loop.round > 50
    assert counted > 0.5 * asked
    assert lost > 20, "windows do close during rounds here"


def test_of_26_invited_20_are_aggregated_and_the_20th_moves_the_clock(tmp_path: Path) -> None:
    table = made_up(60, period_s=DAY_S, seed=1)
    files = table.write(tmp_path)
    config = config_of(devices=files["devices"], participants=20, overcommit=1.3, rounds=4)
    loop = loop_of(config)
    before = 0.0
    for _ in range(4):
        done = loop.step()
        num_bytes = loop.federation.model.num_bytes
        times = sorted((table.duration_s(client, samples=16, model_bytes=num_bytes), client) for client in done.invited)
        assert len(done.invited) == 26
        assert done.aggregated == tuple(sorted(client for _, client in times[:20]))
        assert done.cut == tuple(sorted(client for _, client in times[20:]))
        assert done.begin_s == before
        assert done.clock_s - before == pytest.approx(times[19][0])
        before = done.clock_s
    known = loop.federation.selector.clients
    assert known.rounds.sum() == 4 * 20, "who was cut has not taken part"


# --- what is made of the updates ---


@pytest.mark.parametrize("kind", ["fed-avg", "q-fedavg", "fed-yogi", "krum"])
def test_a_round_is_the_aggregators_answer_to_what_its_clients_brought(kind: str) -> None:
    config = config_of(aggregator=kind)
    loop, workers = watched(config)
    done = loop.step()
    options = {"client_lr": 0.1} if kind == "q-fedavg" else {}
    start = Weights.of(loop.task.model())
    clients = [each.update.client for each in workers.brought]
    assert clients == sorted(clients) == list(done.aggregated)
    assert all(math.isfinite(each.update.loss) for each in workers.brought)
    alone = InProcess(loop.task)
    units = training_units(clients, [2] * len(clients), round_number=1, lr=0.1, batching=1)
    updates = [each.update for part in alone.run(start, units) if isinstance(part, tuple) for each in part]
    by_hand = make_aggregator(kind, options).aggregate(start, reversed(updates))
    assert all(torch.equal(a, b) for a, b in zip(loop.federation.model.all, by_hand.all, strict=True))
    assert done.loss == pytest.approx(np.mean([each.loss for each in updates]))
    told = loop.federation.selector.clients
    assert told.utility[clients].tolist() == [each.utility for each in workers.brought]


def test_q_fedavg_reckons_with_the_rate_of_the_round_unless_the_user_has_set_it() -> None:
    local = {"steps": 2, "batch_size": 8, "lr": 0.1, "lr_decay": 0.5, "decay_rounds": 1}
    loop, workers = watched(config_of(aggregator="q-fedavg", local=local))
    loop.step()
    second, seen = loop.federation.model, len(workers.brought)
    loop.step()
    updates = [each.update for each in workers.brought[seen:]]
    for rate, alike in ((0.05, True), (0.1, False)):
        by_hand = make_aggregator("q-fedavg", {"client_lr": rate}).aggregate(second, updates)
        assert torch.equal(by_hand.parameters[0], loop.federation.model.parameters[0]) is alike
    asked, _ = watched(config_of(aggregator={"kind": "q-fedavg", "client_lr": 0.3}, local=local))
    asked.step()
    assert getattr(asked.federation.aggregator, "client_lr", None) == 0.3
    frozen, _ = watched(config_of(aggregator="q-fedavg", local=local | {"lr_decay": 0.0}))
    frozen.step()
    before = frozen.federation.model
    assert not frozen.step().left_out
    assert all(torch.equal(a, b) for a, b in zip(before.all, frozen.federation.model.all, strict=True))


def test_an_update_of_what_is_no_number_is_left_out_and_its_client_has_not_taken_part() -> None:
    config = config_of(rounds=3, selector="random")
    clean, _ = watched(config)
    first = clean.step().aggregated[0]
    loop, workers = watched(config, frozenset({first}))
    done = loop.step()
    assert done.left_out == {first: "it holds values that are not finite"}
    assert first in done.aggregated
    assert all(bool(torch.isfinite(each).all()) for each in loop.federation.model.all)
    assert loop.federation.selector.clients.rounds[first] == 0
    rest = [each.update for each in workers.brought if each.update.client != first]
    by_hand = make_aggregator("fed-avg").aggregate(Weights.of(loop.task.model()), rest)
    assert torch.equal(loop.federation.model.parameters[0], by_hand.parameters[0])


def test_a_round_with_too_few_for_its_aggregator_leaves_the_model_as_it_is() -> None:
    loop = loop_of(config_of(aggregator={"kind": "krum", "malicious": 1}, deadline_s=3.0, selector="random", rounds=6))
    rounds = []
    for _ in range(6):
        before = state_of(loop)["model"] if rounds else ""
        rounds.append(done := loop.step())
        if before and len(done.aggregated) < 5:
            assert state_of(loop)["model"] == before
            assert set(done.left_out) == set(done.aggregated)
    few = {0 < len(each.aggregated) < 5 for each in rounds[1:]}
    assert few == {True, False}, "both happen here"


def test_who_would_wait_trains_longer_but_is_done_with_the_others(tmp_path: Path) -> None:
    table = made_up(60, period_s=DAY_S, seed=2)
    config = config_of(**table.write(tmp_path), local={"longer": True, "steps": 3, "batch_size": 1}, rounds=8)
    loop, workers = watched(config)
    loop.start()
    num_bytes, many = loop.federation.model.num_bytes, 0
    for _ in range(config.rounds):
        workers.units.clear()
        done = loop.step()
        for unit in workers.units:
            if isinstance(unit, Training):
                (client,), (steps,) = unit.clients, unit.steps
                assert 3 <= steps <= 33
                end_s = done.begin_s + table.duration_s(client, samples=steps, model_bytes=num_bytes)
                assert end_s <= done.clock_s + 1e-6
                stay = table.stay(client, done.begin_s)
                assert stay is not None
                assert end_s < stay[1]
                many += steps > 3
    assert many > 10


def test_the_learning_rate_decays_and_the_target_ends_the_job() -> None:
    loop, workers = watched(config_of(local={"lr_decay": 0.5, "decay_rounds": 2, "min_lr": 0.03}, rounds=5))
    loop.run()
    rates = {each.round_number: each.lr for each in workers.units if isinstance(each, Training)}
    assert rates == {1: 0.1, 2: 0.1, 3: 0.05, 4: 0.05, 5: 0.03}
    assert [point.round for point in loop.recorder.history.points] == [2, 4, 5]
    early = simulate(config_of(target=0.2, rounds=50))
    assert early.why == "target"
    assert early.final is not None
    assert early.final.accuracy >= 0.2
    assert early.time_to(0.2) == early.final.clock_s
    assert early.time_to(1.0) is None


def test_malicious_participants_are_counted() -> None:
    history = simulate(config_of(malicious=0.5, rounds=3))
    liars = task_of(config_of(malicious=0.5)).malicious
    assert liars.sum() == round(0.5 * len(liars))
    assert [each.malicious for each in history.rounds] == [
        int(liars[list(each.aggregated)].sum()) for each in history.rounds
    ]


# --- who is there ---


@dataclass
class Windows:
    windows: list[list[tuple[int, int]]] = field(default_factory=list)

    def config(self, folder: Path, **more: object) -> FedConfig:
        count = len(self.windows)
        table = Table([1000] * count, [10_000] * count, self.windows, DAY_S)
        few = {"clients": count, "partition": "iid"}
        return config_of(**table.write(folder), data=few, participants=2, overcommit=1.0, **more)


def test_where_nobody_is_there_the_clock_goes_on_to_the_next_arrival(tmp_path: Path) -> None:
    config = Windows([[(5000, 9000)], [(7000, 9000)], [(DAY_S - 10, DAY_S)]]).config(tmp_path, rounds=100)
    history = simulate(config)
    first = history.rounds[0]
    assert (first.begin_s, first.invited, first.there) == (5000.0, (0,), 1)
    over_night = next(each for each in history.rounds if each.begin_s > 9000)
    assert over_night.begin_s == DAY_S - 10
    assert over_night.lost == (2,), "ten seconds are not enough"
    assert over_night.aggregated == ()
    assert over_night.clock_s == DAY_S
    assert len(history.rounds) == 100


@pytest.mark.parametrize("aggregator", ["fed-avg", {"kind": "fed-buff", "size": 1}])
def test_where_nobody_ever_comes_the_job_says_so(aggregator: object, tmp_path: Path) -> None:
    config = Windows([[(5, 5)], [(7, 7)]]).config(tmp_path, aggregator=aggregator)
    with pytest.raises(NoClient, match="since 0 s of the virtual clock, and for ever"):
        simulate(config)


def test_a_deadline_that_nobody_meets_ends_rounds_and_the_job(tmp_path: Path) -> None:
    history = simulate(config_of(deadline_s=0.001, rounds=3))
    assert [each.clock_s for each in history.rounds] == pytest.approx([0.001, 0.002, 0.003])
    assert all(not each.aggregated and len(each.cut) == 8 for each in history.rounds)
    assert history.rounds[0].loss is None


# --- privacy ---


def spent(rate: float, rounds: int, noise: float = 0.8, delta: float = 1e-5) -> float:
    return epsilon_of(rounds * round_divergences(rate, noise), delta)


@pytest.mark.parametrize(("selector", "where"), [("random", "server"), ("oort", "server"), ("random", "client")])
def test_the_epsilon_of_each_test_is_the_accountants(selector: str, where: str) -> None:
    config = config_of(selector=selector, privacy={"noise_multiplier": 0.8, "where": where}, rounds=6)
    history = simulate(config)
    for point in history.points:
        sofar = history.rounds[: point.round]
        if (selector, where) == ("random", "server"):
            wanted = spent(8 / task_of(config).num_clients, point.round)
        else:
            counts = np.bincount([client for each in sofar for client in each.aggregated])
            wanted = spent(1.0, int(counts.max()))
        assert point.epsilon == pytest.approx(wanted, rel=1e-12)
    assert [each.epsilon for each in simulate(config_of(rounds=2)).points] == [None]


def test_no_private_update_is_longer_than_the_bound_and_bits_follow_from_the_seed() -> None:
    config = config_of(privacy={"clip": 0.01, "noise_multiplier": 0.0}, rounds=1, selector="random")
    loop = loop_of(config)
    loop.step()
    start = Weights.of(loop.task.model())
    moved = math.sqrt(sum(float(each.double().square().sum()) for each in start.change_to(loop.federation.model).all))
    assert 0 < moved <= 0.01
    noisy = [loop_of(config_of(privacy={"clip": 0.01}, rounds=1, seed=seed)) for seed in (0, 0, 1)]
    for each in noisy:
        each.step()
    bits = [state_of(each)["model"] for each in noisy]
    assert bits[0] == bits[1] != bits[2]


def test_a_trusted_server_adds_the_noise_once() -> None:
    clip = 1e-3  # so small that what the clients have learnt does not show beside the noise
    for where, deviation in (("server", clip / 6), ("client", clip / math.sqrt(6))):
        config = config_of(privacy={"clip": clip, "noise_multiplier": 1.0, "where": where}, rounds=1, selector="random")
        loop = loop_of(config)
        assert len(loop.step().aggregated) == 6
        moved = torch.cat(
            [each.flatten().double() for each in Weights.of(loop.task.model()).change_to(loop.federation.model).all]
        )
        assert moved.std().item() == pytest.approx(deviation, rel=0.15)


def test_parts_that_do_not_go_together_are_refused_before_the_first_round() -> None:
    for more, why in (
        ({"privacy": {"clip": 1.0}, "aggregator": "median"}, "median is no mean of all updates"),
        ({"privacy": {"clip": 1.0}, "aggregator": "fed-buff"}, "fed-buff is no mean"),
        ({"aggregator": {"kind": "fed-buff", "size": 100}}, "size=100 of fed-buff, and 60 clients"),
        ({"aggregator": "fed-buff", "local": {"longer": True}}, "local.longer with fed-buff"),
        ({"aggregator": {"kind": "fed-avg", "even": "False"}}, "even='False': use a value of type bool"),
        ({"aggregator": {"kind": "fed-buff", "size": 2.5}}, "size=2.5: use a value of type int"),
        ({"aggregator": {"kind": "krum", "malicious": 2}}, "krum of 6 updates.*needs at least 7"),
        ({"selector": {"kind": "refl", "accuracy": "high"}}, "selector refl: .*str"),
        ({"selector": {"kind": "oort", "speed": 3}}, "'speed' is unknown"),
        ({"devices": "nowhere.csv"}, "nowhere.csv"),
        ({"availability": "nowhere.pickle"}, "nowhere.pickle"),
    ):
        with pytest.raises(ConfigError, match=why):
            loop_of(config_of(**more)).start()
