"""Writes the signatures in docs/api.md from the code: `python scripts/api_reference.py`.

The page has markers, and the script writes what belongs to a marker between it and `<!-- end -->`:

- `<!-- api: pliant.join -->`: the signature, the first sentence of the docstring and the public members.
- `<!-- api: pliant.Job: rank step -->`: the same with these members only.
- `<!-- api: pliant.Resize pliant.ProbeLinks -->`: a line for each name.

All other text is written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
NO_SIGNATURE = {"pliant.Job", "pliant.train.step.Step", "pliant.comm.engine.Engine", "pliant.comm.handle.Handle"}
"""Classes that users do not construct."""
BLOCK = re.compile(r"<!-- api: (.+?) -->\n(?:.*?<!-- end -->\n)?", re.DOTALL)


def page(text: str) -> str:
    """Return the page `text` with all blocks as they should be now."""
    return BLOCK.sub(lambda found: f"<!-- api: {found[1]} -->\n{_describe(found[1])}\n<!-- end -->\n", text)


def names(marker: str) -> list[str]:
    """Return the names that a marker asks for, without the members that it lists."""
    return marker.partition(":")[0].split()


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


def _describe(marker: str) -> str:
    if len(names(marker)) > 1:
        return "\n".join(_line(name + _signature(find(name)), _first_sentence(find(name))) for name in names(marker))
    [name], members = names(marker), marker.partition(":")[2].split()
    found = find(name)
    shown = f"class {name}" if name in NO_SIGNATURE else f"{name}{_signature(found)}"
    lines = [f"### {name.removeprefix('pliant.')}", "", "```python", shown, "```", "", _first_sentence(found)]
    described = list(_members(found, members)) if inspect.isclass(found) else []
    return "\n".join([*lines, "", *described] if described else lines)


def _members(owner: type, chosen: list[str]) -> Iterator[str]:
    """Yield a line for each chosen (or else public) method, property and documented field, in the order of the source."""
    for name, value in vars(owner).items():
        if name.startswith("_") or (chosen and name not in chosen):
            continue
        if isinstance(value, property):
            yield _line(name, _first_sentence(value.fget))
        elif isinstance(value, classmethod | staticmethod):
            yield _line(name + _signature(value.__func__), _first_sentence(value.__func__))
        elif inspect.isfunction(value):
            yield _line(name + _signature(value), _first_sentence(value))
    for name, sentence in _field_sentences(owner).items():
        if not chosen or name in chosen:
            yield _line(name, sentence)


def _line(code: str, sentence: str) -> str:
    return f"- `{code}`: {sentence}" if sentence else f"- `{code}`"


def _field_sentences(owner: type) -> dict[str, str]:
    """Return the first sentences of the strings below the fields of a class."""
    source = inspect.getsource(owner)
    return {
        name: _cut(text) for name, text in re.findall(r"^    (\w+): [^\n]*\n    \"\"\"(.*?)\"\"\"", source, re.M | re.S)
    }


class _Dots:
    """Stands for a default that is an object or a function."""

    def __repr__(self) -> str:
        return "..."


def _signature(found: Any) -> str:
    """Return the signature without `self` and without types."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    parameters = []
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        default = each.default
        if "object at 0x" in repr(default) or "<factory>" in repr(default) or callable(default):
            default = _Dots() if default is not inspect.Parameter.empty else default
        parameters.append(each.replace(annotation=inspect.Parameter.empty, default=default))
    return str(inspect.Signature(parameters))


def _first_sentence(found: Any) -> str:
    return _cut(inspect.getdoc(found) or "")


def _cut(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s", paragraph)[0]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
