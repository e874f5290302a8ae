"""`--json [FILE]`: a command's answer as one object, in a file or, alone on it, on stdout.

Flags that take no file (`list --json`) are `cluster_output.JsonFlag`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from pliant.cli.cluster_output import print_json
from pliant.errors import ConfigError

if TYPE_CHECKING:
    import click

STDOUT = Path("-")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="[FILE]", help="Everything, as one object; no FILE or -: stdout, and nothing else."),
]


class BareJson(TyperCommand):
    """A command whose `--json` may stand without a file, which is then stdout."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        words = list(args)
        for place, word in reversed(list(enumerate(args))):
            after = args[place + 1] if place + 1 < len(args) else "--"
            if word == "--json" and not _is_file(after, has_arguments):
                words.insert(place + 1, str(STDOUT))
        return super().parse_args(ctx, words)


def _is_file(word: str, has_arguments: bool) -> bool:
    """Whether the word after `--json` belongs to it; where a command has arguments, only what looks like a file does."""
    if word.startswith("-"):
        return word == str(STDOUT)
    return not has_arguments or (("." in word or "/" in word) and ".py:" not in word)


def is_alone(file: Path | None) -> bool:
    """Whether stdout is for the object, so that nothing else may be printed there."""
    return file == STDOUT


def save_json(value: object, file: Path | None) -> None:
    """To where `--json` said, if it was given."""
    if file is None:
        return
    if is_alone(file):
        print_json(value)
        return
    try:
        file.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}; give another file, or none") from None
