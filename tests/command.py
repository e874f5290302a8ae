"""One command of `pliant` in this process."""

from __future__ import annotations

from typing import Any
from unittest import mock

from typer.testing import CliRunner

from pliant.cli import main


def command(name: str, *words: str) -> Any:
    """What `pliant NAME WORDS...` gives; without the other commands, which take 0.1 s to make."""
    own = () if name in main.REPRO_COMMANDS else (name,)
    with mock.patch.object(main, "COMMANDS", own):
        return CliRunner().invoke(main.build(), [name, *words])
