"""`Session.join` in a script that two real runners (`pliant run`) start, and in one that nobody started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gang import free_port

from pliant.elastic.member import Session
from pliant.errors import NotLaunched

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_leaks")]

DEADLINE_S = 60.0
SCRIPT = """
    import torch
    from pliant.elastic.member import Session

    with Session.join(timeout_s=40) as session:
        engine = session.engine
        tensor = torch.full((1_000_003,), engine.rank + 1.0)
        engine.all_reduce("gradient", tensor).wait(30)
        assert bool((tensor == sum(range(1, engine.size + 1))).all())
        sent = sorted(engine.counters().egress_bytes.values())
        print("rank", engine.rank, "of", engine.size, "on", session.view.hosts[engine.rank], end=" ")
        print("by", engine.strategy.name, "has", tensor[-1].item(), "and sent", sum(sent))
"""
LINE = re.compile(
    r"^\[(\S+)\.(\d+)::stdout\] rank (\d) of 3 on (\S+) by (\w+) has ([\d.]+) and sent (\d+)$", re.MULTILINE
)


@contextmanager
def runner(directory: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start `pliant run` with these arguments; kill it at the end of the block if it still runs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PLIANT_", "XDG_"))}
    program = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run"]
    with subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**environ, "HOME": str(directory)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(output: str) -> list[dict[str, str]]:
    names = ("address", "port", "rank", "host", "strategy", "sum", "sent")
    return sorted((dict(zip(names, found, strict=True)) for found in LINE.findall(output)), key=lambda one: one["rank"])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_two_runners_and_a_ring(script: Path) -> None:
    port = free_port("0.0.0.0")
    flags = ["-np", 3, "-strategy", "RING", "-H", "127.0.0.1:2,127.0.0.2:1", "-port", port]
    with (
        runner(script.parent, *flags, "-self", "127.0.0.1", script.name) as first,
        runner(script.parent, *flags, "-self", "127.0.0.2", script.name) as second,
    ):
        ends = [process.communicate(timeout=DEADLINE_S) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ends
    assert [len(lines(output)) for output, _ in ends] == [2, 1], ends
    found = lines(ends[0][0] + ends[1][0])
    assert [(one["rank"], one["host"]) for one in found] == [("0", "127.0.0.1"), ("1", "127.0.0.1"), ("2", "127.0.0.2")]
    assert {(one["strategy"], one["sum"]) for one in found} == {("RING", "6.0")}
    # A ring of three sends 2(n-1)/n of the tensor from each worker, give or take where its slices end.
    assert all(0.9 < int(one["sent"]) / (4 / 3 * 4_000_012) < 1.1 for one in found), found
    for (output, _), count in zip(ends, (2, 1), strict=True):
        assert f"all {count}/{count} local workers finished" in output.splitlines()[-1], output


def test_a_script_without_a_runner_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIANT_WORKER", raising=False)
    with pytest.raises(NotLaunched, match="start this script with `pliant run`"), Session.join():
        pass
