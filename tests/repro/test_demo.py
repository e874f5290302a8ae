"""`pliant demo` as its user runs it: it says yes only where every bit agrees, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from gang import run
from pliant_repro.figures.demo import REPLICAS, SEED, Demo, DemoOptions, Verdict, compare
from pliant_repro.figures.launch import RunLog, Task, save_digits
from typer.testing import CliRunner

from pliant.cli.main import build
from pliant.errors import ConfigError

MAIN = "from pliant.cli.main import main; main()"
MARK = "DEMO_TEST_MARK"
"""In the environment of all processes of a demo that a test starts."""
DEADLINE_S = 110.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, MARK: str(folder), "COLUMNS": "140"}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "demo", *arguments],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def running(folder: Path) -> list[str]:
    """The processes that the demo in `folder` has started, and that still run."""
    needle = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and needle in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


def until_none_runs(folder: Path) -> None:
    """The kernel may take a moment to end who was killed."""
    deadline_s = time.monotonic() + 5
    while left := running(folder):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    until_none_runs(tmp_path)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON result of a real demo."""
    folder = tmp_path_factory.mktemp("demo")
    words = [forked.PLIANT, "demo", "--epochs", "5", "--pace", "0.09", "--json", "demo.json"]
    demo = forked.run(words, cwd=folder, env={**os.environ, "COLUMNS": "140"}, timeout=DEADLINE_S)
    assert demo.returncode == 0, demo
    assert "bit-identical: yes" in demo.stdout
    assert (folder / "pliant-demo.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "demo.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.processes
@pytest.mark.timeout(DEADLINE_S + 10)
def test_resizes_and_a_kill_do_not_change_a_bit(result: dict[str, Any]) -> None:
    assert result["bit_identical"]
    assert [event["workers"] for event in result["events"]] == ["4", "4 -> 2", "2 -> 1", "1 -> 2", "2 -> 3", "3 -> 1"]
    assert [step["workers"] for step in result["pliant"]["steps"]][-1] == 1
    assert len(result["ddp"]["steps"]) == len(result["pliant"]["steps"]) == 60


@pytest.mark.processes
@pytest.mark.timeout(DEADLINE_S + 10)
def test_one_unit_in_the_last_place_of_one_weight_is_found(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real demo's own steps, and those of a DDP that is spoiled: forked here, which saves ten seconds of imports."""
    from pliant_repro.figures.program import train_ddp

    def conduct(demo: Demo, watch: object) -> Verdict:
        journal = tmp_path / "spoiled"
        journal.mkdir()
        task = Task(
            model="digits", mode="ddp", epochs=demo.options.epochs, replicas=REPLICAS, seed=SEED, digest=True,
            data=save_digits(tmp_path / "digits.npz"), journal=str(journal), nudge=demo.options.nudge,
        )  # fmt: skip
        run(train_ddp, REPLICAS, task, str(tmp_path / "store"))
        demo.reference = RunLog(journal)
        demo.reference.read()
        lines = [line for step in result["pliant"]["steps"][: demo.options.num_steps] for line in lines_of(step)]
        demo.elastic = log_of(tmp_path / "pliant", *lines)
        return compare(demo.reference, demo.elastic, num_steps=demo.options.num_steps, replicas=REPLICAS)

    monkeypatch.setattr(Demo, "run", conduct)
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(build(), ["demo", "--epochs", "1", "--path", "", "--nudge", "7"])
    assert answer.exit_code == 1, (answer.output, answer.exception)
    assert "bit-identical: NO, first at step 7: SHA-256" in answer.output
    assert "bit-identical: yes" not in answer.output


def lines_of(step: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Yield the log lines of a step in the demo's --json."""
    at = {"step": step["step"]}
    for replica, losses in enumerate(step["losses"]):
        yield from (
            {"kind": "turn", "replica": replica, "loss": loss, "size": step["workers"], **at} for loss in losses
        )
    yield from ({"kind": "state", "digest": digest, **at} for digest in step["sha256"])


@pytest.mark.processes
@pytest.mark.timeout(DEADLINE_S + 10)
def test_an_interrupted_demo_leaves_nothing(folder: Path) -> None:
    demo = start(folder, "--epochs", "1000")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "pliant starts" in line:
            break
    deadline_s = time.monotonic() + 30
    while not any("program.py" in command for command in running(folder)):
        assert time.monotonic() < deadline_s, "no job was started"
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 128 + signal.SIGINT
    assert not (folder / "pliant-demo.png").exists()
    until_none_runs(folder)


@pytest.mark.parametrize("path", ["4", "2,2", "5", "1,kill", "some"])
def test_a_path_that_cannot_be_taken_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--path"):
        DemoOptions(path=tuple(path.split(",")))


def log_of(folder: Path, *lines: dict[str, object]) -> RunLog:
    folder.mkdir(exist_ok=True)
    (folder / "1.jsonl").write_text("".join(json.dumps({"at_s": 0, **line}) + "\n" for line in lines) + '{"kind": "tu')
    log = RunLog(folder)
    log.read()
    return log


def turn(loss: float) -> dict[str, object]:
    return {"kind": "turn", "step": 0, "replica": 0, "loss": loss, "size": 1}


STATE: dict[str, object] = {"kind": "state", "step": 0, "digest": "aa"}


def test_what_is_missing_or_was_once_different_is_not_the_same(tmp_path: Path) -> None:
    reference = log_of(tmp_path / "reference", turn(0.5), STATE)
    for number, (lines, difference) in enumerate(
        [
            ([turn(0.5), STATE], None),
            ([turn(0.5), turn(0.5), STATE], None),  # torn, and done again
            ([turn(0.5)], 0),
            ([STATE], 0),
            ([turn(0.25), turn(0.5), STATE], 0),
            ([turn(0.5), STATE, {**STATE, "digest": "bb"}], 0),
            ([turn(0.5), STATE, {**STATE, "step": 1}], 1),
        ]
    ):
        found = compare(reference, log_of(tmp_path / str(number), *lines), num_steps=1, replicas=1)
        assert found.first_difference == difference, f"case {number}: {found.what}"
