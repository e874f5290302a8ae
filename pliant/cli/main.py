"""The `pliant` program: assembles the commands, and turns errors into one line and an exit code.

Each command is a function in the module of its name beside this one; modules with several commands, or with settings of
their own, have `register(app)`. Importing them must stay cheap: torch and the servers are imported inside the command that
needs them. Other packages add commands by entry points.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from pliant.cli.output import JsonCommand
from pliant.errors import ConfigError, PliantError

COMMANDS = (
    "run", "check", "remote_install", "resize", "config_server",
    "dash", "top", "fed", "report", "serve", "submit", "jobs", "plan", "sim", "doctor",
)  # fmt: skip
PLUGIN_GROUP = "pliant.commands"
"""Entry points in this group add commands: each is a function that takes the Typer application."""
REPRO_COMMANDS = ("bench", "demo", "lab", "reproduce")
"""Commands that the package `pliant-repro` adds."""
READER_GONE = 128 + signal.SIGPIPE
Misuse: type[Exception] = typer.BadParameter.__mro__[2]
"""Exception of a wrong command line: click's, or that of a newer typer, which has its own copy of click."""


def build() -> typer.Typer:
    """Return the `pliant` program with all its commands."""
    app = typer.Typer(
        name="pliant",
        help="PyTorch training on machines that come and go.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_front_door)
    for name in COMMANDS:
        module = importlib.import_module(f"pliant.cli.{name}")
        if hasattr(module, "register"):
            module.register(app)
        else:
            app.command(name.replace("_", "-"), cls=JsonCommand)(getattr(module, name))
    plugins = entry_points(group=PLUGIN_GROUP)
    for plugin in plugins:
        plugin.load()(app)
    for name in set(REPRO_COMMANDS) - plugins.names:
        app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(_missing_command(name))
    return app


def _missing_command(name: str) -> Callable[..., None]:
    """Return a command that says how to install the package that has the real one."""

    def missing(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise ConfigError(f"`pliant {name}` is part of pliant-repro, which is not installed: pip install ./repro")

    return missing


def _front_door(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """PyTorch training on machines that come and go."""


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"pliant {version('pliant')}")
        raise typer.Exit


def main() -> None:
    """Run the program. A user's mistake ends it with one line and exit code 2, any other failure with exit code 1."""
    sys.exit(_flush(_run()))


def _run() -> int | str | None:
    try:
        code = build()(prog_name="pliant", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        # If stdout is closed, typer ends the program by itself.
        return READER_GONE if isinstance(end.__context__, BrokenPipeError) else end.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Misuse as error:
        return _report_misuse(error)
    except typer.Abort:
        return 1
    except ConfigError as error:
        return _fail(str(error), 2)
    except PliantError as error:
        return _fail(str(error), 1)
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _fail(f"{error.filename or 'what was written'}: {error.strerror}; make room, as `df -h` shows", 1)
        if error.filename is None:  # without a file the message would not help
            raise
        return _fail(f"{error.filename}: {error.strerror}; is it there, and may you read and write it?", 1)


def _fail(line: str, code: int) -> int:
    if line:
        print(f"pliant: {line}", file=sys.stderr)
    return code


def _report_misuse(error: Any) -> int:
    """Print one line for a mistake that click would answer with a page; nothing if it has printed help already."""
    said = " ".join(error.format_message().split()).rstrip(".")
    said = " Did you mean".join(said.split(" Did you mean")[:2])  # click and typer both ask
    context = getattr(error, "ctx", None)
    words = itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    path = context.command_path if context is not None else " ".join(("pliant", *words))
    return _fail(f"{said}; `{path} -h` shows how it is used" if said else "", error.exit_code)


def _report_missing_package(error: ModuleNotFoundError) -> int:
    from pliant.cli import extras

    package = extras.absent(error)
    if package is None:
        raise error
    return _fail(f"{package.module} is not installed, and this needs it: {package.remedy}", 2)


def _flush(code: int | str | None) -> int | str | None:
    """Flush stdout and return the exit code. At the interpreter's own exit a failure could not be reported in one line."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE if isinstance(error, BrokenPipeError) else code or _fail(f"stdout: {error.strerror}", 1)
