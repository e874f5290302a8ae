"""Helpers for results: spreads, finding cells, and numbers as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from pliant_repro.contest import Summary

Result = dict[str, Any]
"""A result in the one form, or one of its cells."""


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def timed(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return median and spread under the names of the one form; nulls where nothing was measured."""
    return dict(Summary.of(seconds).to_json()) if seconds else {"median_s": None, "iqr_s": None}


def pick(cells: Iterable[Result], **wanted: object) -> Result | None:
    """Return the first cell with these values, or None."""
    return next((one for one in cells if all(one.get(key) == value for key, value in wanted.items())), None)


def names_in(cells: Iterable[Result]) -> list[str]:
    """Return the models of the cells, in their order."""
    return list(dict.fromkeys(str(one["model"]) for one in cells))


def show(value: object, form: str = ".1f", unit: str = "") -> str:
    """Return a number as text, or a dash where there is none."""
    return format(value, form) + unit if isinstance(value, (int, float)) else "-"


def show_span(values: Iterable[float | None], form: str = ".2f") -> str:
    """Return the least and the greatest of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, most = format(min(known), form), format(max(known), form)
    return least if least == most else f"{least} to {most}"


def show_time(seconds: object) -> str:
    """Return seconds as text: milliseconds below 1 s."""
    if not isinstance(seconds, (int, float)):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def clock(seconds: float) -> str:
    """Return seconds as 5:19 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
