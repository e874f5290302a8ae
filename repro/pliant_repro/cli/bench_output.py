"""What commands that measure have around it: a clean end, a wide page for tables, numbers as text."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import typer
from rich.console import Console

from pliant.cli.json_output import is_alone, save_json
from pliant.cli.progress import shown_progress
from pliant.cli.writable import check_writable
from pliant.machine import Json

PIPED_WIDTH = 120
"""Of a table that no terminal shows: whoever reads a file or a pipe wants whole numbers."""


def wide_console() -> Console:
    """For tables on stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that everything started is ended."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measured(
    json_file: Path | None, measure: Callable[[Callable[[str, float], None]], Json], show: Callable[[Json], None]
) -> None:
    """Measure, keep the result where `--json` says, show it with its remarks; code 1 where it is not ok."""
    check_writable(json_file)
    with ended_by_sigterm(), shown_progress() as progress:
        result = measure(progress)
    save_json(result, json_file)
    if not is_alone(json_file):
        show(result)
        for remark in cast("list[str]", result["remarks"]):
            wide_console().print(f"note: {remark}", highlight=False, markup=False)
    if not result["ok"]:
        raise typer.Exit(1)


def milliseconds(seconds: object) -> str:
    """Three digits, or all those before the point."""
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def ratio(value: object, unit: str) -> str:
    return f"{value:.3g}{unit}" if isinstance(value, float) else "-"
