"""What moves on a terminal while something takes long: on stderr, gone at its end, and nothing where that is piped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str, float], None]]:
    """A line that moves on a terminal, and nothing where the output is piped."""
    with moving_line(SpinnerColumn(), _words(), BarColumn(), TimeElapsedColumn()) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, fraction: shown.update(task, description=what, completed=fraction)


@contextlib.contextmanager
def shown_waiting(what: str) -> Iterator[Callable[[str], None]]:
    """As `shown_progress`, where nobody knows how far it is: the time, and words that may be changed."""
    with moving_line(SpinnerColumn(), _words(), TimeElapsedColumn()) as shown:
        task = shown.add_task(what, total=None)
        yield lambda now: shown.update(task, description=now)


def _words() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


def moving_line(*columns: ProgressColumn) -> Progress:
    """Of these columns, for who wants others than the two above have."""
    console = Console(stderr=True)
    # Lines on stdout would go to stderr with the bar, also where stdout is a file.
    with_stdout = sys.stdout.isatty()
    can_move = console.is_terminal and not console.is_dumb_terminal
    return Progress(*columns, console=console, transient=True, disable=not can_move, redirect_stdout=with_stdout)
