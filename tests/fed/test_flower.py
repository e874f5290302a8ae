"""Our strategy for Flower, on a grid in this process: who is asked, what counts, what is folded, and how it goes on."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import command
from flower_loopback import NEVER, Loopback, by_hand, rounds_in, same
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from squares.client_app import app, trained
from squares.server_app import BUFFERS, config_of, initial

from pliant.errors import CheckpointError, ConfigError, NoClient
from pliant.fed.flower import Guided, introduction, metrics
from pliant.fed.flower.strategy import ArrayLayout
from pliant.fed.report import read_curve
from pliant.fed.selection.base import statistical_utility

ONCE = {"kind": "oort", "blacklist_rounds": 1, "blacklist_max_len": 1.0}
"""Never twice the same client."""
RUN = {"rounds": 4, "participants": 3, "overcommit": 1.4}


def federation(clients: int = 6, **given: Any) -> Loopback:
    grid = Loopback(given.pop("app", app), **given)
    for client in range(clients):
        grid.join(client)
    return grid


def strategy(folder: Path | None = None, least: int = 4, **more: Any) -> Guided:
    settings = {**RUN, **{name: more.pop(name) for name in list(more) if name in RUN}}
    options = {name: more.pop(name) for name in ("identity", "patience_s", "timeout_s") if name in more}
    return Guided(config_of(settings, **more), folder=folder, buffers=BUFFERS, least=least, poll_s=0.001, **options)


@pytest.mark.parametrize("kind", ["fed-avg", "fed-yogi"])
def test_rounds_are_made_by_the_first_who_answer_and_folded_in_the_order_of_clients(tmp_path: Path, kind: str) -> None:
    """Two of those invited in round 2 never answer; the others answer in some order."""
    grid = federation(looks=lambda client, number: NEVER if (client, number) == (1, 1) else client * 7 % 4)
    found = strategy(tmp_path, aggregator=kind).start(grid, initial())
    rounds = rounds_in(tmp_path)
    assert [len(each["invited"]) for each in rounds] == [4, 4, 4, 4]
    assert all(len(each["aggregated"]) == 3 and len(each["cut"]) == 1 and not each["lost"] for each in rounds)
    for each in rounds:
        first = sorted(each["invited"], key=lambda client: (client * 7 % 4, client))
        if each["round"] == 1 and 1 in each["invited"]:
            first.remove(1)
        assert each["aggregated"] == sorted(first[:3])
    assert same(found.arrays, by_hand(rounds, kind))
    other = [dict(each, aggregated=each["invited"][:3]) for each in rounds]
    assert not same(found.arrays, by_hand(other, kind)), "the control: who counts changes the model"


def test_the_order_of_arrival_does_not_change_a_bit(tmp_path: Path) -> None:
    """In float64, where the order of a sum shows: rounded to less, it hardly ever does."""
    every = {"overcommit": 1.0, "participants": 6, "least": 6}
    arrays = ArrayRecord({**initial(), "weight": Array(np.zeros(6)), "mean": Array(np.zeros(6))})
    one = strategy(tmp_path / "1", **every).start(federation(), arrays)
    two = strategy(tmp_path / "2", **every).start(federation(looks=lambda client, number: 9 - client), arrays)
    assert [each["aggregated"] for each in rounds_in(tmp_path / "2")] == [[*range(6)]] * 4
    assert same(one.arrays, two.arrays)


def test_who_was_cut_is_not_asked_again_until_it_has_answered() -> None:
    grid = federation(5, looks=lambda client, number: NEVER if client == 2 and number == 1 else 0)
    guided = strategy(overcommit=5 / 3, rounds=3)
    guided.start(grid, initial(), num_rounds=2)
    assert (1, 2) in grid.asked
    assert (2, 2) not in grid.asked
    for sent in grid.sent.values():
        sent.looks = 0
    guided.start(grid, initial(), num_rounds=1)
    assert grid.asked[-5:] == [(1, client) for client in range(5)]


def test_a_server_that_is_started_again_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def looks(client: int, number: int) -> int:
        return (client + number) % 3

    job = {"aggregator": "fed-adam", "overcommit": 1.0, "least": 6}
    whole = strategy(tmp_path / "whole", **job).start(federation(looks=looks), initial())
    parts = tmp_path / "parts"
    strategy(parts, **job).start(federation(looks=looks), initial(), num_rounds=2)
    # another SuperLink: the same clients behind other nodes
    grid = Loopback(app, looks=looks)
    for client in range(6):
        grid.join(client, node_id=7 + client)
    rest = strategy(parts, **job).start(grid, initial())
    assert {number for number, _ in grid.asked} == {3, 4}
    picked = [each["invited"] for each in rounds_in(tmp_path / "whole")]
    assert [each["invited"] for each in rounds_in(parts)] == picked
    assert same(rest.arrays, whole.arrays)
    with pytest.raises(CheckpointError, match="aggregator"):
        strategy(parts, **{**job, "aggregator": "fed-avg"}).start(grid, initial())


def test_a_client_that_fails_or_sends_another_model_is_replaced() -> None:
    answers = ClientApp()

    @answers.query()
    def who(message: Message, context: Context) -> Message:
        return Message(introduction(context, samples=3), reply_to=message)

    @answers.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        if client == 1:
            arrays["weight"] = np.zeros(5, np.float32)
        if client == 2:
            arrays["more"] = np.zeros(5, np.float32)
        if client == 3:
            arrays["weight"] = np.full(6, np.nan, np.float32)
        told = metrics([1.0], samples=0 if client == 4 else 3)  # how long it took is left to the server's watch
        record = ArrayRecord({name: Array(np.asarray(each)) for name, each in arrays.items()})
        return Message(RecordDict({"arrays": record, "metrics": told}), reply_to=message)

    grid = federation(8, app=answers, raises=lambda client, number: client == 0)
    guided = strategy(participants=3, overcommit=8 / 3, rounds=1, least=8)
    found = guided.start(grid, initial())
    assert guided.round is not None
    assert guided.round.aggregated == (3, 5, 6)
    assert guided.round.lost == (0, 1, 2, 4)
    assert guided.round.cut == (7,)
    assert list(guided.round.left_out) == [3]
    assert np.isfinite(found.arrays["weight"].numpy()).all()
    assert (guided.selector.clients.duration_s[[3, 5, 6]] < 60).all()


def test_what_clients_tell_reaches_the_selector() -> None:
    guided = strategy(rounds=1, overcommit=1.0, participants=6, least=6)
    guided.start(federation(looks=lambda client, number: client), initial())
    known = guided.selector.clients
    assert known.size.tolist() == [20 + client for client in range(6)]
    for client in range(6):
        _, losses = trained(client, 1, {name: array.numpy() for name, array in initial().items()})
        assert known.utility[client] == pytest.approx(statistical_utility(losses))
        assert known.loss[client] == pytest.approx(losses.mean())
    assert known.duration_s.tolist() == [2.0 + client for client in range(6)], "the hints were a second less"


def test_clients_are_who_they_say_they_are_and_else_their_nodes() -> None:
    grid = federation(3)
    guided = strategy(rounds=3, participants=2, overcommit=1.5, least=3)
    guided.start(grid, initial(), num_rounds=1)
    # client 1 was killed and is back behind another node, while the SuperLink still lists the old one
    grid.join(1, node_id=5)
    guided.start(grid, initial(), num_rounds=1)
    assert guided.nodes.node_of(1) == 5
    assert guided.selector.clients.ids.tolist() == [0, 1, 2]

    silent = ClientApp()
    silent.train()(lambda message, context: app(message, context))
    nodes = strategy(rounds=1, participants=2, overcommit=1.5, least=3)
    nodes.start(federation(3, app=silent), initial())
    assert len(nodes.selector.clients) == 3
    unasked = strategy(rounds=1, participants=2, overcommit=1.5, least=3, identity="node")
    unasked.start(federation(3), initial())
    assert unasked.selector.clients.ids.tolist() == nodes.selector.clients.ids.tolist()


def test_a_round_without_enough_clients_begins_after_a_while_and_ends_at_its_deadline() -> None:
    grid = federation(2, looks=lambda client, number: NEVER if client else 0)
    guided = strategy(rounds=1, patience_s=0.05, deadline_s=0.05)
    guided.start(grid, initial())
    assert guided.round is not None
    assert (guided.round.there, guided.round.aggregated, guided.round.cut) == (2, (0,), (1,))


def test_a_selector_that_wants_nobody_is_waited_for_and_then_named() -> None:
    guided = strategy(rounds=30, participants=2, overcommit=1.0, least=2, patience_s=0.05, selector=ONCE)
    with pytest.raises(NoClient):
        guided.start(federation(2), initial())
    assert guided.round is not None
    assert guided.round.round < 30


def test_flowers_privacy_goes_around_ours() -> None:
    """Its wrappers send, wait for all, and hand over what came: of that the first count."""
    grid, guided = federation(), strategy(rounds=1)
    private = DifferentialPrivacyServerSideFixedClipping(guided, 1e-3, clipping_norm=0.5, num_sampled_clients=3)
    found = private.start(grid, initial(), num_rounds=1, train_config=ConfigRecord({"mine": 1.5}))
    assert guided.round is not None
    assert len(guided.round.aggregated) == 3
    norm = np.linalg.norm(found.arrays["weight"].numpy())
    assert 0.1 < norm < 0.6, "as far as the clip, and some noise"


def test_a_job_ends_at_its_target(tmp_path: Path) -> None:
    found = strategy(tmp_path, rounds=9, target=0.5, evaluate_every=2).start(
        federation(), initial(), evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": number / 8, "loss": 1.0})
    )
    assert list(found.evaluate_metrics_serverapp) == [2, 4]
    assert json.loads((tmp_path / "record.jsonl").read_text().splitlines()[-1])["why"] == "target"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"privacy": {"clip": 1.0}}, "noise is not added here"),
        ({"aggregator": "fed-buff"}, "not asynchronous"),
        ({"local": {"longer": True}}, "local.longer: on Flower, .* leave it out"),
        ({"malicious": 0.1}, "malicious 0.1: on Flower, .* leave it out"),
        ({"local": {"optimizer": "adamw"}}, "local.optimizer adamw: on Flower, the ClientApp makes .* choose it there"),
        ({"local": {"momentum": 0.9}}, "local.momentum 0.9: on Flower, the ClientApp makes"),
        ({"local": {"weight_decay": 0.1}}, "local.weight_decay 0.1: on Flower, the ClientApp makes"),
        ({"selector": "best"}, "selector 'best' is unknown"),
    ],
)
def test_jobs_that_cannot_be_done_are_refused(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    """By the constructor, which has no grid to send anything through; and nothing is written."""
    with pytest.raises(ConfigError, match=says) as refused:
        strategy(tmp_path, **more)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_done_is_not_refused() -> None:
    """The control: the same fields with the values of a job that leaves them out."""
    strategy(local={"optimizer": "sgd", "momentum": 0.0, "longer": False}, malicious=0.0, privacy=None, overcommit=1.4)


def test_the_record_has_the_same_figures_of_clients_as_a_simulation(tmp_path: Path) -> None:
    grid = federation(8, looks=lambda client, number: NEVER if (client, number) == (1, 1) else client)
    strategy(tmp_path).start(grid, initial())
    rounds = rounds_in(tmp_path)
    found = read_curve(tmp_path).clients
    assert found is not None, "although nothing was tested"
    assert (found.rounds, found.clients) == (4, 8), "by their introductions: no job file says how many there are"
    picked = Counter(client for each in rounds for client in each["invited"])
    assert dict(found.picked.most_often).items() <= picked.items()
    assert found.picked.never == 8 - len(picked)
    assert found.picked.jain == pytest.approx(16**2 / (8 * sum(times**2 for times in picked.values())))
    assert found.cut.total == 4
    assert found.duration_s is not None
    assert dict(found.duration_s.highest) == {
        client: 2.0 + client for client in sorted({client for each in rounds for client in each["aggregated"]})[-5:]
    }, "as the clients report it"
    last = {
        client: loss for each in rounds for client, loss in zip(each["aggregated"], each["client_loss"], strict=True)
    }
    assert found.loss is not None
    assert found.loss.clients == len(last)
    assert found.loss.most == max(last.values())
    said = command("report", str(tmp_path))
    assert said.exit_code == 0, said.exception
    assert dict(found.facts())["clients picked"] in said.stdout


def test_a_duration_that_cannot_be_is_replaced_by_the_servers_own(tmp_path: Path) -> None:
    boastful = ClientApp()
    boastful.query()(lambda message, context: app(message, context))

    @boastful.train()
    def train(message: Message, context: Context) -> Message:
        told = metrics([1.0], samples=3, duration_s=float("inf"))
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": told}), reply_to=message)

    strategy(tmp_path, rounds=1).start(federation(app=boastful), initial())
    (done,) = rounds_in(tmp_path)
    assert len(done["client_s"]) == 3
    assert all(0 < took_s < 60 for took_s in done["client_s"])


def test_tests_on_clients_are_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    grid, guided = federation(), strategy(tmp_path, rounds=1)
    with pytest.raises(ConfigError, match="evaluate_config: tests on clients are not supported; .*evaluate_fn"):
        guided.start(grid, initial(), evaluate_config=ConfigRecord({"split": "test"}))
    assert (grid.asked, grid.sent, list(tmp_path.iterdir())) == ([], {}, [])
    assert guided.configure_evaluate(1, initial(), ConfigRecord(), grid) == [], "nor by a wrapper of Flower's"


def test_wrong_arrays_and_nodes_are_named() -> None:
    with pytest.raises(ConfigError, match="buffer 'var' is not among the arrays"):
        ArrayLayout.of(initial(), ("var",))
    with pytest.raises(ConfigError, match="holds no arrays"):
        ArrayLayout.of(ArrayRecord())
    with pytest.raises(ConfigError, match="partition-id is None: start the SuperNode with"):
        introduction(Context(0, 0, {}, RecordDict(), {}), samples=1)


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples" / "flower"
    monkeypatch.syspath_prepend(str(folder))
    from federated_digits.client_app import app as client
    from federated_digits.server_app import app as server

    run = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    run["folder"] = str(tmp_path)
    server(federation(run["clients"], app=client, run_config=run), Context(0, 0, {}, RecordDict(), run))
    facts = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [fact["accuracy"] for fact in facts if fact["kind"] == "test"][-1] > 0.6
