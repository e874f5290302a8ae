"""What commands that measure have around it: a clean end, a wide page for tables, numbers as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import typer

from pliant.cli.output import check_writable, exit_on_sigterm, is_stdout, save_json, show_progress, wide_console
from pliant.machine import Json


def measured(
    json_file: Path | None, measure: Callable[[Callable[[str, float], None]], Json], show: Callable[[Json], None]
) -> None:
    """Measure, keep the result where `--json` says, show it with its remarks; code 1 where it is not ok."""
    check_writable(json_file)
    with exit_on_sigterm(), show_progress() as progress:
        result = measure(progress)
    save_json(result, json_file)
    if not is_stdout(json_file):
        show(result)
        for remark in cast("list[str]", result["remarks"]):
            wide_console().print(f"note: {remark}", highlight=False, markup=False)
    if not result["ok"]:
        raise typer.Exit(1)


def milliseconds(seconds: object) -> str:
    """Three digits, or all those before the point."""
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def ratio(value: object, unit: str) -> str:
    return f"{value:.3g}{unit}" if isinstance(value, float) else "-"
