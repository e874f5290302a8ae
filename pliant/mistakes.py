"""What is wrong in values that people wrote, in our words: the refusals of pydantic's models, and where each belongs.

`page` knows the lines; which keys there are, the model says.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a job."""
Place = tuple[str | int, ...]
"""The way to a value through mappings and lists, as `Page.line` takes it."""

_KINDS = {
    "int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false", "string": "text",
    "tuple": "a list, as in [a, b]", "dict": "a mapping, as in {a: b}", "model": "a mapping, as in {a: b}",
}  # fmt: skip


def mistakes(
    error: ValidationError,
    model: type[BaseModel],
    *,
    examples: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> dict[Place, str]:
    """One line for each of the user's mistakes, by its place.

    `examples` says what to add where a key is missing; `hidden` are keys that users do not write.
    """
    found: dict[Place, str] = {}
    for detail in error.errors():
        # Not a mistake of its own: a default could not be had, because a value before it is wrong.
        if detail["type"] != "default_factory_not_called":
            found.setdefault(_place(detail), _told(detail, model, examples or {}, hidden))
    return found


def _place(detail: ErrorDetails) -> Place:
    if detail["type"] == "value_error" and not detail["loc"]:
        # What does not fit together is told at the key that the message begins with.
        return tuple(str(detail["ctx"]["error"]).split()[0].rstrip(":").split("."))
    return detail["loc"]


def _told(detail: ErrorDetails, model: type[BaseModel], examples: Mapping[str, str], hidden: Collection[str]) -> str:
    loc, given = detail["loc"], detail["input"]
    key = ".".join(str(step) for step in loc if step != "[key]")
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            known = [name for name in keys_under(model, loc[:-1]) if name not in hidden]
            return unknown_key(key, str(loc[-1]), known)
        case "missing":
            return f"{key} is missing: add {examples.get(key, key)}"
        case "value_error":
            return f"{key} {limits['error']}" if key else str(limits["error"])
        case "greater_than_equal" | "less_than_equal" | "greater_than" | "less_than":
            bound, side = next((limits[side], side) for side in ("ge", "le", "gt", "lt") if side in limits)
            words = {
                "ge": f"{bound} or more", "le": f"{bound} or less", "gt": f"more than {bound:g}", "lt": f"less than {bound:g}",
            }  # fmt: skip
            return f"{key} {given!r:.60}: use {words[side]}"
        case "literal_error":
            return f"{key} {given!r:.60} is not known: use {str(limits['expected']).replace(repr('') + ', ', '')}"
        case _:
            wanted = next((word for begin, word in _KINDS.items() if detail["type"].startswith(begin)), detail["msg"])
            return f"{key} {given!r:.60}: use {wanted}"


def unknown_key(key: str, last: str, known: Collection[str]) -> str:
    """What to say of a key that is none of `known`."""
    near = difflib.get_close_matches(last, known, 1)
    return f"unknown key {key!r}: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def keys_under(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that a model has at a place within it; none where there is no model."""
    for step in place:
        field = model.model_fields.get(str(step))
        if field is None:
            return []
        kinds = [field.annotation, *get_args(field.annotation)]
        below = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if below is None:
            return []
        model = below
    return list(model.model_fields)


def wrong_name(name: str) -> str:
    """What is wrong with it as the name of a job; empty: nothing."""
    if NAME.fullmatch(name):
        return ""
    return f"{name!r:.80}: use up to 64 letters, digits, . _ and -, beginning with a letter or digit"


def first_name(path: Path) -> str:
    """For the job of a file that gives it none: the file's, with a number."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem).strip('._-')[:58] or 'job'}-1"


def free_name(name: str, taken: Collection[str]) -> str:
    """The same with the first number that makes it none of `taken`."""
    stem = name.rpartition("-")[0]
    return next(f"{stem}-{number}" for number in itertools.count(1) if f"{stem}-{number}" not in taken)
