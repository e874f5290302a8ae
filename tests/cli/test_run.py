"""`pliant run`: its help page, KungFu's spellings, and job files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.cli.run import split_flags

MAIN = (sys.executable, "-c", "from pliant.cli.main import main; main()")
Said = tuple[int, str, str]
OPTIONS = {"-np": True, "--np": True, "--port-range": True, "-q": False, "-v": False, "--no-v": False, "--self": True}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("-np 4 -q train.py -q=true", "-np 4 -q"),
        ("-np=4 -port-range 1-9 -self a train.py", "-np 4 --port-range 1-9 --self a"),
        ("-q=true -v=false train.py", "-q --no-v"),
        ("-q=false -np -1 train.py", "-np -1"),
        ("-unknown=1 -- train.py", "-unknown=1"),
    ],
)
def test_kungfus_spellings_become_ours_and_the_programs_flags_stay(typed: str, read: str) -> None:
    flags, program = split_flags(typed.split(), OPTIONS, {"-v": "--no-v"})
    assert flags == read.split()
    assert program == typed.split()[-len(program) :]


def test_the_help_page_fits_two_screens_and_hides_what_few_need() -> None:
    shown = subprocess.run(
        [*MAIN, "run", "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert len(shown.splitlines()) <= 70
    for panel in ("Where it runs", "Elasticity", "State", "Adaptation", "Output"):
        assert panel in shown
    assert "--slot-devices" not in shown
    assert "-hostfile " not in shown.replace("--hostfile ", "")


@pytest.mark.processes
def test_a_job_file_gives_program_and_options_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "say.py").write_text(
        "import json, os, sys, pathlib\n"
        "pathlib.Path(f'said-{os.getpid()}').write_text(json.dumps([sys.argv[1:], os.environ['COLOUR']]))\n"
    )
    job = tmp_path / "job.yml"
    more = "args: [--x, '1']\nreplicas: 4\nworkers: 2\nenv: {COLOUR: red}\nflags: [--plain]\n"
    job.write_text(f"program: own/say.py\n{more}")
    subprocess.run([*MAIN, "run", "-q", "-f", str(job)], cwd="/", check=True, timeout=60, capture_output=True)
    said = [json.loads(path.read_text()) for path in tmp_path.glob("said-*")]
    assert said == [[["--x", "1"], "red"]] * 2, "in the file's folder, with its arguments and environment"
    job.write_text(f"program: -m own.say\n{more}")
    subprocess.run(
        [*MAIN, "run", "-q", "-f", str(job), "-np", "1"], cwd="/", check=True, timeout=60, capture_output=True
    )
    assert [json.loads(path.read_text()) for path in tmp_path.glob("said-*")] == [[["--x", "1"], "red"]] * 3


def test_a_federated_job_file_is_refused_with_the_command_for_it(pliant: Callable[..., Said], tmp_path: Path) -> None:
    job = tmp_path / "fed.yml"
    job.write_text("kind: federated\nrounds: 1\n")
    code, _, said = pliant("run", "-f", str(job))
    assert code == 2
    assert str(job) in said
