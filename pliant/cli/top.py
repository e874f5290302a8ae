"""The `pliant top` command: jobs as they run, in the terminal."""

from __future__ import annotations

import signal
import threading
import time
from typing import Annotated

import typer

from pliant.cli.dash import Given
from pliant.errors import ConfigError
from pliant.launch.duration import parse_duration


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("top")(top)


def top(
    given: Given = None,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Which one to show more of.")] = "",
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Look again after this.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is when the output is piped.")] = False,
) -> None:
    """Show jobs in the terminal, as `pliant dash` does in the browser; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from pliant.dashboard.sources import sources
    from pliant.dashboard.terminal import screen
    from pliant.dashboard.watch import Watch

    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.1:
        raise ConfigError(f"--interval {interval}: use 100ms or more")
    console = Console()
    watch = Watch(sources(given or []))
    watch.look()
    if once or not console.is_terminal:
        console.print(screen(watch.seen, time.time(), console.width, job))
        return
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not over.is_set():
            live.update(screen(watch.seen, time.time(), console.width, job), refresh=True)
            over.wait(interval_s)
            watch.look()
