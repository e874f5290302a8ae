"""`pliant bench fed --what simulate` says what all benches say; its sides do the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pliant_repro.bench.fed import simulate, work
from pliant_repro.bench.fed.simulate import SimulateOptions
from typer.testing import CliRunner

from pliant.cli.main import build
from pliant.errors import ConfigError
from pliant.fed.config import DataConfig, FedConfig
from pliant.fed.trainer import ClientTrainer
from pliant.fed.work import Training, Weights


def small_job() -> FedConfig:
    """The bench's job on fewer, smaller images, which are read in no time."""
    job = work.job(clients=20, participants=2, steps=3, batch_size=5, rounds=2, batching=1, seed=7)
    return job.model_copy(update={"data": DataConfig(kind="digits", clients=20)})


def test_a_client_of_the_peers_does_the_work_of_ours() -> None:
    task, module = work.known(small_job().model_dump_json())
    start = Weights.of(module)
    work.train(task, module, 5, 2)
    theirs = start.change_to(Weights.of(module))
    done = ClientTrainer(task).run(start, Training(2, (5,), (3,), task.config.local.lr))
    assert isinstance(done, tuple)
    assert len(theirs.parameters) == len(done[0].update.change.parameters)
    for ours, other in zip(done[0].update.change.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(ours, other)
    again = ClientTrainer(task).run(start, Training(1, (5,), (3,), task.config.local.lr))
    assert isinstance(again, tuple)
    assert not torch.allclose(again[0].update.change.parameters[0], theirs.parameters[0]), "the control: another round"


def test_the_result_says_how_much_faster() -> None:
    options = SimulateOptions(participants=20, turns=2, cores=1)
    turns = {"ours": [[0.2, 0.4, 0.2], [0.25] * 3], "flower": [[0.6] * 3, [1.0] * 3], "bare": []}
    facts = {"ours": {"data": "fashion-mnist", "batching": 4}, "flower": {"version": "1.41.0"}}
    found = simulate._result(options, {"what": "simulate"}, turns, facts, {"bare": "exit code 1"})
    ours, peers = found["ours"], found["peers"]
    assert isinstance(ours, dict)
    assert isinstance(peers, dict)
    assert ours["clients_per_s"] == 80.0
    assert ours["turns_clients_per_s"] == [100.0, 80.0]
    assert peers["flower"]["clients_per_s"] == 25.0
    assert found["ratio"] == peers["flower"]["speedup"] == pytest.approx(3.5)
    assert (peers["flower"]["speedup_least"], peers["flower"]["speedup_most"]) == (pytest.approx(3.0), 4.0)
    assert found["ok"] is True
    assert peers["bare"] == {"clients_per_s": None, "failure": "exit code 1"}
    slow = simulate._result(options, {}, {**turns, "flower": [[0.3], [0.3]]}, facts, {"bare": "exit code 1"})
    assert slow["ok"] is False


def test_the_bare_loop_is_timed_by_round(tmp_path: Path) -> None:
    found = simulate._bare(SimulateOptions(clients=20, participants=2, rounds=1), small_job(), "")
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif("PLIANT_FULL" not in os.environ, reason="half a minute, most of it Ray's: with PLIANT_FULL=1")
def test_all_sides_run(tmp_path: Path) -> None:
    peers = "flower,bare"
    path = tmp_path / "simulate.json"
    words = (
        f"bench fed --what simulate --quick --clients 300 --pick 4 --steps 2 --batching 2 --peers {peers} --json {path}"
    )
    command = [sys.executable, "-c", "from pliant.cli.main import main; main()", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert found["bench"] == "fed simulate"
    assert found["ours"]["clients_per_s"] > 0
    assert (found["ours"]["num_samples"], found["ours"]["batching"]) == (2, 2)
    assert set(found["peers"]) == {"flower", "bare"}
    assert all(each["clients_per_s"] > 0 for each in found["peers"].values())
    assert ended.returncode == (0 if found["ok"] else 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pick 101", "--pick 101: there are 100 clients"),
        ("--cores 1000", "--cores 1000: this process may use"),
        ("--peers gloo", "--peers 'gloo': use flower, bare, or none"),
        ("--rounds 0", "--rounds 0: use 1 or more"),
    ],
)
def test_wrong_values_are_named(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(build(), ["bench", "fed", "--what", "simulate", *words.split()], catch_exceptions=False)
