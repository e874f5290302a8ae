"""`python -m pliant_repro bench ...`: the commands of this package where it is on the path but not installed."""

from __future__ import annotations

import sys

import typer

from pliant.errors import ConfigError, PliantError
from pliant_repro.cli import bench, demo, lab, reproduce


def main() -> int:
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="pliant", no_args_is_help=True, pretty_exceptions_enable=False, context_settings=settings)
    for each in (bench, demo, lab, reproduce):
        each.register(app)
    try:
        app(prog_name="python -m pliant_repro")
    except PliantError as error:
        print(f"pliant: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
