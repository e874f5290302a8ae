"""Helpers of all commands: numbers as arguments, `--json`, files checked before the work, tables and progress bars."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from pliant.cluster import check_host
from pliant.errors import ConfigError, reason
from pliant.files import DISK_ERRORS

if TYPE_CHECKING:
    import click

    from pliant.cli.completion import Completer

STDOUT = Path("-")
PICTURES = (".png", ".svg", ".pdf")
PIPED_WIDTH = 120
STATE_COLOURS = {
    "running": "green", "starting": "green", "put-off": "yellow", "failed": "red", "stopped": "dim", "finished": "dim",
    "ok": "green", "warn": "yellow", "missing": "red",
}  # fmt: skip

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        show_default=False,
        help="Write the result as one JSON object to FILE, such as result.json; without FILE, or with -, to stdout in place of the table.",
    ),
]
TlsCertFlag = Annotated[str, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")]
TlsKeyFlag = Annotated[str, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")]
ServerNameFlag = Annotated[
    str,
    typer.Option(
        "--server-name",
        metavar="NAME,...",
        help="Further names that requests may call this server, such as that of a proxy before it.",
    ),
]


def option(names: str, metavar: str, help: str, complete: Completer | None = None, **more: Any) -> Any:
    """Return an option of a command: its names with spaces between, what stands for its value, and its help."""
    return typer.Option(*names.split(), metavar=metavar or None, help=help, autocompletion=complete, **more)


# --- numbers and tokens as arguments ---
# They are taken as text and parsed here, because click would answer a wrong one with a page of usage.


def parse_int(text: str, flag: str, example: int = 4) -> int:
    """Parse a whole number, which may be negative; the caller checks its range."""
    if re.fullmatch(r"-?[0-9]{1,18}", text.strip()) is None:
        raise ConfigError(f"{flag} {text!r} is not a whole number: write digits, such as {example}")
    return int(text)


def check_time(seconds: float, flag: str) -> None:
    """Raise ConfigError unless `seconds` is above 0 and finite."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{flag} {seconds:g}: use seconds above 0, such as 60")


def parse_numbers(text: str, flag: str, example: str = "v100=3.1,t4=1") -> dict[str, float]:
    """Parse `v100=3.1,t4=1`; an empty text gives an empty dictionary."""
    found: dict[str, float] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name.strip() or not math.isfinite(number) or name.strip() in found:
            raise ConfigError(f"{flag} {part!r}: use TYPE=NUMBER, each type once, as in {example}")
        found[name.strip()] = number
    return found


def parse_counts(text: str, flag: str) -> dict[str, int]:
    """Parse `v100=2,t4=1`."""
    found = parse_numbers(text, flag, "cpu=4")
    for name, value in found.items():
        if value < 0 or value != int(value):
            raise ConfigError(f"{flag} {name}={value:g}: use a whole number of devices")
    return {name: int(value) for name, value in found.items()}


def parse_names(text: str) -> tuple[str, ...]:
    """Parse the names of `--server-name`, which are separated by commas."""
    return tuple(check_host(name.strip()) for name in text.split(",") if name.strip())


def read_token(file: str) -> str:
    """Return the token in `--token-file`; without a file, PLIANT_TOKEN, or empty.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if not file:
        return os.environ.get("PLIANT_TOKEN", "")
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {file} cannot be read: {reason(error)}; give a file that holds the token"
        ) from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: write the token into it")
    return token


# --- --json [FILE] ---


class JsonCommand(TyperCommand):
    """A command whose `--json` may stand without a file; the object then goes to stdout."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.prepare(args))

    def prepare(self, args: list[str]) -> list[str]:
        """Return the words as click shall read them: with `-` after each `--json` that has no file.

        In a command with arguments, the word after `--json` is one of them unless its name ends in .json: a job file is not
        to be overwritten by `pliant submit --json job.yml`. `--json=FILE` takes any name.
        """
        if not any("--json" in param.opts for param in self.params):
            return args
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        words: list[str] = []
        for word, after in itertools.zip_longest(args, args[1:], fillvalue=""):
            words.append(word)
            is_file = after == str(STDOUT) or (
                after != "" and not after.startswith("-") and (after.endswith(".json") or not has_arguments)
            )
            if word == "--json" and not is_file:
                words.append(str(STDOUT))
        return words


def is_stdout(file: Path | None) -> bool:
    """Return whether the JSON object goes to stdout, so that nothing else may be printed there."""
    return file == STDOUT


def save_json(value: object, file: Path | None) -> None:
    """Write `value` where `--json` says, if it was given."""
    if file is None:
        return
    if is_stdout(file):
        print_json(value)
        return
    try:
        file.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}; give another file, or none") from None


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def announce(text: str) -> None:
    """Print a line of a server, which goes on where the disk under its output is full or failing."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise


# --- files that will be written ---


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """Raise ConfigError if the file cannot be written. Leaves no empty file behind."""
    if path is None or is_stdout(path):
        return
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None


def check_picture(path: Path | None) -> None:
    """Raise ConfigError if `--plot` names no picture that can be written, or matplotlib is missing."""
    if path is None:
        return
    from pliant.cli import plotting

    plotting.check()
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot {path}: give a name that ends in {', '.join(PICTURES)}")
    check_writable(path, "--plot")


def check_future_file(path: str, flag: str) -> None:
    """Raise ConfigError if no file can be written at `path`, whose folder need not exist yet. Empty means none."""
    if not path:
        return
    if os.path.isdir(path):
        raise ConfigError(f"{flag} {path} is a directory: give a file, such as {os.path.join(path, 'run.jsonl')}")
    check_future_folder(os.path.dirname(path), flag)
    if os.path.exists(path):
        check_writable(Path(path), flag)


def check_future_folder(path: str, flag: str) -> None:
    """Raise ConfigError if the folder can neither be written to nor made. Makes nothing. Empty means none."""
    if not path:
        return
    nearest = path
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        raise ConfigError(f"{flag} {path}: {nearest} is not a directory; give another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: {nearest} may not be written to by you; give another directory")


# --- tables ---


def is_read_by_people() -> bool:
    """Return whether stdout is a terminal; if not, a program reads it, which wants values and nothing else."""
    return sys.stdout.isatty()


def wide_console() -> Console:
    """Return a console for tables on stdout that does not wrap them when piped."""
    console = Console(markup=False, emoji=False)  # the trace synthetic:100:0.1 is no face
    return console if console.is_terminal else Console(width=PIPED_WIDTH, markup=False, emoji=False)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), *, cut: bool = False
) -> None:
    """Print a table on a terminal; otherwise lines with tabs between the columns, without a heading.

    On a narrow terminal the last column, which is words, continues on the next line, or is cut.
    """
    if not is_read_by_people():
        for row in rows:
            print("\t".join(" ".join(cell.split()) for cell in row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for number, column in enumerate(columns):
        is_last = number == len(columns) - 1
        table.add_column(column.upper(), justify="right" if column in right else "left", no_wrap=not is_last)
    for row in rows:
        colours = [
            STATE_COLOURS.get(cell, "") if name == "state" else "" for name, cell in zip(columns, row, strict=True)
        ]
        cells = zip(row, colours, strict=True)
        table.add_row(
            *(Text(cell, colour, no_wrap=cut, overflow="ellipsis" if cut else "fold") for cell, colour in cells)
        )
    Console().print(table)


# --- progress, on stderr and only on a terminal ---


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar until the block ends; yields a function that takes a text and a fraction."""
    with moving_line(SpinnerColumn(), _description(), BarColumn(), TimeElapsedColumn()) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, fraction: shown.update(task, description=what, completed=fraction)


@contextlib.contextmanager
def show_waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show the elapsed time until the block ends; yields a function that changes the text beside it."""
    with moving_line(SpinnerColumn(), _description(), TimeElapsedColumn()) as shown:
        task = shown.add_task(what, total=None)
        yield lambda now: shown.update(task, description=now)


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


def moving_line(*columns: ProgressColumn) -> Progress:
    """Return a progress display of these columns that disappears at its end."""
    console = Console(stderr=True)
    # Lines on stdout would go to stderr with the bar, also where stdout is a file.
    with_stdout = sys.stdout.isatty()
    can_move = console.is_terminal and not console.is_dumb_terminal
    return Progress(*columns, console=console, transient=True, disable=not can_move, redirect_stdout=with_stdout)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the block like Ctrl-C, so that everything that was started is ended."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
