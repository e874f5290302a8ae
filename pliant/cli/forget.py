"""The `pliant forget` command: takes federated jobs that have ended off the list."""

from __future__ import annotations

from typing import Annotated

import typer

from pliant.cli import completion
from pliant.cli.cluster_output import check_named
from pliant.cli.output import is_read_by_people
from pliant.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("forget")(forget)


def forget(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="Federated jobs that have ended.",
            autocompletion=completion.federated,
        ),
    ] = None,
) -> None:
    """Take federated jobs that have ended off the list; their files stay. None of them if a name is unknown, or one runs."""
    from pliant.fed.jobs.folders import Jobs

    check_named(*(names or ("",)))
    jobs = Jobs.of_user()
    asked = list(dict.fromkeys(names or ()))
    if running := [name for name in asked if jobs.find(name).is_minded()]:
        raise ConfigError(f"{', '.join(running)}: still running; `pliant stop` ends a job")
    for name in asked:
        folder = jobs.forget(name)
        if is_read_by_people():
            print(f"{name} is off the list; its files stay in {folder.path}", flush=True)
