"""Writes the signatures in docs/api.md from the code: `python scripts/api_reference.py`; `--check` fails if they are stale.

The page has a marker for each public name, `<!-- api: pliant.join -->`. The script writes the name's signature, the first
sentence of its docstring and its public members between the marker and `<!-- end -->`. All other text is written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
MADE_BY_PLIANT = {"pliant.Job", "pliant.comm.engine.Engine", "pliant.comm.handle.Handle"}
"""Classes whose constructor is not for users."""
BLOCK = re.compile(r"<!-- api: (\S+) -->\n(?:.*?<!-- end -->\n)?", re.DOTALL)


def page(text: str) -> str:
    """Return the page `text` with all blocks as they should be now."""
    return BLOCK.sub(lambda found: f"<!-- api: {found[1]} -->\n{_describe(found[1])}\n<!-- end -->\n", text)


def find(name: str) -> Any:
    """Return the object of a dotted name."""
    words = name.split(".")
    for split in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:split]))
        except ModuleNotFoundError:
            continue
        for word in words[split:]:
            found = getattr(found, word)
        return found
    raise LookupError(f"docs/api.md: there is no {name}")


def _describe(name: str) -> str:
    found = find(name)
    if inspect.ismodule(found):
        own = [each for each in vars(found).values() if getattr(each, "__module__", "") == name]
        public = [each for each in own if callable(each) and not each.__name__.startswith("_")]
        return "\n".join(_line(each.__name__ + _signature(each), _first_sentence(each)) for each in public)
    shown = f"class {name}" if name in MADE_BY_PLIANT else f"{name}{_signature(found)}"
    lines = [f"### {name.removeprefix('pliant.')}", "", "```python", shown, "```", ""]
    lines.append(_first_sentence(found))
    members = list(_members(found)) if inspect.isclass(found) else []
    return "\n".join([*lines, "", *members] if members else lines)


def _members(owner: type) -> Iterator[str]:
    """Yield a line for each public method, property and documented field, in the order of the source."""
    fields = _field_sentences(owner)
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield _line(name, _first_sentence(value.fget))
        elif isinstance(value, classmethod | staticmethod):
            yield _line(name + _signature(value.__func__), _first_sentence(value.__func__))
        elif inspect.isfunction(value):
            yield _line(name + _signature(value), _first_sentence(value))
    known = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    for field in known:
        if sentence := fields.get(field.name):
            yield _line(field.name, sentence)


def _line(code: str, sentence: str) -> str:
    return f"- `{code}`: {sentence}" if sentence else f"- `{code}`"


def _field_sentences(owner: type) -> dict[str, str]:
    """Return the first sentences of the strings below the fields of a class."""
    source = inspect.getsource(owner)
    return {
        name: _cut(text) for name, text in re.findall(r"^    (\w+): [^\n]*\n    \"\"\"(.*?)\"\"\"", source, re.M | re.S)
    }


class _Verbatim:
    """An annotation or a default that is printed as it stands in the source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(found: Any) -> str:
    """Return the signature without `self` and without quotes around annotations."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    parameters = []
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        annotation = _Verbatim(each.annotation) if isinstance(each.annotation, str) else each.annotation
        default = each.default
        if "object at 0x" in repr(default) or "<factory>" in repr(default) or callable(default):
            default = _Verbatim("...") if default is not inspect.Parameter.empty else default
        parameters.append(each.replace(annotation=annotation, default=default))
    returns = signature.return_annotation
    if returns in ("None", None) or inspect.isclass(found):
        returns = inspect.Signature.empty
    elif isinstance(returns, str):
        returns = _Verbatim(returns)
    return str(inspect.Signature(parameters, return_annotation=returns))


def _first_sentence(found: Any) -> str:
    return _cut(inspect.getdoc(found) or "")


def _cut(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s", paragraph)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if the page is stale.")
    now = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(page(now))
    elif page(now) != now:
        sys.exit("docs/api.md is stale: run `python scripts/api_reference.py`")


if __name__ == "__main__":
    main()
