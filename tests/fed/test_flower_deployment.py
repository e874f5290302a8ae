"""A federation on Flower's own processes: SuperLink and SuperNodes on loopback, with TLS and node authentication."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from flower_loopback import by_hand, rounds_in
from flower_processes import APP, EXAMPLE, Deployment, node_key, until
from gang import FULL
from proc import command_line, descendants
from squares.server_app import BUFFERS

from pliant.fed.flower.strategy import ArrayLayout
from pliant.fed.rounds.federation import CHECKPOINT_FILE
from pliant.train import checkpoint_file

pytestmark = pytest.mark.processes


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Deployment]:
    """Forked from a process that has imported Flower: it would be imported by each of ten processes."""
    with forked.forking("flower_in_a_hurry"):
        deployment = Deployment(tmp_path)
        yield deployment
        deployment.close()


@pytest.mark.timeout(300)
def test_a_node_is_killed_in_a_round_and_comes_back(flower: Deployment, tmp_path: Path) -> None:
    """Two clients, of whom one makes a round. One is killed in round 1; in round 2 it is needed, for the other one hangs."""
    gates, out = tmp_path / "gates", tmp_path / "out"
    gates.mkdir()
    for name in ("0-1", "1-1", "0-2"):
        (gates / f"shut-{name}").touch()
    keys = [node_key(tmp_path / f"node{i}") for i in range(3)]
    flower.superlink()
    flower.register(keys)
    nodes = [flower.supernode(f"node{client}", client, keys[client]) for client in range(2)]
    settings = {"rounds": 2, "participants": 1, "overcommit": 2.0, "least": 2}
    flower.run(APP, {**settings, "gates": str(gates), "folder": str(out)})
    until(lambda: all((gates / f"here-{client}-1").exists() for client in range(2)), "both are in round 1")
    flower.kill(nodes[1])
    for client in range(2):
        (gates / f"shut-{client}-1").unlink()
    until(lambda: rounds_in(out), "round 1 is made by the other one")
    flower.supernode("again", 1, keys[2])
    until(lambda: len(rounds_in(out)) == 2, "it is back for round 2")

    first, second = rounds_in(out)
    assert first["invited"] == second["invited"] == [0, 1]
    assert (first["aggregated"], second["aggregated"]) == ([0], [1])
    until(lambda: checkpoint_file.read(out / CHECKPOINT_FILE).step == 2, "the state is kept")
    saved = checkpoint_file.read(out / CHECKPOINT_FILE).state
    assert isinstance(saved, dict)
    expected = by_hand([first, second])
    weights = ArrayLayout.of(expected, BUFFERS).weights(expected)
    assert all(map(torch.equal, saved["model"]["parameters"], weights.parameters))
    assert all(map(torch.equal, saved["model"]["buffers"], weights.buffers))


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="a minute of imports of torch: with PLIANT_FULL=1")
def test_the_example_is_deployed_and_goes_on_after_its_server_was_killed(flower: Deployment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = [node_key(tmp_path / f"node{i}") for i in range(4)]
    flower.superlink()
    flower.register(keys[:3])
    for client in range(2):
        flower.supernode(f"node{client}", client, keys[client])
    deceived = flower.supernode("deceived", 5, keys[2], trusts="other.pem")
    settings = {"participants": 2, "overcommit": 1.0, "least": 2, "clients": 2, "folder": str(out)}
    flower.run(EXAMPLE, {"rounds": 50, **settings})
    until(lambda: (out / CHECKPOINT_FILE).exists(), "a round is done, and kept")
    for pid in descendants(flower.processes[0].pid):
        if "flwr-serverapp" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    done = checkpoint_file.read(out / CHECKPOINT_FILE).step
    flower.run(EXAMPLE, {"rounds": done + 1, **settings})
    until(lambda: '"end"' in (out / "record.jsonl").read_text(), "the rest is done")
    rounds = rounds_in(out)
    assert [each["round"] for each in rounds] == list(range(1, done + 2))
    assert rounds[-1]["clock_s"] > rounds[-2]["clock_s"]

    until(
        lambda: "CERTIFICATE_VERIFY_FAILED" in flower.log("deceived"), "a node that trusts another authority gives up"
    )
    flower.kill(deceived)
    flower.supernode("stranger", 5, keys[3])
    until(lambda: 'activate-node HTTP/1.1" 412' in flower.log("link"), "a node whose key is not registered is refused")
