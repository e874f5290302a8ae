"""The `pliant demo` command: shows the two jobs of `figures.demo` while they run, and their comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pliant.cli.output import JsonCommand, JsonFile, check_time, check_writable, is_stdout, save_json, show_progress
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant_repro.figures.demo import Demo, EventRow, Verdict
    from pliant_repro.figures.launch import RunLog


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("demo", cls=JsonCommand)(demo)


def demo(
    epochs: Annotated[int, typer.Option("--epochs", help="Of 12 steps each.")] = 30,
    path: Annotated[
        str, typer.Option("--path", metavar="N|kill,...", help="What happens to the 4 workers, spread over the run.")
    ] = "2,kill,3,1",
    pace: Annotated[float, typer.Option("--pace", metavar="SECONDS", help="No step of pliant is shorter.")] = 0.03,
    png: Annotated[Path, typer.Option("--png", metavar="FILE", help="The picture of both curves.")] = Path(
        "pliant-demo.png"
    ),
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Give up after this long.")] = 300.0,
    nudge: Annotated[int | None, typer.Option("--nudge", hidden=True)] = None,
) -> None:
    """Train on real images with stock DDP, and with pliant while workers come, go and are killed: the same bits."""
    from pliant_repro.figures.demo import Demo, DemoOptions

    if not 0 <= pace <= 60:
        raise ConfigError(f"--pace {pace:g}: use 0 to 60 seconds")
    check_time(timeout, "--timeout")
    words = tuple(word.strip() for word in path.split(",") if word.strip())
    options = DemoOptions(epochs=epochs, path=words, pace_s=pace, timeout_s=timeout, nudge=nudge)
    if png.suffix != ".png":
        raise ConfigError(f"--png {png}: give a name that ends in .png")
    for file, flag in ((png, "--png"), (json_file, "--json")):
        check_writable(file, flag)
    console = Console(highlight=False, stderr=is_stdout(json_file))
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pliant-demo-") as folder, _ended_by_signals():
        shown = Demo(options, Path(folder))
        with _view(console, shown) as watch:
            verdict = shown.run(watch)
    save_json(_as_json(shown, verdict), json_file)
    if not is_stdout(json_file):
        _print_result(console, shown, verdict)
    shown.draw(verdict, png)
    if not is_stdout(json_file):
        console.print(f"picture: {png}; took {time.monotonic() - begun_s:.0f} s", soft_wrap=True, markup=False)
    if not verdict.identical:
        raise typer.Exit(1)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Unwind on Ctrl-C, SIGTERM and SIGHUP alike, so that everything that was started is ended."""

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # an impatient second one must not interrupt the ending
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- while it runs ---


@contextlib.contextmanager
def _view(console: Console, demo: Demo) -> Iterator[Callable[[], None]]:
    """Give a function to call while the demo runs: it prints a line for each new stage and event, and moves a bar on a terminal."""
    num_rows, stage = 0, ""
    with show_progress() as progress:

        def show() -> None:
            nonlocal num_rows, stage
            lines = [demo.stage] if demo.stage != stage else []
            rows = demo.rows()
            for row in rows[num_rows:]:
                lines.append(f"step {row.step}: {row.workers} workers, {row.event}{_pause(row, ', pause ')}")
            num_rows, stage = len(rows), demo.stage
            if not console.stderr:
                for line in lines:
                    console.print(line, soft_wrap=True)
            steps = demo.elastic.last_step + 1
            doing = f"{stage}, step {steps} on {_workers(demo.elastic)} workers {_latest_loss(demo.elastic)}"
            progress(doing if steps else stage, steps / demo.options.num_steps)

        yield show


def _workers(log: RunLog) -> int:
    return log.steps[max(log.steps)].size if log.steps else 0


def _latest_loss(log: RunLog) -> str:
    return f"loss {log.steps[log.last_step].loss:.6f}" if log.last_step >= 0 else ""


def _pause(row: EventRow, before: str = "") -> str:
    if row.pause_s is None:
        return ""
    return f"{before}{row.pause_s * 1e3:.{0 if row.pause_s >= 0.01 else 1}f} ms"


# --- at the end ---


def _print_result(console: Console, demo: Demo, verdict: Verdict) -> None:
    table = Table(
        title="4 replicas on scikit-learn's digits: stock DDP on 4 processes, and pliant",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("step", "workers", "event", "pause", "loss DDP", "loss pliant"):
        table.add_column(name, justify="left" if name in ("workers", "event") else "right", no_wrap=True)
    for row in demo.rows():
        table.add_row(str(row.step), row.workers, row.event, _pause(row), *_losses(demo, row.step))
    end = verdict.num_steps - 1
    table.add_row(str(end), str(_workers(demo.elastic)), "the last step", "", *_losses(demo, end))
    console.print(table)
    for name, log in (("DDP", demo.reference), ("pliant", demo.elastic)):
        digests = " and ".join(sorted(set(log.steps[end].digests))) if end in log.steps else "missing"
        right = "" if log.accuracy is None else f", {log.accuracy:.1%} of the held-out images right"
        console.print(f"{name:>6}: SHA-256 {digests}{right}", soft_wrap=True)
    console.print(
        f"compared: parameters, buffers and optimizer after each of {verdict.num_steps} steps "
        f"({verdict.num_digests} digests), {verdict.num_losses} losses",
        soft_wrap=True,
    )
    if verdict.identical:
        console.print("bit-identical: [bold green]yes[/]")
    else:
        console.print(
            f"bit-identical: [bold red]NO[/], first at step {verdict.first_difference}: {verdict.what}", soft_wrap=True
        )


def _losses(demo: Demo, step: int) -> list[str]:
    return [
        f"{log.steps[step].loss:.7f}" if step in log.steps and log.steps[step].losses else "missing"
        for log in (demo.reference, demo.elastic)
    ]


def _as_json(demo: Demo, verdict: Verdict) -> dict[str, Any]:
    def steps_of(log: RunLog) -> list[dict[str, Any]]:
        found = []
        for number, step in sorted(log.steps.items()):
            losses = [sorted(set(step.losses[replica])) for replica in sorted(step.losses)]
            found.append({"step": number, "workers": step.size, "sha256": sorted(set(step.digests)), "losses": losses})
        return found

    return {
        "bit_identical": verdict.identical,
        "first_difference": verdict.first_difference,
        "what": verdict.what,
        "steps": verdict.num_steps,
        "digests_compared": verdict.num_digests,
        "losses_compared": verdict.num_losses,
        "events": [dataclasses.asdict(row) for row in demo.rows()],
        "ddp": {"accuracy": demo.reference.accuracy, "steps": steps_of(demo.reference)},
        "pliant": {"accuracy": demo.elastic.accuracy, "steps": steps_of(demo.elastic)},
    }
