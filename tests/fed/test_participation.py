"""How clients took part: values in, values out; and the same figures from a record, whoever wrote it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from command import command

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.history import Point, Round
from pliant.fed.participation import Bars, Participation, RoundClients, client_figures
from pliant.fed.report import read_curve
from pliant.fed.rounds.loop import simulate
from pliant.fed.rounds.storage import JobRecorder

ROUNDS = (
    RoundClients((0, 1, 2), (0, 1), (2,), (), (10.0, 20.0), (2.0, 1.0)),
    RoundClients((0, 1, 3), (0, 1), (), (3,), (12.0, 20.0), (1.0, math.nan)),
    RoundClients((0, 2, 3), (0, 3), (2,), (), (14.0, 90.0), (0.5, 4.0)),
)


def test_who_was_picked_how_often_and_how_evenly() -> None:
    found = client_figures(ROUNDS, clients=6)
    picked = found.picked
    assert (found.rounds, found.clients, picked.total, picked.clients, picked.never) == (3, 6, 9, 4, 2)
    assert (picked.least, picked.median, picked.mean, picked.most) == (0, 2.0, 1.5, 3)
    assert picked.most_often == ((0, 3), (1, 2), (2, 2), (3, 2))
    assert picked.least_often == ((1, 2), (2, 2), (3, 2), (0, 3))
    assert picked.jain == pytest.approx(9**2 / (6 * (9 + 4 + 4 + 4)))
    assert found.aggregated.jain == pytest.approx(6**2 / (6 * (9 + 4 + 1)))
    assert picked.bars == Bars((1.0, 2.0, 3.0, 4.0), (0, 3, 1))
    assert (found.cut.total, found.cut.most_often, found.lost.most_often) == (2, ((2, 2),), ((3, 1),))


def test_how_long_clients_take_and_how_well_the_model_suits_each() -> None:
    found = client_figures(ROUNDS, clients=6)
    took, loss = found.duration_s, found.loss
    assert took is not None
    assert loss is not None
    assert (took.clients, took.least, took.median, took.p90, took.most) == (3, 12.0, 20.0, 90.0, 90.0)
    assert took.highest == ((3, 90.0), (1, 20.0), (0, 12.0))
    assert loss.lowest == ((0, 0.5), (1, 1.0), (3, 4.0)), "the last one that is known of each"
    assert sum(took.bars.counts) == 3


def test_jains_index_is_1_for_the_same_share_and_1_n_for_a_single_client() -> None:
    even = client_figures([RoundClients((0, 1)), RoundClients((2, 3))], clients=4)
    alone = client_figures([RoundClients((3,))] * 5, clients=4)
    assert (even.picked.jain, alone.picked.jain) == (1.0, 0.25)
    # The control: without the number of clients, those who were never picked are not there to be treated unfairly.
    unknown = client_figures([RoundClients((3,))] * 5)
    assert (unknown.clients, unknown.picked.never, unknown.picked.jain) == (None, None, 1.0)
    assert client_figures([RoundClients()], clients=4).picked.jain is None


def test_a_round_that_is_taken_back_leaves_nothing() -> None:
    counted = Participation(6)
    for each in ROUNDS:
        counted.add(each)
    before = counted.figures()
    counted.add(RoundClients((5, 0), (5,), (0,), (), (7.0,)))
    assert counted.figures() != before
    counted.remove(RoundClients((5, 0), (5,), (0,), (), (7.0,)))
    assert counted.figures() == before


def test_damage_counts_as_not_there() -> None:
    read = RoundClients.from_json(
        {
            "invited": [1, "2", True, 2**70, 4],
            "aggregated": [1, 4],
            "cut": "all",
            "client_s": [1e300, None],
            "known": -3,
        }
    )
    assert (read.invited, read.aggregated, read.cut, read.known) == ((1, 4), (1, 4), (), 0)
    assert client_figures([read], 3).duration_s is None
    assert RoundClients.from_json({"aggregated": [1, 4], "client_s": [3.0]}).client_s == (), "whose would it be?"
    same = RoundClients((0, 1, 2, 3), (0, 1, 2, 3), client_s=(0.1 + 0.2, 0.3, 0.3, 0.3))
    assert (took := client_figures([same]).duration_s) is not None
    assert took.bars.counts == (4,), "equal but for rounding"


def test_a_hundred_thousand_clients_have_figures_as_small_as_ten() -> None:
    draw = np.random.default_rng(0)
    counted = Participation(100_000)
    begun_s = time.process_time()
    for _ in range(100):
        clients = draw.choice(100_000, 3000, replace=False).tolist()
        counted.add(RoundClients(tuple(clients), tuple(clients), (), (), tuple(draw.gamma(2, 10, 3000).tolist())))
    found = counted.figures()
    took_s = time.process_time() - begun_s
    assert len(json.dumps(found.as_json())) < 10_000
    assert found.picked.never == 100_000 - found.picked.clients
    assert 4000 < found.picked.never < 6000, "about 100,000 / e^3"
    assert took_s < 5, "some 0.7 s on a quiet machine"


def test_a_jobs_own_record_has_the_figures_of_its_history(tmp_path: Path) -> None:
    config = FedConfig(
        participants=4, overcommit=1.5, rounds=6, data={"kind": "digits", "clients": 12}, model="logistic",
        local={"steps": 2, "batch_size": 5, "lr": 0.1}, devices="synthetic", batching=0,
    )  # type: ignore[arg-type]  # fmt: skip
    history = simulate(config, folder=tmp_path)
    found = read_curve(tmp_path).clients
    assert found is not None
    rounds = history.rounds
    assert (found.clients, found.picked.total, found.aggregated.total) == (12, 36, 24)
    assert found.cut.total + found.lost.total == 12
    took_s: dict[int, list[float]] = {}
    for each in rounds:
        for client, seconds in zip(each.aggregated, each.client_s, strict=True):
            took_s.setdefault(client, []).append(seconds)
    slowest = max(took_s, key=lambda client: np.mean(took_s[client]))
    assert found.duration_s is not None
    assert found.duration_s.highest[0][0] == slowest
    last = {client: loss for each in rounds for client, loss in zip(each.aggregated, each.client_loss, strict=True)}
    assert found.loss is not None
    assert found.loss.clients == len(last)
    assert found.loss.most == max(each for each in last.values() if each is not None)
    assert rounds[-1].loss == pytest.approx(np.mean([each for each in rounds[-1].client_loss if each is not None]), rel=1e-5)


def test_a_job_with_privacy_tells_no_clients_loss(tmp_path: Path) -> None:
    config = FedConfig(
        participants=4, rounds=1, data={"kind": "digits", "clients": 12}, model="logistic", batching=0,
        local={"steps": 1, "batch_size": 5, "lr": 0.1}, privacy={"clip": 1.0, "noise_multiplier": 1.0},
    )  # type: ignore[arg-type]  # fmt: skip
    assert simulate(config, folder=tmp_path).rounds[0].client_loss == ()
    assert "client_loss" not in (tmp_path / "record.jsonl").read_text()


def job(folder: Path, *, is_tested: bool = True, clients: int = 6) -> str:
    """Return the folder of a job with the rounds of above."""
    made = JobRecorder(folder)
    made.begin(FedConfig(name="a"), None, {"clients": clients})
    for number, each in enumerate(ROUNDS, 1):
        made.round(
            Round(number, 60.0 * number, 60.0 * number + 60, each.invited, each.aggregated, each.cut, each.lost, {}, 1.0,
                  0.1, 6, 0, {}, each.client_s, client_loss=tuple(None if math.isnan(e) else e for e in each.client_loss))
        )  # fmt: skip
    if is_tested:
        made.test(Point(3, 240.0, 0.5, 0.9, 1.0))
    made.close()
    return str(folder)


def test_the_report_shows_how_clients_took_part(tmp_path: Path) -> None:
    one, two = job(tmp_path / "one"), job(tmp_path / "two", clients=9)
    said = command("report", one, "--json", str(tmp_path / "found.json"))
    assert said.exit_code == 0, said.exception
    for text in ("client 0 (3), client 1 (2)", "4 of 6; 2 never", "2 times (22.2%), client 2 most often: 2 times"):
        assert text in said.stdout
    (run,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert run["clients"] == json.loads(json.dumps(client_figures(ROUNDS, 6).as_json()))
    both = command("report", one, two).stdout
    assert [line.split()[:4] for line in both.splitlines() if line.startswith(("one", "two"))][2:] == [
        ["one", "6", "2", "0"],
        ["two", "9", "5", "0"],
    ]
    assert "client 0 (3)" not in both, "of several jobs, only the distributions"


def test_a_job_without_a_test_is_reported_by_its_clients(tmp_path: Path) -> None:
    said = command("report", job(tmp_path / "one", is_tested=False))
    assert said.exit_code == 0, said.exception
    assert "target: none, because no model was tested yet" in said.stdout
    assert "4 of 6; 2 never" in said.stdout
    with pytest.raises(ConfigError, match="--plot .*no model was tested yet; leave --plot out"):
        raise command("report", str(tmp_path / "one"), "--plot", str(tmp_path / "p.png")).exception
    tested = command("report", job(tmp_path / "two"), str(tmp_path / "one"), "--json", str(tmp_path / "found.json")).stdout
    assert "target: accuracy 50.00%, which all tested jobs reached; hours" in tested, "the other one has no test"
    assert json.loads((tmp_path / "found.json").read_text())["target_by"] == "the best that every tested job reached"
