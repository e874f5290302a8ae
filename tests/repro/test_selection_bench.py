"""`pliant bench fed --what select` says what all benches say, and its peer picks as ours does."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pliant_repro.bench.fed.selection import looped_selection
from typer.testing import CliRunner

from pliant.cli.main import build
from pliant.errors import ConfigError
from pliant.fed.selection.selectors import make_selector


def test_the_bench_writes_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "select.json"
    words = f"bench fed --what select --clients 3000 --pick 20 --repeat 2 --peers none --json {path}"
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--what train", "--what 'train': use select or simulate"),
        ("--pick 0", "--pick 0: use 1 or more"),
        ("--pick 1000 --clients 100", "--pick 1000 of --clients 100: pick as many as there are, or fewer"),
        ("--preset kuiper", "preset 'kuiper' is unknown"),
        ("--peers oort", "--peers 'oort': use one of loops, none"),
    ],
)
def test_wrong_values_are_named(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(build(), ["bench", "fed", *words.split()], catch_exceptions=False)


def test_the_peer_picks_by_the_same_rule() -> None:
    """Everybody has taken part, and the best are so far apart that chance has no say: both must pick the same."""
    draw = random.Random(3)
    clients = {number: [2.0**number, draw.lognormvariate(3, 0.1), 1.0] for number in range(40)}
    ours = make_selector("oort", exploration_factor=0.0)
    ours.register(range(40), duration_s=[seconds for _, seconds, _ in clients.values()])
    ours.select(1)
    ours.feedback(range(40), utility=[utility for utility, _, _ in clients.values()])
    assert ours.select(8).tolist() == sorted(looped_selection(clients, 8, 2, draw)) == list(range(32, 40))
