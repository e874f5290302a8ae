"""Writes docs/cli.md from the commands themselves: `python scripts/cli_reference.py`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pliant.cli.main import REPRO_COMMANDS, build

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """\
# The command line

Made from the code by `python scripts/cli_reference.py`; do not edit. `pliant COMMAND -h` shows the same in a terminal.
Flags that KungFu has may be written as there, with one dash (`-np 4`, `-np=4`). [Exit codes](exit-codes.md) are on a page of their own.
The package `pliant-repro` adds `bench`, `demo`, `lab` and `reproduce`, which explain themselves with `-h`.
`pliant --install-completion` teaches your shell to complete commands, options and names of jobs.

## Options of several commands
"""
SEVERAL = 3
"""An option that at least so many commands have in the same words is explained once."""


def page() -> str:
    """Return the page as it should be now."""
    root = typer.main.get_command(build())
    commands = [(path, command) for path, command in _walk(root, ("pliant",)) if not hasattr(command, "commands")]
    rows = Counter(row for _, command in commands for row in _option_rows(command))
    common = {row for row, count in rows.items() if count >= SEVERAL}
    lines = [HEAD, *sorted(common)]
    for path, command in commands:
        lines += ["", *_section(path, command, common)]
    return "\n".join(lines).rstrip() + "\n"


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands in the order of `pliant -h`, those of a group after its name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden and (name not in REPRO_COMMANDS or len(path) > 1):
            yield from _walk(inner, (*path, name))


def _section(path: tuple[str, ...], command: Any, common: set[str]) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    lines = [f"## {' '.join(path)}", ""]
    if arguments:
        lines += [f"    {' '.join([*path, '[OPTIONS]', *map(_argument, arguments)])}", ""]
    lines.append(_text(command.help))
    if explained := [each for each in arguments if each.help]:
        lines += ["", *(f"- `{_argument(each)}`: {_one_line(each.help)}" for each in explained)]
    if rows := [row for row in _option_rows(command) if row not in common]:
        lines += ["", *rows]
    if shared := [_names(each) for each in _options(command) if _option_row(each) in common]:
        lines += ["", f"Also {', '.join(shared)}."]
    if rare := [each for each in command.params if each.hidden and each.help]:
        lines += ["", "Rarely needed:", "", *map(_option_row, rare)]
    return lines


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and not each.hidden]


def _option_rows(command: Any) -> list[str]:
    return [_option_row(each) for each in _options(command)]


def _option_row(option: Any) -> str:
    return f"- {_names(option)}: {_one_line(option.help)}{_default(option)}"


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    name = name if param.nargs == 1 or "..." in name else f"{name}..."
    return name if param.required or name.startswith("[") else f"[{name}]"


def _names(param: Any) -> str:
    """Return the spellings of an option, without long ones with one dash, and its value after the last one."""
    spellings = [name for name in sorted(param.opts, key=len) if len(name) <= 3 or f"-{name}" not in param.opts]
    if param.secondary_opts:
        spellings[-1] += f" / {param.secondary_opts[0]}"
    elif not param.is_flag:
        spellings[-1] += f" {param.metavar or ('INTEGER' if 'int' in type(param.type).__name__.lower() else 'TEXT')}"
    return ", ".join(f"`{name}`" for name in spellings)


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
    return f" Default: `{str(value).replace(str(Path.home()), '~')}`."


def _text(help_: str | None) -> str:
    """Return a docstring as paragraphs. Text that is indented or follows a \\b line stays as it is."""
    paragraphs = inspect.cleandoc((help_ or "").partition("\f")[0]).split("\n\n")
    return "\n\n".join(_paragraph(each) for each in paragraphs)


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return "\n".join(f"    {line}" for line in text.splitlines()[1:])
    return text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page())
