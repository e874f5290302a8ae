"""The program itself, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.cli import main

JOBS = ("list", "show", "logs", "stop", "forget")
"""Commands of `pliant.cli.jobs`."""
Said = tuple[int, str, str]
"""Exit code, stdout, stderr."""


@pytest.fixture
def pliant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Runs a command in this process, with a home of its own."""
    for name in ("PLIANT_SERVER", "PLIANT_TOKEN", "PLIANT_CONFIG_SERVER", "PLIANT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    commands = main.COMMANDS

    def pliant(*words: str) -> Said:
        # To make all commands takes 0.1 s each time.
        name = words[0].replace("-", "_") if words else ""
        own = tuple(each for each in commands if each == name) or (("jobs",) if name in JOBS else ())
        monkeypatch.setattr(main, "COMMANDS", own or commands)
        monkeypatch.setattr(sys, "argv", ["pliant", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return pliant
