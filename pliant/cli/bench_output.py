"""What all `pliant bench` commands have around their measurement: progress, a clean end, numbers as text."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pliant.errors import ConfigError


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """Before minutes of measuring, not after."""
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None


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


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str, float], None]]:
    """A line that moves on a terminal, and nothing where the output is piped."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, fraction: shown.update(task, description=what, completed=fraction)


def milliseconds(seconds: object) -> str:
    """Three digits, or all those before the point."""
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def ratio(value: object, unit: str) -> str:
    return f"{value:.3g}{unit}" if isinstance(value, float) else "-"
