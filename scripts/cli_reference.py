"""Writes docs/cli.md from the commands themselves: `python scripts/cli_reference.py`; `--check` fails if it is stale."""

from __future__ import annotations

import argparse
import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pliant.cli.main import REPRO_COMMANDS, build

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """\
# The command line

Made from the code by `python scripts/cli_reference.py`; do not edit. `pliant COMMAND -h` shows the same in a terminal.
Flags that KungFu has may be written as there, with one dash (`-np 4`, `-np=4`). What a command's end means is under [exit codes](exit-codes.md).
The package `pliant-repro` adds `bench`, `demo`, `lab` and `reproduce`, which explain themselves with `-h`.
`--json` prints one JSON object on stdout and nothing else there; where it takes a file, `--json FILE` writes it there and prints the table, too.

`pliant --install-completion` teaches your shell (bash, zsh or fish) to complete commands, options and many values, such as the
names of jobs and experiments; it works in new terminals. `pliant --show-completion bash` prints what it would install.

"""


def page() -> str:
    """Return the page as it should be now."""
    root = typer.main.get_command(build())
    commands = [(path, command) for path, command in _walk(root, ("pliant",)) if not hasattr(command, "commands")]
    lines = [HEAD, "| command | what it does |", "|---|---|"]
    for path, command in commands:
        name = " ".join(path)
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(_first_line(command))} |")
    for path, command in commands:
        lines += ["", *_section(path, command)]
    return "\n".join(lines).rstrip() + "\n"


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands in the order of `pliant -h`, those of a group after its name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden and (name not in REPRO_COMMANDS or len(path) > 1):
            yield from _walk(inner, (*path, name))


def _section(path: tuple[str, ...], command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([*path, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
    lines = [f"## {' '.join(path)}", "", f"    {usage}", "", _text(command.help)]
    if arguments and any(each.help for each in arguments):
        lines += ["", "| argument | what |", "|---|---|"]
        lines += [f"| {_code(_argument(each))} | {_cell(each.help or '')} |" for each in arguments]
    if options:
        lines += ["", "| option | what |", "|---|---|"]
        lines += [f"| {_names(each)} | {_cell(each.help or '')}{_default(each)} |" for each in options]
    if rare := [each for each in command.params if each.param_type_name == "option" and each.hidden]:
        lines += ["", "Rarely needed: " + "; ".join(f"{_names(each)} {_lower(each.help)}" for each in rare) + "."]
    return lines


def _lower(help_: str | None) -> str:
    """Return a help text as a part of a sentence."""
    text = _cell(help_ or "").rstrip(".")
    return f"({text[:1].lower()}{text[1:]})"


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    name = name if param.nargs == 1 or "..." in name else f"{name}..."
    return name if param.required or name.startswith("[") else f"[{name}]"


def _names(param: Any) -> str:
    """Return all spellings of an option, with its value after the last one."""
    on = ", ".join(f"`{name}`" for name in sorted(param.opts, key=lambda name: name.startswith("--")))
    if param.is_flag:
        return f"{on} / {', '.join(f'`{name}`' for name in param.secondary_opts)}" if param.secondary_opts else on
    takes = param.metavar or ("INTEGER" if "int" in type(param.type).__name__.lower() else "TEXT")
    last = on.rpartition("`")[0].rpartition("`")[2]
    return f"{on[: -len(last) - 2]}{_code(f'{last} {takes}')}" + (", may be repeated" if param.multiple else "")


def _default(param: Any) -> str:
    """Return the default as a part of the help text, unless the text names it."""
    value = param.default() if callable(param.default) else param.default
    if param.required:
        return " Required."
    if isinstance(value, bool) and param.is_flag:
        return " On by default." if value and param.secondary_opts else ""
    if value in (None, "", (), 0, "0") or type(value).__name__ == "Sentinel" or "default" in (param.help or ""):
        return ""
    # The page must not show on whose machine it was made.
    return f" Default: {_code(str(value).replace(str(Path.home()), '~'))}."


def _first_line(command: Any) -> str:
    return _text(command.help).split("\n\n")[0].replace("\n", " ")


def _text(help_: str | None) -> str:
    """Return a docstring as paragraphs. Text that is indented or follows a \\b line stays as it is."""
    paragraphs = inspect.cleandoc((help_ or "").partition("\f")[0]).split("\n\n")
    return "\n\n".join(_paragraph(each) for each in paragraphs)


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return "\n".join(f"    {line}" for line in text.splitlines()[1:])
    return text


def _code(text: str) -> str:
    """Return code for a table cell, where a | would end the cell even between backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where the page is stale.")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        sys.exit("docs/cli.md is stale: run `python scripts/cli_reference.py`")


if __name__ == "__main__":
    main()
