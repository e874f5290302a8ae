"""The command line: assembles the commands, each of which lives in a file of its own beside this one.

A command module has `register(app)`. Importing it must stay cheap: torch and the servers are
imported inside the command that needs them.
"""

from __future__ import annotations

import importlib
import sys

import typer

from pliant.errors import ConfigError, PliantError

COMMANDS = (
    "run", "remote_install", "resize", "config_server", "lab",
    "dash", "top", "fed", "report", "serve", "submit", "list_jobs", "show", "logs", "stop", "forget", "plan", "sim", "bench", "doctor", "demo", "reproduce",
)  # fmt: skip


def build() -> typer.Typer:
    """The `pliant` program with all its commands."""
    app = typer.Typer(
        name="pliant",
        help="PyTorch training on machines that come and go.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_front_door)
    for command in COMMANDS:
        importlib.import_module(f"pliant.cli.{command}").register(app)
    return app


def _front_door() -> None:
    """PyTorch training on machines that come and go."""


def main() -> None:
    """Run the program; a user's mistake is one line and exit code 2, any other failure of ours exit code 1."""
    try:
        build()()
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr)
        sys.exit(2)
    except PliantError as error:
        print(f"pliant: {error}", file=sys.stderr)
        sys.exit(1)
