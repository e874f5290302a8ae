"""Output of commands: `--json` alone on stdout for every table, and progress on a terminal only."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from pliant.cli.main import build
from pliant.cli.output import STDOUT, JsonFile

Said = tuple[int, str, str]
MAIN = "from pliant.cli.main import main; main()"
WORDS = ("bench", "traffic", "--listen", "0", "--seconds", "0.3")
PLAN = ("plan", "--replicas", "4", "--speed", "v100=3,t4=1", "--have", "t4=2")
WITHOUT_TABLE = {
    "run", "remote-install", "resize", "config-server", "dash", "serve", "logs", "stop", "forget", "fed run",
    "lab up", "lab down", "lab rate", "lab exec",
}  # fmt: skip
MODEL = """
from torch import nn
print("imported")
def build():
    return nn.SyncBatchNorm(2)
"""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    for name, each in (inner or {}).items():
        yield from commands(each, (*path, name))


def test_every_command_with_a_table_has_json() -> None:
    for name, command in commands(typer.main.get_command(build())):
        flags = [flag for param in command.params for flag in param.opts]
        assert ("--json" in flags) != (name in WITHOUT_TABLE), name


WITH_JSON = [
    pytest.param(command, id=name)
    for name, command in commands(typer.main.get_command(build()))
    if any("--json" in param.opts for param in command.params)
]


@pytest.mark.parametrize("command", WITH_JSON)
def test_json_is_the_same_option_everywhere(command: Any) -> None:
    [option] = [param for param in command.params if "--json" in param.opts]
    [told] = JsonFile.__metadata__  # type: ignore[attr-defined]
    assert (option.name, option.metavar, option.help) == ("json_file", "[FILE]", told.help)
    required = ["word" for param in command.params if param.param_type_name == "argument" and param.required]

    def parsed(*words: str) -> str:
        return str(command.make_context("it", [*words, *required], resilient_parsing=True).params["json_file"])

    assert parsed() == "None"
    assert parsed("--json") == parsed("--json", "-") == parsed("--json=-") == str(STDOUT)
    assert parsed("--json", "out.json") == parsed("--json=out.json") == "out.json"
    assert parsed("--json=out.txt") == "out.txt"


@pytest.mark.parametrize(
    ("words", "file", "arguments"),
    [
        (("submit", "--json", "job.yml"), STDOUT, ["job.yml"]),
        (("submit", "job.yml", "--json", "jobs.json"), Path("jobs.json"), ["job.yml"]),
        (("report", "--json", "logs/a", "logs/b"), STDOUT, ["logs/a", "logs/b"]),
        (("top", "--json", "run.jsonl"), STDOUT, ["run.jsonl"]),
        (("doctor", "--json", "model.py:build"), STDOUT, "model.py:build"),
        (("show", "--json", "digits"), STDOUT, "digits"),
        (("check", "--json", "train.py", "--json", "x.json"), STDOUT, ["train.py", "--json", "x.json"]),
        (("check", "--json", "x.json", "train.py", "--json"), Path("x.json"), ["train.py", "--json"]),
        (("check", "train.py", "--json"), None, ["train.py", "--json"]),
        (("plan", "--json", "out.txt"), Path("out.txt"), None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_argument_is_not_taken_for_the_file(words: tuple[str, ...], file: Path | None, arguments: object) -> None:
    found = dict(commands(typer.main.get_command(build())))[words[0]]
    values = found.make_context("it", list(words[1:]), resilient_parsing=True).params
    given = next((values[param.name] for param in found.params if param.param_type_name == "argument"), None)
    assert (values["json_file"], list(given) if isinstance(given, tuple) else given) == (file and str(file), arguments)


@pytest.fixture
def answered(pliant: Callable[..., Said], tmp_path: Path) -> Callable[..., Any]:
    """The object that a command prints, and its exit code."""
    (tmp_path / "model.py").write_text(MODEL)
    cell = {"model": "resnet50", "rate_mbit": 100.0, "mode": "priority", "slice": "auto", "compute": "paced"}
    (tmp_path / "priority.json").write_text(json.dumps({"bench": "priority", "cells": [cell | {"failure": "it fell"}]}))
    fact = {"time_s": 1.0, "step": 3, "kind": "step", "values": {"loss": 0.5}, "workers": 2}
    (tmp_path / "run.jsonl").write_text(json.dumps(fact) + "\n")

    def answered(*words: str) -> tuple[int, Any]:
        code, out, _ = pliant(*words)
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(found, dict)
        return code, found

    return answered


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        ((*PLAN, "--json"), 0, "proposals"),
        ((*PLAN, "--json", "-"), 0, "proposals"),
        (("sim", "--trace", "synthetic:4", "--policy", "yarn-cs", "--processes", "1", "--json"), 0, "policies"),
        (("doctor", "--json", "--replicas", "2"), 0, "machine"),
        (("doctor", "model.py:build", "--json"), 1, "obstacles"),
        (("doctor", "--json", "model.py:build"), 1, "obstacles"),
        (("lab", "list", "--json"), 0, "labs"),
        (("fed", "select", "--replay", "20", "--rounds", "2", "--json"), 0, "rounds"),
        (("reproduce", "--list", "--json"), 0, "experiments"),
        (("reproduce", "--json"), 0, "experiments"),
        (("top", "run.jsonl", "--json"), 0, "jobs"),
        (("bench", "traffic", "--listen", "0", "--seconds", "0.1", "--json"), 0, "took"),
        (("bench", "priority", "--validate", "priority.json", "--json"), 1, "checks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_alone_on_stdout(answered: Callable[..., Any], words: tuple[str, ...], code: int, key: str) -> None:
    ended, found = answered(*words)
    assert key in found
    assert ended == code


@pytest.mark.processes
def test_a_measurement_alone_on_stdout(answered: Callable[..., Any]) -> None:
    words = ("bench", "fed", "--clients", "2000", "--pick", "10", "--repeat", "1", "--json")
    code, found = answered(*words)
    assert (code, found["ok"]) == (0, True)


def test_in_a_file_the_table_is_printed_too(pliant: Callable[..., Said], tmp_path: Path) -> None:
    code, out, _ = pliant(*PLAN, "--json", "plan.json")
    assert code == 0
    assert "replicas each" in out
    assert json.loads((tmp_path / "plan.json").read_text())["bench"] == "plan"


@pytest.mark.parametrize(
    "words",
    [
        ("fed", "select", "--replay", "20", "--rounds", "2"),
        ("lab", "list"),
        ("list",),
        ("reproduce", "--list"),
        ("sim", "--trace", "synthetic:4", "--policy", "yarn-cs", "--processes", "1"),
        ("top", "run.jsonl"),
        ("bench", "priority", "--validate", "priority.json"),
    ],
    ids=" ".join,
)
def test_a_file_takes_nothing_from_the_table(
    pliant: Callable[..., Said], answered: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    alone = pliant(*words)
    with_file = pliant(*words, "--json", "found.json")
    assert alone[0] == with_file[0]
    assert bool(alone[1]) == bool(with_file[1])
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept.keys() == answered(*words, "--json")[1].keys()


@pytest.mark.parametrize("place", ["there/is/none.json", "folder", "plan.txt/x"])
def test_a_file_that_cannot_be_written_is_told_first(pliant: Callable[..., Said], tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plan.txt").touch()
    code, out, err = pliant(*PLAN, "--json", place)
    assert (code, out) == (2, "")
    assert err.startswith(f"pliant: --json {place}: ")
    assert err.endswith("; give a file that can be written\n")


@pytest.mark.processes
def test_a_line_moves_on_a_terminal_and_stdout_stays_clean() -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *WORDS], stdout=subprocess.PIPE, stderr=theirs, env=environ
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other side is closed
            while data := os.read(ours, 4096):
                shown += data
        os.close(ours)
        assert process.stdout is not None
        said = process.stdout.read().decode().splitlines()
        assert process.wait(20) == 0
    assert b"taking what comes for 0.3 s" in shown
    assert [line.split()[0] for line in said] == ["listening", "took"]


@pytest.mark.processes
def test_nothing_moves_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", MAIN, *WORDS], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
