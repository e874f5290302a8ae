"""`pliant bench fed`: its results have the one form, and its peers do the same work as ours."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pliant_repro.bench import fed_sides
from pliant_repro.bench.fed import FedTimings, SimulateOptions, looped_selection, simulate_result

from pliant.fed.config import DataConfig, FedConfig, LocalConfig
from pliant.fed.selection.selectors import make_selector
from pliant.fed.trainer import ClientTrainer
from pliant.fed.work import Training, Weights


def test_a_selection_writes_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "select.json"
    words = f"bench fed --what select --clients 3000 --pick 20 --repeat 2 --json {path}"
    # In a process of its own, whose memory is told.
    command = [sys.executable, "-c", "from pliant.cli.main import main; main()", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert found["bench"] == "fed select"
    assert [cell["explored"] for cell in found["cells"]] == [0.0, 0.5, 1.0]
    assert found["ok"] is True
    assert 0 < found["ours"]["median_s"] == max(cell["ours"]["median_s"] for cell in found["cells"])
    assert 10e6 < found["ours"]["peak_bytes"] < 500e6


def test_the_peer_picks_by_the_same_rule() -> None:
    """Everybody has taken part, and the best are so far apart that chance has no say: both must pick the same."""
    draw = random.Random(3)
    clients = {number: [2.0**number, draw.lognormvariate(3, 0.1), 1.0] for number in range(40)}
    ours = make_selector("oort", preset="paper", exploration_factor=0.0)
    ours.register(range(40), duration_s=[seconds for _, seconds, _ in clients.values()])
    ours.select(1)
    ours.feedback(range(40), utility=[utility for utility, _, _ in clients.values()])
    assert ours.select(8).tolist() == sorted(looped_selection(clients, 8, 2, draw)) == list(range(32, 40))


def small_job() -> FedConfig:
    """The bench's job on fewer, smaller images, which are read in no time."""
    local = LocalConfig(steps=3, batch_size=5, lr=0.05)
    data = DataConfig(kind="digits", clients=20)
    return fed_sides.make_job(20, 2, rounds=1).model_copy(update={"data": data, "local": local, "batching": 1})


def test_a_client_of_the_peers_does_the_work_of_ours() -> None:
    task, module = fed_sides.task_and_module(small_job().model_dump_json())
    start = Weights.of(module)
    fed_sides.train_client(task, module, 5, 2)
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
    options = SimulateOptions(pick=20, repeat=2)
    facts: dict[str, object] = {"data": "fashion-mnist", "batching": 4}
    ours = FedTimings(rounds=[[0.2, 0.4, 0.2], [0.25] * 3], facts=facts)
    flower, bare = FedTimings(rounds=[[0.6] * 3, [1.0] * 3]), FedTimings(failure="exit code 1")
    found: Any = simulate_result(options, {"what": "simulate"}, {"ours": ours, "flower": flower, "bare": bare})
    peers = found["peers"]
    assert found["ours"]["clients_per_s"] == 80.0
    assert found["ours"]["turns_clients_per_s"] == [100.0, 80.0]
    assert peers["flower"]["clients_per_s"] == 25.0
    assert found["ratio"] == peers["flower"]["speedup"] == pytest.approx(3.5)
    assert (peers["flower"]["speedup_least"], peers["flower"]["speedup_most"]) == (pytest.approx(3.0), 4.0)
    assert found["ok"] is True
    assert peers["bare"] == {"clients_per_s": None, "failure": "exit code 1"}
    flower.rounds = [[0.3], [0.3]]
    assert simulate_result(options, {}, {"ours": ours, "flower": flower, "bare": bare})["ok"] is False


def test_the_bare_loop_is_timed_by_round() -> None:
    seconds: Any = fed_sides.simulate_bare(small_job(), rounds=2)["seconds"]
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif("PLIANT_FULL" not in os.environ, reason="half a minute, most of it Ray's: with PLIANT_FULL=1")
def test_all_sides_run(tmp_path: Path) -> None:
    path = tmp_path / "simulate.json"
    words = f"bench fed --what simulate --rounds 2 --repeat 1 --clients 300 --pick 4 --json {path}"
    command = [sys.executable, "-c", "from pliant.cli.main import main; main()", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert found["bench"] == "fed simulate"
    assert found["ours"]["clients_per_s"] > 0
    assert found["ours"]["num_samples"] == 2
    assert set(found["peers"]) == {"flower", "bare"}
    assert all(each["clients_per_s"] > 0 for each in found["peers"].values())
    assert ended.returncode == (0 if found["ok"] else 1)
