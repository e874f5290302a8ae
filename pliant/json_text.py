"""Reads JSON that others have written: what is nested deeper than any text of ours is a ValueError, not a RecursionError."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 100
"""Objects and lists within each other; nothing that pliant writes has more than ten."""


class NestedTooDeeplyError(ValueError):
    """The JSON has more levels than `MOST_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"it is nested deeper than {MOST_LEVELS} levels")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise NestedTooDeeplyError from None
    if (
        text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    ) > MOST_LEVELS:
        _check_levels(value)
    return value


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, list | dict)
        ]
        if not level:
            return
    raise NestedTooDeeplyError
